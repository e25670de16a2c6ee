"""The rule by which a floor is proposed: the median of what was accepted, less some spreads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import ROUND_FLOOR, Decimal

from pytest_gpucluster.calibration.evidence import Number, Series
from pytest_gpucluster.metrics import stats

SPREADS = 3.0
"""How many spreads below the median: of values that are distributed normally, one in 740 is lower."""

LEAST_NUMBERS = 6
"""Fewer do not enclose their median with 95 % confidence: ``stats.median_interval``."""

LEAST_SPREAD = 0.01
"""As a share of the median. One run does not show what another day brings, and ranks in step are all equally fast:
their values agree to a hair, and a floor at a hair below would reject the same cluster tomorrow. A rule of this
project."""

DIGITS = 3
"""Significant digits of a floor, which is rounded down."""

# Hampel, "The Influence Curve and its Role in Robust Estimation" (1974): times this the median absolute deviation
# estimates the standard deviation of normally distributed values.
_NORMAL = 1.4826


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """A floor, in the metric's unit, and what it is made of. ``below`` are accepted values that would miss it."""

    series: Series
    floor: float
    median: float
    spread: float
    spreads: float
    below: tuple[Number, ...] = ()
    peak: float | None = None
    """Of the data sheet, where the value stands beside one."""
    is_peak: bool = False
    """The peak holds it down."""

    @property
    def lowest(self) -> Number:
        """The lowest of the accepted values."""
        return min(self.series.numbers, key=lambda number: number.value)


@dataclass(frozen=True, kw_only=True)
class Kept:
    """No floor is proposed; ``why`` says what stands instead."""

    series: Series
    why: str


def propose(series: Series, *, spreads: float = SPREADS, peak: float | None = None) -> Proposal | Kept:
    """Return the floor for a series: median - spreads * spread, rounded down, and never above the data sheet peak.

    The spread is the largest of: how far the ranks of all runs are apart, how far the samples behind a value are apart
    (the median over all values), both as 1.4826 times their median absolute deviation; and 1 % of the median.

    There is no floor where it would be looser than the limit that was in force, where there are too few values, and
    where nothing above zero is left.

    Args:
        series: of accepted runs.
        spreads: how many spreads below the median, above 0.
        peak: of the data sheet, in the metric's unit, where the value stands beside one.
    """
    numbers = [number.value for number in series.numbers]
    if len(numbers) < LEAST_NUMBERS:
        return Kept(series=series, why=f"{_counted(len(numbers))}, and at least {LEAST_NUMBERS} are needed")
    if not all(math.isfinite(value) and value >= 0 for value in numbers):
        return Kept(series=series, why="a value is no finite number")
    median = stats.median(numbers)
    spread = max(_NORMAL * stats.mad(numbers), _of_samples(series.samples), LEAST_SPREAD * median)
    wanted = median - spreads * spread
    if not wanted > 0:
        return Kept(series=series, why=f"{spreads:g} spreads of {spread:.3g} leave nothing of the median {median:.4g}")
    floor = rounded_down(wanted if peak is None else min(wanted, peak))
    in_force = max((limit.min for limit in series.limits if limit.min is not None), default=None)
    if in_force is not None and floor <= in_force:
        return Kept(series=series, why=f"{floor:g} {series.unit} would not be more than the limit in force")
    most = min((limit.max for limit in series.limits if limit.max is not None), default=None)
    if most is not None and floor > most:
        return Kept(series=series, why=f"{floor:g} {series.unit} would be more than the limit in force allows")
    return Proposal(
        series=series,
        floor=floor,
        median=median,
        spread=spread,
        spreads=spreads,
        below=tuple(sorted((n for n in series.numbers if n.value < floor), key=lambda number: number.value)),
        peak=peak,
        is_peak=peak is not None and wanted > peak,
    )


def rounded_down(value: float) -> float:
    """Return a positive value with three significant digits, never more than it is.

    >>> rounded_down(741.97), rounded_down(2.9999), rounded_down(0.0123456)
    (741.0, 2.99, 0.0123)
    """
    exact = Decimal(repr(value))
    step = Decimal(1).scaleb(exact.adjusted() - DIGITS + 1)
    return float((exact / step).to_integral_value(rounding=ROUND_FLOOR) * step)


def _of_samples(samples: Sequence[Sequence[float]]) -> float:
    """Return how far samples are apart in the middle one of all values."""
    scattered = [_NORMAL * stats.mad(each) for each in samples if len(each) >= LEAST_NUMBERS]
    found = stats.median(scattered) if scattered else 0.0
    return found if math.isfinite(found) else math.inf


def _counted(count: int) -> str:
    return "1 value" if count == 1 else f"{count} values"
