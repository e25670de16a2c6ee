"""Ranks that fail before the roll call, when no rank knows another yet: the report names the rank and its error."""

import json
import re
import signal
from dataclasses import asdict

import pytest
from torchrun import torchrun

from pytest_gpucluster.agreement.liveness import start_time
from pytest_gpucluster.session.start_notes import Start, StartNote

CONFTEST = """
    import os, pathlib, pytest, signal, sys, time
    RANK = int(os.environ["RANK"])
    def rank_0_waits():
        while not list(pathlib.Path(os.environ["STAMPS"], "..", "reports").glob("2*")):
            time.sleep(0.02)
"""
ENDED = r"\(node-a, pid \d+\) ended without a message .*loading conftest files"
FAULTS = [
    pytest.param(
        "if RANK == 1: import no_such_module",
        2,
        r"\(node-a\) .*no_such_module",
        id="a conftest that cannot be imported",
    ),
    pytest.param("if RANK == 1: rank_0_waits(); os.kill(os.getpid(), 9)", 3, ENDED, id="killed while the others wait"),
    pytest.param(
        "if RANK == 1: rank_0_waits(); os._exit(0)",
        2,
        ENDED,
        id="exit code 0, which torchrun takes for success",
        marks=pytest.mark.extended,
    ),
    pytest.param(
        "def pytest_configure():\n        if RANK == 1: raise KeyError('no such card')",
        2,
        r"\(node-a\) .*no such card",
        id="an error while pytest is configured",
        marks=pytest.mark.extended,
    ),
    pytest.param(
        "def pytest_sessionstart():\n        if RANK == 1: raise KeyError('no such card')",
        2,
        r"\(node-a\): .*no such card",
        id="an error behind the roll call",
    ),
]


@pytest.mark.parametrize(("code", "ranks", "told"), FAULTS)
def test_the_rank_that_failed_is_named_with_its_error(tmp_path, code, ranks, told):
    files = {"conftest.py": f"{CONFTEST}\n    {code}\n", "test_it.py": "def test(): pass"}
    run = torchrun(tmp_path, files, ranks=ranks)
    [message] = [verdict for verdict in run.verdicts.values() if verdict.startswith("error: ")]
    assert re.search(rf"rank 1 {told}", message), run.output
    assert "rank 0" not in run.document
    assert "rank 2" not in run.document
    assert run.exits == [1]
    assert run.left_over == []
    assert run.files_left == []


@pytest.mark.parametrize("code", ["os.kill(os.getpid(), 9)", "os._exit(0)"])
def test_where_rank_0_has_ended_the_next_rank_reports_it(tmp_path, code):
    conftest = f"import os, time\nif os.environ['RANK'] == '0':\n    time.sleep(1)\n    {code}\n"
    run = torchrun(tmp_path, {"conftest.py": conftest, "test_it.py": "def test(): pass"}, ranks=3)
    [message] = [verdict for verdict in run.verdicts.values() if verdict.startswith("error: ")]
    assert re.search(rf"rank 0 {ENDED}", message), run.output
    assert "rank 1" not in message
    assert run.exits == [1]
    assert (run.left_over, run.files_left) == ([], [])


def note(**more):
    return StartNote(**{"rank": 1, "host": "node-a", "pid": 1, "started": start_time(1), **more})


def test_who_lives_or_was_ended_by_torchrun_is_not_to_blame():
    assert note().failure() == ""
    assert note(started=-1, secondary=True).failure() == ""
    assert "rank 1 (node-a, pid 1)" in note(started=-1).failure()
    assert note(secondary=True, error="KeyError: x").failure().endswith("KeyError: x")


@pytest.fixture
def start(tmp_path):
    """Rank 0 of a node with three ranks; what it reports is in ``told``."""
    for rank in range(3):
        (tmp_path / str(rank)).mkdir()
    before = signal.getsignal(signal.SIGTERM)
    start = Start(tmp_path / "0" / "gpucluster-start.json", note(rank=0), lambda *said: start.told.append(said))
    start.told = []
    yield start
    signal.signal(signal.SIGTERM, before)


def leaves(tmp_path, one):
    (tmp_path / str(one.rank) / "gpucluster-start.json").write_text(json.dumps(asdict(one)))


def test_a_rank_with_an_error_comes_before_those_that_only_ended(start, tmp_path):
    assert start.failures() == ("", "")
    leaves(tmp_path, note(rank=2, started=-1))
    assert "rank 2" in start.failures()[0]
    leaves(tmp_path, note(rank=1, started=-1, error="KeyError: card", text="Traceback: card"))
    line, text = start.failures()
    assert "KeyError: card" in line
    assert "Traceback: card" in text
    assert "rank 2" not in line + text


def test_rank_0_reports_its_own_error_once(start):
    start.failed(ValueError("a first one"))
    start.failed(ValueError("a second one"))
    [(line, text)] = start.told
    assert "ValueError: a first one" in line
    assert "ValueError: a first one" in text


def test_after_the_roll_call_nothing_is_reported(start):
    start.is_over = True
    start.failed(ValueError("late"))
    assert start.told == []


def test_a_rank_that_gives_up_because_rank_0_is_lost_is_not_the_cause(start, tmp_path):
    others = [
        Start(tmp_path / f"{rank}" / "gpucluster-start.json", note(rank=rank), lambda *said: start.told.append(said))
        for rank in (1, 2)
    ]
    leaves(tmp_path, note(rank=0, started=-1))
    for rank in others:
        assert rank.rank_0_is_lost()
        rank.failed(ValueError("the start is given up"))
    assert {"rank 0" in line and "rank 1" not in line for line, _ in start.told} == {True}
    assert "rank 0" in others[1].failures()[0]
    assert "rank 1" not in others[1].failures()[0]


def test_a_note_that_cannot_be_read_is_none(start, tmp_path):
    (tmp_path / "1" / "gpucluster-start.json").write_text('{"rank": 1')
    (tmp_path / "2" / "gpucluster-start.json").write_text('{"of": "another version"}')
    assert start.failures() == ("", "")
