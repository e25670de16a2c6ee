"""Values, limits, ranks, telemetry and times as short text and tables.

A table stays small at any number of ranks: identical rows are merged into one with rank ranges, and of the rest only
the worst are shown. Telemetry consists of plain JSON types and may come from another version: what does not have the
form that ``node.health.telemetry.summary`` gives is shown unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from pytest_gpucluster.journal.journal import Journal
from pytest_gpucluster.journal.records import TestResult
from pytest_gpucluster.judge.judged import JudgedMetric
from pytest_gpucluster.judge.misses import bound_margin, most_throttled
from pytest_gpucluster.metrics.time_budget import PARTS
from pytest_gpucluster.metrics.units import show
from pytest_gpucluster.reports.summary import margin_ratio, missed_ratio, worst_first
from pytest_gpucluster.text import one_line, rank_ranges

_CLOCK, _HIGHEST = "sm_clock_mhz", "sm_clock_max_mhz"
_FIGURES = {
    _CLOCK: ("sm clock ", "MHz"),
    "memory_clock_mhz": ("memory clock ", "MHz"),
    "power_watts": ("", "W"),
    "temperature_celsius": ("", "degC"),
    "utilization_percent": ("utilisation ", "%"),
}
"""Key of telemetry -> label and unit."""
_NOT_LISTED = ("seconds", "samples", "lost", "throttle", "throttle_share", _HIGHEST, "slowdown_celsius", "adapters")
"""How much was read, what is next to another figure, and what is shown in words under other keys."""


def telemetry_text(telemetry: Mapping[str, Any]) -> str:
    """Return the telemetry of one GPU during one measurement; an empty text if there is none.

    Throttle reasons have their share of the time. Other keys, such as counters and notes, follow by name.

    >>> telemetry_text({"sm_clock_mhz": [1740, 1755, 1980], "power_watts": [698, 698, 698], "throttle": []})
    'sm clock 1755 MHz (1740 to 1980), 698 W, no throttle'
    """
    parts = [_figure(key, telemetry) for key in _FIGURES if key in telemetry] + _throttle(telemetry)
    for key, value in telemetry.items():
        if key not in _FIGURES and key not in _NOT_LISTED and value not in (None, "", [], {}):
            if isinstance(value, Mapping):
                value = [f"{name} {each:+g}" if is_number(each) else f"{name} {each}" for name, each in value.items()]
            listed = "; ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
            parts.append(one_line(f"{key.replace('_', ' ')}: {listed}", 400))
    return ", ".join(parts)


def telemetry_of_test(by_rank: Mapping[int, Mapping[str, Any]], culprits: Sequence[int] = ()) -> str:
    """Return the telemetry of one GPU during a whole test: of a culprit, else of the most conspicuous one."""
    rank = next((rank for rank in culprits if rank in by_rank), None)
    rank = most_throttled(by_rank) if rank is None else rank
    text = telemetry_text(by_rank[rank]) if rank is not None else ""
    return f"rank {rank}: {text}" if text else ""


def worst_telemetry(judged: JudgedMetric) -> str:
    """Return the telemetry of the worst rank's GPU, or an empty text."""
    telemetry = judged.telemetry.get(judged.worst_rank) if judged.worst_rank is not None else None
    text = telemetry_text(telemetry) if telemetry else ""
    return f"rank {judged.worst_rank}: {text}" if text else ""


def clock_text(telemetry: Mapping[str, Any]) -> str:
    """Return what may explain a low value: clock and throttle reasons, as far as they are known.

    >>> clock_text({"sm_clock_mhz": [1200, 1200, 1980], "power_watts": [400, 410, 420], "throttle": ["hw_thermal"]})
    'sm clock 1200 MHz (1200 to 1980), throttle: hw_thermal'
    """
    parts = [_figure(_CLOCK, telemetry)] if _CLOCK in telemetry else []
    return ", ".join([*parts, *_throttle(telemetry)])


def _figure(key: str, telemetry: Mapping[str, Any]) -> str:
    """Return median and range of one key, such as "sm clock 1755 of 1980 MHz (1740 to 1980)"."""
    (label, unit), value, highest = _FIGURES[key], telemetry[key], telemetry.get(_HIGHEST)
    if not isinstance(value, (list, tuple)) or len(value) != 3 or not all(map(is_number, value)):
        return f"{label}{one_line(repr(value), 80)} {unit}"
    low, median, high = (f"{each:.0f}" for each in value)
    of_highest = f" of {highest:.0f}" if key == _CLOCK and is_number(highest) else ""
    return f"{label}{median}{of_highest} {unit}" + (f" ({low} to {high})" if low != high else "")


def is_number(value: object) -> TypeGuard[float]:
    """Whether an unchecked value from a journal is a finite number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _throttle(telemetry: Mapping[str, Any]) -> list[str]:
    reasons, shares = telemetry.get("throttle"), telemetry.get("throttle_share")
    if reasons is None:
        return []
    names = []
    for reason in reasons if isinstance(reasons, (list, tuple)) else [reasons]:
        share = shares.get(str(reason)) if isinstance(shares, Mapping) else None
        names.append(one_line(str(reason), 80) + (f" {100 * share:.0f} %" if is_number(share) else ""))
    return [f"throttle: {', '.join(names)}" if names else "no throttle"]


def time_text(result: TestResult) -> str:
    """Return "measuring 6.1, verifying 0.4": the parts of a test that took 0.1 s or more; empty where they are not
    recorded, as valid times."""
    seconds = {part: result.spent[part].seconds if part in result.spent else math.nan for part in PARTS}
    if not all(math.isfinite(each) and each >= 0 for each in seconds.values()):
        return ""
    return ", ".join(f"{part.replace('_', '-')} {each:.1f}" for part, each in seconds.items() if each >= 0.05)


ROWS = 16
_MEASUREMENT_TABLES = 8
_MEASUREMENT_LINES = 64
_MESSAGE_CHARACTERS = 300
_WORST_FIRST = {"failed": 0, "error": 1, "skipped": 2, "released": 3, "passed": 4}


def quantity(value: float | None, unit: str, *, compared_with: float | None = None, digits: int = 4) -> str:
    """Return "442.1 GB/s", with enough digits to distinguish it from ``compared_with``."""
    if value is None:
        return "no value"
    text = _digits(value, digits)
    for more in (6, 9, 17):
        if compared_with is None or value == compared_with or text != _digits(compared_with, digits):
            break
        text = _digits(value, more)
    return f"{text} {unit}".strip()


def _digits(value: float, digits: int) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    return show(value, "", digits=digits).rstrip()


def percent(ratio: float) -> str:
    """Return a margin or a change as "+10.5 %", from 1,000 % on as a factor, "11 x"; a tiny negative one keeps its
    sign."""
    if math.isfinite(ratio) and abs(ratio) >= 9.995:
        return f"{1 + abs(ratio):.0f} x"
    text = f"{ratio * 100:+.1f}"
    return ("-0.0 %" if ratio < 0 else "+0.0 %") if float(text) == 0 else f"{text} %"


def rank_name(journal: Journal, rank: int, *, is_short: bool = False) -> str:
    """Return "rank 3 (gpu-07, GPU 3 GPU-1f2e3d4c)", as far as the cluster is known; ``is_short``: without the UUID."""
    place = journal.place(rank)
    parts = [place.host] if place is not None and place.host else []
    if place is not None and place.gpu:
        uuid = "" if is_short else place.gpu.get("uuid", "")[:12]
        parts.append(f"GPU {place.gpu.get('index', '?')} {uuid}".rstrip())
    return f"rank {rank} ({', '.join(parts)})" if parts else f"rank {rank}"


def metric_name(judged: JudgedMetric) -> str:
    """Return "nccl.all_reduce.busbw{size=1 GB}"."""
    labels = ", ".join(f"{key}={value}" for key, value in judged.labels.items())
    return f"{judged.metric}{{{labels}}}" if labels else judged.metric


def limit_text(judged: JudgedMetric, *, first_only: bool = False) -> str:
    """Return ">= 400 GB/s", "<= 20 us", "3 to 5 us", ">= 46 TFLOPS (expected 60 TFLOPS)" or "no limit", then what else
    the limit demands; where the site's limit is weaker, ">= 350 GB/s (shipped: >= 400 GB/s)". ``first_only``: what
    decides."""
    if judged.limit is None:
        return "recorded only" if first_only and judged.status == "recorded" else "no limit"
    missed = missed_ratio(judged) if first_only else None
    if missed is not None:
        return f">= {quantity(100 * missed[1], '%')} of the median"
    most = 1 if first_only else None
    found = ", ".join(judged.limit.demands(judged.unit)[:most]) or "no limit"
    return found + (f" (shipped: {', '.join(judged.shipped.demands(judged.unit)[:most])})" if judged.shipped else "")


def value_text(judged: JudgedMetric) -> str:
    """Return the worst rank's value, with enough digits to distinguish it from its limit; where the end of its interval
    decides, with that: "281.2 GB/s (at least 280.9)"; where the comparison with the others does, with that: "90.33 %
    (2.801 TB/s)"."""
    missed = missed_ratio(judged)
    if missed is not None:
        return f"{_percentage(missed)} ({quantity(judged.value, judged.unit)})"
    text = quantity(judged.value, judged.unit, compared_with=nearest_limit(judged, judged.value))
    decides, number = _deciding_value(judged), _deciding_number(judged)
    if judged.value is None or decides is None or text.startswith(f"{number} "):
        return text
    return f"{text} (at {'least' if decides < judged.value else 'most'} {number})"


def margin_text(judged: JudgedMetric) -> str:
    """Return "+9.5 %"; "inconclusive" of a value that allows no verdict; an empty text if it is no ratio."""
    if judged.inconclusive:
        return "inconclusive"
    share = margin_ratio(judged)
    return "" if share is None else percent(share)


def headline_text(judged: JudgedMetric) -> str:
    """Return "480.9 >= 440 GB/s, +9.3 %": the number that decides, the limit and the margin, which follows from the
    two; or "482.1 GB/s, recorded only". The number is the value, or the end of its interval nearer to the limit."""
    return ", ".join(filter(None, (_compared_text(judged), margin_text(judged))))


def _compared_text(judged: JudgedMetric) -> str:
    missed = missed_ratio(judged)
    if missed is not None:
        least, value_there = quantity(100 * missed[1], "%"), quantity(judged.value, judged.unit)
        return f"{_percentage(missed)} < {least} of the others' median ({value_there})"
    limit, value = judged.limit, _deciding_value(judged)
    bound = nearest_limit(judged, value)
    if limit is None or value is None or bound is None or not math.isfinite(value):
        return f"{quantity(value, judged.unit)}, {limit_text(judged, first_only=True)}"
    unit = "" if judged.unit == "ratio" else judged.unit
    if limit.min is not None and limit.max is not None:
        relation = "in" if limit.min <= value <= limit.max else "not in"
        allowed = f"{quantity(limit.min, '')} to {quantity(limit.max, unit)}"
    else:
        is_least, allowed = limit.min is not None, quantity(bound, unit)
        relation = (">=" if value >= bound else "<") if is_least else ("<=" if value <= bound else ">")
    shipped = f" (shipped: {', '.join(judged.shipped.demands(judged.unit)[:1])})" if judged.shipped else ""
    return f"{_deciding_number(judged)} {relation} {allowed}{shipped}"


def _percentage(missed: tuple[float, float]) -> str:
    ratio, least = missed
    return quantity(100 * ratio, "%", compared_with=100 * least)


def _deciding_number(judged: JudgedMetric) -> str:
    value = _deciding_value(judged)
    return quantity(value, "", compared_with=nearest_limit(judged, value))


def _deciding_value(judged: JudgedMetric) -> float | None:
    limit, value, interval = judged.limit, judged.value, judged.interval
    if limit is None or value is None or interval is None or nearest_limit(judged, value) is None:
        return value
    if not 0 <= interval[0] <= value <= interval[1] < math.inf:
        return value
    return min(interval, key=lambda end: bound_margin(end, end, limit) or 0.0)


def share(ratio: float) -> str:
    """Return a ratio as "73 %"."""
    return quantity(100 * ratio, "%", digits=2)


def measurement_text(judged: JudgedMetric) -> str:
    """Return "442.1 GB/s, 95 % interval 440.2 to 443.9 (limit >= 400 GB/s, margin +10.5 %, 73 % of peak, worst rank
    3)"."""
    details = []
    if judged.status == "recorded":
        details.append("recorded only")
    elif judged.status != "passed":
        details.append(judged.status.upper())
    if judged.limit is not None:
        details.append(f"limit {limit_text(judged)}")
    if judged.margin is not None and _has_ratio(judged):
        details.append(f"margin {percent(judged.margin)}")
    if judged.peak_ratio is not None:
        details.append(f"{share(judged.peak_ratio)} of peak")
    if judged.evidence:
        details.append(judged.evidence)
    if judged.ratio_to_median is not None and len(judged.values) > 1:
        least = judged.limit.min_ratio_to_median if judged.limit is not None else None
        ratio = quantity(100 * judged.ratio_to_median, "%", compared_with=None if least is None else 100 * least)
        details.append(f"lowest rank {ratio} of the others' median")
    if judged.worst_rank is not None:
        details.append(f"worst rank {judged.worst_rank}")
    if judged.inconclusive and judged.inconclusive not in judged.reason:
        details.append(f"inconclusive: {judged.inconclusive}")
    if judged.status == "error" and judged.reason:
        details.append(judged.reason)
    value = quantity(judged.value, judged.unit, compared_with=nearest_limit(judged, judged.value))
    text = value + interval_text(judged, judged.interval)
    return f"{text} ({', '.join(details)})" if details else text


def interval_text(judged: JudgedMetric, interval: tuple[float, float] | None) -> str:
    """Return ", 95 % interval 440.2 to 443.9", in the unit of its value, or an empty text."""
    if interval is None:
        return ""
    low, high = (quantity(end, "", compared_with=nearest_limit(judged, end)) for end in interval)
    return f", 95 % interval {low} to {high}"


def stopped_text(judged: JudgedMetric) -> str:
    """Return why sampling on the worst rank ended, or an empty text if unknown:
    "precise after 12 samples in 3.01 s: interval 0.62 %, allowed 1 %"."""
    stopped = judged.stopped
    if stopped is None:
        return ""
    is_precise = stopped.width_ratio <= stopped.allowed_ratio
    why = {"interval": "precise", "time": "time up", "samples": f"no more to take{', precise' * is_precise}"}
    took = f" in {quantity(stopped.seconds, 's', digits=3)}" if stopped.seconds > 0 else ""
    extended = ", extended" if stopped.extended else ""
    width, allowed = (quantity(100 * ratio, "%", digits=2) for ratio in (stopped.width_ratio, stopped.allowed_ratio))
    return f"{why[stopped.by]} after {stopped.samples} samples{took}{extended}: interval {width}, allowed {allowed}"


def measured_pairs(measurements: Iterable[JudgedMetric]) -> Iterator[tuple[str, str]]:
    """Yield name and text of each measurement and of its telemetry, once for values of the same window."""
    known: set[tuple[tuple[tuple[str, str], ...], str]] = set()
    for judged in measurements:
        yield metric_name(judged), measurement_text(judged)
        text = worst_telemetry(judged)
        key = tuple(sorted(judged.labels.items())), text
        if text and key not in known:
            known.add(key)
            yield f"{metric_name(judged)}.telemetry", text


def result_pairs(result: TestResult) -> Iterator[tuple[str, str]]:
    """Yield name and text of a test's measurements, of its telemetry, and of the parts of its time."""
    yield from measured_pairs(result.measurements)
    telemetry = telemetry_of_test(result.telemetry, result.culprits)
    if telemetry:
        yield "telemetry", telemetry
    spent = time_text(result)
    if spent:
        yield "seconds", spent


def nearest_limit(judged: JudgedMetric, value: float | None) -> float | None:
    if judged.limit is None or value is None:
        return None
    bounds = [bound for bound in (judged.limit.min, judged.limit.max) if bound is not None]
    return min(bounds, key=lambda bound: abs(bound - value), default=None)


def margin(judged: JudgedMetric, value: float, interval: tuple[float, float] | None = None) -> float | None:
    """Return by which ratio a value keeps (positive) or misses (negative) its limit, None for a limit of zero.

    If the value's interval is known, the end nearer to the limit decides.
    """
    return _distance(judged, value, interval) if _has_ratio(judged) else None


def _distance(judged: JudgedMetric, value: float, interval: tuple[float, float] | None) -> float | None:
    low, high = interval or (value, value)
    if judged.limit is None or not math.isfinite(low) or not math.isfinite(high):
        return None
    return bound_margin(low, high, judged.limit)


def _has_ratio(judged: JudgedMetric) -> bool:
    """Whether a margin is a ratio of the limit: for a limit of zero it is a distance."""
    return judged.limit is None or 0 not in (judged.limit.min, judged.limit.max)


def rank_tables(result: TestResult, journal: Journal) -> str:
    """Return what each rank reported and measured, worst first, as the body of a failure or an error."""
    telemetry = telemetry_of_test(result.telemetry, result.culprits)
    parts = [_outcome_table(result, journal), f"Telemetry of the whole test: {telemetry}" if telemetry else ""]
    judged = worst_first(result.measurements)
    for i, each in enumerate(judged[:_MEASUREMENT_LINES]):
        is_detailed = i < _MEASUREMENT_TABLES and each.status in ("failed", "error")
        parts.append(_measurement_table(each, journal) if is_detailed else _measurement_line(each))
    if len(judged) > _MEASUREMENT_LINES:
        parts.append(f"... and {len(judged) - _MEASUREMENT_LINES} more measurements in the journal")
    return "\n".join(part for part in parts if part)


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """The same report of one or more ranks on a test."""

    who: str
    outcome: str
    """passed, failed, error, skipped or released."""
    is_culprit: bool
    message: str
    ranks: tuple[int, ...]


def rank_reports(result: TestResult, journal: Journal) -> tuple[RankReport, ...]:
    """Return the ranks' reports, culprits first, equal ones merged; empty if no rank reported anything.

    The ranks that passed are the last row.
    """
    rows: dict[tuple[bool, str, str], list[int]] = {}
    for each in result.ranks:
        is_culprit = each.rank in result.culprits
        outcome = "released" if each.rank in result.released and not is_culprit else each.outcome
        rows.setdefault((is_culprit, outcome, each.message), []).append(each.rank)
    reporting = {each.rank for each in result.ranks}
    silent = sorted({*result.released, *result.culprits} - reporting)
    for rank in silent:
        is_culprit = rank in result.culprits
        rows.setdefault((is_culprit, result.outcome if is_culprit else "released", ""), []).append(rank)
    if not rows:
        return ()
    passed = set(range(journal.run.world_size)) - reporting - set(silent)
    if passed:
        rows[False, "passed", ""] = sorted(passed)
    ordered = sorted(rows.items(), key=lambda row: (not row[0][0], _WORST_FIRST.get(row[0][1], 1), min(row[1])))
    return tuple(
        RankReport(
            who=_who(journal, ranks), outcome=outcome, is_culprit=is_culprit, message=message, ranks=tuple(ranks)
        )
        for (is_culprit, outcome, message), ranks in ordered
    )


def _who(journal: Journal, ranks: Sequence[int]) -> str:
    return rank_name(journal, ranks[0]) if len(ranks) == 1 else rank_ranges(ranks)


def _outcome_table(result: TestResult, journal: Journal) -> str:
    rows = rank_reports(result, journal)
    if not rows:
        return ""
    lines = ["Ranks:"]
    # The ranks that passed are the last row, so they never push a bad one out.
    for row in rows[:ROWS]:
        mark = " (culprit)" if row.is_culprit else ""
        message = f": {one_line(row.message, _MESSAGE_CHARACTERS)}" if row.message else ""
        lines.append(f"  {row.who}: {row.outcome}{mark}{message}")
    rest = [rank for row in rows[ROWS:] for rank in row.ranks]
    if rest:
        lines.append(f"  {len(rest)} more: {rank_ranges(rest)}; see the journal")
    return "\n".join(lines)


def _measurement_line(judged: JudgedMetric) -> str:
    return f"{metric_name(judged)}: {measurement_text(judged)}"


def _measurement_table(judged: JudgedMetric, journal: Journal) -> str:
    lines = [f"{_measurement_line(judged)}:"]
    if judged.reason and judged.status == "failed":
        lines.append(f"  {one_line(judged.reason, _MESSAGE_CHARACTERS)}")
    if judged.limit is not None:
        source = f" ({judged.limit.source})" if judged.limit.source else ""
        lines.append(f"  limit from {judged.limit.origin or 'an unknown place'}{source}")
    stopped, telemetry = stopped_text(judged), worst_telemetry(judged)
    if stopped:
        lines.append(f"  sampling: {stopped}")
    if telemetry:
        lines.append(f"  telemetry of {telemetry}")
    rows: dict[str, list[int]] = {}
    for rank in worst_ranks_first(judged):
        rows.setdefault(_rank_value(judged, rank), []).append(rank)
    for text, ranks in list(rows.items())[:ROWS]:
        lines.append(f"  {_who(journal, ranks)}: {text}")
    rest = [rank for ranks in list(rows.values())[ROWS:] for rank in ranks]
    if rest:
        values = [judged.values[rank] for rank in rest]
        low, high = quantity(min(values), judged.unit), quantity(max(values), judged.unit)
        lines.append(f"  {len(rest)} more ranks: {low} to {high}")
    return "\n".join(lines)


def worst_ranks_first(judged: JudgedMetric) -> list[int]:
    """Return the ranks that have a value: those whose value is no number, then by margin."""

    def badness(rank: int) -> tuple[int, float, int]:
        value = judged.values[rank]
        if not math.isfinite(value):
            return (0, 0.0, rank)
        distance = _distance(judged, value, judged.intervals.get(rank))
        return (1, value if distance is None else distance, rank)

    return sorted(judged.values, key=badness)


def _rank_value(judged: JudgedMetric, rank: int) -> str:
    value, interval = judged.values[rank], judged.intervals.get(rank)
    text = quantity(value, judged.unit, compared_with=nearest_limit(judged, value)) + interval_text(judged, interval)
    distance = margin(judged, value, interval)
    parts = [text] if distance is None else [text, f"margin {percent(distance)}"]
    clock = clock_text(judged.telemetry.get(rank, {}))
    return ", ".join([*parts, clock] if clock else parts)
