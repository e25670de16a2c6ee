"""Reads a node's state: the reader process as its parent sees it, one sample of a GPU, and the host's load.

The process is :mod:`pytest_gpucluster.node.health.node_reader_process`; its parent never waits for it. Asking NVML in a
process of its own has two reasons: a driver that hangs hangs there, and a measuring process never shares an interpreter
with the questions.

A sample of a GPU (NVML) is in plain JSON types: each figure, or why there is none. The host's load is from /proc: load,
the time its CPUs have spent, memory.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import Any, Protocol

from pytest_gpucluster.launch import detached_process
from pytest_gpucluster.node.health.telemetry import QUERIES as OF_TELEMETRY
from pytest_gpucluster.node.limits import Tree
from pytest_gpucluster.node.nvml import NotAvailable
from pytest_gpucluster.node.processes import Who, who_is

COMMAND: tuple[str, ...] = (sys.executable, "-m", "pytest_gpucluster.node.health.node_reader_process")
"""What is started. A test puts its own in the place, with GPUs that are not there."""

_END_SECONDS = 1.0


class NodeReader:
    """Starts the process, and hands over each thing that it tells, in a thread of its own.

    Args:
        take: called with each line, and with ``{"ended": exit code}`` when the process has ended on its own.
        interval_seconds: from one look to the next.
        few: only the figures of GPUs that a glance beside a measurement needs.

    Raises:
        OSError: no process, or no thread, can be started.
    """

    def __init__(
        self, take: Callable[[Mapping[str, Any]], None], interval_seconds: float, *, few: bool = False
    ) -> None:
        self._take = take
        self._is_closing = False
        command = [*COMMAND, "--interval", str(interval_seconds), "--parent", str(os.getpid()), *["--few"] * few]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env=detached_process.child_environment(),
        )
        try:
            threading.Thread(target=self._listen, name="gpucluster-reader", daemon=True).start()
        except RuntimeError as error:
            self.close()
            raise OSError(f"{error}") from error

    def close(self) -> None:
        """End it. It writes nothing but what it tells, so it can be ended at any moment."""
        self._is_closing = True
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # stuck in the driver: it is gone when that answers
            self._process.wait(timeout=_END_SECONDS)
        self._process.returncode = self._process.returncode or 0  # no warning about it, either

    def _listen(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                try:
                    told = json.loads(line)
                except ValueError:
                    continue  # the last line of a process that was killed
                if isinstance(told, dict):  # a driver's library may print what it likes
                    self._take(told)
        if not self._is_closing:
            self._take({"ended": self._process.wait()})


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


def sample_gpu(
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


def read_host_load(tree: Tree) -> dict[str, Any]:
    """Read what the kernel tells; what it does not is None.

    Returns:
        ``load``: runnable tasks, averaged over 1, 5 and 15 minutes; ``cpus`` that run; ``busy_ticks`` and
        ``all_ticks``, which only grow; ``memory_total_bytes``, and of that ``memory_available_bytes``.

    Source: proc_loadavg(5); proc_stat(5), whose guest times are counted in user and nice already; proc_meminfo(5).
    """
    load = re.match(r"([\d.]+) ([\d.]+) ([\d.]+) ", tree.text("/proc/loadavg") or "")
    times = re.match(r"cpu +((?:\d+ ?)+)", tree.text("/proc/stat") or "")
    ticks = [int(number) for number in times[1].split()][:8] if times else []
    online = tree.numbers("/sys/devices/system/cpu/online")
    is_complete = len(ticks) >= 5
    return {
        "load": [float(number) for number in load.groups()] if load else None,
        "cpus": None if online is None else len(online),
        # user nice system idle iowait irq softirq steal
        "busy_ticks": sum(ticks) - ticks[3] - ticks[4] if is_complete else None,
        "all_ticks": sum(ticks) if is_complete else None,
        "memory_total_bytes": _bytes(tree, "MemTotal"),
        "memory_available_bytes": _bytes(tree, "MemAvailable"),
    }


def _bytes(tree: Tree, name: str) -> int | None:
    found = re.search(rf"^{name}:\s+(\d+) kB", tree.text("/proc/meminfo") or "", re.MULTILINE)
    return int(found[1]) * 1024 if found else None
