"""A run as plain text for a terminal or a mail: the header before the first test, the summary after the last.

The header shows the cluster, its limits and settings; the summary shows the verdict, the criteria with failures first,
and what did not run. No line is wider than the given width, and no untrusted text acts on a terminal. Colour only
repeats the words.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from pytest_gpucluster.journal.journal import Journal
from pytest_gpucluster.journal.verdict import RUNNING
from pytest_gpucluster.judge.judged import JudgedMetric
from pytest_gpucluster.reports import failures, tables
from pytest_gpucluster.reports.facts import header_lines
from pytest_gpucluster.reports.summary import (
    GROUPS,
    IN_PROGRESS,
    NOT_RUN,
    Outline,
    Row,
    display_name,
    outline,
    worst_first,
)
from pytest_gpucluster.reports.summary import RUNNING as ENDED_IN
from pytest_gpucluster.text import (
    Column,
    clean,
    columns,
    fitted_table,
    heads,
    one_line,
    padded,
    paragraph,
    plural,
    shortened,
    styled,
)

LEAST_WIDTH = 80
"""Narrower terminals break the lines themselves."""
_MOST_NODES = 6
_MOST_PLACES = 4
_MOST_PROBLEMS = 20
_INDENT = " " * 4
_HEAD = 11
"""Columns of a group's name."""
_REST = " " * _HEAD
_NAMES_CHARACTERS = 180
_FAILURE_CHARACTERS = 700
_LEAST_NAMES = 12
_REQUIRED = "required"
_LONGEST_NAME = 100
_LONGEST_METRIC = 200
_DETAIL = " " * 8
_WORDS = {ENDED_IN: "BROKEN", IN_PROGRESS: "RUNNING"}
"""Outcome -> its word, where it is another one."""
_NAME = 1
"""The column whose text is broken where a line is too long."""


def _heads(name: str) -> list[Column]:
    return heads(f", {name}, value, limit, margin, rank", right="value, margin")


def render(
    journal: Journal,
    *,
    width: int = 80,
    verbosity: int = 0,
    colour: bool = False,
    reports: Sequence[tuple[str, str]] = (),
) -> str:
    """Return a whole run as text.

    Args:
        journal: the run.
        width: columns of a line, at least ``LEAST_WIDTH``.
        verbosity: below 0 only the verdict, failures and the paths of reports; above 0 also every measurement.
        colour: add colour control sequences.
        reports: name and path of each report, such as ("journal", "run/journal.jsonl").
    """
    width, junit = max(width, LEAST_WIDTH), journal.run.junit.path
    overview = outline(journal)
    blocks = [
        [] if verbosity < 0 else header_lines(journal, width=width),
        *summary(journal, overview, width=width, verbosity=verbosity, colour=colour),
        report_lines(reports or ([("JUnit", junit)] if junit else []), verbose=verbosity > 0),
        verdict_lines(overview, width=width, colour=colour),
    ]
    return "\n\n".join("\n".join(block) for block in blocks if block) + "\n"


def summary(journal: Journal, overview: Outline, *, width: int, verbosity: int, colour: bool) -> Iterator[list[str]]:
    """Yield the parts between the header and the paths of reports, each as lines."""
    if verbosity > 0:
        yield _criteria(journal, overview, width=width, colour=colour)
    seen = _map(journal, overview, width=width, colour=colour) if verbosity >= 0 else []
    yield [*seen, *_culprits(journal, overview, width=width, colour=colour)]
    if verbosity >= 0:
        did_not_run = _did_not_run(overview, width=width, verbose=verbosity > 0)
        yield [*_groups(overview, width=width, colour=colour), *did_not_run]
    yield _problems(journal, width=width, colour=colour)


def verdict_lines(overview: Outline, *, width: int, colour: bool) -> list[str]:
    """Return verdict, exit code and reason; in place of a test's message, which stands above, the numbers of tests."""
    counts = ", ".join(f"{count} {outcome}" for outcome, count in overview.counts.items())
    is_of_test = overview.reason.startswith(tuple(f"{row.nodeid} " for row in overview.bad))
    reason = counts if is_of_test else overview.reason
    lines = paragraph(f"{overview.title}, exit code {overview.exit}{': ' * bool(reason)}{reason}", width)
    style = "green" if overview.is_good else "yellow" if overview.word == RUNNING else "red"
    return [styled(line, style, colour=colour) for line in lines]


def report_lines(reports: Iterable[tuple[str, str]], *, verbose: bool = True) -> list[str]:
    """Return the paths of reports, never broken, so that they can be copied; without ``verbose`` not those of files for
    programs that lie next to the page."""
    found = dict(reports)
    left_out = () if verbose or "report" not in found else ("journal", "results", "metrics")
    pairs = [(f"{clean(name)}:", clean(path)) for name, path in found.items() if name not in left_out]
    wide = max((columns(name) for name, _ in pairs), default=0)
    return [f"{name.ljust(wide)} {path}" for name, path in pairs]


# ---- culprits, and a line for each group ---------------------------------------------------------------------------


def _map(journal: Journal, overview: Outline, *, width: int, colour: bool) -> list[str]:
    """Return the map: one character a GPU, healthy nodes on one line, and what the marks mean."""
    nodes = list(failures.merged_nodes(failures.cluster_map(journal, overview)))
    wide = min(max((columns(clean(node.name)) for node in nodes), default=0), width // 2)
    lines = []
    for node in nodes[:_MOST_NODES]:
        marks = "".join(gpu.mark for gpu in node.gpus)
        text = f"{len(marks)} x {failures.MARKS[marks[0]]}" if len(set(marks)) == 1 else marks
        line = f"{padded(shortened(clean(node.name), wide), wide)}  {shortened(text, width - wide - 2)}"
        lines.append(styled(line, "green" if node.is_healthy else "red", colour=colour))
    if len(nodes) > _MOST_NODES:
        lines.append(f"and {plural(len(nodes) - _MOST_NODES, 'more node')} with failures")
    seen = dict.fromkeys(gpu.mark for node in nodes for gpu in node.gpus)
    if seen.keys() - {failures.OK, failures.FAILED} and any(len({gpu.mark for gpu in node.gpus}) > 1 for node in nodes):
        lines.append(" " * (wide + 2) + ", ".join(f"{mark} {failures.MARKS[mark]}" for mark in seen))
    return lines


def _culprits(journal: Journal, overview: Outline, *, width: int, colour: bool) -> list[str]:
    """Return what failed where, with what may explain it and what to do."""
    lines, advised = [], set[str]()
    places = failures.failures_by_place(journal, overview).values()
    for rows in list(places)[:_MOST_PLACES]:
        row, more = rows[0], f", and {len(rows) - 1} more" if len(rows) > 1 else ""
        text = one_line(failures.failure_text(row, journal, name=display_name(row.name)), _FAILURE_CHARACTERS) + more
        lines += [styled(line, "red", colour=colour) for line in paragraph(text, width, rest=_INDENT)]
        for what in failures.advice(row):
            lines += paragraph(what, width, first=_INDENT, rest=_INDENT) if what not in advised else []
            advised |= {what} if what.startswith("what to do: ") else set()
    if len(places) > _MOST_PLACES:
        lines.append(f"and {len(places) - _MOST_PLACES} more places; -v lists all that failed")
    return lines


def _groups(overview: Outline, *, width: int, colour: bool) -> list[str]:
    """Return a line for each group: its tightest margin, or else what failed in it."""
    lines = []
    for group in GROUPS:
        ran = [row for row in overview.rows if row.group == group and row.outcome not in (NOT_RUN, "skipped")]
        bad = [row for row in ran if not row.is_good]
        good = sum(row.is_good and not row.unjudged for row in ran)
        head = f"{group:<{_HEAD}}" + (f"{good:2} OK  " if good else "")
        if bad:
            words = Counter(map(_word, bad))
            failed = ", ".join(f"{number} {word}" for word, number in words.items())
            text = one_line(f"{failed}: {_merged_names(bad)}", _NAMES_CHARACTERS)
            lines += [styled(line, "red", colour=colour) for line in paragraph(text, width, first=head, rest=_REST)]
        elif ran:
            tightest = [
                f"{tables.headline_text(judged)}: {display_name(row.name)}"
                for row, judged in overview.tightest(1, group)
            ]
            lines.append(shortened(head + clean("".join(tightest)), width).rstrip())
    return lines


def _merged_names(rows: Iterable[Row]) -> str:
    """Return "matmul (5), hbm[copy]": functions with the number of their tests that failed."""
    names: dict[str, list[str]] = {}
    for row in rows:
        name = display_name(row.name)
        names.setdefault(name.partition("[")[0], []).append(name)
    return ", ".join(each[0] if len(each) == 1 else f"{name} ({len(each)})" for name, each in names.items())


# ---- the table of criteria, with -v --------------------------------------------------------------------------------


def _criteria(journal: Journal, overview: Outline, *, width: int, colour: bool) -> list[str]:
    ran = [row for row in overview.worst_first if row.outcome not in (NOT_RUN, "skipped")]
    rows = [row for row in ran if not row.is_good or row.criterion is not None or row.headline is not None]
    if not rows:
        return []
    counts = ", ".join(f"{count} {outcome}" for outcome, count in overview.counts.items())
    head, table = fitted_table(_heads("test"), [_cells(row) for row in rows], width, name=_NAME)
    lines = [styled(f"Criteria: {counts}", "bold", colour=colour), head]
    for row, row_lines in zip(rows, table, strict=True):
        lines += [_coloured(line, row, colour) for line in row_lines]
        lines += (
            [] if row.is_good else paragraph(failures.failure_text(row, journal), width, first=_DETAIL, rest=_DETAIL)
        )
        if row.result is not None:
            lines += _properties((*tables.measured_pairs(row.result.measurements), *row.result.properties), width)
    if len(ran) > len(rows):
        lines.append(f"and {plural(len(ran) - len(rows), 'test')} passed that are no criteria and measured nothing")
    return lines


def _properties(pairs: Iterable[tuple[str, str]], width: int) -> list[str]:
    wrapped = (paragraph(f"{name}: {value}", width, first=_DETAIL, rest=f"{_DETAIL}  ") for name, value in pairs)
    return list(itertools.chain(*wrapped))


def _cells(row: Row) -> list[str]:
    judged, word = row.headline, _word(row).ljust(6)
    name = shortened(clean(display_name(row.name)), _LONGEST_NAME)
    if judged is None:
        return [word, name, "", "", "", ""]
    return [word, name, *_judged_cells(judged)]


def _word(row: Row) -> str:
    return _WORDS.get(row.outcome, row.outcome.upper())


def _judged_cells(judged: JudgedMetric) -> list[str]:
    value, limit = clean(tables.value_text(judged)), clean(tables.limit_text(judged, first_only=True))
    rank = "" if judged.worst_rank is None else str(judged.worst_rank)
    return [shortened(value, 20), shortened(limit, 26), tables.margin_text(judged), rank]


def _coloured(line: str, row: Row, colour: bool) -> str:
    word = _word(row)
    if not line.startswith(word):
        return line
    style = "green" if row.is_good else "red" if row.outcome in ("failed", "error", ENDED_IN) else "yellow"
    return styled(word, style, colour=colour) + line[len(word) :]


def measurement_table(measurements: Sequence[JudgedMetric], *, width: int = 80) -> str:
    """Return the measurements of one test as a table, failures first.

    Recorded values are left out; a last line has their number.
    """
    visible = [judged for judged in worst_first(measurements) if judged.status != "recorded"]
    rows = []
    for judged in visible:
        name = shortened(clean(tables.metric_name(judged)), _LONGEST_METRIC)
        rows.append([judged.status.upper(), name, *_judged_cells(judged)])
    if not rows:
        return ""
    head, lines = fitted_table(_heads("metric"), rows, width, name=_NAME)
    hidden = len(measurements) - len(visible)
    more = [f"{plural(hidden, 'recorded value')} left out here"] if hidden else []
    return "\n".join([head, *itertools.chain(*lines), *more])


# ---- the rest ----------------------------------------------------------------------------------------------------


def _did_not_run(overview: Outline, *, width: int, verbose: bool) -> list[str]:
    """Return a line for each reason why tests did not run, or were not judged: those that make the run INCOMPLETE
    first."""
    by_reason: dict[tuple[str, str], list[str]] = {}
    for row in overview.rows:
        if row.unjudged or row.outcome in (NOT_RUN, "skipped"):
            is_known = row.outcome == NOT_RUN and any(bad.nodeid in row.why for bad in overview.bad)
            why = (
                f"not judged: {row.unjudged}"
                if row.unjudged
                else "not reached"
                if is_known
                else row.why or "no reason given"
            )
            word = _REQUIRED if row.is_gap or row.unjudged else row.outcome
            by_reason.setdefault((word, why), []).append(clean(display_name(row.name)))
    for name in overview.absent:
        by_reason.setdefault((_REQUIRED, "this run has no test for it"), []).append(clean(name))
    lines: list[str] = []
    explained: set[str] = set()
    for (word, why), names in sorted(by_reason.items(), key=lambda entry: entry[0][0] != _REQUIRED):
        what = "the same" if why in explained else why
        explained.add(why)
        listed, first = f" ({', '.join(names)})", f"{word:<{_HEAD}}{len(names):2}: "
        if verbose or word == _REQUIRED:
            lines += paragraph(what + listed, width, first=first, rest=_REST)
        else:  # of what a test says about what to do nothing is cut
            *whole, last = paragraph(what, width, first=first, rest=_REST)
            free = width - columns(last)
            lines += [*whole, last + (shortened(listed, free) if free >= _LEAST_NAMES else "")]
    return lines


def _problems(journal: Journal, *, width: int, colour: bool) -> list[str]:
    known = {journal.reason, *(result.message for result in journal.results)}
    messages = list(dict.fromkeys(problem.message for problem in journal.problems if problem.message not in known))
    if journal.cut:
        messages.append("the last line of the journal is cut off and was ignored")
    if not messages:
        return []
    lines = [styled("Problems outside any test:", "bold", colour=colour)]
    for text in messages[:_MOST_PROBLEMS]:
        lines += [styled(line, "red", colour=colour) for line in paragraph(text, width, first="  ", rest="    ")]
    if len(messages) > _MOST_PROBLEMS:
        lines.append(f"  and {len(messages) - _MOST_PROBLEMS} more in the journal")
    return lines
