"""``gpucluster runs merge``: where it writes, what it refuses, and that what it writes is a journal."""

import hashlib

import pytest
from written_runs import HBM, MATMUL, case, measured, place, write

from pytest_gpucluster.analysis.merge_sources import load_source
from pytest_gpucluster.cli.main import main
from pytest_gpucluster.errors import JournalError
from pytest_gpucluster.journal import journal

LATER = "2026-01-03T03:04:05+00:00"


@pytest.fixture
def runs(tmp_path):
    good = measured([730, 731])
    write(tmp_path / "a", case(MATMUL, "passed", good), collected=[MATMUL, HBM], closed=False)
    write(tmp_path / "b", case(HBM, "passed", good), run_id="r2", started_at=LATER, selection=True)
    return tmp_path


@pytest.mark.parametrize(("out", "where"), [("new/folder", "new/folder/journal.jsonl"), ("m.jsonl", "m.jsonl")])
def test_what_is_written_is_a_journal_that_every_command_reads(runs, capsys, monkeypatch, out, where):
    monkeypatch.chdir(runs)
    assert main(["runs", "merge", "a", "b", "--out", out]) == 0
    assert capsys.readouterr().out.startswith("gpucluster: ACCEPTED, exit code 0: 2 passed; merged from 2 runs")
    read = journal.read(runs / where)
    assert [each.sha256 for each in read.run.merged_from] == [
        hashlib.sha256((runs / name / "journal.jsonl").read_bytes()).hexdigest() for name in "ab"
    ]
    assert read.end.by == "gpucluster runs merge"
    assert main(["verdict", str(runs / where)]) == 0
    assert main(["report", str(runs / where), "--junitxml", "out.xml"]) == 0
    assert "merged run 1 sha256" in (runs / "out.xml").read_text()


def test_a_cut_journal_is_merged_as_far_as_it_goes_and_that_is_reported(runs, capsys):
    path = runs / "a" / "journal.jsonl"
    path.write_bytes(path.read_bytes() + b'{"type":"test","nodeid":"t.py::test_cut"')
    assert main(["runs", "merge", str(runs / "a"), str(runs / "b"), "--out", str(runs / "m.jsonl")]) == 0
    assert f"{path}: its last line " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["a"], 2, "one journal cannot be merged"),
        (["a", "a"], 2, "are the same run"),
        (["a", "none"], 3, "no such journal"),
        (["a", "b", "--out", "a"], 2, "a journal is never replaced"),
        (["a", "b", "--out", "a/journal.jsonl"], 2, "a journal is never replaced"),
        (["a", "b", "--out", "file.txt/x"], 4, "--out file.txt/x"),
        (["a", "other"], 2, "other hosts: gpu-a and x"),
    ],
)
def test_what_cannot_be_done_is_reported_and_nothing_is_written(runs, capsys, monkeypatch, arguments, code, message):
    monkeypatch.chdir(runs)
    (runs / "file.txt").write_text("")
    write(runs / "other", case(HBM, "passed"), run_id="r3", ranks=[place(0, host="x")])
    before = (runs / "a" / "journal.jsonl").read_bytes()
    out = [] if "--out" in arguments else ["--out", "m.jsonl"]
    assert main(["runs", "merge", *arguments, *out]) == code
    assert message in capsys.readouterr().err
    assert not (runs / "m.jsonl").exists()
    assert (runs / "a" / "journal.jsonl").read_bytes() == before


@pytest.mark.parametrize("when", ["", "yesterday", "2026-01-02T03:04:05"])
def test_a_run_without_a_time_cannot_be_merged(tmp_path, when):
    with pytest.raises(JournalError, match="journal"):
        load_source(write(tmp_path, started_at=when))
