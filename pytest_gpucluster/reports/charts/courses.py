"""Curves over steps or time: the loss of a training, the rate of a burn-in on each rank."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from markupsafe import Markup

from pytest_gpucluster.journal_lines import TestResult
from pytest_gpucluster.metrics.loss_curve import Curve, mean_of_last
from pytest_gpucluster.metrics.stats import median, percentile
from pytest_gpucluster.reports.charts import artifact
from pytest_gpucluster.reports.charts.artifact import Unreadable
from pytest_gpucluster.reports.charts.figure import Figure
from pytest_gpucluster.reports.charts.lines import Level, Line, line_chart
from pytest_gpucluster.reports.charts.scale import finite
from pytest_gpucluster.reports.html.table import table
from pytest_gpucluster.text import rank_ranges

_MOST_GROUPS = 4
_MOST_RANKS = 16
"""Of more, half of the ranks are an area, and only the slowest is a line of its own."""
_MOST_FILES = 2048
_ROWS = 40
_PARTS = 60


def loss_curves(result: TestResult, folder: Path | None) -> Iterator[Figure]:
    """Yield the loss over the steps of each group of ranks that a LoRA training has left."""
    paths = artifact.found(folder, result.nodeid, "curve-*.csv")
    limit = next((one.limit for one in result.measurements if one.metric == "lora.final_loss"), None)
    more = len(paths) - _MOST_GROUPS
    for path in paths[:_MOST_GROUPS]:
        name = path.stem.removeprefix("curve-").replace("-", " ")
        try:
            yield loss_curve(
                artifact.curve(path),
                name=name if len(paths) > 1 else "",
                limit=None if limit is None else limit.max,
                more=more if more > 0 and path == paths[_MOST_GROUPS - 1] else 0,
            )
        except Unreadable as error:
            yield Figure(title="Loss", svg=Markup(""), caption=f"Not shown: {error}")


def loss_curve(curve: Curve, *, name: str = "", limit: float | None = None, more: int = 0) -> Figure:
    """Return a loss over its steps, with the held-out loss and the limit on the mean of the last steps, in nats."""
    title = f"Loss{f' of {name}' if name else ''}"
    lines = [Line(name="training", points=[(point.step, point.loss) for point in curve.points])]
    if curve.held_out:
        lines.append(Line(name="held out", points=list(curve.held_out), dashed=True))
    model = curve.context.get("model", "")
    gaps = len([1 for point in curve.points if not math.isfinite(point.loss)])
    said = f"{model}, mean" if model else "Mean"
    caption = f"{said} of the last 10 steps: {mean_of_last(curve, 10):.4g} nats."
    caption += f" {gaps} losses are no numbers." if gaps else ""
    caption += f" {more} more groups are not shown." if more > 0 else ""
    held_out = dict(curve.held_out)
    every = max(1, math.ceil(len(curve.points) / _ROWS))
    return Figure(
        title=title,
        svg=line_chart(
            lines,
            title=f"{title} over the steps",
            x_label="step",
            y_label="nats",
            levels=[] if limit is None else [Level(name="limit, last 10", value=limit)],
        ),
        caption=caption,
        table=table(
            f"{title}, every {every} steps" if every > 1 else title,
            ("Step", "Loss", "Held out", "Gradient norm", "Learning rate"),
            [
                (
                    str(point.step),
                    f"{point.loss:.4g}",
                    f"{held_out[point.step]:.4g}" if point.step in held_out else "",
                    f"{point.gradient_norm:.4g}",
                    f"{point.learning_rate:.3g}",
                )
                for point in curve.points[::every]
            ],
            numbers=("Step", "Loss", "Held out", "Gradient norm", "Learning rate"),
        ),
    )


def burn_in_courses(result: TestResult, folder: Path | None) -> Iterator[Figure]:
    """Yield the rate over time of a burn-in: all ranks, the slowest with its name."""
    paths = artifact.found(folder, result.nodeid, "burn-in-rank-*.csv", most=_MOST_FILES)
    courses: dict[int, list[tuple[float, float]]] = {}
    problems = []
    left = artifact.LARGEST_BYTES
    for rank, path in artifact.each_rank(paths):
        try:
            left -= path.stat().st_size if left > 0 else 0
            if left <= 0:
                problems.append(f"{path.name} and what follows: more than {artifact.LARGEST_BYTES / 1e6:.0f} MB in all")
                break
            courses[rank] = _short(artifact.course(path))
        except Unreadable as error:
            problems.append(str(error))
        except OSError as error:
            problems.append(f"{path.name}: cannot be read: {error.strerror or error}")
    courses = {rank: points for rank, points in courses.items() if finite(rate for _, rate in points)}
    said = f" Not shown: {'; '.join(problems[:3])}{f'; and {len(problems) - 3} more' if len(problems) > 3 else ''}."
    if courses:
        yield _courses(result, courses, said if problems else "")
    elif problems:
        yield Figure(title="Course of the burn-in", svg=Markup(""), caption=said.strip())


def _courses(result: TestResult, courses: Mapping[int, list[tuple[float, float]]], problems: str) -> Figure:
    last = {rank: _end(points) for rank, points in courses.items()}
    slowest = min(last, key=lambda rank: (last[rank], rank))
    limit = next((one.limit for one in result.measurements if one.metric.startswith("matmul.")), None)
    others = [rank for rank in courses if rank != slowest]
    band: list[tuple[float, float, float]] = []
    if len(courses) > _MOST_RANKS:
        by_time = _by_time(courses)
        band = [(at, percentile(rates, 25), percentile(rates, 75)) for at, rates in by_time]
        lines = [Line(name="median", points=[(at, median(rates)) for at, rates in by_time], tone="ink", dashed=True)]
    else:
        lines = [Line(name="", points=courses[rank], tone="muted") for rank in others]
    lines.append(Line(name=f"rank {slowest}", points=courses[slowest], tone="" if not _is_bad(result) else "bad"))
    levels = [Level(name="limit", value=limit.min)] if limit is not None and limit.min is not None else []
    shown = sorted(last, key=lambda rank: (last[rank], rank))
    return Figure(
        title="Course of the burn-in",
        svg=line_chart(
            lines,
            title=f"Rate of {len(courses)} ranks over the burn-in",
            x_label="seconds",
            y_label="TFLOPS",
            levels=levels,
            band=band,
            zero=False,
        ),
        caption=f"{rank_ranges(courses)}; the slowest at its end is rank {slowest}"
        + (", the area is where half of the ranks lie" if band else "")
        + f".{problems}",
        table=table(
            "Rate in TFLOPS, the slowest at its end first",
            ("Rank", "First tenth", "Last tenth", "Lowest", "Highest"),
            [
                (
                    str(rank),
                    f"{_beginning(courses[rank]):.4g}",
                    f"{last[rank]:.4g}",
                    f"{min(finite(rate for _, rate in courses[rank])):.4g}",
                    f"{max(finite(rate for _, rate in courses[rank])):.4g}",
                )
                for rank in shown
            ],
            numbers=("Rank", "First tenth", "Last tenth", "Lowest", "Highest"),
            most=64,
        ),
    )


def _is_bad(result: TestResult) -> bool:
    return result.outcome in ("failed", "error")


def _end(points: Sequence[tuple[float, float]]) -> float:
    rates = finite(rate for _, rate in points)
    return median(rates[-max(1, len(rates) // 10) :])


def _beginning(points: Sequence[tuple[float, float]]) -> float:
    rates = finite(rate for _, rate in points)
    return median(rates[: max(1, len(rates) // 10)])


def _short(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return not more points than are seen, and a dip of one point is not lost: of each piece its lowest is kept."""
    each = math.ceil(len(points) / (4 * _PARTS))
    if each < 2:
        return points
    pieces = (points[at : at + each] for at in range(0, len(points), each))
    return [min(piece, key=lambda point: math.inf if math.isnan(point[1]) else point[1]) for piece in pieces]


def _by_time(courses: Mapping[int, list[tuple[float, float]]]) -> list[tuple[float, list[float]]]:
    """Return the rates of all ranks in each of some equal parts of the time."""
    longest = max((points[-1][0] for points in courses.values()), default=0.0)
    found: dict[int, list[float]] = {}
    for points in courses.values():
        for at, rate in points:
            if math.isfinite(rate):
                found.setdefault(min(_PARTS - 1, int(_PARTS * at / longest)) if longest > 0 else 0, []).append(rate)
    return [((part + 0.5) * longest / _PARTS, rates) for part, rates in sorted(found.items())]
