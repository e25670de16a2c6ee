"""The summary of a run: its verdict, one row per test with the deciding value, and its times.

All reports are made from it, so they show the same headline in the same order.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone

from pytest_gpucluster.journal.journal import Journal
from pytest_gpucluster.journal.records import TestResult
from pytest_gpucluster.journal.verdict import ACCEPTED, title
from pytest_gpucluster.judge.judged import JudgedMetric, cause_order
from pytest_gpucluster.judge.misses import straggler_ratios
from pytest_gpucluster.metrics.measurement import METRICS
from pytest_gpucluster.text import first_line

RUNNING, NOT_RUN, IN_PROGRESS = "running", "not run", "in progress"
"""Outcomes of a row besides a result's own: the run ended during this test; ended before it; is running it now."""

_WORST_FIRST = {"failed": 0, "error": 1, RUNNING: 2, IN_PROGRESS: 3, NOT_RUN: 4, "skipped": 5, "passed": 6}
NODE = "node"
GROUPS = ("deployment", NODE, "fabric", "training", "other")
"""Of criteria, in the order of the playbook's phases; "other": a site's own, and tests that are no criteria."""
_GROUPS = (
    "inventory connectivity dns clock_skew host shared_filesystem slurm kubernetes",
    "gpu matmul hbm host_link affinity burn_in",
    "fabric nccl links",
    "training ddp fsdp checkpoint vision failure_propagation scaling lora_tiny qwen2_lora",
)
_GROUP_OF = {word: group for group, words in zip(GROUPS, _GROUPS, strict=False) for word in words.split()}
"""First word of a criterion -> its group."""
STATUS_ORDER = {"failed": 0, "error": 1, "passed": 2, "recorded": 3}
"""Of measurements, worst first. An unknown status counts as an error."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One test of a run."""

    nodeid: str
    name: str
    """function[parameters], or the whole id."""
    outcome: str
    """passed, failed, error, skipped, ``RUNNING``, ``IN_PROGRESS`` or ``NOT_RUN``."""
    criterion: str | None = None
    headline: JudgedMetric | None = None
    """The deciding measurement: the worst miss, else the least margin."""
    why: str = ""
    """One line: the failure's message, or why it did not run."""
    result: TestResult | None = None
    is_gap: bool = False
    """Whether it makes the run INCOMPLETE: a criterion that was skipped although it applies or is required."""

    @property
    def is_good(self) -> bool:
        """Whether it passed."""
        return self.outcome == "passed"

    @property
    def unjudged(self) -> str:
        """Return why no limit judged a criterion that passed, which makes the run INCOMPLETE; or an empty text."""
        return self.result.unjudged if self.result is not None and self.is_good and self.criterion is not None else ""

    @property
    def group(self) -> str:
        """Return the group of its criterion, of ``GROUPS``."""
        return _GROUP_OF.get((self.criterion or "").partition(".")[0], GROUPS[-1])

    @property
    def why_not_run(self) -> str:
        """Return why it did not run, with "required: " if that makes the run INCOMPLETE."""
        return f"required: {self.why}" if self.is_gap else self.why

    @property
    def margin(self) -> float | None:
        """Return the margin of the headline as a ratio of its limit (negative: missed); None if it is no ratio."""
        return None if self.headline is None else margin_ratio(self.headline)


@dataclass(frozen=True, kw_only=True)
class Outline:
    """A run in short form."""

    word: str = ""
    """The verdict, or RUNNING."""
    exit: int = 11
    reason: str = ""
    kind: str
    """Of the run (``KINDS``)."""
    rows: tuple[Row, ...]
    """In the order of execution; those that did not run come last."""
    counts: dict[str, int]
    """Outcome -> number of rows, worst outcome first; without zeros."""
    absent: tuple[str, ...] = ()
    """Required criteria that no test of this run has."""

    @property
    def title(self) -> str:
        """Return the verdict; with a remark where it is not about hardware."""
        return title(self.word, self.kind)

    @property
    def is_accepted(self) -> bool:
        """Return whether the whole suite passed on GPUs."""
        return self.word == ACCEPTED and self.exit == 0 and not self.kind

    @property
    def is_good(self) -> bool:
        """Whether the exit code is 0."""
        return self.exit == 0

    @property
    def worst_first(self) -> tuple[Row, ...]:
        """Return the rows, failures first; rows of one outcome keep their order.

        Skipped tests that did not have to run come last.
        """

        def severity(row: Row) -> int:
            is_fine = row.outcome == "skipped" and not row.is_gap
            return len(_WORST_FIRST) if is_fine else _WORST_FIRST.get(row.outcome, 1)

        return tuple(sorted(self.rows, key=severity))

    @property
    def bad(self) -> tuple[Row, ...]:
        """Return the rows that failed or broke, failures first."""
        return tuple(row for row in self.worst_first if row.outcome in ("failed", "error", RUNNING))

    @property
    def did_not_run(self) -> tuple[Row, ...]:
        """Return the rows that were skipped or never reached."""
        return tuple(row for row in self.rows if row.outcome in (NOT_RUN, "skipped"))

    def tightest(self, most: int = 5, group: str = "") -> tuple[tuple[Row, JudgedMetric], ...]:
        """Return the passed values with the smallest margins, smallest first, one per test and metric; of one group.

        Values that cannot be better (``is_whole``) are left out.
        """
        best: dict[tuple[str, str], tuple[float, Row, JudgedMetric]] = {}
        for row in self.rows:
            for judged in row.result.measurements if row.result is not None and group in ("", row.group) else ():
                share = margin_ratio(judged)
                key = row.nodeid, judged.metric
                if judged.status != "passed" or share is None or is_whole(judged):
                    continue
                if key not in best or share < best[key][0]:
                    best[key] = share, row, judged
        found = sorted(best.values(), key=lambda entry: entry[0])
        return tuple((row, judged) for _, row, judged in found[:most])


def outline(journal: Journal) -> Outline:
    """Return the short form of a run."""
    required = journal.run.required
    ran = {result.criterion for result in journal.results if result.outcome == "passed"}
    rows = [row_of(result, required=[name for name in required if name not in ran]) for result in journal.results]
    if journal.running is not None:
        criteria_by_id = {test.nodeid: test.criterion for test in journal.collected or ()}
        nodeid = journal.running.nodeid
        why = "the run ended here" if journal.end is None else first_line(journal.ended_by)
        why = f"started at {journal.running.at or 'an unknown time'}" if journal.is_live else why
        outcome = IN_PROGRESS if journal.is_live else RUNNING
        criterion = criteria_by_id.get(nodeid)
        rows.append(Row(nodeid=nodeid, name=short_name(nodeid), outcome=outcome, criterion=criterion, why=why))
    rows += [
        Row(
            nodeid=test.nodeid,
            name=test.name or short_name(test.nodeid),
            outcome=NOT_RUN,
            criterion=test.criterion,
            why="not reached yet" if journal.is_live else first_line(journal.ended_by),
        )
        for test in journal.not_run
    ]
    found = Counter(row.outcome for row in rows)
    criteria = {row.criterion for row in rows}
    return Outline(
        word=journal.verdict,
        exit=journal.exit,
        reason=journal.reason,
        kind=journal.run.kind,
        rows=tuple(rows),
        counts={outcome: found[outcome] for outcome in _WORST_FIRST if found[outcome]},
        absent=tuple(name for name in required if name not in criteria),
    )


def row_of(result: TestResult, *, required: Collection[str] = ()) -> Row:
    """Return the row of a finished test. ``required``: required criteria that no test has passed."""
    criterion = result.criterion
    had_to_run = result.applicable and not result.too_slow  # in a rehearsal, whose verdict lists them
    return Row(
        nodeid=result.nodeid,
        name=result.name or short_name(result.nodeid),
        outcome=result.outcome,
        criterion=criterion,
        headline=headline(result.measurements),
        why=first_line(result.message) if result.outcome != "passed" else "",
        result=result,
        is_gap=result.outcome == "skipped" and criterion is not None and (had_to_run or criterion in required),
    )


def headline(measurements: Iterable[JudgedMetric]) -> JudgedMetric | None:
    """Return the deciding measurement of a test; None where there is none.

    A miss: the one that explains the others (``cause_order``), then the one that missed by the most; else one that
    could not be judged; else the one that passed with the least margin (as a factor); else the first recorded one. A
    value that cannot be better (``is_whole``) comes last.
    """

    def rank(judged: JudgedMetric) -> tuple[int, tuple[int, ...], float]:
        kept = judged.status in ("passed", "recorded")
        order = (int(judged.status == "passed" and is_whole(judged)),) if kept else cause_order(judged)
        return STATUS_ORDER.get(judged.status, 1), order, _margin(judged)

    return min(measurements, key=rank, default=None)


def worst_first(measurements: Iterable[JudgedMetric]) -> list[JudgedMetric]:
    """Return measurements by status, failures first; those of one status keep their order."""
    return sorted(measurements, key=lambda judged: STATUS_ORDER.get(judged.status, 1))


def missed_ratio(judged: JudgedMetric) -> tuple[float, float] | None:
    """Return the lowest rank's ratio to the median of the others and the least one allowed, where only this
    comparison is missed; else None."""
    limit, ratio = judged.limit, judged.ratio_to_median
    if limit is None or ratio is None or limit.min_ratio_to_median is None or ratio >= limit.min_ratio_to_median:
        return None
    has_bounds = (limit.min, limit.max) != (None, None)
    beyond = has_bounds and (judged.margin is None or judged.margin < 0)
    if judged.status != "failed" or judged.inconclusive or beyond or not is_better_higher(judged):
        return None
    return ratio, limit.min_ratio_to_median


def ratios_to_others(judged: JudgedMetric) -> dict[int, float]:
    """Return how each rank compares with the others (``straggler_ratios``); empty where that is not defined."""
    values = {rank: value for rank, value in judged.values.items() if math.isfinite(value)}
    higher = is_better_higher(judged)
    if higher is None or len(values) < 2 or min(values.values()) < 0:
        return {}
    return straggler_ratios(values, "higher" if higher else "lower")


def margin_ratio(judged: JudgedMetric) -> float | None:
    """Return the margin of what decides if it is a ratio of the limit; None for a limit of zero and without one."""
    limit, missed = judged.limit, missed_ratio(judged)
    if missed is not None:
        return missed[0] / missed[1] - 1
    if limit is None or judged.margin is None or not math.isfinite(judged.margin) or 0 in (limit.min, limit.max):
        return None
    return judged.margin


def is_whole(judged: JudgedMetric) -> bool:
    """Whether a value equals its limit and has no interval, so that nothing scatters: all of something, none of what
    must not occur, the number of ports, a link's set rate.

    Its margin of zero does not mean that it nearly failed.
    """
    limit = judged.limit
    return limit is not None and judged.interval is None and judged.value in ({limit.min, limit.max} - {None})


def short_name(nodeid: str) -> str:
    """Return function[parameters] of a test's id.

    >>> short_name("acceptance/test_nccl.py::test_all_reduce[node-bf16]")
    'test_all_reduce[node-bf16]'
    """
    return nodeid.partition("::")[2] or nodeid


def display_name(name: str) -> str:
    """Return a test's name without "test_"."""
    return name.removeprefix("test_") or name


def peak_value(judged: JudgedMetric) -> float | None:
    """Return the data sheet peak of a value in its unit; None where there is none."""
    if judged.peak_ratio is None or judged.value is None or not judged.peak_ratio > 0:
        return None
    peak = judged.value / judged.peak_ratio
    return peak if math.isfinite(peak) else None


def is_better_higher(judged: JudgedMetric) -> bool | None:
    """Whether higher values are better; None where neither metric nor limit defines it."""
    metric = METRICS.get(judged.metric)
    if metric is not None and metric.better in ("higher", "lower"):
        return metric.better == "higher"
    if judged.limit is None or (judged.limit.min is None) == (judged.limit.max is None):
        return None
    return judged.limit.min is not None


def _margin(judged: JudgedMetric) -> float:
    """Return a margin that is comparable for lower and upper limits: the factor by which it is better, minus one.

    As a ratio of an upper limit it would never exceed 1.
    """
    margin = judged.margin
    if margin is None or not math.isfinite(margin):
        return math.inf
    is_upper = judged.limit is not None and judged.limit.max is not None and judged.limit.min is None
    return margin / (1 - margin) if is_upper and 0 < margin < 1 else margin


def moment(text: str) -> datetime | None:
    """Return an ISO 8601 time with its zone (default UTC); None if it is invalid or outside the years 1 to 9999 in UTC.

    >>> moment("2026-11-21T16:23:22Z")
    datetime.datetime(2026, 11, 21, 16, 23, 22, tzinfo=datetime.timezone.utc)
    """
    try:
        # Python 3.10 does not read the Z.
        found = datetime.fromisoformat(re.sub("[zZ]$", "+00:00", text))
        found = found if found.tzinfo is not None else found.replace(tzinfo=timezone.utc)
        found.astimezone(timezone.utc)
    except (ValueError, OverflowError):
        return None
    return found


def run_seconds(journal: Journal) -> float:
    """Return the duration of a run in seconds: until its end, or until its last known event."""
    begin = moment(journal.run.started_at)
    moments = [moment(journal.end.at)] if journal.end is not None else []
    if not any(moments):
        if journal.running is not None:
            moments.append(moment(journal.running.at))
        moments += [_end(result) for result in journal.results]
    last = max((one for one in moments if one is not None), default=None)
    if begin is None or last is None:
        return sum(result.duration_seconds for result in journal.results)
    return (last - begin).total_seconds()


def _end(result: TestResult) -> datetime | None:
    started = moment(result.started_at)
    if started is None or not math.isfinite(result.duration_seconds):
        return None
    try:
        return started + timedelta(seconds=result.duration_seconds)
    except OverflowError:
        return None
