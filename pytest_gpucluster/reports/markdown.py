"""A run for a pull request or the summary of a GitHub step: GitHub Flavored Markdown, failures first.

It stays below ``MOST_BYTES``: rows that do not fit are left out and counted. Names and messages are untrusted and
become plain text: no markup, no HTML, no link, no mention of a user.

Source: https://github.github.com/gfm/ ; the summary of a check has free for 65,535 bytes (dorny/test-reporter), a
comment for 65,536 characters.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

from pytest_gpucluster.journal.fields import JudgedMetric
from pytest_gpucluster.journal.journal import JOURNAL_FILE, Journal
from pytest_gpucluster.journal.verdict import ACCEPTED
from pytest_gpucluster.reports.criterion_text import margin_text, value_text
from pytest_gpucluster.reports.junit import cluster_facts
from pytest_gpucluster.reports.summary import Outline, Row, duration, outline, run_seconds
from pytest_gpucluster.reports.tables import limit_text, metric_name, rank_name
from pytest_gpucluster.text import MESSAGE_CHARACTERS, one_line, plural

MOST_BYTES = 65_000
"""Of UTF-8, so it has at most 65,000 characters as well."""

_NAME_CHARACTERS = 120
_FACT_CHARACTERS = 300
_SYMBOLS = {
    "passed": "\N{WHITE HEAVY CHECK MARK} passed",
    "failed": "\N{CROSS MARK} failed",
    "error": "\N{COLLISION SYMBOL} error",
    "running": "\N{COLLISION SYMBOL} ended here",
    "in progress": "\N{WHITE CIRCLE} in progress",
    "skipped": "\N{WHITE CIRCLE} skipped",
    "not run": "\N{WHITE CIRCLE} not run",
}
_BAD_VERDICT = "\N{CROSS MARK}"
_GOOD_VERDICT = "\N{WHITE HEAVY CHECK MARK}"
# Passed, but not accepted: a rehearsal, a simulation, a selection.
_WEAK_VERDICT = "\N{WHITE CIRCLE}"
_BREAK = "&#8203;"
"""A zero-width space, which breaks a mention, a reference or an address."""

_ACTIVE = re.compile(r"[\\`*_\[\]|~$]|[&<>@]|:(?=//)|#(?=\d)|\bwww(?=\.)|\bgh(?=-\d)", re.IGNORECASE)
_ENTITIES = {"&": "&amp;", "<": "&lt;", ">": "&gt;"}
_BAD_HEAD = ("Test", "Outcome", "Value", "Limit", "Margin", "Worst rank", "Why")
_ALL_HEAD = ("Test", "Outcome", "Value", "Limit", "Margin", "Worst rank")
Cells = Sequence[str]


def render(journal: Journal) -> str:
    """Return the Markdown of a run, also of one that was cut off."""
    overview = outline(journal)
    page = _Page(
        f"## {_symbol(overview)} {text(overview.title, _NAME_CHARACTERS)}\n\n"
        f"**Exit code {overview.exit}:** {text(overview.reason, _FACT_CHARACTERS) or 'no reason given'}\n\n"
        f"{_counts(overview, journal)}\n"
    )
    page.add("### What is wrong", _BAD_HEAD, [(*_row(row, journal), _message(row.why)) for row in overview.bad])
    page.add(
        "### Problems outside the tests",
        ("Problem", "What"),
        [(text(problem.name, _NAME_CHARACTERS), _message(problem.message)) for problem in journal.problems],
    )
    page.add(
        "### The tightest margins",
        ("Test", "Metric", "Value", "Limit", "Margin"),
        [(_name(row), _metric(judged), *_value_cells(judged)) for row, judged in overview.tightest()],
    )
    page.add(
        "### What did not run",
        ("Test", "Outcome", "Why"),
        [(_name(row), _outcome(row), _message(row.why_not_run)) for row in overview.did_not_run],
    )
    page.fold("All tests", _ALL_HEAD, [_row(row, journal) for row in overview.worst_first])
    page.fold("The run", ("What", "Value"), _facts(journal))
    return page.end()


def text(untrusted: str, characters: int) -> str:
    """Return untrusted text as Markdown of one line that only displays it.

    What is not printable becomes ``#x1B``. Not for the beginning of a line.

    >>> text("<b>@all", 80)
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

    def add(self, heading: str, head: Cells, rows: Sequence[Cells]) -> None:
        """Add a table under a heading; nothing where there are no rows."""
        self._add(f"\n{heading}\n\n", head, rows, "")

    def fold(self, summary: str, head: Cells, rows: Sequence[Cells]) -> None:
        """Add a table that is folded."""
        self._add(f"\n<details>\n<summary>{summary} ({len(rows)})</summary>\n\n", head, rows, "\n</details>\n")

    def _add(self, above: str, head: Cells, rows: Sequence[Cells], below: str) -> None:
        top = f"{above}{_line(head)}{_line(['---'] * len(head))}"
        # Every table may need a line about rows left out.
        free = self._free - _size(top) - _size(below) - _size(_left_out(len(rows), len(rows)))
        lines = list(map(_line, rows))
        kept = sum(used <= free for used in itertools.accumulate(map(_size, lines)))
        note = _left_out(len(rows) - kept, len(rows)) if kept < len(rows) else ""
        part = f"{top}{''.join(lines[:kept])}{note}{below}" if kept else note and f"\n{note}"
        if _size(part) <= self._free:  # of a table without rows only the note, if that fits
            self._parts.append(part)
            self._free -= _size(part)

    def end(self) -> str:
        """Return the page."""
        return "".join([*self._parts, _LAST])


_LAST = f"\nAll values are in `results.json` and `{JOURNAL_FILE}` of the run's folder.\n"


def _left_out(count: int, total: int) -> str:
    return f"\n{count} of {total} rows are left out here: the size of this page is limited.\n"


def _size(part: str) -> int:
    return len(part.encode("utf-8"))


def _line(cells: Cells) -> str:
    return f"| {' | '.join(cells)} |\n"


def _symbol(overview: Outline) -> str:
    if not overview.is_good:
        return _BAD_VERDICT
    return _GOOD_VERDICT if overview.word == ACCEPTED and not overview.rehearsal else _WEAK_VERDICT


def _counts(overview: Outline, journal: Journal) -> str:
    run = journal.run
    counts = ", ".join(f"{count} {outcome}" for outcome, count in overview.counts.items()) or "no test"
    shape = f"{plural(run.nnodes, 'node')}, {plural(run.world_size, 'rank')}"
    sku = journal.limits.sku if journal.limits is not None else None
    parts = [counts, shape, text(sku or "", _NAME_CHARACTERS), duration(run_seconds(journal))]
    return "; ".join(part for part in parts if part)


def _row(row: Row, journal: Journal) -> tuple[str, ...]:
    judged = row.headline
    if judged is None:
        return _name(row), _outcome(row), "", "", "", ""
    worst = "" if judged.worst_rank is None else text(rank_name(journal, judged.worst_rank), _NAME_CHARACTERS)
    return _name(row), _outcome(row), *_value_cells(judged), worst


def _value_cells(judged: JudgedMetric) -> tuple[str, str, str]:
    """Return value, limit and margin."""
    cells = value_text(judged, with_unit=True), limit_text(judged), margin_text(judged)
    value, limit, margin = (text(cell, _NAME_CHARACTERS) for cell in cells)
    return value, limit, margin


def _name(row: Row) -> str:
    return text(row.name, _NAME_CHARACTERS)


def _metric(judged: JudgedMetric) -> str:
    return text(metric_name(judged), _NAME_CHARACTERS)


def _outcome(row: Row) -> str:
    return _SYMBOLS.get(row.outcome, row.outcome)


def _message(message: str) -> str:
    return text(message, MESSAGE_CHARACTERS)


def _facts(journal: Journal) -> list[tuple[str, str]]:
    """Return what was run, where and with which software; settings only if not the default."""
    run, limits, workload = journal.run, journal.limits, journal.workload
    facts = {
        "run": run.run_id,
        "started": run.started_at,
        "launcher": run.launcher,
        "device": run.device,
        "pytest-gpucluster": run.plugin_version,
        **cluster_facts(journal),
        "profile": workload.profile if workload is not None else "",
    }
    if run.merged_from:
        facts["merged from"] = ", ".join(f"{each.run_id} ({each.verdict})" for each in run.merged_from)
        facts["merged despite"] = "; ".join(run.merged_despite)
    facts |= {
        f"option {name}": f"{value} (from {origin})"
        for name, (value, origin) in run.options.items()
        if origin != "default"
    }
    if limits is not None:
        facts["limits"] = ", ".join(f"{path} (SHA-256 {digest[:12] or 'unknown'})" for path, digest in limits.files)
    return [(text(name, _NAME_CHARACTERS), text(value, _FACT_CHARACTERS)) for name, value in facts.items() if value]
