from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from pytest_gpucluster.verdict import (
    ACCEPTED,
    BROKEN,
    EXIT_CODES,
    GROUPS,
    INCOMPLETE,
    REHEARSED,
    REHEARSED_ALWAYS,
    REJECTED,
    SELECTION_PASSED,
    TestResult,
    Verdict,
    decide,
)

ROOT = Path(__file__).parent.parent
TOPOLOGY = "2 nodes, 16 ranks, as expected (2x8xH100)"
LOST = (11, "rank 3 is lost")


def result(name: str, outcome: str, message: str = "", *, criterion: bool = True, **more: bool) -> TestResult:
    return TestResult(
        nodeid=f"acceptance/test_it.py::test_{name}",
        criterion=name if criterion else None,
        outcome=outcome,
        message=message,
        **more,
    )


PASSED = result("matmul", "passed")
FAILED = result("nccl", "failed", "312 GB/s < 380 GB/s")
BROKE = result("nccl", "error", "rank 3 hangs")
SKIPPED = result("lora", "skipped", "needs 2 nodes, and there is 1")
NO_ROOM = result("fabric", "skipped", "needs 2 nodes, and there is 1", applicable=False)
HELPER = result("helper", "passed", criterion=False)
HELPER_SKIPPED = result("helper", "skipped", "not here", criterion=False)


def verdict(*results: TestResult, **changes: Any) -> Verdict:
    settings: dict[str, Any] = {"pytest_exit": 0, "rehearsal": False, "selection": False, "topology": TOPOLOGY}
    return decide(results, **{**settings, **changes})


@pytest.mark.parametrize(
    ("results", "changes", "word", "code"),
    [
        # Everything that ran passed.
        pytest.param([PASSED], {}, ACCEPTED, 0, id="all passed on cuda"),
        pytest.param([PASSED, HELPER], {}, ACCEPTED, 0, id="with a test that is no criterion"),
        pytest.param([PASSED, NO_ROOM], {}, ACCEPTED, 0, id="one has no room in the declared topology"),
        pytest.param([PASSED, HELPER_SKIPPED], {}, ACCEPTED, 0, id="a skip that is no criterion"),
        pytest.param([PASSED], {"required": ["matmul"]}, ACCEPTED, 0, id="with what was required"),
        pytest.param([PASSED], {"selection": True}, SELECTION_PASSED, 0, id="a selection"),
        pytest.param([HELPER], {}, SELECTION_PASSED, 0, id="a suite without a criterion"),
        pytest.param([PASSED], {"rehearsal": True}, REHEARSED, 0, id="a rehearsal"),
        pytest.param([PASSED], {"rehearsal": True, "selection": True}, REHEARSED, 0, id="a selection of a rehearsal"),
        # A verdict about the hardware.
        pytest.param([FAILED], {"pytest_exit": 1}, REJECTED, 1, id="a limit missed"),
        pytest.param([FAILED], {"pytest_exit": 1, "rehearsal": True}, REJECTED, 1, id="also in a rehearsal"),
        pytest.param([FAILED], {"pytest_exit": 1, "selection": True}, REJECTED, 1, id="also in a selection"),
        pytest.param([HELPER, result("x", "failed", criterion=False)], {}, REJECTED, 1, id="any test counts"),
        pytest.param([PASSED], {"ending": (1, "the GPU of rank 3 works no more")}, REJECTED, 1, id="a GPU died of it"),
        pytest.param([BROKE, FAILED], {"pytest_exit": 1}, REJECTED, 1, id="wins over an error"),
        pytest.param([SKIPPED, FAILED], {"pytest_exit": 1}, REJECTED, 1, id="wins over what did not run"),
        pytest.param([FAILED], {"ending": LOST}, REJECTED, 1, id="wins over a lost rank"),
        pytest.param([FAILED], {"problems": ["no space left"]}, REJECTED, 1, id="wins over a problem"),
        pytest.param([FAILED], {"pytest_exit": 2}, REJECTED, 1, id="stopped at a failure"),
        # pytest's own.
        pytest.param([PASSED], {"ending": (2, "interrupted")}, BROKEN, 2, id="interrupted"),
        pytest.param([FAILED], {"ending": (2, "interrupted")}, BROKEN, 2, id="interrupted after a failure"),
        pytest.param([], {"ending": (3, "internal error")}, BROKEN, 3, id="an internal error"),
        pytest.param([FAILED], {"ending": (3, "internal error")}, BROKEN, 3, id="an internal error after a failure"),
        pytest.param([], {"ending": (4, "usage")}, BROKEN, 4, id="a usage error"),
        pytest.param([], {"pytest_exit": 2}, BROKEN, 2, id="collection failed on every rank"),
        pytest.param([PASSED], {"pytest_exit": 3}, BROKEN, 3, id="pytest says an internal error"),
        pytest.param([], {"pytest_exit": 4}, BROKEN, 4, id="pytest says a usage error"),
        pytest.param([], {"pytest_exit": 5}, BROKEN, 5, id="nothing collected"),
        pytest.param([], {"pytest_exit": 5, "rehearsal": True}, BROKEN, 5, id="nothing collected in a rehearsal"),
        # The run broke.
        pytest.param([PASSED, BROKE], {"pytest_exit": 1}, BROKEN, 11, id="an error"),
        pytest.param([BROKE, SKIPPED], {"pytest_exit": 1}, BROKEN, 11, id="an error wins over what did not run"),
        pytest.param([BROKE], {"pytest_exit": 2}, BROKEN, 11, id="stopped at an error"),
        pytest.param([PASSED], {"ending": LOST}, BROKEN, 11, id="a rank lost"),
        pytest.param([PASSED], {"ending": LOST, "pytest_exit": 2}, BROKEN, 11, id="which pytest calls interrupted"),
        pytest.param([PASSED], {"problems": ["no space left"]}, BROKEN, 11, id="a problem outside any test"),
        pytest.param([BROKE], {"rehearsal": True}, BROKEN, 11, id="an error in a rehearsal"),
        pytest.param([PASSED], {"pytest_exit": 1}, BROKEN, 11, id="pytest knows of a failure that is not on record"),
        pytest.param([PASSED], {"pytest_exit": 77}, BROKEN, 11, id="another plugin's exit status"),
        # Something had to run and did not.
        pytest.param([PASSED, SKIPPED], {}, INCOMPLETE, 10, id="a criterion skipped"),
        pytest.param([PASSED, SKIPPED], {"rehearsal": True}, INCOMPLETE, 10, id="a criterion skipped in a rehearsal"),
        pytest.param([PASSED, SKIPPED], {"selection": True}, INCOMPLETE, 10, id="a criterion skipped in a selection"),
        pytest.param([PASSED], {"required": ["lora"]}, INCOMPLETE, 10, id="a required one is not in the suite"),
        pytest.param([PASSED, NO_ROOM], {"required": ["fabric"]}, INCOMPLETE, 10, id="a required one has no room"),
        pytest.param([PASSED], {"not_run": ["a.py::t"]}, INCOMPLETE, 10, id="a test was never started"),
        pytest.param([NO_ROOM], {}, INCOMPLETE, 10, id="nothing has room"),
        pytest.param([HELPER_SKIPPED], {}, INCOMPLETE, 10, id="everything was skipped"),
        pytest.param([], {}, INCOMPLETE, 10, id="nothing ran"),
        pytest.param([], {"rehearsal": True}, INCOMPLETE, 10, id="nothing ran in a rehearsal"),
    ],
)
def test_the_table_of_verdicts(results: list[TestResult], changes: dict[str, Any], word: str, code: int) -> None:
    found = verdict(*results, **changes)
    assert (found.word, found.exit) == (word, code)
    assert found.reason
    assert "\n" not in found.reason


@pytest.mark.parametrize(
    ("results", "changes", "reason"),
    [
        pytest.param([PASSED], {}, f"1 passed; {TOPOLOGY}", id="accepted"),
        pytest.param([PASSED], {"selection": True}, f"1 passed; {TOPOLOGY}; only a selection ran", id="selection"),
        pytest.param(
            [HELPER], {}, f"1 passed; {TOPOLOGY}; the suite holds no acceptance criterion", id="without a criterion"
        ),
        pytest.param([PASSED], {"rehearsal": True}, f"1 passed; {TOPOLOGY}", id="cpu"),
        pytest.param(
            [BROKE, FAILED, FAILED],
            {},
            "acceptance/test_it.py::test_nccl failed: 312 GB/s < 380 GB/s (and 1 more)",
            id="the first failure, not the error before it",
        ),
        pytest.param(
            [BROKE, BROKE], {}, "acceptance/test_it.py::test_nccl broke: rank 3 hangs (and 1 more)", id="errors"
        ),
        pytest.param([BROKE], {"problems": ["no space left", "y"]}, "no space left", id="a problem before errors"),
        pytest.param([PASSED], {"ending": LOST}, "rank 3 is lost", id="an ending"),
        pytest.param([PASSED], {"ending": (1, "GPU died")}, "GPU died", id="an ending that rejects"),
        pytest.param([], {"pytest_exit": 5}, "no test was collected", id="pytest's own"),
        pytest.param([PASSED], {"pytest_exit": 77}, "pytest ended with exit status 77", id="a foreign status"),
        pytest.param(
            [PASSED, SKIPPED],
            {"required": ["qwen2"], "not_run": ["a.py::t"]},
            "did not run: lora (needs 2 nodes, and there is 1); a.py::t (never started); "
            "qwen2 (required, but not in the suite that ran)",
            id="what did not run, and why",
        ),
        pytest.param(
            [PASSED, NO_ROOM],
            {"required": ["fabric"]},
            f"did not run: fabric (required, and skipped: {NO_ROOM.message})",
            id="a required one that was skipped is in the suite",
        ),
        pytest.param(
            [], {}, "did not run: everything (each test was skipped or does not apply here)", id="nothing ran"
        ),
    ],
)
def test_the_reason_says_what_decided(results: list[TestResult], changes: dict[str, Any], reason: str) -> None:
    assert verdict(*results, **changes).reason == reason


def test_of_many_that_did_not_run_a_few_are_told() -> None:
    reason = verdict(*(result(f"c{n}", "skipped") for n in range(9)), PASSED).reason
    assert reason.count("(skipped)") == 5


def test_every_exit_code_of_the_table_is_explained() -> None:
    assert sorted(EXIT_CODES) == [0, 1, 2, 3, 4, 5, 10, 11]
    for code, text in EXIT_CODES.items():
        word = {0: "ACCEPTED, SELECTION PASSED or REHEARSED", 1: REJECTED, 10: INCOMPLETE}.get(code, BROKEN)
        assert text.startswith(f"{word}: ")


@pytest.mark.parametrize("code", [0, 10])
def test_a_run_that_was_ended_is_never_a_pass_nor_incomplete_whatever_its_code(code: int) -> None:
    found = verdict(PASSED, ending=(code, "somebody asked for it"))
    assert (found.word, found.exit) == (BROKEN, 11)


def test_a_criterion_that_no_limit_judged_accepts_nothing() -> None:
    unjudged = TestResult(nodeid="t", criterion="nccl", outcome="passed", unjudged="recorded only: no measurement")
    found = verdict(PASSED, unjudged)
    assert (found.word, found.exit) == (INCOMPLETE, 10)
    assert found.reason == "not judged: nccl (recorded only: no measurement)"


def test_what_passed_only_when_run_again_is_named() -> None:
    again = TestResult(nodeid="t", criterion="nccl", outcome="passed", attempts=3)
    assert "passed only when run again: nccl" in verdict(PASSED, again).reason
    assert verdict(PASSED, again, again).reason.count("nccl") == 1
    assert "again" not in verdict(PASSED).reason


def test_a_rehearsal_says_when_only_a_selection_ran() -> None:
    assert verdict(PASSED, rehearsal=True, selection=True).reason.endswith("only a selection ran")


INVENTORY, COMPUTES = result("inventory", "passed"), result("gpu.compute", "passed")
TINY = result("lora_tiny", "skipped", "too slow to rehearse here: x", too_slow=True)
FSDP = result("fsdp", "passed")


@pytest.mark.parametrize(
    ("results", "word", "code"),
    [
        pytest.param([INVENTORY, COMPUTES, FSDP, TINY], REHEARSED, 0, id="another one of the group has passed"),
        pytest.param([INVENTORY, COMPUTES, PASSED, TINY], INCOMPLETE, 10, id="none of the group has"),
        pytest.param([COMPUTES, FSDP, TINY], INCOMPLETE, 10, id="without the inventory"),
        pytest.param([INVENTORY, FSDP, TINY], INCOMPLETE, 10, id="without a verified product"),
        pytest.param(
            [INVENTORY, COMPUTES, result("of_this_site", "skipped", too_slow=True), FSDP],
            INCOMPLETE,
            10,
            id="a criterion of no group",
        ),
        pytest.param(
            [
                INVENTORY,
                COMPUTES,
                result("nccl.environment", "passed"),
                result("nccl.all_reduce", "skipped", too_slow=True),
            ],
            INCOMPLETE,
            10,
            id="what passed of the group has measured nothing",
        ),
        pytest.param([INVENTORY, COMPUTES, FSDP, TINY, SKIPPED], INCOMPLETE, 10, id="and another one was skipped"),
        pytest.param([INVENTORY, COMPUTES, FSDP, TINY, BROKE], BROKEN, 11, id="and another one broke"),
        pytest.param([INVENTORY, COMPUTES, FSDP, TINY, FAILED], REJECTED, 1, id="and another one failed"),
        pytest.param([TINY], INCOMPLETE, 10, id="alone"),
    ],
)
def test_a_rehearsal_that_was_too_slow_in_part_needs_the_rest(results: list[TestResult], word: str, code: int) -> None:
    found = verdict(*results, rehearsal=True)
    assert (found.word, found.exit) == (word, code)


def test_what_was_too_slow_is_counted_and_named() -> None:
    assert "3 passed, 1 too slow to rehearse here" in verdict(INVENTORY, COMPUTES, FSDP, TINY, rehearsal=True).reason
    assert "lora_tiny" in verdict(INVENTORY, COMPUTES, TINY, rehearsal=True).reason


def test_what_was_too_slow_is_missed_where_it_is_required_or_on_a_gpu() -> None:
    found = verdict(INVENTORY, COMPUTES, FSDP, TINY, rehearsal=True, required=["lora_tiny"])
    assert (found.word, found.exit) == (INCOMPLETE, 10)
    found = verdict(INVENTORY, COMPUTES, FSDP, TINY)
    assert (found.word, found.exit) == (INCOMPLETE, 10)


def test_the_groups_are_of_criteria_that_there_are() -> None:
    suite = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "acceptance").glob("test_*.py"))
    criteria = set(re.findall(r"criterion\(\"(.+?)\"\)", suite))
    named = [name for names in GROUPS.values() for name in names]
    assert set(named) | set(REHEARSED_ALWAYS) <= criteria
    assert len(named) == len(set(named))
