"""One verdict of many: nothing but passes everywhere is a pass."""

from __future__ import annotations

import pytest

from pytest_gpucluster.sweep.conclusion import conclude
from pytest_gpucluster.sweep.outcome import Outcome

CODES = {
    "ACCEPTED": 0,
    "SELECTION PASSED": 0,
    "REHEARSED": 0,
    "REJECTED": 1,
    "INCOMPLETE": 10,
    "NO ANSWER": 11,
    "BROKEN": 4,
}


def of(node, verdict):
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
    outcomes = [of(f"n{number}", verdict) for number, verdict in enumerate(alone)]
    found = conclude(["n0", "n1"], outcomes, of("together", together) if together else None)
    assert (found.word, found.exit) == (word, code)


def test_the_reason_names_who_and_the_first_of_them_why():
    nodes = [f"n{number}" for number in range(12)]
    found = conclude(nodes, [of(node, "REJECTED") for node in nodes], None)
    assert found.reason == "rejected: n0, n1, n2, n3, n4, n5, n6, n7 and 4 more; n0: why n0"
    found = conclude(["n0", "n1"], [of("n1", "NO ANSWER")], None)
    assert found.reason == "without a verdict: n1; n1: why n1; NO ANSWER: n0"
    found = conclude(["n0"], [of("n0", "ACCEPTED")], None, why_not_together="too few")
    assert found.reason == "not run together: too few"


def test_a_sweep_that_broke_or_was_interrupted_is_no_pass():
    passed = [of("n0", "ACCEPTED")], of("together", "ACCEPTED")
    assert conclude(["n0"], *passed).exit == 0
    assert conclude(["n0"], *passed, broke="kubectl").exit == 11
    assert conclude(["n0"], *passed, interrupted="Ctrl-C").exit == 2
