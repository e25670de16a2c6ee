"""What counts as a pass of one run: its journal and its launcher must both say so."""

from __future__ import annotations

import dataclasses

import pytest

from pytest_gpucluster.sweep.answer import Answer
from pytest_gpucluster.sweep.outcome import Ended, Outcome, outcome_of

ANSWER = Answer(
    verdict="ACCEPTED",
    exit=0,
    reason="9 passed",
    ended=True,
    rehearsal=False,
    nnodes=1,
    world_size=8,
    journal="/j",
)
REJECTED = {"verdict": "REJECTED", "exit": 1, "reason": "t failed", "failure": "hbm: slow"}
WELL = Ended(exit=0, seconds=5.0, log="/l")


def outcome(answer, ended=WELL):
    return outcome_of("n", answer, ended, nnodes=1, world_size=8)


def test_a_pass_has_no_failure_and_says_where_it_is_recorded():
    expected = Outcome(node="n", verdict="ACCEPTED", exit=0, failure="", seconds=5.0, journal="/j", log="/l")
    assert outcome(ANSWER) == expected
    assert (expected.passed, expected.survived) == (True, True)


@pytest.mark.parametrize(
    ("changes", "ended", "verdict", "code", "failure"),
    [
        ({}, {"exit": 1}, "BROKEN", 11, "its journal says ACCEPTED, but its launcher ended with exit code 1"),
        ({}, {"exit": None}, "BROKEN", 11, "its journal says ACCEPTED, but its launcher did not end"),
        ({}, {"exit": 0, "stopped": "no answer within 5 s"}, "NO ANSWER", 11, "no answer within 5 s"),
        ({"verdict": "WONDERFUL"}, {}, "BROKEN", 11, "9 passed"),
        ({"exit": 7}, {}, "BROKEN", 11, "9 passed"),
        ({"world_size": 7}, {}, "BROKEN", 11, "its journal is of 7 ranks on 1 nodes, but 8 on 1 were launched"),
        ({"nnodes": 2}, {}, "BROKEN", 11, "its journal is of 8 ranks on 2 nodes, but 8 on 1 were launched"),
        ({"ended": False}, {}, "NO ANSWER", 11, "its journal has no end: 9 passed"),
        (
            {"ended": False, "verdict": "BROKEN", "exit": 11, "reason": "the run ended during t"},
            {"stopped": "no answer within 5 s"},
            *("NO ANSWER", 11, "no answer within 5 s; the run ended during t"),
        ),
        (REJECTED, {"exit": 1}, "REJECTED", 1, "hbm: slow"),
        (REJECTED, {"exit": None, "stopped": "no answer within 5 s"}, "REJECTED", 1, "hbm: slow"),
        (REJECTED | {"ended": False}, {"exit": None}, "REJECTED", 1, "hbm: slow"),
        (REJECTED | {"nnodes": 3}, {"exit": 1}, "REJECTED", 1, "hbm: slow"),
        ({"verdict": "ACCEPTED", "exit": 1}, {}, "REJECTED", 1, "9 passed"),
        ({"verdict": "BROKEN", "exit": 4, "reason": "usage"}, {"exit": 1}, "BROKEN", 4, "usage"),
        ({"verdict": "BROKEN", "exit": 0}, {}, "BROKEN", 11, "9 passed"),
        (
            {"verdict": "INCOMPLETE", "exit": 10, "reason": "did not run: hbm"},
            {"exit": 1},
            "INCOMPLETE",
            10,
            "did not run: hbm",
        ),
    ],
)
def test_anything_else_is_no_pass(changes, ended, verdict, code, failure):
    got = outcome(dataclasses.replace(ANSWER, **changes), dataclasses.replace(WELL, **ended))
    assert (got.verdict, got.exit, got.failure) == (verdict, code, failure)
    assert not got.passed
    assert got.survived == (verdict == "INCOMPLETE")


@pytest.mark.parametrize(
    ("ended", "failure"),
    [
        ({}, "ended with exit code 0 and no journal"),
        ({"exit": 1, "hint": "ERROR: oops\nagain"}, "ended with exit code 1 and no journal: ERROR: oops again"),
        ({"exit": None}, "its launcher did not end"),
        ({"exit": None, "stopped": "no answer within 5 s"}, "no answer within 5 s"),
    ],
)
def test_no_journal_is_no_answer(ended, failure):
    got = outcome(None, dataclasses.replace(WELL, **ended))
    assert (got.verdict, got.exit, got.failure, got.survived) == ("NO ANSWER", 11, failure, False)
