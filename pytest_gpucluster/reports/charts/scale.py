"""From values to places along an axis, and the ticks that stand there."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from pytest_gpucluster.metrics.units import show

_SMALLEST_SPAN = 1e-12
_LARGEST = 1e300
"""Beyond it arithmetic overflows, and nothing that is measured is there."""


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Maps ``low`` to ``start`` and ``high`` to ``end``; with ``log`` by the logarithm, and then both are positive."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """Return the place of a value; what lies beyond an end is drawn at that end."""
        value = min(max(value, self.low), self.high)
        if self.log:
            along, whole = math.log(value) - math.log(self.low), math.log(self.high) - math.log(self.low)
        else:
            # Halved first: the span of the largest doubles is none that a double can hold.
            along, whole = value / 2 - self.low / 2, self.high / 2 - self.low / 2
        share = along / whole if whole > 0 else 0.5
        return self.start + share * (self.end - self.start)


def finite(values: Iterable[float | None]) -> list[float]:
    """Return the values that can be drawn."""
    return [value for value in values if value is not None and math.isfinite(value)]


def span(values: Iterable[float | None], *, zero: bool = False, pad: float = 0.06) -> tuple[float, float]:
    """Return two ends, the first below the second, with some room around all finite values.

    Args:
        values: to be drawn; without any the ends are 0 and 1.
        zero: the axis begins at zero. No value may be negative then.
        pad: room at either end as a share of the span.
    """
    known = [min(max(value, -_LARGEST), _LARGEST) for value in finite(values)]
    if not known:
        return 0.0, 1.0
    low, high = (0.0 if zero else min(known)), max(known)
    if low == high == 0:
        return 0.0, 1.0
    room = pad * (high - low)
    # Values that hardly differ must not look as if they did: at least 2 % of the largest are seen.
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
        return []  # a double can hardly tell such ticks apart
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)] if last - first < 10 * most else []


def tick_text(value: float, among: Iterable[float] = ()) -> str:
    """Return a tick with as many digits as tell it from the others.

    >>> tick_text(0.2), tick_text(1500.0), tick_text(99.6, [99.5, 99.6])
    ('0.2', '1500', '99.6')
    """
    others = list(among)
    for digits in (3, 4, 6, 9):
        texts = {show(other, "", digits=digits) for other in others}
        if len(texts) == len(set(others)):
            break
    return show(value, "", digits=digits).strip()
