"""One look at a GPU through NVML, in plain JSON types: each figure, or why there is none."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any, Protocol

from pytest_gpucluster.nvml import NotAvailable
from pytest_gpucluster.process_table import Who, who_is
from pytest_gpucluster.telemetry import QUERIES as OF_TELEMETRY

PROCESSES, NVLINK = "processes", "nvlink_bytes"

QUERIES: Mapping[str, str] = MappingProxyType(
    {
        "utilization_percent": OF_TELEMETRY["utilization_percent"],
        "memory_used_bytes": "memory.used",
        "memory_total_bytes": "memory.total",
        "temperature_celsius": OF_TELEMETRY["temperature_celsius"],
        "power_watts": OF_TELEMETRY["power_watts"],
        "power_limit_watts": "power.limit",
        "sm_clock_mhz": OF_TELEMETRY["sm_clock_mhz"],
        "memory_clock_mhz": OF_TELEMETRY["memory_clock_mhz"],
        "throttle": OF_TELEMETRY["throttle"],
        NVLINK: "nvlink.bytes",
        PROCESSES: "processes",
    }
)
"""Key of a look -> NVML query. What each is in is in its name."""

FEW = ("utilization_percent", "memory_used_bytes", "memory_total_bytes", "temperature_celsius", "power_watts")
"""What is asked beside a measurement, where each question counts."""


class Reader(Protocol):
    """What is needed of ``nvml.Nvml``."""

    def read(self, uuid: str, query: str) -> Any:
        """Return the answer to one query. Raises: NotAvailable if this GPU or driver has none."""


def glance(
    nvml: Reader, uuid: str, keys: Collection[str] = tuple(QUERIES), *, who: Callable[[int], Who] = who_is
) -> dict[str, Any]:
    """Ask a GPU for ``keys`` of :data:`QUERIES`.

    Returns:
        ``uuid``; each key with its value; ``not_available``, the other keys, each with the reason; ``lost``, what NVML
        said where it cannot reach the GPU any more, else "". Nothing that NVML does raises.
    """
    told: dict[str, Any] = {"uuid": uuid}
    missing: dict[str, str] = {}
    lost = ""
    for key in keys:
        if lost:
            missing[key] = lost
            continue
        try:
            told[key] = _plain(key, nvml.read(uuid, QUERIES[key]), who)
        except NotAvailable as error:
            missing[key] = str(error) or "not available"
            lost = missing[key] if error.kind == "lost" else ""
        except Exception as error:  # whatever a binding or a driver comes up with; what is lost is named
            missing[key] = f"{type(error).__name__}: {error}"
    return {**told, "not_available": missing, "lost": lost}


def _plain(key: str, value: Any, who: Callable[[int], Who]) -> Any:
    """Return a value as it is told.

    Raises:
        ValueError: NVML gave something else than it should.
    """
    if key == "throttle":
        return [str(name) for name in value if name != "gpu_idle"]  # an idle GPU is held down by its idleness
    if key == NVLINK:
        return {way: int(value[way]) for way in ("sent", "received")}
    if key == PROCESSES:
        return [_process(who(int(pid)), memory) for pid, memory in value]
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"NVML gave {value!r:.60}")
    return value


def _process(who: Who, memory_bytes: int | None) -> dict[str, Any]:
    return {
        "pid": who.pid,
        "user": who.user or None,
        # Foreign text, and it is on its way to a terminal; how it is made visible there is not decided here.
        "command": who.command if who.known else None,
        "memory_bytes": memory_bytes,
    }
