"""Values, limits and ranks as short text, for every report that people read.

A table stays small at any number of ranks: identical rows are folded into one with rank ranges, and of the
rest only the worst are shown.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from pytest_gpucluster.journal import Journal
from pytest_gpucluster.journal_lines import TestResult
from pytest_gpucluster.journal_measurements import JudgedLimit, JudgedMetric
from pytest_gpucluster.metrics.units import show
from pytest_gpucluster.reports.telemetry_text import clock_text, telemetry_of_test, telemetry_text
from pytest_gpucluster.reports.time_table import time_text
from pytest_gpucluster.text import one_line, rank_ranges

ROWS = 16
_MEASUREMENT_TABLES = 8
_MEASUREMENT_LINES = 64
_MESSAGE_CHARACTERS = 300
_WORST_FIRST = {"failed": 0, "error": 1, "skipped": 2, "released": 3, "passed": 4}


def quantity(value: float | None, unit: str, *, beside: float | None = None, digits: int = 4) -> str:
    """Return "442.1 GB/s", with enough digits to tell the value from the one that it stands beside."""
    if value is None:
        return "no value"
    text = _digits(value, digits)
    for more in (6, 9, 17):
        if beside is None or value == beside or text != _digits(beside, digits):
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
    """Return a ratio as "+10.5 %"; a margin that was missed by a hair keeps its sign."""
    text = f"{ratio * 100:+.1f}"
    return ("-0.0 %" if ratio < 0 else "+0.0 %") if float(text) == 0 else f"{text} %"


def rank_name(journal: Journal, rank: int) -> str:
    """Return "rank 3 (gpu-07, GPU 3 GPU-1f2e3d4c)", as far as the cluster is known."""
    place = journal.place(rank)
    if place is None:
        return f"rank {rank}"
    parts = [place.host] if place.host else []
    if place.gpu:
        parts.append(f"GPU {place.gpu.get('index', '?')} {place.gpu.get('uuid', '')[:12]}".rstrip())
    return f"rank {rank} ({', '.join(parts)})" if parts else f"rank {rank}"


def metric_name(judged: JudgedMetric) -> str:
    """Return "nccl.all_reduce.busbw{size=1 GB}"."""
    labels = ", ".join(f"{key}={value}" for key, value in judged.labels.items())
    return f"{judged.metric}{{{labels}}}" if labels else judged.metric


def limit_text(judged: JudgedMetric) -> str:
    """Return ">= 400 GB/s", "<= 20 us", "3 to 5 us", ">= 46 TFLOPS (expected 60 TFLOPS)" or "no limit", then what else
    the limit demands; and where the site's asks for less, ">= 350 GB/s (shipped: >= 400 GB/s)"."""
    if judged.limit is None:
        return "no limit"
    first, *rest = _demands(judged.limit, judged.unit)
    text = ", ".join([first + expected_text(judged, judged.unit), *rest])
    return text if judged.shipped is None else f"{text} (shipped: {', '.join(_demands(judged.shipped, judged.unit))})"


def _demands(limit: JudgedLimit, unit: str) -> list[str]:
    parts = []
    if limit.min is not None and limit.max is not None:
        parts.append(f"{quantity(limit.min, '')} to {quantity(limit.max, unit)}")
    elif limit.min is not None:
        parts.append(f">= {quantity(limit.min, unit)}")
    elif limit.max is not None:
        parts.append(f"<= {quantity(limit.max, unit)}")
    if limit.min_ratio_to_median is not None:
        parts.append(f"each rank >= {quantity(100 * limit.min_ratio_to_median, '%')} of the others' median")
    if limit.expect_transport is not None:
        parts.append(f"over {' or '.join(limit.expect_transport)}")
    return parts or ["no limit"]


def expected_text(judged: JudgedMetric, unit: str) -> str:
    """Return " (expected 60 TFLOPS)": what stands beside the limit and is never judged; or an empty text."""
    expected = None if judged.limit is None else judged.limit.expected
    return "" if expected is None else f" (expected {quantity(expected, unit)})"


def share(ratio: float) -> str:
    """Return a ratio as "73 %", for people who compare it with a data sheet."""
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
    if judged.margin is not None and _has_shares(judged):
        details.append(f"margin {percent(judged.margin)}")
    if judged.peak_ratio is not None:
        details.append(f"{share(judged.peak_ratio)} of peak")
    if judged.evidence:
        details.append(judged.evidence)
    if judged.ratio_to_median is not None and len(judged.values) > 1:
        least = judged.limit.min_ratio_to_median if judged.limit is not None else None
        ratio = quantity(100 * judged.ratio_to_median, "%", beside=None if least is None else 100 * least)
        details.append(f"lowest rank {ratio} of the others' median")
    if judged.worst_rank is not None:
        details.append(f"worst rank {judged.worst_rank}")
    if judged.inconclusive and judged.inconclusive not in judged.reason:
        details.append(f"inconclusive: {judged.inconclusive}")
    if judged.status == "error" and judged.reason:
        details.append(judged.reason)
    text = quantity(judged.value, judged.unit, beside=_nearest_limit(judged, judged.value))
    text += interval_text(judged, judged.interval)
    return f"{text} ({', '.join(details)})" if details else text


def interval_text(judged: JudgedMetric, interval: tuple[float, float] | None) -> str:
    """Return ", 95 % interval 440.2 to 443.9", in the unit of the value before it, or an empty text."""
    if interval is None:
        return ""
    low, high = (quantity(end, "", beside=_nearest_limit(judged, end)) for end in interval)
    return f", 95 % interval {low} to {high}"


def stopped_text(judged: JudgedMetric) -> str:
    """Return why the worst rank took no more samples, or an empty text where that is not known:
    "sure after 12 samples in 3.01 s: 0.62 % wide, 1 % is allowed"."""
    stopped = judged.stopped
    if stopped is None:
        return ""
    is_sure = stopped.width_ratio <= stopped.allowed_ratio
    why = {"interval": "sure", "time": "time up", "samples": "no more to take, sure" if is_sure else "no more to take"}
    took = f" in {quantity(stopped.seconds, 's', digits=3)}" if stopped.seconds > 0 else ""
    extended = ", extended" if stopped.extended else ""
    width, allowed = (quantity(100 * ratio, "%", digits=2) for ratio in (stopped.width_ratio, stopped.allowed_ratio))
    return f"{why[stopped.by]} after {stopped.samples} samples{took}{extended}: {width} wide, {allowed} is allowed"


def worst_telemetry(judged: JudgedMetric) -> str:
    """Return what the GPU of the worst rank did meanwhile, or an empty text."""
    told = judged.telemetry.get(judged.worst_rank) if judged.worst_rank is not None else None
    text = telemetry_text(told) if told else ""
    return f"rank {judged.worst_rank}: {text}" if text else ""


def measured_pairs(measurements: Iterable[JudgedMetric]) -> Iterator[tuple[str, str]]:
    """Yield name and text of each measurement, and after it of its telemetry.

    Values that come from one window have one telemetry, which is given once.
    """
    told: set[tuple[tuple[tuple[str, str], ...], str]] = set()
    for judged in measurements:
        yield metric_name(judged), measurement_text(judged)
        text = worst_telemetry(judged)
        key = tuple(sorted(judged.labels.items())), text
        if text and key not in told:
            told.add(key)
            yield f"{metric_name(judged)}.telemetry", text


def told_pairs(result: TestResult) -> Iterator[tuple[str, str]]:
    """Yield name and text of all that a test has measured, what a GPU did during its whole body, and where the test's
    time went."""
    yield from measured_pairs(result.measurements)
    seen = telemetry_of_test(result.telemetry, result.culprits)
    if seen:
        yield "telemetry", seen
    spent = time_text(result)
    if spent:
        yield "seconds", spent


def _nearest_limit(judged: JudgedMetric, value: float | None) -> float | None:
    if judged.limit is None or value is None:
        return None
    bounds = [bound for bound in (judged.limit.min, judged.limit.max) if bound is not None]
    return min(bounds, key=lambda bound: abs(bound - value), default=None)


def margin(judged: JudgedMetric, value: float, interval: tuple[float, float] | None = None) -> float | None:
    """Return by which ratio a value keeps (positive) or misses (negative) its limit, None where that is no ratio.

    Of a value that is known to lie in an interval, the end that is nearer to the limit decides.
    """
    return _distance(judged, value, interval) if _has_shares(judged) else None


def _distance(judged: JudgedMetric, value: float, interval: tuple[float, float] | None) -> float | None:
    """Return the margin; of a limit of zero, which has no shares, the distance itself."""
    low, high = interval or (value, value)
    if judged.limit is None or not math.isfinite(low) or not math.isfinite(high):
        return None
    distances = []
    if judged.limit.min is not None:
        distances.append((low - judged.limit.min) / (judged.limit.min or 1.0))
    if judged.limit.max is not None:
        distances.append((judged.limit.max - high) / (judged.limit.max or 1.0))
    return min(distances, default=None)


def _has_shares(judged: JudgedMetric) -> bool:
    """Tell whether a margin is a share of the limit: of a limit of zero it is a distance."""
    return judged.limit is None or 0 not in (judged.limit.min, judged.limit.max)


def rank_tables(result: TestResult, journal: Journal) -> str:
    """Return what each rank said and measured, worst first, as the body of a failure or an error."""
    seen = telemetry_of_test(result.telemetry, result.culprits)
    parts = [_outcome_table(result, journal), f"Telemetry of the whole test: {seen}" if seen else ""]
    wanted = {"failed": 0, "error": 1, "passed": 2, "recorded": 3}
    judged = sorted(result.measurements, key=lambda each: wanted.get(each.status, 1))
    for i, each in enumerate(judged[:_MEASUREMENT_LINES]):
        is_detailed = i < _MEASUREMENT_TABLES and each.status in ("failed", "error")
        parts.append(_measurement_table(each, journal) if is_detailed else _measurement_line(each))
    if len(judged) > _MEASUREMENT_LINES:
        parts.append(f"... and {len(judged) - _MEASUREMENT_LINES} more measurements, all in the journal")
    return "\n".join(part for part in parts if part)


@dataclass(frozen=True, kw_only=True)
class RankSaid:
    """What some ranks reported of a test: the same words, so they are one row."""

    who: str
    outcome: str
    """passed, failed, error, skipped or released."""
    is_culprit: bool
    message: str
    ranks: tuple[int, ...]


def ranks_said(result: TestResult, journal: Journal) -> tuple[RankSaid, ...]:
    """Return what each rank reported, culprits first, ranks that said the same in one row; nothing if none said any.

    The ranks that passed are one row, too, and always the last.
    """
    rows: dict[tuple[bool, str, str], list[int]] = {}
    for told in result.ranks:
        is_culprit = told.rank in result.culprits
        outcome = "released" if told.rank in result.released and not is_culprit else told.outcome
        rows.setdefault((is_culprit, outcome, told.message), []).append(told.rank)
    told_ranks = {told.rank for told in result.ranks}
    silent = sorted({*result.released, *result.culprits} - told_ranks)
    for rank in silent:
        is_culprit = rank in result.culprits
        rows.setdefault((is_culprit, result.outcome if is_culprit else "released", ""), []).append(rank)
    if not rows:
        return ()
    passed = set(range(journal.run.world_size)) - told_ranks - set(silent)
    if passed:
        rows[False, "passed", ""] = sorted(passed)
    ordered = sorted(rows.items(), key=lambda row: (not row[0][0], _WORST_FIRST.get(row[0][1], 1), min(row[1])))
    return tuple(
        RankSaid(
            who=rank_name(journal, ranks[0]) if len(ranks) == 1 else rank_ranges(ranks),
            outcome=outcome,
            is_culprit=is_culprit,
            message=message,
            ranks=tuple(ranks),
        )
        for (is_culprit, outcome, message), ranks in ordered
    )


def _outcome_table(result: TestResult, journal: Journal) -> str:
    rows = ranks_said(result, journal)
    if not rows:
        return ""
    lines = ["Ranks:"]
    # The ranks that passed are one row and always the last: they never push a bad one out.
    for row in rows[:ROWS]:
        mark = " (culprit)" if row.is_culprit else ""
        said = f": {one_line(row.message, _MESSAGE_CHARACTERS)}" if row.message else ""
        lines.append(f"  {row.who}: {row.outcome}{mark}{said}")
    rest = [rank for row in rows[ROWS:] for rank in row.ranks]
    if rest:
        lines.append(f"  {len(rest)} more: {rank_ranges(rest)}; the journal has them all")
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
        who = rank_name(journal, ranks[0]) if len(ranks) == 1 else rank_ranges(ranks)
        lines.append(f"  {who}: {text}")
    rest = [rank for ranks in list(rows.values())[ROWS:] for rank in ranks]
    if rest:
        values = [judged.values[rank] for rank in rest]
        low, high = quantity(min(values), judged.unit), quantity(max(values), judged.unit)
        lines.append(f"  {len(rest)} more ranks: {low} to {high}")
    return "\n".join(lines)


def worst_ranks_first(judged: JudgedMetric) -> list[int]:
    """Return the ranks that have a value: those whose value is none, then those nearest to the limit or beyond it."""
    return sorted(judged.values, key=lambda rank: _badness(judged, rank))


def _badness(judged: JudgedMetric, rank: int) -> tuple[int, float, int]:
    value = judged.values[rank]
    if not math.isfinite(value):
        return (0, 0.0, rank)
    kept = _distance(judged, value, judged.intervals.get(rank))
    return (1, value if kept is None else kept, rank)


def _rank_value(judged: JudgedMetric, rank: int) -> str:
    """Return a rank's value with its distance from the limit, and what may explain it: clock and throttle."""
    value, interval = judged.values[rank], judged.intervals.get(rank)
    text = quantity(value, judged.unit, beside=_nearest_limit(judged, value)) + interval_text(judged, interval)
    kept = margin(judged, value, interval)
    parts = [text] if kept is None else [text, f"margin {percent(kept)}"]
    clock = clock_text(judged.telemetry.get(rank, {}))
    return ", ".join([*parts, clock] if clock else parts)
