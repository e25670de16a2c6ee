from __future__ import annotations

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_gpucluster import stats

SAMPLES = st.lists(st.floats(min_value=-1e9, max_value=1e9), min_size=1, max_size=50)


@given(SAMPLES)
def test_the_median_is_that_of_the_standard_library(samples: list[float]) -> None:
    assert stats.median(samples) == pytest.approx(statistics.median(samples), rel=1e-12, abs=1e-6)


@given(SAMPLES, st.floats(min_value=0, max_value=100))
def test_a_percentile_lies_among_the_samples(samples: list[float], percent: float) -> None:
    value = stats.percentile(samples, percent)
    slack = 1e-6
    assert min(samples) - slack <= value <= max(samples) + slack


def test_percentiles_interpolate_between_neighbours() -> None:
    samples = [float(n) for n in range(101)]
    assert stats.percentile(samples, 99) == 99.0
    assert stats.percentile([1.0, 2.0], 25) == 1.25
    assert stats.percentile([3.0, 1.0, 2.0], 0) == 1.0
    assert stats.percentile([3.0, 1.0, 2.0], 100) == 3.0


def test_mad_ignores_one_outlier() -> None:
    assert stats.mad([1.0, 1.0, 2.0, 2.0, 4.0, 6.0, 9.0]) == 1.0
    assert stats.mad([5.0, 5.0, 5.0, 1000.0]) == 0.0


def test_a_nan_is_never_sorted_away() -> None:
    assert math.isnan(stats.median([1.0, math.nan, 3.0]))
    assert math.isnan(stats.mad([1.0, math.nan, 3.0]))
    assert math.isnan(stats.summary([math.nan, 1.0]).minimum)
    assert math.isnan(stats.summary([1.0, math.nan]).maximum)


def test_infinite_samples_stay_infinite() -> None:
    assert stats.median([math.inf, math.inf]) == math.inf


@pytest.mark.parametrize("function", [stats.median, stats.mad, stats.summary])
def test_no_samples_have_no_statistic(function: object) -> None:
    with pytest.raises(ValueError, match="no samples"):
        function([])  # type: ignore[operator]


@pytest.mark.parametrize("percent", [-1, 100.1, math.nan])
def test_a_percentile_outside_the_series_is_refused(percent: float) -> None:
    with pytest.raises(ValueError, match="between 0 and 100"):
        stats.percentile([1.0], percent)


def test_a_summary_names_its_figures() -> None:
    assert stats.summary([4.0, 1.0, 3.0, 2.0]) == stats.Summary(
        count=4, minimum=1.0, p50=2.5, p99=pytest.approx(3.97), maximum=4.0, mad=1.0
    )
