"""Ratios of rates: whose rate counts, how sure the ratio is, and what makes it unknown."""

from __future__ import annotations

import math

import pytest
from each import of_each

from pytest_gpucluster.benchmarks.training.scaling import Rates, efficiency
from pytest_gpucluster.metrics.sampling import Series


def sure(*medians: float, spread: float = 0.0, inconclusive: str = "") -> list[Series]:
    """One series for each rank, whose interval reaches so far to both sides."""
    return [
        Series(samples=(), median=m, low=m * (1 - spread), high=m * (1 + spread), inconclusive=inconclusive)
        for m in medians
    ]


@pytest.mark.parametrize(
    ("larger", "smaller", "ratio"),
    [
        ((90.0, 90.0), (100.0, 100.0), 0.9),
        ((90.0, 80.0, 90.0), (100.0, 100.0, 100.0), 0.8),
        ((58.0, 58.0, 58.0), (100.0, 60.0, 101.0), 0.58),
        ((100.0,) * 4, (100.0, 100.0, 80.0, 80.0), 1.111),
        ((125.0,), (100.0,), 1.25),
    ],
    ids=["all alike", "one slow rank in the larger", "a slow gpu", "half of the nodes slow", "faster than alone"],
)
def test_the_slowest_of_the_larger_stands_over_the_median_of_the_smaller(larger, smaller, ratio):
    assert efficiency(sure(*larger), sure(*smaller)).median == pytest.approx(ratio, rel=1e-3)


def test_the_interval_of_the_ratio_has_the_ends_of_both() -> None:
    found = efficiency(sure(95.0, 92.0, spread=0.01), sure(100.0, 100.0, spread=0.02))
    assert found.median == pytest.approx(0.92)
    assert found.low == pytest.approx(0.92 * 0.99 / 1.02)
    assert found.high == pytest.approx(0.92 * 1.01 / 0.98)
    assert found.low < found.median < found.high
    assert found.inconclusive == ""


def test_the_low_end_is_that_of_the_rank_that_is_least_sure() -> None:
    [unsure] = sure(93.0, spread=0.2)
    found = efficiency([*sure(92.0), unsure], sure(100.0))
    assert (found.median, found.low) == (pytest.approx(0.92), pytest.approx(0.93 * 0.8))


@of_each("where", ["larger", "smaller"])
def test_what_one_rank_is_not_sure_of_no_rank_is_sure_of(where: str) -> None:
    good, unsure = sure(90.0), sure(90.0, 91.0, inconclusive="rank 1 is not sure")
    found = efficiency(unsure, good) if where == "larger" else efficiency(good, unsure)
    assert found.inconclusive == "rank 1 is not sure"


@of_each("bad", [math.nan, math.inf, 0.0, -1.0])
@of_each("where", ["larger", "smaller"])
@of_each("at", [0, 1, 2])
def test_a_rate_that_is_none_makes_no_ratio(bad: float, where: str, at: int) -> None:
    good, broken = sure(90.0, 91.0, 92.0), sure(90.0, 91.0, 92.0)
    broken[at] = sure(bad)[0]
    found = efficiency(broken, good) if where == "larger" else efficiency(good, broken)
    assert math.isnan(found.median)
    assert math.isnan(found.low)
    assert math.isnan(found.high)


@pytest.mark.parametrize(
    ("medians", "slowest"), [((3.0, 1.0, 2.0), 1), ((3.0, 1.0, math.nan), 2), ((2.0, 2.0), 0)], ids=str
)
def test_the_slowest_rank_is_known_and_one_without_a_rate_is_slower(medians: tuple[float, ...], slowest: int) -> None:
    of_rank = tuple(sure(*medians))
    assert Rates(group_size=1, of_rank=of_rank, mine=of_rank[0], notes=()).slowest == slowest
