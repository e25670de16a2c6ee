import math
import statistics
import sys
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_gpucluster.metrics import stats

SAMPLES = st.lists(st.floats(min_value=-1e9, max_value=1e9), min_size=1, max_size=50)


@given(SAMPLES)
def test_the_median_is_that_of_the_standard_library(samples):
    assert stats.median(samples) == pytest.approx(statistics.median(samples), rel=1e-12, abs=1e-6)


def test_percentiles_interpolate_between_neighbours():
    samples = [float(n) for n in range(101)]
    assert stats.percentile(samples, 99) == 99.0
    assert stats.percentile([1.0, 2.0], 25) == 1.25
    assert stats.percentile([3.0, 1.0, 2.0], 0) == 1.0
    assert stats.percentile([3.0, 1.0, 2.0], 100) == 3.0


def test_mad_ignores_one_outlier_and_infinite_samples_stay_infinite():
    assert stats.mad([1.0, 1.0, 2.0, 2.0, 4.0, 6.0, 9.0]) == 1.0
    assert stats.mad([5.0, 5.0, 5.0, 1000.0]) == 0.0
    assert stats.median([math.inf, math.inf]) == math.inf
    assert stats.median([1.0, 2.0, math.inf]) == 2.0
    assert stats.percentile([0.1] * 3, 33) == 0.1, "no rounding between equal neighbours"


def test_what_has_no_statistic_is_refused():
    for function in (stats.median, stats.mad):
        with pytest.raises(ValueError, match="no samples"):
            function([])
    for percent in (-1, 100.1, math.nan):
        with pytest.raises(ValueError, match="between 0 and 100"):
            stats.percentile([1.0], percent)
    for wrong in ({"confidence": 1.0}, {"confidence": 0.0}, {"correlation": 1.0}, {"correlation": -0.1}):
        with pytest.raises(ValueError, match="between 0 and 1"):
            stats.median_interval([1.0] * 8, **wrong)
    for count in range(6):
        with pytest.raises(ValueError, match="cannot enclose"):
            stats.median_interval([1.0] * count)
    # Of two samples one lies on each side of the median in half of all cases: exactly as sure as it must be.
    assert stats.median_interval([1.0, 2.0], confidence=0.5) == (1.0, 2.0)


def test_a_nan_is_never_sorted_away():
    assert math.isnan(stats.median([1.0, math.nan, 3.0]))
    assert math.isnan(stats.mad([1.0, math.nan, 3.0]))
    assert math.isnan(stats.percentile([math.nan, 1.0], 0))
    assert math.isnan(stats.percentile([1.0, math.nan], 100))


@pytest.mark.parametrize(
    ("samples", "correlation"),
    [
        pytest.param([5.0] * 12, 0.0, id="all equal"),
        pytest.param([1.0, 2.0] * 6, 0.0, id="each unlike the one before"),
        pytest.param([float(n) for n in range(100)], 0.95, id="a drift"),
        pytest.param([1.0] * 10 + [2.0] * 10, 0.95, id="a step"),
        pytest.param([1.0, math.nan, 2.0], 0.0, id="NaN"),
        pytest.param([1.0, 2.0], 0.0, id="too few samples"),
        pytest.param([1.0, 2.0, 3.0], 1 / 3, id="just enough"),
    ],
)
def test_neighbours_that_resemble_each_other_are_seen(samples, correlation):
    assert stats.rank_correlation(samples) == pytest.approx(correlation, abs=0.06)
    assert stats.rank_correlation(samples) <= 0.95


@pytest.mark.parametrize("samples", [[float(n) for n in range(12)], [float(n % 7) for n in range(50)]])
def test_resemblance_only_widens_the_interval(samples):
    widths = []
    for correlation in (0.0, 0.2, 0.5, 0.9, 0.95):
        low, high = stats.median_interval(samples, correlation=correlation)
        widths.append(high - low)
    assert widths == sorted(widths)
    assert widths[-1] == max(samples) - min(samples)


def test_of_an_odd_number_both_ends_move_from_the_middle_sample():
    samples = [float(sample) for sample in range(1, 26)]
    assert stats.median_interval(samples) == (8.0, 18.0)
    # 5 ranks from the 13th, times 1.66.
    assert stats.median_interval(samples, correlation=0.4675) == (4.0, 22.0)


@pytest.mark.parametrize("count", [6, 12, 100, 1100])
def test_the_interval_of_the_median_is_that_of_the_binomial_distribution(count):
    low, high = stats.median_interval([float(sample) for sample in range(1, count + 1)])
    assert low + high == count + 1
    rank = int(low)
    outside = Fraction(sum(math.comb(count, k) for k in range(rank)), 2**count)
    further = Fraction(sum(math.comb(count, k) for k in range(rank + 1)), 2**count)
    assert outside <= Fraction("0.025") + Fraction(1, 10**15) < further


@pytest.mark.parametrize("values", [[], [math.nan], [math.nan, 1.0], [1.0, math.nan], [1.0, math.nan, 2.0]])
def test_the_largest_of_numbers_keeps_one_that_is_none(values):
    assert math.isnan(stats.largest(values))
    assert stats.largest([1.0, 3.0, 2.0]) == 3.0


@pytest.mark.parametrize("value", [sys.float_info.max, -sys.float_info.max, 5e-324, 0.1])
@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_the_mean_of_equal_numbers_is_their_value_also_at_the_ends_of_a_float(value, count):
    assert stats.mean(count * [value]) == value
