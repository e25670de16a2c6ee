"""The ports that a node reports to the others, which of them NCCL may use, and the findings about them.

Pure, but for :func:`read_ports` and :func:`network_cards`, which read sysfs.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from pytest_gpucluster.judge.limits import Thresholds
from pytest_gpucluster.metrics.finding import Finding, Kind, finding
from pytest_gpucluster.metrics.stats import grouped
from pytest_gpucluster.node import infiniband, pci
from pytest_gpucluster.node.fabric import nccl_environment
from pytest_gpucluster.node.fabric.nccl_environment import Setting
from pytest_gpucluster.node.infiniband import (
    CARRIER_DOWN,
    ETHERNET,
    INFINIBAND,
    LINK_DOWNED,
    ROCE_V2,
    Adapters,
    Device,
    Gid,
    Port,
)
from pytest_gpucluster.node.interfaces import matches
from pytest_gpucluster.node.pci import PeerMemory
from pytest_gpucluster.node.sysfs import Tree
from pytest_gpucluster.text import some_of


def leaf_of(environ: Mapping[str, str]) -> str:
    """Return the leaf switch of this node, from Slurm's variables of a job's tasks; "" where they are not set.

    ``SLURM_TOPOLOGY_ADDR`` has the switches from the top down and then the node, separated by dots, and
    ``SLURM_TOPOLOGY_ADDR_PATTERN`` what each part is. Names of nodes may hold dots themselves.
    Source: Slurm, sbatch(1) and srun(1), output environment variables.

    >>> leaf_of({"SLURM_TOPOLOGY_ADDR": "s0.s4.gpu-07", "SLURM_TOPOLOGY_ADDR_PATTERN": "switch.switch.node"})
    's4'
    """
    kinds = environ.get("SLURM_TOPOLOGY_ADDR_PATTERN", "").split(".")
    parts = environ.get("SLURM_TOPOLOGY_ADDR", "").split(".", len(kinds) - 1)
    switches = [part for kind, part in zip(kinds, parts, strict=False) if kind == "switch"]
    return switches[-1] if switches and len(parts) == len(kinds) else ""


BUSBW = "nccl.all_reduce.busbw"
NET_IB = "NET/IB"


@dataclass(frozen=True, kw_only=True)
class FabricSources:
    """Sources of the fabric's facts. Tests put their own here."""

    tree: Tree = field(default_factory=Tree)
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    home: Callable[[], Path | None] = nccl_environment.home

    def settings(self) -> tuple[Setting, ...]:
        """Return the variables that change what NCCL does, from the environment and from NCCL's files."""
        file = self.tree.path(str(nccl_environment.SYSTEM_FILE))
        return nccl_environment.read_environment(self.environ, home_of_user=self.home, system_file=file)


@dataclass(frozen=True, kw_only=True)
class NodePorts:
    """One node's HCAs.

    Attributes:
        host: its name.
        leaf: its leaf switch, "" where it is not known.
        hcas: ``NCCL_IB_HCA`` of its ranks, each value once; "" where it is not set.
        gid_index: ``NCCL_IB_GID_INDEX``, None where it is not set.
    """

    host: str
    adapters: Adapters
    peer_memory: PeerMemory
    leaf: str = ""
    hcas: tuple[str, ...] = ("",)
    gid_index: int | None = None

    @property
    def used(self) -> tuple[Port, ...]:
        """The ports that NCCL may use, whether or not they are active."""
        return used_ports(self.adapters, self.hcas)

    @property
    def active(self) -> tuple[Port, ...]:
        """Those of them that are active."""
        return tuple(port for port in self.used if port.is_active)

    def slowest_rate(self, gpus: int) -> float:
        """Return the rate of the slowest of as many active ports as there are GPUs, the fastest ones first, in Gb/s.

        So a slower card for storage in a node with a RoCE fabric does not count, and a slow port of the fabric does:
        then there are not enough fast ones. 0 where no port is active.
        """
        fastest = sorted((port.rate_gbps or 0.0 for port in self.active), reverse=True)[:gpus]
        return min(fastest, default=0.0)

    def device_of(self, port: Port) -> Device:
        """Return the HCA of a port."""
        return next(device for device in self.adapters.devices if device.name == port.device)

    def summary(self) -> dict[str, Any]:
        """Return what to record of this node, in plain types."""
        used = {port.device for port in self.used}
        return {
            "ports": [str(port) for port in self.used],
            "cards": [
                f"{device.name}: {device.board or device.kind}, firmware {device.firmware or 'unknown'}, "
                f"PCI {device.pci}, NUMA node {device.numa_node}"
                for device in self.adapters.devices
                if device.name in used
            ],
            "adapters": [
                {name: getattr(device, name) for name in ("name", "board", "guid", "firmware")}
                | {"pci_bus_id": device.pci or ""}
                for device in self.adapters.devices
            ],
            "peer_memory": str(self.peer_memory),
            "leaf_switch": self.leaf or "unknown",
        }


def read_ports(sources: FabricSources, *, host: str, hcas: Iterable[str], gid_index: int | None) -> NodePorts:
    """Read this node's ports. Arguments as the attributes of :class:`NodePorts`."""
    return NodePorts(
        host=host,
        adapters=infiniband.read(sources.tree.path("/sys")),
        peer_memory=pci.read_peer_memory(sources.tree),
        leaf=leaf_of(sources.environ),
        hcas=tuple(dict.fromkeys(hcas)),
        gid_index=gid_index,
    )


def used_ports(adapters: Adapters, hcas: Sequence[str] = ("",)) -> tuple[Port, ...]:
    """Return the ports that NCCL may use.

    Where ``NCCL_IB_HCA`` is set, these are the ports that any rank selects. Else they are those of InfiniBand where one
    is active, or else those of RoCE: a node may have an Ethernet card for storage in addition to its fabric.
    """
    if any(hcas):
        return tuple(
            port for port in adapters.ports if any(not hca or matches(port.device, hca, port.number) for hca in hcas)
        )
    for layer in (INFINIBAND, ETHERNET):
        of_layer = tuple(port for port in adapters.ports if port.link_layer == layer)
        if any(port.is_active for port in of_layer):
            return of_layer
    return adapters.ports


def network_cards(sources: FabricSources | None = None) -> int | None:
    """Count the network cards of this node that are for data between nodes; None where the kernel shows none.

    Cards are counted whatever the state of their ports: a node of eight cards that has lost the links of four must not
    be compared with the limit of four cards. So neither NCCL's log, which names the ports that work, nor
    ``NCCL_IB_HCA`` is considered. Of the ports that NCCL uses by itself the fastest active one shows which cards count:
    those of its kind (``hca_type``) and link layer, and those with another port as fast. A slower card of another kind,
    for storage, is not among them; one of the same kind is. Where the node has more cards of one kind, their number
    counts: the cards of the fabric may all be down. The two ports of one card are one card, by its address on the PCI
    bus: they share its lanes.
    """
    sources = sources or FabricSources()
    adapters = infiniband.read(sources.tree.path("/sys"), gids=False, only_bytes=True)
    fastest = max(used_ports(adapters), key=lambda port: (port.is_active, port.rate_gbps or 0.0), default=None)
    if fastest is None:
        return None
    kind = next(device.kind for device in adapters.devices if device.name == fastest.device)

    def is_meant(device: Device) -> bool:
        of_layer = [port for port in device.ports if port.link_layer in (fastest.link_layer, "")]
        if device.kind == kind:
            return bool(of_layer) or not device.ports  # a card without ports is broken, and still counts
        return any(port.is_active and port.rate_gbps == fastest.rate_gbps for port in of_layer)

    alike = grouped(
        ((device.kind, layer), device)
        for device in adapters.devices
        for layer in {port.link_layer for port in device.ports} or {""}
    )
    return max(_cards(filter(is_meant, adapters.devices)), *map(_cards, alike.values()))


def _cards(devices: Iterable[Device]) -> int:
    return len({device.pci.rpartition(".")[0] if device.pci else device.name for device in devices})


def roce_gid(port: Port, index: int | None) -> Gid | None:
    """Return the GID that NCCL will use on a RoCE port, or None where there is none that can be routed.

    Without an index NCCL takes one of RoCE v2 with an IPv4 address, and of RoCE v2 where there is no such.
    Source: NCCL 2.21 and newer, src/transport/net_ib.cc, ncclIbGetGidIndex.
    """
    if index is not None:
        return next((gid for gid in port.gids if gid.index == index), None)
    second = [gid for gid in port.gids if gid.kind == ROCE_V2]
    return next((gid for gid in second if gid.is_ipv4), second[0] if second else None)


def expects_infiniband(
    limits: Thresholds, *, sku: str | None, world_size: int, nnodes: int, sizes: Iterable[str], on_cpu: bool
) -> tuple[bool, str]:
    """Return whether InfiniBand or RoCE is expected between the nodes, and why.

    It is, between two nodes or more, unless the limits of the all-reduce expect another transport there.

    ``sizes`` are those of the all-reduce, as they are written. A rehearsal ``on_cpu`` does not use it.
    """
    if on_cpu:
        return False, "a rehearsal on cpu"
    if nnodes < 2:
        return False, "one node"
    for size in sizes:
        labels = {"size": size, "dtype": "bf16", "world_size": str(world_size), "nnodes": str(nnodes)}
        limit = limits.limit(BUSBW, sku=sku or "", world_size=world_size, nnodes=nnodes, labels=labels)
        if limit is not None and limit.expect_transport:
            wanted = " or ".join(limit.expect_transport)
            by_ib = any(name == NET_IB or name.startswith("COLLNET/") for name in limit.expect_transport)
            return by_ib, f"{limit.origin} expects {wanted}"
    return True, f"{nnodes} nodes, and no limit expects another transport between them"


_CABLE = "look at the cable, the transceiver and the switch's port (`mlxlink -d DEVICE`, `ibdiagnet`), and compare them"
FINDINGS: Mapping[str, tuple[Kind, str, str]] = {
    "no_ports": (
        "hardware",
        "the ports of the fabric",
        "look at `lspci` and the kernel log; in a container, check whether it was given its HCAs",
    ),
    "no_ports_selected": (
        "environment",
        "a selection of existing ports",
        "unset NCCL_IB_HCA, or name HCAs of this node (`ibv_devices`)",
    ),
    "peer_memory": (
        "environment",
        "nvidia_peermem, or DMA-BUF",
        "`modprobe nvidia_peermem`, or the driver's open kernel modules on Linux 5.12 or newer",
    ),
    "peer_memory_differs": ("note", "the same on all nodes", "bring the nodes to one image"),
    "port_errors": ("note", "errors that do not occur again", "check whether they grow under load"),
    "roce_gid": (
        "environment",
        "a GID of RoCE v2",
        "unset NCCL_IB_GID_INDEX, so that NCCL finds one; look at `show_gids` and the interface's address",
    ),
    "port_missing": (
        "hardware",
        "the same ports on all nodes",
        "look at `lspci` and the kernel log of this node",
    ),
    "port_inactive": ("note", "Active, where it has a cable", "nothing, if it is not connected"),
    "port_state": ("hardware", "Active, as on other nodes", _CABLE),
    "port_rate": ("hardware", "the rate of the other nodes", _CABLE),
    "link_layer": (
        "hardware",
        "one kind on all nodes",
        "set the cards to one kind (`mlxconfig ... LINK_TYPE_P1`), and reboot the node",
    ),
    "board": ("hardware", "the same card on all nodes", "have the node brought to the cards of the others"),
    "firmware": (
        "hardware",
        "one firmware on all cards of a board",
        "bring all cards to one firmware (`mlxfwmanager`), and reboot the node",
    ),
}
"""Code -> its kind where the check states no other, what is allowed, and what to do."""
_COUNTED = (LINK_DOWNED, CARRIER_DOWN, "symbol_error", "link_error_recovery", "port_rcv_errors")
"""Error counters since the driver was loaded that are worth a note."""
_MAX_HOSTS = 8

_Key = TypeVar("_Key", bound=Hashable)


class Findings:
    """Findings of all nodes.

    Where InfiniBand or RoCE is not ``expected`` between the nodes, everything is a note.

    Attributes:
        of_node: node -> its findings; a node without any is left out.
    """

    def __init__(self, nodes: Mapping[int, NodePorts], *, expected: bool) -> None:
        self.nodes, self._expected = nodes, expected
        self.of_node: dict[int, list[Finding]] = {}
        self._faults: list[tuple[str, str]] = []

    def add(self, node: int, code: str, found: str, *, kind: Kind | None = None, rail: str = "") -> None:
        """Add a finding of the table about a node by its number, and about a port or ``rail`` of it."""
        usual, allowed, remedy = FINDINGS[code]
        kind, host = (kind or usual) if self._expected else "note", self.nodes[node].host
        code = code.removesuffix("_selected")
        self.of_node.setdefault(node, []).append(finding(kind, code, host, found, allowed=allowed, remedy=remedy))
        if rail and kind != "note":
            self._faults.append((host, rail))

    @property
    def shared(self) -> list[str]:
        """A line for each rail or leaf switch on which several nodes have a fault."""
        return shared_rails(self._faults, {one.host: one.leaf for one in self.nodes.values()})


def shared_rails(faults: Iterable[tuple[str, str]], leaves: Mapping[str, str]) -> list[str]:
    """Return a line for each rail and leaf switch that several faulty nodes share, the most faults first.

    ``faults`` are node and port of each, ``leaves`` the leaf switch of every node of the run; "" where it is unknown.
    """
    each = dict.fromkeys(faults)
    rails = grouped((rail, host) for host, rail in each)
    switches = grouped((leaves[host], host) for host in dict.fromkeys(host for host, _ in each) if leaves[host])
    sizes = Counter(leaves.values())
    lines = []
    for what, groups in (("rail", rails), ("leaf switch", switches)):
        for name, hosts in sorted(groups.items(), key=lambda group: (-len(group[1]), group[0])):
            if len(hosts) > 1:
                count = len(leaves) if what == "rail" else sizes[name]
                listed = some_of(hosts, _MAX_HOSTS)
                lines.append(f"{what} {name}: faults on {len(hosts)} of its {count} nodes ({listed})")
    return lines


def examine_ports(nodes: Mapping[int, NodePorts], *, expected: bool) -> Findings:
    """Return the findings about all nodes. Arguments as those of :class:`Findings`."""
    report = Findings(nodes, expected=expected)
    for node, one in nodes.items():
        _check_node(node, one, report)
    _compare_states(nodes, report)
    _compare_values(nodes, report)
    return report


def _check_node(node: int, one: NodePorts, report: Findings) -> None:
    """Check a node by itself: ports, their GIDs and errors, and the access to GPU memory."""
    if not one.adapters.ports:
        why = one.adapters.why_not or "the HCAs show none"
        report.add(node, "no_ports", f"no InfiniBand or RoCE port: {why}")
        return
    if not one.used:
        selection = " and ".join(hca for hca in one.hcas if hca)
        ports = ", ".join(port.name for port in one.adapters.ports)
        report.add(node, "no_ports_selected", f"NCCL_IB_HCA={selection} selects none of the ports {ports}")
    for port in one.used:
        gid = roce_gid(port, one.gid_index)
        if port.is_active and port.link_layer == ETHERNET and (gid is None or gid.kind != ROCE_V2):
            index = "" if one.gid_index is None else f" at NCCL_IB_GID_INDEX={one.gid_index}"
            gids = ", ".join(f"{known.index}: {known.kind or 'unknown'}" for known in port.gids) or "none"
            has = "no usable GID" if gid is None else f"a GID of {gid.kind or 'unknown kind'}, which is not routed,"
            found = f"port {port.name} has {has}{index} (its GIDs: {gids})"
            report.add(node, "roce_gid", found, kind="environment" if gid is None else "note")
        if errors := [f"{name} {port.counters[name]}" for name in _COUNTED if port.counters.get(name)]:
            report.add(node, "port_errors", f"port {port.name} since its driver was loaded: {', '.join(errors)}")
    if not one.peer_memory.is_reachable:
        report.add(node, "peer_memory", f"network cards cannot access GPU memory: {one.peer_memory}")


def _compare_states(nodes: Mapping[int, NodePorts], report: Findings) -> None:
    """Compare the ports of one name over all nodes: each must exist, be active, and be as fast as the others."""
    ports = {node: {port.name: port for port in one.used} for node, one in nodes.items()}
    counts = Counter(len(own) for own in ports.values())
    usual = max(counts, key=lambda count: (counts[count], count), default=0)  # of two nodes that with more
    for rail in sorted({name for own in ports.values() for name in own}):
        having = {node: own[rail] for node, own in ports.items() if rail in own}
        active = {node for node, port in having.items() if port.is_active}
        rates = {node: rate for node in active if (rate := having[node].rate_gbps) is not None}
        for node, own in ports.items():
            if own and node not in having and 2 * len(having) >= len(ports):
                found = f"no port {rail}, which {len(having)} of {len(ports)} nodes have"
                # As many as elsewhere, under other names: nothing is broken, but the rails are unknown.
                report.add(node, "port_missing", found, kind="note" if len(own) >= usual else "hardware", rail=rail)
        for node, port in having.items():
            found = f"{port}{', not made Active by a subnet manager' if port.state == 'INIT' else ''}"
            if not active:
                report.add(node, "port_inactive", found)
            elif node not in active:
                found += f"; on {len(active)} of {len(ports)} nodes it is Active"
                report.add(node, "port_state", found, rail=rail)
            elif node in rates and rates[node] < max(rates.values()):
                found += f"; on other nodes it has {max(rates.values()):g} Gb/s"
                report.add(node, "port_rate", found, rail=rail)


def _compare_values(nodes: Mapping[int, NodePorts], report: Findings) -> None:
    """Compare link layers and cards of the ports of one name, the firmware of the cards of one board, on all nodes and
    within each, and the access to GPU memory; a node without any has a finding of its own."""
    layers: dict[str, dict[int, str]] = {}
    boards: dict[str, dict[int, str]] = {}
    firmware: dict[str, dict[tuple[int, str], str]] = {}
    for node, one in nodes.items():
        for port in one.used:
            device = one.device_of(port)
            board = device.board or device.kind or "an unknown board"
            layers.setdefault(port.name, {})[node] = port.link_layer or "unknown"
            boards.setdefault(port.name, {})[node] = board
            firmware.setdefault(board, {})[node, device.name] = device.firmware or "unknown"
    for code, what, by_rail in (("link_layer", "link layer", layers), ("board", "card", boards)):
        for rail, values in by_rail.items():
            for node, text in _deviants(values, "nodes"):
                report.add(node, code, f"{what} of port {rail}: {text}", rail=rail)
    for board, versions in firmware.items():
        devices_of = grouped(((node, text), name) for (node, name), text in _deviants(versions, "cards"))
        for (node, text), devices in devices_of.items():
            report.add(node, "firmware", f"firmware of {board} on {', '.join(devices)}: {text}")
    ways = {node: str(one.peer_memory) for node, one in nodes.items() if one.used and one.peer_memory.is_reachable}
    for node, text in _deviants(ways, "nodes"):
        report.add(node, "peer_memory_differs", f"access to GPU memory: {text}")


def _deviants(values: Mapping[_Key, str], population: str) -> Iterator[tuple[_Key, str]]:
    """Yield the keys with an unusual value, with a text about it. Of equally frequent values, all are unusual."""
    counts = Counter(values.values()).most_common()
    if len(counts) < 2:
        return
    tie = counts[0][1] == counts[1][1]
    for key, value in values.items():
        if tie or value != counts[0][0]:
            other, count = next(one for one in counts if one[0] != value)
            unknown = "; which is right is unknown" if tie else ""
            yield key, f"{value}, {other} on {count} of {len(values)} {population}{unknown}"
