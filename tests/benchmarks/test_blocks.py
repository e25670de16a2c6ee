import math
import re

import pytest
from each import of_each
from hypothesis import given, settings
from hypothesis import strategies as st

from pytest_gpucluster.benchmarks.blocks import measure_rate
from pytest_gpucluster.device.clock import ManualClock
from pytest_gpucluster.errors import InconclusiveMeasurement, WrongResult
from pytest_gpucluster.metrics.sampling import MIN_SAMPLES, Sampling


class Steps:
    """Work of ``seconds`` a step on a manual clock, verified after ``max_in_flight`` steps at the latest."""

    def __init__(self, seconds=0.01, *, max_in_flight=64, wrong=None):
        self.clock = ManualClock()
        self.max_in_flight = max_in_flight
        self.started, self.verified = [], []
        self._seconds, self._wrong = seconds, wrong

    def start(self, index):
        self.started.append(index)
        self.clock.advance(self._seconds(index) if callable(self._seconds) else self._seconds)

    def verify(self, done):
        self.verified.append(done)
        if self._wrong in done:
            raise WrongResult(f"step {self._wrong}")


def sampling(*, warmup=0.5, window=3.0, longest=10.0, tolerance=0.01):
    return Sampling(warmup_seconds=warmup, window_seconds=window, longest_seconds=longest, tolerance_ratio=tolerance)


def test_a_steady_rate_is_known_after_the_window():
    steps = Steps(1 / 128)
    rate = measure_rate(steps, steps.clock, sampling=sampling())
    assert rate.per_second.samples == (128.0,) * 12  # 12 blocks of 0.25 s
    assert rate.per_second.median == 128
    assert rate.per_second.inconclusive == ""
    assert rate.timed == 12 * 32


def test_every_step_is_started_once_and_verified_once():
    steps = Steps(0.004, max_in_flight=7)
    rate = measure_rate(steps, steps.clock, sampling=sampling())
    assert steps.started == list(range(rate.verified))
    assert [index for done in steps.verified for index in done] == steps.started
    assert max(map(len, steps.verified)) == 7
    assert rate.timed < rate.verified


def test_the_warm_up_lasts_and_does_not_count():
    steps = Steps(lambda index: 1.0 if index < 10 else 0.01)
    rate = measure_rate(steps, steps.clock, sampling=sampling(warmup=12.0))
    assert min(rate.per_second.samples) == pytest.approx(100)
    warmed_up = rate.verified - rate.timed
    assert 10 + 200 <= warmed_up <= 10 + 200 + 64


def test_what_does_not_settle_is_extended_once_and_then_returned_as_inconclusive():
    # Blocks of a quarter and of half a second in turn; 11 steps are the warm-up.
    steps = Steps(lambda index: (1 if index < 11 else 1 + (index - 11) // 32 % 2) / 128)
    chosen = sampling(warmup=0.05, window=2.5, longest=2.75)
    rate = measure_rate(steps, steps.clock, sampling=chosen)
    assert re.search(r"interval of", rate.per_second.inconclusive)
    timed = sum(map(steps._seconds, range(rate.verified - rate.timed, rate.verified)))
    assert timed == 5.5  # twice the longest time, and then not even until the next look


def test_measuring_goes_on_until_the_median_is_known_and_no_longer():
    # A third of the first blocks is slow: it takes more than the window until the median is certain.
    steps = Steps(lambda index: 0.02 if index < 1000 and index // 25 % 3 else 0.01)
    chosen = sampling(window=3, longest=20)
    rate = measure_rate(steps, steps.clock, sampling=chosen)
    assert rate.per_second.inconclusive == ""
    seconds = rate.timed * 0.01
    assert 4 < seconds < 25


class During:
    """What is held open, with the steps that had been started at its begin and its end, and what it was left with."""

    def __init__(self, steps):
        self.steps, self.seen = steps, []

    def __enter__(self):
        self.seen.append(len(self.steps.started))

    def __exit__(self, kind, error, where):
        self.seen += [len(self.steps.started), kind]


def test_what_is_held_open_sees_the_samples_and_not_the_warm_up_and_is_left_when_a_result_is_wrong():
    during = During(steps := Steps(0.01))
    rate = measure_rate(steps, steps.clock, sampling=sampling(), during=during)
    assert during.seen == [rate.verified - rate.timed, rate.verified, None]
    during = During(steps := Steps(0.01, wrong=150))
    with pytest.raises(WrongResult, match="step 150"):
        measure_rate(steps, steps.clock, sampling=sampling(), during=during)
    assert during.seen[-1] is WrongResult


@of_each("wrong", [0, 1, 40, 200])
def test_a_wrong_result_ends_it_at_once(wrong):
    steps = Steps(0.01, wrong=wrong)
    with pytest.raises(WrongResult, match=f"step {wrong}"):
        measure_rate(steps, steps.clock, sampling=sampling())
    assert len(steps.started) <= wrong + steps.max_in_flight


@of_each("seconds", [0.0, math.nan, math.inf])
def test_a_clock_that_gives_no_time_is_inconclusive(seconds):
    steps = Steps(seconds)
    with pytest.raises(InconclusiveMeasurement, match=r"not advance: 1 operations took"):
        measure_rate(steps, steps.clock, sampling=sampling())


def test_the_clock_is_prepared_for_each_region_by_what_the_last_one_took():
    steps = Steps(1e-5, max_in_flight=10)
    measure_rate(steps, steps.clock, sampling=sampling(warmup=0.001, window=0.01, longest=0.1))
    prepared = steps.clock.prepared
    assert len(prepared) == len(steps.verified)
    assert [launches for launches, _ in prepared] == [len(done) for done in steps.verified]
    assert prepared[0] == (1, 0.0)
    assert prepared[-1] == pytest.approx((10, 1e-4))


@settings(deadline=None)
@given(
    each=st.floats(1e-5, 3.0),
    max_in_flight=st.integers(1, 100),
    warmup=st.floats(0, 2),
    window=st.floats(0.05, 3),
    beyond=st.floats(0, 5),
)
def test_however_long_a_step_takes_the_rate_is_one_over_it(each, max_in_flight, warmup, window, beyond):
    steps = Steps(each, max_in_flight=max_in_flight)
    chosen = sampling(warmup=min(warmup, 1000 * each), window=min(window, 1000 * each), longest=window + beyond)
    rate = measure_rate(steps, steps.clock, sampling=chosen)
    assert rate.per_second.median == pytest.approx(1 / each, rel=1e-3)
    assert len(rate.per_second.samples) >= MIN_SAMPLES
    assert rate.timed / rate.per_second.median >= 0.999 * chosen.window_seconds
    assert all(len(done) <= max_in_flight for done in steps.verified)
