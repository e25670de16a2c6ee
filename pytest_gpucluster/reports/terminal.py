"""A run as plain text for a terminal or a mail: the header before the first test, the summary after the last.

The header shows the cluster, its limits and settings; the summary shows the verdict, the criteria with failures first,
and what did not run. No line is wider than the given width, and no untrusted text acts on a terminal. Colour only
repeats the words.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

from pytest_gpucluster.journal.journal import Journal
from pytest_gpucluster.journal.verdict import RUNNING
from pytest_gpucluster.judge.judged import JudgedMetric
from pytest_gpucluster.reports.facts import header_lines
from pytest_gpucluster.reports.summary import (
    IN_PROGRESS,
    NOT_RUN,
    Outline,
    Row,
    display_name,
    margin_ratio,
    outline,
    worst_first,
)
from pytest_gpucluster.reports.summary import RUNNING as ENDED_IN
from pytest_gpucluster.reports.tables import (
    LARGEST_MARGIN,
    culprit_text,
    headline_text,
    limit_text,
    margin_text,
    measured_pairs,
    metric_name,
    rank_name,
    value_text,
)
from pytest_gpucluster.text import Column, clean, columns, fitted_table, one_line, paragraph, plural, shortened, styled

LEAST_WIDTH = 80
"""Narrower terminals break the lines themselves."""
_MOST_NAMES = 6
_MOST_PROBLEMS = 20
_WHY_CHARACTERS = 400
_LONGEST_NAME = 100
_LONGEST_METRIC = 200
_DETAIL = " " * 8
_WORDS = {ENDED_IN: "BROKEN", IN_PROGRESS: "RUNNING"}
"""Outcome -> its word, where it is another one."""
_NAME = 1
"""The column whose text is broken where a line is too long."""


def _heads(name: str) -> list[Column]:
    titles = ("", name, "value", "limit", "margin", "rank")
    return [Column(title=title, is_right=title in ("value", "margin")) for title in titles]


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
    head = [] if verbosity < 0 else ["", *header_lines(journal, width=width)]
    blocks = [
        verdict_lines(overview, width=width, colour=colour) + head,
        *summary(journal, overview, width=width, verbosity=verbosity, colour=colour),
        report_lines(reports or ([("JUnit", junit)] if junit else [])),
    ]
    return "\n\n".join("\n".join(block) for block in blocks if block) + "\n"


def summary(journal: Journal, overview: Outline, *, width: int, verbosity: int, colour: bool) -> Iterator[list[str]]:
    """Yield the parts between the verdict and the paths of reports, each as lines."""
    quiet, verbose = verbosity < 0, verbosity > 0
    yield _criteria(journal, overview, width=width, quiet=quiet, verbose=verbose, colour=colour)
    if not quiet:
        yield _did_not_run(overview, width=width, verbose=verbose)
        yield _tightest(journal, overview, width=width)
    yield _problems(journal, width=width, colour=colour)


def verdict_lines(overview: Outline, *, width: int, colour: bool) -> list[str]:
    """Return verdict, exit code and reason."""
    reason = f": {overview.reason}" if overview.reason else ""
    lines = paragraph(f"{overview.title}, exit code {overview.exit}{reason}", width)
    style = "green" if overview.is_good else "yellow" if overview.word == RUNNING else "red"
    return [styled(line, style, colour=colour) for line in lines]


def report_lines(reports: Iterable[tuple[str, str]]) -> list[str]:
    """Return the paths of reports, never broken, so that they can be copied."""
    pairs = [(f"{clean(name)}:", clean(path)) for name, path in reports]
    wide = max((columns(name) for name, _ in pairs), default=0)
    return [f"{name.ljust(wide)} {path}" for name, path in pairs]


# ---- the table of criteria ---------------------------------------------------------------------------------------


def _criteria(
    journal: Journal, overview: Outline, *, width: int, quiet: bool, verbose: bool, colour: bool
) -> list[str]:
    ran = [row for row in overview.worst_first if row.outcome not in (NOT_RUN, "skipped")]
    rows = [row for row in ran if not row.is_good or _is_unjudged(row) or (not quiet and _has_content(row))]
    plain = len([row for row in ran if row.is_good and not _has_content(row)])
    if not rows:
        return []
    counts = ", ".join(f"{count} {outcome}" for outcome, count in overview.counts.items())
    lines = [] if quiet else [styled(f"Criteria: {counts}", "bold", colour=colour)]
    head, table = fitted_table(_heads("test"), [_cells(row) for row in rows], width, name=_NAME)
    if not quiet:
        lines.append(head)
    for row, row_lines in zip(rows, table, strict=True):
        lines += [_coloured(line, row, colour) for line in row_lines]
        if not row.is_good:
            why = culprit_text(row, journal, 10_000 if verbose else _WHY_CHARACTERS)
            lines += _detail(why, width) if why else []
        if row.result is None:
            continue
        if row.is_good and _is_unjudged(row):
            lines += _detail(one_line(f"not judged: {clean(row.result.unjudged)}", _WHY_CHARACTERS), width)
        if verbose:
            lines += _properties((*measured_pairs(row.result.measurements), *row.result.properties), width)
        elif not quiet and row.result.attempts > 1:
            attempts = [pair for pair in row.result.properties if pair[0].startswith("attempt ")]
            lines += _properties([(name, one_line(text, _WHY_CHARACTERS)) for name, text in attempts], width)
    if plain and not quiet:
        lines.append(f"and {plural(plain, 'test')} passed that are no criteria and measured nothing")
    return lines


def _detail(text: str, width: int) -> list[str]:
    return paragraph(text, width, first=_DETAIL, rest=_DETAIL)


def _properties(pairs: Iterable[tuple[str, str]], width: int) -> list[str]:
    wrapped = (paragraph(f"{name}: {value}", width, first=_DETAIL, rest=f"{_DETAIL}  ") for name, value in pairs)
    return list(itertools.chain(*wrapped))


def _has_content(row: Row) -> bool:
    return row.criterion is not None or row.headline is not None


def _is_unjudged(row: Row) -> bool:
    """Whether a criterion passed without being compared with a limit, which makes the run INCOMPLETE."""
    return row.criterion is not None and row.result is not None and bool(row.result.unjudged)


def _cells(row: Row) -> list[str]:
    judged, word = row.headline, _word(row).ljust(6)
    name = shortened(clean(display_name(row.name)), _LONGEST_NAME)
    if judged is None:
        return [word, name, "", "", "", ""]
    return [word, name, *_judged_cells(judged)]


def _word(row: Row) -> str:
    return _WORDS.get(row.outcome, row.outcome.upper())


def _judged_cells(judged: JudgedMetric) -> list[str]:
    value, limit = clean(value_text(judged)), clean(limit_text(judged, first_only=True))
    rank = "" if judged.worst_rank is None else str(judged.worst_rank)
    return [shortened(value, 20), shortened(limit, 26), margin_text(judged), rank]


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
        name = shortened(clean(metric_name(judged)), _LONGEST_METRIC)
        rows.append([judged.status.upper(), name, *_judged_cells(judged)])
    if not rows:
        return ""
    head, lines = fitted_table(_heads("metric"), rows, width, name=_NAME)
    hidden = len(measurements) - len(visible)
    more = [f"{plural(hidden, 'recorded value')} left out here"] if hidden else []
    return "\n".join([head, *itertools.chain(*lines), *more])


# ---- the rest ----------------------------------------------------------------------------------------------------


def _did_not_run(overview: Outline, *, width: int, verbose: bool) -> list[str]:
    by_reason: dict[tuple[int, str], list[str]] = {}
    for row in overview.did_not_run:
        why = row.why_not_run or "no reason given"
        reason = (2, why) if row.outcome == "skipped" else (1, f"not run: {why}")
        by_reason.setdefault((0, why) if row.is_gap else reason, []).append(clean(display_name(row.name)))
    for name in overview.absent:
        by_reason.setdefault((0, "required: this run has no test for it"), []).append(clean(name))
    if not by_reason:
        return []
    count, gaps = sum(map(len, by_reason.values())), sum(len(by_reason[key]) for key in by_reason if key[0] == 0)
    # Whether a test that was never reached applies here is unknown.
    least = "at least " if any(order == 1 for order, _ in by_reason) else ""
    lines = [f"Did not run: {count}{f', {least}{gaps} of them required' if gaps else ''}"]
    for (_, why), names in sorted(by_reason.items(), key=lambda entry: entry[0][0]):
        listed = names if verbose else names[:_MOST_NAMES]
        more = f", and {len(names) - len(listed)} more" if len(names) > len(listed) else ""
        lines += paragraph(f"{', '.join(listed)}{more}", width, first="  ", rest="  ")
        lines += paragraph(why, width, first="      ", rest="      ")
    return lines


def _tightest(journal: Journal, overview: Outline, *, width: int) -> list[str]:
    found = [(row, judged) for row, judged in overview.tightest() if (margin_ratio(judged) or 0.0) < LARGEST_MARGIN]
    if not found:
        return []
    lines = ["Tightest margins of passed values:"]
    for row, judged in found:
        rank = "" if judged.worst_rank is None else f", {rank_name(journal, judged.worst_rank)}"
        text = one_line(
            f"{display_name(row.name)}: {metric_name(judged)} {headline_text(judged)}{rank}", _WHY_CHARACTERS
        )
        lines += paragraph(text, width, first="  ", rest="    ")
    return lines


def _problems(journal: Journal, *, width: int, colour: bool) -> list[str]:
    messages = list(dict.fromkeys(problem.message for problem in journal.problems if problem.message != journal.reason))
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
