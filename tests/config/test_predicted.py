"""How long a run is going to measure: bounds from the workload, and what is unknown beforehand."""

import re
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from pytest_gpucluster.benchmarks.blocks import measure_rate
from pytest_gpucluster.config.workload import predict
from pytest_gpucluster.config.workload_loader import Override, load
from pytest_gpucluster.device.clock import ManualClock

ACCEPTANCE = Path(__file__).parents[2] / "acceptance"
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
def test_each_criterion_takes_what_its_workload_says(name, criterion, least, most):
    found = predict([(name, criterion)], FULL)
    assert found.span.least_seconds == pytest.approx(least)
    assert found.span.most_seconds == pytest.approx(most)
    assert (found.tests, found.other_tests) == (1, 0)


def test_an_override_counts():
    override = Override(key="burn_in.duration", texts=("2 h",), origin="here")
    longer = load(ACCEPTANCE / "workloads.yaml", profile="full", overrides=[override]).workload
    assert predict([("test_burn_in", "burn_in")], longer).span.least_seconds == 7200.0


def test_what_is_not_predicted_is_counted_and_named():
    tests = [("test_hbm[copy]", "hbm"), ("test_ddp", "ddp"), ("test_fsdp", "fsdp"), ("test_fsdp_twice", "fsdp")]
    found = predict([*tests, ("test_mine", None)], QUICK)
    assert (found.tests, found.other_tests, found.others) == (1, 4, ("ddp", "fsdp", "test_mine"))
    assert re.fullmatch(r"5.0 s to 22.0 s .* 1 test,.* 4 tests .*\(ddp, fsdp, test_mine\)", str(found))


def test_a_time_of_nothing_is_no_time():
    assert not re.search(r"\d", str(predict([("test_ddp", "ddp")], QUICK)))
    assert str(predict([], QUICK)) == str(predict([("test_ddp", "ddp")], QUICK))


def workload_of(profile):
    return load(ACCEPTANCE / "workloads.yaml", profile=profile).workload


@pytest.mark.parametrize("profile", ["quick", "full", "soak", "cpu"])
def test_the_least_is_never_more_than_the_most(profile):
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


def test_a_measurement_takes_as_long_as_is_predicted():
    """The loop of the benchmarks, on a clock that only its work moves: values that settle, and values that never do."""
    sizes, sampling = workload_of("cpu").hbm.sizes_bytes, workload_of("cpu").hbm.sampling
    span = predict([("test_hbm[copy]", "hbm")], workload_of("cpu")).span
    block = sampling.window_seconds / 20
    taken = []
    for tolerance_ratio in (1.0, 1e-9):
        clock, random = ManualClock(), Random(1)

        class Work:
            max_in_flight = 1

            def start(self, index):
                clock.advance(block * random.uniform(0.5, 1.5))  # noqa: B023  # called in the loop

            def verify(self, done):
                pass

        for _ in sizes:
            measure_rate(Work(), clock, sampling=replace(sampling, tolerance_ratio=tolerance_ratio))
        taken.append(clock.now_seconds)
    steady, unsteady = taken
    assert span.least_seconds <= steady < unsteady / 2
    assert unsteady == pytest.approx(span.most_seconds, rel=0.1)
