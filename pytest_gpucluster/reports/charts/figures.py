"""The charts of a test, made from its measurements and its artifacts.

They are: loss over the steps of a training, rates over the time of a burn-in, metrics over sizes (busbw over the
message size, as nccl-tests prints it), link matrices, and the host links of each rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from markupsafe import Markup

from pytest_gpucluster.errors import UnitError
from pytest_gpucluster.journal.fields import JudgedMetric
from pytest_gpucluster.journal.records import TestResult
from pytest_gpucluster.metrics.loss_curve import Curve, mean_of_last
from pytest_gpucluster.metrics.stats import median, percentile
from pytest_gpucluster.metrics.units import parse
from pytest_gpucluster.reports.charts import figure
from pytest_gpucluster.reports.charts.figure import Figure, Unreadable
from pytest_gpucluster.reports.charts.heatmap import link_matrices
from pytest_gpucluster.reports.charts.series import Level, Line, line_chart
from pytest_gpucluster.reports.charts.svg import finite
from pytest_gpucluster.reports.markup import html_table
from pytest_gpucluster.reports.summary import peak_value
from pytest_gpucluster.reports.tables import limit_text, quantity
from pytest_gpucluster.text import plural, rank_ranges

_MOST_GROUPS = 4
_MOST_RANKS = 16
"""Of more, the middle half of the ranks is an area, and only the slowest has a line."""
_MOST_FILES = 2048
_BURN_IN = "Rates during the burn-in"
_ROWS = 40
_PARTS = 60


def loss_curves(result: TestResult, folder: Path | None) -> Iterator[Figure]:
    """Yield the loss over the steps of each group of ranks of a LoRA training."""
    paths = figure.find_artifacts(folder, result.nodeid, "curve-*.csv")
    limit = next((one.limit.max for one in result.measurements if one.metric == "lora.final_loss" and one.limit), None)
    for number, path in enumerate(paths[:_MOST_GROUPS], start=1):
        name = path.stem.removeprefix("curve-").replace("-", " ") if len(paths) > 1 else ""
        more = len(paths) - _MOST_GROUPS if number == _MOST_GROUPS else 0
        try:
            yield loss_curve(figure.curve(path), name=name, limit=limit, more=more)
        except Unreadable as error:
            yield figure.unreadable("Loss", error)


def loss_curve(curve: Curve, *, name: str = "", limit: float | None = None, more: int = 0) -> Figure:
    """Return a loss over its steps, with held-out loss and the limit of the mean of the last steps, in nats."""
    title = f"Loss{f' of {name}' if name else ''}"
    lines = [Line(name="training", points=[(point.step, point.loss) for point in curve.points])]
    if curve.held_out:
        lines.append(Line(name="held out", points=list(curve.held_out), dashed=True))
    model = curve.context.get("model", "")
    gaps = len([1 for point in curve.points if not math.isfinite(point.loss)])
    beginning = f"{model}, mean" if model else "Mean"
    caption = f"{beginning} of the last 10 steps: {mean_of_last(curve, 10):.4g} nats."
    caption += f" {gaps} losses are not finite." if gaps else ""
    caption += f" {more} more groups are not shown." if more > 0 else ""
    held_out = dict(curve.held_out)
    every = max(1, math.ceil(len(curve.points) / _ROWS))
    rows = [
        (
            str(point.step),
            f"{point.loss:.4g}",
            f"{held_out[point.step]:.4g}" if point.step in held_out else "",
            f"{point.gradient_norm:.4g}",
            f"{point.learning_rate:.3g}",
        )
        for point in curve.points[::every]
    ]
    head = ("Step", "Loss", "Held out", "Gradient norm", "Learning rate")
    levels = [] if limit is None else [Level(name="limit, last 10", value=limit)]
    return Figure(
        title=title,
        svg=line_chart(lines, title=f"{title} over the steps", x_label="step", y_label="nats", levels=levels),
        caption=caption,
        table=html_table(f"{title}, every {every} steps" if every > 1 else title, head, rows, numbers=head),
    )


def burn_in_charts(result: TestResult, folder: Path | None) -> Iterator[Figure]:
    """Yield the rates over the time of a burn-in: all ranks, the slowest labelled."""
    paths = figure.find_artifacts(folder, result.nodeid, "burn-in-rank-*.csv", most=_MOST_FILES)
    series: dict[int, list[tuple[float, float]]] = {}
    problems = []
    left = figure.LARGEST_BYTES
    for rank, path in figure.each_rank(paths):
        try:
            left -= path.stat().st_size if left > 0 else 0
            if left <= 0:
                problems.append(f"{path.name} and what follows: more than {figure.LARGEST_BYTES / 1e6:.0f} MB in all")
                break
            series[rank] = _short(figure.burn_in_rates(path))
        except Unreadable as error:
            problems.append(str(error))
        except OSError as error:
            problems.append(f"{path.name}: cannot be read: {error.strerror or error}")
    series = {rank: points for rank, points in series.items() if _rates(points)}
    more = f"; and {len(problems) - 3} more" if len(problems) > 3 else ""
    note = f" Not shown: {'; '.join(problems[:3])}{more}." if problems else ""
    if series:
        yield _burn_in_chart(result, series, note)
    elif problems:
        yield Figure(title=_BURN_IN, svg=Markup(""), caption=note.strip())


def _burn_in_chart(result: TestResult, series: Mapping[int, list[tuple[float, float]]], problems: str) -> Figure:
    rates = {rank: _rates(points) for rank, points in series.items()}
    first = {rank: median(each[: max(1, len(each) // 10)]) for rank, each in rates.items()}
    last = {rank: median(each[-max(1, len(each) // 10) :]) for rank, each in rates.items()}
    slowest_first = sorted(last, key=lambda rank: (last[rank], rank))
    slowest = slowest_first[0]
    limit = next((one.limit for one in result.measurements if one.metric.startswith("matmul.")), None)
    band: list[tuple[float, float, float]] = []
    if len(series) > _MOST_RANKS:
        by_time = _by_time(series)
        band = [(at, percentile(each, 25), percentile(each, 75)) for at, each in by_time]
        lines = [Line(name="median", points=[(at, median(each)) for at, each in by_time], tone="ink", dashed=True)]
    else:
        lines = [Line(name="", points=points, tone="muted") for rank, points in series.items() if rank != slowest]
    tone = "bad" if result.outcome in ("failed", "error") else ""
    lines.append(Line(name=f"rank {slowest}", points=series[slowest], tone=tone))
    area = ", the area has the middle half of the ranks" if band else ""
    head = ("Rank", "First tenth", "Last tenth", "Lowest", "Highest")
    rows = [
        (str(rank), *(f"{rate:.4g}" for rate in (first[rank], last[rank], min(rates[rank]), max(rates[rank]))))
        for rank in slowest_first
    ]
    return Figure(
        title=_BURN_IN,
        svg=line_chart(
            lines,
            title=f"Rate of {len(series)} ranks over the burn-in",
            x_label="seconds",
            y_label="TFLOPS",
            levels=[Level(name="limit", value=limit.min)] if limit is not None and limit.min is not None else [],
            band=band,
            zero=False,
        ),
        caption=f"{rank_ranges(series)}; the slowest at its end is rank {slowest}{area}.{problems}",
        table=html_table("Rate in TFLOPS, the slowest at its end first", head, rows, numbers=head, most=64),
    )


def _rates(points: Sequence[tuple[float, float]]) -> list[float]:
    return finite(rate for _, rate in points)


def _short(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return at most 240 points: the lowest of each piece, so that no dip is lost."""
    each = math.ceil(len(points) / (4 * _PARTS))
    if each < 2:
        return points
    pieces = (points[at : at + each] for at in range(0, len(points), each))
    return [min(piece, key=lambda point: math.inf if math.isnan(point[1]) else point[1]) for piece in pieces]


def _by_time(series: Mapping[int, list[tuple[float, float]]]) -> list[tuple[float, list[float]]]:
    """Return the rates of all ranks in each of 60 equal parts of the time."""
    longest = max((points[-1][0] for points in series.values()), default=0.0)
    found: dict[int, list[float]] = {}
    for points in series.values():
        for at, rate in points:
            if math.isfinite(rate):
                found.setdefault(min(_PARTS - 1, int(_PARTS * at / longest)) if longest > 0 else 0, []).append(rate)
    return [((part + 0.5) * longest / _PARTS, rates) for part, rates in sorted(found.items())]


_LEAST = 3
"""Sizes; for fewer the table of measurements is enough."""
_SECONDARY = ("algbw", "average_busbw")
"""Ends of the names of metrics that are only in the table."""
_MOST = 6


def sweeps(result: TestResult) -> Iterator[Figure]:
    """Yield a figure for each metric with several sizes."""
    groups: dict[tuple[str, tuple[tuple[str, str], ...]], list[tuple[float, JudgedMetric]]] = {}
    for judged in result.measurements:
        size = _size(judged)
        if size is not None and judged.metric.rpartition(".")[2] not in _SECONDARY:
            others = tuple(sorted((key, text) for key, text in judged.labels.items() if key != "size"))
            groups.setdefault((judged.metric, others), []).append((size, judged))
    count = 0
    for (metric, labels), points in groups.items():
        if len({size for size, _ in points}) >= _LEAST and count < _MOST:
            count += 1
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
    several = any(len(judged.values) > 1 for _, judged in points)
    middle = [(size, judged.median) for size, judged in points if judged.median is not None]
    lines = [Line(name="median", points=middle, tone="muted", dashed=True)] if several and middle else []
    worst = [(size, math.nan if judged.value is None else judged.value) for size, judged in points]
    lines.append(Line(name="slowest rank" if several else "", points=worst))
    missed = [(size, judged.value) for size, judged in points if judged.status == "failed" and judged.value is not None]
    if missed:
        lines.append(Line(name="", points=missed, tone="bad", is_joined=False))
    limits = [(size, judged.limit) for size, judged in points if judged.limit is not None]
    for name, bounds in (
        ("limit, at least", [(size, limit.min) for size, limit in limits if limit.min is not None]),
        ("limit, at most", [(size, limit.max) for size, limit in limits if limit.max is not None]),
    ):
        if len(bounds) == 1:  # widened, so that it is visible
            bounds = [(0.8 * bounds[0][0], bounds[0][1]), *bounds]
        if bounds:
            lines.append(Line(name=name, points=bounds, tone="ink", dashed=True))
    peak = next((value for _, judged in points if (value := peak_value(judged)) is not None), None)
    label_text = ", ".join(f"{key}={text}" for key, text in labels)
    title = f"{metric} by size"
    head = ("Size", "Slowest rank" if several else "Value", "Median", "Rank", "Limit", "Status")
    rows = [
        (
            judged.labels["size"],
            quantity(judged.value, judged.unit),
            quantity(judged.median, judged.unit) if judged.median is not None and several else "",
            "" if judged.worst_rank is None or not several else str(judged.worst_rank),
            limit_text(judged),
            judged.status,
        )
        for _, judged in points
    ]
    tones = [judged.status if judged.status in ("failed", "error") else "" for _, judged in points]
    return Figure(
        title=title,
        svg=line_chart(
            lines,
            title=f"{title}{f', {label_text}' if label_text else ''}",
            x_label="size",
            y_label=points[0][1].unit,
            levels=[] if peak is None else [Level(name="data sheet peak", value=peak, tone="muted")],
            x_ticks={size: judged.labels["size"] for size, judged in points},
            log_x=True,
        ),
        caption=(f"{label_text}. " if label_text else "") + _limits_text(points, several),
        table=html_table(title, head, rows, numbers=head[1:4], tones=tones),
    )


def _limits_text(points: Sequence[tuple[float, JudgedMetric]], several: bool) -> str:
    """Return how the sizes compare with their limits."""
    parts = ["The slowest rank decides."] if several else []
    found = [judged.status for _, judged in points]
    if "failed" in found:
        parts.append("Crosses miss their limit.")
    if "error" in found:
        parts.append(f"{plural(found.count('error'), 'size')} could not be judged.")
    if not {"failed", "error"} & {*found}:
        parts.append("All sizes with a limit passed." if "passed" in found else "No size has a limit.")
    return " ".join(parts)


_HOST_LINK = "host_link."
_MOST_ROWS = 64


def figures_of(result: TestResult, folder: Path | None) -> tuple[Figure, ...]:
    """Return the charts of a test.

    Args:
        result: of the test.
        folder: of the run; None if there is only the journal.
    """
    return (
        *sweeps(result),
        *_host_links(result),
        *link_matrices(result, folder),
        *loss_curves(result, folder),
        *burn_in_charts(result, folder),
    )


def _host_links(result: TestResult) -> Iterator[Figure]:
    """Yield a chart of both directions of the host link of each rank."""
    found = [one for one in result.measurements if one.metric.startswith(_HOST_LINK) and len(one.values) > 1]
    for mode in dict.fromkeys(one.labels.get("mode", "") for one in found):
        directions = [one for one in found if one.labels.get("mode", "") == mode]
        if len(directions) > 1:
            yield _host_link(mode, directions)


def _host_link(mode: str, directions: list[JudgedMetric]) -> Figure:
    title, unit = f"Host link, {mode}" if mode else "Host link", directions[0].unit
    limits = dict.fromkeys(one.limit.min for one in directions if one.limit is not None and one.limit.min is not None)
    ranks = sorted({rank for one in directions for rank in one.values})
    names = [one.metric.removeprefix(_HOST_LINK).partition(".")[0] for one in directions]
    lines = [
        Line(name=name, points=[(float(rank), one.values[rank]) for rank in sorted(one.values)], is_joined=False)
        for name, one in zip(names, directions, strict=True)
    ]
    head = ("Rank", *(f"{name}, {unit}" for name in names))
    rows = [(str(rank), *(f"{one.values.get(rank, math.nan):.4g}" for one in directions)) for rank in ranks]
    return Figure(
        title=title,
        svg=line_chart(
            lines,
            title=f"{title}: each rank",
            x_label="rank",
            y_label=unit,
            levels=[Level(name="limit", value=limit) for limit in limits],
            x_ticks={float(rank): str(rank) for rank in ranks},
        ),
        caption="Each rank in both directions. GPUs that share an uplink of their CPU are slow together.",
        table=html_table(title, head, rows, numbers=head, most=_MOST_ROWS),
    )
