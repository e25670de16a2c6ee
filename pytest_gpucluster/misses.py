"""In which ways values miss their limit, and by how much. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from pytest_gpucluster.explanation import explanation
from pytest_gpucluster.limits import Limit
from pytest_gpucluster.metrics import stats, units
from pytest_gpucluster.metrics.catalogue import Metric
from pytest_gpucluster.metrics.measurement import Measurement, sound_interval

NOTHING: Mapping[Any, Any] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True)
class Miss:
    """One way in which a limit is missed.

    ``text`` tells the worst of it, ``why`` what its GPU did meanwhile that may explain it. ``by_rank`` tells both of
    every rank, the worst one first; it is empty where no rank of its own is at fault. ``worst``: the rank whose value
    ``text`` has, where a rank's has it. ``inconclusive``: whether more certainty could make a pass of it.
    """

    text: str
    why: str = ""
    by_rank: Mapping[int, str] = field(default_factory=dict)
    worst: int | None = None
    inconclusive: bool = False


def margin(measured: Measurement, limit: Limit) -> float | None:
    """Return the distance of the deciding number to the nearer bound as a share of it; negative when missed.

    The deciding number is the low end of the interval for ``min``, the high end for ``max``, or the value where there
    is no interval that makes sense. A bound of zero has no shares: there the distance itself counts. None: the limit
    has no bounds.
    """
    low, high = sound_interval(measured) or (measured.value, measured.value)
    return _margin(low, high, limit)


def misses(
    metric: Metric,
    limit: Limit,
    of: Mapping[int, Measurement],
    *,
    ratios: Mapping[int, float],
    transport: str | None,
    meanwhile: Mapping[int, Mapping[str, Any]] = NOTHING,
) -> Iterator[Miss]:
    """Yield every way in which a limit is missed, the plainest first. A rank is told only the plainest of its own.

    Args:
        metric: what was measured.
        limit: what is demanded of it.
        of: the measurement of each rank whose value is finite and not negative.
        ratios: ``straggler_ratio`` of each rank; empty where they are not known.
        transport: what carried the data, where a label says so.
        meanwhile: what each rank's GPU did during the test; it may explain a value that has no telemetry of its own.
    """
    said: dict[int, str] = {}

    def miss(found: Mapping[int, float], text: dict[int, str], *, inconclusive: bool = False) -> Iterator[Miss]:
        ranks = sorted(found, key=found.__getitem__)
        said.update({rank: text[rank] for rank in ranks})
        if ranks:
            why = {rank: explanation(_seen(of[rank], meanwhile.get(rank, NOTHING))) for rank in ranks}
            by_rank = {rank: f"{text[rank]}: {why[rank]}" if why[rank] else text[rank] for rank in ranks}
            worst = ranks[0]
            yield Miss(text=text[worst], why=why[worst], by_rank=by_rank, worst=worst, inconclusive=inconclusive)

    plain = {rank: by for rank, m in of.items() if (by := _margin(m.value, m.value, limit)) is not None and by < 0}
    low = {rank: f"{metric.name} {_beyond(metric, of[rank].value, limit)}" for rank in plain}
    if limit.expect_transport is not None and transport is not None and transport not in limit.expect_transport:
        expected = " or ".join(limit.expect_transport)
        why = next((str(m.telemetry["transport"]) for m in of.values() if m.telemetry.get("transport")), "")
        yield Miss(text=f"{metric.name}: {transport} carries it, expected is {expected}", why=why)
        if plain and len(plain) == len(of):  # what all of them share explains it, and no rank of its own
            worst = min(plain, key=plain.__getitem__)
            yield Miss(text=low[worst], worst=worst)
            said.update(low)
            plain = {}
    yield from miss(plain, low)

    unsure = {
        rank: by for rank, m in of.items() if rank not in said and (by := margin(m, limit)) is not None and by < 0
    }
    yield from miss(unsure, {rank: _unsure(metric, of[rank], limit) for rank in unsure}, inconclusive=True)

    noisy = {rank: 0.0 for rank, measured in of.items() if rank not in said and measured.inconclusive}
    yield from miss(
        noisy, {rank: f"{metric.name} is inconclusive: {of[rank].inconclusive}" for rank in noisy}, inconclusive=True
    )

    required = limit.min_ratio_to_median
    if required is not None:
        behind = {rank: ratio for rank, ratio in ratios.items() if rank not in said and ratio < required}
        yield from miss(behind, {rank: _behind(metric, of, rank, ratios[rank], required) for rank in behind})


def _seen(measured: Measurement, meanwhile: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what the GPU did: in the value's own window, or else during the whole test."""
    own = measured.telemetry
    return own if own.get("samples") else {**meanwhile, **own}


def interval_text(measured: Measurement) -> str:
    """Return "its 95 % interval is 697 TFLOPS to 709 TFLOPS", or nothing where there is none."""
    if measured.interval is None:
        return ""
    low, high = units.show_apart(*measured.interval, measured.unit)
    return f"its 95 % interval is {low.removesuffix(measured.unit).rstrip()} to {high}"


def _margin(low: float, high: float, limit: Limit) -> float | None:
    margins = []
    if limit.min is not None:
        margins.append((low - limit.min) / (limit.min or 1.0))
    if limit.max is not None:
        margins.append((limit.max - high) / (limit.max or 1.0))
    return min(margins, default=None)


def _beyond(metric: Metric, value: float, limit: Limit) -> str:
    below = limit.min is not None and value < limit.min
    shown, needed = units.show_apart(value, _bound(limit, below), metric.unit)
    return f"{shown} {'<' if below else '>'} {needed}"


def _unsure(metric: Metric, measured: Measurement, limit: Limit) -> str:
    below = limit.min is not None and measured.interval is not None and measured.interval[0] < limit.min
    shown, needed = units.show_apart(measured.value, _bound(limit, below), metric.unit)
    side = "above" if below else "below"
    return f"{metric.name} {shown} is not surely {side} {needed}: {interval_text(measured)}"


def _bound(limit: Limit, below: bool) -> float:
    bound = limit.min if below else limit.max
    assert bound is not None  # a missed limit has the bound that was missed
    return bound


def _behind(metric: Metric, of: Mapping[int, Measurement], rank: int, ratio: float, required: float) -> str:
    others = [measured.value for other, measured in of.items() if other != rank]
    middle = units.show(stats.median(others), metric.unit)
    if len(others) > 2 and (spread := stats.mad(others)) > 0:
        middle += f", MAD {units.show(spread, metric.unit)}"
    of_whom = f"the median of the {len(others)} other ranks" if len(others) > 1 else "the other rank"
    value = units.show(of[rank].value, metric.unit)
    found, needed = (text.removesuffix(" ratio") for text in units.show_apart(ratio, required, "ratio"))
    if metric.better == "lower":
        return f"{metric.name} {value} is behind: {of_whom} ({middle}) is {found} of it, {needed} is required"
    return f"{metric.name} {value} is {found} of {of_whom} ({middle}), {needed} is required"
