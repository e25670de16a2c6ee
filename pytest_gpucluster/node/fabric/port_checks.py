"""Findings about the ports of the nodes: each node by itself, and compared with the others. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import TypeVar

from pytest_gpucluster.metrics.finding import Finding, Kind, finding
from pytest_gpucluster.node.fabric.ports import NodePorts, roce_gid
from pytest_gpucluster.node.infiniband import CARRIER_DOWN, ETHERNET, LINK_DOWNED, ROCE_V2

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

    Args:
        nodes: number of each node -> its ports.
        expected: whether InfiniBand or RoCE is expected between them. If not, everything is a note.

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

    Args:
        faults: node and port of each.
        leaves: all nodes of the run, each with its leaf switch; "" where it is not known.
    """
    rails: dict[str, dict[str, None]] = {}
    switches: dict[str, dict[str, None]] = {}
    for host, rail in faults:
        rails.setdefault(rail, {})[host] = None
        if leaves[host]:
            switches.setdefault(leaves[host], {})[host] = None
    sizes = Counter(leaves.values())
    lines = []
    for what, groups in (("rail", rails), ("leaf switch", switches)):
        for name, hosts in sorted(groups.items(), key=lambda group: (-len(group[1]), group[0])):
            if len(hosts) > 1:
                count = len(leaves) if what == "rail" else sizes[name]
                more = f" and {len(hosts) - _MAX_HOSTS} more" if len(hosts) > _MAX_HOSTS else ""
                listed = ", ".join(list(hosts)[:_MAX_HOSTS]) + more
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
        devices_of: dict[tuple[int, str], list[str]] = {}
        for (node, name), text in _deviants(versions, "cards"):
            devices_of.setdefault((node, text), []).append(name)
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
