"""What a GPU did during a measurement, as one line.

Telemetry travels in plain JSON types from ranks of any version, so nothing is taken for granted here: what is not of
the form that ``telemetry.summary`` gives is shown as it is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from pytest_gpucluster.wording import one_line

_REASON_CHARACTERS = 80
_OTHER_CHARACTERS = 400
_CLOCK = "sm_clock_mhz"
# key: (words before the figure, unit, words where it is not available)
_FIGURES = {
    _CLOCK: ("sm clock ", "MHz", "sm clock"),
    "memory_clock_mhz": ("memory clock ", "MHz", "memory clock"),
    "power_watts": ("", "W", "power"),
    "temperature_celsius": ("", "degC", "temperature"),
    "utilization_percent": ("utilisation ", "%", "utilisation"),
}


# What says how much was read, and not what.
_ABOUT_READING = ("seconds", "samples", "lost")


def telemetry_text(told: Mapping[str, Any]) -> str:
    """Return all that is known of one GPU during one measurement; an empty text if that is nothing.

    What a test adds of its own, such as notes, follows by its name.

    >>> telemetry_text({"sm_clock_mhz": [1740, 1755, 1980], "power_watts": [698, 698, 698], "throttle": []})
    'sm clock 1755 MHz (1740 to 1980), 698 W, no throttle'
    """
    parts = [_figure(key, told[key]) for key in _FIGURES if key in told]
    return ", ".join([*parts, *_throttle(told), *_others(told), *_not_available(told)])


def clock_text(told: Mapping[str, Any]) -> str:
    """Return what may explain a low value: the clock and the throttle reasons, as far as they are known.

    >>> clock_text({"sm_clock_mhz": [1200, 1200, 1980], "power_watts": [400, 410, 420], "throttle": ["hw_thermal"]})
    'sm clock 1200 MHz (1200 to 1980), throttle: hw_thermal'
    """
    parts = [_figure(_CLOCK, told[_CLOCK])] if _CLOCK in told else []
    return ", ".join([*parts, *_throttle(told)])


def _figure(key: str, value: Any) -> str:
    before, unit, _ = _FIGURES[key]
    if not isinstance(value, (list, tuple)) or len(value) != 3 or not all(map(_is_number, value)):
        return f"{before}{one_line(repr(value), _REASON_CHARACTERS)} {unit}"
    low, median, high = (f"{each:.0f}" for each in value)
    spread = f" ({low} to {high})" if low != high else ""
    return f"{before}{median} {unit}{spread}"


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _throttle(told: Mapping[str, Any]) -> list[str]:
    reasons = told.get("throttle")
    if reasons is None:
        return []
    if not isinstance(reasons, (list, tuple)):
        reasons = [reasons]
    names = [one_line(str(reason), _REASON_CHARACTERS) for reason in reasons]
    return [f"throttle: {', '.join(names)}" if names else "no throttle"]


def _others(told: Mapping[str, Any]) -> list[str]:
    known = {*_FIGURES, *_ABOUT_READING, "throttle", "not_available"}
    others = {key: value for key, value in told.items() if key not in known and value not in (None, "", [], {})}
    return [one_line(f"{key}: {_listed(value)}", _OTHER_CHARACTERS) for key, value in others.items()]


def _listed(value: Any) -> str:
    return "; ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def _not_available(told: Mapping[str, Any]) -> list[str]:
    missing = told.get("not_available")
    if not isinstance(missing, Mapping):
        return []
    by_reason: dict[str, list[str]] = {}
    for key, reason in missing.items():
        name = _FIGURES[key][2] if key in _FIGURES else one_line(str(key), _REASON_CHARACTERS)
        by_reason.setdefault(one_line(str(reason), _REASON_CHARACTERS), []).append(name)
    return [f"not available: {', '.join(names)} ({reason})" for reason, names in by_reason.items()]
