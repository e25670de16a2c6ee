"""What counts as a pass: of one run its journal and its launcher, of a sweep every part of it."""

import dataclasses

import pytest

from pytest_gpucluster.runners.run_result import RunResult
from pytest_gpucluster.runners.sweep_outcome import LauncherExit, Outcome, conclude, judge_run

ANSWER = RunResult(
    verdict="ACCEPTED", exit=0, reason="9 passed", ended=True, kind="", nnodes=1, world_size=8, journal="/j"
)
REJECTED = {"verdict": "REJECTED", "exit": 1, "reason": "t failed", "failure": "hbm: slow"}
WELL = LauncherExit(exit=0, seconds=5.0, log="/l")


def outcome(answer, ended=WELL):
    return judge_run("n", answer, ended, nnodes=1, world_size=8)


def test_a_pass_has_no_failure_and_says_where_it_is_recorded():
    expected = Outcome(node="n", verdict="ACCEPTED", exit=0, failure="", seconds=5.0, journal="/j", log="/l")
    assert outcome(ANSWER) == expected
    assert (expected.passed, expected.survived) == (True, True)


@pytest.mark.parametrize(
    ("changes", "ended", "verdict", "code", "failure"),
    [
        ({}, {"exit": 1}, "BROKEN", 11, "its journal states ACCEPTED, but its launcher ended with exit code 1"),
        ({}, {"exit": None}, "BROKEN", 11, "its journal states ACCEPTED, but its launcher did not end"),
        ({}, {"exit": 0, "stop_reason": "no answer within 5 s"}, "NO ANSWER", 11, "no answer within 5 s"),
        ({"verdict": "WONDERFUL"}, {}, "BROKEN", 11, "9 passed"),
        ({"exit": 7}, {}, "BROKEN", 11, "9 passed"),
        ({"world_size": 7}, {}, "BROKEN", 11, "its journal is of 7 ranks on 1 nodes, but 8 on 1 were launched"),
        ({"nnodes": 2}, {}, "BROKEN", 11, "its journal is of 8 ranks on 2 nodes, but 8 on 1 were launched"),
        ({"ended": False}, {}, "NO ANSWER", 11, "its journal has no end: 9 passed"),
        (
            {"ended": False, "verdict": "BROKEN", "exit": 11, "reason": "the run ended during t"},
            {"stop_reason": "no answer within 5 s"},
            *("NO ANSWER", 11, "no answer within 5 s; the run ended during t"),
        ),
        (REJECTED, {"exit": 1}, "REJECTED", 1, "hbm: slow"),
        (REJECTED, {"exit": None, "stop_reason": "no answer within 5 s"}, "REJECTED", 1, "hbm: slow"),
        (REJECTED | {"ended": False}, {"exit": None}, "REJECTED", 1, "hbm: slow"),
        (REJECTED | {"nnodes": 3}, {"exit": 1}, "REJECTED", 1, "hbm: slow"),
        ({"verdict": "ACCEPTED", "exit": 1}, {}, "REJECTED", 1, "9 passed"),
        ({"verdict": "BROKEN", "exit": 4, "reason": "usage"}, {"exit": 1}, "BROKEN", 4, "usage"),
        ({"verdict": "BROKEN", "exit": 0}, {}, "BROKEN", 11, "9 passed"),
        ({"verdict": "INCOMPLETE", "exit": 10, "reason": "hbm"}, {"exit": 1}, "INCOMPLETE", 10, "hbm"),
    ],
)
def test_anything_else_is_no_pass(changes, ended, verdict, code, failure):
    got = outcome(dataclasses.replace(ANSWER, **changes), dataclasses.replace(WELL, **ended))
    assert (got.verdict, got.exit, got.failure) == (verdict, code, failure)
    assert not got.passed
    assert got.survived == (verdict == "INCOMPLETE")


def test_no_journal_is_no_answer():
    for ended, failure in (
        ({}, "exit code 0"),
        ({"exit": 1, "hint": "ERROR: oops\nagain"}, "exit code 1 and no journal: ERROR: oops again"),
        ({"exit": None}, "did not end"),
        ({"exit": None, "stop_reason": "no answer within 5 s"}, "within 5 s"),
    ):
        got = outcome(None, dataclasses.replace(WELL, **ended))
        assert (got.verdict, got.exit, got.survived) == ("NO ANSWER", 11, False)
        assert failure in got.failure


CODES = {
    "ACCEPTED": 0,
    "SELECTION PASSED": 0,
    "REHEARSED": 0,
    "REJECTED": 1,
    "INCOMPLETE": 10,
    "NO ANSWER": 11,
    "BROKEN": 4,
}


def judged(node, verdict):
    return Outcome(node=node, verdict=verdict, exit=CODES[verdict], failure=f"why {node}", seconds=1.0)


@pytest.mark.parametrize(
    ("alone", "together", "word", "code"),
    [
        (["ACCEPTED", "ACCEPTED"], "ACCEPTED", "ACCEPTED", 0),
        (["ACCEPTED", "SELECTION PASSED"], "ACCEPTED", "SELECTION PASSED", 0),
        (["ACCEPTED", "SELECTION PASSED"], "REHEARSED", "REHEARSED", 0),
        (["ACCEPTED", "ACCEPTED"], None, "INCOMPLETE", 10),
        (["ACCEPTED", "INCOMPLETE"], "ACCEPTED", "INCOMPLETE", 10),
        (["ACCEPTED", "ACCEPTED"], "INCOMPLETE", "INCOMPLETE", 10),
        (["ACCEPTED", "NO ANSWER"], "INCOMPLETE", "BROKEN", 11),
        (["ACCEPTED", "BROKEN"], "ACCEPTED", "BROKEN", 11),
        (["ACCEPTED"], "ACCEPTED", "BROKEN", 11),
        ([], None, "BROKEN", 11),
        (["NO ANSWER", "REJECTED"], None, "REJECTED", 1),
        (["REJECTED"], "ACCEPTED", "REJECTED", 1),
        (["ACCEPTED", "NO ANSWER"], "REJECTED", "REJECTED", 1),
    ],
)
def test_the_worst_decides(alone, together, word, code):
    outcomes = [judged(f"n{number}", verdict) for number, verdict in enumerate(alone)]
    found = conclude(["n0", "n1"], outcomes, judged("together", together) if together else None)
    assert (found.word, found.exit) == (word, code)


def test_the_reason_names_who_and_the_first_of_them_why():
    nodes = [f"n{number}" for number in range(12)]
    found = conclude(nodes, [judged(node, "REJECTED") for node in nodes], None)
    assert found.reason == "rejected: n0, n1, n2, n3, n4, n5, n6, n7 and 4 more; n0: why n0"
    found = conclude(["n0", "n1"], [judged("n1", "NO ANSWER")], None)
    assert found.reason == "without a verdict: n1; n1: why n1; NO ANSWER: n0"
    found = conclude(["n0"], [judged("n0", "ACCEPTED")], None, skipped="too few")
    assert "too few" in found.reason
