"""A certificate that was changed after it was sealed is never intact, and another file is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from each import of_each
from made_records import record

from pytest_gpucluster.analysis.certificate import read_certificate
from pytest_gpucluster.errors import CertificateError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return record(tmp_path, "accepted").path


def test_an_unchanged_certificate_is_intact_and_accepted_in_any_layout(path):
    document = read_certificate(path)
    assert (document.is_intact, document.is_accepted) == (True, True)
    assert document.record["made"] == {"at": "2026-01-02T03:04:05Z", "by": "J. Doe", "note": "", "version": "0.1.0"}
    path.write_text(json.dumps(json.loads(path.read_text()), sort_keys=True, indent=7))
    assert read_certificate(path).is_intact
    contradiction = record(path.parent, "x", lambda found: found[0].update(rehearsal=True))
    assert not contradiction.is_accepted


def _leaves(value: Any, where: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if isinstance(value, dict) and value:
        for key, each in value.items():
            yield from _leaves(each, (*where, key))
    elif isinstance(value, list) and value:
        for index, each in enumerate(value):
            yield from _leaves(each, (*where, index))
    else:
        yield where


def _put(content: Any, where: tuple[Any, ...], value: Any) -> None:
    for key in where[:-1]:
        content = content[key]
    content[where[-1]] = value


def test_no_value_anywhere_can_be_changed_without_being_noticed(path):
    text = path.read_text()
    leaves = list(_leaves(json.loads(text)["record"]))
    assert len(leaves) > 500
    for where in leaves[:40] + leaves[40::97]:
        content = json.loads(text)
        _put(content["record"], where, "changed")
        path.write_text(json.dumps(content))
        try:
            assert not read_certificate(path).is_intact, where
        except CertificateError:
            assert len(where) <= 1  # what is of another type now is no certificate any more


@of_each(
    "change",
    [
        lambda content: content["nodes"][0]["gpus"].pop(),
        lambda content: content["tests"].append(content["tests"][0]),
        lambda content: content.update(stranger=True),
    ],
)
def test_nothing_can_be_taken_out_or_put_in(tmp_path, change):
    path = record(tmp_path, "accepted").path
    content = json.loads(path.read_text())
    change(content["record"])
    path.write_text(json.dumps(content))
    assert not read_certificate(path).is_intact


NO_CERTIFICATE = {
    "": "cut off",
    "{": "cut off",
    "[1]": "",
    '{"record": {"format": "another"}}': "",
    '{"a": 1, "a": 2}': "'a' .*twice",
    '{"a": NaN}': "NaN",
    "[" * 100_000: "cut off",
}


def test_what_is_no_certificate_is_refused(tmp_path):
    for number, (text, why) in enumerate(NO_CERTIFICATE.items()):
        path = tmp_path / f"{number}.json"
        path.write_text(text)
        with pytest.raises(CertificateError, match=f"^{path}.*{why}"):
            read_certificate(path)
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    for path in (tmp_path / "none", tmp_path, tmp_path / "binary"):
        with pytest.raises(CertificateError, match=f"^{path}"):
            read_certificate(path)


@of_each(
    "case",
    [
        (("record", "schema_version"), 2, "schema_version 2; .* 1"),
        (("record", "schema_version"), "1", "schema_version"),
        (("record", "schema_version"), True, "schema_version"),
        (("record", "nodes"), {}, "'nodes' .*list"),
        (("record", "accepted"), "true", "'accepted'"),
        (("record", "made"), None, "'made' .*object"),
        (("sha256",), 5, "sha256"),
        (("digest",), "MD5", "sha256"),
        (("accepted",), True, "'accepted' .*outside"),
        (("record", "made", "at"), 1e400, "Infinity"),
    ],
    name=lambda case: f"{'.'.join(case[0])} {case[1]!r}",
)
def test_what_is_damaged_or_newer_is_refused(tmp_path, case):
    where, value, why = case
    path = record(tmp_path, "accepted").path
    content = json.loads(path.read_text())
    _put(content, where, value)
    path.write_text(json.dumps(content))
    with pytest.raises(CertificateError, match=why):
        read_certificate(path)
