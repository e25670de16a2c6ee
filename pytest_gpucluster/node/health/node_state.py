"""What is known of a node at a moment: the latest look at each part with its age, and rates from two looks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from pytest_gpucluster.node.health.node_reader import NVLINK

STALE_INTERVALS, STALE_SECONDS = 3.0, 3.0
"""What is older than so many intervals, and than so many seconds, is called stale: a busy machine may be late once."""


@dataclass
class _Latest:
    """The last look at one part, and the one before."""

    at: float
    told: Mapping[str, Any]
    before: tuple[float, Mapping[str, Any]] | None = None


@dataclass(frozen=True, kw_only=True)
class Part:
    """One part of the node. ``told`` is what was read last, ``rates`` bytes per second or ticks since the look before;
    ``age_seconds`` is None where it was never read."""

    told: Mapping[str, Any]
    rates: Mapping[str, float] = field(default_factory=dict)
    age_seconds: float | None = None
    is_stale: bool = False


@dataclass(frozen=True, kw_only=True)
class Node:
    """All that is known. ``gpus`` are in NVML's order.

    Attributes:
        gpus: ``told`` has ``index``, ``uuid``, ``name``, ``pci_bus_id`` and what ``gpu_glance`` reads.
        driver: its version; None if NVML has not said it.
        why_no_gpus: why there is none; "" if there is one, or if NVML has not answered yet.
        silent_seconds: how long NVML has not said anything at all, not even which GPUs there are; else None.
        host: what ``host_load`` reads; ``busy_ratio`` is among its rates.
        ports: ``told`` has what the reader says of a port.
        why_no_ports: why none is seen.
        problem: what is wrong with the reader itself; "" if nothing is.
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
    """Takes what the reader says, from its thread, and tells what is known, to any other.

    Args:
        interval_seconds: how often the reader looks.
        only: indices of the GPUs to tell of; None: all.
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

    def take(self, told: Mapping[str, Any]) -> None:
        """Take one line of the reader."""
        with self._condition:
            at = float(told.get("at", self._now()))
            if "nvml" in told:
                self._nvml = told["nvml"]
            elif "gpu" in told:
                _renew(self._gpus, str(told["gpu"]["uuid"]), at, told["gpu"])
            elif "host" in told:
                before = None if self._host is None else (self._host.at, self._host.told)
                self._host = _Latest(at, told["host"], before)
            elif "ports" in told:
                self._port_names = [str(port["name"]) for port in told["ports"]]
                self._why_no_ports = str(told["why_not"])
                for port in told["ports"]:
                    _renew(self._ports, str(port["name"]), at, port)
            elif "ended" in told:
                self._problem = f"what reads this node has ended (exit code {told['ended']}): nothing here is new"
            self._condition.notify_all()

    def wait(self, looks: int, seconds: float) -> None:
        """Wait until every part has been read so many times (1 or 2), but not longer than so many seconds."""

        def is_there() -> bool:
            if self._problem:
                return True
            if self._nvml is None or self._host is None:
                return False
            known = {gpu["uuid"] for gpu in self._nvml.get("gpus", ()) if gpu["uuid"] is not None}
            if not known <= set(self._gpus):
                return False
            parts = [self._host, *self._gpus.values(), *(self._ports[name] for name in self._port_names)]
            return looks < 2 or all(part.before is not None for part in parts)

        with self._condition:
            self._condition.wait_for(is_there, seconds)

    def unknown(self) -> list[int]:
        """Return those of the asked GPUs that NVML does not have; nothing as long as it has not told which it has."""
        with self._condition:
            if self._nvml is None or "gpus" not in self._nvml or self._only is None:
                return []
            return sorted(set(self._only) - {int(gpu["index"]) for gpu in self._nvml["gpus"]})

    def listed(self) -> list[Mapping[str, Any]]:
        """Return what NVML has listed: ``index``, ``uuid`` and ``name`` of each GPU."""
        with self._condition:
            return list((self._nvml or {}).get("gpus", ()))

    def node(self) -> Node:
        """Return what is known now."""
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
            return Part(told={**gpu, "not_available": {}, "lost": "it is counted by NVML, and does not answer"})
        return self._part(self._gpus.get(gpu["uuid"]), gpu, now, _gpu_rates)

    def _part(
        self,
        latest: _Latest | None,
        known: Mapping[str, Any],
        now: float,
        rates: Callable[[float, Mapping[str, Any], Mapping[str, Any]], dict[str, float]],
    ) -> Part:
        if latest is None:
            return Part(told={"not_available": {}, "lost": "", **known}, is_stale=now - self._began > self._stale_after)
        age = max(0.0, now - latest.at)
        found: dict[str, float] = {}
        if latest.before is not None and latest.at > latest.before[0]:
            found = rates(latest.at - latest.before[0], latest.before[1], latest.told)
        is_stale = age > self._stale_after
        return Part(told={**latest.told, **known}, rates=found, age_seconds=age, is_stale=is_stale)


def _renew(kept: dict[str, _Latest], name: str, at: float, told: Mapping[str, Any]) -> None:
    before = kept.get(name)
    kept[name] = _Latest(at, told, None if before is None else (before.at, before.told))


def growth(seconds: float, before: Any, after: Any) -> float | None:
    """Return how much a counter grows in a second; None if it cannot be told, such as after it began anew."""
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
