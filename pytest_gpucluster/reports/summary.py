"""A run in short form: its verdict in words, one row a test with the value that decides, and its times.

Every report that people read is made from this, so that they all choose the same headline and the same order. When a
run began and how long it took are given as far as its journal shows.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone

from pytest_gpucluster.journal.fields import JudgedMetric
from pytest_gpucluster.journal.journal import Journal
from pytest_gpucluster.journal.records import TestResult
from pytest_gpucluster.metrics.measurement import METRICS, cause_order
from pytest_gpucluster.text import first_line

RUNNING, NOT_RUN, IN_PROGRESS = "running", "not run", "in progress"
"""Outcomes of a row besides a result's own: the run ended in this test, or before it; or is in it now."""

_WORST_FIRST = {"failed": 0, "error": 1, RUNNING: 2, IN_PROGRESS: 3, NOT_RUN: 4, "skipped": 5, "passed": 6}
_OF_STATUS = {"failed": 0, "error": 1, "passed": 2, "recorded": 3}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One test of a run."""

    nodeid: str
    name: str
    """function[parameters]; the whole id where the journal does not name them apart."""
    outcome: str
    """passed, failed, error, skipped, ``RUNNING``, ``IN_PROGRESS`` or ``NOT_RUN``."""
    criterion: str | None = None
    headline: JudgedMetric | None = None
    """The measurement that decides: the worst that was missed, else the one with the least margin."""
    why: str = ""
    """One line: the failure's message, or the reason why it did not run."""
    result: TestResult | None = None
    is_gap: bool = False
    """Whether no run without it is accepted: a criterion that was skipped although it applies or was demanded."""

    @property
    def is_good(self) -> bool:
        """Tell whether it passed."""
        return self.outcome == "passed"

    @property
    def why_not_run(self) -> str:
        """Return why it did not run; "required: ..." of what makes a run INCOMPLETE."""
        return f"required: {self.why}" if self.is_gap else self.why

    @property
    def margin(self) -> float | None:
        """Return the share by which the headline keeps its limit (negative: misses it); None where it is no share."""
        return None if self.headline is None else share_of_limit(self.headline)


@dataclass(frozen=True, kw_only=True)
class Outline:
    """A run."""

    word: str
    """The verdict; RUNNING where there is none yet."""
    exit: int
    reason: str
    rehearsal: bool
    rows: tuple[Row, ...]
    """In the order in which they ran; those that did not run come last."""
    counts: dict[str, int]
    """Outcome -> how many rows, of those outcomes that there are, worst first."""
    absent: tuple[str, ...] = ()
    """Criteria that were demanded, and are those of no test of this run."""

    @property
    def title(self) -> str:
        """Return the verdict's word; a rehearsal never stands alone as a verdict about hardware."""
        return f"{self.word} (a REHEARSAL on cpu, which says nothing about hardware)" if self.rehearsal else self.word

    @property
    def is_good(self) -> bool:
        """Tell whether nothing is wrong."""
        return self.exit == 0

    @property
    def worst_first(self) -> tuple[Row, ...]:
        """Return the rows, failures first; rows of one outcome keep their order.

        What was skipped and had not to run comes last, so that it does not stand before all that was measured.
        """
        return tuple(sorted(self.rows, key=_severity))

    @property
    def bad(self) -> tuple[Row, ...]:
        """Return the rows that failed or broke, failures first."""
        return tuple(row for row in self.worst_first if row.outcome in ("failed", "error", RUNNING))

    @property
    def did_not_run(self) -> tuple[Row, ...]:
        """Return the rows that were skipped or never reached."""
        return tuple(row for row in self.rows if row.outcome in (NOT_RUN, "skipped"))

    def tightest(self, most: int = 5) -> tuple[tuple[Row, JudgedMetric], ...]:
        """Return the values that kept their limit by the smallest share, the nearest first, one a test and metric.

        What cannot be better (``is_whole``) is none of them.
        """
        best: dict[tuple[str, str], tuple[float, Row, JudgedMetric]] = {}
        for row in self.rows:
            for judged in row.result.measurements if row.result is not None else ():
                share = share_of_limit(judged)
                key = row.nodeid, judged.metric
                if judged.status != "passed" or share is None or is_whole(judged):
                    continue
                if key not in best or share < best[key][0]:
                    best[key] = share, row, judged
        found = sorted(best.values(), key=lambda each: each[0])
        return tuple((row, judged) for _, row, judged in found[:most])


def _severity(row: Row) -> int:
    if row.outcome == "skipped" and not row.is_gap:
        return len(_WORST_FIRST)
    return _WORST_FIRST.get(row.outcome, 1)


def outline(journal: Journal) -> Outline:
    """Return a run as people look at it."""
    required = journal.run.required
    ran = {result.criterion for result in journal.results if result.outcome == "passed"}
    rows = [row_of(result, required=[name for name in required if name not in ran]) for result in journal.results]
    if journal.running is not None:
        told = {test.nodeid: test.criterion for test in journal.collected or ()}
        nodeid = journal.running.nodeid
        why = "the run ended here" if journal.end is None else first_line(journal.ended_by)
        why = f"started at {journal.running.at or 'an unknown time'}" if journal.is_live else why
        outcome = IN_PROGRESS if journal.is_live else RUNNING
        rows.append(Row(nodeid=nodeid, name=short_name(nodeid), outcome=outcome, criterion=told.get(nodeid), why=why))
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
        rehearsal=journal.run.rehearsal,
        rows=tuple(rows),
        counts={outcome: found[outcome] for outcome in _WORST_FIRST if found[outcome]},
        absent=tuple(name for name in required if name not in criteria),
    )


def row_of(result: TestResult, *, required: Collection[str] = ()) -> Row:
    """Return the row of a finished test. ``required``: the criteria that the operator demands, and no test has met."""
    criterion = result.criterion
    had_to_run = result.applicable and not result.too_slow  # of a rehearsal; its verdict says what was missed by that
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
    """Return the measurement that stands for all of a test; None where there is none.

    One that was missed: that which explains the others (``cause_order``), of several the one that missed by the most;
    else one that could not be judged; else the one that kept its limit by the least, as many times as it is better;
    else the first that was recorded. What cannot be better (``is_whole``) stands for a test only where nothing else is.
    """
    told = list(measurements)

    def rank(judged: JudgedMetric) -> tuple[int, tuple[int, ...], float]:
        kept = judged.status in ("passed", "recorded")
        order = (int(judged.status == "passed" and is_whole(judged)),) if kept else cause_order(judged)
        return _OF_STATUS.get(judged.status, 1), order, _margin(judged)

    return min(told, key=rank, default=None)


def share_of_limit(judged: JudgedMetric) -> float | None:
    """Return the margin where it is a share: of a limit of zero it is a distance, and of a missing one nothing."""
    limit = judged.limit
    if limit is None or judged.margin is None or not math.isfinite(judged.margin) or 0 in (limit.min, limit.max):
        return None
    return judged.margin


def is_whole(judged: JudgedMetric) -> bool:
    """Tell whether a value is at a limit that nothing can be beyond: all of something, or nothing of what must not be.

    Its margin of zero says nothing about how near it is to a failure.
    """
    limit = judged.limit
    if limit is None or judged.value is None:
        return False
    all_of_it = {"%": 100.0, "ratio": 1.0}.get(judged.unit)
    return judged.value in (limit.min, limit.max) and judged.value in (0.0, all_of_it)


def short_name(nodeid: str) -> str:
    """Return function[parameters] of a test's id.

    >>> short_name("acceptance/test_nccl.py::test_all_reduce[node-bf16]")
    'test_all_reduce[node-bf16]'
    """
    return nodeid.partition("::")[2] or nodeid


def peak_value(judged: JudgedMetric) -> float | None:
    """Return the data sheet peak that the value was held beside, in its unit; None where there is none."""
    if judged.peak_ratio is None or judged.value is None or not judged.peak_ratio > 0:
        return None
    peak = judged.value / judged.peak_ratio
    return peak if math.isfinite(peak) else None


def is_better_higher(judged: JudgedMetric) -> bool | None:
    """Tell whether more of it is better; None where the metric is not this suite's and its limit does not tell."""
    metric = METRICS.get(judged.metric)
    if metric is not None and metric.better in ("higher", "lower"):
        return metric.better == "higher"
    if judged.limit is None or (judged.limit.min is None) == (judged.limit.max is None):
        return None
    return judged.limit.min is not None


def _margin(judged: JudgedMetric) -> float:
    """Return a margin by which limits from above and from below can be compared: how many times better, less one.

    A share of an upper limit is never more than 1, however good the value is.
    """
    margin = judged.margin
    if margin is None or not math.isfinite(margin):
        return math.inf
    is_upper = judged.limit is not None and judged.limit.max is not None and judged.limit.min is None
    return margin / (1 - margin) if is_upper and 0 < margin < 1 else margin


_LONGEST_SECONDS = 1e10
"""Some 300 years: whatever is said to take longer is no duration, and its digits would fill a page."""


def moment(text: str) -> datetime | None:
    """Return a time that is written as ISO 8601, with its zone (UTC where it names none); None if it is no such text.

    None, too, where it is outside the years 1 to 9999 in UTC, so that there is nothing that cannot be done with it.

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
    """Return how many seconds a run took: until its end, or until the last that is known of it."""
    begin = moment(journal.run.started_at)
    moments = [moment(journal.end.at)] if journal.end is not None else []
    if not any(moments):
        if journal.running is not None:
            moments.append(moment(journal.running.at))
        moments += [_end(result) for result in journal.results]
    last = max((each for each in moments if each is not None), default=None)
    if begin is None or last is None:
        return sum(result.duration_seconds for result in journal.results)
    return (last - begin).total_seconds()


def _end(result: TestResult) -> datetime | None:
    started = moment(result.started_at)
    if started is None or not math.isfinite(result.duration_seconds):
        return None
    try:
        return started + timedelta(seconds=result.duration_seconds)
    except OverflowError:  # no test of this world
        return None


def duration(seconds: float) -> str:
    """Return a duration as people say it.

    >>> [duration(seconds) for seconds in (0.04, 7.25, 75, 3725)]
    ['0.04 s', '7.2 s', '1 min 15 s', '1 h 2 min']
    """
    if not 0 <= seconds < _LONGEST_SECONDS:
        return "unknown"
    if seconds < 59.95:
        return f"{seconds:.2g} s" if seconds < 1 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"
