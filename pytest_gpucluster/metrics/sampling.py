"""When to stop sampling, and the statistics of a series of samples. Pure: no clock, no device.

Sampling goes on until the interval that encloses the median is narrow enough, or the time is up. Then the time is
extended once. An interval that is still too wide is inconclusive, which is never a pass. A series records the reason.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from pytest_gpucluster.metrics import stats

StoppedBy = Literal["interval", "time", "samples"]
"""What ended a measurement: the interval was narrow enough; the time was up, the extension too; there were no more
samples to take, such as steps of a training that was planned with that number."""
STOPPED_BY: tuple[StoppedBy, ...] = get_args(StoppedBy)

MIN_SAMPLES = 8
"""With fewer, the interval is no more than the smallest and the largest sample."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How long to warm up, how long to sample, and which tolerance the median must reach.

    Attributes:
        warmup_seconds: least time of load before the first sample counts.
        window_seconds: least total time of the samples.
        longest_seconds: without certainty the most total time, extended once by the same.
        tolerance_ratio: certain is a series whose median lies, with 95 % confidence, in an interval no wider than
            this part of it: 0.01 is 1 %.

    Raises:
        ValueError: a time or the tolerance is out of its range.
    """

    warmup_seconds: float
    window_seconds: float
    longest_seconds: float
    tolerance_ratio: float

    def __post_init__(self) -> None:
        times_are_good = 0 <= self.warmup_seconds < math.inf and 0 < self.window_seconds <= self.longest_seconds
        if not (times_are_good and self.longest_seconds < math.inf and 0 < self.tolerance_ratio < math.inf):
            raise ValueError(
                "warmup_seconds must not be negative, window_seconds must be positive and not above longest_seconds, "
                f"tolerance_ratio must be positive: {self}"
            )

    @property
    def at_most_seconds(self) -> float:
        """How long a series can take: the longest time, and the one extension."""
        return 2 * self.longest_seconds


@dataclass(frozen=True, kw_only=True)
class Stopped:
    """Why sampling stopped, and how wide the interval was then.

    Where several ranks measure at once, it is that of the slowest rank, whose samples decide for all.

    Attributes:
        by: "interval", "time" or "samples".
        samples: how many there were.
        seconds: their total time; 0 for samples taken for another purpose.
        width_ratio: of the 95 % interval, as a part of the median.
        allowed_ratio: how wide it was allowed to be.
        extended: whether they took longer than ``longest``: the extension was used.
    """

    by: StoppedBy
    samples: int
    seconds: float
    width_ratio: float
    allowed_ratio: float
    extended: bool = False


@dataclass(frozen=True, kw_only=True)
class Series:
    """Samples of one quantity, their median, and the interval that encloses the true median with 95 % confidence.

    ``inconclusive``: why the interval is too wide; empty if it is not. ``stopped``: why sampling stopped; None
    where there was none.
    """

    samples: tuple[float, ...]
    median: float
    low: float
    high: float
    inconclusive: str = ""
    stopped: Stopped | None = None

    @property
    def width_ratio(self) -> float:
        """Width of the interval as a part of the median; infinite where the median is not positive."""
        return (self.high - self.low) / self.median if self.median > 0 else math.inf

    def scaled(self, factor: float) -> Series:
        """Return the same series in another unit, such as bytes a second from calls a second."""
        return replace(
            self,
            samples=tuple(sample * factor for sample in self.samples),
            median=self.median * factor,
            low=self.low * factor,
            high=self.high * factor,
        )

    def decided_by(self, other: Series) -> Series:
        """Return this series with the certainty of ``other``, whose samples decided when to stop."""
        return replace(self, inconclusive=other.inconclusive, stopped=other.stopped)


def is_settled(samples: Sequence[float], sampling: Sampling) -> bool:
    """Return whether the median of the samples is known within the tolerance."""
    if len(samples) < MIN_SAMPLES:
        return False
    low, high = _interval(samples)
    return _is_narrow(low, high, stats.median(samples), sampling)


def wants_more(samples: Sequence[float], *, spent_seconds: float, sampling: Sampling) -> bool:
    """Return whether to take more samples after ``spent_seconds`` of them."""
    if _has_too_few(len(samples), spent_seconds, sampling):
        return True
    return spent_seconds < sampling.at_most_seconds and not is_settled(samples, sampling)


def series(samples: Iterable[float], sampling: Sampling, *, spent_seconds: float) -> Series:
    """Return the series of samples after the last one was taken.

    Args:
        samples: in the order of time.
        sampling: by which they were taken.
        spent_seconds: as last passed to ``wants_more``; 0 for samples taken for another purpose.

    Raises:
        ValueError: there are fewer than 6 samples.
    """
    taken = tuple(samples)
    low, high = _interval(taken)
    result = Series(samples=taken, median=stats.median(taken), low=low, high=high)
    # The same as is_settled(), without a second interval: collectives call this for every rank.
    settled = len(taken) >= MIN_SAMPLES and _is_narrow(low, high, result.median, sampling)
    by: StoppedBy = "interval" if settled else "time"
    is_early = spent_seconds < sampling.at_most_seconds and not settled
    if is_early or _has_too_few(len(taken), spent_seconds, sampling):
        by = "samples"
    stopped = Stopped(
        by=by,
        samples=len(taken),
        # It is recorded with every value: no more digits than needed.
        seconds=float(f"{spent_seconds:.4g}"),
        width_ratio=float(f"{result.width_ratio:.4g}"),
        allowed_ratio=sampling.tolerance_ratio,
        extended=spent_seconds > sampling.longest_seconds,
    )
    if settled:
        return replace(result, stopped=stopped)
    how = {"time": f" in {spent_seconds:.3g} s, when the time was up", "samples": ", and no more were to be taken"}
    why = (
        f"the 95 % interval of the median is {100 * result.width_ratio:.2g} % wide after {len(taken)} samples"
        f"{how[stopped.by]}; {100 * sampling.tolerance_ratio:g} % is allowed"
    )
    return replace(result, inconclusive=why, stopped=stopped)


def _has_too_few(count: int, spent_seconds: float, sampling: Sampling) -> bool:
    return count < MIN_SAMPLES or spent_seconds < sampling.window_seconds


def _is_narrow(low: float, high: float, median: float, sampling: Sampling) -> bool:
    return high - low <= sampling.tolerance_ratio * median


def _interval(samples: Sequence[float]) -> tuple[float, float]:
    """Return the ends for samples in the order of time. A rate that drifts or swings is less certain than one that
    scatters as much at random."""
    return stats.median_interval(samples, correlation=stats.rank_correlation(samples))
