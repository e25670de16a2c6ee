"""When to stop measuring, and what a series of samples amounts to. Pure: no clock, no device.

Measured is until the interval that encloses the median is narrow enough, or the time is up. Then the time is granted
once more. What is still not narrow enough is inconclusive, and that is never a pass. A series says which it was.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from pytest_gpucluster.metrics import stats

StoppedBy = Literal["interval", "time", "samples"]
"""What ended a measurement: the interval was narrow enough; the time was up, the extension too; there were no more
samples to take, such as steps of a training that was planned with so many."""
STOPPED_BY: tuple[StoppedBy, ...] = get_args(StoppedBy)

MIN_SAMPLES = 8
"""With fewer, the interval is no more than the smallest and the largest sample."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How long to warm up, how long to measure, and how sure to be.

    Attributes:
        warmup_seconds: at least so much load before the first sample counts.
        window_seconds: at least so long the samples take together.
        longest_seconds: without certainty not longer than this, and then the same once more.
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
    """Why no more samples were taken, and how much was known then.

    Of what several ranks measure together it is told of the samples that have decided for all: the slowest rank's.

    Attributes:
        by: "interval", "time" or "samples".
        samples: how many there were.
        seconds: how long they took together; 0 where they were not taken for this.
        width_ratio: of the 95 % interval, as a part of the median.
        allowed_ratio: how wide it might be.
        extended: whether they took longer than ``longest``, which is granted once more.
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

    ``inconclusive`` says why the interval is too wide to be sure of the median; it is empty if it is not. ``stopped``
    says why there are no more samples; it is None of what was not sampled.
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
        """Return this series, as sure as ``other``: the one by whose samples it was decided when enough is known."""
        return replace(self, inconclusive=other.inconclusive, stopped=other.stopped)


def is_settled(samples: Sequence[float], sampling: Sampling) -> bool:
    """Tell whether the median of the samples is known within the tolerance."""
    if len(samples) < MIN_SAMPLES:
        return False
    low, high = _interval(samples)
    return _is_narrow(low, high, stats.median(samples), sampling)


def wants_more(samples: Sequence[float], *, spent_seconds: float, sampling: Sampling) -> bool:
    """Tell whether to go on measuring after ``spent_seconds`` of samples."""
    if _has_too_few(len(samples), spent_seconds, sampling):
        return True
    return spent_seconds < sampling.at_most_seconds and not is_settled(samples, sampling)


def series(samples: Iterable[float], sampling: Sampling, *, spent_seconds: float) -> Series:
    """Sum up samples after the last one was taken.

    Args:
        samples: in the order of time.
        sampling: by which they were taken.
        spent_seconds: what ``wants_more`` was told last; 0 of samples that were not taken for this.

    Raises:
        ValueError: there are fewer than 6 samples.
    """
    taken = tuple(samples)
    low, high = _interval(taken)
    result = Series(samples=taken, median=stats.median(taken), low=low, high=high)
    # The same as is_settled(), without a second interval: collectives call this for every rank.
    settled = len(taken) >= MIN_SAMPLES and _is_narrow(low, high, result.median, sampling)
    stopped = Stopped(
        by=_stopped_by(len(taken), spent_seconds, sampling, settled=settled),
        samples=len(taken),
        # It stands beside every value on record: no more digits than anybody asks for.
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


def _stopped_by(count: int, spent_seconds: float, sampling: Sampling, *, settled: bool) -> StoppedBy:
    if _has_too_few(count, spent_seconds, sampling) or (spent_seconds < sampling.at_most_seconds and not settled):
        return "samples"
    return "interval" if settled else "time"


def _has_too_few(count: int, spent_seconds: float, sampling: Sampling) -> bool:
    return count < MIN_SAMPLES or spent_seconds < sampling.window_seconds


def _is_narrow(low: float, high: float, median: float, sampling: Sampling) -> bool:
    return high - low <= sampling.tolerance_ratio * median


def _interval(samples: Sequence[float]) -> tuple[float, float]:
    """Return the ends for samples in the order of time. A rate that drifts or swings is known less well than one that
    scatters as much at random."""
    return stats.median_interval(samples, correlation=stats.rank_correlation(samples))
