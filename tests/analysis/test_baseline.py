"""An earlier run as the baseline: a value that is worse than there fails, whatever its limit."""

import re
from dataclasses import replace

import pytest
from each import of_each
from verdicts import LIMITS
from written_runs import BF16, HBM, MATMUL, case, measured, place, read, write

from pytest_gpucluster.analysis.baseline import Baseline
from pytest_gpucluster.analysis.run_view import Conditions
from pytest_gpucluster.errors import OptionError
from pytest_gpucluster.judge.judge import judge
from pytest_gpucluster.metrics.measurement import measurement
from pytest_gpucluster.metrics.sampling import Series

NAMES = {0: "rank 0 (gpu-a)", 1: "rank 1 (gpu-a)"}
CONDITIONS = Conditions.of(read())


def about(value):
    return Series(samples=(value,) * 8, median=value, low=value * 0.997, high=value * 1.003)


def judged(*values, **more):
    by_rank = {rank: [measurement(BF16, value, unit="TFLOPS", **more)] for rank, value in enumerate(values)}
    return judge(
        by_rank, world=NAMES, node_of={0: 0, 1: 0}, limits=LIMITS, sku="H100 SXM", gpu_name="NVIDIA H100 80GB HBM3"
    )


def compare(folder, judgement, *tests, nodeid=MATMUL, conditions=CONDITIONS, **more):
    path = write(folder, *(tests or (case(MATMUL, "passed", measured([780, 781])),)), **more)
    baseline = Baseline.read(path, allowed=0.03, kind="")
    return baseline.compare(judgement, nodeid=nodeid, name="test_it", conditions=conditions, names=NAMES)


def test_a_value_above_its_limit_and_below_the_baseline_fails_and_names_its_rank(tmp_path):
    judgement, notes = compare(tmp_path, judged(about(780), about(740)))
    assert judgement.outcome == "failed"
    assert re.match(f"{BF16} .* 3 %: 781 TFLOPS .* 740 TFLOPS .*\\(-5.2 %\\) on rank 1 \\(gpu-a\\)$", judgement.message)
    [found] = judgement.measurements
    assert (found.status, list(found.misses), found.baseline["kind"]) == ("failed", [1], "regressed")
    assert (found.baseline["old"]["value"], found.baseline["allowed_ratio"]) == (781, 0.03)
    assert found.to_json()["baseline"]["old_rank"] == 1
    assert notes == [(f"baseline[{BF16}]", "regressed: 781 TFLOPS before, 740 TFLOPS now (-5.2 %) on rank 1 (gpu-a)")]


@of_each(
    "case",
    [
        ((about(780), about(781)), "passed", "same"),
        ((about(779), about(781)), "passed", "within noise"),
        ((about(780), about(770)), "passed", "worse"),  # and allowed
        ((about(840), about(840)), "passed", "better"),
        ((about(650), about(781)), "failed", "regressed"),  # below the limit too
        ((float("nan"), about(781)), "error", "not comparable"),
    ],
)
def test_what_the_baseline_finds_is_recorded_whatever_it_is(tmp_path, case):
    values, outcome, kind = case
    judgement, [(name, note)] = compare(tmp_path, judged(*values))
    assert (judgement.outcome, judgement.measurements[0].baseline["kind"]) == (outcome, kind)
    assert (name, note.startswith(f"{kind}: ")) == (f"baseline[{BF16}]", True)


def test_a_test_or_a_value_that_only_one_of_them_has_is_a_note(tmp_path):
    tests = case(MATMUL, "failed", measured([9])), case(HBM, "passed", measured([3]))
    for there, note in ((tests[1:], "no such test"), (tests, "(failed)")):
        judgement, [(name, text)] = compare(tmp_path, judged(about(780), about(780)), *there)
        assert (judgement.outcome, name, note in text) == ("passed", "baseline", True)
    judgement, notes = compare(tmp_path, judged(about(780), about(780), labels={"n": 1}))
    assert judgement.outcome == "passed"
    assert {name: text.split()[-1] for name, text in notes} == {
        f"baseline[{BF16}{{n=1}}]": "before",
        f"baseline[{BF16}]": "now",
    }


def test_what_is_only_recorded_does_not_fail(tmp_path):
    recorded = case(MATMUL, "passed", measured([780, 781], status="recorded"))
    judgement, notes = compare(tmp_path, judged(about(600), about(600), record_only=True), recorded)
    assert (judgement.outcome, notes) == ("passed", [])
    assert judgement.measurements[0].baseline["kind"] == "regressed"


@of_each("changes", [{"sku": "H200 SXM"}, {"kind": "SIMULATED"}, {"workload": None}])
def test_a_baseline_that_cannot_be_compared_is_never_a_pass(tmp_path, changes):
    conditions = replace(CONDITIONS, **changes)
    judgement, _ = compare(tmp_path, judged(about(780), about(780)), conditions=conditions)
    assert (judgement.outcome, "baseline: " in judgement.message) == ("error", True)
    judgement, _ = compare(tmp_path, judged(about(600), about(780)), conditions=conditions)
    assert (judgement.outcome, "baseline: " in judgement.text) == ("failed", True)


def test_ranks_that_only_the_baseline_has_do_not_hide_the_comparison_of_the_others(tmp_path):
    ranks = [place(0), place(1), place(2, host="gpu-b", local_rank=0), place(3, host="gpu-b", local_rank=1)]
    larger = case(MATMUL, "passed", measured([780, 781, 782, 783]))
    good, [(_, note)] = compare(tmp_path, judged(about(780), about(781)), larger, ranks=ranks)
    assert note.startswith("same: ")
    assert good.measurements[0].baseline["change_ratio"] is not None
    bad, _ = compare(tmp_path, judged(about(780), about(740)), larger, ranks=ranks)
    assert (bad.outcome, list(bad.measurements[0].misses)) == ("failed", [1])


@of_each(
    "one",
    [
        ((case(MATMUL, "passed", measured([1])),), {"rehearsal": True}, "REHEARSAL"),
        ((case(MATMUL, "passed", measured([1])),), {"device": "simulated"}, "SIMULATED"),
        ((case(MATMUL, "failed", measured([1])),), {}, "none of its tests"),
        ((case(MATMUL, "passed"),), {}, "none of its tests"),
        ((), {"schema_version": 99}, "up to 1"),
    ],
)
def test_a_baseline_of_no_use_is_refused(tmp_path, one):
    tests, more, message = one
    with pytest.raises(OptionError, match="--gpucluster-baseline") as error:
        Baseline.read(write(tmp_path, *tests, **more), allowed=0.03, kind="")
    assert message in str(error.value)


def test_no_baseline_and_no_journal_are_refused(tmp_path):
    (tmp_path / "text").write_text("a shopping list\n")
    for name, message in (("none", "cannot be read"), ("text", "not a journal"), ("", "neither a journal.jsonl nor")):
        with pytest.raises(OptionError, match=message):
            Baseline.read(tmp_path / name, allowed=0.03, kind="")


SUITE = """
import pathlib
import pytest

@pytest.mark.criterion("fast")
def test_fast(measure):
    rate = float(pathlib.Path("rate").read_text())
    measure("matmul.fp32.tflops", rate, unit="GFLOPS", samples=[rate] * 8, n=256)
"""


@pytest.fixture
def measuring(project):
    """A suite whose one criterion measures the given rate, and its first run."""
    project.suite(SUITE)

    def run(rate, *options):
        (project.path / "rate").write_text(str(rate))
        return project.run(*options)

    return run


def test_a_session_is_compared_with_the_latest_one_and_fails_what_is_worse(measuring):
    first = measuring(200)
    assert first.exit == 0
    left = measuring(198, "--gpucluster-baseline=gpucluster-report")
    assert left.exit == 0
    assert re.search("baseline .*3 %", left.journal.reason)
    assert dict(left.journal.results[0].properties)["baseline[matmul.fp32.tflops{n=256}]"].startswith("worse: ")
    assert measuring(150, "--gpucluster-baseline=gpucluster-report", "--gpucluster-baseline-fail=30%").exit == 0
    left = measuring(110, "--gpucluster-baseline=gpucluster-report/latest")  # this run's own folder, a moment later
    assert left.exit == 1
    assert left.end == ("REJECTED", 1)
    expected = r"failure: matmul.fp32.tflops .* 3 %: 0.15 TFLOPS .* 0.11 TFLOPS .*\(-26.7 %\)"
    assert re.match(expected, left.verdicts["test_fast"])
    [result] = left.journal.results
    assert result.measurements[0].baseline["kind"] == "regressed"
    assert "[[PROPERTY|baseline" in "".join(left.case("test_fast").itertext())
    assert "journal.jsonl" in left.properties["baseline"]


def test_a_baseline_that_cannot_serve_is_a_usage_error_before_the_first_test(measuring, project):
    good = case(MATMUL, "passed", measured([1]))
    write(project.path / "gpus", good, ranks=[place(0)])
    write(project.path / "other", good, ranks=[place(0, uuid="")], rehearsal=True, sku="another-rehearsal")
    for name, message in {"gpus": "REHEARSAL on cpu", "other": "another SKU"}.items():
        left = measuring(200, f"--gpucluster-baseline={name}")
        assert (left.exit, left.end, left.journal.results) == (4, ("BROKEN", 4), ())
        assert message in left.output


def test_a_verdict_states_how_many_values_were_compared_with_the_baseline(tmp_path):
    baseline = Baseline.read(write(tmp_path, case(MATMUL, "passed", measured([780, 781]))), allowed=0.03, kind="")

    def compared(judgement, **more):
        now, _ = baseline.compare(
            judgement, **{"nodeid": MATMUL, "name": "it", "conditions": CONDITIONS, "names": NAMES, **more}
        )
        return [each.to_json() for each in now.measurements]

    same = compared(judged(about(780), about(781)))
    other = compared(judged(about(780), about(781), labels={"n": 1}))
    unknown = compared(judged(about(780), about(781)), nodeid=HBM)
    assert baseline.remark([same]).split(", ")[-1].startswith("1 of 1 ")
    assert baseline.remark([same, other, unknown]).split(", ")[-1].startswith("1 of 3 ")
    for nothing in ([], [other], [unknown]):
        assert baseline.remark(nothing).startswith("NOTHING ")
