"""Rates of what was counted in trials, in percent, and how sure they are."""

from __future__ import annotations

import math


def bounds(count: int, trials: int) -> tuple[float, float]:
    """Return the 95 % bounds of a rate, from 0 to 1, of which ``count`` of ``trials`` were seen.

    Source: Wilson, "Probable Inference, the Law of Succession, and Statistical Inference" (1927).
    """
    z, rate = 1.959964, count / trials
    middle = (rate + z**2 / (2 * trials)) / (1 + z**2 / trials)
    half = z * math.sqrt(rate * (1 - rate) / trials + z**2 / (4 * trials**2)) / (1 + z**2 / trials)
    return max(0.0, middle - half), min(1.0, middle + half)


def percent(count: int, trials: int) -> str:
    """Return a rate in percent: "0" and "100" stand for never and always in these trials."""
    if count in (0, trials):
        return "100" if count else "0"
    rate = 100 * count / trials
    return f"{rate:.1f}" if 0.1 <= rate <= 99.9 else f"{rate:.2g}" if rate < 50 else f"{rate:.2f}"


def bounded(count: int, trials: int) -> str:
    """Return a rate in percent with its 95 % bounds."""
    low, high = bounds(count, trials)
    return f"{percent(count, trials)} ({100 * low:.1f} to {100 * high:.1f})"
