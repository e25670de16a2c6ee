"""The state of a node: the latest sample of each part with its age, and rates from the last two samples."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from pytest_gpucluster.node.health.node_reader import NVLINK

STALE_INTERVALS, STALE_SECONDS = 3.0, 3.0
"""A part older than both is stale: a busy machine may be late once."""


@dataclass
class _Latest:
    """The last sample of one part, and the one before."""

    at: float
    values: Mapping[str, Any]
    before: tuple[float, Mapping[str, Any]] | None = None


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
        ports: the values of ``node_reader_process`` for each port.
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
        only: indices of the GPUs to include; None: all.
        uuids: the same by UUID.
        now: seconds of the monotonic clock, which the reader uses too.
    """

    def __init__(
        self,
        interval_seconds: float,
        *,
        only: Collection[int] | None = None,
        uuids: Collection[str] | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stale_after = max(STALE_SECONDS, STALE_INTERVALS * interval_seconds)
        self._only, self._uuids, self._now = only, uuids, now
        self._condition = threading.Condition()
        self._began = now()
        self._nvml: Mapping[str, Any] | None = None
        self._gpus: dict[str, _Latest] = {}
        self._host: _Latest | None = None
        self._ports: dict[str, _Latest] = {}
        self._port_names: list[str] = []
        self._why_no_ports = ""
        self._problem = ""

    def take(self, line: Mapping[str, Any]) -> None:
        """Take one line of the reader."""
        with self._condition:
            at = float(line.get("at", self._now()))
            if "nvml" in line:
                self._nvml = line["nvml"]
            elif "gpu" in line:
                _renew(self._gpus, str(line["gpu"]["uuid"]), at, line["gpu"])
            elif "host" in line:
                before = None if self._host is None else (self._host.at, self._host.values)
                self._host = _Latest(at, line["host"], before)
            elif "ports" in line:
                self._port_names = [str(port["name"]) for port in line["ports"]]
                self._why_no_ports = str(line["why_not"])
                for port in line["ports"]:
                    _renew(self._ports, str(port["name"]), at, port)
            elif "ended" in line:
                self._problem = (
                    f"the process that reads this node exited with code {line['ended']}: these values are old"
                )
            self._condition.notify_all()

    def wait(self, samples: int, seconds: float) -> None:
        """Wait up to ``seconds`` until every part has been read ``samples`` times (1 or 2)."""

        def is_complete() -> bool:
            if self._problem:
                return True
            if self._nvml is None or self._host is None:
                return False
            known = {gpu["uuid"] for gpu in self._nvml.get("gpus", ()) if gpu["uuid"] is not None}
            if not known <= set(self._gpus):
                return False
            parts = [self._host, *self._gpus.values(), *(self._ports[name] for name in self._port_names)]
            return samples < 2 or all(part.before is not None for part in parts)

        with self._condition:
            self._condition.wait_for(is_complete, seconds)

    def unknown(self) -> list[int]:
        """Return the wanted GPUs that NVML does not list; none before it has listed its GPUs."""
        with self._condition:
            if self._nvml is None or "gpus" not in self._nvml or self._only is None:
                return []
            return sorted(set(self._only) - {int(gpu["index"]) for gpu in self._nvml["gpus"]})

    def listed(self) -> list[Mapping[str, Any]]:
        """Return ``index``, ``uuid`` and ``name`` of each GPU that NVML listed."""
        with self._condition:
            return list((self._nvml or {}).get("gpus", ()))

    def node(self) -> Node:
        """Return the current state."""
        with self._condition:
            now = self._now()
            nvml = self._nvml or {}
            return Node(
                gpus=tuple(self._gpu(gpu, now) for gpu in nvml.get("gpus", ()) if self._is_wanted(gpu)),
                driver=nvml.get("driver"),
                why_no_gpus=self._why_no_gpus(nvml),
                silent_seconds=now - self._began if self._nvml is None else None,
                host=self._part(self._host, {}, now, _host_rates),
                ports=tuple(self._part(self._ports[name], {}, now, _port_rates) for name in self._port_names),
                why_no_ports=self._why_no_ports,
                problem=self._problem,
            )

    def _why_no_gpus(self, nvml: Mapping[str, Any]) -> str:
        if "why_not" in nvml:
            return str(nvml["why_not"])
        return "NVML shows no GPU to this user" if self._nvml is not None and not nvml.get("gpus") else ""

    def _is_wanted(self, gpu: Mapping[str, Any]) -> bool:
        if self._uuids is not None and gpu["uuid"] not in self._uuids:
            return False
        return self._only is None or gpu["index"] in self._only

    def _gpu(self, gpu: Mapping[str, Any], now: float) -> Part:
        if gpu["uuid"] is None:
            return Part(values={**gpu, "not_available": {}, "lost": "NVML counts it, and it does not answer"})
        return self._part(self._gpus.get(gpu["uuid"]), gpu, now, _gpu_rates)

    def _part(
        self,
        latest: _Latest | None,
        known: Mapping[str, Any],
        now: float,
        rates: Callable[[float, Mapping[str, Any], Mapping[str, Any]], dict[str, float]],
    ) -> Part:
        if latest is None:
            return Part(
                values={"not_available": {}, "lost": "", **known}, is_stale=now - self._began > self._stale_after
            )
        age = max(0.0, now - latest.at)
        found: dict[str, float] = {}
        if latest.before is not None and latest.at > latest.before[0]:
            found = rates(latest.at - latest.before[0], latest.before[1], latest.values)
        is_stale = age > self._stale_after
        return Part(values={**latest.values, **known}, rates=found, age_seconds=age, is_stale=is_stale)


def _renew(samples: dict[str, _Latest], name: str, at: float, values: Mapping[str, Any]) -> None:
    before = samples.get(name)
    samples[name] = _Latest(at, values, None if before is None else (before.at, before.values))


def growth(seconds: float, before: Any, after: Any) -> float | None:
    """Return the growth of a counter per second; None where it is unknown, such as after a reset."""
    if not isinstance(before, (int, float)) or not isinstance(after, (int, float)) or after < before or seconds <= 0:
        return None
    return (after - before) / seconds


def _known(rates: Mapping[str, float | None]) -> dict[str, float]:
    return {name: rate for name, rate in rates.items() if rate is not None}


def _gpu_rates(seconds: float, before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, float]:
    old, new = before.get(NVLINK) or {}, after.get(NVLINK) or {}
    return _known(
        {f"nvlink_{way}_bytes_per_second": growth(seconds, old.get(way), new.get(way)) for way in ("sent", "received")}
    )


def _port_rates(seconds: float, before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, float]:
    names = {"sent_bytes_per_second": "port_xmit_bytes", "received_bytes_per_second": "port_rcv_bytes"}
    return _known({rate: growth(seconds, before.get(name), after.get(name)) for rate, name in names.items()})


def _host_rates(seconds: float, before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, float]:
    busy = growth(seconds, before.get("busy_ticks"), after.get("busy_ticks"))
    spent = growth(seconds, before.get("all_ticks"), after.get("all_ticks"))
    return {} if busy is None or not spent else {"busy_ratio": min(1.0, busy / spent)}
