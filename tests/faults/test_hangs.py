"""Hangs: the deadline ends them, names who holds the others up, and says where."""

import re

import pytest
from times import HANG
from torchrun import suite, torchrun

RANK_0, RANK_1 = "rank 0 (node-a)", "rank 1 (node-a)"
DEADLINE = 1.0

EXPECTED = {
    "sleep": f"error: {RANK_1}: hangs at test_hangs.py:* in test_sleep",
    "lock": f"error: {RANK_1}: hangs at test_hangs.py:* in test_lock",
    "loop": f"error: {RANK_0}: hangs at test_hangs.py:* in test_loop",
    "finished_early": f"error: {RANK_1}: finished without entering all_reduce #* of group *, where rank 0 waits",
    "another_collective": f"error: {RANK_0}: waits in all_reduce #*, while rank 1 waits in barrier #* of group *"
    " (and rank 1 failing)",
    "never_joined_the_group": f"error: {RANK_1}: finished without entering the making of a process group #1 of group"
    " in the making, where rank 0 waits",
    "setup": f"error: {RANK_1}: hangs at test_hangs.py:* in slow_setup",
    "teardown": f"error: {RANK_1}: hangs at test_hangs.py:* in slow_teardown",
    "c_call_that_signals_end": f"error: {RANK_1}: hangs at test_hangs.py:* in test_c_call_that_signals_end",
    "everywhere": "error: ranks 0-1: hangs at test_hangs.py:* in test_everywhere",
}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return torchrun(tmp_path_factory.mktemp("hangs"), suite("hangs"), deadline=DEADLINE)


@pytest.mark.parametrize("fault", EXPECTED)
def test_the_report_names_the_culprit_and_the_next_test_passes(run, times, fault):
    verdict = run.verdicts[f"test_{fault}"]
    assert re.fullmatch(re.escape(EXPECTED[fault]).replace(r"\*", r"\S+"), verdict), verdict
    assert run.verdicts[f"test_after_{fault}"] == "passed"
    since = run.stamp(fault, 1).at + DEADLINE
    times.survived(f"hang: {fault}", run, f"test_{fault}", since=since, passed=f"after_{fault}", report=HANG)


def test_where_the_culprit_hangs_is_in_the_report(run):
    body = run.body("test_sleep")
    assert "time.sleep(600)" in body, "its Python stack"
    assert "all_reduce" not in body.partition("main thread")[0], "it had entered no collective"
    body = run.body("test_finished_early")
    assert "all_reduce #2 in group" in body, "the last collectives of the flight recorder"
    assert "finished" in body
    body = run.body("test_another_collective")
    assert "waits in all_reduce #" in body
    assert "waits in barrier #" in body


def test_a_hang_has_one_deadline_and_no_source_of_torch(run):
    for fault in EXPECTED:
        said = run.verdicts[f"test_{fault}"] + run.body(f"test_{fault}")
        assert re.findall(r"within (\S+) s", said) == [f"{DEADLINE:g}"], fault
        assert "_rank_not_in_group" not in said, "torch's code"
        assert "closed by peer" not in said, "how the release looks from inside"


def test_who_only_waited_is_listed_and_not_blamed(run):
    results = {result.nodeid.rpartition("::test_")[2]: result for result in run.journal.results}
    for fault in set(EXPECTED) - {"setup", "teardown", "everywhere", "loop", "another_collective"}:
        assert (list(results[fault].culprits), list(results[fault].released)) == ([1], [0]), fault
    assert (list(results["loop"].culprits), list(results["loop"].released)) == ([0], [1])
    for fault in ("everywhere", "another_collective"):  # nothing tells who is right
        assert (list(results[fault].culprits), list(results[fault].released)) == ([0, 1], [])
    for fault in ("setup", "teardown"):  # nobody met anybody there
        assert (list(results[fault].culprits), list(results[fault].released)) == ([1], [])


def test_a_healthy_rank_that_still_computes_is_let_alone_until_it_waits_for_the_failed_one(run):
    assert run.find_stamp("computed", 0)
    assert run.verdicts["test_peer_that_still_computes"] == f"failure: {RANK_1}: RuntimeError: rank 1 fails"
    assert run.verdicts["test_after_peer_that_still_computes"] == "passed"
    assert run.verdicts["test_slow_but_within_its_own_deadline"] == "passed", "of its marker"
    assert all(run.find_stamp("body_entered_in_spite_of_the_setup", rank) is None for rank in (0, 1))


def test_every_other_result_is_kept(run):
    others = [name for name in run.verdicts if name.startswith(("test_after_", "test_first"))]
    assert len(others) == len(EXPECTED) + 2
    assert {run.verdicts[name] for name in others} == {"passed"}
    assert run.end == ("REJECTED", 1, "rank 0")  # for test_peer_that_still_computes
    assert run.exits == [1]
    assert run.left_over == []
