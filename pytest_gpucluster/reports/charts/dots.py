"""The value of every rank as a dot: which ranks are slow, and whether it is one GPU, a node, or all."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping

from markupsafe import Markup

from pytest_gpucluster.journal.fields import JudgedMetric
from pytest_gpucluster.journal.journal import Journal
from pytest_gpucluster.judge.misses import straggler_ratios
from pytest_gpucluster.metrics.stats import median, percentile
from pytest_gpucluster.reports.charts.svg import (
    ACCENT,
    BAD,
    INK,
    MUTED,
    Drawing,
    Scale,
    end_labels,
    finite,
    span,
    text_width,
    vertical_axis,
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


def rank_dots(judged: JudgedMetric, journal: Journal) -> Markup:
    """Return a chart of all ranks' values with limit, median, and the names of slow ranks.

    A rank that misses the limit is a cross, the others are circles. Empty without values.
    """
    return _RankDots(judged, journal).draw() if judged.values else Markup("")


def rank_dots_key(judged: JudgedMetric) -> str:
    """Return the legend of ``rank_dots``."""
    has_crosses = bool(_missing(judged, _finite_values(judged)))
    if len(judged.values) > _EACH_RANK:
        each = math.ceil(len(judged.values) / _GROUPS)
        boxes = f"A box has the middle half of {each} neighbouring ranks, its line the whole range."
        return f"{boxes} A ring is an outlier{'; a cross misses the limit' if has_crosses else ''}."
    parts = ["A circle is within the limit, a cross misses it."] if has_crosses else []
    parts += ["The line through a mark is the 95 % interval."] if judged.intervals else []
    return " ".join(parts)


def _finite_values(judged: JudgedMetric) -> dict[int, float]:
    return {rank: value for rank, value in judged.values.items() if math.isfinite(value)}


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
    lower_is_worse = is_better_higher(judged) is not False
    worst_first = sorted(values, key=lambda rank: (values[rank] if lower_is_worse else -values[rank], rank))
    chosen = {rank: "" for rank in worst_first if rank in missing}
    if len(chosen) > _MOST_NAMES:
        # If many miss it, such as all of a node, only the worst is labelled.
        worst = judged.worst_rank if judged.worst_rank in chosen else next(iter(chosen))
        chosen = {worst: f" and {len(chosen) - 1} more"}
    outliers = set(_outliers(values))
    chosen |= {rank: "" for rank in worst_first if rank in outliers and rank not in missing}
    return dict(list(chosen.items())[:_MOST_NAMES])


def _outliers(values: Mapping[int, float]) -> Iterator[int]:
    """Yield the ranks that are far from the middle half."""
    if len(values) < 8:
        return
    low, high = (percentile(list(values.values()), percent) for percent in (25, 75))
    # Nearly equal values have no outliers: at least 1 % is tolerated.
    tolerated = max(_FENCE * (high - low), 0.01 * max(abs(low), abs(high)))
    for rank, value in values.items():
        if not low - tolerated <= value <= high + tolerated:
            yield rank


class _RankDots:
    """The chart while it is drawn."""

    def __init__(self, judged: JudgedMetric, journal: Journal) -> None:
        self.judged, self.journal = judged, journal
        self.values = _finite_values(judged)
        self.broken = sorted(judged.values.keys() - self.values.keys())
        """Ranks whose value is no number, or infinite."""
        self.missing = _missing(judged, self.values)
        self.labelled = _labelled(judged, self.values, self.missing)
        self.order = sorted(judged.values)
        self.has_each = len(self.order) <= _EACH_RANK
        self.levels = self._levels()
        self.bottom = _HEIGHT - _BOTTOM
        self.lane = self.bottom + (_LANE if self.broken else 0.0)
        self.right = _WIDTH - 10 - max((text_width(name, _LABEL) for _, name, _ in self.levels), default=0.0)
        self.step = (self.right - _LEFT) / len(self.order)
        bounds = [] if judged.limit is None else [judged.limit.min, judged.limit.max]
        ends = [end for pair in judged.intervals.values() for end in pair] if self.has_each else []
        low, high = span([*self.values.values(), *bounds, *ends])
        self.y = Scale(low=low, high=high, start=self.bottom, end=_TOP)
        title = f"{metric_name(judged)} of {len(judged.values)} ranks"
        height = self.lane + _BOTTOM
        self.drawing = Drawing(_WIDTH, height, title=title, description=self._description(), label="rank-dots")

    def draw(self) -> Markup:
        """Return the chart."""
        drawing = self.drawing
        vertical_axis(drawing, self.y, left=_LEFT, right=self.right, unit=self.judged.unit, most=5)
        self._hosts()
        if self.has_each:
            self._each_rank()
        else:
            self._groups()
        for value, _, colour in self.levels:
            width, dash = (1.4, "6 3") if colour == INK else (1.2, "2 3")
            drawing.line(_LEFT, self.y(value), self.right, self.y(value), colour, width=width, dash=dash)
        labels = [(self.y(value), name, colour) for value, name, colour in self.levels]
        end_labels(drawing, labels, x=self.right + 4, lowest=self.bottom + 4, size=_LABEL)
        for rank in self.broken[:_EACH_RANK]:
            drawing.text(self._x(rank), self.lane - 3, "?", BAD, anchor="middle", bold=True)
        self._names()
        return drawing.done()

    def _x(self, rank: int) -> float:
        return _LEFT + (self.order.index(rank) + 0.5) * self.step

    def _levels(self) -> list[tuple[float, str, str]]:
        """Return the horizontal lines, median and limits: (value, name, colour)."""
        found = [(median(list(self.values.values())), "median", MUTED)] if len(self.values) > 1 else []
        limit = self.judged.limit
        for sign, bound in (("≥", limit.min), ("≤", limit.max)) if limit is not None else ():
            if bound is not None and math.isfinite(bound):
                found.append((bound, f"limit {sign} {quantity(bound, self.judged.unit)}", INK))
        return found

    def _each_rank(self) -> None:
        for rank in self.values:
            interval, x = self.judged.intervals.get(rank), self._x(rank)
            if interval is not None and len(finite(interval)) == len(interval):
                colour = BAD if rank in self.missing else ACCENT
                self.drawing.line(x, self.y(interval[0]), x, self.y(interval[1]), colour, width=1)
            self._mark(rank, "circle", ACCENT, size=3.2)

    def _groups(self) -> None:
        """Draw a box plot of each group, middle half and range, and marks of the conspicuous ranks."""
        each = math.ceil(len(self.order) / _GROUPS)
        for first in range(0, len(self.order), each):
            ranks = self.order[first : first + each]
            members = finite(self.values.get(rank) for rank in ranks)
            if not members:
                continue
            left, width = _LEFT + first * self.step, len(ranks) * self.step
            top, below = self.y(percentile(members, 75)), self.y(percentile(members, 25))
            middle = left + width / 2
            self.drawing.line(middle, self.y(max(members)), middle, self.y(min(members)), MUTED, width=0.8)
            self.drawing.rectangle(left + 0.12 * width, top, 0.76 * width, max(1.2, below - top), fill=ACCENT)
        for rank in {*self.labelled, *list(self.missing)[:_EACH_RANK]} & self.values.keys():
            self._mark(rank, "ring", INK, size=3.0)

    def _mark(self, rank: int, shape: str, colour: str, *, size: float) -> None:
        if rank in self.missing:
            shape, colour = "cross", BAD
        self.drawing.mark(self._x(rank), self.y(self.values[rank]), colour, shape=shape, size=size)

    def _hosts(self) -> None:
        """Write the hosts below their ranks, as far as they fit, separated by lines."""
        drawing, bottom, step = self.drawing, self.lane, self.step
        drawing.line(_LEFT, bottom, _LEFT + step * len(self.order), bottom, MUTED)
        places = map(self.journal.place, self.order)
        hosts = [place.host if place is not None else "" for place in places]
        groups = [(host, len(list(members))) for host, members in itertools.groupby(hosts)]
        left, free = _LEFT, -math.inf
        for host, count in groups:
            right = left + count * step
            if len(groups) <= _GROUPS:
                drawing.line(left, bottom, left, bottom + 5, MUTED)
            name, middle = one_line(host, 20), (left + right) / 2
            half = text_width(name, 10) / 2
            if name and middle - half > free:
                drawing.text(middle, bottom + 14, name, MUTED, anchor="middle", size=10)
                free = middle + half + 6
            left = right
        ends = f"ranks {self.order[0]} to {self.order[-1]}" if len(self.order) > 1 else f"rank {self.order[0]}"
        drawing.text(_LEFT + step * len(self.order) / 2, bottom + 29, ends, MUTED, anchor="middle", size=10)

    def _names(self) -> None:
        """Write the names of conspicuous ranks next to their marks, without overlap."""
        taken: list[tuple[float, float, float]] = []
        broken = dict.fromkeys(self.broken[:_MOST_NAMES], ": no number")
        for rank, more in {**self.labelled, **broken}.items():
            mark = self.lane - 3 if rank in broken else self.y(self.values[rank])
            name = one_line(f"{rank_name(self.journal, rank, is_short=True)}{more}", _NAME_CHARACTERS)
            half = text_width(name, _LABEL) / 2
            x = min(max(self._x(rank), _LEFT + half), self.right - half)
            is_high = mark < (_TOP + self.bottom) / 2
            y = mark + (15.0 if is_high else -8.0)
            for _ in range(_MOST_NAMES):
                if not any(abs(y - other) < 11 and x - half < end and begin < x + half for other, begin, end in taken):
                    break
                y += 11.5 if is_high else -11.5
            taken.append((y, x - half, x + half))
            colour = BAD if rank in self.missing or rank in broken else INK
            self.drawing.text(x, y, name, colour, anchor="middle", size=_LABEL)

    def _description(self) -> str:
        unit, values = self.judged.unit, list(self.values.values())
        parts = []
        if values:
            ends = f"{quantity(min(values), unit)} to {quantity(max(values), unit)}"
            parts.append(f"{len(values)} values from {ends}, median {quantity(median(values), unit)}")
        if self.judged.limit is not None:
            parts.append(f"limit {limit_text(self.judged)}")
        if self.missing:
            parts.append(f"{len(self.missing)} ranks miss it")
        if self.broken:
            parts.append(f"{len(self.broken)} ranks have no number")
        for rank, more in self.labelled.items():
            what = self.missing.get(rank, "is an outlier")
            parts.append(f"{rank_name(self.journal, rank)} {what}: {quantity(self.values[rank], unit)}{more}")
        return "; ".join(parts)
