"""The charts: lines (rates over sizes, losses over steps, rates over time), the value of each rank, a heat map of a
square matrix, and a bar with a value and its limit. No value breaks one: what is no number is counted or marked."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from pytest_gpucluster.journal.fields import JudgedMetric
from pytest_gpucluster.journal.journal import Journal
from pytest_gpucluster.judge.misses import straggler_ratios
from pytest_gpucluster.metrics.stats import median, percentile
from pytest_gpucluster.reports.charts.svg import (
    ACCENT,
    BAD,
    GOOD,
    GRID,
    INK,
    MUTED,
    SHAPES,
    Drawing,
    Point,
    Scale,
    end_labels,
    finite,
    span,
    text_width,
    tick_text,
    ticks,
    vertical_axis,
)
from pytest_gpucluster.reports.summary import is_better_higher, peak_value
from pytest_gpucluster.reports.tables import limit_text, margin, metric_name, quantity, rank_name
from pytest_gpucluster.text import one_line

_WIDTH, _LEFT = 680.0, 58.0
_LABEL_CHARACTERS = 30
_MOST_MARKS = 40
_MOST_POINTS = 240
# Four of Okabe and Ito's colours with contrast on white and on black.
# Source: M. Okabe, K. Ito, "Color Universal Design", https://jfly.uni-koeln.de/color/.
_COLOURS = (ACCENT, "var(--series-2, #d55e00)", "var(--series-3, #009e73)", "var(--series-4, #cc79a7)")
_TONES = {"bad": BAD, "muted": MUTED, "ink": INK}


@dataclass(frozen=True, kw_only=True)
class Line:
    """Points in the order of ``x``. A point that is not finite leaves a gap, which the description counts.

    Attributes:
        name: written at its end; may be empty.
        points: (x, y).
        tone: "bad", "muted" or "ink"; default: its own colour.
        dashed: drawn with dashes.
        is_joined: points are joined by a line; else only marks.
    """

    name: str
    points: Sequence[tuple[float, float]]
    tone: str = ""
    dashed: bool = False
    is_joined: bool = True


@dataclass(frozen=True, kw_only=True)
class Level:
    """A value across the whole chart, such as a limit or a peak."""

    name: str
    value: float
    tone: str = "ink"


def line_chart(
    lines: Sequence[Line],
    *,
    title: str,
    x_label: str,
    y_label: str,
    levels: Sequence[Level] = (),
    x_ticks: Mapping[float, str] | None = None,
    log_x: bool = False,
    zero: bool = True,
) -> Markup:
    """Return a chart of some lines, each with its name at its end.

    Args:
        lines: drawn in this order.
        title: what it shows.
        x_label: of the horizontal axis, with unit.
        y_label: of the vertical axis, with unit.
        levels: drawn across; those that are not finite are left out.
        x_ticks: place -> text, instead of round values.
        log_x: logarithmic horizontal axis; points at zero or below are left out.
        zero: the vertical axis begins at zero, if no value is below.
    """
    height, top, bottom = 260.0, 14.0, 218.0
    levels = [level for level in levels if math.isfinite(level.value)]
    drawn = [_drawable(line, log_x) for line in lines]
    xs = [x for points in drawn for x, y in points if math.isfinite(y)]
    ys = finite([*(y for points in drawn for _, y in points), *(level.value for level in levels)])
    names = [
        one_line(name, _LABEL_CHARACTERS) for name in (*(e.name for e in lines), *(e.name for e in levels)) if name
    ]
    right = _WIDTH - 14 - max(map(text_width, names), default=0.0)
    description = "; ".join(
        [
            *(_line_description(line, points, y_label) for line, points in zip(lines, drawn, strict=True)),
            *(f"{level.name}: {tick_text(level.value)}" for level in levels),
        ]
    )
    drawing = Drawing(_WIDTH, height, title=title, description=description, label="line-chart")
    if not xs or not ys:
        drawing.text(_WIDTH / 2, height / 2, "no values to draw", MUTED, anchor="middle")
        return drawing.done()
    x_low, x_high = min(xs), max(xs)
    if x_low == x_high:
        x_low, x_high = (x_low, min(2 * x_high, sys.float_info.max)) if log_x else (x_low - 0.5, x_high + 0.5)
    x_scale = Scale(low=x_low, high=x_high, start=_LEFT + 8, end=right - 8, log=log_x)
    low, high = span(ys, zero=zero and min(ys) >= 0)
    y_scale = Scale(low=low, high=high, start=bottom, end=top)
    vertical_axis(drawing, y_scale, left=_LEFT, right=right, unit=y_label)
    _horizontal_axis(drawing, x_scale, x_ticks, right, bottom, x_label)
    labels: list[tuple[float, str, str]] = []
    for level in levels:
        at, colour = y_scale(level.value), _TONES[level.tone]
        drawing.line(_LEFT, at, right, at, colour, width=1.2, dash="5 3")
        labels.append((at, level.name, colour))
    own = itertools.count()
    for line, points in zip(lines, drawn, strict=True):
        number = -1 if line.tone else next(own)
        colour = _TONES[line.tone] if line.tone else _COLOURS[number % len(_COLOURS)]
        shape = "cross" if line.tone == "bad" else SHAPES[max(0, number) % 3]
        known = [(x_scale(x), y_scale(y)) for x, y in points if math.isfinite(y)]
        for is_known, group in itertools.groupby(points, key=lambda point: math.isfinite(point[1])):
            part = [(x_scale(x), y_scale(y)) for x, y in group if is_known]
            if line.is_joined and len(part) > 1:
                width = 1.0 if line.tone == "muted" else 1.8
                drawing.path(part, colour, dash="5 3" if line.dashed else "", width=width)
        if len(known) <= _MOST_MARKS and (line.tone != "muted" or not line.is_joined or len(known) == 1):
            drawing.marks(known, colour, shape=shape, size=4 if line.tone == "bad" else 2.8)
        if line.name and known:
            labels.append((known[-1][1], line.name, colour))
    labels = [(at, one_line(name, _LABEL_CHARACTERS), colour) for at, name, colour in labels]
    end_labels(drawing, labels, x=right + 4, lowest=bottom + 6)
    return drawing.done()


def _drawable(line: Line, log_x: bool) -> list[tuple[float, float]]:
    """Return the points that can be drawn, at most 240."""
    points = [(x, y) for x, y in line.points if math.isfinite(x) and (x > 0 or not log_x)]
    every = max(1, math.ceil(len(points) / _MOST_POINTS))
    return [*points[::every], points[-1]] if points and (len(points) - 1) % every else points[::every]


def _horizontal_axis(
    drawing: Drawing, scale: Scale, x_ticks: Mapping[float, str] | None, right: float, bottom: float, label: str
) -> None:
    drawing.line(_LEFT, bottom, right, bottom, MUTED)
    if x_ticks is None:
        found = ticks(scale.low, scale.high, 8)
        x_ticks = {value: tick_text(value, found) for value in found}
    free = -math.inf
    for value, text in x_ticks.items():
        if not (scale.low <= value <= scale.high):
            continue
        at, half = scale(value), text_width(text) / 2
        drawing.line(at, bottom, at, bottom + 4, MUTED)
        if at - half > free:  # else it would overlap the previous one
            drawing.text(at, bottom + 15, text, MUTED, anchor="middle")
            free = at + half + 4
    drawing.text((_LEFT + right) / 2, bottom + 32, label, MUTED, anchor="middle")


def _line_description(line: Line, drawn: Sequence[tuple[float, float]], unit: str) -> str:
    name, known = line.name or "a line", finite(y for _, y in drawn)
    gaps = sum(not math.isfinite(y) for _, y in line.points)
    if not known:
        return f"{name}: no value"
    first, last, low, high = map(tick_text, (known[0], known[-1], min(known), max(known)))
    text = f"{name}: from {first} to {last}, lowest {low}, highest {high} ({unit})"
    return text + (f", {gaps} not finite" if gaps else "")


def limit_bar(judged: JudgedMetric) -> Markup:
    """Return a bar from zero to the value, a tick at each limit, a diamond at the data sheet's peak.

    If the limit is only a ratio to the other ranks' median, the bar is that ratio. Empty without limit and peak.
    """
    value, limit, peak = judged.value, judged.limit, peak_value(judged)
    bounds = [] if limit is None else finite([limit.min, limit.max])
    if limit is not None and not bounds and limit.min_ratio_to_median is not None:
        value, bounds, peak = judged.ratio_to_median, [limit.min_ratio_to_median], None
    bounds = [bound for bound in bounds if bound >= 0]
    if not bounds and peak is None:
        return Markup("")
    width, height, top, thick = 168.0, 18.0, 5.0, 8.0
    texts = [quantity(judged.value, judged.unit), f"limit {limit_text(judged)}"]
    texts += [f"data sheet peak {quantity(peak, judged.unit)}"] if peak is not None else []
    drawing = Drawing(width, height, title=f"{judged.status}: {', '.join(texts)}", label="limit-bar")
    scale = Scale(low=0.0, high=1.06 * max([*finite([value, peak, *bounds]), 1e-300]), start=1.0, end=width - 5)
    middle = top + thick / 2
    drawing.rectangle(1.0, top, width - 2, thick, fill="none", stroke=GRID, stroke_width=0.8)
    if value is None or not math.isfinite(value) or value < 0:
        drawing.text(width / 2, middle + 3.5, "no value to draw", BAD, anchor="middle", size=9)
    else:
        colour = {"passed": GOOD, "failed": BAD, "error": BAD}.get(judged.status, ACCENT)
        # At least one unit wide, so that a tiny value is visible.
        drawing.rectangle(1.0, top, max(1.0, scale(value) - 1.0), thick, fill=colour)
    for bound in bounds:
        drawing.line(scale(bound), 1.0, scale(bound), height - 1, INK, width=2)
    if peak is not None:
        drawing.marks([(scale(peak), middle)], MUTED, shape="diamond", size=3.2)
    return drawing.done()


# ---- the value of each rank --------------------------------------------------------------------------------------

_LANE = 16.0
"""Height of the row for ranks whose value is no number."""
_FEW_RANKS = 64
"""Up to this number the marks are large, and have the intervals."""
_MOST_NAMES = 3
_NAME_SIZE = 10.0


def rank_dots(judged: JudgedMetric, journal: Journal) -> Markup:
    """Return a chart of all ranks' values with limit, median, and the names of slow ranks: whether it is one GPU, a
    node, or all.

    A rank that misses the limit is a cross, the others are circles. Empty without values.
    """
    if not judged.values:
        return Markup("")
    values = {rank: value for rank, value in judged.values.items() if math.isfinite(value)}
    broken = sorted(judged.values.keys() - values.keys())
    missing, order = _missing(judged, values), sorted(judged.values)
    labelled = _labelled(judged, values, missing)
    intervals = {rank: pair for rank, pair in judged.intervals.items() if rank in values and len(finite(pair)) == 2}
    intervals = intervals if len(order) <= _FEW_RANKS else {}
    levels = [(median(list(values.values())), "median", MUTED)] if len(values) > 1 else []
    for sign, bound in (("≥", judged.limit.min), ("≤", judged.limit.max)) if judged.limit is not None else ():
        if bound is not None and math.isfinite(bound):
            levels.append((bound, f"limit {sign} {quantity(bound, judged.unit)}", INK))
    top, bottom = 20.0, 160.0
    lane = bottom + (_LANE if broken else 0.0)
    right = _WIDTH - 10 - max((text_width(name, _NAME_SIZE) for _, name, _ in levels), default=0.0)
    step = (right - _LEFT) / len(order)
    ends = [*values.values(), *(end for pair in intervals.values() for end in pair), *(value for value, *_ in levels)]
    low, high = span(ends)
    y = Scale(low=low, high=high, start=bottom, end=top)
    x = {rank: _LEFT + (number + 0.5) * step for number, rank in enumerate(order)}
    drawing = Drawing(
        _WIDTH,
        lane + 40.0,
        title=f"{metric_name(judged)} of {len(judged.values)} ranks",
        description=_dots_description(judged, journal, values, missing, labelled),
        label="rank-dots",
    )
    vertical_axis(drawing, y, left=_LEFT, right=right, unit=judged.unit, most=5)
    _host_axis(drawing, journal, order, lane, step)
    for rank, (begin, end) in intervals.items():
        drawing.line(x[rank], y(begin), x[rank], y(end), BAD if rank in missing else ACCENT, width=1)
    places = {rank: (x[rank], y(value)) for rank, value in values.items()}
    good = [place for rank, place in places.items() if rank not in missing]
    drawing.marks(good, ACCENT, size=3.2 if len(order) <= _FEW_RANKS else 1.4)
    drawing.marks([places[rank] for rank in missing], BAD, shape="cross", size=3.2)
    for value, _, colour in levels:
        width, dash = (1.4, "6 3") if colour == INK else (1.2, "2 3")
        drawing.line(_LEFT, y(value), right, y(value), colour, width=width, dash=dash)
    names = [(y(value), name, colour) for value, name, colour in levels]
    end_labels(drawing, names, x=right + 4, lowest=bottom + 4, size=_NAME_SIZE)
    for rank in broken[:_FEW_RANKS]:
        drawing.text(x[rank], lane - 3, "?", BAD, anchor="middle", bold=True)
        places[rank] = x[rank], lane - 3
    labelled |= dict.fromkeys(broken[:_MOST_NAMES], ": no number")
    texts = {rank: f"{rank_name(journal, rank, is_short=True)}{more}" for rank, more in labelled.items()}
    _rank_names(drawing, [(places[rank], text, rank in {*missing, *broken}) for rank, text in texts.items()], right)
    return drawing.done()


def _missing(judged: JudgedMetric, values: Mapping[int, float]) -> dict[int, str]:
    """Return the ranks that miss the limit -> how."""
    limit = judged.limit
    if limit is None or judged.status not in ("failed", "error"):
        return {}
    found: dict[int, str] = {}
    for rank, value in values.items():
        distance = margin(judged, value, judged.intervals.get(rank))
        beyond = (limit.min is not None and value < limit.min) or (limit.max is not None and value > limit.max)
        if beyond or (distance is not None and distance < 0):
            found[rank] = "misses the limit"
    higher = is_better_higher(judged)
    least = limit.min_ratio_to_median
    if least is not None and higher is not None and len(values) > 1 and min(values.values()) >= 0:
        for rank, ratio in straggler_ratios(values, "higher" if higher else "lower").items():
            if ratio < least:
                found.setdefault(rank, "is slower than the others")
    return found


def _labelled(judged: JudgedMetric, values: Mapping[int, float], missing: Mapping[int, str]) -> dict[int, str]:
    """Return the ranks to be labelled, the worst first -> what follows the name."""
    sign = -1 if is_better_higher(judged) is False else 1
    worst_first = sorted(values, key=lambda rank: (sign * values[rank], rank))
    chosen = {rank: "" for rank in worst_first if rank in missing}
    if len(chosen) > _MOST_NAMES:
        # If many miss it, such as all of a node, only the worst is labelled.
        worst = judged.worst_rank if judged.worst_rank in chosen else next(iter(chosen))
        chosen = {worst: f" and {len(chosen) - 1} more"}
    if 8 <= len(values) <= _FEW_RANKS:
        # Outliers: 1.5 interquartile ranges beyond the quartiles, and at least 1 %. Source: J. W. Tukey, "Exploratory
        # Data Analysis" (1977), 2D.
        low, high = (percentile(list(values.values()), percent) for percent in (25, 75))
        tolerated = max(1.5 * (high - low), 0.01 * max(abs(low), abs(high)))
        for rank in worst_first:
            if rank not in missing and not low - tolerated <= values[rank] <= high + tolerated:
                chosen[rank] = ""
    return dict(list(chosen.items())[:_MOST_NAMES])


def _host_axis(drawing: Drawing, journal: Journal, order: Sequence[int], bottom: float, step: float) -> None:
    """Write the hosts below their ranks, as far as they fit, separated by lines."""
    drawing.line(_LEFT, bottom, _LEFT + step * len(order), bottom, MUTED)
    hosts = [place.host if place is not None else "" for place in map(journal.place, order)]
    groups = [(host, len(list(members))) for host, members in itertools.groupby(hosts)]
    left, free = _LEFT, -math.inf
    for host, count in groups:
        right = left + count * step
        if len(groups) <= _FEW_RANKS:
            drawing.line(left, bottom, left, bottom + 5, MUTED)
        name, middle = one_line(host, 20), (left + right) / 2
        half = text_width(name, 10) / 2
        if name and middle - half > free:
            drawing.text(middle, bottom + 14, name, MUTED, anchor="middle", size=10)
            free = middle + half + 6
        left = right
    ends = f"ranks {order[0]} to {order[-1]}" if len(order) > 1 else f"rank {order[0]}"
    drawing.text(_LEFT + step * len(order) / 2, bottom + 29, ends, MUTED, anchor="middle", size=10)


def _rank_names(drawing: Drawing, names: Sequence[tuple[Point, str, bool]], right: float) -> None:
    """Write names next to their marks, without overlap: (mark, name, whether it is bad)."""
    taken: list[tuple[float, float, float]] = []
    for (at, mark), text, is_bad in names:
        name = one_line(text, 44)
        half = text_width(name, _NAME_SIZE) / 2
        x = min(max(at, _LEFT + half), right - half)
        is_high = mark < 90
        y = mark + (15.0 if is_high else -8.0)
        while any(abs(y - other) < 11 and x - half < end and begin < x + half for other, begin, end in taken):
            y += 11.5 if is_high else -11.5
        taken.append((y, x - half, x + half))
        drawing.text(x, y, name, BAD if is_bad else INK, anchor="middle", size=_NAME_SIZE)


def _dots_description(
    judged: JudgedMetric,
    journal: Journal,
    values: Mapping[int, float],
    missing: Mapping[int, str],
    labelled: Mapping[int, str],
) -> str:
    unit, numbers, parts = judged.unit, list(values.values()), []
    if numbers:
        low, high, middle = (quantity(number, unit) for number in (min(numbers), max(numbers), median(numbers)))
        parts.append(f"{len(numbers)} values from {low} to {high}, median {middle}")
    parts += [f"limit {limit_text(judged)}"] if judged.limit is not None else []
    parts += [f"{len(missing)} ranks miss it"] if missing else []
    parts += [f"{len(judged.values) - len(values)} ranks have no number"] if len(values) < len(judged.values) else []
    for rank, more in labelled.items():
        what = missing.get(rank, "is an outlier")
        parts.append(f"{rank_name(journal, rank)} {what}: {quantity(values[rank], unit)}{more}")
    return "; ".join(parts)


# ---- heat maps ---------------------------------------------------------------------------------------------------

_MOST_CELLS = 32
"""Rows and columns; of larger matrices each block has its worst value."""
_WITH_NUMBERS = 16
# The ends and the middle of ColorBrewer's "Blues", light for low values; safe for colour-blind readers and in print.
# Source: C. Brewer, https://colorbrewer2.org/#type=sequential&scheme=Blues.
_PALETTE = ((247, 251, 255), (107, 174, 214), (8, 48, 107))


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One cell of a matrix. ``is_bad`` cells are outlined, and their number is bold."""

    value: float
    is_bad: bool = False


def heat_map(
    names: Sequence[str],
    cells: Mapping[tuple[int, int], Cell],
    *,
    title: str,
    unit: str,
    heads: Sequence[str] = (),
) -> Markup:
    """Return a square matrix: darker is more, bad cells are outlined, unknown ones are empty.

    The scale begins at zero, so that scatter does not look like a fault.

    Args:
        names: of the rows and columns.
        cells: by row and column, from 0.
        title: what it shows.
        unit: of the values.
        heads: short names of the columns; default: their numbers.
    """
    heads = heads if len(heads) == len(names) <= _MOST_CELLS else ()
    names, cells = _blocks(names, cells)
    count = len(names)
    labels = [one_line(name, 18) for name in names]
    has_numbers = count <= _WITH_NUMBERS
    size = 40.0 if has_numbers else 18.0
    tall = 0.68 * size
    left, top = 24 + max((text_width(label, 10) for label in labels), default=0.0), 34.0
    width, height = max(left + max(count, 1) * size + 12, left + 300), top + max(count, 1) * tall + 34
    drawing = Drawing(width, height, title=title, description=_map_description(names, cells, unit), label="heat-map")
    highest = max(finite(cell.value for cell in cells.values()), default=0.0)
    drawing.text(4, 12, f"rows send, columns receive; {unit}", MUTED, size=10)
    for index, label in enumerate(labels):
        drawing.text(left - 5, top + index * tall + tall / 2 + 3.5, label, INK, anchor="end", size=10)
        head = one_line(heads[index], 5) if heads else str(index)
        text = head if has_numbers or index % 4 == 0 else ""
        drawing.text(left + index * size + size / 2, top - 5, text, MUTED, anchor="middle", size=10)
    inside = [(left + column * size, top + row * tall, cells[row, column]) for row, column in sorted(cells)]
    for x, y, cell in inside:
        text, ink, is_bold = "?", BAD, True
        if math.isfinite(cell.value):
            share = 0.0 if highest <= 0 else min(1.0, max(0.0, cell.value / highest))
            drawing.rectangle(x, y, size, tall, fill=_colour(share))
            # The numbers' colour depends on the cell's colour, which is the same on a dark page.
            text, ink, is_bold = tick_text(cell.value), "#fff" if share > 0.62 else "#111", cell.is_bad
        else:
            drawing.rectangle(x, y, size, tall, fill="none", stroke=BAD, stroke_width=1, stroke_dasharray="2 2")
        if has_numbers or ink == BAD:
            drawing.text(x + size / 2, y + tall / 2 + 3.5, text, ink, anchor="middle", size=10, bold=is_bold)
    for x, y, cell in inside:  # outlines last, so that no neighbour covers them
        if cell.is_bad:
            drawing.rectangle(x + 1, y + 1, size - 2, tall - 2, fill="none", stroke=BAD, stroke_width=2.2)
    drawing.rectangle(left, top, count * size, count * tall, fill="none", stroke=GRID, stroke_width=0.8)
    outlined = "; outlined: slow or wrong" if any(cell.is_bad for cell in cells.values()) else ""
    for step in range(10):
        drawing.rectangle(left + 10 * step, height - 20, 10, 9, fill=_colour((step + 0.5) / 10))
    drawing.text(left - 4, height - 12, "0", MUTED, anchor="end", size=10)
    drawing.text(left + 104, height - 12, f"{tick_text(highest)} {unit}{outlined}", MUTED, size=10)
    return drawing.done()


def _colour(share: float) -> str:
    low, high = (_PALETTE[0], _PALETTE[1]) if share < 0.5 else (_PALETTE[1], _PALETTE[2])
    within = 2 * share if share < 0.5 else 2 * share - 1
    red, green, blue = (round(a + within * (b - a)) for a, b in zip(low, high, strict=True))
    return f"#{red:02x}{green:02x}{blue:02x}"


def _blocks(
    names: Sequence[str], cells: Mapping[tuple[int, int], Cell]
) -> tuple[Sequence[str], Mapping[tuple[int, int], Cell]]:
    """Return a matrix that fits: each block has its lowest value, and is bad if one of its cells is."""
    if len(names) <= _MOST_CELLS:
        return names, cells
    each = math.ceil(len(names) / _MOST_CELLS)
    members: dict[tuple[int, int], list[Cell]] = {}
    for (row, column), cell in cells.items():
        members.setdefault((row // each, column // each), []).append(cell)
    blocks = {
        place: Cell(
            value=min(cell.value if math.isfinite(cell.value) else -math.inf for cell in inside),
            is_bad=any(cell.is_bad for cell in inside),
        )
        for place, inside in members.items()
    }
    firsts = range(0, len(names), each)
    return [f"{names[at]} and {min(each, len(names) - at) - 1} more" for at in firsts], blocks


def _map_description(names: Sequence[str], cells: Mapping[tuple[int, int], Cell], unit: str) -> str:
    values = finite(cell.value for cell in cells.values())
    if not values:
        return "no value"
    bad = [place for place, cell in sorted(cells.items()) if cell.is_bad]
    text = f"{len(cells)} values from {tick_text(min(values))} to {tick_text(max(values))} {unit}; {len(bad)} outlined"
    listed = ", ".join(f"{names[row]} to {names[column]}" for row, column in bad[:12])
    return f"{text}: {listed}" if listed else text
