"""How many calls a window has, and how many windows a sample. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pytest_gpucluster.benchmarks.clock import SHORT_REGION_SECONDS
from pytest_gpucluster.metrics.sampling import MIN_SAMPLES, Sampling

SAMPLE_SECONDS = 0.25
"""About how long a sample takes, at most: single calls depend on each other, means of so many do so no more."""

MOST_CALLS = 500
"""In one window: a GPU's queue has room for about a thousand launches, and then the host waits for it."""

MOST_WINDOWS = 10_000

QUICK_CALL_SECONDS = 50e-6
"""A GPU may be done with a call that takes less before the host has enqueued the next one. Windows of such calls are
kept short enough for the clock to let the host get ahead; longer ones would hold the host's time."""


@dataclass(frozen=True, kw_only=True)
class WindowPlan:
    """A sample is the mean of ``windows`` windows, each of ``calls`` calls between two looks at the clock.

    ``call_seconds`` is what a call is expected to take; infinite where nothing is known yet.
    """

    calls: int = 1
    windows: int = 1
    call_seconds: float = math.inf

    @property
    def window_seconds(self) -> float:
        """How long the calls of a window are expected to take."""
        return self.calls * self.call_seconds

    def after(
        self, seconds_per_call: float, took_seconds: float, *, sampling: Sampling, finite_calls: int
    ) -> WindowPlan:
        """Plan the next sample from this one.

        Args:
            seconds_per_call: what a call took on the slowest rank.
            took_seconds: what the whole sample took, with all that is done outside of the time.
            sampling: a sample is short enough for enough of them to fit into its window.
            finite_calls: how many calls in a row keep the sums finite.
        """
        target = min(SAMPLE_SECONDS, sampling.window_seconds / MIN_SAMPLES)
        most = min(MOST_CALLS, finite_calls)
        if seconds_per_call < QUICK_CALL_SECONDS:
            most = min(most, max(1, int(0.9 * SHORT_REGION_SECONDS / seconds_per_call)))
        # The first calls connect and take far longer, so the number may only grow step by step.
        calls = max(1, min(most, 10 * self.calls, round(target / seconds_per_call)))
        # The more calls, the longer a window; what is around them stays as it is.
        window_seconds = took_seconds / self.windows + (calls - self.calls) * seconds_per_call
        windows = max(1, min(MOST_WINDOWS, 10 * self.windows, int(target / max(window_seconds, 1e-9))))
        return WindowPlan(calls=calls, windows=windows, call_seconds=seconds_per_call)
