"""All counters that a rank can read, at one moment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from pytest_gpucluster import kernel_log
from pytest_gpucluster.counters.sources import Sources
from pytest_gpucluster.health import situation
from pytest_gpucluster.infiniband import ETHERNET, Adapters
from pytest_gpucluster.infiniband import INFINIBAND as LAYER_OF_FABRIC
from pytest_gpucluster.kernel_log import KernelLog, Xid
from pytest_gpucluster.metrics.finding import Identity

RECOVERY = "recovery.action"
QUERIES = (
    "ecc.uncorrected.volatile",
    "ecc.uncorrected.aggregate",
    "ecc.corrected.volatile",
    "rows.remapped.corrected",
    "rows.remapped.uncorrected",
    "rows.pending",
    "rows.failed",
    "pages.pending",
    "pcie.replays",
    "nvlink.up",
    "nvlink.errors",
    RECOVERY,
)
"""What is asked of NVML."""
XID, INFINIBAND = "xid", "infiniband"
"""Names of what is not NVML's, where it is missing."""
ACTIVE, RATE = "active", "rate"
"""Beside a port's own counters: 1 while it carries data, and the Gb/s of its link."""


@dataclass(frozen=True, kw_only=True)
class Log:
    """The Xids and SXids of a kernel log: what tells one from all others -> the report.

    ``numbers``: of the oldest and the newest record, where the source numbers them.
    """

    source: str
    xids: Mapping[str, Xid] = field(default_factory=dict)
    numbers: tuple[int, int] | None = None


@dataclass(frozen=True, kw_only=True)
class Counters:
    """What a rank's sources said at one moment.

    Attributes:
        gpu: this rank's GPU; the host alone on cpu.
        values: name -> count. Flags and states are 0 or 1. A link of the GPU is a name such as ``nvlink.replay[3]``, a
            port ``infiniband.mlx5_0/1.link_downed``.
        log: the node's Xids; None where this rank does not look at them, or they cannot be read.
        missing: name of a query, ``xid`` or ``infiniband`` -> why there is no value.
        lost: what NVML says of a GPU that does not answer any more.
        gpus_of_node: as in :class:`Sources`.
    """

    gpu: Identity
    values: Mapping[str, float] = field(default_factory=dict)
    log: Log | None = None
    missing: Mapping[str, str] = field(default_factory=dict)
    lost: str = ""
    gpus_of_node: Mapping[str, Identity] = field(default_factory=dict)
    beside: frozenset[str] = frozenset()
    """Ports of Ethernet on a node whose fabric is InfiniBand, as of a card for storage or management."""

    def to_json(self) -> dict[str, Any]:
        """Return plain types."""
        reports = self.log.xids.values() if self.log else ()
        xids = [f"{one.pci}: {one.name if one.is_switch else one.code}: {one.text}" for one in reports]
        return {"values": dict(self.values), "xids": xids, "missing": dict(self.missing), "lost": self.lost}


def take(sources: Sources) -> Counters:
    """Read all counters of a rank, one source after the other. No source that fails keeps the others from being read.

    NVML, sysfs and the kernel's buffer answer within milliseconds. Where /dev/kmsg cannot be read, ``dmesg`` and
    ``journalctl`` are asked, each for ``kernel_log.COMMAND_SECONDS`` at most.
    """
    values: dict[str, float] = {}
    missing: dict[str, str] = {}
    lost, log = "", None
    beside: frozenset[str] = frozenset()
    if sources.has_gpu and sources.nvml is None:
        missing.update(dict.fromkeys(QUERIES, sources.why_no_nvml))
    elif sources.nvml is not None and sources.gpu.uuid is not None:
        told = situation.take(sources.nvml, sources.gpu.uuid, QUERIES)
        values.update(_of_gpu(told.values))
        missing.update({query: why.reason for query, why in told.missing.items()})
        lost = next((why.reason for why in told.missing.values() if why.kind == "lost"), "")
    if sources.of_node:
        if sources.has_gpu:
            log, why = _log(sources.kernel_log(), switches=sources.of_switches)
            missing.update({XID: why} if why else {})
        adapters = sources.adapters()
        values.update(_of_ports(adapters))
        beside = _beside(adapters)
        missing.update({INFINIBAND: adapters.why_not} if adapters.why_not else {})
    return Counters(
        gpu=sources.gpu,
        values=values,
        log=log,
        missing=missing,
        lost=lost,
        gpus_of_node=sources.gpus_of_node,
        beside=beside,
    )


def _of_gpu(told: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for query, value in told.items():
        if query == "nvlink.up":
            yield from ((f"nvlink.up[{link}]", int(up)) for link, up in value.items())
        elif query == "nvlink.errors":
            for counter, links in value.items():
                yield from ((f"nvlink.{counter}[{link}]", count) for link, count in links.items())
        else:
            yield query, int(value)


def _of_ports(adapters: Adapters) -> Iterator[tuple[str, float]]:
    for port in adapters.ports:
        prefix = f"{INFINIBAND}.{port.name}"
        yield from ((f"{prefix}.{name}", count) for name, count in port.counters.items())
        yield f"{prefix}.{ACTIVE}", int(port.is_active)
        if port.rate_gbps is not None:
            yield f"{prefix}.{RATE}", port.rate_gbps


def _beside(adapters: Adapters) -> frozenset[str]:
    """Return the ports of Ethernet where a port of InfiniBand is active: then NCCL's fabric is that."""
    fabric = any(port.is_active and port.link_layer == LAYER_OF_FABRIC for port in adapters.ports)
    return frozenset(port.name for port in adapters.ports if fabric and port.link_layer == ETHERNET)


def _log(log: KernelLog, *, switches: bool) -> tuple[Log | None, str]:
    if log.why_not:
        return None, log.why_not
    found: dict[str, Xid] = {}
    times: Counter[str] = Counter()
    for index, line in enumerate(log.lines):
        for xid in kernel_log.parse([line]):
            if xid.is_switch and not switches:
                continue
            # A line without a number of its own, or a time in it, is told from its like by how many came before; so is
            # a second report on one line.
            record = str(log.numbers[index]) if log.numbers else line
            times[record] += 1
            found[record if log.numbers and times[record] == 1 else f"{record} #{times[record]}"] = xid
    ends = (log.numbers[0], log.numbers[-1]) if log.numbers else None
    return Log(source=log.source, xids=found, numbers=ends), ""
