"""Ranks that die: the run ends at once, the report says who was lost and during which test."""

import re

import pytest
from cases import params, runs_of
from times import DEATH

WORDS = {
    "kill": "killed, or ended by os._exit",
    "crash": "Fatal Python error: Segmentation fault",
    "leave_with_3": "killed, or ended by os._exit",
    "leave_with_0": "killed, or ended by os._exit",
}


@pytest.fixture(scope="module")
def runs(request, tmp_path_factory):
    return runs_of(request, tmp_path_factory, deadline=30.0)


def agrees_that_it_is_over(run):
    assert run.verdicts["test_first"] == "passed"
    assert run.verdicts["test_next"].startswith("skipped: not run: ")
    assert run.end[:2] == ("BROKEN", 11)
    # Also where the dead rank itself said 0: an agent that ends with 0 is a run that passed.
    assert run.exits == [1]
    assert run.left_over == []
    assert run.files_left == []


@pytest.mark.parametrize("case", params(*((fault, 1) for fault in WORDS)))
def test_a_dead_rank_is_named(runs, times, case):
    run, (fault, _) = runs[case], case
    stamp = run.stamp("fault", 1)
    lost = "rank 1 (node-a) is lost during call of test_one_fault.py::test_fault"
    expected = f"{lost}: process {stamp.pid} has exited without a message ({WORDS[fault]})"
    assert run.verdicts["test_fault"] == f"error: {expected}", run.output
    assert run.verdicts["rank lost"] == f"error: {expected}"
    agrees_that_it_is_over(run)
    assert run.end[2] == "rank 0"
    times.ended(f"death: {fault}, rank 1", run, since=stamp.at, goal=DEATH)


@pytest.mark.parametrize("case", params(*((fault, 0) for fault in WORDS)))
def test_a_dead_rank_0_is_named_by_the_recorder(runs, times, case):
    run, (fault, _) = runs[case], case
    stamp = run.stamp("fault", 0)
    expected = f"rank 0 (node-a, pid {stamp.pid}) exited without a message during test_one_fault.py::test_fault"
    if fault == "crash":
        expected += f" ({WORDS[fault]})"
    assert run.verdicts["test_fault"].startswith("error: "), run.output
    assert run.verdicts["test_fault"].endswith(f": {expected}")
    assert run.verdicts["rank lost"] == f"error: {expected}"
    agrees_that_it_is_over(run)
    assert run.end[2] == "recorder"
    times.ended(f"death: {fault}, rank 0", run, since=stamp.at, goal=DEATH)


@pytest.mark.parametrize("case", params(("mismatch", 1)))
def test_collectives_that_do_not_match_are_the_end_of_a_gloo_rank(runs, times, case):
    # gloo throws in a thread of its own, or writes past the smaller buffer first: either way the process ends by a
    # signal, and no plugin can prevent it.
    run = runs[case]
    message = run.verdicts["test_fault"]
    assert "test_one_fault.py::test_fault" in message
    assert re.search("Fatal Python error: (Aborted|Segmentation fault)", message), message
    agrees_that_it_is_over(run)
    times.ended("death: mismatched all_reduce", run, since=run.stamp("fault", 1).at, goal=DEATH)
