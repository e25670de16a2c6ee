"""How far a rank stands behind the others."""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence

from pytest_gpucluster.metrics.catalogue import Better


def straggler_ratio(values: Mapping[int, float], rank: int, better: Better) -> float:
    """Return how a rank does beside the other ranks: 1.0 is as well as their median, 0.5 is half as well.

    For ``better="higher"`` that is the rank's value over the median of the *other* ranks' values; for "lower" the
    median of the others over the rank's value. A rank that has reached nothing (zero where higher is better) has the
    ratio 0.0, whatever the others did.

    The judged rank is left out of the median, because it would pull the yardstick towards itself. With 2 ranks at 100
    and 60 the median of both is 80, and the slow rank would show 0.75 for a GPU that does 0.60 of its twin's work;
    with 2 slow ranks of 4 the median of all lies half-way down. Left out, the median of the others is the healthy
    rank's in both cases. The rank with the worst value has the lowest ratio either way, so the right rank is named;
    from some 8 ranks up the two medians hardly differ.

    It stays blind where more than half of the ranks are slow alike: that takes a ``min`` or ``max``.

    >>> straggler_ratio({0: 100.0, 1: 60.0}, 1, "higher")
    0.6
    >>> straggler_ratio({0: 20.0, 1: 20.0, 2: 40.0}, 2, "lower")
    0.5

    Args:
        values: one finite value of zero or more for each rank, all in one unit.
        rank: whose ratio it is.
        better: what is better, "higher" or "lower".

    Raises:
        KeyError: the rank has no value.
        ValueError: fewer than two ranks have a value; a value is NaN, infinite or negative; or ``better`` is "none".
    """
    return _ratio(values[rank], _ordered(values, better), better)


def straggler_ratios(values: Mapping[int, float], better: Better) -> dict[int, float]:
    """Return ``straggler_ratio`` of every rank.

    Raises:
        ValueError: as for ``straggler_ratio``.
    """
    ordered = _ordered(values, better)
    return {rank: _ratio(value, ordered, better) for rank, value in values.items()}


def _ordered(values: Mapping[int, float], better: Better) -> Sequence[float]:
    if better == "none":
        raise ValueError("of values of which none is better, none is behind")
    if len(values) < 2:
        raise ValueError(f"it takes two values or more to hold one beside the others, not {len(values)}")
    if any(not math.isfinite(value) or value < 0 for value in values.values()):
        raise ValueError(f"values must be finite and not negative: {dict(values)!r:.200}")
    return sorted(values.values())


def _ratio(value: float, ordered: Sequence[float], better: Better) -> float:
    others = _median_without(ordered, value)
    if better == "higher":
        return 0.0 if value == 0 else math.inf if others == 0 else value / others
    if value == 0:
        return 1.0 if others == 0 else math.inf
    return others / value


def _median_without(ordered: Sequence[float], value: float) -> float:
    """Return the median of sorted values without one of those that equal ``value``, without making a new list."""
    gone = bisect.bisect_left(ordered, value)
    count = len(ordered) - 1

    def at(index: int) -> float:
        return ordered[index if index < gone else index + 1]

    low, high = at((count - 1) // 2), at(count // 2)
    return low + (high - low) / 2
