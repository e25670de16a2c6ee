"""A metric over the sizes that it was measured with: busbw over the message size, as nccl-tests tells it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from pytest_gpucluster.errors import UnitError
from pytest_gpucluster.journal_lines import TestResult
from pytest_gpucluster.journal_measurements import JudgedMetric
from pytest_gpucluster.metrics.units import parse
from pytest_gpucluster.reports.charts.figure import Figure
from pytest_gpucluster.reports.charts.lines import Level, Line, line_chart
from pytest_gpucluster.reports.html.table import table
from pytest_gpucluster.reports.outline import peak_value
from pytest_gpucluster.reports.tables import limit_text, quantity

_LEAST = 3
"""Sizes: of fewer the table of measurements tells as much."""
_BESIDE = ("algbw", "average_busbw")
"""Last part of the names of metrics that stand beside busbw, and are left to the table."""
_MOST = 6


def sweeps(result: TestResult) -> Iterator[Figure]:
    """Yield a figure for each metric that a test has measured with several sizes."""
    groups: dict[tuple[str, tuple[tuple[str, str], ...]], list[tuple[float, JudgedMetric]]] = {}
    for judged in result.measurements:
        size = _size(judged)
        if size is not None and judged.metric.rpartition(".")[2] not in _BESIDE:
            others = tuple(sorted((key, text) for key, text in judged.labels.items() if key != "size"))
            groups.setdefault((judged.metric, others), []).append((size, judged))
    shown = 0
    for (metric, labels), points in groups.items():
        if len({size for size, _ in points}) >= _LEAST and shown < _MOST:
            shown += 1
            yield _figure(metric, labels, sorted(points, key=lambda point: point[0]))


def _size(judged: JudgedMetric) -> float | None:
    text = judged.labels.get("size")
    if text is None:
        return None
    try:
        size = parse(text).to("B")
    except UnitError:
        return None
    return size if math.isfinite(size) and size > 0 else None


def _figure(metric: str, labels: Sequence[tuple[str, str]], points: Sequence[tuple[float, JudgedMetric]]) -> Figure:
    unit = points[0][1].unit
    worst = [(size, math.nan if judged.value is None else judged.value) for size, judged in points]
    middle = [(size, judged.median) for size, judged in points if judged.median is not None]
    several = any(len(judged.values) > 1 for _, judged in points)
    lines = [Line(name="median", points=middle, tone="muted", dashed=True)] if several and middle else []
    lines.append(Line(name="slowest rank" if several else "", points=worst))
    missed = [(size, judged.value) for size, judged in points if judged.status == "failed" and judged.value is not None]
    if missed:
        lines.append(Line(name="", points=missed, tone="bad", is_joined=False))
    for bound, name in (("min", "limit, at least"), ("max", "limit, at most")):
        limits = [
            (size, value)
            for size, judged in points
            if judged.limit is not None and (value := getattr(judged.limit, bound)) is not None
        ]
        if limits:
            lines.append(Line(name=name, points=_widened(limits), tone="ink", dashed=True))
    peak = next((value for _, judged in points if (value := peak_value(judged)) is not None), None)
    said = ", ".join(f"{key}={text}" for key, text in labels)
    return Figure(
        title=f"{metric} by size",
        svg=line_chart(
            lines,
            title=f"{metric} by size{f', {said}' if said else ''}",
            x_label="size",
            y_label=unit,
            levels=[] if peak is None else [Level(name="data sheet peak", value=peak, tone="muted")],
            x_ticks={size: judged.labels["size"] for size, judged in points},
            log_x=True,
        ),
        caption=(f"{said}. " if said else "") + _kept_text(points, several),
        table=table(
            f"{metric} by size",
            ("Size", "Slowest rank" if several else "Value", "Median", "Rank", "Limit", "Status"),
            [
                (
                    judged.labels["size"],
                    quantity(judged.value, judged.unit),
                    quantity(judged.median, judged.unit) if judged.median is not None and several else "",
                    "" if judged.worst_rank is None or not several else str(judged.worst_rank),
                    limit_text(judged),
                    judged.status,
                )
                for _, judged in points
            ],
            numbers=("Slowest rank", "Value", "Median", "Rank"),
            tones=[judged.status if judged.status in ("failed", "error") else "" for _, judged in points],
        ),
    )


def _kept_text(points: Sequence[tuple[float, JudgedMetric]], several: bool) -> str:
    """Return how the sizes stand to their limits: only what was judged and passed has kept one."""
    told = ["The slowest rank decides."] if several else []
    found = [judged.status for _, judged in points]
    if "failed" in found:
        told.append("Crosses miss their limit.")
    if "error" in found:
        count = found.count("error")
        told.append(f"{count} {'size' if count == 1 else 'sizes'} could not be judged.")
    if not {"failed", "error"} & {*found}:
        told.append("All sizes that have a limit keep it." if "passed" in found else "No size has a limit.")
    return " ".join(told)


def _widened(limits: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return a limit of a single size as a short piece, which can be seen."""
    if len(limits) > 1:
        return list(limits)
    (size, value), *_ = limits
    return [(0.8 * size, value), (size, value)]
