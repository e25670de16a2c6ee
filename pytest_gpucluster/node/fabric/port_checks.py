"""Findings about the ports of the nodes: each node by itself, and compared with the others. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping
from typing import TypeVar

from pytest_gpucluster.metrics.finding import Finding, Kind, finding
from pytest_gpucluster.node.fabric import ports
from pytest_gpucluster.node.fabric.ports import NodePorts, roce_gid
from pytest_gpucluster.node.infiniband import CARRIER_DOWN, ETHERNET, LINK_DOWNED, ROCE_V2, Port

_CABLE = "look at the cable, the transceiver and the switch's port (`mlxlink -d DEVICE`, `ibdiagnet`), and compare them"
_FIRMWARE = "bring all cards to one firmware (`mlxfwmanager`), and reboot the node"
_COUNTED = (LINK_DOWNED, CARRIER_DOWN, "symbol_error", "link_error_recovery", "port_rcv_errors")
"""Error counters since the driver was loaded that are worth a note."""

_TIE = "; which is right is unknown"

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

    def add(self, node: int, kind: Kind, code: str, found: str, *, allowed: str, remedy: str, rail: str = "") -> None:
        """Add a finding about a node by its number, and about a port or ``rail`` of it."""
        host, kind = self.nodes[node].host, kind if self._expected else "note"
        self.of_node.setdefault(node, []).append(finding(kind, code, host, found, allowed=allowed, remedy=remedy))
        if rail and kind != "note":
            self._faults.append((host, rail))

    @property
    def shared(self) -> list[str]:
        """A line for each rail or leaf switch on which several nodes have a fault."""
        return ports.shared_rails(self._faults, {one.host: one.leaf for one in self.nodes.values()})


def examine_ports(nodes: Mapping[int, NodePorts], *, expected: bool) -> Findings:
    """Return the findings about all nodes. Arguments as those of :class:`Findings`."""
    found = Findings(nodes, expected=expected)
    for check in (_single_nodes, _states, _kinds, _firmware, _peer_memory):
        check(nodes, found)
    return found


def _single_nodes(nodes: Mapping[int, NodePorts], report: Findings) -> None:
    """Check each node by itself: ports, their GIDs and errors, and the access to GPU memory."""
    for node, one in nodes.items():
        if not one.adapters.ports:
            report.add(
                node,
                "hardware",
                "no_ports",
                f"no InfiniBand or RoCE port: {one.adapters.why_not or 'the HCAs show none'}",
                allowed="the ports of the fabric",
                remedy="look at `lspci` and the kernel log; in a container, check whether it was given its HCAs",
            )
            continue
        if not one.used:
            selection = " and ".join(hca for hca in one.hcas if hca)
            ports = ", ".join(port.name for port in one.adapters.ports)
            report.add(
                node,
                "environment",
                "no_ports",
                f"NCCL_IB_HCA={selection} selects none of the ports {ports}",
                allowed="a selection of existing ports",
                remedy="unset NCCL_IB_HCA, or name HCAs of this node (`ibv_devices`)",
            )
        for port in one.used:
            _of_port(node, one, port, report)
        if not one.peer_memory.is_reachable:
            report.add(
                node,
                "environment",
                "peer_memory",
                f"network cards cannot access GPU memory: {one.peer_memory}",
                allowed="nvidia_peermem, or DMA-BUF",
                remedy="`modprobe nvidia_peermem`, or the driver's open kernel modules on Linux 5.12 or newer",
            )


def _of_port(node: int, one: NodePorts, port: Port, report: Findings) -> None:
    if port.is_active and port.link_layer == ETHERNET:
        _gid(node, one, port, report)
    errors = [f"{name} {port.counters[name]}" for name in _COUNTED if port.counters.get(name)]
    if errors:
        report.add(
            node,
            "note",
            "port_errors",
            f"port {port.name} since its driver was loaded: {', '.join(errors)}",
            allowed="errors that do not occur again",
            remedy="check whether they grow under load",
        )


def _gid(node: int, one: NodePorts, port: Port, report: Findings) -> None:
    gid = roce_gid(port, one.gid_index)
    if gid is not None and gid.kind == ROCE_V2:
        return
    index = "" if one.gid_index is None else f" at NCCL_IB_GID_INDEX={one.gid_index}"
    gids = ", ".join(f"{known.index}: {known.kind or 'unknown'}" for known in port.gids) or "none"
    has = "no usable GID" if gid is None else f"a GID of {gid.kind or 'unknown kind'}, which is not routed,"
    report.add(
        node,
        "environment" if gid is None else "note",
        "roce_gid",
        f"port {port.name} has {has}{index} (its GIDs: {gids})",
        allowed="a GID of RoCE v2",
        remedy="unset NCCL_IB_GID_INDEX, so that NCCL finds one; look at `show_gids` and the interface's address",
    )


def _states(nodes: Mapping[int, NodePorts], report: Findings) -> None:
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
                report.add(
                    node,
                    # As many as elsewhere, under other names: nothing is broken, but the rails are unknown.
                    "note" if len(own) >= usual else "hardware",
                    "port_missing",
                    f"no port {rail}, which {len(having)} of {len(ports)} nodes have",
                    allowed="the same ports on all nodes",
                    remedy="look at `lspci` and the kernel log of this node",
                    rail=rail,
                )
        for node, port in having.items():
            why = ", not made Active by a subnet manager" if port.state == "INIT" else ""
            if not active:
                report.add(
                    node,
                    "note",
                    "port_inactive",
                    f"{port}{why}",
                    allowed="Active, where it has a cable",
                    remedy="nothing, if it is not connected",
                )
            elif node not in active:
                report.add(
                    node,
                    "hardware",
                    "port_state",
                    f"{port}{why}; on {len(active)} of {len(ports)} nodes it is Active",
                    allowed="Active, as on other nodes",
                    remedy=_CABLE,
                    rail=rail,
                )
            elif node in rates and rates[node] < max(rates.values()):
                report.add(
                    node,
                    "hardware",
                    "port_rate",
                    f"{port}; on other nodes it has {max(rates.values()):g} Gb/s",
                    allowed="the rate of the other nodes",
                    remedy=_CABLE,
                    rail=rail,
                )


def _kinds(nodes: Mapping[int, NodePorts], report: Findings) -> None:
    """Compare the link layer and the card of the ports of one name over all nodes."""
    layers: dict[str, dict[int, str]] = {}
    boards: dict[str, dict[int, str]] = {}
    for node, one in nodes.items():
        for port in one.used:
            layers.setdefault(port.name, {})[node] = port.link_layer or "unknown"
            boards.setdefault(port.name, {})[node] = _board(one, port)
    link = "set the cards to one kind (`mlxconfig ... LINK_TYPE_P1`), and reboot the node"
    for code, what, by_rail, allowed, remedy in (
        ("link_layer", "link layer", layers, "one kind on all nodes", link),
        ("board", "card", boards, "the same card on all nodes", "have the node brought to the cards of the others"),
    ):
        for rail, values in by_rail.items():
            for node, text in _deviants(values, "nodes"):
                report.add(
                    node,
                    "hardware",
                    code,
                    f"{what} of port {rail}: {text}",
                    allowed=allowed,
                    remedy=remedy,
                    rail=rail,
                )


def _firmware(nodes: Mapping[int, NodePorts], report: Findings) -> None:
    """Compare the cards of one board, on all nodes and within each."""
    of_board: dict[str, dict[tuple[int, str], str]] = {}
    for node, one in nodes.items():
        for port in one.used:
            device = one.device_of(port)
            of_board.setdefault(_board(one, port), {})[node, device.name] = device.firmware or "unknown"
    for board, versions in of_board.items():
        devices_of: dict[tuple[int, str], list[str]] = {}
        for (node, name), text in _deviants(versions, "cards"):
            devices_of.setdefault((node, text), []).append(name)
        for (node, text), devices in devices_of.items():
            report.add(
                node,
                "hardware",
                "firmware",
                f"firmware of {board} on {', '.join(devices)}: {text}",
                allowed="one firmware on all cards of a board",
                remedy=_FIRMWARE,
            )


def _peer_memory(nodes: Mapping[int, NodePorts], report: Findings) -> None:
    """Compare the access to GPU memory; a node without any has a finding of its own."""
    ways = {node: str(one.peer_memory) for node, one in nodes.items() if one.used and one.peer_memory.is_reachable}
    for node, text in _deviants(ways, "nodes"):
        report.add(
            node,
            "note",
            "peer_memory_differs",
            f"access to GPU memory: {text}",
            allowed="the same on all nodes",
            remedy="bring the nodes to one image",
        )


def _board(one: NodePorts, port: Port) -> str:
    device = one.device_of(port)
    return device.board or device.kind or "an unknown board"


def _deviants(values: Mapping[_Key, str], population: str) -> Iterator[tuple[_Key, str]]:
    """Yield the keys with an unusual value, with a text about it. Of equally frequent values, all are unusual."""
    counts = Counter(values.values()).most_common()
    if len(counts) < 2:
        return
    tie = counts[0][1] == counts[1][1]
    for key, value in values.items():
        if tie or value != counts[0][0]:
            other, count = next(one for one in counts if one[0] != value)
            yield key, f"{value}, {other} on {count} of {len(values)} {population}" + (_TIE if tie else "")
