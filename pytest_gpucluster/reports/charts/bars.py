"""A value beside its limit, as a bar in a table's cell."""

from __future__ import annotations

import math

from markupsafe import Markup

from pytest_gpucluster.journal_measurements import JudgedMetric
from pytest_gpucluster.reports.charts.drawing import ACCENT, BAD, GOOD, GRID, INK, MUTED, Drawing
from pytest_gpucluster.reports.charts.scale import Scale, finite
from pytest_gpucluster.reports.outline import peak_value
from pytest_gpucluster.reports.tables import limit_text, quantity

_WIDTH, _HEIGHT = 168.0, 18.0
_TOP, _THICK = 5.0, 8.0
_COLOURS = {"passed": GOOD, "failed": BAD, "error": BAD}


def limit_bar(judged: JudgedMetric) -> Markup:
    """Return a bar from zero to the value, a tick at each limit, a diamond at the data sheet's peak.

    Where the limit is only a share of the other ranks' median, the bar is that share. Without a limit and without a
    peak there is nothing to stand beside, and nothing is drawn.
    """
    value, interval, bounds, peak = _numbers(judged)
    if not bounds and peak is None:
        return Markup("")
    drawing = Drawing(_WIDTH, _HEIGHT, title=_told(judged, peak), label="limit-bar")
    scale = Scale(low=0.0, high=1.06 * max([*finite([value, peak, *bounds]), 1e-300]), start=1.0, end=_WIDTH - 5)
    middle = _TOP + _THICK / 2
    drawing.rectangle(1.0, _TOP, _WIDTH - 2, _THICK, fill="none", stroke=GRID, stroke_width=0.8)
    if value is None or not math.isfinite(value) or value < 0:
        drawing.text(_WIDTH / 2, middle + 3.5, "no value to draw", BAD, anchor="middle", size=9)
    else:
        # A mere hair is seen too: the value is there, and it is next to nothing.
        width = max(1.0, scale(value) - 1.0)
        drawing.rectangle(1.0, _TOP, width, _THICK, fill=_COLOURS.get(judged.status, ACCENT))
        if interval is not None:
            low, high = (scale(end) for end in interval)
            drawing.line(low, middle, high, middle, INK, width=1.6)
    for bound in bounds:
        at = scale(bound)
        drawing.line(at, 1.0, at, _HEIGHT - 1, INK, width=2)
    if peak is not None:
        drawing.mark(scale(peak), middle, MUTED, shape="diamond", size=3.2)
    return drawing.done()


def _numbers(
    judged: JudgedMetric,
) -> tuple[float | None, tuple[float, float] | None, list[float], float | None]:
    """Return value, interval, limits and peak: in the metric's unit, or all as shares of the others' median."""
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


def _told(judged: JudgedMetric, peak: float | None) -> str:
    parts = [quantity(judged.value, judged.unit), f"limit {limit_text(judged)}"]
    if peak is not None:
        parts.append(f"data sheet peak {quantity(peak, judged.unit)}")
    return f"{judged.status}: {', '.join(parts)}"
