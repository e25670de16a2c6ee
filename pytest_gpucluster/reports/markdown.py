"""A run for a pull request or the summary of a GitHub step: GitHub Flavored Markdown, failures first.

It stays below ``MOST_BYTES``: rows that do not fit are left out and counted. Names and messages are untrusted and
become plain text: no markup, no HTML, no link, no mention of a user.

Source: https://github.github.com/gfm/ ; the summary of a check has free for 65,535 bytes (dorny/test-reporter), a
comment for 65,536 characters.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence

from pytest_gpucluster.journal.journal import JOURNAL_FILE, Journal
from pytest_gpucluster.judge.judged import JudgedMetric
from pytest_gpucluster.reports.facts import facts
from pytest_gpucluster.reports.summary import RUNNING, Row, outline, run_seconds
from pytest_gpucluster.reports.tables import limit_text, margin_text, metric_name, rank_name, value_text
from pytest_gpucluster.text import MESSAGE_CHARACTERS, duration_text, one_line

MOST_BYTES = 65_000
"""Of UTF-8, so it has at most 65,000 characters as well."""

_GOOD, _WEAK, _BAD, _BROKEN = (
    "\N{WHITE HEAVY CHECK MARK}",
    "\N{WHITE CIRCLE}",  # passed, but not accepted: a rehearsal, a simulation, a selection
    "\N{CROSS MARK}",
    "\N{COLLISION SYMBOL}",
)
_MARKS = {"passed": _GOOD, "failed": _BAD, "error": _BROKEN, RUNNING: _BROKEN}
_BREAK = "&#8203;"
"""A zero-width space, which breaks a mention, a reference or an address."""

_ACTIVE = re.compile(r"[\\`*_\[\]|~$]|[&<>@]|:(?=//)|#(?=\d)|\bwww(?=\.)|\bgh(?=-\d)", re.IGNORECASE)
_ENTITIES = {"&": "&amp;", "<": "&lt;", ">": "&gt;"}
_HEAD = ("Test", "Outcome", "Value", "Limit", "Margin", "Worst rank")
_LAST = f"\nAll values are in `results.json` and `{JOURNAL_FILE}` of the run's folder.\n"


def render(journal: Journal) -> str:
    """Return the Markdown of a run, also of one that was cut off."""
    overview = outline(journal)
    mark = _GOOD if overview.is_accepted else _WEAK
    counts = ", ".join(f"{count} {outcome}" for outcome, count in overview.counts.items()) or "no test"
    page = _Page(
        f"## {mark if overview.is_good else _BAD} {text(overview.title)}\n\n"
        f"**Exit code {overview.exit}:** {text(overview.reason, 300) or 'no reason given'}\n\n"
        f"{counts}; {duration_text(run_seconds(journal))}\n"
    )
    bad = [(*_cells(row, journal), row.why) for row in overview.bad]
    page.add("### What is wrong", (*_HEAD, "Why"), bad)
    problems = [(problem.name, problem.message) for problem in journal.problems]
    page.add("### Problems outside the tests", ("Problem", "What"), problems)
    tightest = [(row.name, metric_name(judged), *_judged_cells(judged)) for row, judged in overview.tightest()]
    page.add("### The tightest margins", ("Test", "Metric", "Value", "Limit", "Margin"), tightest)
    not_run = [(row.name, _outcome(row), row.why_not_run) for row in overview.did_not_run]
    page.add("### What did not run", ("Test", "Outcome", "Why"), not_run)
    page.add("All tests", _HEAD, [_cells(row, journal) for row in overview.worst_first], is_folded=True)
    known = {"run": journal.run.run_id, "started": journal.run.started_at, **facts(journal)}
    page.add("The run", ("What", "Value"), [(what or "launched", fact) for what, fact in known.items()], is_folded=True)
    return page.end()


def text(untrusted: str, characters: int = MESSAGE_CHARACTERS) -> str:
    """Return untrusted text as Markdown of one line that only displays it.

    What is not printable becomes ``#x1B``. Not for the beginning of a line.

    >>> text("<b>@all")
    '&lt;b&gt;@&#8203;all'
    """
    line = "".join(each if each.isprintable() else f"#x{ord(each):02X}" for each in one_line(untrusted, characters))
    return _ACTIVE.sub(_escaped, line)


def _escaped(match: re.Match[str]) -> str:
    found = match.group()
    if found in _ENTITIES:
        return _ENTITIES[found]
    # A mention, reference or link is broken in two; the rest is markup.
    return f"{found}{_BREAK}" if found in "@:#" or found.isalpha() else f"\\{found}"


class _Page:
    """The text so far. The first part with the verdict is always complete; rows that do not fit are counted."""

    def __init__(self, beginning: str) -> None:
        self._parts = [beginning]
        self._free = MOST_BYTES - _size(beginning) - _size(_LAST)

    def add(self, heading: str, head: Sequence[str], rows: Sequence[Sequence[str]], *, is_folded: bool = False) -> None:
        """Add a table of untrusted texts under a heading; nothing where there are no rows."""
        above, below = f"\n{heading}\n\n", ""
        if is_folded:
            above = f"\n<details>\n<summary>{heading} ({len(rows)})</summary>\n\n"
            below = "\n</details>\n"
        top = f"{above}{_line(head)}{_line(['---'] * len(head))}"
        # Every table may need a line about rows left out.
        free = self._free - _size(top) - _size(below) - _size(_left_out(len(rows), len(rows)))
        lines = [_line(map(text, row)) for row in rows]
        kept = sum(used <= free for used in itertools.accumulate(map(_size, lines)))
        note = _left_out(len(rows) - kept, len(rows)) if kept < len(rows) else ""
        part = f"{top}{''.join(lines[:kept])}{note}{below}" if kept else note and f"\n{note}"
        if _size(part) <= self._free:  # of a table without rows only the note, if that fits
            self._parts.append(part)
            self._free -= _size(part)

    def end(self) -> str:
        """Return the page."""
        return "".join([*self._parts, _LAST])


def _left_out(count: int, total: int) -> str:
    return f"\n{count} of {total} rows are left out here: the size of this page is limited.\n"


def _size(part: str) -> int:
    return len(part.encode("utf-8"))


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |\n"


def _cells(row: Row, journal: Journal) -> tuple[str, ...]:
    judged = row.headline
    if judged is None:
        return row.name, _outcome(row), "", "", "", ""
    worst = "" if judged.worst_rank is None else rank_name(journal, judged.worst_rank)
    return row.name, _outcome(row), *_judged_cells(judged), worst


def _judged_cells(judged: JudgedMetric) -> tuple[str, str, str]:
    return value_text(judged), limit_text(judged), margin_text(judged)


def _outcome(row: Row) -> str:
    return f"{_MARKS.get(row.outcome, _WEAK)} {'ended here' if row.outcome == RUNNING else row.outcome}"
