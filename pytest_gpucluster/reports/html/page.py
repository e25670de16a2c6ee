"""``report.html``: a run as one self-contained page, readable without a network and without scripts.

Untrusted text (names of hosts, failure texts, labels, properties) is escaped by Jinja2. The page's policy allows only
its own script, by its hash, and loads nothing.
Sources: Content Security Policy Level 3 (https://www.w3.org/TR/CSP3/), and Jinja2's autoescape
(https://jinja.palletsprojects.com/en/stable/api/#autoescaping).
"""

from __future__ import annotations

import base64
import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from pytest_gpucluster.journal.journal import Journal
from pytest_gpucluster.journal.records import KIND_NAMES, RankPlace
from pytest_gpucluster.journal.verdict import marked
from pytest_gpucluster.reports import failures
from pytest_gpucluster.reports.facts import facts, run_properties
from pytest_gpucluster.reports.html.criterion import RunFiles, details_values, row_values
from pytest_gpucluster.reports.html.nodes import MOST_NODES, course, node_values, spread
from pytest_gpucluster.reports.markup import Table, html_table, line, passage, readable, word
from pytest_gpucluster.reports.summary import NOT_RUN, RUNNING, Outline, Row, display_name, outline, run_seconds
from pytest_gpucluster.reports.tables import limit_text
from pytest_gpucluster.text import duration_text

DETAILS_BYTES = 1_100_000
"""Limit for all details together, so that a page stays under 2 MB at 1,024 ranks."""
DETAIL_BYTES = 250_000
"""Limit for the details of one test."""
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
_ANSWER_TONES = {True: _NEUTRAL, False: _BAD, None: _INCOMPLETE}
_WORDS = {"not run": "not run", "running": "running when the run ended"}
# Only this verdict accepts a cluster: nothing else has its colour.
_NODES = 256
"""Above that number of nodes those that are healthy are one."""
_PLACES = 32
_RANKS = 4096
_LEFT_OUT = Markup('<p class="note">The details are left out here, because {}; see the journal.</p>')
_PAGE_IS_FULL = _LEFT_OUT.format("this page would become too large")
_TOO_MANY = _LEFT_OUT.format("they are too many for a page")
# They identify a rank, so they are in its row even if there is only one rank.
_OF_EACH = ("rank", "host", "GPU index", "GPU uuid", "GPU serial", "GPU pci bus id")


def render(journal: Journal, *, folder: Path | None = None, page_folder: Path | None = None) -> str:
    """Return a run as one HTML document.

    Args:
        journal: of the run; without samples (``journal.read(path, keep_samples=False)``).
        folder: of the run, for figures from its artifacts and for links to them.
        page_folder: where the page will be, for relative links; by default the run's folder.
    """
    overview = outline(journal)
    files = RunFiles(folder=folder, page_folder=page_folder)
    templates = _environment()
    rows = overview.worst_first
    details_of_rows = _details(templates, rows, journal, files)
    environment, cluster = journal.environment, journal.cluster
    same, ranks = _inventory(journal)
    nodes = failures.cluster_map(journal, overview)
    anchors = {row.nodeid: f"c{n}" for n, row in enumerate(rows[:_ROWS], start=1)}
    document = templates.get_template("page.html.j2").render(
        **_assets(templates, "page.js"),
        overview=overview,
        tone=_tone(overview),
        heading=marked(overview.word, overview.kind),
        kind=overview.kind and KIND_NAMES[overview.kind],
        reason=line(failures.places_text(journal, overview, overview.reason) or overview.reason),
        merged=_merged_table(journal),
        is_selection=journal.run.selection,
        counts=tuple(overview.counts.items()),
        words=_WORDS,
        run_facts=_run_facts(journal),
        problems=_problems(journal),
        rows=[
            (row_values(row, number, journal), below)
            for number, (row, below) in enumerate(zip(rows[:_ROWS], details_of_rows, strict=True), start=1)
        ],
        rows_left_out=max(0, len(rows) - _ROWS),
        nodes=nodes if len(nodes) <= _NODES else tuple(failures.merged_nodes(nodes)),
        marks={gpu.mark: failures.MARKS[gpu.mark] for node in nodes for gpu in node.gpus if gpu.mark != failures.OK},
        anchors=anchors,
        places=_places(journal, overview, anchors),
        course=course(journal, overview),
        spread=spread(journal, overview),
        node_views=node_values(journal, overview, nodes),
        nodes_left_out=max(0, len(nodes) - MOST_NODES),
        did_not_run=[
            (word(row.name), word(row.criterion or ""), row.outcome, line(row.why_not_run))
            for row in overview.did_not_run[:_ROWS]
        ],
        not_run=NOT_RUN,
        running=RUNNING,
        cluster_problems=[line(each) for each in cluster.problems] if cluster is not None else [],
        same=same,
        ranks=ranks,
        limits=_limits_table(journal),
        limit_files=_pairs((file.path, f"SHA-256 {file.sha256 or 'unknown'}") for file in journal.limit_files),
        properties=_pairs(dict.fromkeys((*run_properties(journal).items(), *journal.properties))),
        variables=html_table("Environment variables", ("Variable", "Value"), tuple(environment.variables.items()))
        if environment is not None
        else None,
        links=files.of_the_run(),
        run_id=line(journal.run.run_id),
        plugin_version=word(journal.run.plugin_version),
    )
    # The whole document, charts too.
    return readable(document)


def render_document(
    heading: str, *, is_good: bool | None, reasons: Sequence[str], parts: Iterable[tuple[str, object]]
) -> str:
    """Return a comparison of runs as one HTML document.

    Args:
        heading: its answer.
        is_good: whether the answer is a good one; None if it is undecided.
        reasons: a few lines below it.
        parts: kind and content: "text", "items" (several texts), "table" (a ``Table``) or "chart" (an SVG).
    """
    templates = _environment()
    document = templates.get_template("document.html.j2").render(
        **_assets(templates), heading=heading, tone=_ANSWER_TONES[is_good], reasons=reasons, parts=list(parts)
    )
    return readable(document)


def _places(journal: Journal, overview: Outline, anchors: Mapping[str, str]) -> list[tuple[str, str, int, list[str]]]:
    """Return what failed in each place, its link, how many more failures it has, and what to do, for the template."""
    places = [(rows[0], len(rows) - 1) for rows in failures.failures_by_place(journal, overview).values()]
    return [
        (
            line(failures.failure_text(row, journal, name=display_name(row.name))),
            anchors.get(row.nodeid, "criteria"),
            more,
            list(map(line, failures.advice(row))),
        )
        for row, more in places[:_PLACES]
    ]


def _pairs(pairs: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    return [(word(name), line(value)) for name, value in pairs if value]


def _run_facts(journal: Journal) -> list[tuple[str, str]]:
    found = {name or "launched": value for name, value in facts(journal).items()}
    found |= {"started": journal.run.started_at, "duration": duration_text(run_seconds(journal))}
    environment = journal.environment
    if environment is not None:
        cpus = f", {environment.cpus} CPUs" if environment.cpus is not None else ""
        found["first host"] = f"{environment.host}, {environment.system}{cpus}"
    return _pairs((found | {"command line": " ".join(journal.run.argv)}).items())


def _limits_table(journal: Journal) -> Table | None:
    uses = Counter(
        (judged.metric, limit_text(judged), judged.limit.source or "not named", judged.limit.origin or "unknown")
        for result in journal.results
        for judged in result.measurements
        if judged.limit is not None
    )
    rows = [(*limit, str(number)) for limit, number in sorted(uses.items())]
    head = ("Metric", "Limit", "Source", "Defined in", "Values")
    return html_table("Limits that values were compared with", head, rows, numbers=("Values",))


def _merged_table(journal: Journal) -> Table | None:
    rows = [
        (str(number), each.run_id, each.started_at, f"{each.verdict}, exit code {each.exit}", each.journal, each.sha256)
        for number, each in enumerate(journal.run.merged_from, start=1)
    ]
    head = ("No.", "Run", "Started", "Verdict", "Journal", "SHA-256 of the journal")
    return html_table("The runs that were merged, the oldest first", head, rows)


def _inventory(journal: Journal) -> tuple[list[tuple[str, str]], Table | None]:
    """Return what is the same on every rank, and a row per rank with what differs or identifies it."""
    found = [_facts_of(place) for place in sorted(journal.ranks, key=lambda place: place.rank)]
    keys = dict.fromkeys(key for each in found for key in each)
    same = [key for key in keys if key not in _OF_EACH and len({each.get(key, "") for each in found}) == 1]
    differ = [key for key in keys if key not in same]
    rows = [tuple(each.get(key, "") for key in differ) for each in found]
    table = html_table("Ranks", tuple(map(word, differ)), rows, numbers=("GPU index",), most=_RANKS)
    return _pairs((key, found[0][key]) for key in same), table


def _facts_of(place: RankPlace) -> dict[str, str]:
    known = {"rank": str(place.rank), "host": place.host, "local rank": str(place.local_rank)}
    known |= {f"GPU {key.replace('_', ' ')}": value for key, value in (place.gpu or {}).items()}
    return known | {f"{name} version": version for name, version in place.versions.items()}


def _tone(overview: Outline) -> str:
    """Return the tone of a verdict: good only if it accepts the cluster."""
    if overview.is_accepted:
        return _GOOD
    if overview.exit == 0:
        return _NEUTRAL
    return _TONES.get(overview.word, _BROKEN)


def _details(environment: Environment, rows: Sequence[Row], journal: Journal, files: RunFiles) -> Iterator[Markup]:
    """Yield the details of each row until the page has its maximum size; then why they are left out."""
    template, left = environment.get_template("details.html.j2"), DETAILS_BYTES
    for number, row in enumerate(rows[:_ROWS], start=1):
        content = details_values(row, journal, files=files) if left > 0 else None
        if content is None:
            yield _PAGE_IS_FULL if left <= 0 and row.result is not None else Markup()
            continue
        body = Markup(template.render(details=content, number=number, outcome=row.outcome))
        size = len(body.encode("utf-8", "backslashreplace"))
        if size <= min(left, DETAIL_BYTES):
            left -= size
        else:  # the next one may be small enough
            body = _PAGE_IS_FULL if size > left else _TOO_MANY
        yield body


def _problems(journal: Journal) -> list[tuple[str, str, str, str]]:
    problems = [
        (word(problem.name), problem.outcome, line(problem.message), passage(problem.text, 8192))
        for problem in journal.problems[:_PROBLEMS]
    ]
    if len(journal.problems) > _PROBLEMS:
        problems.append((f"{len(journal.problems) - _PROBLEMS} more problems", "error", "see the journal", ""))
    if journal.silence is not None:
        problems.append(("silence", "error", line(journal.silence.message), passage(journal.silence.text, 8192)))
    if journal.end is None and not journal.is_live:
        problems.append(("no end", "error", f"the journal has no end: the run ended {line(journal.where)}", ""))
    if journal.cut:
        problems.append(("cut off", "error", "the last line of the journal is cut off and was ignored", ""))
    return problems


@lru_cache(maxsize=1)
def _environment() -> Environment:
    return Environment(
        loader=PackageLoader("pytest_gpucluster.reports.html"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _assets(environment: Environment, script: str = "") -> dict[str, str]:
    """Return style and script of a document, and the hashes by which its policy allows them."""
    texts = {"style": _asset(environment, "page.css"), "script": _asset(environment, script) if script else Markup()}
    return {**texts, **{f"{name}_hash": _digest(text) for name, text in texts.items()}}


def _asset(environment: Environment, name: str) -> Markup:
    assert environment.loader is not None
    return Markup(environment.loader.get_source(environment, name)[0])


def _digest(content: str) -> str:
    """Return the hash by which a policy allows the content of an element.

    Source: CSP3, 6.7.3.3 (https://www.w3.org/TR/CSP3/#match-element-to-source-list).
    """
    return f"sha256-{base64.b64encode(hashlib.sha256(content.encode('utf-8')).digest()).decode('ascii')}"
