"""The few words that may explain a missed value, from what the rank's GPU did meanwhile. Pure.

    >>> explanation({"throttle": ["hw_thermal"], "throttle_share": {"hw_thermal": 0.62},
    ...              "temperature_celsius": [70, 88, 91]})
    'HW thermal slowdown 62 % of the time, 91 degC'

Telemetry travels in plain JSON types from ranks of any version, so nothing is taken for granted: what is not of the
form that ``telemetry.summary`` gives explains nothing. An explanation never decides: a GPU at its power limit is told,
and is as it should be.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

SLOWDOWNS: Mapping[str, str] = MappingProxyType(
    {
        "hw_slowdown": "HW slowdown",
        "hw_thermal": "HW thermal slowdown",
        "sw_thermal": "SW thermal slowdown",
        "hw_power_brake": "HW power brake",
    }
)
"""Throttle reasons of a GPU that is too hot or short of power, as nvidia-smi calls them; the health criterion's set."""

NOTES: Mapping[str, str] = MappingProxyType(
    {
        "sw_power_cap": "power limit {} (normal under full load)",
        "applications_clocks": "clocks held by their setting {} (nvidia-smi -ac, -lgc)",
        "sync_boost": "clocks held to those of other GPUs {} (sync boost)",
        "board_limit": "board limit {}",
        "reliability": "reliability limit {}",
    }
)
"""Throttle reasons that a healthy GPU can have. Source: NVML API reference, nvmlClocksEventReasons."""

LEAST_SHARE = 0.01
"""A slowdown in a smaller part of the time explains nothing that a limit is missed by; this suite's rule."""
NOTED_SHARE = 0.5
"""So much of the time one of the others must be there to be worth a word; this suite's rule."""
NEAR_SLOWDOWN_CELSIUS = 5.0
"""So near to the temperature at which the card slows down it is hot; this suite's rule."""
HOT_CELSIUS = 85.0
"""Hot where the card does not tell that temperature; this suite's rule."""
LOW_CLOCK_RATIO = 0.6
"""An SM clock below this part of the card's highest is far below it; this suite's rule. A GPU at its power limit has a
clock below the highest, too, but by less."""
CHARACTERS = 100
"""A failure's one line has room for so much of it, beside value, limit and rank. What tells least is left out."""
_THERMAL = ("hw_thermal", "sw_thermal", "hw_slowdown")
_VOLUMES = ("_bytes", ".active", ".rate")
_COUNTERS = 3


def explanation(told: Mapping[str, Any]) -> str:
    """Return what may explain a low value, the most telling first; nothing where the GPU did as it should.

    Args:
        told: a summary as ``telemetry.summary`` gives it; beside it ``counters``, what has changed by how much, and
            ``transport``, why data did not take a better way (``nccl_choice.Agreed.beside``).
    """
    parts = [*_transport(told), *_slowdowns(told), *_heat(told), *_clock(told), *_counters(told), *_notes(told)]
    while len(parts) > 1 and len(", ".join(parts)) > CHARACTERS:
        parts.pop()
    return ", ".join(parts)


def most_telling(by_rank: Mapping[int, Mapping[str, Any]]) -> int | None:
    """Return the rank whose GPU was held down for the longest part of the time, or else was the hottest."""

    def telling(rank: int) -> tuple[bool, float, float, int]:
        told = by_rank[rank]
        shares = _shares(told)
        held = max((shares.get(reason, 0.0) for reason in SLOWDOWNS), default=0.0)
        return bool(told.get("lost")), held, _last(told, "temperature_celsius") or 0.0, -rank

    return max(by_rank, key=telling, default=None)


def _transport(told: Mapping[str, Any]) -> Iterator[str]:
    why = told.get("transport")
    if isinstance(why, str) and why:
        yield why


def _slowdowns(told: Mapping[str, Any]) -> Iterator[str]:
    if told.get("lost"):
        yield "the GPU was lost"
    shares = _shares(told)
    found = [reason for reason in SLOWDOWNS if shares.get(reason, 0.0) >= LEAST_SHARE]
    for reason in sorted(found, key=lambda reason: -shares[reason]):
        yield f"{SLOWDOWNS[reason]} {_of_the_time(shares[reason])}"


def _heat(told: Mapping[str, Any]) -> Iterator[str]:
    hottest = _last(told, "temperature_celsius")
    if hottest is None:
        return
    slowdown = _number(told.get("slowdown_celsius"))
    from_here = HOT_CELSIUS if slowdown is None else slowdown - NEAR_SLOWDOWN_CELSIUS
    shares = _shares(told)
    if hottest >= from_here or any(shares.get(reason, 0.0) >= LEAST_SHARE for reason in _THERMAL):
        yield f"{hottest:.0f} degC"


def _clock(told: Mapping[str, Any]) -> Iterator[str]:
    clocks, highest = told.get("sm_clock_mhz"), _number(told.get("sm_clock_max_mhz"))
    if highest is None or not isinstance(clocks, (list, tuple)) or len(clocks) != 3:
        return
    usual = _number(clocks[1])
    if usual is not None and usual < LOW_CLOCK_RATIO * highest:
        yield f"SM clock {usual:.0f} of {highest:.0f} MHz"


def _counters(told: Mapping[str, Any]) -> Iterator[str]:
    changed = told.get("counters")
    if not isinstance(changed, Mapping):
        return
    numbers = {str(name): _number(by) for name, by in changed.items() if not str(name).endswith(_VOLUMES)}
    grown = [f"{name} {by:+g}" for name, by in numbers.items() if by]
    yield from grown[:_COUNTERS]
    if len(grown) > _COUNTERS:
        yield f"{len(grown) - _COUNTERS} more counters"


def _notes(told: Mapping[str, Any]) -> Iterator[str]:
    shares = _shares(told)
    for reason, words in NOTES.items():
        if shares.get(reason, 0.0) >= NOTED_SHARE:
            yield words.format(_of_the_time(shares[reason]))


def _shares(told: Mapping[str, Any]) -> dict[str, float]:
    shares = told.get("throttle_share")
    if not isinstance(shares, Mapping):
        return {}
    numbers = {str(reason): _number(share) for reason, share in shares.items()}
    return {reason: share for reason, share in numbers.items() if share is not None and 0 <= share <= 1}


def _of_the_time(share: float) -> str:
    return f"{100 * share:.0f} % of the time"


def _last(told: Mapping[str, Any], key: str) -> float | None:
    value = told.get(key)
    return _number(value[-1]) if isinstance(value, (list, tuple)) and len(value) == 3 else None


def _number(value: Any) -> float | None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if is_number else None
