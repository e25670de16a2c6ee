"""An earlier run as a measure: what has become worse than there fails, whatever the limits say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sessions import Project
from verdicts import LIMITS
from written_runs import BF16, HBM, MATMUL, case, measured, place, read, write

from pytest_gpucluster.baseline import Baseline
from pytest_gpucluster.comparison.side import facts_of
from pytest_gpucluster.errors import OptionError
from pytest_gpucluster.judge import judge
from pytest_gpucluster.metrics import measurement
from pytest_gpucluster.sampling import Series

NAMES = {0: "rank 0 (gpu-a)", 1: "rank 1 (gpu-a)"}
FACTS = facts_of(read())


def about(value: float) -> Series:
    return Series(samples=(value,) * 8, median=value, low=value * 0.997, high=value * 1.003)


def judged(*values: Any, **more: Any):
    by_rank = {rank: [measurement(BF16, value, unit="TFLOPS", **more)] for rank, value in enumerate(values)}
    return judge(
        by_rank, world=NAMES, node_of={0: 0, 1: 0}, limits=LIMITS, sku="H100 SXM", gpu_name="NVIDIA H100 80GB HBM3"
    )


def held(folder: Path, judgement: Any, *tests: Any, nodeid: str = MATMUL, facts: Any = FACTS, **more: Any):
    path = write(folder, *(tests or (case(MATMUL, "passed", measured([780, 781])),)), **more)
    baseline = Baseline.read(path, allowed=0.03, rehearsal=False)
    return baseline.hold(judgement, nodeid=nodeid, name="test_it", facts=facts, names=NAMES)


def test_a_value_above_its_limit_and_below_the_baseline_fails_and_names_its_rank(tmp_path):
    judgement, notes = held(tmp_path, judged(about(780), about(740)))
    assert judgement.outcome == "failed"
    assert judgement.message == (
        f"{BF16} 740 TFLOPS is worse than the baseline's 781 TFLOPS (-5.2 %, 3 % is allowed) on rank 1 (gpu-a)"
    )
    [found] = judgement.measurements
    assert (found.status, list(found.misses), found.baseline["kind"]) == ("failed", [1], "regressed")
    assert (found.baseline["old"]["value"], found.baseline["allowed_ratio"]) == (781, 0.03)
    assert found.to_json()["baseline"]["old_rank"] == 1
    assert notes == [
        (f"baseline[{BF16}]", "regressed: 781 TFLOPS before, 740 TFLOPS now (-5.2 %) on rank 1 (gpu-a)"),
    ]


@pytest.mark.parametrize(
    ("values", "outcome", "kind"),
    [
        pytest.param((about(780), about(781)), "passed", "same", id="the same"),
        pytest.param((about(779), about(781)), "passed", "within noise", id="within noise"),
        pytest.param((about(780), about(770)), "passed", "worse", id="worse, and allowed"),
        pytest.param((about(840), about(840)), "passed", "better", id="better"),
        pytest.param((about(650), about(781)), "failed", "regressed", id="below the limit too"),
        pytest.param((float("nan"), about(781)), "error", "not comparable", id="no number stays an error"),
    ],
)
def test_what_the_baseline_finds_is_on_record_whatever_it_is(tmp_path, values, outcome, kind):
    judgement, [(name, note)] = held(tmp_path, judged(*values))
    assert (judgement.outcome, judgement.measurements[0].baseline["kind"]) == (outcome, kind)
    assert (name, note.startswith(f"{kind}: ")) == (f"baseline[{BF16}]", True)


def test_a_missed_limit_speaks_first(tmp_path):
    judgement, _ = held(tmp_path, judged(about(650), about(781)))
    assert judgement.message.startswith(f"{BF16} 650 TFLOPS < 700 TFLOPS")
    assert judgement.message.endswith("; also worse than the baseline")
    assert len(judgement.message) <= 200
    assert "also: " in judgement.measurements[0].reason


@pytest.mark.parametrize(
    ("tests", "note"),
    [
        ((case(HBM, "passed", measured([3])),), "nothing to be held against: the baseline has no such test"),
        (
            (case(MATMUL, "failed", measured([9])), case(HBM, "passed", measured([3]))),
            "nothing to be held against: the baseline did not pass it (failed)",
        ),
    ],
)
def test_a_test_that_the_baseline_does_not_have_is_a_note(tmp_path, tests, note):
    judgement, notes = held(tmp_path, judged(about(780), about(780)), *tests)
    assert (judgement.outcome, notes) == ("passed", [("baseline", note)])


def test_a_value_that_only_one_of_them_has_is_a_note(tmp_path):
    judgement, notes = held(tmp_path, judged(about(780), about(780), labels={"n": 1}))
    assert judgement.outcome == "passed"
    assert dict(notes) == {
        f"baseline[{BF16}{{n=1}}]": "nothing to be held against: no such value before",
        f"baseline[{BF16}]": "nothing to be held against: no such value now",
    }


def test_what_is_only_recorded_does_not_fail(tmp_path):
    recorded = case(MATMUL, "passed", measured([780, 781], status="recorded"))
    judgement, notes = held(tmp_path, judged(about(600), about(600), record_only=True), recorded)
    assert (judgement.outcome, notes) == ("passed", [])
    assert judgement.measurements[0].baseline["kind"] == "regressed"


@pytest.mark.parametrize("changes", [{"sku": "H200 SXM"}, {"rehearsal": True}, {"workload": None}])
def test_a_baseline_that_says_nothing_about_this_run_is_never_a_pass(tmp_path, changes):
    facts = replace(FACTS, **changes)
    judgement, _ = held(tmp_path, judged(about(780), about(780)), facts=facts)
    assert (judgement.outcome, "cannot be held against the baseline: " in judgement.message) == ("error", True)
    judgement, _ = held(tmp_path, judged(about(600), about(780)), facts=facts)
    assert (judgement.outcome, "cannot be held against the baseline: " in judgement.text) == ("failed", True)


def test_a_gpu_is_held_against_itself_wherever_it_is_now(tmp_path):
    ranks = [place(0, uuid="GPU-gpu-a-1"), place(1, uuid="GPU-gpu-a-0")]
    slow_one = case(MATMUL, "passed", measured([720, 781]))
    judgement, _ = held(tmp_path, judged(about(720), about(781)), slow_one, ranks=ranks)
    assert (judgement.outcome, list(judgement.measurements[0].misses)) == ("failed", [0])


def test_ranks_that_only_the_baseline_has_do_not_hide_what_the_others_were_held_against(tmp_path):
    ranks = [place(0), place(1), place(2, host="gpu-b", local_rank=0), place(3, host="gpu-b", local_rank=1)]
    larger = case(MATMUL, "passed", measured([780, 781, 782, 783]))
    good, [(_, note)] = held(tmp_path, judged(about(780), about(781)), larger, ranks=ranks)
    assert note.startswith("same: ")
    assert good.measurements[0].baseline["change_ratio"] is not None
    bad, _ = held(tmp_path, judged(about(780), about(740)), larger, ranks=ranks)
    assert (bad.outcome, list(bad.measurements[0].misses)) == ("failed", [1])


def test_a_rank_of_this_run_without_a_value_is_still_told(tmp_path):
    _, [(_, note)] = held(tmp_path, judged(about(780)), case(MATMUL, "passed", measured([780, 781])))
    assert note == "nothing to be held against: no value now"


@pytest.mark.parametrize(
    ("tests", "more", "said"),
    [
        (
            (case(MATMUL, "passed", measured([1])),),
            {"rehearsal": True},
            "is a REHEARSAL on cpu, and this is a run on GPUs",
        ),
        ((case(MATMUL, "failed", measured([1])),), {}, "no test of it has passed with a measurement"),
        ((case(MATMUL, "passed"),), {}, "no test of it has passed with a measurement"),
        ((), {"schema_version": 99}, "this version reads up to 1"),
    ],
)
def test_a_baseline_that_is_no_measure_is_refused(tmp_path, tests, more, said):
    with pytest.raises(OptionError, match="--gpucluster-baseline") as error:
        Baseline.read(write(tmp_path, *tests, **more), allowed=0.03, rehearsal=False)
    assert said in str(error.value)


def test_no_baseline_and_no_journal_are_refused(tmp_path):
    (tmp_path / "text").write_text("a shopping list\n")
    for name, said in (("none", "no such journal"), ("text", "not a journal"), ("", "neither a journal.jsonl nor")):
        with pytest.raises(OptionError, match=said):
            Baseline.read(tmp_path / name, allowed=0.03, rehearsal=False)


# ---- whole sessions -------------------------------------------------------------------------------------------------

SUITE = """
import pathlib
import pytest

@pytest.mark.criterion("fast")
def test_fast(measure):
    rate = float(pathlib.Path("rate").read_text())
    measure("matmul.fp32.tflops", rate, unit="GFLOPS", samples=[rate] * 8, n=256)
"""


@pytest.fixture
def measuring(project: Project):
    """A suite whose one criterion measures what it is told, and its first run."""
    project.suite(SUITE)

    def run(rate: float, *options: str):
        (project.path / "rate").write_text(str(rate))
        return project.run(*options)

    return run


def test_a_session_fails_what_has_become_worse_and_keeps_it_on_record(measuring):
    assert measuring(200).exit == 0
    latest = "--gpucluster-baseline=gpucluster-report/latest"  # which is this run's own folder, a moment later
    left = measuring(150, latest)
    assert left.exit == 1
    assert left.end == ("REJECTED", 1)
    assert left.verdicts["test_fast"].startswith(
        "failure: matmul.fp32.tflops 0.15 TFLOPS is worse than the baseline's 0.2 TFLOPS (-25.0 %, 3 % is allowed)"
    )
    [result] = left.journal.results
    assert result.measurements[0].baseline["kind"] == "regressed"
    assert "[[PROPERTY|baseline" in "".join(left.case("test_fast").itertext())
    assert "held against the baseline" in left.properties["baseline"]


def test_a_session_that_is_as_good_passes_and_its_verdict_says_against_what(measuring):
    assert measuring(200).exit == 0
    left = measuring(198, "--gpucluster-baseline=gpucluster-report")
    assert left.exit == 0
    assert ("held against the baseline" in left.journal.reason, "3 % worse is allowed" in left.journal.reason) == (
        True,
        True,
    )
    assert dict(left.journal.results[0].properties)["baseline[matmul.fp32.tflops{n=256}]"].startswith("worse: ")
    left = measuring(150, "--gpucluster-baseline=gpucluster-report", "--gpucluster-baseline-fail=30%")
    assert left.exit == 0


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--gpucluster-baseline=gpus", "is a run on GPUs, and this is a REHEARSAL on cpu"),
        ("--gpucluster-baseline=other", "nothing of this run can be held against it: another SKU"),
    ],
)
def test_a_baseline_that_cannot_serve_is_a_usage_error_before_the_first_test(measuring, project, option, said):
    good = case(MATMUL, "passed", measured([1]))
    write(project.path / "gpus", good, ranks=[place(0)])
    write(project.path / "other", good, ranks=[place(0, uuid="")], rehearsal=True, sku="another-rehearsal")
    left = measuring(200, option)
    assert left.exit == 4
    assert said in left.output
    assert left.end == ("BROKEN", 4)
    assert left.journal.results == ()


def test_a_verdict_says_how_much_could_be_held_against_the_baseline(tmp_path):
    baseline = Baseline.read(
        write(tmp_path, case(MATMUL, "passed", measured([780, 781]))), allowed=0.03, rehearsal=False
    )

    def told(judgement, **more):
        now, _ = baseline.hold(judgement, **{"nodeid": MATMUL, "name": "it", "facts": FACTS, "names": NAMES, **more})
        return [each.to_json() for each in now.measurements]

    same = told(judged(about(780), about(781)))
    other = told(judged(about(780), about(781), labels={"n": 1}))
    unknown = told(judged(about(780), about(781)), nodeid=HBM)
    assert baseline.remark([same]).endswith(", 1 of 1 values had one there")
    assert baseline.remark([same, other, unknown]).endswith(", 1 of 3 values had one there")
    for nothing in ([], [other], [unknown]):
        assert baseline.remark(nothing).startswith("NOTHING could be held against the baseline ")
