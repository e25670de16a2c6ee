"""Faults that end a test on one rank: the run goes on with the next test on a fresh group."""

import pytest
from torchrun import suite, torchrun

RANK_0, RANK_1 = "rank 0 (node-a)", "rank 1 (node-a)"

EXPECTED = {
    "before": f"failure: {RANK_1}: RuntimeError: raised before the collective",
    "before_on_rank_0": f"failure: {RANK_0}: RuntimeError: raised before the collective",
    "inside": f"failure: {RANK_1}: RuntimeError: raised inside the collective",
    "afterwards": f"failure: {RANK_1}: RuntimeError: raised after the collective",
    "while_the_group_is_made": f"failure: {RANK_1}: RuntimeError: raised instead of making the group",
    "skip": "error: ranks disagree: rank 1 skipped (no NVLink here), rank 0 did not",
    "setup": f"error: in setup: {RANK_1}: RuntimeError: no scratch space",
    "teardown": f"error: in teardown: {RANK_1}: RuntimeError: cannot clean up",
    "with_a_session_fixture": f"failure: {RANK_1}: RuntimeError: broke what the session shares",
    "nan": f"error: matmul.bf16.tflops: the value is NaN on {RANK_1}",
    "huge": f"failure: {RANK_1}: RuntimeError: first words",
    "surrogate": f"failure: {RANK_1}: RuntimeError: half a #xD800 character",
    "hostile": f"failure: {RANK_1}: Hostile: (its text cannot be read: ValueError)",
    "sys_exit": f"failure: {RANK_1}: SystemExit: 3",
    "alike_on_all_ranks": "failure: ranks 0-1: RuntimeError: the same everywhere",
    "swallowed_by_the_peer": f"failure: {RANK_1}: RuntimeError: rank 1 fails",
    "point_to_point": f"failure: {RANK_1}: RuntimeError: rank 1 sends nothing",
    "expected_to_fail": "skipped: a known weakness",
    "binary": f"failure: {RANK_1}: RuntimeError: ",
}
MEETS_NOBODY = {"setup", "teardown", "nan", "alike_on_all_ranks", "afterwards"}
"""Faults in which no rank waits for another."""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return torchrun(tmp_path_factory.mktemp("exceptions"), suite("exceptions"), deadline=10.0)


@pytest.mark.parametrize("fault", EXPECTED)
def test_the_report_names_the_culprit_and_the_next_test_passes(run, times, fault):
    assert run.verdicts[f"test_{fault}"].startswith(EXPECTED[fault]), run.body(f"test_{fault}")
    assert run.verdicts[f"test_after_{fault}"] == "passed"
    since = run.stamp(fault, 0 if "rank_0" in fault else 1).at
    times.survived(f"exception: {fault}", run, f"test_{fault}", since=since, passed=f"after_{fault}")


def test_who_only_suffered_is_listed_and_not_blamed(run):
    results = {result.nodeid.rpartition("::test_")[2]: result for result in run.journal.results}
    for fault in set(EXPECTED) - {"expected_to_fail", "alike_on_all_ranks"}:
        culprit = 0 if "rank_0" in fault else 1
        assert list(results[fault].culprits) in ([culprit], []), fault
        assert list(results[fault].released) == ([] if fault in MEETS_NOBODY else [1 - culprit]), fault


def test_every_other_result_is_kept(run):
    others = [name for name in run.verdicts if name.startswith(("test_after_", "test_first"))]
    assert len(others) == len(EXPECTED) + 2
    assert {run.verdicts[name] for name in others} == {"passed"}
    assert run.end == ("REJECTED", 1, "rank 0")
    assert run.exits == [1]
    assert run.left_over == []
    assert [path.name for path in (run.directory / "tmp").glob("gpucluster-*")] == []


def test_no_body_is_entered_without_its_setup_and_a_session_fixture_is_set_up_anew(run):
    assert run.find_stamp("swallowed_by_the_peer", 0)
    for rank in (0, 1):
        assert run.find_stamp("body_entered_in_spite_of_the_setup", rank) is None
        assert [stamp.name for stamp in run.stamps[rank]].count("shared_is_set_up") == 2


def test_a_huge_failure_keeps_its_ends(run):
    body = run.body("test_huge")
    assert "first words" in body
    assert "last words" in body
    assert "characters left out" in body
    assert len(body) < 100_000
    assert run.junit_path.stat().st_size < 1_000_000


def test_equal_failures_are_folded(run):
    body = run.body("test_alike_on_all_ranks")
    assert "ranks 0-1 (first: rank 0 (node-a)): failed" in body
    assert body.count("E       RuntimeError: ") == 1


def test_hostile_test_ids_are_told_apart(run):
    names = {name: verdict for name, verdict in run.verdicts.items() if name.startswith("test_names")}
    assert len(names) == 7
    failed = [name for name, verdict in names.items() if verdict != "passed"]
    assert failed == [r"test_names[\ud800]"]
    assert names[failed[0]].startswith(f"failure: {RANK_1}: RuntimeError: ")
