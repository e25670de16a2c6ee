"""Fault counters of a rank, read before and after a test, and which of their changes are a fault of the hardware.

    before = counters.read(sources)
    ...
    found = counters.changes(before, counters.read(sources))
    found.require_no_fault()

Each rank reads its own GPU (NVML); the first rank of a node also what belongs to the node: Xids in the kernel log and
InfiniBand ports. Nothing here communicates or decides about a test. The comparison is pure.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pytest_gpucluster.metrics.finding import Finding, Identity, error_of, hardware, identity
from pytest_gpucluster.node import infiniband, kernel_log
from pytest_gpucluster.node.health.checks import DIAGNOSE, FINDINGS, MEMORY_FAULTS, MUST_NOT_GROW, ZERO_TOLERANCE
from pytest_gpucluster.node.health.snapshot import by_address
from pytest_gpucluster.node.health.xid_table import lookup, recovery_action
from pytest_gpucluster.node.infiniband import BYTES, CARRIER_DOWN, ETHERNET, LINK_DOWNED, Adapters, Port
from pytest_gpucluster.node.infiniband import INFINIBAND as LAYER_OF_FABRIC
from pytest_gpucluster.node.kernel_log import KernelLog, Xid
from pytest_gpucluster.node.nvml import Nvml, read_values
from pytest_gpucluster.text import plural


@dataclass(frozen=True, kw_only=True)
class Sources:
    """Where a rank reads its counters. Tests replace them.

    Attributes:
        gpu: identity of this rank's GPU; the host alone on cpu.
        nvml: None where it cannot be used; ``why_no_nvml`` has the reason.
        of_node: this rank also reads the node's counters.
        gpus_of_node: PCI address, as the kernel writes it, -> the GPU of a rank of this node.
        kernel_log: read where there is a GPU.
        adapters: the InfiniBand ports, without their tables of GIDs, which hold no counters.
        of_switches: this rank also reports the NVSwitches of the node.
    """

    gpu: Identity
    nvml: Nvml | None = None
    why_no_nvml: str = "NVML is not available"
    of_node: bool = False
    gpus_of_node: Mapping[str, Identity] = field(default_factory=dict)
    kernel_log: Callable[[], KernelLog] = field(default_factory=kernel_log.Reader)
    adapters: Callable[[], Adapters] = lambda: infiniband.read(gids=False)
    of_switches: bool = True

    @property
    def has_gpu(self) -> bool:
        """Whether this rank has a GPU; a rehearsal on cpu has none."""
        return self.gpu.uuid is not None

    @classmethod
    def of(cls, inventory: Sequence[Mapping[str, Any]], *, rank: int, **others: Any) -> Sources:
        """Make the sources of a rank.

        ``others`` are attributes of this class.
        """
        me = next(who for who in inventory if who["rank"] == rank)
        place = me["host"], me["node_rank"]
        here = [who for who in inventory if (who["host"], who["node_rank"]) == place]
        return cls(
            gpu=identity(me),
            of_node=me["local_rank"] == 0,
            gpus_of_node=by_address(here),
            **others,
        )


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
"""The NVML queries that are read."""
XID, INFINIBAND = "xid", "infiniband"
"""Keys of ``missing`` for the sources other than NVML."""
ACTIVE, RATE = "active", "rate"
"""Added to a port's own counters: 1 while it is Active, and the Gb/s of its link."""


@dataclass(frozen=True, kw_only=True)
class Log:
    """The Xids and SXids of a kernel log, by a key that is unique in it.

    ``numbers``: of the oldest and the newest record, where the source numbers them.
    """

    source: str
    xids: Mapping[str, Xid] = field(default_factory=dict)
    numbers: tuple[int, int] | None = None


@dataclass(frozen=True, kw_only=True)
class Counters:
    """The counters of a rank at one moment.

    Attributes:
        gpu: this rank's GPU; the host alone on cpu.
        values: name -> count. Flags and states are 0 or 1. A link of the GPU is a name such as ``nvlink.replay[3]``, a
            port ``infiniband.mlx5_0/1.link_downed``.
        log: the node's Xids; None where this rank does not read them, or they cannot be read.
        missing: name of a query, ``xid`` or ``infiniband`` -> why there is no value.
        lost: NVML's message about a GPU that no longer answers; else "".
        gpus_of_node: as in :class:`Sources`.
    """

    gpu: Identity
    values: Mapping[str, float] = field(default_factory=dict)
    log: Log | None = None
    missing: Mapping[str, str] = field(default_factory=dict)
    lost: str = ""
    gpus_of_node: Mapping[str, Identity] = field(default_factory=dict)
    ports: tuple[Port, ...] = ()


def read(sources: Sources) -> Counters:
    """Read all counters of a rank, one source after the other. A source that fails does not prevent the others.

    NVML, sysfs and the kernel's buffer answer within milliseconds. Where /dev/kmsg cannot be read, ``dmesg`` and
    ``journalctl`` are run, each for ``kernel_log.COMMAND_SECONDS`` at most.
    """
    values: dict[str, float] = {}
    missing: dict[str, str] = {}
    lost, log = "", None
    adapters = sources.adapters() if sources.of_node else Adapters()
    if sources.has_gpu and sources.nvml is None:
        missing.update(dict.fromkeys(QUERIES, sources.why_no_nvml))
    elif sources.nvml is not None and sources.gpu.uuid is not None:
        gpu = read_values(sources.nvml, sources.gpu.uuid, QUERIES)
        values.update(_gpu_counters(gpu.values))
        missing.update({query: why.reason for query, why in gpu.missing.items()})
        lost = gpu.lost
    if sources.of_node and sources.has_gpu:
        found = sources.kernel_log()
        if found.why_not:
            missing[XID] = found.why_not
        else:
            log = _log(found, switches=sources.of_switches)
    if adapters.why_not:
        missing[INFINIBAND] = adapters.why_not
    for port in adapters.ports:
        prefix = f"{INFINIBAND}.{port.name}"
        values.update({f"{prefix}.{name}": count for name, count in port.counters.items()})
        values[f"{prefix}.{ACTIVE}"] = int(port.is_active)
        if port.rate_gbps is not None:
            values[f"{prefix}.{RATE}"] = port.rate_gbps
    return Counters(
        gpu=sources.gpu,
        values=values,
        log=log,
        missing=missing,
        lost=lost,
        gpus_of_node=sources.gpus_of_node,
        ports=adapters.ports,
    )


def _gpu_counters(values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for query, value in values.items():
        if query == "nvlink.up":
            yield from ((f"nvlink.up[{link}]", int(up)) for link, up in value.items())
        elif query == "nvlink.errors":
            for counter, links in value.items():
                yield from ((f"nvlink.{counter}[{link}]", count) for link, count in links.items())
        else:
            yield query, int(value)


def _log(log: KernelLog, *, switches: bool) -> Log:
    found: dict[str, Xid] = {}
    times: Counter[str] = Counter()
    for index, line in enumerate(log.lines):
        for xid in kernel_log.parse([line]):
            if switches or not xid.is_switch:
                # Equal lines without a record number, and several reports in one line, differ by their count so far.
                record = str(log.numbers[index]) if log.numbers else line
                times[record] += 1
                found[f"{record} #{times[record]}"] = xid
    return Log(source=log.source, xids=found, numbers=(log.numbers[0], log.numbers[-1]) if log.numbers else None)


_LINK = re.compile(r"nvlink\.(?P<counter>\w+)\[(?P<link>\d+)\]")

_CABLE = "look at the cable, the transceiver and the switch's port (`mlxlink -d DEVICE`, `ibdiagnet`), then run again"


@dataclass(kw_only=True)
class Changes:
    """What has changed.

    Attributes:
        changed: name -> by how much it has grown; of states (``nvlink.up[3]``, ``...active``, ``...rate``,
            ``recovery.action``) the difference, so that what went down is negative. A new Xid is ``xid.79``, an
            SXid ``sxid.20034``, with how many there were.
        faults: of these, what rejects the hardware.
        notes: a counter that was reset, an Xid that demands no action on the hardware, another job's GPU.
        missing: query, ``xid`` or ``infiniband`` -> why it could not be compared. The caller knows the required ones.
    """

    changed: dict[str, float] = field(default_factory=dict)
    faults: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)

    def require_no_fault(self) -> None:
        """Raise the faults, each with its GPU or host and what to do.

        Raises: HardwareFault.
        """
        if self.faults:
            raise error_of(self.faults, when=" during this test")

    def _fault(self, gpu: Identity, code: str, found: str, remedy: str) -> None:
        self.faults.append(hardware(code, gpu, found, allowed="none during a test", remedy=remedy))


def changes(before: Counters, after: Counters) -> Changes:
    """Compare two readings of the same rank.

    A counter that is lower than before was reset or wrapped; its value is then the least growth.
    """
    found = Changes(missing={**before.missing, **after.missing})
    if after.lost and not before.lost:
        found._fault(after.gpu, "gpu_lost", f"the GPU no longer answers: {after.lost}", FINDINGS["gpu_lost"][2])
    for name, value in after.values.items():
        if name not in before.values or value == before.values[name]:
            continue
        change = value - before.values[name]
        if change < 0 and not _is_state(name):
            was, now = whole(before.values[name]), whole(value)
            found.notes.append(f"{name} went from {was} to {now}: it was reset, or wrapped")
            change = 0 if name.endswith(tuple(f".{counter}" for counter in BYTES.values())) else value
        if change:
            found.changed[name] = change
    _compare_gpu(before, after, found)
    _compare_ports(before, after, found)
    for one, other, when in ((before, after, "before"), (after, before, "after")):
        for name in one.values:
            query = "" if name in other.values or name in found.changed else _query(name)
            if query and query not in found.missing:
                found.missing[query] = f"{name} was reported {when} the test only"
    _compare_xids(before, after, found)
    return found


def _compare_gpu(before: Counters, after: Counters, found: Changes) -> None:
    """Add the faults of memory and links, and the recovery action."""
    if not after.lost and "nvlink.up" not in after.missing:
        # A link that is no longer reported is down.
        gone = (name for name, up in before.values.items() if name.startswith("nvlink.up[") and up)
        found.changed |= {name: -1 for name in gone if name not in after.values}
    links: dict[tuple[str, str], list[str]] = {}
    for name, change in found.changed.items():
        link = _LINK.fullmatch(name)
        if name in MEMORY_FAULTS and change > 0:
            code, what = MEMORY_FAULTS[name]
            if all(fault.code != code for fault in found.faults):  # volatile errors are counted in the aggregate, too
                remedy = FINDINGS[code][2] if code in FINDINGS else DIAGNOSE
                found._fault(after.gpu, code, f"{whole(change)} new: {what}", remedy)
        elif name == RECOVERY and (value := int(after.values[name])):
            entry = recovery_action(value)
            wanted = f"NVML's recovery action of this GPU changed to {value:#x}: {entry.meaning}"
            found._fault(after.gpu, "recovery_action", wanted, entry.advice)
        elif link and link["counter"] == "up" and change < 0:
            links.setdefault(("nvlink_down", "NVLinks that went down"), []).append(f"link {link['link']}")
        elif link and link["counter"] in (*ZERO_TOLERANCE, *MUST_NOT_GROW) and change > 0:
            key = "nvlink_errors", f"NVLink counter {link['counter']} has grown"
            links.setdefault(key, []).append(f"link {link['link']}: {whole(change)}")
    for (code, what), where in links.items():
        remedy = FINDINGS[code][2].format(excuse="")
        found._fault(after.gpu, code, f"{what}: {', '.join(where)}", remedy)


def _compare_ports(before: Counters, after: Counters, found: Changes) -> None:
    """Add the faults of ports; notes of those that carried no data."""
    now = {port.name: port for port in after.ports}
    # Where an InfiniBand port is active NCCL uses that, and Ethernet is of a card for storage or management.
    has_fabric = any(port.is_active and port.link_layer == LAYER_OF_FABRIC for port in before.ports)
    for old in before.ports:
        port, new = old.name, now.get(old.name)
        wrong: list[tuple[str, str, str]] = []
        for counter in (LINK_DOWNED, CARRIER_DOWN):
            times = found.changed.get(f"{INFINIBAND}.{port}.{counter}", 0)
            if times > 0:
                lost = f"port {port} has lost its link {plural(round(times), 'time')} ({counter})"
                wrong.append(("link_down", lost, _CABLE))
        if old.is_active and new is None:
            why = after.missing.get(INFINIBAND)
            gone = f"port {port} was Active before, and its HCA is gone" + (f": {why}" if why else "")
            wrong.append(("port_down", gone, "look at `lspci` and the kernel log"))
        elif old.is_active and new is not None and not new.is_active:
            wrong.append(("port_down", f"port {port} was Active before, and no longer is", _CABLE))
        if found.changed.get(f"{INFINIBAND}.{port}.{RATE}", 0) < 0 and new is not None:
            what = f"port {port} has fallen from {old.rate_gbps:g} to {new.rate_gbps:g} Gb/s"
            wrong.append(("port_rate", what, _CABLE))
        for code, what, remedy in wrong:
            if has_fabric and old.link_layer == ETHERNET:
                found.notes.append(f"{what}; it is an Ethernet port of a node whose fabric is InfiniBand")
            elif not old.is_active:
                found.notes.append(f"{what}; it was not Active before the test either")
            else:
                found._fault(Identity(host=after.gpu.host), code, what, remedy)


def _compare_xids(before: Counters, after: Counters, found: Changes) -> None:
    old, new = before.log, after.log
    if old is None or new is None:
        return  # ``missing`` has the reason
    if old.source != new.source:
        found.missing[XID] = f"the kernel log was read from {old.source} before the test and from {new.source} after it"
        return
    if old.numbers and new.numbers and new.numbers[0] > old.numbers[1] + 1:
        lost = new.numbers[0] - old.numbers[1] - 1
        found.missing[XID] = f"the kernel has overwritten {lost} records before they were read"
    for key, xid in new.xids.items():
        if key in old.xids:
            continue
        kind = "sxid" if xid.is_switch else "xid"
        found.changed[f"{kind}.{xid.code}"] = found.changed.get(f"{kind}.{xid.code}", 0) + 1
        # The log leaves the function number out, which is always 0. A switch is the whole node's.
        gpu = Identity(host=after.gpu.host) if xid.is_switch else after.gpus_of_node.get(f"{xid.pci[:-2]}.0")
        entry = lookup(xid)
        where = f" of {xid.pci}" if xid.is_switch else ""
        report = f"{xid.name}{where}: {entry.meaning}; action: {entry.action}; {xid.text}"
        if gpu is None:
            found.notes.append(f"{report}, of PCI {xid.pci}, which is no GPU of this job")
        elif not entry.rejects:
            found.notes.append(f"{report}, of {gpu}")
        else:
            found._fault(gpu, f"{kind}_{xid.code}", report, entry.advice)


def _query(name: str) -> str:
    """Return the query of a counter; "" for a port's, whose absence is handled separately."""
    if name.startswith("nvlink.") and not name.startswith("nvlink.up"):
        return "nvlink.errors"
    return next((query for query in QUERIES if name == query or name.startswith(f"{query}[")), "")


def _is_state(name: str) -> bool:
    return name == RECOVERY or name.startswith("nvlink.up[") or name.endswith((f".{ACTIVE}", f".{RATE}"))


def whole(value: float) -> float:
    """Return a count as a whole number, where it is one."""
    return int(value) if value == int(value) else value
