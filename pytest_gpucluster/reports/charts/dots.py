"""The value of every rank as a dot: which ranks are slow, and whether it is one GPU, a node, or all."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from pytest_gpucluster.journal.fields import JudgedMetric
from pytest_gpucluster.journal.journal import Journal
from pytest_gpucluster.judge.misses import straggler_ratios
from pytest_gpucluster.metrics.stats import median, percentile
from pytest_gpucluster.reports.charts.svg import (
    ACCENT,
    BAD,
    GRID,
    INK,
    MUTED,
    Drawing,
    Scale,
    end_labels,
    finite,
    span,
    text_width,
    tick_text,
    ticks,
)
from pytest_gpucluster.reports.summary import is_better_higher
from pytest_gpucluster.reports.tables import limit_text, margin, metric_name, quantity, rank_name
from pytest_gpucluster.text import one_line

_WIDTH, _HEIGHT = 680.0, 200.0
_LEFT, _TOP, _BOTTOM = 58.0, 20.0, 40.0
_LANE = 16.0
"""Height of the row for ranks whose value is no number."""
_EACH_RANK = 64
"""Up to this number each rank has a dot; of more, each group is a box plot, and only the worst ranks have dots."""
_GROUPS = 64
_MOST_NAMES = 3
_FENCE = 1.5
"""Interquartile ranges beyond the quartiles from where a value is an outlier. Source: J. W. Tukey, "Exploratory Data
Analysis" (1977), 2D."""
_NAME_CHARACTERS = 44
_LABEL = 10.0


@dataclass(frozen=True, kw_only=True)
class _Ranks:
    """The ranks' values and what is conspicuous about them."""

    values: Mapping[int, float]
    """Finite values."""
    broken: tuple[int, ...]
    """Ranks whose value is no number, or infinite."""
    missing: Mapping[int, str]
    """Ranks that miss the limit -> how."""
    named: Mapping[int, str]
    """Ranks to be labelled, the worst first -> what follows the name."""


def rank_dots(judged: JudgedMetric, journal: Journal) -> Markup:
    """Return a chart of all ranks' values with limit, median, and the names of slow ranks.

    A rank that misses the limit is a cross, the others are circles. Empty without values.
    """
    if not judged.values:
        return Markup("")
    ranks = _ranks(judged)
    lane = _LANE if ranks.broken else 0.0
    description = _description(judged, journal, ranks)
    title = f"{metric_name(judged)} of {len(judged.values)} ranks"
    drawing = Drawing(_WIDTH, _HEIGHT + lane, title=title, description=description, label="rank-dots")
    bounds = [] if judged.limit is None else finite([judged.limit.min, judged.limit.max])
    ends = finite(end for pair in judged.intervals.values() for end in pair) if len(judged.values) <= _EACH_RANK else []
    low, high = span([*ranks.values.values(), *bounds, *ends])
    bottom = _HEIGHT - _BOTTOM
    y_scale = Scale(low=low, high=high, start=bottom, end=_TOP)
    order = sorted(judged.values)
    places = {rank: place for place, rank in enumerate(order)}
    levels = _levels(judged, ranks)
    right = _WIDTH - 10 - max((text_width(name, _LABEL) for _, name, _ in levels), default=0.0)
    step = (right - _LEFT) / len(order)

    def x_of(rank: int) -> float:
        return _LEFT + (places[rank] + 0.5) * step

    marks = ticks(low, high, 5)
    for value in marks:
        drawing.line(_LEFT, y_scale(value), right, y_scale(value), GRID, width=0.7)
        drawing.text(_LEFT - 5, y_scale(value) + 3.5, tick_text(value, marks), MUTED, anchor="end")
    drawing.text(4, 10, judged.unit, MUTED)
    _hosts(drawing, journal, order, step, bottom + lane)
    if len(order) <= _EACH_RANK:
        _each(drawing, judged, ranks, x_of, y_scale)
    else:
        _grouped(drawing, ranks, order, step, y_scale)
        for rank in {*ranks.named, *list(ranks.missing)[:_EACH_RANK]} & ranks.values.keys():
            bad = rank in ranks.missing
            drawing.mark(x_of(rank), y_scale(ranks.values[rank]), BAD if bad else INK, shape="cross" if bad else "ring")
    for value, _, colour in levels:
        at, is_limit = y_scale(value), colour == INK
        drawing.line(_LEFT, at, right, at, colour, width=1.4 if is_limit else 1.2, dash="6 3" if is_limit else "2 3")
    labels = [(y_scale(value), name, colour) for value, name, colour in levels]
    end_labels(drawing, labels, x=right + 4, lowest=bottom + 4, size=_LABEL)
    for rank in ranks.broken[:_EACH_RANK]:
        drawing.text(x_of(rank), bottom + lane - 3, "?", BAD, anchor="middle", bold=True)
    _names(drawing, journal, ranks, x_of=x_of, y_scale=y_scale, right=right, lane=bottom + lane - 3)
    return drawing.done()


def rank_dots_key(judged: JudgedMetric) -> str:
    """Return the legend of ``rank_dots``."""
    many = len(judged.values)
    has_crosses = bool(_ranks(judged).missing)
    if many > _EACH_RANK:
        each = math.ceil(many / _GROUPS)
        boxes = f"A box has the middle half of {each} neighbouring ranks, its line the whole range."
        crosses = "; a cross misses the limit" if has_crosses else ""
        return f"{boxes} A ring is an outlier{crosses}."
    parts = ["A circle is within the limit, a cross misses it."] if has_crosses else []
    parts += ["The line through a mark is the 95 % interval."] if judged.intervals else []
    return " ".join(parts)


def _ranks(judged: JudgedMetric) -> _Ranks:
    values = {rank: value for rank, value in judged.values.items() if math.isfinite(value)}
    broken = tuple(sorted(rank for rank in judged.values if rank not in values))
    missing: dict[int, str] = {}
    limit = judged.limit
    higher = is_better_higher(judged)
    if limit is not None and judged.status in ("failed", "error"):
        for rank, value in values.items():
            kept = margin(judged, value, judged.intervals.get(rank))
            beyond = (limit.min is not None and value < limit.min) or (limit.max is not None and value > limit.max)
            if beyond or (kept is not None and kept < 0):
                missing[rank] = "misses the limit"
        if (
            limit.min_ratio_to_median is not None
            and higher is not None
            and len(values) > 1
            and min(values.values()) >= 0
        ):
            ratios = straggler_ratios(values, "higher" if higher else "lower")
            for rank, ratio in ratios.items():
                if ratio < limit.min_ratio_to_median:
                    missing.setdefault(rank, "is slower than the others")
    worst_first = sorted(values, key=lambda rank: (values[rank] if higher is not False else -values[rank], rank))
    chosen = {rank: "" for rank in worst_first if rank in missing}
    if len(chosen) > _MOST_NAMES:
        # If many miss it, such as all of a node, only the worst is labelled.
        worst = judged.worst_rank if judged.worst_rank in chosen else next(iter(chosen))
        chosen = {worst: f" and {len(chosen) - 1} more"}
    outliers = set(_outliers(values))
    chosen |= {rank: "" for rank in worst_first if rank in outliers and rank not in missing}
    return _Ranks(values=values, broken=broken, missing=missing, named=dict(list(chosen.items())[:_MOST_NAMES]))


def _levels(judged: JudgedMetric, ranks: _Ranks) -> list[tuple[float, str, str]]:
    """Return the horizontal lines, median and limits: (value, name, colour)."""
    known = list(ranks.values.values())
    found = [(median(known), "median", MUTED)] if len(known) > 1 else []
    limit = judged.limit
    for sign, bound in (("≥", limit.min), ("≤", limit.max)) if limit is not None else ():
        if bound is not None and math.isfinite(bound):
            found.append((bound, f"limit {sign} {quantity(bound, judged.unit)}", INK))
    return found


def _outliers(values: Mapping[int, float]) -> Iterator[int]:
    """Yield the ranks that are far from the middle half."""
    if len(values) < 8:
        return
    low, high = (percentile(list(values.values()), percent) for percent in (25, 75))
    # Nearly equal values have no outliers: at least 1 % is tolerated.
    room = max(_FENCE * (high - low), 0.01 * max(abs(low), abs(high)))
    for rank, value in values.items():
        if not low - room <= value <= high + room:
            yield rank


def _each(drawing: Drawing, judged: JudgedMetric, ranks: _Ranks, x_of: Callable[[int], float], y_scale: Scale) -> None:
    for rank, value in ranks.values.items():
        x, bad = x_of(rank), rank in ranks.missing
        colour = BAD if bad else ACCENT
        ends = judged.intervals.get(rank)
        if ends is not None and len(finite(ends)) == len(ends):
            drawing.line(x, y_scale(ends[0]), x, y_scale(ends[1]), colour, width=1)
        drawing.mark(x, y_scale(value), colour, shape="cross" if bad else "circle", size=3.2)


def _grouped(drawing: Drawing, ranks: _Ranks, order: Sequence[int], step: float, y_scale: Scale) -> None:
    """Draw a box plot of each group: middle half and range."""
    each = math.ceil(len(order) / _GROUPS)
    for first in range(0, len(order), each):
        members = finite(ranks.values.get(rank) for rank in order[first : first + each])
        if not members:
            continue
        left, width = _LEFT + first * step, min(each, len(order) - first) * step
        top, below = y_scale(percentile(members, 75)), y_scale(percentile(members, 25))
        middle = left + width / 2
        drawing.line(middle, y_scale(max(members)), middle, y_scale(min(members)), MUTED, width=0.8)
        drawing.rectangle(left + 0.12 * width, top, 0.76 * width, max(1.2, below - top), fill=ACCENT)


def _hosts(drawing: Drawing, journal: Journal, order: Sequence[int], step: float, bottom: float) -> None:
    """Write the hosts below their ranks, as far as they fit, separated by lines."""
    drawing.line(_LEFT, bottom, _LEFT + step * len(order), bottom, MUTED)
    runs: list[tuple[str, int, int]] = []
    for place, rank in enumerate(order):
        known = journal.place(rank)
        host = known.host if known is not None else ""
        if runs and runs[-1][0] == host:
            runs[-1] = (host, runs[-1][1], place)
        else:
            runs.append((host, place, place))
    free = -math.inf
    for host, first, last in runs:
        left, right = _LEFT + first * step, _LEFT + (last + 1) * step
        if len(runs) <= _GROUPS:
            drawing.line(left, bottom, left, bottom + 5, MUTED)
        name = one_line(host, 20)
        half = text_width(name, 10) / 2
        if name and (left + right) / 2 - half > free:
            drawing.text((left + right) / 2, bottom + 14, name, MUTED, anchor="middle", size=10)
            free = (left + right) / 2 + half + 6
    ends = f"ranks {order[0]} to {order[-1]}" if len(order) > 1 else f"rank {order[0]}"
    drawing.text(_LEFT + step * len(order) / 2, bottom + 29, ends, MUTED, anchor="middle", size=10)


def _names(
    drawing: Drawing,
    journal: Journal,
    ranks: _Ranks,
    *,
    x_of: Callable[[int], float],
    y_scale: Scale,
    right: float,
    lane: float,
) -> None:
    """Write the names of conspicuous ranks next to their marks, without overlap."""
    taken: list[tuple[float, float, float]] = []
    for rank, more in {**ranks.named, **dict.fromkeys(ranks.broken[:_MOST_NAMES], ": no number")}.items():
        mark = lane if rank in ranks.broken else y_scale(ranks.values[rank])
        name = one_line(f"{_short_name(journal, rank)}{more}", _NAME_CHARACTERS)
        half = text_width(name, _LABEL) / 2
        x = min(max(x_of(rank), _LEFT + half), right - half)
        is_high = mark < (_TOP + _HEIGHT - _BOTTOM) / 2
        y = mark + (15.0 if is_high else -8.0)
        for _ in range(_MOST_NAMES):
            if not any(abs(y - other) < 11 and x - half < end and begin < x + half for other, begin, end in taken):
                break
            y += 11.5 if is_high else -11.5
        taken.append((y, x - half, x + half))
        is_bad = rank in ranks.missing or rank in ranks.broken
        drawing.text(x, y, name, BAD if is_bad else INK, anchor="middle", size=_LABEL)


def _short_name(journal: Journal, rank: int) -> str:
    """Return "rank 3, gpu-07 GPU 3"."""
    place = journal.place(rank)
    gpu = f" GPU {place.gpu.get('index', '?')}" if place is not None and place.gpu else ""
    host = one_line(place.host, 20) if place is not None else ""
    return f"rank {rank}, {host}{gpu}" if host or gpu else f"rank {rank}"


def _description(judged: JudgedMetric, journal: Journal, ranks: _Ranks) -> str:
    parts = []
    known = list(ranks.values.values())
    if known:
        ends = f"{quantity(min(known), judged.unit)} to {quantity(max(known), judged.unit)}"
        parts.append(f"{len(known)} values from {ends}, median {quantity(median(known), judged.unit)}")
    if judged.limit is not None:
        parts.append(f"limit {limit_text(judged)}")
    if ranks.missing:
        parts.append(f"{len(ranks.missing)} ranks miss it")
    if ranks.broken:
        parts.append(f"{len(ranks.broken)} ranks have no number")
    for rank in ranks.named:
        what = ranks.missing.get(rank, "is an outlier")
        parts.append(
            f"{rank_name(journal, rank)} {what}: {quantity(ranks.values[rank], judged.unit)}{ranks.named[rank]}"
        )
    return "; ".join(parts)
