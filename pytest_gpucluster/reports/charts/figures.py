"""Which charts belong to a test: sweeps over sizes, maps of links, loss curves, the course of a burn-in, host links."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from pytest_gpucluster.journal_lines import TestResult
from pytest_gpucluster.journal_measurements import JudgedMetric
from pytest_gpucluster.reports.charts.courses import burn_in_courses, loss_curves
from pytest_gpucluster.reports.charts.figure import Figure
from pytest_gpucluster.reports.charts.lines import Level, Line, line_chart
from pytest_gpucluster.reports.charts.link_matrices import link_matrices
from pytest_gpucluster.reports.charts.sweeps import sweeps
from pytest_gpucluster.reports.html.table import table

__all__ = ["Figure", "figures_of"]

_HOST_LINK = "host_link."
_MOST_ROWS = 64


def figures_of(result: TestResult, folder: Path | None) -> tuple[Figure, ...]:
    """Return the charts of a test, from its measurements and from the files that it has left.

    Args:
        result: of the test.
        folder: of the run; None where only the journal is at hand. A file that cannot be shown is named.
    """
    return (
        *sweeps(result),
        *_host_links(result),
        *link_matrices(result, folder),
        *loss_curves(result, folder),
        *burn_in_courses(result, folder),
    )


def _host_links(result: TestResult) -> Iterator[Figure]:
    """Yield both directions of the host link of each rank: GPUs that share an uplink are slow together."""
    found = [one for one in result.measurements if one.metric.startswith(_HOST_LINK) and len(one.values) > 1]
    for mode in dict.fromkeys(one.labels.get("mode", "") for one in found):
        ways = [one for one in found if one.labels.get("mode", "") == mode]
        if len(ways) > 1:
            yield _host_link(mode, ways)


def _host_link(mode: str, ways: list[JudgedMetric]) -> Figure:
    title = f"Host link, {mode}" if mode else "Host link"
    limits = dict.fromkeys(one.limit.min for one in ways if one.limit is not None and one.limit.min is not None)
    ranks = sorted({rank for one in ways for rank in one.values})
    names = [one.metric.removeprefix(_HOST_LINK).partition(".")[0] for one in ways]
    return Figure(
        title=title,
        svg=line_chart(
            [
                Line(
                    name=name, points=[(float(rank), one.values[rank]) for rank in sorted(one.values)], is_joined=False
                )
                for name, one in zip(names, ways, strict=True)
            ],
            title=f"{title}: each rank",
            x_label="rank",
            y_label=ways[0].unit,
            levels=[Level(name="limit", value=limit) for limit in limits],
            x_ticks={float(rank): str(rank) for rank in ranks},
        ),
        caption="Each rank in both directions. GPUs that share an uplink of their CPU are slow together.",
        table=table(
            title,
            ("Rank", *(f"{name}, {ways[0].unit}" for name in names)),
            [(str(rank), *(f"{one.values.get(rank, math.nan):.4g}" for one in ways)) for rank in ranks],
            numbers=("Rank", *(f"{name}, {ways[0].unit}" for name in names)),
            most=_MOST_ROWS,
        ),
    )
