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

:class:`NodeState` keeps the latest sample of each part with its age, and rates from the last two.
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
from dataclasses import asdict, dataclass, field
from typing import Any, NoReturn

from pytest_gpucluster.errors import EnvironmentBroken
from pytest_gpucluster.launch import detached_process
from pytest_gpucluster.node import infiniband
from pytest_gpucluster.node.health.sampler_process import wait_for_end
from pytest_gpucluster.node.health.telemetry import THROTTLE, validated
from pytest_gpucluster.node.nvml import Nvml, open_nvml, read_values
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


def main(open_nvml: Callable[[], Nvml] = open_nvml, tree: Tree | None = None) -> NoReturn:
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


STALE_INTERVALS, STALE_SECONDS = 3.0, 3.0
"""A part older than both is stale: a busy machine may be late once."""

_Sample = tuple[float, Mapping[str, Any]]
"""When it was read, and its values."""


@dataclass(frozen=True, kw_only=True)
class Part:
    """One part of the node. ``values`` is the last sample, ``rates`` are per second since the sample before;
    ``age_seconds`` is None where it was never read."""

    values: Mapping[str, Any]
    rates: Mapping[str, float] = field(default_factory=dict)
    age_seconds: float | None = None
    is_stale: bool = False


@dataclass(frozen=True, kw_only=True)
class Node:
    """The state of all parts. ``gpus`` are in NVML's order.

    Attributes:
        gpus: ``values`` has ``index``, ``uuid``, ``name``, ``pci_bus_id`` and those of ``node_reader.sample_gpu``.
        driver: its version; None if NVML has not reported it.
        why_no_gpus: why there is none; "" if there is one, or if NVML has not answered yet.
        silent_seconds: how long NVML has not answered at all, not even with the list of GPUs; else None.
        host: those of ``node_reader.read_host_load``; ``busy_ratio`` is among its rates.
        ports: the values of ``node_reader`` for each port.
        why_no_ports: why there is none.
        problem: of the reader itself; "" if there is none.
    """

    gpus: tuple[Part, ...]
    driver: str | None
    why_no_gpus: str
    silent_seconds: float | None
    host: Part
    ports: tuple[Part, ...]
    why_no_ports: str
    problem: str = ""


class NodeState:
    """Takes the reader's lines from its thread, and gives the current state to any other thread."""

    def __init__(self, interval_seconds: float, *, now: Callable[[], float] = time.monotonic) -> None:
        self._stale_after = max(STALE_SECONDS, STALE_INTERVALS * interval_seconds)
        self._now = now
        self._condition = threading.Condition()
        self._began = now()
        self._nvml: Mapping[str, Any] | None = None
        self._samples: dict[str, list[_Sample]] = {}
        """"host", UUID of a GPU or name of a port -> its last two samples."""
        self._ports: list[str] = []
        self._why_no_ports = ""
        self._problem = ""

    def take(self, line: Mapping[str, Any]) -> None:
        """Take one line of the reader."""
        with self._condition:
            at = float(line.get("at", self._now()))
            if "nvml" in line:
                self._nvml = line["nvml"]
            elif "gpu" in line:
                self._renew(str(line["gpu"]["uuid"]), at, line["gpu"])
            elif "host" in line:
                self._renew("host", at, line["host"])
            elif "ports" in line:
                self._ports = [str(port["name"]) for port in line["ports"]]
                self._why_no_ports = str(line["why_not"])
                for port in line["ports"]:
                    self._renew(str(port["name"]), at, port)
            elif "ended" in line:
                ended = f"exited with code {line['ended']}"
                self._problem = f"the process that reads this node {ended}: these values are old"
            self._condition.notify_all()

    def _renew(self, name: str, at: float, values: Mapping[str, Any]) -> None:
        self._samples[name] = [*self._samples.get(name, ())[-1:], (at, values)]

    def wait(self, samples: int, seconds: float) -> None:
        """Wait up to ``seconds`` until every part has been read ``samples`` times (1 or 2)."""

        def is_complete() -> bool:
            if self._problem or self._nvml is None:
                return bool(self._problem)
            names = ["host", *self._ports, *(gpu["uuid"] for gpu in self._nvml.get("gpus", ()) if gpu["uuid"])]
            return all(len(self._samples.get(name, ())) >= samples for name in names)

        with self._condition:
            self._condition.wait_for(is_complete, seconds)

    def node(self) -> Node:
        """Return the current state."""
        with self._condition:
            now = self._now()
            nvml = self._nvml or {}
            is_empty = self._nvml is not None and not nvml.get("gpus")
            return Node(
                gpus=tuple(self._gpu(gpu, now) for gpu in nvml.get("gpus", ())),
                driver=nvml.get("driver"),
                why_no_gpus=str(nvml.get("why_not", "NVML shows no GPU to this user")) if is_empty else "",
                silent_seconds=now - self._began if self._nvml is None else None,
                host=self._part("host", now),
                ports=tuple(self._part(name, now) for name in self._ports),
                why_no_ports=self._why_no_ports,
                problem=self._problem,
            )

    def _gpu(self, gpu: Mapping[str, Any], now: float) -> Part:
        if gpu["uuid"] is None:
            return Part(values={**gpu, "not_available": {}, "lost": "NVML counts it, and it does not answer"})
        return self._part(gpu["uuid"], now, gpu)

    def _part(self, name: str, now: float, known: Mapping[str, Any] | None = None) -> Part:
        samples, known = self._samples.get(name, ()), known or {}
        if not samples:
            is_stale = now - self._began > self._stale_after
            return Part(values={"not_available": {}, "lost": "", **known}, is_stale=is_stale)
        (before, old), (at, new) = samples[0], samples[-1]
        age = max(0.0, now - at)
        return Part(
            values={**new, **known},
            rates=_rates(at - before, old, new),
            age_seconds=age,
            is_stale=age > self._stale_after,
        )


def growth(seconds: float, before: Any, after: Any) -> float | None:
    """Return the growth of a counter per second; None where it is unknown, such as after a reset."""
    if not isinstance(before, (int, float)) or not isinstance(after, (int, float)) or after < before or seconds <= 0:
        return None
    return (after - before) / seconds


def _rates(seconds: float, old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, float]:
    """Return the rates of those counters that both samples of a part have."""
    old, new = ({**sample, **(sample.get(NVLINK) or {})} for sample in (old, new))
    counters = {
        "nvlink_sent_bytes_per_second": "sent",
        "nvlink_received_bytes_per_second": "received",
        "sent_bytes_per_second": "port_xmit_bytes",
        "received_bytes_per_second": "port_rcv_bytes",
    }
    found = {rate: growth(seconds, old.get(counter), new.get(counter)) for rate, counter in counters.items()}
    busy, spent = (growth(seconds, old.get(name), new.get(name)) for name in ("busy_ticks", "all_ticks"))
    found["busy_ratio"] = min(1.0, busy / spent) if busy is not None and spent else None
    return {rate: value for rate, value in found.items() if value is not None}


if __name__ == "__main__":
    main()
