"""The nodes of a run in the page: the value of each GPU in each test, its telemetry over the run, and its failures; all
tests over time; and how far the GPUs are apart.

The telemetry of a test is its median, at the middle of the test.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any

from markupsafe import Markup

from pytest_gpucluster.journal.journal import Journal
from pytest_gpucluster.journal.records import TestResult
from pytest_gpucluster.reports.charts import plots
from pytest_gpucluster.reports.failures import BROKEN, FAILED, Node
from pytest_gpucluster.reports.findings import isolation_of
from pytest_gpucluster.reports.markup import Table, html_table, line, word
from pytest_gpucluster.reports.summary import Outline, Row, display_name, moment
from pytest_gpucluster.reports.tables import is_number, quantity
from pytest_gpucluster.text import some_of

MOST_NODES = 16
"""Of a larger cluster those with a failure come first; the journal has all."""
_MOST_NAMES = 8
_QUANTITIES = {
    "sm_clock_mhz": ("SM clock", "MHz"),
    "power_watts": ("Power", "W"),
    "temperature_celsius": ("Temperature", "\N{DEGREE SIGN}C"),
}
"""Key of the telemetry -> its name and unit."""


def course(journal: Journal, overview: Outline) -> Markup:
    """Return the tests of a run over time; empty where fewer than two have a time."""
    begin = moment(journal.run.started_at)
    bars = [bar for row in overview.rows if (bar := _bar(row, begin)) is not None]
    return plots.time_chart(sorted(bars, key=lambda bar: bar.begin)) if len(bars) > 1 else Markup()


def _bar(row: Row, begin: datetime | None) -> plots.Bar | None:
    seconds = None if row.result is None else _seconds(row.result, begin)
    if row.result is None or seconds is None or row.outcome == "skipped":
        return None
    search = isolation_of(row.result.isolation)
    end = seconds + max(0.0, row.result.duration_seconds)
    searched_from = max(seconds, end - search.seconds) if search is not None else end
    return plots.Bar(
        name=display_name(row.name), begin=seconds, end=end, is_bad=not row.is_good, searched_from=searched_from
    )


def _seconds(result: TestResult, begin: datetime | None) -> float | None:
    """Return when a test began, in seconds since the run did; None where a time is unknown."""
    started = moment(result.started_at)
    if begin is None or started is None or not is_number(result.duration_seconds):
        return None
    seconds = (started - begin).total_seconds()
    return seconds if seconds >= 0 else None


def spread(journal: Journal, overview: Outline) -> Markup:
    """Return how far the ranks are apart in the deciding value of each test; empty for one rank."""
    rows = [(display_name(row.name), row.headline) for row in overview.rows if row.headline is not None]
    return plots.spread_chart(rows, journal) if journal.run.world_size > 1 else Markup()


def node_values(journal: Journal, overview: Outline, nodes: Sequence[Node]) -> list[dict[str, Any]]:
    """Return the nodes for the template, those with a failure first; at most ``MOST_NODES``."""
    shown = sorted(nodes, key=lambda node: not any(_failures(node)))[:MOST_NODES]
    begin = moment(journal.run.started_at)
    return [
        {
            "name": word(node.name),
            "failures": list(_failures(node)),
            "table": _values(node, overview),
            "charts": [chart for key in _QUANTITIES if (chart := _telemetry(key, node, overview, begin))],
        }
        for node in shown
    ]


def _failures(node: Node) -> Iterator[str]:
    """Yield the failures that name GPUs of a node, a line for the GPUs that have the same ones."""
    gpus: dict[tuple[str, ...], list[str]] = {}
    for gpu in node.gpus:
        if gpu.mark in (FAILED, BROKEN):
            gpus.setdefault(tuple(display_name(row.name) for row in gpu.rows), []).append(gpu.index)
    for names, indices in gpus.items():
        yield line(f"GPU {some_of(indices, 16)}: {some_of(names, _MOST_NAMES)}")


def _values(node: Node, overview: Outline) -> Table | None:
    """Return the deciding value of each test on each GPU; a cross is one that misses the limit."""
    ranks, rows, tones = [gpu.place.rank for gpu in node.gpus], [], []
    for row in overview.rows:
        judged = row.headline
        if judged is None or not {*ranks} & judged.values.keys():
            continue
        missing = {*plots.missing_ranks(judged)} & {*ranks}
        cells = (
            "\N{MULTIPLICATION SIGN} " * (rank in missing)
            + quantity(judged.values[rank], judged.unit).removesuffix(f" {judged.unit}")
            if rank in judged.values
            else ""
            for rank in ranks
        )
        rows.append((display_name(row.name), f"{judged.metric}, {judged.unit}", *cells))
        tones.append(row.outcome if missing else "")
    head = tuple(f"GPU {gpu.index}" for gpu in node.gpus)
    return html_table(
        f"The deciding value of each test on {word(node.name)}",
        ("Test", "Measurement", *head),
        rows,
        numbers=head,
        tones=tones,
    )


def _telemetry(key: str, node: Node, overview: Outline, begin: datetime | None) -> Markup | None:
    """Return a chart of a quantity over the run, a line for each GPU; None where nothing was read."""
    lines = []
    for gpu in node.gpus:
        points = []
        for result in (row.result for row in overview.rows if row.result is not None):
            found, at = result.telemetry.get(gpu.place.rank, {}).get(key), _seconds(result, begin)
            if at is not None and isinstance(found, list) and len(found) == 3 and is_number(found[1]):
                points.append((at + result.duration_seconds / 2, float(found[1])))
        if points:
            tone = "bad" if gpu.mark in (FAILED, BROKEN) else ""
            lines.append(plots.Line(name=f"GPU {gpu.index}", points=sorted(points), tone=tone))
    if not lines:
        return None
    name, unit = _QUANTITIES[key]
    title = f"{name} of {node.name} over the run"
    return plots.line_chart(lines, title=title, x_label="seconds since the run began", y_label=f"{name}, {unit}")
