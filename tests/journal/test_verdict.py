from dataclasses import replace

from each import of_each

from pytest_gpucluster.journal.records import TestResult
from pytest_gpucluster.journal.verdict import (
    ACCEPTED,
    BROKEN,
    EXIT_CODES,
    INCOMPLETE,
    PASSED_WITH_DEVIATIONS,
    REHEARSED,
    REJECTED,
    SELECTION_PASSED,
    SIMULATED,
    decide,
)
from pytest_gpucluster.judge.judged import JudgedMetric

TOPOLOGY = "2 nodes, 16 ranks, as expected (2x8xH100)"
LOST = (11, "rank 3 is lost")
RECORDED = JudgedMetric(metric="m", status="recorded")


def result(name, outcome, message="", *, criterion=True, **more):
    return TestResult(
        nodeid=f"acceptance/test_it.py::test_{name}",
        criterion=name if criterion else None,
        outcome=outcome,
        message=message,
        **{"measurements": (JudgedMetric(metric="m", status="passed"),), **more},
    )


PASSED = result("matmul", "passed")
FAILED = result("nccl", "failed", "312 GB/s < 380 GB/s")
BROKE = result("nccl", "error", "rank 3 hangs")
SKIPPED = result("lora", "skipped", "needs 2 nodes, and there is 1")
NO_ROOM = result("fabric", "skipped", "needs 2 nodes, and there is 1", applicable=False)
HELPER = result("helper", "passed", criterion=False)
HELPER_SKIPPED = result("helper", "skipped", "not here", criterion=False)


def verdict(*results, **changes):
    settings = {"pytest_exit": 0, "kind": "", "selection": False, "manifest": True}
    settings["topology"] = TOPOLOGY
    return decide(results, **{**settings, **changes})


TABLE = {
    # Everything that ran passed.
    "all passed on cuda": ([PASSED], {}, ACCEPTED, 0),
    "with a test that is no criterion": ([PASSED, HELPER], {}, ACCEPTED, 0),
    "one has no room in the declared topology": ([PASSED, NO_ROOM], {}, ACCEPTED, 0),
    "a skip that is no criterion": ([PASSED, HELPER_SKIPPED], {}, ACCEPTED, 0),
    "with what was required": ([PASSED], {"required": ["matmul"]}, ACCEPTED, 0),
    "a selection": ([PASSED], {"selection": True}, SELECTION_PASSED, 0),
    "a suite without a criterion": ([HELPER], {}, SELECTION_PASSED, 0),
    "a suite without a list of criteria": ([PASSED], {"manifest": False}, SELECTION_PASSED, 0),
    "a criterion without a value": ([PASSED, result("x", "passed", measurements=())], {}, INCOMPLETE, 10),
    "nothing compared with a limit": ([result("x", "passed", measurements=(RECORDED,))], {}, INCOMPLETE, 10),
    "nothing compared in a rehearsal": (
        [result("x", "passed", measurements=(RECORDED,))],
        {"kind": "REHEARSAL"},
        REHEARSED,
        0,
    ),
    "a rehearsal": ([PASSED], {"kind": "REHEARSAL"}, REHEARSED, 0),
    "a selection of a rehearsal": ([PASSED], {"kind": "REHEARSAL", "selection": True}, REHEARSED, 0),
    "a simulated cluster": ([PASSED], {"kind": "SIMULATED"}, SIMULATED, 0),
    "a selection on a simulated cluster": ([PASSED], {"kind": "SIMULATED", "selection": True}, SIMULATED, 0),
    "deviations on a simulated cluster": ([PASSED], {"kind": "SIMULATED", "deviations": ["small"]}, SIMULATED, 0),
    "a criterion skipped on a simulated cluster": ([PASSED, SKIPPED], {"kind": "SIMULATED"}, INCOMPLETE, 10),
    "too slow is no excuse on a simulated cluster": (
        [PASSED, result("lora", "skipped", too_slow=True)],
        {"kind": "SIMULATED"},
        INCOMPLETE,
        10,
    ),
    "nothing compared on a simulated cluster": (
        [result("x", "passed", measurements=(RECORDED,))],
        {"kind": "SIMULATED"},
        INCOMPLETE,
        10,
    ),
    "a limit missed on a simulated cluster": ([FAILED], {"pytest_exit": 1, "kind": "SIMULATED"}, REJECTED, 1),
    "an error on a simulated cluster": ([BROKE], {"kind": "SIMULATED"}, BROKEN, 11),
    # A verdict about the hardware.
    "a limit missed": ([FAILED], {"pytest_exit": 1}, REJECTED, 1),
    "also in a rehearsal": ([FAILED], {"pytest_exit": 1, "kind": "REHEARSAL"}, REJECTED, 1),
    "also in a selection": ([FAILED], {"pytest_exit": 1, "selection": True}, REJECTED, 1),
    "any test counts": ([HELPER, result("x", "failed", criterion=False)], {}, REJECTED, 1),
    "a GPU died of it": ([PASSED], {"abort": (1, "the GPU of rank 3 no longer works")}, REJECTED, 1),
    "wins over an error": ([BROKE, FAILED], {"pytest_exit": 1}, REJECTED, 1),
    "wins over what did not run": ([SKIPPED, FAILED], {"pytest_exit": 1}, REJECTED, 1),
    "wins over a lost rank": ([FAILED], {"abort": LOST}, REJECTED, 1),
    "wins over a problem": ([FAILED], {"problems": ["no space left"]}, REJECTED, 1),
    "stopped at a failure": ([FAILED], {"pytest_exit": 2}, REJECTED, 1),
    # pytest's own.
    "interrupted": ([PASSED], {"abort": (2, "interrupted")}, BROKEN, 2),
    "interrupted after a failure": ([FAILED], {"abort": (2, "interrupted")}, BROKEN, 2),
    "an internal error": ([], {"abort": (3, "internal error")}, BROKEN, 3),
    "an internal error after a failure": ([FAILED], {"abort": (3, "internal error")}, BROKEN, 3),
    "a usage error": ([], {"abort": (4, "usage")}, BROKEN, 4),
    "collection failed on every rank": ([], {"pytest_exit": 2}, BROKEN, 2),
    "pytest says an internal error": ([PASSED], {"pytest_exit": 3}, BROKEN, 3),
    "pytest says a usage error": ([], {"pytest_exit": 4}, BROKEN, 4),
    "nothing collected": ([], {"pytest_exit": 5}, BROKEN, 5),
    "nothing collected in a rehearsal": ([], {"pytest_exit": 5, "kind": "REHEARSAL"}, BROKEN, 5),
    # The run broke.
    "an error": ([PASSED, BROKE], {"pytest_exit": 1}, BROKEN, 11),
    "an error wins over what did not run": ([BROKE, SKIPPED], {"pytest_exit": 1}, BROKEN, 11),
    "stopped at an error": ([BROKE], {"pytest_exit": 2}, BROKEN, 11),
    "a rank lost": ([PASSED], {"abort": LOST}, BROKEN, 11),
    "which pytest calls interrupted": ([PASSED], {"abort": LOST, "pytest_exit": 2}, BROKEN, 11),
    "a problem outside any test": ([PASSED], {"problems": ["no space left"]}, BROKEN, 11),
    "an error in a rehearsal": ([BROKE], {"kind": "REHEARSAL"}, BROKEN, 11),
    "pytest knows of a failure that is not recorded": ([PASSED], {"pytest_exit": 1}, BROKEN, 11),
    "another plugin's exit status": ([PASSED], {"pytest_exit": 77}, BROKEN, 11),
    # Something had to run and did not.
    "a criterion skipped": ([PASSED, SKIPPED], {}, INCOMPLETE, 10),
    "a criterion skipped in a rehearsal": ([PASSED, SKIPPED], {"kind": "REHEARSAL"}, INCOMPLETE, 10),
    "a criterion skipped in a selection": ([PASSED, SKIPPED], {"selection": True}, INCOMPLETE, 10),
    "a required one is not in the suite": ([PASSED], {"required": ["lora"]}, INCOMPLETE, 10),
    "a required one has no room": ([PASSED, NO_ROOM], {"required": ["fabric"]}, INCOMPLETE, 10),
    "a test was never started": ([PASSED], {"not_run": ["a.py::t"]}, INCOMPLETE, 10),
    "nothing has room": ([NO_ROOM], {}, INCOMPLETE, 10),
    "everything was skipped": ([HELPER_SKIPPED], {}, INCOMPLETE, 10),
    "nothing ran": ([], {}, INCOMPLETE, 10),
    "nothing ran in a rehearsal": ([], {"kind": "REHEARSAL"}, INCOMPLETE, 10),
}


@of_each("case", list(TABLE))
def test_the_table_of_verdicts(case):
    results, changes, word, code = TABLE[case]
    found = verdict(*results, **changes)
    assert (found.word, found.exit) == (word, code)
    assert any(map(str.isalpha, found.reason))
    assert "\n" not in found.reason


REASONS = {
    "accepted": ([PASSED], {}, ["1 passed", TOPOLOGY]),
    "selection": ([PASSED], {"selection": True}, ["1 passed", TOPOLOGY, "selection"]),
    "without a criterion": ([HELPER], {}, ["1 passed", TOPOLOGY, "no acceptance criterion"]),
    "the first failure, not the error before it": (
        [BROKE, FAILED, replace(FAILED, nodeid="b.py::later")],
        {},
        ["acceptance/test_it.py::test_nccl failed: 312 GB/s < 380 GB/s", "1 more"],
    ),
    "the failure that names the fewest ranks": (
        [replace(FAILED, culprits=(0, 1, 2)), replace(FAILED, nodeid="b.py::one", culprits=(1,)), FAILED],
        {},
        ["b.py::one failed", "2 more"],
    ),
    "errors": ([BROKE, BROKE], {}, ["acceptance/test_it.py::test_nccl broke: rank 3 hangs", "1 more"]),
    "a problem before errors": ([BROKE], {"problems": ["no space left", "y"]}, ["no space left"]),
    "an abort that rejects": ([PASSED], {"abort": (1, "GPU died")}, ["GPU died"]),
    "a foreign status": ([PASSED], {"pytest_exit": 77}, ["exit status 77"]),
    "what did not run, and why": (
        [PASSED, SKIPPED],
        {"required": ["qwen2"], "not_run": ["a.py::t"]},
        [f"lora ({SKIPPED.message})", "a.py::t (never started)", "qwen2 (required"],
    ),
    "a required one that was skipped is in the suite": (
        [PASSED, NO_ROOM],
        {"required": ["fabric"]},
        [f"fabric (required, and skipped: {NO_ROOM.message})"],
    ),
}


@of_each("case", list(REASONS))
def test_the_reason_says_what_decided(case):
    results, changes, parts = REASONS[case]
    reason = verdict(*results, **changes).reason
    assert [part for part in parts if part not in reason] == [], reason


def test_of_many_that_did_not_run_five_are_named():
    reason = verdict(PASSED, not_run=[f"a.py::test_{number}" for number in range(7)]).reason
    assert [f"test_{number} " in reason for number in range(7)] == [True] * 5 + [False] * 2


def test_a_single_failure_has_no_more():
    assert "more" not in verdict(FAILED).reason


def test_every_exit_code_of_the_table_is_explained():
    assert sorted(EXIT_CODES) == [0, 1, 2, 3, 4, 5, 10, 11, 12]
    for code, text in EXIT_CODES.items():
        words = {0: "ACCEPTED, SELECTION PASSED, REHEARSED or SIMULATED", 1: REJECTED, 10: INCOMPLETE}
        words[12] = PASSED_WITH_DEVIATIONS
        word = words.get(code, BROKEN)
        assert text.startswith(f"{word}: ")


def test_a_run_that_was_ended_is_never_a_pass_nor_incomplete_whatever_its_code():
    found = [verdict(PASSED, abort=(code, "somebody asked for it")) for code in (0, 10, 12)]
    assert [(each.word, each.exit) for each in found] == [(BROKEN, 11)] * 3


def test_a_criterion_that_no_limit_judged_accepts_nothing_and_one_that_was_run_again_is_named():
    found = verdict(PASSED, result("nccl", "passed", unjudged="recorded only"))
    assert (found.word, found.exit) == (INCOMPLETE, 10)
    assert "nccl (recorded only)" in found.reason
    for attempts in (2, 3):
        assert "again: nccl" in verdict(PASSED, result("nccl", "passed", attempts=attempts)).reason
    assert "again" not in verdict(PASSED, result("nccl", "passed", attempts=1)).reason


INVENTORY, COMPUTES = result("inventory", "passed"), result("gpu.compute", "passed")
TINY = result("lora_tiny", "skipped", "too slow to rehearse here: x", too_slow=True)
FSDP = result("fsdp", "passed")

GROUPED = {
    "another one of the group has passed": ([INVENTORY, COMPUTES, FSDP, TINY], REHEARSED, 0),
    "none of the group has": ([INVENTORY, COMPUTES, PASSED, TINY], INCOMPLETE, 10),
    "without the inventory": ([COMPUTES, FSDP, TINY], INCOMPLETE, 10),
    "without a verified product": ([INVENTORY, FSDP, TINY], INCOMPLETE, 10),
    "a criterion of no group": (
        [INVENTORY, COMPUTES, result("of_this_site", "skipped", too_slow=True), FSDP],
        INCOMPLETE,
        10,
    ),
    "what passed of the group has measured nothing": (
        [
            INVENTORY,
            COMPUTES,
            result("nccl.environment", "passed"),
            result("nccl.all_reduce", "skipped", too_slow=True),
        ],
        INCOMPLETE,
        10,
    ),
    "and another one was skipped": ([INVENTORY, COMPUTES, FSDP, TINY, SKIPPED], INCOMPLETE, 10),
    "and another one broke": ([INVENTORY, COMPUTES, FSDP, TINY, BROKE], BROKEN, 11),
    "and another one failed": ([INVENTORY, COMPUTES, FSDP, TINY, FAILED], REJECTED, 1),
    "alone": ([TINY], INCOMPLETE, 10),
}


@of_each("case", list(GROUPED))
def test_a_rehearsal_that_was_too_slow_in_part_needs_the_rest(case):
    results, word, code = GROUPED[case]
    found = verdict(*results, kind="REHEARSAL")
    assert (found.word, found.exit) == (word, code)


def test_what_was_too_slow_is_counted_and_missed_where_it_is_required_or_on_a_gpu():
    assert "3 passed, 1 too slow" in verdict(INVENTORY, COMPUTES, FSDP, TINY, kind="REHEARSAL").reason
    assert "lora_tiny" in verdict(INVENTORY, COMPUTES, TINY, kind="REHEARSAL").reason
    for changes in ({"kind": "REHEARSAL", "required": ["lora_tiny"]}, {}):
        found = verdict(INVENTORY, COMPUTES, FSDP, TINY, **changes)
        assert (found.word, found.exit) == (INCOMPLETE, 10)
