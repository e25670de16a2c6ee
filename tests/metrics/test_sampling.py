import math

import pytest
from complaints import in_order
from each import of_each

from pytest_gpucluster.metrics.sampling import MIN_SAMPLES, Sampling, Series, is_settled, series, wants_more

SAMPLING = Sampling(warmup_seconds=2, window_seconds=3, longest_seconds=10, tolerance_ratio=0.01)
STEADY = [700.0, 701.0, 702.0] * 4
NOISY = [600.0, 700.0, 800.0] * 4


@of_each(
    "case",
    [
        ([], 0.0, True),
        (STEADY, 2.9, True),
        (STEADY, 3.0, False),
        (STEADY[: MIN_SAMPLES - 1], 100.0, True),
        (NOISY, 3.0, True),
        (NOISY, 10.0, True),
        (NOISY, 19.9, True),
        (NOISY, 20.0, False),
        ([math.nan] * 12, 3.0, True),
    ],
)
def test_measuring_goes_on_until_it_is_certain_or_twice_the_time_is_up(case):
    samples, spent, more = case
    assert wants_more(samples, spent_seconds=spent, sampling=SAMPLING) is more


def test_a_steady_series_has_a_narrow_interval_and_a_noisy_one_says_why_it_is_inconclusive():
    found = series(STEADY, SAMPLING, spent_seconds=3)
    assert (found.median, found.low, found.high, found.inconclusive) == (701.0, 700.0, 702.0, "")
    in_time, given_up = (series(NOISY, SAMPLING, spent_seconds=spent).inconclusive for spent in (20, 4))
    assert in_order(in_time, "95 % interval median 29 % 12 20 s 1 %")
    assert in_order(given_up, "95 % interval median 29 % 12 1 %")
    assert all("; 1 % " in text for text in (in_time, given_up))
    assert MIN_SAMPLES == 8
    assert series([700.0] * (MIN_SAMPLES - 1), SAMPLING, spent_seconds=20).inconclusive, "too few, however equal"
    assert [is_settled([700.0] * count, SAMPLING) for count in (MIN_SAMPLES - 1, MIN_SAMPLES)] == [False, True]
    assert not series([700.0] * MIN_SAMPLES, SAMPLING, spent_seconds=3).inconclusive
    for bad in (math.nan, -1.0, 0.0):
        nothing = series([bad] * 12, SAMPLING, spent_seconds=20)
        assert (bool(nothing.inconclusive) or bad == 0.0, nothing.width_ratio) == (True, math.inf)


@of_each(
    "case",
    [
        (STEADY, 3.0, "interval", False),
        (STEADY, 9.9, "interval", False),
        (STEADY, 10.5, "interval", True),
        (STEADY, 20.0, "interval", True),
        (NOISY, 20.0, "time", True),
        ([math.nan] * 12, 20.0, "time", True),
        (STEADY, 2.9, "samples", False),
        (NOISY, 12.0, "samples", True),
        (STEADY[: MIN_SAMPLES - 1], 20.0, "samples", True),
        (STEADY, 0.0, "samples", False),
    ],
)
def test_a_series_says_why_it_has_no_more_samples(case):
    samples, spent, by, extended = case
    found = series(samples, SAMPLING, spent_seconds=spent)
    stopped = found.stopped
    assert (stopped.by, stopped.extended, stopped.samples) == (by, extended, len(samples))
    assert (stopped.seconds, stopped.allowed_ratio) == (spent, SAMPLING.tolerance_ratio)
    assert stopped.width_ratio == pytest.approx(found.width_ratio, rel=1e-3)
    # A series that was stopped by the rule was so by the interval where it is sure, and only there.
    assert by == "samples" or (by == "interval") == (not found.inconclusive)


def test_a_series_is_as_sure_as_the_one_that_decided():
    mine, slowest = series(STEADY, SAMPLING, spent_seconds=20), series(NOISY, SAMPLING, spent_seconds=20)
    found = mine.decided_by(slowest)
    assert (found.samples, found.median, found.low, found.high) == (mine.samples, mine.median, mine.low, mine.high)
    assert (found.inconclusive, found.stopped) == (slowest.inconclusive, slowest.stopped)


def test_another_unit_scales_everything():
    found = series(NOISY, SAMPLING, spent_seconds=20).scaled(2.0)
    assert isinstance(found, Series)
    assert (found.median, found.low, found.high) == (1400.0, 1200.0, 1600.0)
    assert found.samples[0] == 1200.0
    assert found.inconclusive
    assert found.stopped == series(NOISY, SAMPLING, spent_seconds=20).stopped


def test_settings_that_cannot_work_are_refused():
    good = {"warmup_seconds": 2, "window_seconds": 3, "longest_seconds": 10, "tolerance_ratio": 0.01}
    wrong = [
        ("warmup", -1),
        ("window", 0),
        ("window", -1),
        ("window", 11),
        ("longest", math.inf),
        *((name, float("inf")) for name in ("warmup", "longest")),
    ]
    for name, value in (*((f"{name}_seconds", value) for name, value in wrong), ("tolerance_ratio", 0)):
        with pytest.raises(ValueError, match="warmup_seconds"):
            Sampling(**{**good, name: value})
    with pytest.raises(ValueError, match="warmup_seconds"):
        Sampling(**{**good, "tolerance_ratio": math.nan})
