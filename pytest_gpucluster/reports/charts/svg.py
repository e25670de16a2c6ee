"""SVG drawings: elements with escaped text and a text alternative, and the scales and ticks of their axes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

from pytest_gpucluster.metrics.units import show
from pytest_gpucluster.text import one_line, printable

INK = "var(--ink, #222)"
MUTED = "var(--muted, #666)"
GRID = "var(--grid, #ccc)"
GOOD = "var(--good, #00785a)"
BAD = "var(--bad, #b8460e)"
ACCENT = "var(--accent, #0072b2)"

Svg = Markup
"""A finished drawing."""
Point = tuple[float, float]
SHAPES = ("circle", "square", "diamond", "cross")
"""Of marks."""
_TITLE_CHARACTERS = 200
_TEXT_CHARACTERS = 60
_CHARACTER_WIDTH = 0.56
"""Average ratio to the size of a sans-serif font; only for reserving space."""


class Drawing:
    """Elements in drawing order. Lengths are in units of the drawing, which scales as a whole.

    Args:
        width: of the drawing.
        height: of the drawing.
        title: what it shows, in a few words: its text alternative.
        label: a class in addition to ``chart-svg``, for the page's stylesheet.
    """

    def __init__(self, width: float, height: float, *, title: str, label: str = "") -> None:
        self.width, self.height = width, height
        self._parts: list[Markup] = []
        self._title, self._label = title, label

    def _add(self, name: str, text: str | None = None, /, **attributes: object) -> None:
        attribute_text = Markup("").join(
            Markup(' {}="{}"').format(key.replace("_", "-"), _number(value))
            for key, value in attributes.items()
            if value is not None
        )
        if text is None:
            self._parts.append(Markup("<{}{}/>").format(Markup(name), attribute_text))
        else:
            inner = escape(_safe(text, _TEXT_CHARACTERS))
            self._parts.append(Markup("<{0}{1}>{2}</{0}>").format(Markup(name), attribute_text, inner))

    def line(
        self, x1: float, y1: float, x2: float, y2: float, colour: str, *, width: float = 1, dash: str = ""
    ) -> None:
        """A straight line. ``dash`` is SVG's stroke-dasharray."""
        self._add("line", x1=x1, y1=y1, x2=x2, y2=y2, stroke=colour, stroke_width=width, stroke_dasharray=dash or None)

    def path(self, points: Sequence[Point], colour: str, *, width: float = 1.5, dash: str = "") -> None:
        """A line through points."""
        style = {"stroke_width": width, "stroke_dasharray": dash or None, "stroke_linejoin": "round"}
        self._add("path", d=_path(points), fill="none", stroke=colour, **style)

    def rectangle(self, x: float, y: float, width: float, height: float, **style: object) -> None:
        """A rectangle; ``style`` has SVG's attributes, such as ``stroke_width``."""
        self._add("rect", x=x, y=y, width=max(0.0, width), height=max(0.0, height), **style)

    def marks(self, points: Sequence[Point], colour: str, *, shape: str = "circle", size: float = 3) -> None:
        """Marks of one of the ``SHAPES``, so that they differ by more than colour. All are one short element."""
        if not points:
            return
        if shape == "diamond":
            wide = 1.3 * size
            corners = ([(x, y - wide), (x + wide, y), (x, y + wide), (x - wide, y)] for x, y in points)
            self._add("path", d="".join(f"{_path(each)}Z" for each in corners), fill=colour)
            return
        stroke, width, cap = "h0", 2 * size, "round" if shape == "circle" else "square"
        if shape == "cross":
            points = [(x - size, y - size) for x, y in points]
            stroke, width, cap = f"l{2 * size} {2 * size}m0 {-2 * size}l{-2 * size} {2 * size}", 1.8, "butt"
        path = "".join(_path([point]) + stroke for point in points)
        self._add("path", d=path, fill="none", stroke=colour, stroke_width=width, stroke_linecap=cap)

    def text(
        self, x: float, y: float, text: str, colour: str = INK, *, anchor: str = "", size: float = 0, bold: bool = False
    ) -> None:
        """A text on one line, with its baseline at ``y``; ``anchor`` is middle, end, or empty for its start."""
        style = {"text_anchor": anchor or None, "font_size": size or None, "font_weight": "bold" if bold else None}
        self._add("text", text, x=x, y=y, fill=colour, **style)

    def done(self) -> Markup:
        """Return the whole element."""
        return Markup(
            '<svg class="chart-svg {label}" role="img" viewBox="0 0 {width} {height}" width="{width}" '
            'height="{height}" font-size="11" xmlns="http://www.w3.org/2000/svg">'
            "<title>{title}</title>{parts}</svg>"
        ).format(
            label=self._label,
            width=_number(self.width),
            height=_number(self.height),
            title=_safe(self._title, _TITLE_CHARACTERS),
            parts=Markup("").join(self._parts),
        )


def text_width(text: str, size: float = 11) -> float:
    """Return the approximate width of a text."""
    return min(len(text), _TEXT_CHARACTERS) * size * _CHARACTER_WIDTH


def _safe(text: str, characters: int) -> str:
    return printable(one_line(text, characters))


def _path(points: Sequence[Point]) -> str:
    return "M" + "L".join(f"{_number(x)} {_number(y)}" for x, y in points)


def _number(value: object) -> object:
    """Return a length with few digits.

    Raises: ValueError for NaN and infinities, which cannot be drawn.
    """
    if not isinstance(value, float):
        return value
    if not math.isfinite(value):
        raise ValueError(f"a length of a drawing is {value!r}")
    return f"{value:.2f}".rstrip("0").rstrip(".")


_SMALLEST_SPAN = 1e-12
_LARGEST = 1e300
"""Beyond it arithmetic overflows."""


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Maps ``low`` to ``start`` and ``high`` to ``end``; with ``log`` both must be positive."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """Return the place of a value, clipped to the ends."""
        value = min(max(value, self.low), self.high)
        if self.log:
            along, whole = math.log(value) - math.log(self.low), math.log(self.high) - math.log(self.low)
        else:
            # Halved first, because the span of the largest doubles overflows.
            along, whole = value / 2 - self.low / 2, self.high / 2 - self.low / 2
        share = along / whole if whole > 0 else 0.5
        return self.start + share * (self.end - self.start)


def finite(values: Iterable[float | None]) -> list[float]:
    """Return the finite values."""
    return [value for value in values if value is not None and math.isfinite(value)]


def span(values: Iterable[float | None], *, zero: bool = False) -> tuple[float, float]:
    """Return two ends, the first below the second, with padding of 6 % of the span around all finite values.

    Args:
        values: to be drawn; default ends are 0 and 1.
        zero: the axis begins at zero. No value may be negative then.
    """
    known = [min(max(value, -_LARGEST), _LARGEST) for value in finite(values)]
    if not known:
        return 0.0, 1.0
    low, high = (0.0 if zero else min(known)), max(known)
    if low == high == 0:
        return 0.0, 1.0
    room = 0.06 * (high - low)
    # At least 2 % of the largest value, so that tiny differences do not look large.
    room = max(room, 0.01 * max(abs(low), abs(high)), _SMALLEST_SPAN)
    low_end = low if zero else low - room
    if low >= 0 > low_end:
        low_end = 0.0
    high_end = high + room
    return low_end, max(high_end, low_end + _SMALLEST_SPAN)


def ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Return round values between two ends: steps of 1, 2 or 5 times a power of ten.

    >>> ticks(0, 731)
    [0.0, 200.0, 400.0, 600.0]
    """
    width = high - low
    if not (math.isfinite(width) and width > 0):
        return []
    rough = width / max(1, most - 1)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next((factor * power for factor in (1, 2, 5, 10) if factor * power >= rough), 10 * power)
    if step <= _SMALLEST_SPAN * max(abs(low), abs(high)):
        return []  # ticks this close are not distinct doubles
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)] if last - first < 10 * most else []


def tick_text(value: float, among: Iterable[float] = ()) -> str:
    """Return a tick with enough digits to distinguish it from the others.

    >>> tick_text(0.2), tick_text(1500.0), tick_text(99.6, [99.5, 99.6])
    ('0.2', '1500', '99.6')
    """
    others = list(among)
    for digits in (3, 4, 6, 9):
        texts = {show(other, "", digits=digits) for other in others}
        if len(texts) == len(set(others)):
            break
    return show(value, "", digits=digits).strip()
