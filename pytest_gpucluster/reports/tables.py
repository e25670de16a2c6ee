"""Values, limits and ranks as short text, for every report that people read.

A table stays small at any number of ranks: identical rows are folded into one with rank ranges, and of the
rest only the worst are shown.
"""

from __future__ import annotations

import math

from pytest_gpucluster.journal import Journal, JudgedMetric, TestResult
from pytest_gpucluster.wording import one_line, rank_ranges

ROWS = 16
_MEASUREMENT_TABLES = 8
_MEASUREMENT_LINES = 64
_MESSAGE_CHARACTERS = 300
_WORST_FIRST = {"failed": 0, "error": 1, "skipped": 2, "released": 3, "passed": 4}


def quantity(value: float | None, unit: str, *, beside: float | None = None) -> str:
    """Return "442.1 GB/s", with enough digits to tell the value from the one that it stands beside."""
    if value is None:
        return "no value"
    text = _digits(value, 4)
    for digits in (6, 9, 17):
        if beside is None or value == beside or text != _digits(beside, 4):
            break
        text = _digits(value, digits)
    return f"{text} {unit}".strip()


def _digits(value: float, digits: int) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    if 10**digits <= abs(value) < 1e15:
        return f"{value:.0f}"
    return f"{value:.{digits}g}"


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
    """Return ">= 400 GB/s", "<= 20 us", "3 to 5 us" or "no limit"."""
    limit = judged.limit
    if limit is None or (limit.min is None and limit.max is None):
        return "no limit"
    if limit.max is None:
        return f">= {quantity(limit.min, judged.unit)}"
    if limit.min is None:
        return f"<= {quantity(limit.max, judged.unit)}"
    return f"{quantity(limit.min, '')} to {quantity(limit.max, judged.unit)}"


def measurement_text(judged: JudgedMetric) -> str:
    """Return "442.1 GB/s (limit >= 400 GB/s, margin +10.5 %, worst rank 3)"."""
    details = []
    if judged.status == "recorded":
        details.append("recorded only")
    elif judged.status != "passed":
        details.append(judged.status.upper())
    if judged.limit is not None:
        details.append(f"limit {limit_text(judged)}")
    if judged.margin is not None:
        details.append(f"margin {percent(judged.margin)}")
    if judged.worst_rank is not None:
        details.append(f"worst rank {judged.worst_rank}")
    if judged.status == "error" and judged.reason:
        details.append(judged.reason)
    text = quantity(judged.value, judged.unit, beside=_nearest_limit(judged, judged.value))
    return f"{text} ({', '.join(details)})" if details else text


def _nearest_limit(judged: JudgedMetric, value: float | None) -> float | None:
    if judged.limit is None or value is None:
        return None
    bounds = [bound for bound in (judged.limit.min, judged.limit.max) if bound is not None]
    return min(bounds, key=lambda bound: abs(bound - value), default=None)


def margin(judged: JudgedMetric, value: float) -> float | None:
    """Return by which ratio a value keeps (positive) or misses (negative) its limit."""
    if judged.limit is None or not math.isfinite(value):
        return None
    margins = []
    if judged.limit.min:
        margins.append((value - judged.limit.min) / judged.limit.min)
    if judged.limit.max:
        margins.append((judged.limit.max - value) / judged.limit.max)
    return min(margins, default=None)


def rank_tables(result: TestResult, journal: Journal) -> str:
    """Return what each rank said and measured, worst first, as the body of a failure or an error."""
    parts = [_outcome_table(result, journal)]
    wanted = {"failed": 0, "error": 1, "passed": 2, "recorded": 3}
    judged = sorted(result.measurements, key=lambda each: wanted.get(each.status, 1))
    for i, each in enumerate(judged[:_MEASUREMENT_LINES]):
        is_detailed = i < _MEASUREMENT_TABLES and each.status in ("failed", "error")
        parts.append(_measurement_table(each, journal) if is_detailed else _measurement_line(each))
    if len(judged) > _MEASUREMENT_LINES:
        parts.append(f"... and {len(judged) - _MEASUREMENT_LINES} more measurements, all in the journal")
    return "\n".join(part for part in parts if part)


def _outcome_table(result: TestResult, journal: Journal) -> str:
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
        return ""
    passed = set(range(journal.run.world_size)) - told_ranks - set(silent)
    if passed:
        rows[False, "passed", ""] = sorted(passed)
    ordered = sorted(rows.items(), key=lambda row: (not row[0][0], _WORST_FIRST.get(row[0][1], 1), min(row[1])))
    lines = ["Ranks:"]
    # The ranks that passed are one row and always the last: they never push a bad one out.
    for (is_culprit, outcome, message), ranks in ordered[:ROWS]:
        who = rank_name(journal, ranks[0]) if len(ranks) == 1 else rank_ranges(ranks)
        mark = " (culprit)" if is_culprit else ""
        said = f": {one_line(message, _MESSAGE_CHARACTERS)}" if message else ""
        lines.append(f"  {who}: {outcome}{mark}{said}")
    rest = [rank for _, ranks in ordered[ROWS:] for rank in ranks]
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
    rows: dict[str, list[int]] = {}
    for rank in sorted(judged.values, key=lambda rank: _badness(judged, rank)):
        rows.setdefault(_rank_value(judged, judged.values[rank]), []).append(rank)
    for text, ranks in list(rows.items())[:ROWS]:
        who = rank_name(journal, ranks[0]) if len(ranks) == 1 else rank_ranges(ranks)
        lines.append(f"  {who}: {text}")
    rest = [rank for ranks in list(rows.values())[ROWS:] for rank in ranks]
    if rest:
        values = [judged.values[rank] for rank in rest]
        low, high = quantity(min(values), judged.unit), quantity(max(values), judged.unit)
        lines.append(f"  {len(rest)} more ranks: {low} to {high}")
    return "\n".join(lines)


def _badness(judged: JudgedMetric, rank: int) -> tuple[int, float, int]:
    value = judged.values[rank]
    if not math.isfinite(value):
        return (0, 0.0, rank)
    kept = margin(judged, value)
    return (1, value if kept is None else kept, rank)


def _rank_value(judged: JudgedMetric, value: float) -> str:
    text = quantity(value, judged.unit, beside=_nearest_limit(judged, value))
    kept = margin(judged, value)
    return text if kept is None else f"{text}, margin {percent(kept)}"
