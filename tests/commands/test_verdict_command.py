"""``gpucluster verdict``: the run's own exit code, also of a journal that was cut off."""

from __future__ import annotations

import json
import re

import pytest

from pytest_gpucluster import cli, journal
from pytest_gpucluster.verdict import EXIT_CODES

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
    assert cli.main(["verdict", str(path)]) == code
    word = "ACCEPTED" if code == 0 else "BROKEN"
    assert capsys.readouterr().out == f"gpucluster: {word}, exit code {code}: so\n"


def test_a_journal_that_was_cut_off_is_broken_or_rejected(tmp_path, capsys):
    path = write(tmp_path, {"type": "start", "nodeid": "t.py::test_it"})
    assert cli.main(["verdict", str(tmp_path)]) == 11
    assert re.fullmatch(r"gpucluster: BROKEN, exit code 11: .* t\.py::test_it\n", capsys.readouterr().out)
    write(tmp_path, FAILED)
    assert cli.main(["verdict", str(tmp_path)]) == 1
    path.write_bytes(path.read_bytes()[:-9])
    assert cli.main(["verdict", str(tmp_path)]) == 11


def test_the_answer_is_written_as_json(tmp_path, capsys):
    path, out = (
        write(tmp_path, FAILED, {"type": "end", "verdict": "REJECTED", "exit": 1, "reason": "hbm"}),
        tmp_path / "o",
    )
    assert cli.main(["verdict", str(path), "--json", str(out)]) == 1
    assert json.loads(out.read_text()) == {
        "schema_version": 1,
        "verdict": "REJECTED",
        "exit": 1,
        "reason": "hbm",
        "failure": "hbm: slow",
        "ended": True,
        "rehearsal": False,
        "nnodes": 2,
        "world_size": 16,
        "run_id": "r",
        "journal": str(path),
    }


def test_no_journal_and_no_room_for_the_answer_are_no_pass(tmp_path, capsys):
    assert cli.main(["verdict", str(tmp_path / "none")]) == 11
    assert "no verdict: " in capsys.readouterr().err
    path = write(tmp_path, {"type": "end", "verdict": "ACCEPTED", "exit": 0})
    assert cli.main(["verdict", str(path), "--json", str(tmp_path / "none" / "out")]) == 11
    assert "--json" in capsys.readouterr().err


def test_a_hostile_reason_stays_on_its_line_and_acts_on_no_terminal(tmp_path, capsys):
    write(tmp_path, {"type": "end", "verdict": "REJECTED", "exit": 1, "reason": "a\n\x1b[31m\u202eb\x85c"})
    assert cli.main(["verdict", str(tmp_path)]) == 1
    told = capsys.readouterr().out
    assert told.endswith("c\n")
    assert told.removesuffix("\n").isprintable()


@pytest.mark.parametrize(
    ("says", "launcher", "code"),
    [(0, 0, 0), (0, 1, 11), (0, 137, 11), (0, -9, 11), (1, 0, 1), (1, 11, 1), (10, 137, 10), (2, 0, 2)],
)
def test_a_launcher_that_failed_is_never_a_pass_and_no_failure_is_lost(tmp_path, capsys, says, launcher, code):
    word = {0: "ACCEPTED", 1: "REJECTED", 2: "BROKEN", 10: "INCOMPLETE"}[says]
    path = write(tmp_path, {"type": "end", "verdict": word, "exit": says, "reason": "so"})
    out = tmp_path / "answer.json"
    assert cli.main(["verdict", str(path), f"--launcher-exit={launcher}", "--json", str(out)]) == code
    told = json.loads(out.read_text())
    assert (told["exit"], told["verdict"]) == (code, word if code == says else "BROKEN")
    if code != says:
        assert re.search(rf"launcher .*exit code {launcher}\b", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("launcher", "code"), [(0, 11), (1, 11), (2, 2), (4, 4), (5, 5), (10, 11), (11, 11), (143, 11)]
)
def test_without_a_journal_only_a_run_that_never_began_keeps_its_code(tmp_path, capsys, launcher, code):
    assert cli.main(["verdict", str(tmp_path / "none"), f"--launcher-exit={launcher}"]) == code
    assert "no verdict" in capsys.readouterr().err
