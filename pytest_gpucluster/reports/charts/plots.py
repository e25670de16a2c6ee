"""The charts: lines (rates over sizes, losses over steps), the value of each rank, how far all ranks are apart, the
tests of a run over time, a heat map, and a bar with a value and its limit. What is no number is left out or marked."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from pytest_gpucluster.journal.journal import Journal
from pytest_gpucluster.judge.judged import JudgedMetric
from pytest_gpucluster.metrics.stats import median, percentile
from pytest_gpucluster.reports.charts import svg
from pytest_gpucluster.reports.summary import is_better_higher, peak_value, ratios_to_others
from pytest_gpucluster.reports.tables import limit_text, margin, metric_name, quantity, rank_name
from pytest_gpucluster.text import one_line

_WIDTH, _LEFT = 680.0, 58.0
_LABEL_CHARACTERS = 30
_MOST_MARKS = 40
_MOST_POINTS = 240
# Four of Okabe and Ito's colours with contrast on white and on black.
# Source: M. Okabe, K. Ito, "Color Universal Design", https://jfly.uni-koeln.de/color/.
_COLOURS = (svg.ACCENT, "var(--series-2, #d55e00)", "var(--series-3, #009e73)", "var(--series-4, #cc79a7)")
_TONES = {"bad": svg.BAD, "muted": svg.MUTED, "ink": svg.INK}


@dataclass(frozen=True, kw_only=True)
class Line:
    """Points in the order of ``x``. A point that is not finite leaves a gap.

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
) -> Markup:
    """Return a chart of some lines, each with its name at its end. Its vertical axis begins at zero, if none is below.

    Args:
        lines: drawn in this order.
        title: what it shows.
        x_label: of the horizontal axis, with unit.
        y_label: of the vertical axis, with unit.
        levels: drawn across; those that are not finite are left out.
        x_ticks: place -> text, instead of round values.
        log_x: logarithmic horizontal axis; points at zero or below are left out.
    """
    height, top, bottom = 260.0, 14.0, 218.0
    levels = [level for level in levels if math.isfinite(level.value)]
    drawn = [_drawable(line, log_x) for line in lines]
    xs = [x for points in drawn for x, y in points if math.isfinite(y)]
    ys = svg.finite([*(y for points in drawn for _, y in points), *(level.value for level in levels)])
    drawing = svg.Drawing(_WIDTH, height, title=title, label="line-chart")
    if not xs or not ys:
        drawing.text(_WIDTH / 2, height / 2, "no values to draw", svg.MUTED, anchor="middle")
        return drawing.done()
    low, high = svg.span(ys, zero=min(ys) >= 0)
    y = svg.Scale(low=low, high=high, start=bottom, end=top)
    right = _vertical_axis(drawing, y, levels, y_label, names=[line.name for line in lines])
    x_low, x_high = min(xs), max(xs)
    if x_low == x_high:
        x_low, x_high = (x_low, min(2 * x_high, sys.float_info.max)) if log_x else (x_low - 0.5, x_high + 0.5)
    x = svg.Scale(low=x_low, high=x_high, start=_LEFT + 8, end=right - 8, log=log_x)
    if x_ticks is None:
        found = svg.ticks(x.low, x.high, 8)
        x_ticks = {value: svg.tick_text(value, found) for value in found}
    places = ((x(value), text) for value, text in x_ticks.items() if x.low <= value <= x.high)
    _horizontal_axis(drawing, places, right, bottom, x_label)
    labels = [(y(level.value), level.name, _TONES[level.tone]) for level in levels]
    own = itertools.count()
    for line, points in zip(lines, drawn, strict=True):
        number = -1 if line.tone else next(own)
        colour = _TONES[line.tone] if line.tone else _COLOURS[number % len(_COLOURS)]
        known = [(x(at), y(value)) for at, value in points if math.isfinite(value)]
        for is_known, group in itertools.groupby(points, key=lambda point: math.isfinite(point[1])):
            part = [(x(at), y(value)) for at, value in group if is_known]
            if line.is_joined and len(part) > 1:
                width = 1.0 if line.tone == "muted" else 1.8
                drawing.path(part, colour, dash="5 3" if line.dashed else "", width=width)
        if len(known) <= _MOST_MARKS and (line.tone != "muted" or not line.is_joined or len(known) == 1):
            shape = "cross" if line.tone == "bad" else svg.SHAPES[max(0, number) % 3]
            drawing.marks(known, colour, shape=shape, size=4 if line.tone == "bad" else 2.8)
        if known:
            labels.append((known[-1][1], line.name, colour))
    _end_labels(drawing, labels, x=right + 4, lowest=bottom + 6)
    return drawing.done()


def _drawable(line: Line, log_x: bool) -> list[tuple[float, float]]:
    points = [(x, y) for x, y in line.points if math.isfinite(x) and (x > 0 or not log_x)]
    every = max(1, math.ceil(len(points) / _MOST_POINTS))
    return [*points[::every], points[-1]] if points and (len(points) - 1) % every else points[::every]


def _vertical_axis(
    drawing: svg.Drawing, scale: svg.Scale, levels: Sequence[Level], unit: str, names: Sequence[str] = ()
) -> float:
    """Draw round values with their grid lines, the unit above and the levels; return where the chart ends, as there is
    room for the names of levels and lines."""
    every = [one_line(name, _LABEL_CHARACTERS) for name in (*names, *(level.name for level in levels))]
    right = _WIDTH - 14 - max(map(svg.text_width, every), default=0.0)
    marks = svg.ticks(scale.low, scale.high)
    for value in marks:
        drawing.line(_LEFT, scale(value), right, scale(value), svg.GRID, width=0.7)
        drawing.text(_LEFT - 5, scale(value) + 3.5, svg.tick_text(value, marks), svg.MUTED, anchor="end")
    drawing.text(4, 10, unit, svg.MUTED)
    for level in levels:
        drawing.line(_LEFT, scale(level.value), right, scale(level.value), _TONES[level.tone], width=1.2, dash="5 3")
    return right


def _horizontal_axis(
    drawing: svg.Drawing,
    marks: Iterable[tuple[float, str]],
    right: float,
    bottom: float,
    label: str,
    *,
    left: float = _LEFT,
) -> None:
    """Draw the axis with a text at each (place, text), as far as they fit, and a label below."""
    drawing.line(left, bottom, right, bottom, svg.MUTED)
    free = -math.inf
    for at, text in marks:
        half = svg.text_width(text) / 2
        drawing.line(at, bottom, at, bottom + 4, svg.MUTED)
        if at - half > free:  # else it would overlap the previous one
            drawing.text(at, bottom + 15, text, svg.MUTED, anchor="middle")
            free = at + half + 4
    drawing.text((left + right) / 2, bottom + 32, label, svg.MUTED, anchor="middle")


def _end_labels(drawing: svg.Drawing, labels: Iterable[tuple[float, str, str]], *, x: float, lowest: float) -> None:
    ordered = sorted((label for label in labels if label[1]), key=lambda label: label[0])
    places: list[float] = []
    for at, _, _ in ordered:
        places.append(max(at + 3.5, places[-1] + 12.5 if places else -math.inf))
    for index, (_, name, colour) in enumerate(ordered):
        room = lowest - 12.5 * (len(ordered) - 1 - index)
        drawing.text(x, min(places[index], room), one_line(name, _LABEL_CHARACTERS), colour)


def limit_bar(judged: JudgedMetric) -> Markup:
    """Return a bar from zero to the value, a tick at each limit, a diamond at the data sheet's peak.

    If the limit is only a ratio to the other ranks' median, the bar is that ratio. Empty without limit and peak.
    """
    value, limit, peak = judged.value, judged.limit, peak_value(judged)
    bounds = [] if limit is None else svg.finite([limit.min, limit.max])
    if limit is not None and not bounds and limit.min_ratio_to_median is not None:
        value, bounds, peak = judged.ratio_to_median, [limit.min_ratio_to_median], None
    bounds = [bound for bound in bounds if bound >= 0]
    if not bounds and peak is None:
        return Markup("")
    width, height, top, thick = 168.0, 18.0, 5.0, 8.0
    texts = [quantity(judged.value, judged.unit), f"limit {limit_text(judged)}"]
    texts += [f"data sheet peak {quantity(peak, judged.unit)}"] if peak is not None else []
    drawing = svg.Drawing(width, height, title=f"{judged.status}: {', '.join(texts)}", label="limit-bar")
    scale = svg.Scale(low=0.0, high=1.06 * max([*svg.finite([value, peak, *bounds]), 1e-300]), start=1.0, end=width - 5)
    middle = top + thick / 2
    drawing.rectangle(1.0, top, width - 2, thick, fill="none", stroke=svg.GRID, stroke_width=0.8)
    if value is None or not math.isfinite(value) or value < 0:
        drawing.text(width / 2, middle + 3.5, "no value to draw", svg.BAD, anchor="middle", size=9)
    else:
        colour = {"passed": svg.GOOD, "failed": svg.BAD, "error": svg.BAD}.get(judged.status, svg.ACCENT)
        # At least one unit wide, so that a tiny value is visible.
        drawing.rectangle(1.0, top, max(1.0, scale(value) - 1.0), thick, fill=colour)
    for bound in bounds:
        drawing.line(scale(bound), 1.0, scale(bound), height - 1, svg.INK, width=2)
    if peak is not None:
        drawing.marks([(scale(peak), middle)], svg.MUTED, shape="diamond", size=3.2)
    return drawing.done()


# ---- the value of each rank --------------------------------------------------------------------------------------

_LANE = 16.0
"""Height of the row for ranks whose value is no number."""
_FEW_RANKS = 64
"""Up to this number the marks are large, and have the intervals."""


def rank_dots(judged: JudgedMetric, journal: Journal) -> Markup:
    """Return a chart of all ranks' values with limit, median, and the name of the worst rank: whether it is one GPU, a
    node, or all.

    A rank that misses the limit is a cross, the others are circles. Empty without values.
    """
    if not judged.values:
        return Markup("")
    values = {rank: value for rank, value in judged.values.items() if math.isfinite(value)}
    order = sorted(judged.values)
    broken, missing = [rank for rank in order if rank not in values], missing_ranks(judged)
    is_small = len(order) <= _FEW_RANKS
    intervals = {rank: pair for rank, pair in judged.intervals.items() if rank in values and len(svg.finite(pair)) == 2}
    intervals = intervals if is_small else {}
    levels = [Level(name="median", value=median(list(values.values())), tone="muted")] if len(values) > 1 else []
    for sign, bound in (("≥", judged.limit.min), ("≤", judged.limit.max)) if judged.limit is not None else ():
        if bound is not None and math.isfinite(bound):
            levels.append(Level(name=f"limit {sign} {quantity(bound, judged.unit)}", value=bound))
    ends = (end for pair in intervals.values() for end in pair)
    low, high = svg.span([*values.values(), *ends, *(level.value for level in levels)])
    top, bottom = 20.0, 160.0
    lane = bottom + (_LANE if broken else 0.0)
    y = svg.Scale(low=low, high=high, start=bottom, end=top)
    title = f"{metric_name(judged)} of {len(order)} ranks, {len(missing)} miss the limit, {len(broken)} have no number"
    drawing = svg.Drawing(_WIDTH, lane + 40.0, title=title, label="rank-dots")
    right = _vertical_axis(drawing, y, levels, judged.unit)
    step = (right - _LEFT) / len(order)
    x = {rank: _LEFT + (number + 0.5) * step for number, rank in enumerate(order)}
    _horizontal_axis(drawing, _hosts(journal, x), right, lane, f"ranks {order[0]} to {order[-1]}, by host")
    for rank, (begin, end) in intervals.items():
        drawing.line(x[rank], y(begin), x[rank], y(end), svg.BAD if rank in missing else svg.ACCENT, width=1)
    places = {rank: (x[rank], y(value)) for rank, value in values.items()}
    good = [place for rank, place in places.items() if rank not in missing]
    drawing.marks(good, svg.ACCENT, size=3.2 if is_small else 1.4)
    drawing.marks([places[rank] for rank in missing], svg.BAD, shape="cross", size=3.2)
    for rank in broken[:_FEW_RANKS]:
        drawing.text(x[rank], lane - 3, "?", svg.BAD, anchor="middle", bold=True)
    labels = [(y(level.value), level.name, _TONES[level.tone]) for level in levels]
    _end_labels(drawing, labels, x=right + 4, lowest=bottom + 4)
    if missing or broken:
        bad = [*broken, *missing]
        worst = judged.worst_rank if judged.worst_rank in bad else bad[0]
        more = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
        name = one_line(f"{rank_name(journal, worst, is_short=True)}{more}", 60)
        mark = places.get(worst, (x[worst], lane - 3))[1]
        half = svg.text_width(name) / 2
        at = min(max(x[worst], _LEFT + half), right - half)
        drawing.text(at, mark + (15.0 if mark < 90 else -8.0), name, svg.BAD, anchor="middle")
    return drawing.done()


def missing_ranks(judged: JudgedMetric) -> list[int]:
    """Return the ranks that miss the limit, or are slower than it allows compared with the others."""
    limit = judged.limit
    values = {rank: value for rank, value in judged.values.items() if math.isfinite(value)}
    if limit is None or judged.status not in ("failed", "error"):
        return []
    found = set()
    for rank, value in values.items():
        distance = margin(judged, value, judged.intervals.get(rank))
        beyond = (limit.min is not None and value < limit.min) or (limit.max is not None and value > limit.max)
        if beyond or (distance is not None and distance < 0):
            found.add(rank)
    least = limit.min_ratio_to_median or 0.0
    return sorted(found | {rank for rank, ratio in ratios_to_others(judged).items() if ratio < least})


def _hosts(journal: Journal, places: Mapping[int, float]) -> list[tuple[float, str]]:
    found = []
    hosts = {rank: place.host if (place := journal.place(rank)) is not None else "" for rank in places}
    for host, members in itertools.groupby(places, key=hosts.__getitem__):
        ranks = list(members)
        found.append(((places[ranks[0]] + places[ranks[-1]]) / 2, one_line(host, 20)))
    return found


# ---- all tests in one chart --------------------------------------------------------------------------------------

_NAMES, _NAME_CHARACTERS = 218.0, 34
"""Of the column of names: its width, and how long a name may be."""
_CULPRIT_WIDTH = 155.0
_MOST_ROWS = 100


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A test in the course of a run: its begin and end, and since when the culprit was searched, in seconds."""

    name: str
    begin: float
    end: float
    is_bad: bool = False
    searched_from: float = math.inf


def time_chart(bars: Sequence[Bar]) -> Markup:
    """Return the tests of a run over time, one below the other; of many the longest."""
    kept = {id(bar) for bar in sorted(bars, key=lambda bar: bar.begin - bar.end)[:_MOST_ROWS]}
    drawn = [bar for bar in bars if id(bar) in kept]
    high = 12.0
    bottom = 8 + high * len(drawn)
    last = max((bar.end for bar in drawn), default=0.0)
    unit, size = ("min", 60.0) if last > 300 else ("s", 1.0)
    x = svg.Scale(low=0.0, high=max(last / size, 1e-9), start=_NAMES, end=_WIDTH - 14)
    bad = sum(bar.is_bad for bar in drawn)
    drawing = svg.Drawing(
        _WIDTH, bottom + 40, title=f"{len(drawn)} of {len(bars)} tests over time, {bad} failed", label="time"
    )
    for row, bar in enumerate(drawn):
        top, colour = 8 + high * row, svg.BAD if bar.is_bad else svg.ACCENT
        drawing.text(
            _NAMES - 5, top + 9, one_line(bar.name, _NAME_CHARACTERS), colour if bar.is_bad else svg.INK, anchor="end"
        )
        begin, end = x(bar.begin / size), x(bar.end / size)
        drawing.rectangle(begin, top + 2, max(1.5, end - begin), high - 4, fill=colour)
        if bar.searched_from < bar.end:
            search = x(bar.searched_from / size)
            drawing.rectangle(
                search, top + 2, end - search, high - 4, fill="none", stroke=svg.INK, stroke_dasharray="2 2"
            )
    found = svg.ticks(0.0, x.high, 8)
    _horizontal_axis(
        drawing, ((x(at), svg.tick_text(at, found)) for at in found), _WIDTH - 14, bottom, unit, left=_NAMES
    )
    return drawing.done()


def spread_chart(rows: Sequence[tuple[str, JudgedMetric]], journal: Journal) -> Markup:
    """Return for each (test, value of several ranks) how all ranks compare with their median, worse ones to the left:
    the range as a line, its middle half as a box, a cross for each rank that misses the limit, and the worst's name."""
    drawn = [(name, judged, ratios) for name, judged in rows if (ratios := ratios_to_median(judged))][:_MOST_ROWS]
    high = 15.0
    bottom = 8 + high * len(drawn)
    drawing = svg.Drawing(
        _WIDTH, bottom + 40, title=f"{len(drawn)} values of all ranks and their median", label="spread"
    )
    every = [100 * ratio for _, _, ratios in drawn for ratio in ratios.values()]
    low, end = svg.span([*every, 99.0, 101.0])
    x = svg.Scale(low=max(0.0, low), high=min(200.0, end), start=_NAMES + _CULPRIT_WIDTH, end=_WIDTH - 14)
    drawing.line(x(100), 2, x(100), bottom, svg.MUTED, dash="5 3")
    for row, (name, judged, ratios) in enumerate(drawn):
        middle, missing = 8 + high * (row + 0.5), missing_ranks(judged)
        known = sorted(100 * ratio for rank, ratio in ratios.items())
        first, third = (percentile(known, percent) for percent in (25, 75))
        label = one_line(name, _NAME_CHARACTERS)
        drawing.text(_NAMES - 5, middle + 3.5, label, svg.BAD if missing else svg.INK, anchor="end")
        drawing.line(x(known[0]), middle, x(known[-1]), middle, svg.ACCENT)
        drawing.rectangle(x(first), middle - 4, max(1.5, x(third) - x(first)), 8, fill=svg.ACCENT)
        marks = [(x(100 * ratios[rank]), middle) for rank in missing if rank in ratios]
        drawing.marks(marks, svg.BAD, shape="cross", size=3.2)
        worst = judged.worst_rank
        if worst is not None and worst in missing and worst in ratios and 4 * len(missing) <= len(ratios):
            name = one_line(rank_name(journal, worst, is_short=True), 26)
            drawing.text(x(100 * ratios[worst]) - 7, middle + 3.5, name, svg.BAD, anchor="end")
    found = svg.ticks(x.low, x.high, 8)
    places = ((x(at), svg.tick_text(at, found)) for at in found)
    _horizontal_axis(drawing, places, _WIDTH - 14, bottom, "% of the median of all ranks; left is worse", left=_NAMES)
    return drawing.done()


def ratios_to_median(judged: JudgedMetric) -> dict[int, float]:
    """Return how good each rank is compared with the median, 1 for the same; empty for a value that does not spread."""
    higher = is_better_higher(judged)
    values = {rank: value for rank, value in judged.values.items() if math.isfinite(value) and value > 0}
    if higher is None or len(values) < 3 or min(values.values()) == max(values.values()):
        return {}
    middle = median(list(values.values()))
    ratios = {rank: value / middle if higher else middle / value for rank, value in values.items()}
    return {rank: ratio for rank, ratio in ratios.items() if ratio < 10}


# ---- heat maps ---------------------------------------------------------------------------------------------------

MOST_CELLS = 32
"""Rows and columns."""
_WITH_NUMBERS = 16
# The ends and the middle of ColorBrewer's "Blues", light for low values; safe for colour-blind readers and in print.
# Source: C. Brewer, https://colorbrewer2.org/#type=sequential&scheme=Blues.
_PALETTE = ((247, 251, 255), (107, 174, 214), (8, 48, 107))


def heat_map(
    names: Sequence[str],
    values: Mapping[tuple[int, int], float],
    bad: Collection[tuple[int, int]],
    *,
    heads: Sequence[str],
    title: str,
    unit: str,
) -> Markup:
    """Return a square matrix: darker is more, bad cells are outlined with a bold number, unknown ones are empty.

    The scale begins at zero, so that scatter does not look like a fault.

    Args:
        names: of the rows and columns, at most ``MOST_CELLS``.
        values: by row and column, from 0.
        bad: those to be outlined.
        heads: short names of the columns.
        title: what it shows.
        unit: of the values.
    """
    count = len(names)
    labels = [one_line(name, 18) for name in names]
    has_numbers = count <= _WITH_NUMBERS
    size = 40.0 if has_numbers else 18.0
    tall = 0.68 * size
    left, top = 24 + max((svg.text_width(label, 10) for label in labels), default=0.0), 34.0
    width, height = max(left + max(count, 1) * size + 12, left + 300), top + max(count, 1) * tall + 34
    drawing = svg.Drawing(width, height, title=f"{title}: {len(bad)} outlined", label="heat-map")
    highest = max(svg.finite(values.values()), default=0.0)
    drawing.text(4, 12, f"rows send, columns receive; {unit}", svg.MUTED, size=10)
    for index, label in enumerate(labels):
        drawing.text(left - 5, top + index * tall + tall / 2 + 3.5, label, svg.INK, anchor="end", size=10)
        if has_numbers or index % 4 == 0:
            head = one_line(heads[index], 5)
            drawing.text(left + index * size + size / 2, top - 5, head, svg.MUTED, anchor="middle", size=10)
    for row, column in sorted(values):
        x, y, value = left + column * size, top + row * tall, values[row, column]
        text, ink, is_bold = "?", svg.BAD, True
        if math.isfinite(value):
            share = 0.0 if highest <= 0 else min(1.0, max(0.0, value / highest))
            drawing.rectangle(x, y, size, tall, fill=_colour(share))
            # The numbers' colour depends on the cell's colour, which is the same on a dark page.
            text, ink, is_bold = svg.tick_text(value), "#fff" if share > 0.62 else "#111", (row, column) in bad
        else:
            drawing.rectangle(x, y, size, tall, fill="none", stroke=svg.BAD, stroke_width=1, stroke_dasharray="2 2")
        if has_numbers or ink == svg.BAD:
            drawing.text(x + size / 2, y + tall / 2 + 3.5, text, ink, anchor="middle", size=10, bold=is_bold)
    for row, column in sorted({*bad} & values.keys()):  # outlines last, so that no neighbour covers them
        x, y = left + column * size, top + row * tall
        drawing.rectangle(x + 1, y + 1, size - 2, tall - 2, fill="none", stroke=svg.BAD, stroke_width=2.2)
    drawing.rectangle(left, top, count * size, count * tall, fill="none", stroke=svg.GRID, stroke_width=0.8)
    for step in range(10):
        drawing.rectangle(left + 10 * step, height - 20, 10, 9, fill=_colour((step + 0.5) / 10))
    drawing.text(left - 4, height - 12, "0", svg.MUTED, anchor="end", size=10)
    outlined = "; outlined: slow or wrong" if bad else ""
    drawing.text(left + 104, height - 12, f"{svg.tick_text(highest)} {unit}{outlined}", svg.MUTED, size=10)
    return drawing.done()


def _colour(share: float) -> str:
    low, high = (_PALETTE[0], _PALETTE[1]) if share < 0.5 else (_PALETTE[1], _PALETTE[2])
    within = 2 * share if share < 0.5 else 2 * share - 1
    red, green, blue = (round(a + within * (b - a)) for a, b in zip(low, high, strict=True))
    return f"#{red:02x}{green:02x}{blue:02x}"
