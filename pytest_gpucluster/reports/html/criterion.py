"""One test of a run in the page: a row, and the details below it.

The details have the advice found in failure texts, the search for culprits with its evidence, all measurements, for the
deciding ones the values of each rank, telemetry, and links to the test's files. Only existing files are linked, with
paths relative to the page.
"""

from __future__ import annotations

import itertools
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any
from urllib.parse import quote

from markupsafe import Markup

from pytest_gpucluster.journal.journal import JOURNAL_FILE, Journal
from pytest_gpucluster.journal.records import TestResult
from pytest_gpucluster.journal.run_directory import ARTIFACTS, artifacts_name
from pytest_gpucluster.judge.judged import JudgedMetric
from pytest_gpucluster.judge.misses import most_throttled
from pytest_gpucluster.reports import tables
from pytest_gpucluster.reports.charts.figures import artifact_folders, by_number, figures_of
from pytest_gpucluster.reports.charts.plots import limit_bar, rank_dots
from pytest_gpucluster.reports.failures import advice_in
from pytest_gpucluster.reports.findings import Isolation, baseline_of, isolation_of
from pytest_gpucluster.reports.markup import Table, html_table, line, passage, word
from pytest_gpucluster.reports.summary import Row, headline, worst_first
from pytest_gpucluster.text import duration_text, plural, some_of

_OF_THE_RUN = (JOURNAL_FILE, "junit.xml", "results.json", "metrics.prom", "exclude.txt")
_MOST_LINKS = 40
Link = tuple[str, str]
"""Name of a file, and its quoted relative path."""


@dataclass(frozen=True, kw_only=True)
class RunFiles:
    """The folder of a run and the folder of the page; both None if unknown."""

    folder: Path | None
    page_folder: Path | None

    def of_the_run(self) -> list[Link]:
        """Return the journal and the reports next to it."""
        paths = [] if self.folder is None else [self.folder / name for name in _OF_THE_RUN]
        return [self._link(path, path.name) for path in paths if path.is_file()]

    def of_test(self, nodeid: str) -> tuple[list[Link], str]:
        """Return the files of a test, and a remark about those not listed. Symbolic links are not followed."""
        found = []
        for place in artifact_folders(self.folder, nodeid):
            rank = "" if place.parent.name == ARTIFACTS else f"{place.parent.name}/"
            paths = itertools.islice(_files(place), _MOST_LINKS + 1)
            found += [self._link(path, f"{rank}{path.relative_to(place)}") for path in paths]
        more = f"and more in {ARTIFACTS}/{artifacts_name(nodeid)}" if len(found) > _MOST_LINKS else ""
        return found[:_MOST_LINKS], more

    def _link(self, path: Path, name: str) -> Link:
        base = self.page_folder or self.folder
        assert base is not None
        relative = os.path.relpath(os.path.abspath(path), os.path.abspath(base))
        # The dot keeps a first part with a colon from being taken for a scheme.
        return name, "./" + quote(Path(relative).as_posix().encode("utf-8", "surrogateescape"), safe="/")


def _files(place: Path) -> Iterator[Path]:
    if place.is_symlink():
        return
    for directory, names, files in os.walk(place, followlinks=False):
        names.sort(key=by_number)
        for name in sorted(files, key=by_number):
            path = Path(directory, name)
            if path.is_file() and not path.is_symlink():
                yield path


# ---- the search for culprits -------------------------------------------------------------------------

_MOST_EVIDENCE = 64
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
                "failed_probes": failed_probes + (": intermittent" if suspect.failed < suspect.probes else ""),
                "evidence": list(map(line, suspect.evidence[:_MOST_EVIDENCE])),
            }
        )
    parts = [
        f"{plural(len(found.rounds), 'round')}, {found.seconds:.1f} s",
        "" if found.reproduced or culprits else "the fault was not reproduced",
        f"ended early: {found.cut_short}" if found.cut_short else "",
    ]
    return {
        "result": line("; ".join(filter(None, parts))),
        "culprits": culprits,
        "cleared": _listed(found, found.cleared),
        "undecided": line(": ".join(filter(None, (_listed(found, found.undecided), found.why_undecided)))),
    }


def _listed(found: Isolation, units: Sequence[int]) -> str:
    return some_of(list(map(word, found.named(units))), _MOST_NAMES)


# ---- measurements ------------------------------------------------------------------------------------------------

EMBEDDED_RANKS = 64
"""Up to this number of ranks the page has every value; above, the median and the worst."""
_WORST = 8
_DETAILED = 6
_MEASUREMENTS = 200
_TELEMETRY = 24


def _shared_labels(result: TestResult) -> Mapping[str, str]:
    judged = result.measurements
    first = judged[0].labels if len(judged) > 1 else {}
    return {key: value for key, value in first.items() if all(each.labels.get(key) == value for each in judged)}


def _short_name(judged: JudgedMetric, shared: Mapping[str, str]) -> str:
    own = {key: value for key, value in judged.labels.items() if key not in shared}
    return word(tables.metric_name(replace(judged, labels=own)))


def _measurements_table(result: TestResult) -> Table | None:
    """Return one row per measurement, failures first; None if there is none.

    Labels that all of them share are in the caption only.
    """
    judged, shared, rows = worst_first(result.measurements), _shared_labels(result), []
    for each in judged:
        # The failure's own text is not repeated at each value.
        is_known = each.status == "failed" and each.reason in f"{result.message}\n{result.text}"
        inconclusive = "" if each.inconclusive in each.reason else f"inconclusive: {each.inconclusive}"
        of_median = each.ratio_to_median if len(each.values) > 1 else None
        rows.append(
            (
                _short_name(each, shared),
                "recorded only" if each.status == "recorded" else each.status,
                tables.value_text(each),
                tables.interval_text(each, each.interval).removeprefix(", 95 % interval "),
                tables.limit_text(each),
                tables.margin_text(each),
                "" if each.peak_ratio is None else tables.share(each.peak_ratio),
                "" if of_median is None else tables.quantity(100 * of_median, "%"),
                baseline_text(each),
                "" if each.worst_rank is None else str(each.worst_rank),
                tables.stopped_text(each),
                "; ".join(filter(None, ("" if is_known else each.reason, each.evidence, inconclusive))),
            )
        )
    labels = ", ".join(f"{key}={value}" for key, value in shared.items())
    head = ("Measurement", "Status", "Value", "95 % interval", "Limit", "Margin", "Of peak", "Lowest rank of median")
    return html_table(
        f"The worst rank's value of each{word(f'; all with {labels}') if labels else ''}",
        (*head, "Compared with the baseline", "Worst rank", "Sampling", "Remark"),
        rows,
        numbers=(*head[2:4], *head[5:]),
        tones=[each.status if each.status in ("failed", "error") else "" for each in judged],
        most=_MEASUREMENTS,
    )


def baseline_text(judged: JudgedMetric) -> str:
    """Return "regressed: 781 TFLOPS before (-5.2 %)" for the rank with the largest regression."""
    found = baseline_of(judged.baseline)
    if found is None:
        return ""
    before = found.old.value if found.old is not None else None
    parts = [f"{tables.quantity(before, judged.unit)} before"] if tables.is_number(before) else []
    parts += [f"({tables.percent(found.change_ratio)})"] if tables.is_number(found.change_ratio) else []
    parts += [f"on rank {found.rank}"] if found.rank not in (None, judged.worst_rank) else []
    kind = found.kind or "unknown"
    return line("; ".join(filter(None, (f"{kind}: {' '.join(parts)}" if parts else kind, found.why))))


def _by_rank(result: TestResult, journal: Journal) -> list[dict[str, Any]]:
    chosen = [each for each in result.measurements if each.status in ("failed", "error")]
    deciding = headline(result.measurements)
    found = []
    for judged in (chosen or ([] if deciding is None else [deciding]))[:_DETAILED]:
        limit = ""
        if judged.limit is not None:
            source = f" ({judged.limit.source})" if judged.limit.source else ""
            limit = line(f"{tables.limit_text(judged)}, from {judged.limit.origin or 'an unknown place'}{source}")
        values = {"chart": rank_dots(judged, journal), "limit_from": limit, "table": _values(judged, journal)}
        found += [{"name": word(tables.metric_name(judged)), **values}] if len(judged.values) > 1 else []
    return found


def _values(judged: JudgedMetric, journal: Journal) -> Table | None:
    worst, rows = tables.worst_ranks_first(judged), []
    caption, left_out = "Values, worst rank first", ""
    if len(worst) > EMBEDDED_RANKS:
        middle = median([value for value in judged.values.values() if math.isfinite(value)] or [math.nan])
        rows = [("median", "", "", tables.quantity(middle, judged.unit), "", "", "")]
        caption = f"Median of {len(worst)} ranks, and the {_WORST} worst"
        left_out = f"the journal has the values of all {len(worst)} ranks"
        worst = worst[:_WORST]
    for rank in worst:
        value, interval = judged.values[rank], judged.intervals.get(rank)
        distance = tables.margin(judged, value, interval)
        cells = (
            tables.quantity(value, judged.unit, compared_with=tables.nearest_limit(judged, value)),
            tables.interval_text(judged, interval).removeprefix(", 95 % interval "),
            "" if distance is None else tables.percent(distance),
            tables.clock_text(judged.telemetry.get(rank, {})),
        )
        rows.append((*_place_cells(rank, journal), *cells))
    head = ("Rank", "Host", "GPU", "Value", "95 % interval", "Margin", "Clock and throttle")
    return html_table(caption, head, rows, numbers=head[3:6], left_out=left_out)


def _place_cells(rank: int, journal: Journal) -> tuple[str, str, str]:
    """Return rank, host and GPU, such as ("11", "gpu-02", "3 GPU-1f2e3d4c"), as far as they are known."""
    place = journal.place(rank)
    gpu = place.gpu if place is not None else None
    name = f"{gpu.get('index', '?')} {gpu.get('uuid', '')[:12]}".rstrip() if gpu else ""
    return str(rank), word(place.host) if place is not None else "", word(name)


def _telemetry_table(result: TestResult, journal: Journal) -> Table | None:
    """Return the telemetry of the worst rank in each measurement, then of the ranks in the whole test.

    Culprits come first, then the most throttled rank; of many ranks, or of a test that passed, only these. None if
    nothing was read.
    """
    rows: dict[tuple[int, str], tuple[str, ...]] = {}
    shared = _shared_labels(result)
    for judged in worst_first(result.measurements):
        rank = judged.worst_rank
        text = tables.telemetry_text(judged.telemetry.get(rank, {})) if rank is not None else ""
        if text and rank is not None:  # values of the same window share their telemetry, which is listed once
            rows.setdefault((rank, text), (*_place_cells(rank, journal), _short_name(judged, shared), text))
    listed, throttled = list(rows.values()), most_throttled(result.telemetry)
    is_small = result.outcome != "passed" and len(result.telemetry) <= EMBEDDED_RANKS
    first = [*result.culprits, *([] if throttled is None else [throttled])]
    for rank in dict.fromkeys((*first, *(sorted(result.telemetry) if is_small else ()))):
        if result.telemetry.get(rank):
            listed.append(
                (*_place_cells(rank, journal), "the whole test", tables.telemetry_text(result.telemetry[rank]))
            )
    left_out = "" if is_small or not listed else f"the journal has the telemetry of all {journal.run.world_size} ranks"
    head = ("Rank", "Host", "GPU", "During", "Median (lowest to highest)")
    return html_table("Telemetry of the GPUs", head, listed, most=_TELEMETRY, left_out=left_out)


# ---- the row and its details -------------------------------------------------------------------------------------

_SECTIONS = 8
_SECTION_CHARACTERS = 4096


def _headline(row: Row, judged: JudgedMetric, journal: Journal) -> dict[str, Any]:
    """Return a test's measurement and its limit; without a bar if the test failed for another reason."""
    explains, rank = row.outcome == "passed" or judged.status in ("failed", "error"), judged.worst_rank
    return {
        "metric": word(tables.metric_name(judged)),
        "value": tables.value_text(judged),
        "limit": tables.limit_text(judged),
        "margin": tables.margin_text(judged),
        "margin_key": judged.margin,
        "rank": "" if rank is None else word(tables.rank_name(journal, rank, is_short=True)),
        "bar": limit_bar(judged) if explains else Markup(""),
    }


def row_values(row: Row, number: int, journal: Journal) -> dict[str, Any]:
    """Return the row of a test for the template; ``number`` is its place in the page, from 1."""
    result, why = row.result, row.why
    if not why and result is not None:  # a test that passed when run again, or that no limit judged
        remarks = [f"not judged: {result.unjudged}"] if result.unjudged else []
        attempts = (pair for pair in result.properties if re.fullmatch("attempt [0-9]+", pair[0]))
        why = "; ".join([*remarks, *(f"{name}: {end}" for name, end in attempts if not end.endswith(": passed"))])
    return {
        "number": number,
        "outcome": row.outcome,
        "name": word(row.name),
        "criterion": word(row.criterion or ""),
        "why": line(why),
        "headline": None if row.headline is None else _headline(row, row.headline, journal),
        "seconds": "" if result is None else duration_text(result.duration_seconds),
        "seconds_key": -1.0 if result is None else result.duration_seconds,
        "attempts": 1 if result is None else result.attempts,
    }


def details_values(row: Row, journal: Journal, *, files: RunFiles) -> dict[str, Any] | None:
    """Return the details of a test for the template; None if the journal has no result of it."""
    result = row.result
    if result is None:
        return None
    reports = tables.rank_reports(result, journal)
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
        "spent": tables.time_text(result),
        # The row has one line of it already.
        "message": "" if passed or result.message.strip() == row.why else passage(result.message, 4096),
        "text": "" if result.text.strip() == row.why else passage(result.text),
        "advice": [
            (line(found), line(remedy))
            for found, remedy in advice_in((result.message, result.text, *(each for _, each in result.properties)))
        ],
        "search": search_values(isolation_of(result.isolation)),
        "measurements": _measurements_table(result),
        "ranks": None if is_redundant else ranks,
        "by_rank": _by_rank(result, journal),
        "figures": figures_of(result, files.folder),
        "telemetry": _telemetry_table(result, journal),
        "properties": [(word(name), line(value)) for name, value in result.properties],
        "output": [(word(title), passage(text, _SECTION_CHARACTERS)) for title, text in sections],
        "links": links,
        "more_links": more_links,
    }
