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
