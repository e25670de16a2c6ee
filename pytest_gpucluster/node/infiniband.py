"""The InfiniBand and RoCE ports of this node from sysfs: state, rate, firmware, GIDs, counters.

It needs no library, root or verbs, and works in a container that was given its HCAs.

Source: Linux kernel, Documentation/ABI/stable/sysfs-class-infiniband; the texts of state, phys_state and rate,
drivers/infiniband/core/sysfs.c.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pytest_gpucluster.node.sysfs import Tree, pci_address

INFINIBAND, ETHERNET = "InfiniBand", "Ethernet"
ROCE_V2 = "RoCE v2"
ACTIVE = "ACTIVE"
LINK_DOWNED = "link_downed"
"""How often the port has failed to recover a link error and has taken the link down."""
CARRIER_DOWN = "carrier_down_count"
"""How often the network interface of a RoCE port has lost its carrier. Source: Linux kernel,
Documentation/ABI/testing/sysfs-class-net."""

BYTES: Mapping[str, str] = {"port_xmit_data": "port_xmit_bytes", "port_rcv_data": "port_rcv_bytes"}
"""Counters in words of 4 bytes -> their name here, in bytes."""
BYTES_PER_WORD = 4

ERRORS = (
    LINK_DOWNED,
    "link_error_recovery",
    "symbol_error",
    "local_link_integrity_errors",
    "excessive_buffer_overrun_errors",
    "port_rcv_errors",
    "port_rcv_remote_physical_errors",
    "port_rcv_constraint_errors",
    "port_xmit_constraint_errors",
    "port_xmit_discards",
    "VL15_dropped",
)
"""Error counters of a port, in ``counters/``."""
CONGESTION = ("port_xmit_wait",)
"""Ticks in which data waited to be sent; in ``counters/``. Not an error."""
HARDWARE_ERRORS = (
    "out_of_sequence",
    "packet_seq_err",
    "local_ack_timeout_err",
    "rnr_nak_retry_err",
    "rx_icrc_encapsulated",
    "roce_adp_retrans_to",
)
"""Counters of lost, corrupted or resent packets, in ``hw_counters/`` of NVIDIA's HCAs.
Source: NVIDIA, "Understanding mlx5 Linux Counters and Status Parameters", HW counters."""


@dataclass(frozen=True, kw_only=True)
class Gid:
    """One entry of a port's table of addresses. ``kind``: "IB/RoCE v1" or "RoCE v2"; "" where unknown."""

    index: int
    address: str
    kind: str = ""
    interface: str = ""

    @property
    def is_ipv4(self) -> bool:
        """Whether it is an IPv4 address, as routed RoCE uses it.

        >>> Gid(index=3, address="0000:0000:0000:0000:0000:ffff:0a00:0001").is_ipv4
        True
        """
        return ipaddress.IPv6Address(self.address).ipv4_mapped is not None


@dataclass(frozen=True, kw_only=True)
class Port:
    """One port of an HCA.

    Attributes:
        device, number: ``mlx5_0`` and 1.
        state: DOWN, INIT, ARMED, ACTIVE or ACTIVE_DEFER; "" where it cannot be read.
        phys_state: LinkUp, Polling, Disabled and so on.
        rate_gbps: width times speed of the link now, in Gb/s; None where it cannot be read.
        rate: the kernel's text, such as "400 Gb/sec (4X NDR)".
        link_layer: "InfiniBand", "Ethernet" (RoCE) or "".
        lid, sm_lid: of the port and of its subnet manager; 0 where there is none.
        gids: the entries that are not empty; read on request.
        counters: those of ``ERRORS``, ``BYTES`` and the others that this port has.
    """

    device: str
    number: int
    state: str
    phys_state: str
    rate_gbps: float | None
    rate: str
    link_layer: str
    lid: int = 0
    sm_lid: int = 0
    gids: tuple[Gid, ...] = ()
    counters: Mapping[str, int] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Device and number, such as ``mlx5_0/1``. In a fleet of equal nodes, this is the rail."""
        return f"{self.device}/{self.number}"

    @property
    def is_active(self) -> bool:
        """Whether it carries data."""
        return self.state == ACTIVE

    def __str__(self) -> str:
        state = f"{self.state or 'state unknown'} ({self.phys_state or 'unknown'})"
        return f"{self.name} {self.link_layer or 'of unknown kind'} {state}, {self.rate or 'rate unknown'}"


@dataclass(frozen=True, kw_only=True)
class Device:
    """One HCA. ``board`` is the vendor's id of the card (PSID); ``pci`` and ``numa_node`` are None where unknown."""

    name: str
    kind: str = ""
    firmware: str = ""
    board: str = ""
    guid: str = ""
    pci: str | None = None
    numa_node: int | None = None
    ports: tuple[Port, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Adapters:
    """All HCAs of a node. ``why_not``: why there are none, or empty."""

    devices: tuple[Device, ...] = ()
    why_not: str = ""

    @property
    def ports(self) -> tuple[Port, ...]:
        """All ports, in the order of their devices."""
        return tuple(port for device in self.devices for port in device.ports)


_CLASS = "/class/infiniband"


def read(sysfs: Path | None = None, *, gids: bool = True, only_bytes: bool = False) -> Adapters:
    """Read all HCAs of this node.

    Args:
        sysfs: where sysfs is mounted, by default /sys.
        gids: whether to read the tables of GIDs, which have hundreds of entries on RoCE ports.
        only_bytes: of the counters only ``BYTES``: each of the others queries the firmware.
    """
    tree = Tree(root=sysfs or Tree().path("/sys"))
    folder = tree.path(_CLASS)
    try:
        names = sorted((entry.name for entry in folder.iterdir()), key=_by_number)
    except OSError as error:
        return Adapters(why_not=f"{folder}: {error.strerror or error}")
    if not names:
        return Adapters(why_not=f"{folder} is empty")
    return Adapters(devices=tuple(_device(tree, name, gids=gids, only_bytes=only_bytes) for name in names))


def _device(tree: Tree, name: str, *, gids: bool, only_bytes: bool) -> Device:
    folder = f"{_CLASS}/{name}"
    node = tree.number(f"{folder}/device/numa_node")
    return Device(
        name=name,
        kind=tree.text(f"{folder}/hca_type") or "",
        firmware=tree.text(f"{folder}/fw_ver") or "",
        board=tree.text(f"{folder}/board_id") or "",
        guid=tree.text(f"{folder}/node_guid") or "",
        pci=pci_address(tree.target(f"{folder}/device") or ""),
        numa_node=node if node is not None and node >= 0 else None,
        ports=tuple(_port(tree, name, number, gids, only_bytes) for number in _numbered(tree, f"{folder}/ports")),
    )


def _port(tree: Tree, device: str, number: int, gids: bool, only_bytes: bool) -> Port:
    folder = f"{_CLASS}/{device}/ports/{number}"
    rate = tree.text(f"{folder}/rate") or ""
    amount = re.match(r"([0-9.]+) Gb/sec", rate)
    layer = tree.text(f"{folder}/link_layer") or ""
    counters = dict(_counters(tree, folder, only_bytes))
    interface = tree.text(f"{folder}/gid_attrs/ndevs/0") if layer == ETHERNET else None
    downs = tree.number(f"{_CLASS}/{device}/device/net/{interface}/{CARRIER_DOWN}") if interface else None
    # The state is "4: ACTIVE".
    state, phys_state = ((tree.text(f"{folder}/{name}") or "").rpartition(":")[2] for name in ("state", "phys_state"))
    return Port(
        device=device,
        number=number,
        state=state.strip(),
        phys_state=phys_state.strip(),
        rate_gbps=float(amount[1]) if amount else None,
        rate=rate,
        link_layer=layer,
        lid=tree.number(f"{folder}/lid") or 0,
        sm_lid=tree.number(f"{folder}/sm_lid") or 0,
        gids=tuple(_gids(tree, folder)) if gids else (),
        counters=counters if downs is None else {**counters, CARRIER_DOWN: downs},
    )


def _counters(tree: Tree, port: str, only_bytes: bool) -> Iterator[tuple[str, int]]:
    # A virtual function has "N/A (no PMA)" in place of a number.
    for name in BYTES if only_bytes else (*ERRORS, *CONGESTION, *BYTES):
        if (count := tree.number(f"{port}/counters/{name}")) is not None:
            yield (BYTES[name], count * BYTES_PER_WORD) if name in BYTES else (name, count)
    for name in () if only_bytes else HARDWARE_ERRORS:
        if (count := tree.number(f"{port}/hw_counters/{name}")) is not None:
            yield name, count


def _gids(tree: Tree, port: str) -> Iterator[Gid]:
    for index in _numbered(tree, f"{port}/gids"):
        address = tree.text(f"{port}/gids/{index}") or ""
        try:
            known = ipaddress.IPv6Address(address)
        except ValueError:
            continue  # an entry that cannot be read is not usable
        # An empty entry of an InfiniBand port is fe80:: without an interface id.
        if int(known) & (2**64 - 1):
            kind, interface = (tree.text(f"{port}/gid_attrs/{name}/{index}") or "" for name in ("types", "ndevs"))
            yield Gid(index=index, address=address, kind=kind, interface=interface)


def _numbered(tree: Tree, folder: str) -> list[int]:
    return sorted(int(name) for name in tree.entries(folder) if name.isdigit())


def _by_number(name: str) -> tuple[str, int]:
    digits = re.search(r"\d+$", name)
    return (name[: digits.start()], int(digits[0])) if digits else (name, -1)
