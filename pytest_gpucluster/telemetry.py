"""What a GPU did during a window of time, in plain JSON types: clocks, power, temperature, utilisation and what held
the clocks down. Pure; ``node_sampler`` is how a rank gets it.

    {"seconds": 3.1, "samples": 31, "sm_clock_mhz": [1740, 1755, 1980], "throttle": ["hw_thermal"],
     "throttle_share": {"hw_thermal": 0.62}, ..., "not_available": {}}

Some figures look back further than one interval: utilisation is that of the last 1/6 to 1 s, and from the Ampere
generation on (but for the A100) power is the mean of the last second. So the first second of a window also tells of
what was before it.
Source: NVML API Reference, nvmlUtilization_t and nvmlDeviceGetPowerUsage,
https://docs.nvidia.com/deploy/nvml-api/.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from pytest_gpucluster.metrics import stats

THROTTLE = "throttle"
QUERIES: Mapping[str, str] = MappingProxyType(
    {
        "sm_clock_mhz": "clock.sm",
        "memory_clock_mhz": "clock.memory",
        "power_watts": "power.draw",
        "temperature_celsius": "temperature.gpu",
        "utilization_percent": "utilization.gpu",
        THROTTLE: "throttle.reasons",
    }
)
"""Key in a summary -> NVML query. What each is in is in its name; ``throttle`` lists names of reasons."""

OF_THE_CARD: Mapping[str, str] = MappingProxyType(
    {"sm_clock_max_mhz": "clock.sm.max", "slowdown_celsius": "temperature.slowdown"}
)
"""Key in a summary -> NVML query, of what does not change. A card that does not tell them is none the worse for it."""

INTERVAL_SECONDS = 0.1
"""As a rule; a workload's ``telemetry.interval`` says otherwise."""

# An idle GPU is said to be throttled by its idleness.
_NO_THROTTLE = "gpu_idle"


def summary(
    readings: Mapping[str, Sequence[Any]],
    *,
    seconds: float,
    not_available: Mapping[str, str],
    lost: str = "",
    throttle_seconds: Mapping[str, float] | None = None,
    card: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """Sum up a window in plain JSON types.

    Args:
        readings: key of ``QUERIES`` -> what was read, in the order of time.
        seconds: how long the window was open.
        not_available: key -> why it could not be read, or not any longer.
        lost: what NVML said when it could not reach the GPU any more.
        throttle_seconds: throttle reason -> how long it was there.
        card: key of ``OF_THE_CARD`` -> its value.

    Returns:
        ``seconds``; ``samples``, the most readings of any key; for each key that was read ``[min, median, max]``, but
        for ``throttle`` all reasons seen; ``throttle_share``, the part of the window, from 0 to 1, in which each of
        them was there; ``card``'s keys; ``not_available``, which names every other key, and those that failed later;
        ``lost`` only if the GPU was lost.
    """
    missing = dict(not_available)
    result: dict[str, Any] = {
        "seconds": round(seconds, 3),
        "samples": max((len(read) for read in readings.values()), default=0),
    }
    for key in QUERIES:
        read = readings.get(key, ())
        if not len(read):
            missing.setdefault(key, "no reading in this window")
        elif key == THROTTLE:
            reasons = dict.fromkeys(reason for names in read for reason in names)
            result[key] = [reason for reason in reasons if reason != _NO_THROTTLE]
            if throttle_seconds is not None:
                result["throttle_share"] = _shares(result[key], throttle_seconds, seconds)
        else:
            result[key] = [round(value, 1) for value in (min(read), stats.median(read), max(read))]
    result |= {key: round(value, 1) for key, value in (card or {}).items()}
    result["not_available"] = {key: missing[key] for key in QUERIES if key in missing}
    if lost:
        result["lost"] = lost
    return result


def _shares(reasons: Sequence[str], spent: Mapping[str, float], seconds: float) -> dict[str, float]:
    """Return the part of the window of each reason; where the window took no time, it was there or was not."""
    if seconds <= 0:
        return dict.fromkeys(reasons, 1.0)
    return {reason: round(min(1.0, spent.get(reason, 0.0) / seconds), 4) for reason in reasons}


def nothing(why: str, *, seconds: float = 0.0) -> dict[str, Any]:
    """Return the summary of a window in which nothing could be read."""
    return summary({}, seconds=seconds, not_available=dict.fromkeys(QUERIES, why))


def checked(key: str, value: Any) -> Any:
    """Return a reading that can be summed up: a finite float, or for ``throttle`` a tuple of names.

    Raises:
        ValueError: NVML gave something else.
    """
    if key == THROTTLE:
        if isinstance(value, (tuple, list, set, frozenset)) and all(isinstance(name, str) for name in value):
            return tuple(value)
    elif isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    raise ValueError(f"NVML gave {value!r:.60}")
