"""What a GPU did during a measurement, as one line.

Telemetry travels in plain JSON types from ranks of any version, so nothing is taken for granted here: what is not of
the form that ``telemetry.summary`` gives is shown as it is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from pytest_gpucluster.judge.misses import most_telling
from pytest_gpucluster.text import one_line

_REASON_CHARACTERS = 80
_OTHER_CHARACTERS = 400
_CLOCK, _HIGHEST = "sm_clock_mhz", "sm_clock_max_mhz"
# key: (words before the figure, unit, words where it is not available)
_FIGURES = {
    _CLOCK: ("sm clock ", "MHz", "sm clock"),
    "memory_clock_mhz": ("memory clock ", "MHz", "memory clock"),
    "power_watts": ("", "W", "power"),
    "temperature_celsius": ("", "degC", "temperature"),
    "utilization_percent": ("utilisation ", "%", "utilisation"),
}


# What says how much was read, and not what; and what stands beside another figure.
_ABOUT_READING = ("seconds", "samples", "lost", "throttle_share", _HIGHEST, "slowdown_celsius")
_FOR_MACHINES = ("adapters",)
"""What other keys tell in words."""
_COUNTED = ("counters", "counter_notes", "counters_not_available")


def telemetry_text(told: Mapping[str, Any]) -> str:
    """Return all that is known of one GPU during one measurement; an empty text if that is nothing.

    Of throttle reasons the part of the time is told, of counters by how much they have changed. What a test adds of its
    own, such as notes, follows by its name.

    >>> telemetry_text({"sm_clock_mhz": [1740, 1755, 1980], "power_watts": [698, 698, 698], "throttle": []})
    'sm clock 1755 MHz (1740 to 1980), 698 W, no throttle'
    """
    parts = [_figure(key, told) for key in _FIGURES if key in told]
    return ", ".join([*parts, *_throttle(told), *_counted(told), *_others(told), *_not_available(told)])


def telemetry_of_test(by_rank: Mapping[int, Mapping[str, Any]], culprits: Sequence[int] = ()) -> str:
    """Return what a GPU did during a whole test: that of a culprit, or else the one that tells most."""
    rank = next((rank for rank in culprits if rank in by_rank), None)
    rank = most_telling(by_rank) if rank is None else rank
    text = telemetry_text(by_rank[rank]) if rank is not None else ""
    return f"rank {rank}: {text}" if text else ""


def clock_text(told: Mapping[str, Any]) -> str:
    """Return what may explain a low value: the clock and the throttle reasons, as far as they are known.

    >>> clock_text({"sm_clock_mhz": [1200, 1200, 1980], "power_watts": [400, 410, 420], "throttle": ["hw_thermal"]})
    'sm clock 1200 MHz (1200 to 1980), throttle: hw_thermal'
    """
    parts = [_figure(_CLOCK, told)] if _CLOCK in told else []
    return ", ".join([*parts, *_throttle(told)])


def _figure(key: str, told: Mapping[str, Any]) -> str:
    value, (before, unit, _) = told[key], _FIGURES[key]
    if not isinstance(value, (list, tuple)) or len(value) != 3 or not all(map(_is_number, value)):
        return f"{before}{one_line(repr(value), _REASON_CHARACTERS)} {unit}"
    low, median, high = (f"{each:.0f}" for each in value)
    spread = f" ({low} to {high})" if low != high else ""
    highest = told.get(_HIGHEST)
    of_highest = f" of {highest:.0f}" if key == _CLOCK and _is_number(highest) else ""
    return f"{before}{median}{of_highest} {unit}{spread}"


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _throttle(told: Mapping[str, Any]) -> list[str]:
    reasons = told.get("throttle")
    if reasons is None:
        return []
    if not isinstance(reasons, (list, tuple)):
        reasons = [reasons]
    shares = told.get("throttle_share")
    shares = shares if isinstance(shares, Mapping) else {}
    names = [one_line(str(reason), _REASON_CHARACTERS) + _share(shares.get(str(reason))) for reason in reasons]
    return [f"throttle: {', '.join(names)}" if names else "no throttle"]


def _share(share: Any) -> str:
    return f" {100 * share:.0f} %" if _is_number(share) else ""


def _counted(told: Mapping[str, Any]) -> list[str]:
    """Return what the counters have counted, errors before amounts of data, and what was not counted."""
    changed, notes, missing = (told.get(key) for key in _COUNTED)
    parts = []
    if isinstance(changed, Mapping) and changed:
        names = sorted(changed, key=lambda name: str(name).endswith("_bytes"))
        listed = [f"{name} {changed[name]:+g}" if _is_number(changed[name]) else str(name) for name in names]
        parts.append(f"counters: {'; '.join(listed)}")
    if notes:
        parts.append(f"counters: {_listed(notes)}")
    if isinstance(missing, Mapping) and missing:
        parts.append(f"not counted: {', '.join(f'{name} ({why})' for name, why in missing.items())}")
    return [one_line(part, _OTHER_CHARACTERS) for part in parts]


def _others(told: Mapping[str, Any]) -> list[str]:
    known = {*_FIGURES, *_ABOUT_READING, *_COUNTED, *_FOR_MACHINES, "throttle", "not_available"}
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
