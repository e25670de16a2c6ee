"""Repeat an operation until its rate is known: warm-up, blocks as samples, as many as it takes.

Operations are started in bursts. A burst is one timed region, in which nothing but the operations runs; then its
results are verified, while they all still exist; then comes the next. Bursts make up a block, and a block one
sample: single operations are autocorrelated.

Also the number of calls of a window, and of windows of a sample.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from time import perf_counter
from typing import Protocol

from pytest_gpucluster.device.clock import SHORT_REGION_SECONDS, Clock
from pytest_gpucluster.errors import InconclusiveMeasurement
from pytest_gpucluster.metrics.sampling import MIN_SAMPLES, Sampling, Series, series, wants_more
from pytest_gpucluster.metrics.time_budget import MEASURING, WARM_UP, counted, verified

BLOCK_SECONDS = 0.25
"""A sample is the rate over about this time, or less where the window is too short for enough samples."""

BATCH_SECONDS = 1.0
"""After the window, the decision whether to continue is made again after this time."""

Progress = Callable[..., None]
"""``progress(step, of, **figures)``: for the display."""

NO_CONTEXT: AbstractContextManager[object] = nullcontext()
"""Entered during the measurement, unless the caller passes a context."""


class Work(Protocol):
    """Operations of one kind, numbered from 0, and the memory to keep the results of the last few."""

    max_in_flight: int
    """Maximum number of results kept until they are verified."""

    def start(self, index: int) -> None:
        """Start operation ``index``, without waiting for it."""

    def verify(self, done: range) -> None:
        """Verify the results of these operations, the last ones.

        Raises: WrongResult if one is wrong.
        """


@dataclass(frozen=True, kw_only=True)
class Rate:
    """Operations a second of the time that the operations themselves took.

    Attributes:
        per_second: one sample for each block.
        timed: operations of the samples.
        verified: all operations that were started, those of the warm-up included.
    """

    per_second: Series
    timed: int
    verified: int


def measure_rate(
    work: Work, clock: Clock, *, sampling: Sampling, during: AbstractContextManager[object] = NO_CONTEXT
) -> Rate:
    """Measure operations a second.

    Args:
        work: what to do and to verify.
        clock: takes the time.
        sampling: how long to warm up and to measure, and the required confidence. Only timed regions count.
        during: entered while samples are taken, not during the warm-up: for the window, and again for each batch after
            it.

    Raises:
        WrongResult: from ``work.verify``.
        InconclusiveMeasurement: the clock did not advance.
    """
    bursts = Bursts(work, clock)
    with counted(WARM_UP):
        bursts.warm_up(sampling.warmup_seconds)
    per_block = bursts.operations_in(min(BLOCK_SECONDS, sampling.window_seconds / MIN_SAMPLES))
    rates: list[float] = []
    spent, batch = 0.0, sampling.window_seconds
    while wants_more(rates, spent_seconds=spent, sampling=sampling):
        until = spent + batch
        if spent < sampling.at_most_seconds:
            until = min(until, sampling.at_most_seconds)
        with counted(MEASURING), during:
            while spent < until:
                seconds = bursts.block(per_block)
                rates.append(per_block / seconds)
                spent += seconds
        batch = min(BATCH_SECONDS, sampling.window_seconds)
    return Rate(
        per_second=series(rates, sampling, spent_seconds=spent), timed=per_block * len(rates), verified=bursts.done
    )


class Bursts:
    """Starts operations, times and verifies them."""

    def __init__(self, work: Work, clock: Clock) -> None:
        self._work, self._clock = work, clock
        self._each_seconds = 0.0  # unknown: then the clock prepares for the shortest
        self.done = 0

    def warm_up(self, seconds: float) -> None:
        """Work for at least ``seconds``, in bursts that grow."""
        spent, bursts, count = 0.0, 0, 1
        # The first operation takes far longer than the others: the time of one is known from the second burst on, and
        # the count may only grow step by step.
        while bursts < 2 or spent < seconds:
            spent += self.burst(count)
            bursts += 1
            count = max(1, min(10 * count, self.operations_in(BLOCK_SECONDS)))
            count //= self._bursts_for(count)

    def operations_in(self, seconds: float) -> int:
        """Return how many operations take about ``seconds``, by the last burst."""
        return max(1, round(seconds / self._each_seconds))

    def block(self, operations: int) -> float:
        """Run operations in bursts of about the same size; return their seconds."""
        bursts = self._bursts_for(operations)
        ends = [operations * index // bursts for index in range(bursts + 1)]
        seconds = 0.0
        # No generator: as a frame in a traceback its closure would keep the work, and all its memory, alive.
        for begin, end in itertools.pairwise(ends):
            seconds += self.burst(end - begin)
        return seconds

    def _bursts_for(self, operations: int) -> int:
        """Return in how many bursts the results of operations are all kept until they are verified."""
        return math.ceil(self._clock.real(operations) / self._work.max_in_flight)

    def burst(self, count: int) -> float:
        """Run operations in one timed region, and verify them; return their seconds.

        Raises:
            WrongResult: from ``work.verify``.
            InconclusiveMeasurement: the clock did not advance.
        """
        real = self._clock.real(count)
        batch = range(self.done, self.done + real)
        self._clock.get_ahead(count, seconds=count * self._each_seconds)
        begun = perf_counter()
        with self._clock.scaled(count / real), self._clock.region():
            for index in batch:
                self._work.start(index)
        started = perf_counter()
        self.done += real
        self._work.verify(batch)
        looked = perf_counter()
        [seconds] = self._clock.read()
        verified(looked - started, still_busy=seconds - (started - begun))
        if not 0 < seconds < math.inf:
            raise InconclusiveMeasurement(f"the clock did not advance: {count} operations took {seconds} s")
        self._each_seconds = seconds / count
        return seconds


SAMPLE_SECONDS = 0.25
"""Maximum time of a sample: consecutive single calls are correlated, means of many are not."""

MOST_CALLS = 500
"""Of one window: a GPU's queue has room for about a thousand launches, and then the host waits for it."""

MOST_WINDOWS = 10_000

QUICK_CALL_SECONDS = 50e-6
"""A GPU may complete a shorter call before the host has enqueued the next one. Windows of such calls are kept short
enough for the clock to let the host get ahead; longer ones would measure the host."""


@dataclass(frozen=True, kw_only=True)
class WindowPlan:
    """A sample is the mean of ``windows`` windows, each of ``calls`` calls between two readings of the clock.

    ``call_seconds`` is the expected time of a call; infinite while it is unknown.
    """

    calls: int = 1
    windows: int = 1
    call_seconds: float = math.inf

    @property
    def window_seconds(self) -> float:
        """The expected time of the calls of a window."""
        return self.calls * self.call_seconds

    def after(
        self, seconds_per_call: float, took_seconds: float, *, sampling: Sampling, finite_calls: int
    ) -> WindowPlan:
        """Plan the next sample from this one.

        Args:
            seconds_per_call: on the slowest rank.
            took_seconds: of the whole sample, including what is not timed.
            sampling: a sample is short enough for enough of them to fit into its window.
            finite_calls: number of consecutive calls that keep the sums finite.
        """
        target = min(SAMPLE_SECONDS, sampling.window_seconds / MIN_SAMPLES)
        most = min(MOST_CALLS, finite_calls)
        if seconds_per_call < QUICK_CALL_SECONDS:
            most = min(most, max(1, int(0.9 * SHORT_REGION_SECONDS / seconds_per_call)))
        # The first calls connect and take far longer, so the number may only grow step by step.
        calls = max(1, min(most, 10 * self.calls, round(target / seconds_per_call)))
        # More calls make a window longer; its overhead stays the same.
        window_seconds = took_seconds / self.windows + (calls - self.calls) * seconds_per_call
        windows = max(1, min(MOST_WINDOWS, 10 * self.windows, int(target / max(window_seconds, 1e-9))))
        return WindowPlan(calls=calls, windows=windows, call_seconds=seconds_per_call)
