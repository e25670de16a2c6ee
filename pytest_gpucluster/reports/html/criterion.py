"""One test of a run in the page: a row, and the details below it.

The details have the advice found in failure texts, the search for culprits with its evidence, telemetry,
and links to the test's files. Checks of GPUs and nodes write a line for each finding (``metrics.finding``); other
failures end with "what to do: ...". Telemetry has the form of ``node.health.telemetry.summary``, possibly of another
version. Only existing files are linked, with paths relative to the page.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from markupsafe import Markup

from pytest_gpucluster.journal.fields import JudgedMetric
from pytest_gpucluster.journal.journal import JOURNAL_FILE, Journal
from pytest_gpucluster.journal.records import TestResult
from pytest_gpucluster.journal.run_directory import ARTIFACTS, artifacts_name
from pytest_gpucluster.judge.misses import most_throttled
from pytest_gpucluster.reports.charts.figures import artifact_folders, by_number, figures_of
from pytest_gpucluster.reports.charts.plots import limit_bar
from pytest_gpucluster.reports.criterion_text import margin_text, value_text
from pytest_gpucluster.reports.findings import Isolation, Probe, isolation_of
from pytest_gpucluster.reports.html.measured import (
    EMBEDDED_RANKS,
    by_rank,
    measurements_table,
    place_cells,
    shared_labels,
    short_name,
)
from pytest_gpucluster.reports.markup import Table, html_table, line, passage, word
from pytest_gpucluster.reports.summary import Row, duration, worst_first
from pytest_gpucluster.reports.tables import (
    limit_text,
    metric_name,
    rank_name,
    rank_reports,
    telemetry_figure,
    telemetry_text,
    time_text,
)
from pytest_gpucluster.text import plural, some_of

_OF_THE_RUN = (JOURNAL_FILE, "junit.xml", "results.json", "metrics.prom", "exclude.txt")
_MOST_LINKS = 40
_MOST_VISITED = 2000


@dataclass(frozen=True, kw_only=True)
class Link:
    """A link to a file. ``href`` is a quoted relative path."""

    name: str
    href: str


@dataclass(frozen=True, kw_only=True)
class RunFiles:
    """The folder of a run and the folder of the page; both None if unknown."""

    folder: Path | None
    page_folder: Path | None

    @property
    def journal(self) -> Link | None:
        """Return the journal, which has every sample."""
        return next((link for link in self.of_the_run() if link.name == JOURNAL_FILE), None)

    def of_the_run(self) -> tuple[Link, ...]:
        """Return the journal and the reports next to it."""
        if self.folder is None:
            return ()
        paths = (self.folder / name for name in _OF_THE_RUN)
        return tuple(self._link(path, path.name) for path in paths if path.is_file())

    def of_test(self, nodeid: str) -> tuple[tuple[Link, ...], str]:
        """Return the files of a test, and a remark about those not listed. Symbolic links are not followed."""
        if self.folder is None:
            return (), ""
        found: list[tuple[Path, str]] = []
        for place in artifact_folders(self.folder, nodeid):
            rank = "" if place.parent.name == ARTIFACTS else f"{place.parent.name}/"
            for path in _files(place):
                found.append((path, f"{rank}{path.relative_to(place)}"))
                if len(found) > _MOST_VISITED:
                    break
        links = tuple(self._link(path, label) for path, label in found[:_MOST_LINKS])
        more = len(found) - len(links)
        amount = "more than " if len(found) > _MOST_VISITED else ""
        return links, f"and {amount}{more} more in {ARTIFACTS}/{artifacts_name(nodeid)}" if more else ""

    def _link(self, path: Path, name: str) -> Link:
        base = self.page_folder or self.folder
        assert base is not None
        relative = os.path.relpath(os.path.abspath(path), os.path.abspath(base))
        # The dot keeps a first part with a colon from being taken for a scheme.
        href = "./" + quote(Path(relative).as_posix().encode("utf-8", "surrogateescape"), safe="/")
        return Link(name=name, href=href)


def _files(place: Path) -> Iterator[Path]:
    if place.is_symlink():
        return
    for directory, names, files in os.walk(place, followlinks=False):
        names.sort(key=by_number)
        for name in sorted(files, key=by_number):
            path = Path(directory, name)
            if path.is_file() and not path.is_symlink():
                yield path


_PROBES = 64
_MOST_NAMES = 16


def search_values(found: Isolation | None) -> dict[str, Any] | None:
    """Return the search for culprits for the template."""
    if found is None:
        return None
    culprits = []
    for suspect in found.culprits:
        names = " and ".join(map(word, found.named(suspect.units)))
        failed_probes = f"failed {suspect.failed} of {suspect.probes} probes"
        culprits.append(
            {
                "name": f"the link between {names}" if suspect.kind == "link" else names,
                "failed_probes": failed_probes + (": intermittent" if suspect.intermittent else ""),
                "evidence": list(map(line, suspect.evidence[:_PROBES])),
            }
        )
    probes = [
        (str(number), _listed(found, probe.members), _probe_result(probe))
        for number, outcomes in enumerate(found.rounds, start=1)
        for probe in outcomes
    ]
    parts = [
        f"{plural(len(found.rounds), 'round')}, {plural(len(probes), 'probe')}, {found.seconds:.1f} s",
        "" if found.reproduced or culprits else "the fault was not reproduced",
        f"ended early: {found.cut_short}" if found.cut_short else "",
    ]
    return {
        "result": line("; ".join(filter(None, parts))),
        "culprits": culprits,
        "cleared": _listed(found, found.cleared),
        "undecided": line(": ".join(filter(None, (_listed(found, found.undecided), found.why_undecided)))),
        "probes": html_table("Probes", ("Round", "Group", "Result"), probes, most=_PROBES),
    }


def _listed(found: Isolation, units: Sequence[int]) -> str:
    return some_of(list(map(word, found.named(units))), _MOST_NAMES)


def _probe_result(probe: Probe) -> str:
    if probe.wrong or probe.failure:
        return "; ".join(filter(None, (f"wrong data: {probe.wrong}" if probe.wrong else "", probe.failure)))
    try:
        return f"{float(probe.busbw):.4g} GB/s" if probe.busbw else "no value"
    except ValueError:
        return probe.busbw


_MOST = 64
_FINDING = re.compile(
    r"(?P<where>.{1,400}?): (?P<code>[a-z][\w.-]{0,60}) \((?P<kind>hardware|environment|note)\): (?P<found>.+?)"
    r"; allowed: (?P<allowed>.+?); what to do: (?P<remedy>.+)"
)
_REMEDY = re.compile(r"what to do: *(?P<remedy>.+)")


@dataclass(frozen=True, kw_only=True)
class Advice:
    """A finding and its remedy. All but ``remedy`` may be empty."""

    where: str = ""
    code: str = ""
    kind: str = ""
    found: str = ""
    allowed: str = ""
    remedy: str


def advice_in(texts: Iterable[str]) -> tuple[Advice, ...]:
    """Return the advice in some texts, each once, in their order."""
    found: dict[Advice, None] = {}
    for text in texts:
        for raw in text.splitlines():
            stripped = raw.strip()
            # A line that quotes source code or a pytest marker is no advice.
            if stripped.startswith((">", "raise ", "E  ")):
                stripped = stripped.lstrip("E ") if stripped.startswith("E  ") else ""
            match = _FINDING.fullmatch(stripped) or _REMEDY.fullmatch(stripped)
            if match is not None and len(found) < _MOST:
                found.setdefault(Advice(**{name: line(text) for name, text in match.groupdict().items()}))
    return tuple(found)


_FIGURES = {
    "sm_clock_mhz": "SM clock, MHz",
    "memory_clock_mhz": "Memory clock, MHz",
    "power_watts": "Power, W",
    "temperature_celsius": "Temperature, degC",
    "utilization_percent": "Utilisation, %",
}
_ROWS = 24


def telemetry_table(result: TestResult, journal: Journal) -> Table | None:
    """Return the telemetry of the worst rank in each measurement, then of the ranks in the whole test.

    Culprits come first, then the most throttled rank; of many ranks only these. None if nothing was read.
    """
    rows: dict[tuple[str, ...], tuple[str, ...]] = {}
    shared = shared_labels(result)
    for judged in worst_first(result.measurements):
        rank = judged.worst_rank
        telemetry = judged.telemetry.get(rank) if rank is not None else None
        if telemetry and rank is not None:
            cells = _cells(telemetry)
            # Values of the same window share their telemetry, which is listed once.
            rows.setdefault((str(rank), *cells), (*place_cells(rank, journal), short_name(judged, shared), *cells))
    listed = list(rows.values())
    throttled = most_throttled(result.telemetry)
    first = [*result.culprits, *([] if throttled is None else [throttled])]
    is_small = len(result.telemetry) <= EMBEDDED_RANKS
    for rank in dict.fromkeys((*first, *(sorted(result.telemetry) if is_small else ()))):
        if result.telemetry.get(rank):
            listed.append((*place_cells(rank, journal), "the whole test", *_cells(result.telemetry[rank])))
    numbers = tuple(_FIGURES.values())
    head = ("Rank", "Host", "GPU", "During", *numbers, "Throttle, counters and notes")
    left_out = "" if is_small else f"the journal has the telemetry of all {len(result.telemetry)} ranks"
    caption = "Telemetry of the GPUs: median (lowest to highest)"
    return html_table(caption, head, listed, numbers=numbers, most=_ROWS, left_out=left_out)


def _cells(telemetry: Mapping[str, Any]) -> tuple[str, ...]:
    rest = {key: value for key, value in telemetry.items() if key not in _FIGURES}
    figures = ("".join(telemetry_figure(key, telemetry)) if key in telemetry else "" for key in _FIGURES)
    return (*figures, telemetry_text(rest))


_ATTEMPT = re.compile("attempt [0-9]+")
_COUNTS = ", which counts: "
_SECTIONS = 8
_SECTION_CHARACTERS = 4096


def headline_values(judged: JudgedMetric, journal: Journal, *, outcome: str = "passed") -> dict[str, Any]:
    """Return a measurement and its limit for a row; without a bar if the test failed for another reason."""
    explains = outcome == "passed" or judged.status in ("failed", "error")
    rank = judged.worst_rank
    return {
        "metric": word(metric_name(judged)),
        "value": value_text(judged, with_unit=True),
        "limit": limit_text(judged),
        "margin": margin_text(judged),
        "margin_key": judged.margin,
        "rank": "" if rank is None else word(rank_name(journal, rank, is_short=True)),
        "bar": limit_bar(judged) if explains else Markup(""),
    }


def row_values(row: Row, number: int, journal: Journal) -> dict[str, Any]:
    """Return the row of a test for the template; ``number`` is its place in the page, from 1."""
    result = row.result
    return {
        "number": number,
        "outcome": row.outcome,
        "name": word(row.name),
        "criterion": word(row.criterion or ""),
        "why": line(row.why or _remark(result)),
        "headline": None if row.headline is None else headline_values(row.headline, journal, outcome=row.outcome),
        "seconds": "" if result is None else duration(result.duration_seconds),
        "seconds_key": -1.0 if result is None else result.duration_seconds,
        "attempts": 1 if result is None else result.attempts,
    }


def _remark(result: TestResult | None) -> str:
    """Return the remark at a passed test: nothing was judged, or it passed only when run again."""
    if result is None:
        return ""
    remarks = [f"not judged: {result.unjudged}"] if result.unjudged else []
    # The names and endings that ``gpucluster runs merge`` writes.
    remarks += [
        f"{name}: {value}"
        for name, value in result.properties
        if _ATTEMPT.fullmatch(name) and _COUNTS not in value and not value.endswith(": passed")
    ]
    return "; ".join(remarks)


def details_values(row: Row, journal: Journal, *, files: RunFiles) -> dict[str, Any] | None:
    """Return the details of a test for the template; None if the journal has no result of it."""
    result = row.result
    if result is None:
        return None
    reports = rank_reports(result, journal)
    links, more_links = files.of_test(result.nodeid)
    # The ranks of a skipped test all report the reason that the row has already.
    is_redundant = {each.message for each in reports} == {row.why} and result.text.strip() == row.why
    passed = result.outcome == "passed"
    ranks = html_table(
        "What each rank reported",
        ("Rank", "Outcome", "Message"),
        [(each.who, f"{each.outcome}{', culprit' if each.is_culprit else ''}", each.message) for each in reports],
        tones=[each.outcome if each.outcome in ("failed", "error") else "" for each in reports],
        most=32,
    )
    sections = () if passed else result.sections[:_SECTIONS]
    return {
        "place": line(f"{result.nodeid}{f' (line {result.line})' if result.line is not None else ''}"),
        "spent": time_text(result),
        # The row has one line of it already.
        "message": "" if passed or result.message.strip() == row.why else passage(result.message, 4096),
        "text": "" if result.text.strip() == row.why else passage(result.text),
        "advice": advice_in((result.message, result.text, *(value for _, value in result.properties))),
        "search": search_values(isolation_of(result.isolation)),
        "measurements": measurements_table(result),
        "journal": files.journal if result.measurements else None,
        "ranks": None if is_redundant else ranks,
        "by_rank": by_rank(result, journal),
        "figures": figures_of(result, files.folder),
        "telemetry": telemetry_table(result, journal),
        "properties": [(word(name), line(value)) for name, value in result.properties],
        "output": [(word(title), passage(text, _SECTION_CHARACTERS)) for title, text in sections],
        "links": links,
        "more_links": more_links,
    }
