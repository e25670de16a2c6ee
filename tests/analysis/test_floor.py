"""The rule of a floor: its parts, its bounds, and how often it would be a false alarm."""

import math

import pytest
from accepted_runs import LIMIT, measured, source
from each import of_each
from hypothesis import given
from hypothesis import strategies as st

from pytest_gpucluster.analysis.calibration import propose, rounded_down, series
from pytest_gpucluster.errors import ThresholdsError

OTHER = {**LIMIT, "min": 100.0}


def floor(values, *, limit=OTHER, spreads=3.0, peak=None, runs=1, **more):
    found = [source(measured(values, limit=limit, **more), number=number) for number in range(1, runs + 1)]
    [one] = series(found)
    return propose(one, spreads=spreads, peak=peak)


@of_each(
    "case",
    [
        ([700.0] * 8, 7.0),  # that agree to a hair: one percent
        ([640, 660, 680, 700, 720, 740, 760], 1.4826 * 40),  # by their median deviation
    ],
)
def test_ranks_that_are_apart_spread_by_their_median_deviation(case):
    values, spread = case
    made = floor(values)
    assert (made.median, made.spread, made.below) == (700.0, pytest.approx(spread), ())
    assert made.floor == rounded_down(700 - 3 * spread)


def test_samples_that_are_apart_spread_too_and_one_slow_gpu_does_not_lower_the_floor():
    noisy = [600.0, 650.0, 700.0, 750.0, 800.0, 700.0]
    made = floor([700.0] * 8, samples={str(rank): noisy for rank in range(8)})
    assert made.spread == pytest.approx(1.4826 * 50)
    assert floor([700.0] * 8, samples={str(rank): noisy[:5] for rank in range(8)}).spread == 7.0
    made = floor([700.0] * 15 + [600.0])
    assert made.floor == 679.0
    assert [(number.value, number.place.split()[1]) for number in made.below] == [(600.0, "15")]


@of_each(
    "case",
    [
        ({"values": [700.0] * 5}, "5 values, .*6"),
        ({"values": [700.0]}, "1 value, .*6"),
        ({"values": [700.0] * 8, "limit": LIMIT}, "not be more"),
        ({"values": [700.0] * 8, "limit": {**LIMIT, "min": 679.0}}, "not be more"),
        ({"values": [700.0] * 8, "limit": {**OTHER, "max": 600.0}}, "would be more"),
        ({"values": [700.0] * 7 + ["NaN"]}, "finite"),
        ({"values": [700.0] * 7 + ["Infinity"]}, "finite"),
        ({"values": [700.0] * 8, "samples": {"0": [700.0, *["Infinity"] * 5]}}, "finite"),
        ({"values": [0.0] * 8}, "median"),
        ({"values": [1.0, 2.0, 50.0, 60.0, 99.0, 99.0, 99.0]}, "median"),
    ],
)
def test_where_there_is_no_good_floor_none_is_proposed(case):
    arguments, why = case
    with pytest.raises(ThresholdsError, match=why):
        floor(**arguments)


def test_a_floor_is_never_above_the_peak():
    for value, found in ((480.0, 450.0), (440.0, 426.0)):
        assert floor([value] * 8, peak=450.0).floor == found


@given(st.floats(min_value=1e-9, max_value=1e15))
def test_rounding_never_goes_up_and_never_far_down(value):
    rounded = rounded_down(value)
    assert rounded <= value
    assert rounded >= value * (1 - 0.01) or math.isclose(rounded, value * 0.99, rel_tol=1e-12)
