"""How long a run is going to measure: bounds from the workload, and what nobody knows beforehand."""

from __future__ import annotations

from pathlib import Path

import pytest
from sessions import Project

from pytest_gpucluster.predicted import Predicted, Span, predict
from pytest_gpucluster.workload_file import Override, load
from pytest_gpucluster.workloads import Workload

ACCEPTANCE = Path(__file__).parent.parent / "acceptance"
FULL = load(ACCEPTANCE / "workloads.yaml", profile="full").workload
QUICK = load(ACCEPTANCE / "workloads.yaml", profile="quick").workload


@pytest.mark.parametrize(
    ("name", "criterion", "least", "most"),
    [
        # Three sizes: 10 s of warm-up and 3 s of samples at least, 2 x 10 s at most.
        ("test_matmul[bf16]", "matmul", 3 * 13.0, 3 * 30.0),
        # Six shapes in four layouts, looked at for 0.2 s and, but for the first, warmed up as long; then one of them.
        ("test_matmul_search[bf16]", "matmul.search", 5.0 + 47 * 0.2 + 8.0, 5.0 + 47 * 0.2 + 25.0),
        ("test_matmul_search[fp8]", "matmul.search", 5.0 + 11 * 0.2 + 8.0, 5.0 + 11 * 0.2 + 25.0),
        ("test_hbm[copy]", "hbm", 2 * 5.0, 2 * 22.0),
        # Nine sizes and three for the latency; one GPU alone takes the smallest of these and the largest.
        ("test_all_reduce[world-bf16]", "nccl.all_reduce", 12 * 5.0, 12 * 22.0),
        ("test_all_reduce[gpu-bf16]", "nccl.all_reduce", 2 * 5.0, 2 * 22.0),
        ("test_collective[world-all_gather-bf16]", "nccl.collectives", 6 * 2.0, 6 * 10.5),
        ("test_burn_in", "burn_in", 180.0, 216.0),
        ("test_gpu_health", "gpu.health", 20.0, 20.0),
        ("test_throughput[ddp-large]", "training.throughput", 15.0, 40.0),
    ],
)
def test_each_criterion_takes_what_its_workload_says(name: str, criterion: str, least: float, most: float) -> None:
    found = predict([(name, criterion)], FULL)
    assert found.span.least_seconds == pytest.approx(least)
    assert found.span.most_seconds == pytest.approx(most)
    assert (found.tests, found.other_tests) == (1, 0)


def test_an_override_counts() -> None:
    override = Override(key="burn_in.duration", texts=("2 h",), origin="here")
    longer = load(ACCEPTANCE / "workloads.yaml", profile="full", overrides=[override]).workload
    assert predict([("test_burn_in", "burn_in")], longer).span.least_seconds == 7200.0


def test_what_is_not_predicted_is_counted_and_named() -> None:
    tests = [("test_hbm[copy]", "hbm"), ("test_ddp", "ddp"), ("test_fsdp", "fsdp"), ("test_fsdp_memory", "fsdp")]
    found = predict([*tests, ("test_mine", None)], QUICK)
    assert (found.tests, found.other_tests, found.others) == (1, 4, ("ddp", "fsdp", "test_mine"))
    assert str(found) == (
        "5 s to 22 s of warm-up and samples in 1 test, if all are run; beside it set-up and verifying, and 4 tests of"
        " unknown length (ddp, fsdp, test_mine)"
    )


def test_a_time_of_nothing_is_no_time() -> None:
    assert str(predict([("test_ddp", "ddp")], QUICK)) == "the time of none of these tests is known beforehand"
    assert str(predict([], QUICK)) == "the time of none of these tests is known beforehand"


def test_many_names_are_cut() -> None:
    others = tuple("abcdef")
    text = str(Predicted(span=Span(), tests=1, others=others, other_tests=6))
    assert text.endswith("6 tests of unknown length (a, b, c, d, ...)")


def workload_of(profile: str) -> Workload:
    return load(ACCEPTANCE / "workloads.yaml", profile=profile).workload


@pytest.mark.parametrize("profile", ["quick", "full", "soak", "cpu"])
def test_the_least_is_never_more_than_the_most(profile: str) -> None:
    criteria = (
        "matmul",
        "matmul.search",
        "hbm",
        "nccl.all_reduce",
        "nccl.collectives",
        "burn_in",
        "gpu.health",
        "training.throughput",
    )
    for criterion in criteria:
        span = predict([("test_it[world]", criterion)], workload_of(profile)).span
        assert 0 < span.least_seconds <= span.most_seconds


def test_a_rehearsal_measures_at_least_so_long(project: Project) -> None:
    # What is beside the samples (operands, references, verifying) is said not to be counted: of a few milliseconds of
    # samples it would be the most. That no more is predicted than was measured is what can be held.
    for name in ("test_hbm.py", "workloads.yaml"):
        (project.path / name).write_text((ACCEPTANCE / name).read_text(encoding="utf-8"), encoding="utf-8")
    left = project.run()
    assert left.exit == 0, left.output
    assert left.journal.collected is not None
    tests = [(test.name, test.criterion) for test in left.journal.collected]
    span = predict(tests, workload_of("cpu")).span
    measured = sum(result.call_seconds for result in left.journal.results)
    assert span.least_seconds <= measured
    assert "gpucluster predicted: 1.8 s to 37 s of warm-up and samples in 3 tests" in " ".join(left.stdout.split())
