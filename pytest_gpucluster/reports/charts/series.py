"""Line charts (rates over sizes, losses over steps, rates over time), and a bar with a value and its limit."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup

from pytest_gpucluster.journal.fields import JudgedMetric
from pytest_gpucluster.reports.charts.svg import (
    ACCENT,
    BAD,
    GOOD,
    GRID,
    INK,
    MUTED,
    SHAPES,
    Drawing,
    Scale,
    end_labels,
    finite,
    span,
    text_width,
    tick_text,
    ticks,
    vertical_axis,
)
from pytest_gpucluster.reports.summary import peak_value
from pytest_gpucluster.reports.tables import limit_text, quantity
from pytest_gpucluster.text import one_line

_WIDTH, _HEIGHT = 680.0, 260.0
_LEFT, _TOP, _BOTTOM = 58.0, 14.0, 42.0
_LABEL_CHARACTERS = 30
_MOST_MARKS = 40
_MOST_POINTS = 240
# Four of Okabe and Ito's colours with contrast on white and on black, then the same with dashes.
# Source: M. Okabe, K. Ito, "Color Universal Design", https://jfly.uni-koeln.de/color/.
_COLOURS = (ACCENT, "var(--series-2, #d55e00)", "var(--series-3, #009e73)", "var(--series-4, #cc79a7)")
_DASHES = ("", "6 3", "2 3")
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
    band: Sequence[tuple[float, float, float]] = (),
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
        levels: drawn across.
        band: (x, from, to) of an area behind the lines, such as the middle half of the ranks.
        x_ticks: place -> text, instead of round values.
        log_x: logarithmic horizontal axis; points at zero or below are left out.
        zero: the vertical axis begins at zero, if no value is below.
    """
    drawn = [_drawable(line, log_x) for line in lines]
    xs = [x for points in drawn for x, y in points if math.isfinite(y)]
    band = [edge for edge in band if len(finite(edge)) == 3]
    ys = finite(
        [
            *(y for points in drawn for _, y in points),
            *(level.value for level in levels),
            *(y for _, *e in band for y in e),
        ]
    )
    named = [*(line.name for line in lines), *(level.name for level in levels)]
    names = [one_line(name, _LABEL_CHARACTERS) for name in named if name]
    right = _WIDTH - 14 - max((text_width(name) for name in names), default=0.0)
    description = _line_description(lines, drawn, levels, y_label)
    drawing = Drawing(_WIDTH, _HEIGHT, title=title, description=description, label="line-chart")
    bottom = _HEIGHT - _BOTTOM
    if not xs or not ys:
        drawing.text(_WIDTH / 2, _HEIGHT / 2, "no values to draw", MUTED, anchor="middle")
        return drawing.done()
    x_low, x_high = min(xs), max(xs)
    if x_low == x_high:
        x_low, x_high = (x_low, min(2 * x_high, sys.float_info.max)) if log_x else (x_low - 0.5, x_high + 0.5)
    x_scale = Scale(low=x_low, high=x_high, start=_LEFT + 8, end=right - 8, log=log_x)
    low, high = span(ys, zero=zero and min(ys) >= 0)
    y_scale = Scale(low=low, high=high, start=bottom, end=_TOP)
    vertical_axis(drawing, y_scale, left=_LEFT, right=right, unit=y_label)
    _horizontal_axis(drawing, x_scale, x_ticks, right, bottom, x_label)
    lower, upper = ([(x_scale(edge[0]), y_scale(edge[side])) for edge in band] for side in (1, 2))
    drawing.area([*lower, *reversed(upper)], MUTED)
    labels: list[tuple[float, str, str]] = []
    for level in levels:
        if math.isfinite(level.value):
            at, colour = y_scale(level.value), _TONES.get(level.tone, INK)
            drawing.line(_LEFT, at, right, at, colour, width=1.2, dash="5 3")
            labels.append((at, level.name, colour))
    numbered = 0
    for line, points in zip(lines, drawn, strict=True):
        colour, dash, shape = _style(line, numbered)
        numbered += not line.tone
        places = [(x_scale(x), y_scale(y) if math.isfinite(y) else None) for x, y in points]
        end = _draw(drawing, line, places, colour=colour, dash=dash, shape=shape)
        if line.name and end is not None:
            labels.append((end, line.name, colour))
    labels = [(at, one_line(name, _LABEL_CHARACTERS), colour) for at, name, colour in labels]
    end_labels(drawing, labels, x=right + 4, lowest=bottom + 6)
    return drawing.done()


def _drawable(line: Line, log_x: bool) -> list[tuple[float, float]]:
    """Return the points that can be drawn, at most 240."""
    points = [(x, y) for x, y in line.points if math.isfinite(x) and (x > 0 or not log_x)]
    every = max(1, math.ceil(len(points) / _MOST_POINTS))
    return [*points[::every], points[-1]] if points and (len(points) - 1) % every else points[::every]


def _style(line: Line, number: int) -> tuple[str, str, str]:
    """Return colour, dash and shape of marks. ``number`` counts the lines that have their own colour."""
    if line.tone:
        return _TONES.get(line.tone, INK), "5 3" if line.dashed else "", "cross" if line.tone == "bad" else "circle"
    dash = _DASHES[number // len(_COLOURS) % len(_DASHES)]
    return _COLOURS[number % len(_COLOURS)], "5 3" if line.dashed else dash, SHAPES[number % len(SHAPES)]


def _draw(
    drawing: Drawing, line: Line, places: Sequence[tuple[float, float | None]], *, colour: str, dash: str, shape: str
) -> float | None:
    """Draw a line with gaps; return the vertical place of its end."""
    width = 1.0 if line.tone == "muted" else 1.8
    for is_gap, group in itertools.groupby(places, key=lambda place: place[1] is None):
        part = [(x, y) for x, y in group if y is not None]
        if not is_gap and line.is_joined and len(part) > 1:
            drawing.path(part, colour, dash=dash, width=width)
    known = [(x, y) for x, y in places if y is not None]
    if len(known) <= _MOST_MARKS and (line.tone != "muted" or not line.is_joined or len(known) == 1):
        for x, y in known:
            drawing.mark(x, y, colour, shape=shape, size=4 if line.tone == "bad" else 2.8)
    return known[-1][1] if known else None


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


def _line_description(
    lines: Sequence[Line], drawn: Sequence[Sequence[tuple[float, float]]], levels: Sequence[Level], unit: str
) -> str:
    parts = []
    for line, points in zip(lines, drawn, strict=True):
        known = finite(y for _, y in points)
        gaps = len(line.points) - len([1 for _, y in line.points if math.isfinite(y)])
        if known:
            text = f"{line.name or 'a line'}: from {tick_text(known[0])} to {tick_text(known[-1])}, "
            text += f"lowest {tick_text(min(known))}, highest {tick_text(max(known))} ({unit})"
        else:
            text = f"{line.name or 'a line'}: no value"
        parts.append(text + (f", {gaps} not finite" if gaps else ""))
    parts += [f"{level.name}: {tick_text(level.value)}" for level in levels if math.isfinite(level.value)]
    return "; ".join(parts)


_BAR_WIDTH, _BAR_HEIGHT = 168.0, 18.0
_BAR_TOP, _THICK = 5.0, 8.0
_BAR_COLOURS = {"passed": GOOD, "failed": BAD, "error": BAD}


def limit_bar(judged: JudgedMetric) -> Markup:
    """Return a bar from zero to the value, a tick at each limit, a diamond at the data sheet's peak.

    If the limit is only a ratio to the other ranks' median, the bar is that ratio. Empty without limit and peak.
    """
    value, interval, bounds, peak = _numbers(judged)
    if not bounds and peak is None:
        return Markup("")
    drawing = Drawing(_BAR_WIDTH, _BAR_HEIGHT, title=_bar_description(judged, peak), label="limit-bar")
    scale = Scale(low=0.0, high=1.06 * max([*finite([value, peak, *bounds]), 1e-300]), start=1.0, end=_BAR_WIDTH - 5)
    middle = _BAR_TOP + _THICK / 2
    drawing.rectangle(1.0, _BAR_TOP, _BAR_WIDTH - 2, _THICK, fill="none", stroke=GRID, stroke_width=0.8)
    if value is None or not math.isfinite(value) or value < 0:
        drawing.text(_BAR_WIDTH / 2, middle + 3.5, "no value to draw", BAD, anchor="middle", size=9)
    else:
        # At least one unit wide, so that a tiny value is visible.
        width = max(1.0, scale(value) - 1.0)
        drawing.rectangle(1.0, _BAR_TOP, width, _THICK, fill=_BAR_COLOURS.get(judged.status, ACCENT))
        if interval is not None:
            low, high = (scale(end) for end in interval)
            drawing.line(low, middle, high, middle, INK, width=1.6)
    for bound in bounds:
        at = scale(bound)
        drawing.line(at, 1.0, at, _BAR_HEIGHT - 1, INK, width=2)
    if peak is not None:
        drawing.mark(scale(peak), middle, MUTED, shape="diamond", size=3.2)
    return drawing.done()


def _numbers(
    judged: JudgedMetric,
) -> tuple[float | None, tuple[float, float] | None, list[float], float | None]:
    """Return value, interval, limits and peak: in the metric's unit, or all as ratios to the others' median."""
    limit = judged.limit
    if limit is None:
        return judged.value, None, [], peak_value(judged)
    bounds = finite([limit.min, limit.max])
    if not bounds and limit.min_ratio_to_median is not None:
        return judged.ratio_to_median, None, [limit.min_ratio_to_median], None
    interval = judged.interval
    if interval is not None and len(finite(interval)) < len(interval):
        interval = None
    return judged.value, interval, [bound for bound in bounds if bound >= 0], peak_value(judged)


def _bar_description(judged: JudgedMetric, peak: float | None) -> str:
    parts = [quantity(judged.value, judged.unit), f"limit {limit_text(judged)}"]
    if peak is not None:
        parts.append(f"data sheet peak {quantity(peak, judged.unit)}")
    return f"{judged.status}: {', '.join(parts)}"
