"""The notes that ranks leave for the program that started their launcher."""

import json
import os
from dataclasses import asdict, replace

import pytest

from pytest_gpucluster.journal import verdict
from pytest_gpucluster.journal.verdict import VARIABLE, BeginNote, ExitNote

NOTE = ExitNote(
    rank=1, local_world_size=2, launcher=7, word="REJECTED", exit=1, reason="<script>\x1b \ud83d slow", kind=""
)
BEGUN = BeginNote(launcher=7, directory="/reports/1", recorder=99)


def test_what_is_left_is_read_in_the_order_of_ranks(tmp_path):
    environ = {VARIABLE: str(tmp_path)}
    notes = [replace(NOTE, rank=rank) for rank in (10, 2, 0)]
    assert [verdict.write_note(environ, note) for note in notes] == [None] * 3
    assert verdict.write_note(environ, BEGUN) is None
    assert verdict.read_exit_notes(tmp_path, 7) == tuple(reversed(notes))
    assert verdict.read_begin_note(tmp_path, 7) == BEGUN
    assert sorted(path.name for path in tmp_path.iterdir()) == ["begun.json", *(f"rank-{n}.json" for n in (0, 10, 2))]


def test_an_agreed_exit_code_is_kept_by_this_process_and_not_by_its_forks(monkeypatch):
    left, at_exit = [], []
    monkeypatch.setattr(os, "_exit", left.append)
    monkeypatch.setattr(verdict, "_kept", {})
    monkeypatch.setattr(verdict.atexit, "register", lambda call, *given: at_exit.append((call, given)))
    verdict.guard_exit_code()
    guarded = os._exit
    verdict.guard_exit_code()
    assert os._exit is guarded, "once is enough"
    verdict.keep_exit_code(10)
    os._exit(3)
    [(call, given)] = at_exit
    call(*given)
    os._exit(3)
    monkeypatch.setattr(os, "getpid", lambda: 2**30)
    os._exit(3)
    assert left == [3, 10, 3]


def test_a_job_inside_of_a_test_is_not_taken_for_the_run(tmp_path):
    verdict.write_note({VARIABLE: str(tmp_path)}, replace(NOTE, launcher=8))
    verdict.write_note({VARIABLE: str(tmp_path)}, replace(BEGUN, launcher=8))
    assert verdict.read_exit_notes(tmp_path, 7) == ()
    assert verdict.read_begin_note(tmp_path, 7) is None


def test_nothing_is_written_without_a_folder_and_a_full_disk_is_an_error(tmp_path):
    assert verdict.write_note({}, NOTE) is None
    missing = tmp_path / "gone"
    wrong = verdict.write_note({VARIABLE: str(missing)}, NOTE)
    assert f"{missing}/rank-1.json (GPUCLUSTER_EXIT_NOTES)" in wrong


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        json.dumps({**asdict(NOTE), "exit": "0"}),
        json.dumps({**asdict(NOTE), "exit": True}),
        json.dumps({**asdict(NOTE), "kind": 0}),
        json.dumps({name: value for name, value in asdict(NOTE).items() if name != "exit"}),
    ],
    ids=["empty", "cut", "list", "null", "exit as text", "exit as bool", "kind as number", "no exit"],
)
def test_what_is_no_note_is_ignored(tmp_path, text):
    (tmp_path / "rank-1.json").write_text(text)
    (tmp_path / "begun.json").write_text(text)
    assert verdict.read_exit_notes(tmp_path, 7) == ()
    assert verdict.read_begin_note(tmp_path, 7) is None
