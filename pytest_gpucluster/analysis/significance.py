"""When a value counts as worse than an earlier one: beyond its noise, and by more than the allowed percentage.

Each value stands for an interval that encloses the true median with 95 % confidence. Two values differ where
their intervals do not touch. For values that have not changed that happens in less than 1 % of comparisons: Schenker
and Gentleman, "On Judging the Significance of Differences by Examining the Overlap Between Confidence Intervals" (The
American Statistician 55, 2001), find 0.6 % for two means; intervals of order statistics are rather wider. Samples that
depend on each other give shorter intervals than they should, and so more false alarms (docs/simulations.md).

The interval knows the noise inside a run only, not what changes from one run to the next. The allowed
percentage covers that, written "3%", "3 %", "0.5%" or "3": a value is worse than before only beyond both.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from pytest_gpucluster.errors import OptionError
from pytest_gpucluster.metrics import stats

ALLOWED_RATIO = 0.03
"""Default share by which a value may be worse than before. A choice of this project: runs of one healthy node differ by
a percent or two, while a throttled GPU or a link that has fallen back costs far more."""

REGRESSED = "regressed"
UNSURE = "unsure"
MISSING = "missing"
NOT_COMPARABLE = "not comparable"
WORSE = "worse"
WITHIN_NOISE = "within noise"
SAME = "same"
BETTER = "better"

KINDS = (REGRESSED, MISSING, NOT_COMPARABLE, UNSURE, WORSE, WITHIN_NOISE, SAME, BETTER)
"""The worst first. ``regressed``: worse beyond noise and by more than is allowed. ``unsure``: by more than is allowed,
but the noise is as large. ``worse``: beyond noise, and no more than is allowed."""
OPEN = (MISSING, NOT_COMPARABLE, UNSURE)
"""Kinds without a conclusion."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A value and the interval that encloses it, of width 0 where there are no samples."""

    value: float
    low: float
    high: float
    sampled: bool


@dataclass(frozen=True, kw_only=True)
class Assessment:
    """The change of one value.

    ``change`` is a share, positive where the value is better; None where it is unknown.
    """

    kind: str
    change: float | None = None
    why: str = ""


def estimate(value: float, interval: tuple[float, float] | None, samples: Sequence[float] = ()) -> Estimate:
    """Return a value with its noise: its interval, else that of its samples, else none.

    Of fewer than 6 samples the interval reaches from the smallest to the largest. An interval that does not enclose
    the value is ignored, so that it excuses nothing.
    """
    if interval is None and samples and all(map(math.isfinite, samples)):
        try:
            interval = stats.median_interval(samples, correlation=stats.rank_correlation(samples))
        except ValueError:  # too few of them
            interval = min(samples), max(samples)
    if interval is None or not interval[0] <= value <= interval[1] or not all(map(math.isfinite, interval)):
        return Estimate(value=value, low=value, high=value, sampled=False)
    return Estimate(value=value, low=interval[0], high=interval[1], sampled=True)


def assess(old: Estimate, new: Estimate, *, higher: bool, allowed: float, limit_max: float | None = None) -> Assessment:
    """Return the change of a value.

    The change is a share of the old value. Of a value without samples of which less is better it is a share of the
    limit, where that is larger: twice a rounding error is no loss while both are a thousandth of what is allowed.

    Args:
        old: before.
        new: now.
        higher: more is better; else less.
        allowed: the ratio by which it may be worse, 0.03 for 3 %.
        limit_max: the maximum that the limit allows.
    """
    for when, each in (("before", old), ("now", new)):
        if not math.isfinite(each.value) or each.value < 0:
            return Assessment(kind=NOT_COMPARABLE, why=f"the value {when} is {each.value:g}")
    gain = new.value - old.value if higher else old.value - new.value
    if gain == 0:
        return Assessment(kind=SAME, change=0.0)
    yardstick = old.value
    if not higher and limit_max is not None and not (old.sampled and new.sampled):
        yardstick = max(yardstick, limit_max)
    change = gain / yardstick if yardstick > 0 else math.copysign(math.inf, gain)
    apart = new.high < old.low or old.high < new.low
    if change < -allowed:
        return Assessment(kind=REGRESSED if apart else UNSURE, change=change)
    if not apart:
        return Assessment(kind=WITHIN_NOISE, change=change)
    return Assessment(kind=BETTER if gain > 0 else WORSE, change=change)


def allowance(text: str) -> float:
    """Return the ratio that a percentage means: 0.03 for 3 %.

    >>> allowance("3 %")
    0.03

    Raises:
        OptionError: no percentage, or one outside of 0 to below 100.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*%?\s*", text, re.ASCII)
    if found is None or not float(found[1]) < 100:
        raise OptionError(f"{text!r} is no percentage from 0 to below 100; write 3% or 0.5%")
    return float(found[1]) / 100
