"""One test of a run as a page shows it: a row, and what opens below it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup

from pytest_gpucluster.journal import Journal
from pytest_gpucluster.journal_lines import RankPlace, TestResult
from pytest_gpucluster.journal_measurements import JudgedMetric
from pytest_gpucluster.reports.charts.bars import limit_bar
from pytest_gpucluster.reports.charts.figure import Figure
from pytest_gpucluster.reports.charts.figures import figures_of
from pytest_gpucluster.reports.html.advice import Advice, advice_in
from pytest_gpucluster.reports.html.files import Link, RunFiles
from pytest_gpucluster.reports.html.isolated import Search, search_of
from pytest_gpucluster.reports.html.measured import ByRank, by_rank, margin_text, measurements_table, value_text, who
from pytest_gpucluster.reports.html.readable import line, passage, word
from pytest_gpucluster.reports.html.table import Table, table
from pytest_gpucluster.reports.html.telemetry import telemetry_table
from pytest_gpucluster.reports.outline import Row
from pytest_gpucluster.reports.tables import limit_text, metric_name, ranks_said
from pytest_gpucluster.reports.time_table import time_text
from pytest_gpucluster.reports.timing import duration

_ATTEMPT = re.compile("attempt [0-9]+")
_COUNTS = ", which counts: "
_SECTIONS = 8
_SECTION_CHARACTERS = 4096


@dataclass(frozen=True, kw_only=True)
class Headline:
    """The value that decides, beside its limit."""

    metric: str
    value: str
    limit: str
    margin: str
    margin_key: float | None
    who: str
    bar: Markup


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What is seen of a test before it is opened."""

    number: int
    """From 1, in the order of the page."""
    outcome: str
    name: str
    criterion: str
    nodeid: str
    why: str
    headline: Headline | None
    seconds: str
    seconds_key: float
    attempts: int


@dataclass(frozen=True, kw_only=True)
class Details:
    """What opens below a test's row."""

    place: str
    spent: str
    """Where its seconds went; empty where that is not on record."""
    message: str
    text: str
    advice: tuple[Advice, ...]
    search: Search | None
    measurements: Table | None
    journal: Link | None
    """What holds all samples of the measurements; None where it is not beside the page."""
    ranks: Table | None
    by_rank: tuple[ByRank, ...]
    figures: tuple[Figure, ...]
    telemetry: Table | None
    properties: tuple[tuple[str, str], ...]
    output: tuple[tuple[str, str], ...]
    links: tuple[Link, ...]
    more_links: str


def headline_of(judged: JudgedMetric, places: dict[int, RankPlace], *, outcome: str = "passed") -> Headline:
    """Return a measurement beside its limit. In the row of a test that failed by something else it has no bar."""
    explains = outcome == "passed" or judged.status in ("failed", "error")
    return Headline(
        metric=word(metric_name(judged)),
        value=value_text(judged),
        limit=limit_text(judged),
        margin=margin_text(judged),
        margin_key=judged.margin,
        who=who(judged.worst_rank, places),
        bar=limit_bar(judged) if explains else Markup(""),
    )


def summary(row: Row, number: int, places: dict[int, RankPlace]) -> Summary:
    """Return what is seen of a test before it is opened."""
    result = row.result
    return Summary(
        number=number,
        outcome=row.outcome,
        name=word(row.name),
        criterion=word(row.criterion or ""),
        nodeid=word(row.nodeid),
        why=line(row.why or _reservation(result)),
        headline=None if row.headline is None else headline_of(row.headline, places, outcome=row.outcome),
        seconds="" if result is None else duration(result.duration_seconds),
        seconds_key=-1.0 if result is None else result.duration_seconds,
        attempts=1 if result is None else result.attempts,
    )


def _reservation(result: TestResult | None) -> str:
    """Return what a test that passed does not show by itself: nothing was judged, or it passed only when run again."""
    if result is None:
        return ""
    told = [f"not judged: {result.unjudged}"] if result.unjudged else []
    # As ``gpucluster merge`` names and ends them.
    told += [
        f"{name}: {value}"
        for name, value in result.properties
        if _ATTEMPT.fullmatch(name) and _COUNTS not in value and not value.endswith(": passed")
    ]
    return "; ".join(told)


def details(
    row: Row, journal: Journal, places: dict[int, RankPlace], *, files: RunFiles, folder: Path | None
) -> Details | None:
    """Return what opens below a test's row; None where the journal holds nothing more of it."""
    result = row.result
    if result is None:
        return None
    said = ranks_said(result, journal)
    links, more_links = files.of_test(result.nodeid)
    # Of a skipped test every rank says the same, and the row has it already.
    is_said = {each.message for each in said} == {row.why} and result.text.strip() == row.why
    texts = (result.message, result.text, *(value for _, value in result.properties))
    passed = result.outcome == "passed"
    sections = () if passed else result.sections
    return Details(
        place=line(f"{result.nodeid}{f' (line {result.line})' if result.line is not None else ''}"),
        spent=time_text(result),
        # One line of it stands in the row already.
        message="" if passed or result.message.strip() == row.why else passage(result.message, 4096),
        text="" if result.text.strip() == row.why else passage(result.text),
        advice=advice_in(texts),
        search=search_of(result.isolation),
        measurements=measurements_table(result),
        journal=files.journal if result.measurements else None,
        ranks=table(
            "What each rank reported",
            ("Rank", "Outcome", "Message"),
            [(each.who, f"{each.outcome}{', culprit' if each.is_culprit else ''}", each.message) for each in said],
            tones=[each.outcome if each.outcome in ("failed", "error") else "" for each in said],
            most=32,
        )
        if said and not is_said
        else None,
        by_rank=by_rank(result, journal, places),
        figures=figures_of(result, folder),
        telemetry=telemetry_table(result, places),
        properties=tuple((word(name), line(value)) for name, value in result.properties),
        output=tuple((word(title), passage(text, _SECTION_CHARACTERS)) for title, text in sections[:_SECTIONS]),
        links=links,
        more_links=more_links,
    )
