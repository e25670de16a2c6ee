"""When a run began and how long it took, as far as its journal tells."""

from __future__ import annotations

import math
import re
from datetime import datetime, timedelta, timezone

from pytest_gpucluster.journal import Journal
from pytest_gpucluster.journal_lines import TestResult

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
