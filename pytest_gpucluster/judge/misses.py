"""How values miss their limit: by how much, which rank is a straggler, a possible cause, or the missing entry.

All of it is pure. Where no entry decides about a value, :func:`missing_limit` gives the YAML that would.

    >>> explanation({"throttle": ["hw_thermal"], "throttle_share": {"hw_thermal": 0.62},
    ...              "temperature_celsius": [70, 88, 91]})
    'HW thermal slowdown 62 % of the time, 91 degC'

An explanation comes from the telemetry of the rank's GPU during the test, and never decides. Telemetry travels in plain
JSON types from ranks of any version, so what is not of the form of ``node.health.telemetry.summary`` is ignored.
"""

from __future__ import annotations

import bisect
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from pytest_gpucluster.judge.judged import JudgedLimit
from pytest_gpucluster.judge.limits import KNOWN_LABELS, TOPOLOGY, Limit, Thresholds
from pytest_gpucluster.metrics import datasheets, stats, units
from pytest_gpucluster.metrics.catalogue import Better, Metric
from pytest_gpucluster.metrics.measurement import Measurement, sound_interval
from pytest_gpucluster.text import printable


def straggler_ratios(values: Mapping[int, float], better: Better) -> dict[int, float]:
    """Return how each rank compares with the other ranks: 1.0 is their median, 0.5 is half as good.

    For ``better="higher"`` that is the rank's value over the median of the *other* ranks' values; for "lower" the
    median of the others over the rank's value. A rank with zero where higher is better has the ratio 0.0, whatever the
    others measured.

    The judged rank is left out of the median, because it would pull the yardstick towards itself. With 2 ranks at 100
    and 60 the median of both is 80, and the slow rank would show 0.75 for a GPU that does 0.60 of its twin's work;
    with 2 slow ranks of 4 the median of all lies half-way down. Left out, the median of the others is the healthy
    rank's in both cases. The rank with the worst value has the lowest ratio either way, so the right rank is named;
    from some 8 ranks up the two medians hardly differ.

    It stays blind where more than half of the ranks are slow alike: that takes a ``min`` or ``max``.

    >>> straggler_ratios({0: 20.0, 1: 20.0, 2: 40.0}, "lower")
    {0: 1.5, 1: 1.5, 2: 0.5}

    Args:
        values: one finite value of zero or more for each rank, all in one unit.
        better: what is better, "higher" or "lower".

    Raises:
        ValueError: fewer than two ranks have a value; a value is NaN, infinite or negative; or ``better`` is "none".
    """
    if better == "none":
        raise ValueError("better is 'none': neither more nor less is better, so no value is behind")
    if len(values) < 2:
        raise ValueError(f"it takes two values or more to compare one with the others, not {len(values)}")
    if any(not math.isfinite(value) or value < 0 for value in values.values()):
        raise ValueError(f"values must be finite and not negative: {dict(values)!r:.200}")
    ordered = sorted(values.values())
    return {rank: _ratio(value, ordered, better) for rank, value in values.items()}


def _ratio(value: float, ordered: Sequence[float], better: Better) -> float:
    others = stats.median_without(ordered, [bisect.bisect_left(ordered, value)])
    assert others is not None  # of two values or more
    if better == "higher":
        return 0.0 if value == 0 else math.inf if others == 0 else value / others
    if value == 0:
        return 1.0 if others == 0 else math.inf
    return others / value


def missing_limit(
    metric: Metric,
    labels: Mapping[str, str],
    known: Mapping[str, str],
    *,
    limits: Thresholds,
    sku: str | None,
    gpu_name: str | None,
) -> tuple[str, str]:
    """Return what is missing, in a few words, and the YAML to add, in several lines.

    Args:
        metric: what was measured.
        labels: the labels of the measurement.
        known: the facts that conditions are compared with.
        limits: the limits in force, in which nothing applies.
        sku: the SKU that was looked for; None where the GPU is unknown.
        gpu_name: NVML's name of the GPU, where there is one.
    """
    bound = "max" if metric.better == "lower" else "min"
    entry = [f"{bound}: <what you accept> {metric.unit}", "source: <where the figure comes from>"]
    entries = limits.entries(metric.name, sku=sku) if sku is not None else []
    when = _conditions(metric, labels, known, entries)
    if when:
        entry.insert(0, f"when: {{{', '.join(f'{name}: {text}' for name, text in when.items())}}}")
    gpu, name = printable(gpu_name or ""), sku or "my-gpu"
    pattern = []
    if sku in limits.skus:
        problem = f"no limit on {sku}" + (" for these conditions" if entries else "")
    else:
        escaped = re.sub(r"([\\.^$*+?{}\[\]|()])", r"\\\1", gpu or "<NVML name>")
        pattern = [f"    nvml_name: {_single_quoted(escaped)}"]
        problem = f"unknown GPU {gpu!r}: no SKU matches it" if gpu else "the name of the GPU is not known"
        if sku is not None:
            problem = f"unknown SKU {sku!r}"
    lines = [
        f"{problem}. Add this to a file and pass it with --gpucluster-thresholds FILE:",
        "",
        "schema_version: 1",
        "skus:",
        f"  {_scalar(name)}:",
        *pattern,
        "    limits:",
        f"      {metric.name}:",
        *(f"        {'- ' if index == 0 else '  '}{line}" for index, line in enumerate(entry)),
    ]
    if entries:
        lines += ["", "Limits of this metric there apply to other conditions:"]
        lines += [f"  {limit.conditions()} ({limit.origin})" for limit in entries]
    return problem + "; the text below shows the YAML to add", "\n".join(lines)


def _conditions(
    metric: Metric, labels: Mapping[str, str], known: Mapping[str, str], entries: Sequence[Limit]
) -> dict[str, str]:
    """Choose the conditions of a new entry: what other entries depend on, and what distinguishes values."""
    used = {condition.key for limit in entries for condition in limit.when}
    names = [name for name in ("world_size", "nnodes") if known[name].isdecimal()]
    if not (used.intersection(TOPOLOGY) or metric.peak in datasheets.LINK_PEAKS):
        names = []
    when = {name: known[name] for name in names}
    for name in KNOWN_LABELS:
        # Only what the loader reads back as the same condition is worth showing.
        text = labels.get(name, "")
        amount = units.magnitude(text)
        size = amount is not None and amount[0] in ("amount of data", "number")
        if size if name == "size" else re.fullmatch(r"[A-Za-z][A-Za-z0-9_./-]*", text):
            when[name] = text
    return when


def _scalar(text: str) -> str:
    return text if re.fullmatch(r"[A-Za-z0-9](?:[A-Za-z0-9_. -]*[A-Za-z0-9_.])?", text) else _single_quoted(text)


def _single_quoted(text: str) -> str:
    return "'" + printable(text).replace("'", "''") + "'"


SLOWDOWNS: Mapping[str, str] = {
    "hw_slowdown": "HW slowdown",
    "hw_thermal": "HW thermal slowdown",
    "sw_thermal": "SW thermal slowdown",
    "hw_power_brake": "HW power brake",
}
"""Throttle reasons of a GPU that is too hot or short of power, as nvidia-smi calls them; gpu.health rejects it."""

NOTES: Mapping[str, str] = {
    "applications_clocks": "clocks held by their setting {} (nvidia-smi -ac, -lgc)",
    "sync_boost": "clocks held to those of other GPUs {} (sync boost)",
    "board_limit": "board limit {}",
    "reliability": "reliability limit {}",
}
"""Throttle reasons that a healthy GPU can have, but the power limit: each GPU is at it under full load, so it explains
nothing. Source: NVML API reference, nvmlClocksEventReasons."""

LEAST_SHARE = 0.01
"""A slowdown in a smaller part of the time explains nothing that a limit is missed by; this suite's rule."""
NOTED_SHARE = 0.5
"""The least part of the time of one of the others that is reported; this suite's rule."""
NEAR_SLOWDOWN_CELSIUS = 5.0
"""Within this of the temperature at which the card slows down it is hot; this suite's rule."""
HOT_CELSIUS = 85.0
"""Hot where the card does not report that temperature; this suite's rule."""
LOW_CLOCK_RATIO = 0.6
"""An SM clock below this part of the card's highest is far below it; this suite's rule. A GPU at its power limit has a
clock below the highest, too, but by less."""
BUSY_PERCENT = 50.0
"""A GPU that runs kernels in less of the time waits, and has a low clock because of that; this suite's rule. Source:
NVML API reference, nvmlUtilization_t."""
CHARACTERS = 100
"""The longest explanation in a failure's one line, after value, limit and rank. The least likely causes are dropped."""
_THERMAL = ("hw_thermal", "sw_thermal", "hw_slowdown")
_VOLUMES = ("_bytes", ".active", ".rate")
_COUNTERS = 3


def explanation(telemetry: Mapping[str, Any], *, of_rate: bool = True) -> str:
    """Return what may explain a missed limit, the likeliest cause first; nothing where the GPU was in order.

    Args:
        telemetry: as ``node.health.telemetry.summary`` returns it, with ``counters``, those that have changed and by
            how much, and ``transport``, why a slower transport was chosen (``node.fabric.nccl_log``).
        of_rate: whether a rate was measured: a low clock makes no result wrong, and explains none of a host.
    """
    transport = telemetry.get("transport")
    parts = [
        *([transport] if isinstance(transport, str) and transport else ()),
        *_slowdowns(telemetry),
        *_heat(telemetry),
        *(_clock(telemetry) if of_rate else ()),
        *_counters(telemetry),
        *(_notes(telemetry) if of_rate else ()),
    ]
    while len(parts) > 1 and len(", ".join(parts)) > CHARACTERS:
        parts.pop()
    return ", ".join(parts)


def most_throttled(by_rank: Mapping[int, Mapping[str, Any]]) -> int | None:
    """Return the rank whose GPU was throttled for the longest part of the time, or else was the hottest."""

    def severity(rank: int) -> tuple[bool, float, float, int]:
        telemetry = by_rank[rank]
        shares = _shares(telemetry)
        throttled = max((shares.get(reason, 0.0) for reason in SLOWDOWNS), default=0.0)
        return bool(telemetry.get("lost")), throttled, _last(telemetry, "temperature_celsius") or 0.0, -rank

    return max(by_rank, key=severity, default=None)


def _slowdowns(telemetry: Mapping[str, Any]) -> Iterator[str]:
    if telemetry.get("lost"):
        yield "the GPU was lost"
    shares = _shares(telemetry)
    found = [reason for reason in SLOWDOWNS if shares.get(reason, 0.0) >= LEAST_SHARE]
    for reason in sorted(found, key=lambda reason: -shares[reason]):
        yield f"{SLOWDOWNS[reason]} {_of_the_time(shares[reason])}"


def _heat(telemetry: Mapping[str, Any]) -> Iterator[str]:
    hottest = _last(telemetry, "temperature_celsius")
    if hottest is None:
        return
    slowdown = _number(telemetry.get("slowdown_celsius"))
    from_here = HOT_CELSIUS if slowdown is None else slowdown - NEAR_SLOWDOWN_CELSIUS
    shares = _shares(telemetry)
    if hottest >= from_here or any(shares.get(reason, 0.0) >= LEAST_SHARE for reason in _THERMAL):
        yield f"{hottest:.0f} degC"


def _clock(telemetry: Mapping[str, Any]) -> Iterator[str]:
    clocks, highest = telemetry.get("sm_clock_mhz"), _number(telemetry.get("sm_clock_max_mhz"))
    if highest is None or not isinstance(clocks, (list, tuple)) or len(clocks) != 3:
        return
    usual, used = _number(clocks[1]), telemetry.get("utilization_percent")
    busy = _number(used[1]) if isinstance(used, (list, tuple)) and len(used) == 3 else None
    waits = busy is not None and busy < BUSY_PERCENT
    if usual is not None and usual < LOW_CLOCK_RATIO * highest and not waits:
        yield f"SM clock {usual:.0f} of {highest:.0f} MHz"


def _counters(telemetry: Mapping[str, Any]) -> Iterator[str]:
    changed = telemetry.get("counters")
    if not isinstance(changed, Mapping):
        return
    numbers = {str(name): _number(by) for name, by in changed.items() if not str(name).endswith(_VOLUMES)}
    grown = [f"{name} {by:+g}" for name, by in numbers.items() if by]
    yield from grown[:_COUNTERS]
    if len(grown) > _COUNTERS:
        yield f"{len(grown) - _COUNTERS} more counters"


def _notes(telemetry: Mapping[str, Any]) -> Iterator[str]:
    shares = _shares(telemetry)
    for reason, words in NOTES.items():
        if shares.get(reason, 0.0) >= NOTED_SHARE:
            yield words.format(_of_the_time(shares[reason]))


def _shares(telemetry: Mapping[str, Any]) -> dict[str, float]:
    shares = telemetry.get("throttle_share")
    if not isinstance(shares, Mapping):
        return {}
    numbers = {str(reason): _number(share) for reason, share in shares.items()}
    return {reason: share for reason, share in numbers.items() if share is not None and 0 <= share <= 1}


def _of_the_time(share: float) -> str:
    return f"{100 * share:.0f} % of the time"


def _last(telemetry: Mapping[str, Any], key: str) -> float | None:
    value = telemetry.get(key)
    return _number(value[-1]) if isinstance(value, (list, tuple)) and len(value) == 3 else None


def _number(value: Any) -> float | None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if is_number else None


NOTHING: Mapping[Any, Any] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True)
class Miss:
    """One way in which a limit is missed.

    ``text`` describes the worst value, ``why`` what in its GPU's telemetry may explain it. ``by_rank`` has both for
    every rank, the worst one first; it is empty where no single rank is the culprit. ``worst``: the rank whose value
    ``text`` has, if it is a rank's. ``inconclusive``: whether more certainty could make it a pass.
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
    return bound_margin(low, high, limit)


def misses(
    metric: Metric,
    limit: Limit,
    of: Mapping[int, Measurement],
    *,
    ratios: Mapping[int, float],
    transport: str | None,
    telemetry: Mapping[int, Mapping[str, Any]] = NOTHING,
) -> Iterator[Miss]:
    """Yield every way in which a limit is missed, the plainest first. For each rank only its plainest is reported.

    Args:
        metric: what was measured.
        limit: what is demanded of it.
        of: the measurement of each rank whose value is finite and not negative.
        ratios: ``straggler_ratios``; empty where they are not known.
        transport: what carried the data, where a label states it.
        telemetry: of each rank's GPU during the whole test; it may explain a value that has no telemetry of its own.
    """
    reported: dict[int, str] = {}

    def miss(found: Mapping[int, float], text: dict[int, str], *, inconclusive: bool = False) -> Iterator[Miss]:
        ranks = sorted(found, key=found.__getitem__)
        reported.update({rank: text[rank] for rank in ranks})
        if ranks:
            of_rate = metric.better == "higher"
            seen = {rank: _telemetry(of[rank], telemetry.get(rank, NOTHING)) for rank in ranks}
            why = {rank: explanation(seen[rank], of_rate=of_rate) for rank in ranks}
            by_rank = {rank: f"{text[rank]}: {why[rank]}" if why[rank] else text[rank] for rank in ranks}
            worst = ranks[0]
            yield Miss(text=text[worst], why=why[worst], by_rank=by_rank, worst=worst, inconclusive=inconclusive)

    plain = {rank: by for rank, m in of.items() if (by := bound_margin(m.value, m.value, limit)) is not None and by < 0}
    low = {rank: f"{metric.name} {_beyond(metric, of[rank].value, limit)}" for rank in plain}
    if limit.expect_transport is not None and transport is not None and transport not in limit.expect_transport:
        expected = " or ".join(limit.expect_transport)
        why = next((str(m.telemetry["transport"]) for m in of.values() if m.telemetry.get("transport")), "")
        yield Miss(text=f"{metric.name}: {transport} carries it, expected is {expected}", why=why)
        if plain and len(plain) == len(of):  # what all of them share explains it, and no rank of its own
            worst = min(plain, key=plain.__getitem__)
            yield Miss(text=low[worst], worst=worst)
            reported.update(low)
            plain = {}
    yield from miss(plain, low)

    unsure = {
        rank: by for rank, m in of.items() if rank not in reported and (by := margin(m, limit)) is not None and by < 0
    }
    yield from miss(unsure, {rank: _unsure(metric, of[rank], limit) for rank in unsure}, inconclusive=True)

    noisy = {rank: 0.0 for rank, measured in of.items() if rank not in reported and measured.inconclusive}
    yield from miss(
        noisy, {rank: f"{metric.name} is inconclusive: {of[rank].inconclusive}" for rank in noisy}, inconclusive=True
    )

    required = limit.min_ratio_to_median
    if required is not None:
        behind = {rank: ratio for rank, ratio in ratios.items() if rank not in reported and ratio < required}
        yield from miss(behind, {rank: _behind(metric, of, rank, ratios[rank], required) for rank in behind})


def _telemetry(measured: Measurement, whole_test: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the GPU's telemetry: that of the value's own window, or else of the whole test."""
    own = measured.telemetry
    return own if own.get("samples") else {**whole_test, **own}


def interval_text(measured: Measurement) -> str:
    """Return "its 95 % interval is 697 TFLOPS to 709 TFLOPS", or nothing where there is none."""
    if measured.interval is None:
        return ""
    low, high = units.show_apart(*measured.interval, measured.unit)
    return f"its 95 % interval is {low.removesuffix(measured.unit).rstrip()} to {high}"


def bound_margin(low: float, high: float, limit: JudgedLimit) -> float | None:
    """Return the distance of an interval from the nearer bound as a share of it; of a bound of zero the distance."""
    margins = []
    if limit.min is not None:
        margins.append((low - limit.min) / (limit.min or 1.0))
    if limit.max is not None:
        margins.append((limit.max - high) / (limit.max or 1.0))
    return min(margins, default=None)


def _beyond(metric: Metric, value: float, limit: Limit) -> str:
    below = limit.min is not None and value < limit.min
    found, needed = units.show_apart(value, _bound(limit, below), metric.unit)
    return f"{found} {'<' if below else '>'} {needed}"


def _unsure(metric: Metric, measured: Measurement, limit: Limit) -> str:
    below = limit.min is not None and measured.interval is not None and measured.interval[0] < limit.min
    found, needed = units.show_apart(measured.value, _bound(limit, below), metric.unit)
    side = "above" if below else "below"
    return f"{metric.name} {found} is not surely {side} {needed}: {interval_text(measured)}"


def _bound(limit: Limit, below: bool) -> float:
    bound = limit.min if below else limit.max
    assert bound is not None  # a missed limit has the bound that was missed
    return bound


def _behind(metric: Metric, of: Mapping[int, Measurement], rank: int, ratio: float, required: float) -> str:
    others = [measured.value for other, measured in of.items() if other != rank]
    middle = units.show(stats.median(others), metric.unit)
    if len(others) > 2 and (spread := stats.mad(others)) > 0:
        middle += f", MAD {units.show(spread, metric.unit)}"
    reference = f"the median of the {len(others)} other ranks" if len(others) > 1 else "the other rank"
    value = units.show(of[rank].value, metric.unit)
    found, needed = (text.removesuffix(" ratio") for text in units.show_apart(ratio, required, "ratio"))
    if metric.better == "lower":
        return f"{metric.name} {value} is behind: {reference} ({middle}) is {found} of it, {needed} is required"
    return f"{metric.name} {value} is {found} of {reference} ({middle}), {needed} is required"
