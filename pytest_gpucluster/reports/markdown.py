"""A run for a pull request or the summary of a GitHub step: GitHub Flavored Markdown, failures first.

It always stays below ``MOST_BYTES``; what does not fit is left out in whole rows, and the number of those is shown.
Names and messages come from anywhere, and are text and nothing else: no markup, no HTML, no link, no mention of a user.

Source: https://github.github.com/gfm/ ; the summary of a check has room for 65,535 bytes (dorny/test-reporter), a
comment for 65,536 characters.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from pytest_gpucluster.journal.fields import JudgedMetric
from pytest_gpucluster.journal.journal import JOURNAL_FILE, Journal
from pytest_gpucluster.journal.verdict import ACCEPTED
from pytest_gpucluster.reports.junit import cluster_facts
from pytest_gpucluster.reports.summary import Outline, Row, duration, outline, run_seconds, share_of_limit
from pytest_gpucluster.reports.tables import limit_text, metric_name, percent, quantity, rank_name
from pytest_gpucluster.text import MESSAGE_CHARACTERS, one_line

MOST_BYTES = 65_000
"""Of UTF-8, so that it is below 65,000 characters as well."""

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
# Whoever passed without being measured on a GPU has not earned the mark of those who were.
_WEAK_VERDICT = "\N{WHITE CIRCLE}"
_BREAK = "&#8203;"
"""A space of no width: where a mention, a reference or an address would begin, it begins no more."""

_ACTIVE = re.compile(r"[\\`*_\[\]|~$]|[&<>@]|:(?=//)|#(?=\d)|\bwww(?=\.)|\bgh(?=-\d)", re.IGNORECASE)
_ENTITIES = {"&": "&amp;", "<": "&lt;", ">": "&gt;"}
_BAD_HEAD = ("Test", "Outcome", "Value", "Limit", "Margin", "Worst rank", "Why")
_ALL_HEAD = ("Test", "Outcome", "Value", "Limit", "Margin", "Worst rank")
Cells = Sequence[str]


def render(journal: Journal) -> str:
    """Return the Markdown of a run, also of one that was cut off."""
    told = outline(journal)
    page = _Page(
        f"## {_symbol(told)} {text(told.title, _NAME_CHARACTERS)}\n\n"
        f"**Exit code {told.exit}:** {text(told.reason, _FACT_CHARACTERS) or 'no reason given'}\n\n"
        f"{_counted(told, journal)}\n"
    )
    page.add("### What is wrong", _BAD_HEAD, [(*_row(row, journal), _message(row.why)) for row in told.bad])
    page.add(
        "### Problems outside the tests",
        ("Problem", "What"),
        [(text(problem.name, _NAME_CHARACTERS), _message(problem.message)) for problem in journal.problems],
    )
    page.add(
        "### The tightest margins",
        ("Test", "Metric", "Value", "Limit", "Margin"),
        [(_name(row), _metric(judged), *_held(judged)) for row, judged in told.tightest()],
    )
    page.add(
        "### What did not run",
        ("Test", "Outcome", "Why"),
        [(_name(row), _outcome(row), _message(row.why_not_run)) for row in told.did_not_run],
    )
    page.fold("All tests", _ALL_HEAD, [_row(row, journal) for row in told.worst_first])
    page.fold("The run", ("What", "Value"), _facts(journal))
    return page.end()


def text(found: str, characters: int) -> str:
    """Return a text from anywhere as Markdown that shows it, on one line, and does nothing else.

    What does not print is shown as ``#x1B``. It is made for the inside of a line, not for its beginning.

    >>> text("<b>@all", 80)
    '&lt;b&gt;@&#8203;all'
    """
    line = "".join(each if each.isprintable() else f"#x{ord(each):02X}" for each in one_line(found, characters))
    return _ACTIVE.sub(_tamed, line)


def _tamed(match: re.Match[str]) -> str:
    found = match.group()
    if found in _ENTITIES:
        return _ENTITIES[found]
    # What would mention, refer or link is broken in two; all else is markup.
    return f"{found}{_BREAK}" if found in "@:#" or found.isalpha() else f"\\{found}"


class _Page:
    """The text so far. The first part, which has the verdict, is always whole; rows that do not fit are counted."""

    def __init__(self, beginning: str) -> None:
        self._parts = [beginning]
        # Every table may need a line that says what was left out, and the page one at its end.
        self._room = MOST_BYTES - _size(beginning) - _size(_LAST)

    def add(self, heading: str, head: Cells, rows: Sequence[Cells]) -> None:
        """Add a table under a heading; nothing where there are no rows."""
        self._add(f"\n{heading}\n\n", head, rows, "")

    def fold(self, summary: str, head: Cells, rows: Sequence[Cells]) -> None:
        """Add a table that is shown when somebody asks for it."""
        self._add(f"\n<details>\n<summary>{summary} ({len(rows)})</summary>\n\n", head, rows, "\n</details>\n")

    def _add(self, above: str, head: Cells, rows: Sequence[Cells], below: str) -> None:
        if not rows:
            return
        top = f"{above}{_line(head)}{_line(['---'] * len(head))}"
        spare = _size(_left_out(len(rows), len(rows))) + _size(below)
        lines, room = [], self._room - _size(top) - spare
        for cells in rows:
            line = _line(cells)
            room -= _size(line)
            if room < 0:
                break
            lines.append(line)
        if not lines:
            # Not even a row: then the heading alone, if there is room for that.
            note = f"\n{_left_out(len(rows), len(rows))}"
            if _size(note) <= self._room:
                self._parts.append(note)
                self._room -= _size(note)
            return
        told = _left_out(len(rows) - len(lines), len(rows)) if len(lines) < len(rows) else ""
        part = f"{top}{''.join(lines)}{told}{below}"
        self._parts.append(part)
        self._room -= _size(part)

    def end(self) -> str:
        """Return the page."""
        return "".join([*self._parts, _LAST])


_LAST = f"\nAll values are in `results.json` and `{JOURNAL_FILE}` of the run's folder.\n"


def _left_out(count: int, of: int) -> str:
    return f"\n{count} of {of} rows are left out here: there is no room for them.\n"


def _size(part: str) -> int:
    return len(part.encode("utf-8"))


def _line(cells: Cells) -> str:
    return f"| {' | '.join(cells)} |\n"


def _symbol(told: Outline) -> str:
    if not told.is_good:
        return _BAD_VERDICT
    return _GOOD_VERDICT if told.word == ACCEPTED and not told.rehearsal else _WEAK_VERDICT


def _counted(told: Outline, journal: Journal) -> str:
    run = journal.run
    counts = ", ".join(f"{count} {outcome}" for outcome, count in told.counts.items()) or "no test"
    shape = f"{run.nnodes} node{'s' * (run.nnodes != 1)}, {run.world_size} rank{'s' * (run.world_size != 1)}"
    sku = journal.limits.sku if journal.limits is not None else None
    parts = [counts, shape, text(sku or "", _NAME_CHARACTERS), duration(run_seconds(journal))]
    return "; ".join(part for part in parts if part)


def _row(row: Row, journal: Journal) -> tuple[str, ...]:
    judged = row.headline
    if judged is None:
        return _name(row), _outcome(row), "", "", "", ""
    worst = "" if judged.worst_rank is None else text(rank_name(journal, judged.worst_rank), _NAME_CHARACTERS)
    return _name(row), _outcome(row), *_held(judged), worst


def _held(judged: JudgedMetric) -> tuple[str, str, str]:
    """Return value, limit and margin."""
    limit = judged.limit
    bounds = [bound for bound in (limit.min, limit.max) if bound is not None] if limit is not None else []
    value = judged.value
    beside = None if value is None else min(bounds, key=lambda bound: abs(bound - value), default=None)
    share = share_of_limit(judged)
    return (
        text(quantity(value, judged.unit, beside=beside), _NAME_CHARACTERS),
        text(limit_text(judged), _NAME_CHARACTERS),
        "" if share is None else percent(share),
    )


def _name(row: Row) -> str:
    return text(row.name, _NAME_CHARACTERS)


def _metric(judged: JudgedMetric) -> str:
    return text(metric_name(judged), _NAME_CHARACTERS)


def _outcome(row: Row) -> str:
    return _SYMBOLS.get(row.outcome, row.outcome)


def _message(message: str) -> str:
    return text(message, MESSAGE_CHARACTERS)


def _facts(journal: Journal) -> list[tuple[str, str]]:
    """Return what was run, where and with what; settings only where somebody has set them."""
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
