"""``gpucluster verdict``: the run's own exit code, also of a journal that was cut off."""

import errno
import json
import os
import re

import jsonschema
import pytest

from pytest_gpucluster.cli import main
from pytest_gpucluster.journal import journal
from pytest_gpucluster.journal.verdict import EXIT_CODES, RUNNING_EXIT
from pytest_gpucluster.reports.results_json import results_schema

RUN = {"type": "run", "schema_version": 1, "run_id": "r", "started_at": "x", "nnodes": 2, "world_size": 16}
FAILED = {"type": "test", "nodeid": "t.py::test_it", "criterion": "hbm", "outcome": "failed", "message": "slow"}


def write(folder, *lines):
    path = folder / "journal.jsonl"
    path.write_bytes(b"".join(journal.encode(line) for line in (RUN, *lines)))
    return path


@pytest.mark.parametrize("code", EXIT_CODES)
def test_the_exit_code_is_the_runs_own(tmp_path, capsys, code):
    path = write(
        tmp_path, {"type": "end", "verdict": "ACCEPTED" if code == 0 else "BROKEN", "exit": code, "reason": "so"}
    )
    assert main.main(["verdict", str(path)]) == code
    word = "ACCEPTED" if code == 0 else "BROKEN"
    assert capsys.readouterr().out == f"gpucluster: {word}, exit code {code}: so\n"


def test_a_journal_that_was_cut_off_is_broken_or_rejected(tmp_path, capsys):
    path = write(tmp_path, {"type": "start", "nodeid": "t.py::test_it"})
    assert main.main(["verdict", str(tmp_path)]) == 11
    assert re.fullmatch(r"gpucluster: BROKEN, exit code 11: .* t\.py::test_it\n", capsys.readouterr().out)
    write(tmp_path, FAILED)
    assert main.main(["verdict", str(tmp_path)]) == 1
    path.write_bytes(path.read_bytes()[:-9])
    assert main.main(["verdict", str(tmp_path)]) == 11


@pytest.fixture
def going_on(tmp_path):
    """A journal whose writer is alive: one test has failed, the next one is running."""
    writer = journal.JournalWriter(tmp_path / "journal.jsonl")
    for line in (RUN, FAILED, {"type": "start", "nodeid": "t.py::test_next", "at": "2026-01-02T03:09:05+00:00"}):
        writer.append(journal.encode(line))
    yield writer
    writer.close()


def test_a_run_whose_recorder_is_alive_is_running_and_never_a_pass(tmp_path, capsys, going_on):
    assert main.main(["verdict", str(tmp_path), "--json", str(tmp_path / "o")]) == RUNNING_EXIT != 0
    answer = json.loads((tmp_path / "o").read_text())
    assert (answer["verdict"], answer["exit"], answer["ended"]) == ("RUNNING", RUNNING_EXIT, False)
    assert "t.py::test_next" in answer["reason"]
    assert "2026-01-02T03:09:05+00:00" in answer["reason"]
    assert answer["failure"] == "hbm: slow"
    assert "RUNNING" in capsys.readouterr().out
    # With the launcher's exit code the run counts as ended.
    assert main.main(["verdict", str(tmp_path), "--launcher-exit=0"]) == 1


def test_what_ends_a_running_run_is_its_last_line_or_the_end_of_its_recorder(tmp_path, capsys, going_on):
    going_on.append(b'{"type":"end","verdict":"ACC')
    assert main.main(["verdict", str(tmp_path)]) == RUNNING_EXIT
    going_on.append(b'EPTED","exit":0}\n')
    assert main.main(["verdict", str(tmp_path)]) == 0
    write(tmp_path, {"type": "start", "nodeid": "t.py::test_it"})
    going_on.close()
    assert main.main(["verdict", str(tmp_path)]) == 11


def test_where_there_are_no_locks_no_run_is_running(tmp_path, monkeypatch, going_on):
    def refuse(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(journal.fcntl, "flock", refuse)
    assert main.main(["verdict", str(tmp_path)]) == 1


def test_reports_of_a_running_run_say_so_and_its_junit_stays_pessimistic(tmp_path, capsys, going_on):
    assert main.main(["report", str(tmp_path), "--all", str(tmp_path / "all")]) == 0
    results = json.loads((tmp_path / "all" / "results.json").read_text())
    jsonschema.validate(results, results_schema())
    assert (results["verdict"]["word"], results["verdict"]["accepted"]) == ("RUNNING", False)
    [now] = [test for test in results["tests"] if test["outcome"] == "in progress"]
    assert (now["nodeid"], now["started_at"]) == ("t.py::test_next", "2026-01-02T03:09:05+00:00")
    page = (tmp_path / "all" / "report.html").read_text()
    assert "<h1>RUNNING</h1>" in page
    assert "the journal has no end" not in page
    assert "RUNNING" in (tmp_path / "all" / "report.txt").read_text()
    junit = (tmp_path / "all" / "junit.xml").read_text()
    assert 'name="verdict" value="REJECTED"' in junit
    assert 'errors="1"' in junit
    assert main.main(["runs", "merge", str(tmp_path), str(tmp_path), "--out", str(tmp_path / "m")]) == 3


def test_the_answer_is_written_as_json(tmp_path, capsys):
    path, out = (
        write(tmp_path, FAILED, {"type": "end", "verdict": "REJECTED", "exit": 1, "reason": "hbm"}),
        tmp_path / "o",
    )
    assert main.main(["verdict", str(path), "--json", str(out)]) == 1
    assert json.loads(out.read_text()) == {
        "schema_version": 1,
        "verdict": "REJECTED",
        "exit": 1,
        "reason": "hbm",
        "failure": "hbm: slow",
        "ended": True,
        "kind": "",
        "nnodes": 2,
        "world_size": 16,
        "run_id": "r",
        "journal": str(path),
    }


def test_no_journal_and_no_room_for_the_answer_are_no_pass(tmp_path, capsys):
    assert main.main(["verdict", str(tmp_path / "none")]) == 11
    assert "no verdict: " in capsys.readouterr().err
    path = write(tmp_path, {"type": "end", "verdict": "ACCEPTED", "exit": 0})
    assert main.main(["verdict", str(path), "--json", str(tmp_path / "none" / "out")]) == 11
    assert "--json" in capsys.readouterr().err


def test_a_hostile_reason_stays_on_its_line_and_acts_on_no_terminal(tmp_path, capsys):
    write(tmp_path, {"type": "end", "verdict": "REJECTED", "exit": 1, "reason": "a\n\x1b[31m\u202eb\x85c"})
    assert main.main(["verdict", str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    assert printed.endswith("c\n")
    assert printed.removesuffix("\n").isprintable()


@pytest.mark.parametrize(
    ("says", "launcher", "code"),
    [(0, 0, 0), (0, 1, 11), (0, 137, 11), (0, -9, 11), (1, 0, 1), (1, 11, 1), (10, 137, 10), (2, 0, 2)],
)
def test_a_launcher_that_failed_is_never_a_pass_and_no_failure_is_lost(tmp_path, capsys, says, launcher, code):
    word = {0: "ACCEPTED", 1: "REJECTED", 2: "BROKEN", 10: "INCOMPLETE"}[says]
    path = write(tmp_path, {"type": "end", "verdict": word, "exit": says, "reason": "so"})
    out = tmp_path / "answer.json"
    assert main.main(["verdict", str(path), f"--launcher-exit={launcher}", "--json", str(out)]) == code
    document = json.loads(out.read_text())
    assert (document["exit"], document["verdict"]) == (code, word if code == says else "BROKEN")
    if code != says:
        assert re.search(rf"launcher .*exit code {launcher}\b", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("launcher", "code"), [(0, 11), (1, 11), (2, 2), (4, 4), (5, 5), (10, 11), (11, 11), (143, 11)]
)
def test_without_a_journal_only_a_run_that_never_began_keeps_its_code(tmp_path, capsys, launcher, code):
    assert main.main(["verdict", str(tmp_path / "none"), f"--launcher-exit={launcher}"]) == code
    assert "no verdict" in capsys.readouterr().err
