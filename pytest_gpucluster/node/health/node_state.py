"""The state of a node: the latest sample of each part with its age, and rates from the last two samples."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pytest_gpucluster.node.health.node_reader import NVLINK

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
    """Takes the reader's lines from its thread, and gives the current state to any other thread.

    Args:
        interval_seconds: of the reader.
        now: seconds of the monotonic clock, which the reader uses too.
    """

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
