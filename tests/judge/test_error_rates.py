"""How often the shipped rules err with simulated noise: slow GPUs that pass, healthy ones that fail, wrong ranks named.

docs/simulations.md has the rates of many more kinds of noise and fleets.
"""

import dataclasses
from functools import cache
from pathlib import Path
from random import Random

import pytest
from verdicts import SHIPPED, hold

from pytest_gpucluster.benchmarks import blocks
from pytest_gpucluster.config import workload_loader
from pytest_gpucluster.device.clock import ManualClock
from pytest_gpucluster.metrics import sampling
from pytest_gpucluster.metrics.measurement import measurement

WORKLOADS = Path(__file__).parents[2] / "acceptance" / "workloads.yaml"
SAMPLING = workload_loader.load(WORKLOADS, profile="full").workload.matmul.sampling
BLOCK_SECONDS = 0.25
METRIC, LABELS = "matmul.bf16.tflops", {"best_of": "4096, 8192, 16384"}
HEALTHY_TFLOPS = 730.97
"""Of an H100 SXM: the observation next to the shipped limit."""
TRIALS = 200


def tflops(value):
    return measurement(METRIC, value, unit="TFLOPS", labels=LABELS)


def passes(ranks, limits=SHIPPED):
    return hold({rank: [one] for rank, one in enumerate(ranks)}, size=len(ranks), limits=limits).outcome == "passed"


@cache
def shipped_limit():
    return SHIPPED.limit(METRIC, sku="H100 SXM", world_size=8, nnodes=1, labels=LABELS)


# ---- one GPU, whose true median is a share of the limit


def take(values):
    """The series of the blocks that the rule asks for, and its seconds: as ``blocks.measure_rate``, without a clock."""
    taken, batch = 0, SAMPLING.window_seconds
    while sampling.wants_more(values[:taken], spent_seconds=taken * BLOCK_SECONDS, sampling=SAMPLING):
        until = min(taken * BLOCK_SECONDS + batch, SAMPLING.at_most_seconds)
        taken, batch = max(taken + 1, round(until / BLOCK_SECONDS)), 1.0
    spent = taken * BLOCK_SECONDS
    return sampling.series(values[:taken], SAMPLING, spent_seconds=spent), spent


@cache
def sampled(sigma):
    """Series of GPUs with a true median of 1 and normal noise of this relative standard deviation."""
    random, count = Random(f"noise {sigma}"), round(SAMPLING.at_most_seconds / BLOCK_SECONDS)
    return [take([1 + random.gauss(0, sigma) for _ in range(count)]) for _ in range(TRIALS)]


@pytest.mark.parametrize(
    ("sigma", "level", "least", "most"),
    [(0.003, 0.98, 0, 2), (0.03, 0.99, 0, 2), (0.003, 1.02, 198, 200), (0.01, 1.02, 190, 200)],
    ids=["slow", "slow and noisy", "good", "good and noisy"],
)
def test_slow_gpus_fail_and_good_ones_pass(sigma, level, least, most):
    median = level * shipped_limit().min
    accepted = sum(passes([tflops(series.scaled(median))] * 2) for series, _ in sampled(sigma))
    assert least <= accepted <= most


def test_quiet_gpus_hardly_take_longer_than_the_window():
    seconds = [spent for _, spent in sampled(0.003)]
    assert sum(spent <= SAMPLING.window_seconds for spent in seconds) >= 0.85 * TRIALS
    assert sum(seconds) / TRIALS == pytest.approx(SAMPLING.window_seconds, rel=0.1)


def test_the_interval_contains_the_median():
    assert sum(series.low <= 1 <= series.high for series, _ in sampled(0.01)) >= 0.9 * TRIALS


def test_these_simulations_ask_as_often_as_the_benchmarks(monkeypatch):
    """Driven with a clock on which each block takes as long as here."""
    asked = []

    def until_the_end(samples, *, spent_seconds, sampling):
        asked.append((len(samples), spent_seconds))
        return spent_seconds < sampling.at_most_seconds

    monkeypatch.setattr(sampling, "wants_more", until_the_end)
    monkeypatch.setattr(blocks, "wants_more", until_the_end)
    clock = ManualClock()

    class Steady:
        max_in_flight = 1

        def start(self, index):
            clock.advance(BLOCK_SECONDS)

        def verify(self, done):
            pass

    blocks.measure_rate(Steady(), clock, sampling=dataclasses.replace(SAMPLING, warmup_seconds=0))
    measured, asked = asked, []
    take([1.0] * 80)
    assert asked == measured
    assert len(asked) > 10


# ---- fleets, of which some ranks are slow


def fleet(random, ranks, slow, factor, spread):
    """TFLOPS of each rank; the last ``slow`` ones reach ``factor`` times a healthy one."""
    shares = [1.0] * (ranks - slow) + [factor] * slow
    return [HEALTHY_TFLOPS * share * (1 + random.gauss(0, spread)) for share in shares]


def ratio_alone(ratio=None):
    """The shipped limits, with the ratio to the median as the only limit of this metric."""
    shipped = shipped_limit()
    changed = dataclasses.replace(shipped, min=None, min_ratio_to_median=ratio or shipped.min_ratio_to_median)
    return dataclasses.replace(SHIPPED, limits=tuple(changed if one is shipped else one for one in SHIPPED.limits))


def named(values, limits):
    judgement = hold({rank: [tflops(value)] for rank, value in enumerate(values)}, size=len(values), limits=limits)
    return set(judgement.measurements[0].misses)


@pytest.mark.parametrize("limits", [ratio_alone, lambda: SHIPPED], ids=["ratio alone", "shipped"])
@pytest.mark.parametrize(
    ("ranks", "slow", "factor"), [(16, 1, 0.9), (16, 2, 0.9), (16, 3, 0.9), (64, 3, 0.8), (64, 0, 1)]
)
def test_all_slow_ranks_are_named_and_no_healthy_one(limits, ranks, slow, factor):
    random = Random(f"{ranks} {slow} {factor}")
    for _ in range(50):
        values = fleet(random, ranks, slow, factor, 0.005)
        assert named(values, limits()) == set(range(ranks - slow, ranks))


def test_a_loose_ratio_misses_ranks_that_are_a_little_slow():
    random = Random(1)
    assert not any(named(fleet(random, 16, 3, 0.9, 0.01), ratio_alone(0.75)) for _ in range(50))


@pytest.mark.parametrize(("ranks", "slow"), [(8, 8), (8, 5), (64, 64)])
def test_a_slow_fleet_misses_the_absolute_limit_and_not_the_ratio(ranks, slow):
    random = Random(f"{ranks} {slow}")
    for _ in range(50):
        values = fleet(random, ranks, slow, 0.9, 0.01)
        assert not named(values, ratio_alone(0.75)) & set(range(ranks - slow, ranks))
        assert named(values, SHIPPED) >= set(range(ranks - slow, ranks))
