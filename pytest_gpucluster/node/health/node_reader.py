"""Reads a node's state: the reader process (this module as a program), and the process as its parent sees it.

NVML is queried in a process of its own for two reasons: a driver that hangs hangs there, and a measuring process never
shares an interpreter with the queries. Its parent never waits for it.

The process writes samples to its standard output. Each line is a JSON object with one sample and the time of the
monotonic clock at which it was read:

    {"nvml": {"driver": "580.65.06", "gpus": [{"index": 0, "uuid": "GPU-...", "name": "NVIDIA H100"}]}, "at": 12.3}
    {"nvml": {"why_not": "NVML is not available: ..."}, "at": 12.3}
    {"gpu": {"uuid": "GPU-...", "utilization_percent": 98, ..., "not_available": {}, "lost": ""}, "at": 12.4}
    {"host": {"load": [1.0, 0.9, 0.8], ...}, "at": 12.4}
    {"ports": [{"name": "mlx5_0/1", ...}], "why_not": "", "at": 12.4}

One thread queries NVML, another reads the kernel's files: where NVML hangs, the other continues, and the reader of the
lines sees by their times which samples are old. The process exits with its parent, and when its output is closed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict
from typing import Any, NoReturn

from pytest_gpucluster.errors import EnvironmentBroken
from pytest_gpucluster.launch import detached_process
from pytest_gpucluster.node import infiniband
from pytest_gpucluster.node.health.sampler_process import wait_for_end
from pytest_gpucluster.node.health.telemetry import THROTTLE, validated
from pytest_gpucluster.node.nvml import Nvml, PyNvml, read_values
from pytest_gpucluster.node.nvml_queries import keys
from pytest_gpucluster.node.processes import Process, find_process, kill
from pytest_gpucluster.node.sysfs import Tree

COMMAND: tuple[str, ...] = (sys.executable, "-m", "pytest_gpucluster.node.health.node_reader")
"""The command line. Tests replace it by one with simulated GPUs."""

Take = Callable[[Mapping[str, Any]], None]


class NodeReader:
    """Starts the process, and hands over each of its lines, in a thread of its own.

    Args:
        take: called with each line, and with ``{"ended": exit code}`` when the process has ended on its own.
        interval_seconds: from one sample to the next.

    Raises:
        OSError: no process or thread can be started.
    """

    def __init__(self, take: Take, interval_seconds: float) -> None:
        self._take = take
        self._is_closing = False
        command = [*COMMAND, "--interval", str(interval_seconds), "--parent", str(os.getpid())]
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


# ---- samples

PROCESSES, NVLINK = "processes", "nvlink_bytes"

QUERIES = keys(
    *("utilization.gpu", "memory.used", "memory.total", "temperature.gpu", "power.draw", "power.limit", "clock.sm"),
    *("clock.memory", "throttle.reasons", "nvlink.bytes", "processes"),
)
"""Key of a sample -> NVML query. The key has the unit."""


def sample_gpu(
    nvml: Nvml,
    uuid: str,
    keys: Collection[str] = tuple(QUERIES),
    *,
    find_process: Callable[[int], Process] = find_process,
) -> dict[str, Any]:
    """Read ``keys`` of :data:`QUERIES` from a GPU.

    Returns:
        ``uuid``; each key with its value in plain JSON types; ``not_available``, the other keys, each with the reason;
        ``lost``, NVML's message where the GPU is lost, else "". No error of NVML is raised.
    """

    def plain(key: str, value: Any) -> Any:
        if key == THROTTLE:
            return [name for name in validated(key, value) if name != "gpu_idle"]  # the reason of every idle GPU
        if key == NVLINK:
            return {way: int(value[way]) for way in ("sent", "received")}
        if key == PROCESSES:
            return [_process(find_process(int(pid)), memory) for pid, memory in value]
        return validated(key, value)

    found = read_values(nvml, uuid, {key: QUERIES[key] for key in keys}, plain)
    missing = {key: why.reason for key, why in found.missing.items()}
    return {"uuid": uuid, **found.values, "not_available": missing, "lost": found.lost}


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


# ---- the process


def read_gpus(open_nvml: Callable[[], Nvml], write: Take, interval_seconds: float, keys: Collection[str]) -> None:
    """Write samples of all GPUs, round after round."""
    try:
        nvml = open_nvml()
        gpus = nvml.gpus()
        listed = [
            {"index": index, "uuid": None, "name": None, "pci_bus_id": None} if gpu is None else asdict(gpu)
            for index, gpu in enumerate(gpus)
        ]
        write({"nvml": {"driver": nvml.driver_version(), "gpus": listed}})
    except EnvironmentBroken as error:
        write({"nvml": {"why_not": str(error)}})
        return
    except Exception as error:  # bindings and drivers fail in many ways; without a line it would look like a hang
        write({"nvml": {"why_not": f"NVML failed: {type(error).__name__}: {error}"}})
        return
    answering = [gpu.uuid for gpu in gpus if gpu is not None]
    while answering:
        begin = time.monotonic()
        for uuid in answering:
            write({"gpu": sample_gpu(nvml, uuid, keys)})
        spent = time.monotonic() - begin
        # Every call serialises with the driver's other work: at least half of the time there is none.
        time.sleep(max(interval_seconds - spent, spent))


def read_host(tree: Tree, write: Take, interval_seconds: float) -> None:
    """Write samples of the host and its ports, round after round."""
    while True:
        begin = time.monotonic()
        write({"host": read_host_load(tree)})
        adapters = infiniband.read(tree.path("/sys"), gids=False, only_bytes=True)
        write({"ports": [_port(port) for port in adapters.ports], "why_not": adapters.why_not})
        time.sleep(max(0.0, interval_seconds - (time.monotonic() - begin)))


def _port(port: infiniband.Port) -> Mapping[str, Any]:
    return {
        "name": port.name,
        "state": port.state or None,
        "rate_gbps": port.rate_gbps,
        **{name: port.counters.get(name) for name in infiniband.BYTES.values()},
    }


def line_writer(descriptor: int) -> Take:
    """Return a function that writes whole lines from any thread; it exits the process when nothing reads them."""
    lock = threading.Lock()

    def write(sample: Mapping[str, Any]) -> None:
        line = json.dumps({**sample, "at": time.monotonic()}).encode() + b"\n"
        with lock:
            try:
                while line:
                    line = line[os.write(descriptor, line) :]
            except OSError:
                os._exit(0)

    return write


def main(open_nvml: Callable[[], Nvml] = PyNvml, tree: Tree | None = None) -> NoReturn:
    """Run as the reader process."""
    detached_process.shield()
    parser = argparse.ArgumentParser(description="The reader of a node, started by gpucluster node watch, not by hand.")
    parser.add_argument("--interval", type=float, required=True)
    parser.add_argument("--parent", type=int, required=True)
    options = parser.parse_args()
    write = line_writer(sys.stdout.fileno())
    keys = tuple(QUERIES)
    # The main thread only waits: NVML may hang in any other one, and the process still ends with its parent.
    threading.Thread(target=read_gpus, args=(open_nvml, write, options.interval, keys), daemon=True).start()
    threading.Thread(target=read_host, args=(tree or Tree(), write, options.interval), daemon=True).start()
    wait_for_end(options.parent)
    os._exit(0)


if __name__ == "__main__":
    main()
