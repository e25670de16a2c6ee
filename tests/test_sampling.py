from __future__ import annotations

import math

import pytest

from pytest_gpucluster.sampling import MIN_SAMPLES, Sampling, Series, series, wants_more

SAMPLING = Sampling(warmup_seconds=2, window_seconds=3, longest_seconds=10, tolerance_ratio=0.01)
STEADY = [700.0, 701.0, 702.0] * 4
NOISY = [600.0, 700.0, 800.0] * 4


@pytest.mark.parametrize(
    ("samples", "spent", "more"),
    [
        pytest.param([], 0.0, True, id="nothing yet"),
        pytest.param(STEADY, 2.9, True, id="steady, but the window is not over"),
        pytest.param(STEADY, 3.0, False, id="steady"),
        pytest.param(STEADY[: MIN_SAMPLES - 1], 100.0, True, id="too few samples, however long they took"),
        pytest.param(NOISY, 3.0, True, id="noisy"),
        pytest.param(NOISY, 10.0, True, id="noisy when the time is up: extended"),
        pytest.param(NOISY, 19.9, True, id="noisy in the extension"),
        pytest.param(NOISY, 20.0, False, id="noisy after the extension: given up"),
        pytest.param([math.nan] * 12, 3.0, True, id="NaN is never certain"),
    ],
)
def test_measuring_goes_on_until_it_is_certain_or_twice_the_time_is_up(
    samples: list[float], spent: float, more: bool
) -> None:
    assert wants_more(samples, spent_seconds=spent, sampling=SAMPLING) is more


def test_a_steady_series_has_a_narrow_interval() -> None:
    found = series(STEADY, SAMPLING, spent_seconds=3)
    assert (found.median, found.low, found.high, found.inconclusive) == (701.0, 700.0, 702.0, "")


def test_a_noisy_series_says_why_it_is_inconclusive() -> None:
    found = series(NOISY, SAMPLING, spent_seconds=20)
    assert found.inconclusive == (
        "the 95 % interval of the median is 29 % wide after 12 samples in 20 s, when the time was up; 1 % is allowed"
    )
    assert series(NOISY, SAMPLING, spent_seconds=4).inconclusive == (
        "the 95 % interval of the median is 29 % wide after 12 samples, and no more were to be taken; 1 % is allowed"
    )


@pytest.mark.parametrize(
    ("samples", "spent", "by", "extended"),
    [
        pytest.param(STEADY, 3.0, "interval", False, id="sure after the window"),
        pytest.param(STEADY, 9.9, "interval", False, id="sure before the time is up"),
        pytest.param(STEADY, 10.5, "interval", True, id="sure in the extension"),
        pytest.param(STEADY, 20.0, "interval", True, id="sure at the very end"),
        pytest.param(NOISY, 20.0, "time", True, id="time up"),
        pytest.param([math.nan] * 12, 20.0, "time", True, id="NaN is never certain"),
        pytest.param(STEADY, 2.9, "samples", False, id="sure, but the window was not over"),
        pytest.param(NOISY, 12.0, "samples", True, id="given up in the extension"),
        pytest.param(STEADY[: MIN_SAMPLES - 1], 20.0, "samples", True, id="too few samples"),
        pytest.param(STEADY, 0.0, "samples", False, id="not taken for this"),
    ],
)
def test_a_series_says_why_it_has_no_more_samples(samples: list[float], spent: float, by: str, extended: bool) -> None:
    found = series(samples, SAMPLING, spent_seconds=spent)
    stopped = found.stopped
    assert stopped is not None
    assert (stopped.by, stopped.extended, stopped.samples) == (by, extended, len(samples))
    assert (stopped.seconds, stopped.allowed_ratio) == (spent, SAMPLING.tolerance_ratio)
    assert stopped.width_ratio == pytest.approx(found.width_ratio, rel=1e-3)
    # A series that was stopped by the rule was so by the interval where it is sure, and only there.
    assert by == "samples" or (by == "interval") == (not found.inconclusive)


def test_a_series_is_as_sure_as_the_one_that_decided() -> None:
    mine, slowest = series(STEADY, SAMPLING, spent_seconds=20), series(NOISY, SAMPLING, spent_seconds=20)
    found = mine.decided_by(slowest)
    assert (found.samples, found.median, found.low, found.high) == (mine.samples, mine.median, mine.low, mine.high)
    assert (found.inconclusive, found.stopped) == (slowest.inconclusive, slowest.stopped)


def test_too_few_samples_are_inconclusive_however_equal_they_are() -> None:
    assert series([700.0] * (MIN_SAMPLES - 1), SAMPLING, spent_seconds=20).inconclusive
    assert not series([700.0] * MIN_SAMPLES, SAMPLING, spent_seconds=3).inconclusive


@pytest.mark.parametrize("bad", [math.nan, -1.0, 0.0])
def test_samples_that_mean_nothing_are_inconclusive(bad: float) -> None:
    assert series([bad] * 12, SAMPLING, spent_seconds=20).inconclusive or bad == 0.0
    assert series([bad] * 12, SAMPLING, spent_seconds=20).width_ratio == math.inf


def test_another_unit_scales_everything() -> None:
    found = series(NOISY, SAMPLING, spent_seconds=20).scaled(2.0)
    assert isinstance(found, Series)
    assert (found.median, found.low, found.high) == (1400.0, 1200.0, 1600.0)
    assert found.samples[0] == 1200.0
    assert found.inconclusive
    assert found.stopped == series(NOISY, SAMPLING, spent_seconds=20).stopped


@pytest.mark.parametrize(
    "wrong",
    [
        {"warmup_seconds": -1},
        {"window_seconds": 0},
        {"window_seconds": 11},
        {"longest_seconds": math.inf},
        {"tolerance_ratio": 0},
        {"tolerance_ratio": math.nan},
    ],
)
def test_settings_that_cannot_work_are_refused(wrong: dict[str, float]) -> None:
    good = {"warmup_seconds": 2, "window_seconds": 3, "longest_seconds": 10, "tolerance_ratio": 0.01}
    with pytest.raises(ValueError, match="warmup_seconds must not be negative"):
        Sampling(**{**good, **wrong})
