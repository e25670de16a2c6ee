"""Order statistics of a few samples, without numpy.

A NaN among the samples makes every result NaN: it must reach the judge, not vanish in a sort.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What a series of samples amounts to, all in the samples' unit."""

    count: int
    minimum: float
    p50: float
    p99: float
    maximum: float
    mad: float


def median(samples: Sequence[float]) -> float:
    """Return the middle sample, or the mean of the two middle ones.

    Raises: ValueError if there are no samples.
    """
    return percentile(samples, 50)


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


def median_interval(samples: Sequence[float], *, confidence: float = 0.95) -> tuple[float, float]:
    """Return the shortest symmetric pair of samples that encloses the true median with at least ``confidence``.

    It asks nothing of the distribution, but that samples do not depend on each other: of n samples the k-th smallest
    is above the true median with the probability of fewer than k heads in n throws of a coin.

    >>> median_interval([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    (1.0, 6.0)
    >>> median_interval([float(sample) for sample in range(1, 13)])
    (3.0, 10.0)

    Raises: ValueError if there are too few samples for this confidence (fewer than 6 for 95 %), or ``confidence`` is
    not between 0 and 1.
    Source: David and Nagaraja, "Order Statistics" (3rd edition, 2003), section 7.1.
    """
    if not 0 < confidence < 1:
        raise ValueError(f"a confidence lies between 0 and 1, not at {confidence}")
    count = len(samples)
    tail, outside = (1 - confidence) / 2, 0
    rank = 0
    while rank < count // 2:
        outside += math.comb(count, rank)
        if outside > tail * 2**count:
            break
        rank += 1
    if rank == 0:
        raise ValueError(f"{count} samples cannot enclose their median with a confidence of {confidence:g}")
    if any(map(math.isnan, samples)):
        return math.nan, math.nan
    ordered = sorted(samples)
    return ordered[rank - 1], ordered[count - rank]


def mad(samples: Sequence[float]) -> float:
    """Return the median absolute deviation from the median, unscaled.

    Raises: ValueError if there are no samples.
    Source: Hampel, "The Influence Curve and its Role in Robust Estimation" (1974). Times 1.4826 it estimates
    the standard deviation of normally distributed samples.
    """
    centre = median(samples)
    return median([abs(sample - centre) for sample in samples])


def summary(samples: Sequence[float]) -> Summary:
    """Summarise the samples.

    Raises: ValueError if there are none.
    """
    return Summary(
        count=len(samples),
        minimum=percentile(samples, 0),
        p50=median(samples),
        p99=percentile(samples, 99),
        maximum=percentile(samples, 100),
        mad=mad(samples),
    )
