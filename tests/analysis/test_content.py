"""What a certificate holds; one that was changed after it was sealed is never intact, and another file is refused."""

import json

import pytest
from each import of_each
from journal_lines import journal_of
from made_records import DIGEST, line_of, lines, record

from pytest_gpucluster.analysis.certificate import canonical, certificate_content, read_certificate
from pytest_gpucluster.errors import CertificateError


def made(found):
    return certificate_content(journal_of(found), sha256=DIGEST)


def test_every_gpu_stands_in_its_node_with_all_that_identifies_it():
    content = made(lines())
    assert content["accepted"] is True
    assert content["missing"] == []
    assert [(node["host"], len(node["gpus"])) for node in content["nodes"]] == [("gpu-01", 8), ("gpu-02", 8)]
    known = line_of(lines(), "cluster")["ranks"][9]
    gpu = content["nodes"][1]["gpus"][1]
    assert gpu["rank"] == 9
    keys = ("uuid", "serial", "board_part_number", "vbios", "inforom", "gsp_firmware", "pci_bus_id", "name")
    assert [gpu[key] for key in keys] == [known["gpu"][key] for key in keys]
    assert content["nodes"][1]["versions"]["driver"] == known["versions"]["driver"]
    assert content["nodes"][1]["adapters"][1] == {
        "name": "mlx5_1",
        "guid": "a0:11",
        "board": "MT_838",
        "firmware": "28.39",
        "pci_bus_id": "0:11",
    }


def test_what_is_not_known_is_named():
    found = lines()
    ranks = line_of(found, "cluster")["ranks"]
    del ranks[2]["gpu"]["serial"]
    ranks[3]["gpu"]["serial"] = None
    ranks[8]["gpu"]["inforom"] = ""
    for rank in ranks[8:]:
        rank["versions"]["nccl"] = None
    telemetry = line_of(found, "test")["measurements"][-1]["telemetry"]
    del telemetry["8"]
    telemetry["0"]["adapters"][1]["guid"] = ""
    missing = [("serial", "ranks 2-3"), ("InfoROM", "rank 8"), ("GUID of mlx5_1", "gpu-01"), ("nccl", "gpu-02")]
    missing.append(("network adapters", "gpu-02"))
    texts = made(found)["missing"]
    assert [(text.startswith(what), text.endswith(of)) for text, (what, of) in zip(texts, missing, strict=True)] == (
        [(True, True)] * 5
    )


def test_any_journal_can_be_made_a_record_that_has_a_canonical_form():
    for name in ("cluster", "rehearsal", "broken", "hostile"):
        content = made(lines(name))
        assert canonical(content)
        assert (content["accepted"], bool(content["not_accepted_because"])) == (False, True)
    found = lines()
    line_of(found, "test")["measurements"][0].update(value="NaN", margin="-Infinity")
    first = made(found)["tests"][0]["measurements"][0]
    assert (first["value"], first["margin"]) == ("NaN", "-Infinity")


def test_a_merged_run_names_the_runs_that_it_is_made_of():
    found = lines()
    assert (made(found)["run"]["merged_from"], made(found)["run"]["expected"]) == ([], "2x8xH100")
    one = {"run_id": "a", "started_at": "2026-01-02", "verdict": "REJECTED", "journal": "x", "sha256": DIGEST}
    found[0]["merged_from"] = [{**one, "exit": 1}]
    content = made(found)
    assert content["run"]["merged_from"] == [one]
    assert content["accepted"] is True


def test_every_value_has_its_limit_its_margin_and_where_the_limit_comes_from():
    journal = journal_of(lines())
    content = certificate_content(journal, sha256=DIGEST)
    assert [test["nodeid"] for test in content["tests"]] == [result.nodeid for result in journal.results]
    with_limit = [each for test in content["tests"] for each in test["measurements"] if each["limit"]]
    assert with_limit
    assert all(each["limit"]["origin"] and each["limit"]["source"] for each in with_limit)
    first = next(each for each in with_limit if each["metric"] == "matmul.bf16.tflops")
    judged = next(
        one
        for result in journal.results
        for one in result.measurements
        if one.metric == "matmul.bf16.tflops" and one.limit
    )
    assert (first["value"], first["margin"], first["limit"]["min"]) == (judged.value, judged.margin, judged.limit.min)
    assert first["worst_gpu_uuid"] == journal.place(judged.worst_rank).gpu["uuid"]


@pytest.fixture
def path(tmp_path):
    return record(tmp_path, "accepted").path


def test_an_unchanged_certificate_is_intact_and_accepted_in_any_layout(path):
    document = read_certificate(path)
    assert (document.is_intact, document.is_accepted) == (True, True)
    assert document.record["made"] == {"at": "2026-01-02T03:04:05Z", "by": "J. Doe", "note": "", "version": "0.1.0"}
    path.write_text(json.dumps(json.loads(path.read_text()), sort_keys=True, indent=7))
    assert read_certificate(path).is_intact
    contradiction = record(path.parent, "x", lambda found: found[0].update(rehearsal=True))
    assert not contradiction.is_accepted


def _leaves(value, where=()):
    if isinstance(value, dict) and value:
        for key, each in value.items():
            yield from _leaves(each, (*where, key))
    elif isinstance(value, list) and value:
        for index, each in enumerate(value):
            yield from _leaves(each, (*where, index))
    else:
        yield where


def _put(content, where, value):
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
            is_intact = read_certificate(path).is_intact
        except CertificateError:  # what is of another type now is no certificate any more
            is_intact = False
        assert not is_intact, where


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
        (("record", "schema_version"), 2, "schema_version is 2; .* 1"),
        (("record", "schema_version"), "1", "schema_version"),
        (("record", "schema_version"), True, "schema_version"),
        (("record", "nodes"), {}, "nodes must be a list"),
        (("record", "nodes"), [1], r"nodes\[0\] must be a JSON object"),
        (("record", "nodes", 0), {"host": "a", "versions": {}}, r"nodes\[0\]"),
        (("record", "nodes", 0, "gpus"), "eight", r"nodes\[0\].gpus must be a list"),
        (("record", "accepted"), "true", "accepted must be true or false"),
        (("record", "made"), None, "made must be an object"),
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
