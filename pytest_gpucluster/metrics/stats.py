"""Groups of values, and order statistics of a few samples, without numpy.

A NaN among the samples makes every result NaN: it must reach the judge, not vanish in a sort.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import math
from collections.abc import Hashable, Iterable, Sequence
from fractions import Fraction
from typing import TypeVar

_Key = TypeVar("_Key", bound=Hashable)
_Value = TypeVar("_Value")


def grouped(pairs: Iterable[tuple[_Key, _Value]]) -> dict[_Key, list[_Value]]:
    """Return each key with its values, in the order in which they come.

    >>> grouped([("a", 1), ("b", 2), ("a", 3)])
    {'a': [1, 3], 'b': [2]}
    """
    groups: dict[_Key, list[_Value]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups


def median(samples: Sequence[float]) -> float:
    """Return the middle sample, or the mean of the two middle ones.

    Raises: ValueError if there are no samples.
    """
    return percentile(samples, 50)


def mean(samples: Sequence[float]) -> float:
    """Return the mean of some finite numbers, which lies between them: also where their sum is beyond a float.

    >>> mean([1.0, 2.0, 4.5])
    2.5
    """
    half = math.fsum(value / 2 / len(samples) for value in samples)
    return max(min(samples), min(max(samples), 2 * half))


def largest(values: Iterable[float]) -> float:
    """Return the largest of some numbers; NaN if one is NaN, or if there are none.

    ``max`` keeps a NaN that comes first and drops one that comes later.
    """
    found = list(values)
    return max(found) if found and not any(map(math.isnan, found)) else math.nan


def percentile(samples: Sequence[float], percent: float) -> float:
    """Return the value that ``percent`` (0 to 100) of the samples do not exceed, interpolated between
    neighbours.

    Raises: ValueError if there are no samples or ``percent`` is outside 0 to 100.
    Source: Hyndman and Fan, "Sample Quantiles in Statistical Packages" (1996), definition 7, numpy's default.
    """
    if not 0 <= percent <= 100:
        raise ValueError(f"a percentile lies between 0 and 100, not at {percent}")
    if not samples:
        raise ValueError("no samples: a percentile of nothing has no value")
    if any(map(math.isnan, samples)):
        return math.nan
    ordered = sorted(samples)
    position = (len(ordered) - 1) * percent / 100
    below = math.floor(position)
    share = position - below
    low, high = ordered[below], ordered[min(below + 1, len(ordered) - 1)]
    # Equal neighbours are returned as they are: inf - inf would be NaN.
    return low if share == 0 or low == high else low * (1 - share) + high * share


@functools.lru_cache(maxsize=4096)
def _outer_rank(count: int, confidence: float) -> int:
    """Return how many of ``count`` ordered samples lie at most outside of an end of the interval, itself included.

    In whole numbers: of some thousand samples the chances are beyond what a float can hold.
    """
    tail = Fraction((1 - confidence) / 2)
    most = tail.numerator * 2**count // tail.denominator
    rank, outside, ways = 0, 1, 1  # of all throws: those with at most `rank` heads, and those with exactly `rank`
    while outside <= most:
        ways = ways * (count - rank) // (rank + 1)
        rank += 1
        outside += ways
    return rank


def median_interval(
    samples: Sequence[float], *, confidence: float = 0.95, correlation: float = 0.0
) -> tuple[float, float]:
    """Return the shortest symmetric pair of samples that encloses the true median with at least ``confidence``.

    It asks nothing of the distribution. Of n samples that do not depend on each other the k-th smallest is above the
    true median with the probability of fewer than k heads in n throws of a coin. Neighbours that resemble each other
    are worth fewer samples: then both ends move outward by sqrt((1 + r) / (1 - r)), at most to the extremes.

    >>> median_interval([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    (1.0, 6.0)
    >>> median_interval([float(sample) for sample in range(1, 13)])
    (3.0, 10.0)
    >>> median_interval([float(sample) for sample in range(1, 13)], correlation=0.5)
    (1.0, 12.0)

    Args:
        samples: in any order.
        confidence: between 0 and 1.
        correlation: r, how much neighbours in time depend on each other, from 0 to below 1: ``rank_correlation``.

    Raises: ValueError if there are too few samples for this confidence (fewer than 6 for 95 %), or ``confidence`` or
    ``correlation`` is out of its range.
    Source: David and Nagaraja, "Order Statistics" (3rd edition, 2003), section 7.1. The factor is that of a mean of
    first-order autoregressive samples: Priestley, "Spectral Analysis and Time Series" (1981), section 5.3.
    """
    if not 0 < confidence < 1 or not 0 <= correlation < 1:
        raise ValueError(
            f"confidence lies between 0 and 1, not at {confidence}; correlation from 0 to below 1, not at {correlation}"
        )
    count = len(samples)
    rank = _outer_rank(count, confidence)
    if rank == 0:
        raise ValueError(f"{count} samples cannot enclose their median with a confidence of {confidence:g}")
    if any(map(math.isnan, samples)):
        return math.nan, math.nan
    ordered = sorted(samples)
    middle = (count + 1) / 2
    rank = max(1, math.floor(middle - (middle - rank) * math.sqrt((1 + correlation) / (1 - correlation))))
    return ordered[rank - 1], ordered[count - rank]


def rank_correlation(samples: Sequence[float]) -> float:
    """Return how much each sample resembles the one before it: 0 is not at all, towards 1 more and more.

    It is the correlation of neighbours by their ranks, so that a single wild sample does not hide it. In short series
    it comes out too small by about 1/n, which is added. Below 0 it is 0, and it ends at 0.95.

    >>> rank_correlation([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0])
    0.75
    >>> rank_correlation([1.0, 2.0, 1.0, 2.0, 1.0, 2.0, 1.0, 2.0])
    0.0

    Source: Wald and Wolfowitz, "An Exact Test for Randomness in the Non-Parametric Case" (1943), for serial
    correlation of ranks; Kendall, "Note on Bias in the Estimation of Autocorrelation" (1954), for the bias.
    """
    count = len(samples)
    if count < 3 or any(map(math.isnan, samples)):
        return 0.0
    ordered = sorted(samples)
    # Twice the distance from the middle rank. Equal samples share the mean of their ranks.
    off = [bisect.bisect_left(ordered, sample) + bisect.bisect_right(ordered, sample) - count for sample in samples]
    spread = sum(each * each for each in off)
    if not spread:
        return 0.0
    covariance = sum(before * after for before, after in itertools.pairwise(off))
    return min(0.95, max(0.0, covariance / spread + 1 / count))


def median_without(ordered: Sequence[float], removed: Sequence[int]) -> float | None:
    """Return the median of sorted values without those at some sorted places, without making a new list; None where
    nothing is left."""
    count = len(ordered) - len(removed)
    if not count:
        return None
    # The number of values that are left before each removed one.
    before = [place - index for index, place in enumerate(removed)]

    def at(index: int) -> float:
        return ordered[index + bisect.bisect_right(before, index)]

    low, high = at((count - 1) // 2), at(count // 2)
    return low + (high - low) / 2


def mad(samples: Sequence[float]) -> float:
    """Return the median absolute deviation from the median, unscaled.

    Raises: ValueError if there are no samples.
    Source: Hampel, "The Influence Curve and its Role in Robust Estimation" (1974). Times 1.4826 it estimates
    the standard deviation of normally distributed samples.
    """
    centre = median(samples)
    return median([abs(sample - centre) for sample in samples])
