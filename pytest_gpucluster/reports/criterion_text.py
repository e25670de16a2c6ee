"""One criterion in a few words: its headline number, limit and margin, and the suspected component. Pure.

482.1 >= 440 GB/s, +9.5 %
"""

from __future__ import annotations

import re

from pytest_gpucluster.journal.fields import JudgedMetric
from pytest_gpucluster.journal.journal import Journal
from pytest_gpucluster.reports.summary import IN_PROGRESS, RUNNING, Row, margin_ratio
from pytest_gpucluster.reports.tables import expected_text, limit_text, nearest_limit, percent, quantity, rank_name
from pytest_gpucluster.text import MESSAGE_CHARACTERS, one_line, rank_ranges

WORDS = {
    "passed": "PASSED",
    "failed": "FAILED",
    "error": "ERROR",
    RUNNING: "BROKEN",
    IN_PROGRESS: "RUNNING",
    "not run": "NOT RUN",
    "skipped": "SKIPPED",
}
"""Outcome of a row -> the word in the terminal."""
STYLES = {"passed": "green", "failed": "red", "error": "red", RUNNING: "red"}
"""Outcome -> its colour; yellow for all others."""
_MORE_RANKS = r"(, and (\d+ more ranks|rank \d+( \([^()]*\))?))?"
LARGEST_MARGIN = 9.995
"""A larger margin is shown as "> +999 %": such a limit decides nothing."""


def value_text(judged: JudgedMetric, *, with_unit: bool = False) -> str:
    """Return the value, with enough digits to distinguish it from its limit."""
    if judged.value is None:
        return "none"
    unit = judged.unit if with_unit else ""
    return quantity(judged.value, unit, compared_with=nearest_limit(judged, judged.value))


def bound_text(judged: JudgedMetric) -> str:
    """Return ">= 440", "<= 20", "3 to 5", ">= 46 (expected 60)" or ">= 350 (shipped 400)" in the value's unit;
    without a bound what else the limit demands."""
    limit, expected = judged.limit, _shipped_text(judged) or expected_text(judged, "")
    if limit is None:
        return "recorded" if judged.status == "recorded" else "no limit"
    if limit.min is not None and limit.max is not None:
        return f"{quantity(limit.min, '')} to {quantity(limit.max, '')}{expected}"
    if limit.min is not None:
        return f">= {quantity(limit.min, '', compared_with=judged.value)}{expected}"
    if limit.max is not None:
        return f"<= {quantity(limit.max, '', compared_with=judged.value)}{expected}"
    if limit.min_ratio_to_median is not None:
        return f">= {quantity(100 * limit.min_ratio_to_median, '%')} of median"
    return limit_text(judged)


def _shipped_text(judged: JudgedMetric) -> str:
    """Return " (shipped 400)", the bound that the site's limit weakens, or " (shipped: stricter)", or nothing."""
    shipped, limit = judged.shipped, judged.limit
    if shipped is None or limit is None:
        return ""
    for own, original in ((limit.min, shipped.min), (limit.max, shipped.max)):
        if original is not None and own != original:
            return f" (shipped {quantity(original, '')})"
    return " (shipped: stricter)"


def margin_text(judged: JudgedMetric) -> str:
    """Return "+9.5 %"; "inconclusive" of a value that allows no verdict; an empty text if it is no ratio."""
    if judged.inconclusive:
        return "inconclusive"
    share = margin_ratio(judged)
    if share is None:
        return ""
    return percent(share) if share < LARGEST_MARGIN else "> +999 %"


def headline_text(judged: JudgedMetric) -> str:
    """Return "482.1 >= 440 GB/s, +9.5 %", or "482.1 GB/s, recorded only".

    The sign is the limit's, also of a value that misses it.
    """
    text, margin = comparison_text(judged), margin_text(judged)
    return f"{text}, {margin}" if margin else text


def comparison_text(judged: JudgedMetric) -> str:
    """Return "482.1 >= 440 GB/s": value and limit in one unit."""
    limit, value = judged.limit, value_text(judged)
    alone = f"{value} {judged.unit}".rstrip()
    if limit is None:
        return f"{alone}, recorded only" if judged.status == "recorded" else f"{alone}, no limit"
    if limit.min is not None and limit.max is not None:
        return f"{value} in {bound_text(judged)} {judged.unit}".rstrip()
    if limit.min is not None or limit.max is not None:
        return f"{value} {bound_text(judged)} {judged.unit}".rstrip()
    return f"{alone}, {limit_text(judged)}"


def culprit_text(row: Row, journal: Journal | None) -> str:
    """Return why a test did not pass, the culprit first: "rank 11 (gpu-02, GPU 3 GPU-6e9fb788): matmul 585 < 700 ..."

    A reason from isolation or from a rank itself already begins with the culprit.
    """
    result, judged = row.result, row.headline
    if result is None or judged is None or judged.status not in ("failed", "error") or judged.worst_rank is None:
        return row.why
    if not row.why.startswith(judged.metric) or (judged.status == "failed" and not result.culprits):
        return row.why
    worst, others = judged.worst_rank, [rank for rank in result.culprits if rank != judged.worst_rank]
    culprit = f"rank {worst}" if journal is None else rank_name(journal, worst)
    if others:
        culprit += f" and {len(others)} more" if len(others) > 8 else f", and {rank_ranges(others)}"
    return f"{culprit}: {_without_place(judged.reason or row.why, worst, journal)}"


def summary_text(row: Row, journal: Journal | None) -> str:
    """Return ``culprit_text`` as one line for pytest's short summary."""
    return one_line(culprit_text(row, journal), MESSAGE_CHARACTERS)


def _without_place(reason: str, rank: int, journal: Journal | None) -> str:
    """Remove the rank from a reason, because it is named first already."""
    place = journal.place(rank) if journal is not None else None
    if place is None:
        return reason
    gpu = place.gpu
    gpu_name = f", GPU {gpu.get('index', '?')} {gpu.get('uuid', '')[:12]}\N{HORIZONTAL ELLIPSIS}" if gpu else ""
    named = re.escape(f" on rank {rank} ({place.host}{gpu_name})")
    return re.sub(rf"(?<!,){named}{_MORE_RANKS}(?=$|: |; )", "", reason, count=1)
