"""Reads a node's state: the reader process as its parent sees it, one sample of a GPU, and the host's load.

The process is :mod:`pytest_gpucluster.node.health.node_reader_process`; its parent never waits for it. NVML is
queried in a process of its own for two reasons: a driver that hangs hangs there, and a measuring process never shares
an interpreter with the queries.

A sample of a GPU (NVML) is in plain JSON types: each value, or why there is none. The host's load is from /proc: load,
the time its CPUs have spent, memory.
"""

from __future__ import annotations

import json
import math
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Mapping
from typing import Any

from pytest_gpucluster.launch import detached_process
from pytest_gpucluster.node.nvml import NotAvailable, Nvml
from pytest_gpucluster.node.nvml_queries import keys
from pytest_gpucluster.node.processes import Process, find_process
from pytest_gpucluster.node.programs import kill
from pytest_gpucluster.node.sysfs import Tree

COMMAND: tuple[str, ...] = (sys.executable, "-m", "pytest_gpucluster.node.health.node_reader_process")
"""The command line. Tests replace it by one with simulated GPUs."""


class NodeReader:
    """Starts the process, and hands over each of its lines, in a thread of its own.

    Args:
        take: called with each line, and with ``{"ended": exit code}`` when the process has ended on its own.
        interval_seconds: from one sample to the next.
        few: only the keys ``FEW`` of GPUs, for use during a measurement.

    Raises:
        OSError: no process or thread can be started.
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
        """Kill it. It writes no files, so it can be killed at any moment."""
        self._is_closing = True
        kill(self._process)

    def _listen(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                try:
                    sample = json.loads(line)
                except ValueError:
                    continue  # the last line of a process that was killed
                if isinstance(sample, dict):  # a driver's library may print other text
                    self._take(sample)
        if not self._is_closing:
            self._take({"ended": self._process.wait()})


PROCESSES, NVLINK = "processes", "nvlink_bytes"

QUERIES = keys(
    *("utilization.gpu", "memory.used", "memory.total", "temperature.gpu", "power.draw", "power.limit", "clock.sm"),
    *("clock.memory", "throttle.reasons", "nvlink.bytes", "processes"),
)
"""Key of a sample -> NVML query. The key has the unit."""

FEW = ("utilization_percent", "memory_used_bytes", "memory_total_bytes", "temperature_celsius", "power_watts")
"""Keys that are read during a measurement, where each query costs."""


def sample_gpu(
    nvml: Nvml,
    uuid: str,
    keys: Collection[str] = tuple(QUERIES),
    *,
    find_process: Callable[[int], Process] = find_process,
) -> dict[str, Any]:
    """Read ``keys`` of :data:`QUERIES` from a GPU.

    Returns:
        ``uuid``; each key with its value; ``not_available``, the other keys, each with the reason; ``lost``, NVML's
        message where the GPU is lost, else "". No error of NVML is raised.
    """
    sample: dict[str, Any] = {"uuid": uuid}
    missing: dict[str, str] = {}
    lost = ""
    for key in keys:
        if lost:
            missing[key] = lost
            continue
        try:
            sample[key] = _plain(key, nvml.read(uuid, QUERIES[key]), find_process)
        except NotAvailable as error:
            missing[key] = str(error) or "not available"
            lost = missing[key] if error.kind == "lost" else ""
        except Exception as error:  # bindings and drivers fail in many ways; the reason is reported
            missing[key] = f"{type(error).__name__}: {error}"
    return {**sample, "not_available": missing, "lost": lost}


def _plain(key: str, value: Any, find_process: Callable[[int], Process]) -> Any:
    """Return a value in plain JSON types.

    Raises:
        ValueError: NVML returned a value of another type.
    """
    if key == "throttle":
        return [str(name) for name in value if name != "gpu_idle"]  # the reason of every idle GPU
    if key == NVLINK:
        return {way: int(value[way]) for way in ("sent", "received")}
    if key == PROCESSES:
        return [_process(find_process(int(pid)), memory) for pid, memory in value]
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"NVML gave {value!r:.60}")
    return value


def _process(process: Process, memory_bytes: int | None) -> dict[str, Any]:
    return {
        "pid": process.pid,
        "user": process.user or None,
        # Untrusted text: what shows it must make it safe for a terminal.
        "command": process.command if process.known else None,
        "memory_bytes": memory_bytes,
    }


def read_host_load(tree: Tree) -> dict[str, Any]:
    """Read the load of the host; None for what the kernel does not report.

    Returns:
        ``load``: runnable tasks, averaged over 1, 5 and 15 minutes; ``cpus`` that run; ``busy_ticks`` and
        ``all_ticks``, which only grow; ``memory_total_bytes``, and of that ``memory_available_bytes``.

    Source: proc_loadavg(5); proc_stat(5), whose guest times are counted in user and nice already; proc_meminfo(5).
    """
    times = re.match(r"cpu +((?:\d+ ?)+)", tree.text("/proc/stat") or "")
    ticks = [int(number) for number in times[1].split()][:8] if times else []
    online = tree.numbers("/sys/devices/system/cpu/online")
    is_complete = len(ticks) >= 5
    return {
        "load": tree.load(),
        "cpus": None if online is None else len(online),
        # user nice system idle iowait irq softirq steal
        "busy_ticks": sum(ticks) - ticks[3] - ticks[4] if is_complete else None,
        "all_ticks": sum(ticks) if is_complete else None,
        "memory_total_bytes": tree.meminfo("MemTotal"),
        "memory_available_bytes": tree.meminfo("MemAvailable"),
    }
