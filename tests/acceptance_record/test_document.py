"""A record that was changed after it was sealed is never intact, and what is no record is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from made_records import record

from pytest_gpucluster.acceptance_record.document import read
from pytest_gpucluster.errors import RecordError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return record(tmp_path, "accepted").path


def test_a_record_that_nobody_touched_is_intact_and_accepted(path):
    document = read(path)
    assert (document.is_intact, document.is_accepted) == (True, True)
    assert document.record["made"] == {"at": "2026-01-02T03:04:05Z", "by": "J. Doe", "note": "", "version": "0.1.0"}


def test_white_space_and_the_order_of_keys_do_not_count(path):
    told = json.loads(path.read_text())
    path.write_text(json.dumps(told, sort_keys=True, indent=7))
    assert read(path).is_intact


def _leaves(value: Any, where: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if isinstance(value, dict) and value:
        for key, each in value.items():
            yield from _leaves(each, (*where, key))
    elif isinstance(value, list) and value:
        for index, each in enumerate(value):
            yield from _leaves(each, (*where, index))
    else:
        yield where


def _put(told: Any, where: tuple[Any, ...], value: Any) -> None:
    for key in where[:-1]:
        told = told[key]
    told[where[-1]] = value


def test_no_value_anywhere_can_be_changed_without_being_noticed(path):
    text = path.read_text()
    leaves = list(_leaves(json.loads(text)["record"]))
    assert len(leaves) > 500
    for where in leaves[:40] + leaves[40::97]:
        told = json.loads(text)
        _put(told["record"], where, "changed")
        path.write_text(json.dumps(told))
        try:
            assert not read(path).is_intact, where
        except RecordError:
            assert len(where) <= 1  # what is of another type now is no record any more


@pytest.mark.parametrize("what", ["a GPU", "a test", "a key"])
def test_nothing_can_be_taken_out_or_put_in(path, what):
    told = json.loads(path.read_text())
    if what == "a GPU":
        told["record"]["nodes"][0]["gpus"].pop()
    elif what == "a test":
        told["record"]["tests"].append(told["record"]["tests"][0])
    else:
        told["record"]["stranger"] = True
    path.write_text(json.dumps(told))
    assert not read(path).is_intact


def test_a_sealed_record_that_contradicts_itself_is_not_accepted(tmp_path):
    document = record(tmp_path, "x", lambda found: found[0].update(rehearsal=True))
    assert not document.is_accepted


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "no acceptance record, or cut off"),
        ("{", "no acceptance record, or cut off"),
        ("[1]", "not an acceptance record of this project"),
        ('{"record": {"format": "another"}}', "not an acceptance record of this project"),
        ('{"a": 1, "a": 2}', "the key 'a' stands twice in one object"),
        ('{"a": NaN}', "NaN is no JSON"),
        ("[" * 100_000, "no acceptance record, or cut off"),
    ],
    ids=range(7),
)
def test_what_is_no_record_is_refused(tmp_path, text, why):
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(RecordError, match=why) as error:
        read(path)
    assert str(error.value).startswith(str(path))


def test_a_missing_file_a_folder_and_binary_data_are_refused(tmp_path):
    with pytest.raises(RecordError, match="no such file"):
        read(tmp_path / "none")
    with pytest.raises(RecordError, match="cannot be read"):
        read(tmp_path)
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(RecordError, match="not UTF-8"):
        read(tmp_path / "binary")


@pytest.mark.parametrize(
    ("where", "value", "why"),
    [
        (("record", "schema_version"), 2, "written with schema_version 2; this version reads up to 1"),
        (("record", "schema_version"), "1", "has no schema_version"),
        (("record", "schema_version"), True, "has no schema_version"),
        (("record", "nodes"), {}, "'nodes' must be there, as a list"),
        (("record", "accepted"), "true", "'accepted' must be there, as true or false"),
        (("record", "made"), None, "'made' must be there, as an object"),
        (("sha256",), 5, "it must say sha256"),
        (("digest",), "MD5", "it must say sha256"),
        (("accepted",), True, "'accepted' stands outside of what is sealed"),
        (("record", "made", "at"), 1e400, "Infinity is no JSON"),
        (("record", "made", "at"), "\ud800", "lone surrogate"),
    ],
    ids=lambda value: ".".join(value) if isinstance(value, tuple) else None,
)
def test_what_is_damaged_or_newer_is_refused(path, where, value, why):
    told = json.loads(path.read_text())
    _put(told, where, value)
    path.write_text(json.dumps(told))
    with pytest.raises(RecordError, match=why):
        read(path)


def test_a_number_beyond_all_measure_is_damage(path):
    text = path.read_text()
    path.write_text(text.replace('"world_size": 16', f'"world_size": {"9" * 400}'))
    with pytest.raises(RecordError, match="damaged: inf is no JSON number"):
        read(path)
