"""One criterion in a few words: its headline number, limit and margin, and the suspected component. Pure.

482.1 >= 440 GB/s, +9.5 %
"""

from __future__ import annotations

import re

from pytest_gpucluster.journal.fields import JudgedMetric
from pytest_gpucluster.journal.journal import Journal
from pytest_gpucluster.reports.summary import IN_PROGRESS, RUNNING, Row, share_of_limit
from pytest_gpucluster.reports.tables import expected_text, limit_text, percent, quantity, rank_name
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
"""Outcome of a row -> the word that people read."""
STYLES = {"passed": "green", "failed": "red", "error": "red", RUNNING: "red"}
"""Outcome -> its colour, which only repeats the word; yellow for all others."""
_MORE_RANKS = r"(, and (\d+ more ranks|rank \d+( \([^()]*\))?))?"
LARGEST_MARGIN = 9.995
"""A margin beyond 999 % is not written out: it says no more than that the limit is not what decides."""


def value_text(judged: JudgedMetric) -> str:
    """Return the value without its unit, with enough digits to tell it from its limit."""
    return quantity(judged.value, "", beside=_bound(judged)) if judged.value is not None else "none"


def bound_text(judged: JudgedMetric) -> str:
    """Return ">= 440", "<= 20", "3 to 5", ">= 46 (expected 60)" or ">= 350 (shipped 400)" in the value's unit; what
    else the limit demands where it has no bound."""
    limit, expected = judged.limit, _shipped_text(judged) or expected_text(judged, "")
    if limit is None:
        return "recorded" if judged.status == "recorded" else "no limit"
    if limit.min is not None and limit.max is not None:
        return f"{quantity(limit.min, '')} to {quantity(limit.max, '')}{expected}"
    if limit.min is not None:
        return f">= {quantity(limit.min, '', beside=judged.value)}{expected}"
    if limit.max is not None:
        return f"<= {quantity(limit.max, '', beside=judged.value)}{expected}"
    if limit.min_ratio_to_median is not None:
        return f">= {quantity(100 * limit.min_ratio_to_median, '%')} of median"
    return limit_text(judged)


def _shipped_text(judged: JudgedMetric) -> str:
    """Return " (shipped 400)": the bound that the site's limit lowers; or that it does so otherwise; or nothing."""
    shipped, limit = judged.shipped, judged.limit
    if shipped is None or limit is None:
        return ""
    for own, theirs in ((limit.min, shipped.min), (limit.max, shipped.max)):
        if theirs is not None and own != theirs:
            return f" (shipped {quantity(theirs, '')})"
    return " (shipped: stricter)"


def margin_text(judged: JudgedMetric) -> str:
    """Return "+9.5 %"; "inconclusive" of a value that is no basis for a verdict; nothing where it is no share."""
    if judged.inconclusive:
        return "inconclusive"
    share = share_of_limit(judged)
    if share is None:
        return ""
    return percent(share) if share < LARGEST_MARGIN else "> +999 %"


def headline_text(judged: JudgedMetric) -> str:
    """Return "482.1 >= 440 GB/s, +9.5 %", or "482.1 GB/s, recorded only".

    The sign is the limit's: a value that misses it stands before the sign that it does not fulfil.
    """
    told = held_text(judged)
    margin = margin_text(judged)
    return f"{told}, {margin}" if margin else told


def held_text(judged: JudgedMetric) -> str:
    """Return "482.1 >= 440 GB/s": the value beside its limit, in the one unit of both."""
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
    """Return why a test is not good, the culprit first: "rank 11 (gpu-02, GPU 3 GPU-6e9fb788): matmul 585 < 700 ..."

    What was isolated, and what a rank itself has said, begins with who it is already.
    """
    result, judged = row.result, row.headline
    if result is None or judged is None or judged.status not in ("failed", "error") or judged.worst_rank is None:
        return row.why
    if not row.why.startswith(judged.metric) or (judged.status == "failed" and not result.culprits):
        return row.why
    worst, others = judged.worst_rank, [rank for rank in result.culprits if rank != judged.worst_rank]
    who = f"rank {worst}" if journal is None else rank_name(journal, worst)
    if others:
        who += f" and {len(others)} more" if len(others) > 8 else f", and {rank_ranges(others)}"
    return f"{who}: {_without_place(judged.reason or row.why, worst, journal)}"


def summary_text(row: Row, journal: Journal | None) -> str:
    """Return ``culprit_text`` as one line for pytest's short summary."""
    return one_line(culprit_text(row, journal), MESSAGE_CHARACTERS)


def _without_place(reason: str, rank: int, journal: Journal | None) -> str:
    """Take the rank out of a reason, where it is named first already; what follows it is kept."""
    place = journal.place(rank) if journal is not None else None
    if place is None:
        return reason
    gpu = place.gpu
    told = f", GPU {gpu.get('index', '?')} {gpu.get('uuid', '')[:12]}\N{HORIZONTAL ELLIPSIS}" if gpu else ""
    named = re.escape(f" on rank {rank} ({place.host}{told})")
    return re.sub(rf"(?<!,){named}{_MORE_RANKS}(?=$|: |; )", "", reason, count=1)


def _bound(judged: JudgedMetric) -> float | None:
    limit = judged.limit
    if limit is None or judged.value is None:
        return None
    value = judged.value
    bounds = [bound for bound in (limit.min, limit.max) if bound is not None]
    return min(bounds, key=lambda bound: abs(bound - value), default=None)
