"""Two ways of the same work, taken in turn in one run: their ratio, and whether ours is good.

In each pair the bare way is taken twice, so that beside the ratio of ours to the bare way stands that of the bare way
to itself (A/A): how far two figures of the same thing lie apart here. The order changes from pair to pair, so that what
else the machine does meets all alike.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

LEAST_ON_GPU = 0.98
"""Of the ratio's lower bound. On a GPU nothing else is going on; on cpu the ratio must lie inside of the A/A band."""
LEAST_PAIRS = 20


def in_turn(number: int, ours: Callable[[], float], bare: Callable[[], float]) -> dict[str, float]:
    """Return the seconds of one operation, of pair ``number``: of ours, and twice of the bare way."""
    ways = {"ours": ours, "bare": bare, "again": bare}
    order = list(ways)
    turned = order[number % 3 :] + order[: number % 3]
    return {way: ways[way]() for way in (turned if number % 2 else turned[::-1])}


def judged(pairs: Sequence[Mapping[str, float]], device: str) -> dict[str, Any]:
    """Return the ratios of some pairs, ours to bare and bare to bare, and whether ours is good.

    A ratio is of rates, so above 1 ours is the faster one. Each has its median and that one's 95 % interval.
    """
    from pytest_gpucluster.metrics.stats import median_interval

    ours = [pair["bare"] / pair["ours"] for pair in pairs]
    same = [pair["bare"] / pair["again"] for pair in pairs]
    middle, (low, high) = statistics.median(ours), median_interval(ours)
    band = min(same), max(same)
    good = low >= LEAST_ON_GPU if device == "cuda" else band[0] <= middle <= band[1]
    return {"ratio": middle, "low": low, "high": high, "same": statistics.median(same), "band": band, "good": good}


def rates(pairs: Sequence[Mapping[str, float]], each: float) -> tuple[float, float]:
    """Return the median rates, of the bare way and of ours, where one operation is ``each`` of something."""
    bare, ours = (each / statistics.median(pair[way] for pair in pairs) for way in ("bare", "ours"))
    return bare, ours


def ratio_cells(seen: Mapping[str, Any]) -> tuple[str, str, str]:
    """Return a table's cells of what ``judged`` has found: ours to bare, A/A, and the verdict."""
    return (
        f"{seen['ratio']:.3f} ({seen['low']:.3f} to {seen['high']:.3f})",
        f"{seen['same']:.3f} ({seen['band'][0]:.3f} to {seen['band'][1]:.3f})",
        "good" if seen["good"] else "MISSED",
    )
