"""The figures of a test, made from its measurements and its artifacts.

They are: metrics over sizes (busbw over the message size, as nccl-tests prints it), the maps of a link survey, and loss
over the steps of a training.

A run may have been killed while it wrote a file, so a missing, damaged or too large file is reported in place of the
chart and is never an error.
"""

from __future__ import annotations

import json
import math
import re
import stat
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from markupsafe import Markup

from pytest_gpucluster.errors import CurveError, JournalError, UnitError
from pytest_gpucluster.journal.records import TestResult
from pytest_gpucluster.journal.run_directory import ARTIFACTS, artifacts_name
from pytest_gpucluster.judge.judged import JudgedMetric
from pytest_gpucluster.metrics.codec import AnyText, MismatchError, converter, read
from pytest_gpucluster.metrics.loss_curve import mean_of_last, read_csv
from pytest_gpucluster.metrics.units import parse
from pytest_gpucluster.reports.charts.plots import MOST_CELLS, Level, Line, heat_map, line_chart
from pytest_gpucluster.reports.markup import Table, html_table
from pytest_gpucluster.reports.summary import peak_value
from pytest_gpucluster.text import one_line

LARGEST_BYTES = 16_000_000
"""Of one file. The matrix of 1,024 GPUs on 128 nodes has some 130,000 readings, in 9 MB."""
_MOST_FILES = 2048


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A chart, and its data where no other table has them. Without ``svg`` its file cannot be read, and
    ``caption`` has the reason."""

    title: str
    svg: Markup | None = None
    caption: str = ""
    table: Table | None = None


def figures_of(result: TestResult, folder: Path | None) -> tuple[Figure, ...]:
    """Return the charts of a test.

    Args:
        result: of the test.
        folder: of the run; None if there is only the journal.
    """
    return (*_sweeps(result), *_link_maps(result, folder), *_loss_curves(result, folder))


# ---- reading artifacts -------------------------------------------------------------------------------------------


class _Unreadable(Exception):
    """A file cannot be read; the message begins with its name."""


def artifact_folders(folder: Path | None, nodeid: str) -> list[Path]:
    """Return the folder of a test's files, and those of local workers, one per rank."""
    if folder is None:
        return []
    name, artifacts = artifacts_name(nodeid), folder / ARTIFACTS
    return [artifacts / name, *sorted((place / name for place in artifacts.glob("rank-*")), key=by_number)]


def by_number(name: object) -> list[tuple[str, int]]:
    """Return a sort key by which rank-2 comes before rank-10."""
    parts = re.findall(r"([^0-9]*)([0-9]{0,18})", str(name))
    return [(text, int(digits or -1)) for text, digits in parts]


def _find(folder: Path | None, nodeid: str, pattern: str) -> list[Path]:
    try:
        paths = [path for place in artifact_folders(folder, nodeid) for path in place.glob(pattern)]
        return sorted(paths, key=by_number)[:_MOST_FILES]
    except OSError:  # such as a name that is too long for this file system
        return []


def _require_readable(path: Path) -> None:
    """Check that this is a regular file of at most ``LARGEST_BYTES``.

    Raises: _Unreadable
    """
    try:
        status = path.stat()
    except OSError as error:
        raise _Unreadable(f"{path.name}: cannot be read: {error.strerror or error}") from None
    if not stat.S_ISREG(status.st_mode):  # reading a pipe would block
        raise _Unreadable(f"{path.name}: no regular file")
    if status.st_size > LARGEST_BYTES:
        size, most = status.st_size / 1e6, LARGEST_BYTES / 1e6
        raise _Unreadable(f"{path.name}: {size:.0f} MB, the limit is {most:.0f} MB")


# ---- metrics over sizes ------------------------------------------------------------------------------------------

_LEAST_SIZES = 3
"""For fewer the table of measurements is enough."""
_SECONDARY = ("algbw", "average_busbw")
"""Ends of the names of metrics that are only in the table."""
_MOST_SWEEPS = 6


def _sweeps(result: TestResult) -> Iterator[Figure]:
    groups: dict[tuple[str, tuple[tuple[str, str], ...]], dict[float, JudgedMetric]] = {}
    for judged in result.measurements:
        size = _size_label(judged)
        if size is not None and judged.metric.rpartition(".")[2] not in _SECONDARY:
            others = tuple(sorted((key, text) for key, text in judged.labels.items() if key != "size"))
            groups.setdefault((judged.metric, others), {})[size] = judged
    sweeps = [(name, points) for name, points in groups.items() if len(points) >= _LEAST_SIZES]
    for (metric, labels), points in sweeps[:_MOST_SWEEPS]:
        yield _sweep(metric, ", ".join(f"{key}={text}" for key, text in labels), sorted(points.items()))


def _size_label(judged: JudgedMetric) -> float | None:
    try:
        size = parse(judged.labels.get("size", "")).to("B")
    except UnitError:
        return None
    return size if math.isfinite(size) and size > 0 else None


def _sweep(metric: str, labels: str, points: Sequence[tuple[float, JudgedMetric]]) -> Figure:
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
    notes = [f"{labels}." if labels else "", "The slowest rank decides." if several else ""]
    notes += ["Crosses miss their limit."] if missed else []
    title = f"{metric} by size"
    return Figure(
        title=title,
        svg=line_chart(
            lines,
            title=f"{title}{f', {labels}' if labels else ''}",
            x_label="size",
            y_label=points[0][1].unit,
            levels=[] if peak is None else [Level(name="data sheet peak", value=peak, tone="muted")],
            x_ticks={size: judged.labels["size"] for size, judged in points},
            log_x=True,
        ),
        caption=" ".join(filter(None, notes)),
    )


# ---- a link survey -----------------------------------------------------------------------------------------------

_MOST_MAPS = 4
"""Of a survey, those with bad links first."""


def _rank(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise MismatchError("a rank", value)
    return value


_Rank = Annotated[int, _rank]
_READING = converter(tuple[_Rank, _Rank, float])


def _reading(value: object) -> tuple[int, int, float]:
    if not isinstance(value, list) or len(value) < 3:
        raise MismatchError("[sender, receiver, value, ...]", value)
    sender, receiver, rate = _READING([*value[:2], math.nan if value[2] is None else value[2]])
    return sender, receiver, rate


@dataclass(frozen=True, kw_only=True)
class _LinkCulprit:
    text: str = ""
    ranks: tuple[_Rank, ...] | None = None
    pairs: tuple[tuple[_Rank, _Rank], ...] = ()


@dataclass(frozen=True, kw_only=True)
class _Survey:
    """A link survey, as ``isolation.link_survey.to_json`` writes it. Rates are in GB/s."""

    schema_version: int
    scope: str = "node"
    nodes: tuple[tuple[_Rank, ...], ...]
    ranks: tuple[AnyText, ...] = ()
    """Their names, such as "rank 3 (gpu-01, GPU 3)"."""
    readings: tuple[Annotated[Any, _reading], ...]
    culprits: tuple[_LinkCulprit, ...] = ()
    not_measured: tuple[Any, ...] = ()
    median: float | None = None

    def name(self, rank: int) -> str:
        return one_line(self.ranks[rank], 60) if rank < len(self.ranks) else f"rank {rank}"

    def place(self, rank: int) -> tuple[str, str]:
        """Return host and GPU of a rank, as its name has them."""
        host, _, gpu = self.name(rank).partition(" (")[2].rstrip(")").partition(", GPU ")
        return host, gpu

    @property
    def bad(self) -> set[tuple[int, int]]:
        """Return both directions of every pair that is slow or wrong."""
        pairs = [pair for culprit in self.culprits for pair in culprit.pairs]
        return {*pairs, *((other, one) for one, other in pairs)}

    def groups(self) -> list[tuple[str, Sequence[int]]]:
        """Return name and ranks of each map, a node's or a rail's, those with the most bad links first."""
        found: list[tuple[str, Sequence[int]]]
        if self.scope == "node":
            hosts = [self.place(ranks[0])[0] if ranks else "" for ranks in self.nodes]
            found = [(host or f"node {node}", self.nodes[node]) for node, host in enumerate(hosts)]
        else:
            rails = range(max((len(ranks) for ranks in self.nodes), default=0))
            found = [(f"rail {rail}", [ranks[rail] for ranks in self.nodes if rail < len(ranks)]) for rail in rails]
        measured = {(one, other) for one, other, _ in self.readings}
        found = [(name, ranks) for name, ranks in found if any({*pair} <= {*ranks} for pair in measured)]
        return sorted(found, key=lambda group: -sum({*pair} <= {*group[1]} for pair in self.bad))


def _link_maps(result: TestResult, folder: Path | None) -> Iterator[Figure]:
    for path in _find(folder, result.nodeid, "links-*.json")[:_MOST_MAPS]:
        try:
            survey = _read_survey(path)
        except _Unreadable as error:
            yield Figure(title="Links", caption=f"Not shown: {error}")
            continue
        groups = survey.groups()
        more = len(groups) - _MOST_MAPS
        for name, ranks in groups[:_MOST_MAPS]:
            yield _link_map(survey, f"Links, {name}", ranks, f" {more} more maps are not shown." if more > 0 else "")


def _read_survey(path: Path) -> _Survey:
    _require_readable(path)
    try:
        content = json.loads(path.read_text(encoding="utf-8", errors="replace"))
        survey = read(_Survey, content, f"{path.name}: damaged")
    except OSError as error:
        raise _Unreadable(f"{path.name}: cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise _Unreadable(f"{path.name}: damaged: not JSON ({error})") from None
    except JournalError as error:
        raise _Unreadable(str(error)) from None
    if survey.schema_version != 1:
        raise _Unreadable(f"{path.name}: no link survey that this version reads")
    return survey


def _link_map(survey: _Survey, title: str, ranks: Sequence[int], more: str) -> Figure:
    index, bad = {rank: number for number, rank in enumerate(ranks)}, survey.bad
    rates = {(one, other): rate for one, other, rate in survey.readings if {one, other} <= index.keys()}
    names = []
    for rank in ranks:
        host, gpu = survey.place(rank)
        part = (f"GPU {gpu}" if gpu else "") if survey.scope == "node" else host
        names.append(", ".join(filter(None, (survey.name(rank).partition(" (")[0], part))))
    cells = {(index[one], index[other]): rate for (one, other), rate in rates.items()}
    outlined = {(index[one], index[other]) for one, other in bad & rates.keys()}
    slowest_first = sorted(rates, key=lambda pair: -math.inf if math.isnan(rates[pair]) else rates[pair])
    return Figure(
        title=title,
        svg=heat_map(names, cells, outlined, title=title, unit="GB/s", heads=[str(rank) for rank in ranks])
        if len(ranks) <= MOST_CELLS
        else None,
        caption=_survey_caption(survey, index) + more + (" Too many to be drawn." if len(ranks) > MOST_CELLS else ""),
        table=html_table(
            f"{title}: the slowest first",
            ("From", "To", "GB/s", "Finding"),
            [
                (*map(survey.name, pair), f"{rates[pair]:.4g}", "slow or wrong" if pair in bad else "")
                for pair in slowest_first
            ],
            numbers=("GB/s",),
            tones=["failed" if pair in bad else "" for pair in slowest_first],
            most=64,
        ),
    )


def _survey_caption(survey: _Survey, ranks: Container[int]) -> str:
    here = [each for each in survey.culprits if each.ranks is None or any(rank in ranks for rank in each.ranks)]
    parts = [f"{one_line(each.text, 300).rstrip('.')}." for each in here if each.text][:3]
    if survey.not_measured:
        parts.append(f"{len(survey.not_measured)} pairs were not measured.")
    if survey.median is not None:
        parts.append(f"Median of all links: {survey.median:.4g} GB/s.")
    return " ".join(parts)


# ---- loss over steps ---------------------------------------------------------------------------------------------

_MOST_GROUPS = 4


def _loss_curves(result: TestResult, folder: Path | None) -> Iterator[Figure]:
    paths = _find(folder, result.nodeid, "curve-*.csv")
    limit = next((one.limit.max for one in result.measurements if one.metric == "lora.final_loss" and one.limit), None)
    for number, path in enumerate(paths[:_MOST_GROUPS], start=1):
        name = path.stem.removeprefix("curve-").replace("-", " ") if len(paths) > 1 else ""
        more = len(paths) - _MOST_GROUPS if number == _MOST_GROUPS else 0
        try:
            yield _loss_curve(path, f"Loss{f' of {name}' if name else ''}", limit, more)
        except _Unreadable as error:
            yield Figure(title="Loss", caption=f"Not shown: {error}")


def _loss_curve(path: Path, title: str, limit: float | None, more: int) -> Figure:
    _require_readable(path)
    try:
        curve = read_csv(path)
    except CurveError as error:
        raise _Unreadable(str(error).replace(str(path), path.name)) from None
    lines = [Line(name="training", points=[(point.step, point.loss) for point in curve.points])]
    if curve.held_out:
        lines.append(Line(name="held out", points=list(curve.held_out), dashed=True))
    model = curve.context.get("model", "")
    gaps = sum(not math.isfinite(point.loss) for point in curve.points)
    caption = f"{f'{model}, mean' if model else 'Mean'} of the last 10 steps: {mean_of_last(curve, 10):.4g} nats."
    caption += f" {gaps} losses are not finite." if gaps else ""
    caption += f" {more} more groups are not shown." if more > 0 else ""
    levels = [] if limit is None else [Level(name="limit, last 10", value=limit)]
    svg = line_chart(lines, title=f"{title} over the steps", x_label="step", y_label="nats", levels=levels)
    return Figure(title=title, svg=svg, caption=caption)
