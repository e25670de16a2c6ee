"""``report.html``: a run as one self-contained page, readable without a network and without scripts.

What is foreign (names of hosts, failure texts, labels, properties) is escaped by Jinja2, and what is still in the page
by mistake does not run: the page's policy allows its own script alone, by its hash, and loads nothing from anywhere.
Sources: Content Security Policy Level 3 (https://www.w3.org/TR/CSP3/), and Jinja2's autoescape
(https://jinja.palletsprojects.com/en/stable/api/#autoescaping).
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from pytest_gpucluster.journal.journal import Journal
from pytest_gpucluster.journal.records import RankPlace
from pytest_gpucluster.reports.html import facts
from pytest_gpucluster.reports.html.criterion import RunFiles, details, headline_of, summary
from pytest_gpucluster.reports.html.facts import inventory
from pytest_gpucluster.reports.markup import line, passage, readable, word
from pytest_gpucluster.reports.summary import NOT_RUN, RUNNING, Outline, Row, outline

DETAILS_BYTES = 1_100_000
"""What opens below the rows is at most so large together. With the rest a page stays under 2 MB at 1,024 ranks."""
DETAIL_BYTES = 250_000
"""And of one test so large."""
_ROWS = 1500
_PROBLEMS = 50
_GOOD, _NEUTRAL, _BAD, _BROKEN, _INCOMPLETE = "good", "neutral", "bad", "broken", "incomplete"
_TONES = {
    "REJECTED": _BAD,
    "BROKEN": _BROKEN,
    "INCOMPLETE": _INCOMPLETE,
    "PASSED WITH DEVIATIONS": _INCOMPLETE,
    "RUNNING": _NEUTRAL,
}
_WORDS = {"not run": "not run", "running": "running when the run ended"}
# Only this verdict says that a cluster is accepted: nothing else is shown in its colour.
_ACCEPTED = "ACCEPTED"
_TIGHTEST = 8


@dataclass(frozen=True, kw_only=True)
class _Opened:
    """What opens below a row, as HTML; ``left_out`` says why it is not there."""

    body: Markup
    left_out: str


def render(journal: Journal, *, folder: Path | None = None, page_folder: Path | None = None) -> str:
    """Return a run as one HTML document.

    Args:
        journal: of the run. Samples are not needed (``journal.read(path, keep_samples=False)``).
        folder: of the run, for figures that are made from its artifacts and for links to them.
        page_folder: where the page will lie, for the links to be right from there; by default the run's own folder.
    """
    told = outline(journal)
    places = {place.rank: place for place in journal.cluster.ranks} if journal.cluster is not None else {}
    files = RunFiles(folder=folder, page_folder=page_folder)
    environment = _environment()
    rows = told.worst_first
    opened = _opened(environment, rows, journal, places, files=files, folder=folder)
    where, variables = facts.environment(journal)
    document = environment.get_template("page.html.j2").render(
        style=_asset(environment, "page.css"),
        script=_asset(environment, "page.js"),
        style_hash=_digest(_asset(environment, "page.css")),
        script_hash=_digest(_asset(environment, "page.js")),
        outline=told,
        tone=_tone(told),
        heading=told.word,
        reason=line(told.reason),
        differences=[line(each) for each in journal.run.merged_despite],
        merged=facts.merged_table(journal),
        is_selection=journal.run.selection,
        counts=tuple(told.counts.items()),
        words=_WORDS,
        run_facts=facts.run_facts(journal),
        problems=_problems(journal),
        rows=[
            (summary(row, number, places), below)
            for number, (row, below) in enumerate(zip(rows[:_ROWS], opened, strict=True), start=1)
        ],
        rows_left_out=max(0, len(rows) - _ROWS),
        did_not_run=[_not_run(row) for row in told.did_not_run[:_ROWS]],
        not_run=NOT_RUN,
        running=RUNNING,
        tightest=[(word(row.name), headline_of(judged, places)) for row, judged in told.tightest(_TIGHTEST)],
        inventory=inventory(journal),
        limits=facts.limits_table(journal),
        limit_files=facts.limit_files(journal),
        workload=facts.workload_table(journal),
        options=facts.options_table(journal),
        environment=where,
        variables=variables,
        versions=facts.versions(journal),
        properties=facts.properties(journal),
        merged_runs=facts.merged_runs(journal),
        links=files.of_the_run(),
        run_id=line(journal.run.run_id),
        plugin_version=word(journal.run.plugin_version),
    )
    # The whole of it, charts too: what stands for a character that nobody sees means nothing in HTML.
    return readable(document)


def _not_run(row: Row) -> tuple[str, str, str, str]:
    return word(row.name), word(row.criterion or ""), row.outcome, line(row.why_not_run)


def _tone(told: Outline) -> str:
    """Return how a verdict looks: like an acceptance only if it is one."""
    if told.word == _ACCEPTED and told.exit == 0 and not told.rehearsal:
        return _GOOD
    if told.exit == 0:
        return _NEUTRAL
    return _TONES.get(told.word, _BROKEN)


def _opened(
    environment: Environment,
    rows: Sequence[Row],
    journal: Journal,
    places: dict[int, RankPlace],
    *,
    files: RunFiles,
    folder: Path | None,
) -> list[_Opened]:
    """Return what opens below each row, failures first, until the page is as large as it may be."""
    template = environment.get_template("details.html.j2")
    left = DETAILS_BYTES
    opened = []
    for number, row in enumerate(rows[:_ROWS], start=1):
        told = details(row, journal, places, files=files, folder=folder) if left > 0 else None
        if told is None:
            full = left <= 0 and row.result is not None
            opened.append(_Opened(body=Markup(), left_out=_full("page") if full else ""))
            continue
        body = Markup(template.render(details=told, number=number, outcome=row.outcome))
        size = len(body.encode("utf-8", "backslashreplace"))
        if size > min(left, DETAIL_BYTES):
            # The next may be small enough: each is taken or left as a whole.
            opened.append(_Opened(body=Markup(), left_out=_full("page" if size > left else "test")))
            continue
        left -= size
        opened.append(_Opened(body=body, left_out=""))
    return opened


def _full(what: str) -> str:
    why = "this page would become too large" if what == "page" else "they are too many for a page"
    return f"The details are left out here, because {why}; the journal has them all."


def _problems(journal: Journal) -> list[tuple[str, str, str, str]]:
    """Return what went wrong outside of any test: (name, outcome, message, text)."""
    told = [
        (word(problem.name), problem.outcome, line(problem.message), passage(problem.text, 8192))
        for problem in journal.problems[:_PROBLEMS]
    ]
    if len(journal.problems) > _PROBLEMS:
        told.append((f"{len(journal.problems) - _PROBLEMS} more problems", "error", "the journal has them all", ""))
    if journal.silence is not None:
        told.append(("silence", "error", line(journal.silence.message), passage(journal.silence.text, 8192)))
    if journal.end is None and not journal.is_live:
        told.append(("no end", "error", f"the journal has no closing line: the run ended {line(journal.where)}", ""))
    if journal.cut:
        told.append(("cut off", "error", "the last line of the journal was cut off, and is not in this report", ""))
    return told


@lru_cache(maxsize=1)
def _environment() -> Environment:
    return Environment(
        loader=PackageLoader("pytest_gpucluster.reports.html"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _asset(environment: Environment, name: str) -> Markup:
    """Return a file of this package as it is, to stand between its tags."""
    assert environment.loader is not None
    return Markup(environment.loader.get_source(environment, name)[0])


def _digest(content: str) -> str:
    """Return the hash by which a policy allows what stands between two tags.

    Source: CSP3, 6.7.3.3 (https://www.w3.org/TR/CSP3/#match-element-to-source-list).
    """
    return f"sha256-{base64.b64encode(hashlib.sha256(content.encode('utf-8')).digest()).decode('ascii')}"
