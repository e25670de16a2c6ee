"""The facts of one node that matter to NCCL, as kernel, NVML and launcher report them, and the fabric they show. Pure.

The fabric is the network that carries a node's data, with the cards that belong to it. NCCL itself uses every active
port, InfiniBand and Ethernet alike: also that of a card for storage. Source: NCCL, src/transport/net_ib.cc,
ncclIbInitDevices. Which ports belong to the fabric is this suite's own judgement; where the facts are ambiguous it is
left open, and nothing is advised.
"""

from __future__ import annotations

import ipaddress
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from pytest_gpucluster.node.fabric.nccl_environment import Setting
from pytest_gpucluster.node.infiniband import ETHERNET, INFINIBAND, Adapters, Port
from pytest_gpucluster.node.interfaces import Interface
from pytest_gpucluster.node.pci import PeerMemory

Provider = Literal["AWS", "Azure", "Google Cloud"]
_GOOGLE_PLUGINS = ("NCCL_FASTRAK_", "NCCL_GPUDIRECTTCPX_")
"""Prefixes of the variables of GPUDirect-TCPXO and -TCPX."""

SEVERAL_NODES = 2
"""The assumed number of nodes of a job where it is unknown: the advice is for jobs over several."""
DISTANCES = ("PIX", "PXB", "PHB", "NODE", "SYS")
"""Between a card and a GPU, as in ``nvidia-smi topo -m``, the nearest first."""
_OVER_SWITCHES = ("PIX", "PXB")
"""Over PCIe switches only: NCCL uses GPUDirect RDMA by itself. Source: NCCL user guide, Environment Variables,
NCCL_NET_GDR_LEVEL."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU. ``name`` is NVML's, ``pci`` its address in any notation."""

    name: str
    pci: str


@dataclass(frozen=True, kw_only=True)
class Card:
    """An active or inactive port of an RDMA device, with what is known of the device.

    Attributes:
        port: state, rate and addresses.
        board: the maker's id of the card, "" where it is unknown.
        driver: such as mlx5_core or efa; "" where it is unknown.
        pci: None for RDMA in software, which has no card.
        interface: the network interface of a RoCE port, "" where there is none.
        distance: to the nearest GPU, one of ``DISTANCES``; "" where it is unknown.
    """

    port: Port
    board: str = ""
    driver: str = ""
    pci: str | None = None
    interface: str = ""
    distance: str = ""

    @property
    def name(self) -> str:
        """Device and port as in ``NCCL_IB_HCA``, such as ``mlx5_0:1``."""
        return f"{self.port.device}:{self.port.number}"

    @property
    def rate(self) -> float:
        """Gb/s; 0 where it is unknown."""
        return self.port.rate_gbps or 0.0


@dataclass(frozen=True, kw_only=True)
class Network:
    """A network interface that is up and has an address.

    Attributes:
        interface: name and addresses.
        is_real: it is a card, or a bond or VLAN of cards; not a bridge, a tunnel or one end of a pair.
        driver: such as ena or gve; "" for none.
        speed_mbps: None where the driver does not report it, as in most virtual machines.
        is_default: it carries the default route.
    """

    interface: Interface
    is_real: bool
    driver: str = ""
    speed_mbps: int | None = None
    is_default: bool = False

    @property
    def name(self) -> str:
        """The interface's name."""
        return self.interface.name

    @property
    def is_link_local(self) -> bool:
        """Whether it has link-local addresses only, as the one to a server's BMC over USB."""
        return all(ipaddress.ip_address(address).is_link_local for address in self.interface.addresses)


@dataclass(frozen=True, kw_only=True)
class Facts:
    """One node.

    Attributes:
        host: its name.
        launcher: of this process, such as torchrun; "" for a shell.
        scheduler: slurm, kubernetes or None.
        nnodes: of this launch or job; None outside of one.
        local_ranks: of this node.
        container: kind of the container of this process; None for none that is known.
        provider: of this virtual machine; None for an unknown one.
        gpus: those visible; ``gpus_unknown`` is why they are unknown, "" where they are known.
        gpus_of_node: PCI addresses of all GPUs of the node, also of those that a job or container was not given.
        nvlink, nvls: the GPUs of a node reach each other over NVLink, and through a switch that can reduce.
        adapters: the RDMA devices; ``cards``: their ports, one by one.
        rdma_on_bus: addresses of PCI devices that can do RDMA, for a node that shows no RDMA device.
        verbs: device files of RDMA that this process can access, such as uverbs0.
        peer_memory: how network cards access GPU memory.
        networks: interfaces that are up and have an address, without the loopback, in the kernel's order.
        interfaces: names of all interfaces, also of those that are down; empty where they are unknown.
        nccl: its version; None where it is unknown.
        settings: variables that are set, and where.
    """

    host: str
    launcher: str = ""
    scheduler: str | None = None
    nnodes: int | None = None
    local_ranks: int = 1
    container: str | None = None
    provider: Provider | None = None
    gpus: tuple[Gpu, ...] = ()
    gpus_unknown: str = ""
    gpus_of_node: tuple[str, ...] = ()
    nvlink: bool = False
    nvls: bool = False
    adapters: Adapters = field(default_factory=Adapters)
    cards: tuple[Card, ...] = ()
    rdma_on_bus: tuple[str, ...] = ()
    verbs: tuple[str, ...] = ()
    peer_memory: PeerMemory
    networks: tuple[Network, ...] = ()
    interfaces: tuple[str, ...] = ()
    nccl: str | None = None
    settings: tuple[Setting, ...] = ()

    def setting(self, name: str) -> Setting | None:
        """Return a variable of NCCL's that is set."""
        return next((setting for setting in self.settings if setting.name == name), None)

    @property
    def planned_nodes(self) -> int:
        """Number of nodes, or ``SEVERAL_NODES`` where it is unknown."""
        return SEVERAL_NODES if self.nnodes is None else self.nnodes

    @property
    def link_layers(self) -> set[str]:
        """The kinds of active ports."""
        return {port.link_layer for port in self.adapters.ports if port.is_active}

    @property
    def has_fabric(self) -> bool:
        """Whether there are other nodes, and active ports to reach them."""
        return self.planned_nodes > 1 and bool(self.link_layers)

    @property
    def required_by_plugin(self) -> frozenset[str]:
        """Variables that Google's plugins need at a value that hurts elsewhere, where such a plugin is in use.

        They check it, or disable NVLS. Source: the script nccl-env-profile.sh and the checker's
        a3plus_guest_config.textproto, which belong to the plugin.
        """
        in_use = any(setting.name.startswith(_GOOGLE_PLUGINS) for setting in self.settings)
        return frozenset(("NCCL_ALGO", "NCCL_NVLS_ENABLE") if self.provider == "Google Cloud" and in_use else ())


FabricKind = Literal["InfiniBand", "RoCE", "EFA", "Ethernet"]
"""What carries the data: InfiniBand verbs, the same over Ethernet, AWS' Elastic Fabric Adapter, or TCP."""
IB: FabricKind = "InfiniBand"
ROCE: FabricKind = "RoCE"
EFA: FabricKind = "EFA"
TCP: FabricKind = "Ethernet"

_LAYERS = (INFINIBAND, ETHERNET)


@dataclass(frozen=True, kw_only=True)
class Fabric:
    """The network of a node's data.

    Attributes:
        kind: None where it is unknown.
        why: the reason for this kind, or why it is unknown.
        cards: the ports that carry data.
        outside: active ports that do not, each with the reason.
        unclear: why the ports of the fabric cannot be identified; then ``outside`` is empty. "" where they can.
    """

    kind: FabricKind | None
    why: str
    cards: tuple[Card, ...] = ()
    outside: tuple[tuple[Card, str], ...] = ()
    unclear: str = ""


def find_fabric(facts: Facts) -> Fabric:
    """Find the fabric of a node."""
    active = [card for card in facts.cards if card.port.is_active]
    efa = [card for card in active if card.driver == "efa"]
    carrying = [card for card in active if card.port.link_layer in _LAYERS]
    cards = [card for card in carrying if card.pci is not None]
    real = [network.name for network in facts.networks if network.is_real]
    if efa:
        return Fabric(kind=EFA, why=f"{_ports(efa)} of the driver efa", cards=tuple(efa))
    if cards:
        soft = [(card, "it is RDMA in software, with no card behind it") for card in carrying if card.pci is None]
        return _of_cards(cards, soft, len(facts.gpus_of_node))
    kind: FabricKind | None = None
    if facts.cards:
        listed = ", ".join(f"{card.name} {card.port.state or 'state unknown'}" for card in facts.cards)
        why = f"there are RDMA devices, and no card of them carries data: {listed}"
    elif facts.rdma_on_bus:
        where = f"in this container ({facts.container})" if facts.container else "here"
        why = f"cards for RDMA are on the PCI bus ({', '.join(facts.rdma_on_bus)}), and there is no RDMA device {where}"
    elif real:
        kind, why = TCP, f"no RDMA device, and the network interfaces {', '.join(real)}"
    else:
        of = f" of this container ({facts.container})" if facts.container else ""
        names = ", ".join(network.name for network in facts.networks) or "none"
        why = f"there is no RDMA device, and the cards behind the interfaces{of} are not visible ({names})"
    return Fabric(kind=kind, why=why)


def _of_cards(cards: Sequence[Card], soft: Sequence[tuple[Card, str]], gpus: int) -> Fabric:
    ib, ethernet = ([card for card in cards if card.port.link_layer == layer] for layer in (INFINIBAND, ETHERNET))
    # Of equals InfiniBand is the fabric: it is built for nothing else, and Ethernet is everywhere.
    if not ethernet or (ib and len(ib) >= len(ethernet) and _slowest(ib) >= _fastest(ethernet)):
        kind, of_layer, others = IB, ib, ethernet
    elif not ib or (len(ethernet) > len(ib) and _slowest(ethernet) > _fastest(ib)):
        kind, of_layer, others = ROCE, ethernet, ib
    else:
        why = f"both InfiniBand ({_ports(ib)}) and Ethernet ({_ports(ethernet)}) carry data, and neither has clearly "
        return Fabric(kind=None, why=f"{why}more ports and faster ones")
    try:
        reasons = _foreign(of_layer, gpus)
    except _UnclearError as unclear:
        return Fabric(kind=kind, why=_ports(of_layer), cards=tuple(of_layer), unclear=str(unclear))
    kept = tuple(card for card in of_layer if card.name not in reasons)
    outside = [*soft, *((card, f"it is {card.port.link_layer}, and the fabric is {kind}") for card in others)]
    outside += [(card, reasons[card.name]) for card in of_layer if card.name in reasons]
    return Fabric(kind=kind, why=_ports(kept), cards=kept, outside=tuple(outside))


def _slowest(cards: Sequence[Card]) -> float:
    return min(card.rate for card in cards)


def _fastest(cards: Sequence[Card]) -> float:
    """An unknown rate may be any."""
    return max(math.inf if card.port.rate_gbps is None else card.rate for card in cards)


class _UnclearError(Exception):
    """Which ports belong to the fabric is unknown, for this reason."""


def _foreign(cards: Sequence[Card], gpus: int) -> dict[str, str]:
    """Return the ports of one link layer that do not belong to the fabric, with the reason.

    Args:
        gpus: of the node; 0 where they are unknown.

    Raises:
        _UnclearError: the facts are ambiguous.
    """
    reasons: dict[str, str] = {}
    for rule in (_by_rate, _by_distance) if len(cards) > 1 else ():
        reasons |= rule([card for card in cards if card.name not in reasons], gpus)
    return reasons


def _by_rate(cards: Sequence[Card], gpus: int) -> dict[str, str]:
    """Slower ports on another kind of card have another purpose; on the same kind they are a fault of the fabric."""
    unknown = [card.name for card in cards if card.port.rate_gbps is None]
    if unknown:
        raise _UnclearError(f"the rate of {', '.join(unknown)} is unknown")
    top = _fastest(cards)
    fast = [card for card in cards if card.rate == top]
    boards = {card.board for card in fast}
    other = [card for card in cards if card not in fast and card.board and not {"", card.board} & boards]
    if other and len(fast) <= len(other) and not 0 < gpus <= len(fast):
        raise _UnclearError(
            f"{_ports(fast)} and {_ports(other)} are of different cards, and it is unknown which are for storage"
        )
    reason = f"and is of another kind than the {len(fast)} of {top:g} Gb/s"
    return {card.name: f"it has {_rate(card)} {reason}" for card in other}


def _by_distance(cards: Sequence[Card], gpus: int) -> dict[str, str]:
    """Where the GPUs have cards behind their own PCIe switches, cards elsewhere have another purpose."""
    near = [card for card in cards if card.distance in _OVER_SWITCHES]
    far = [card for card in cards if card.distance and card.distance not in _OVER_SWITCHES]
    if not gpus or not near or not far or len(near) + len(far) != len(cards):
        return {}
    if len(near) < gpus and (not _fits(len(near), gpus) or _fits(len(cards), gpus)):
        return {}
    others = f"and {len(near)} others are ({near[0].distance})"
    return {card.name: f"it is close to no GPU ({card.distance}), {others}" for card in far}


def _fits(ports: int, gpus: int) -> bool:
    """Whether each GPU has the same number of ports, or each port the same number of GPUs."""
    return ports % gpus == 0 or gpus % ports == 0


def _ports(cards: Sequence[Card]) -> str:
    """Return "8 active ports of 400 Gb/s: mlx5_0:1, ..." ."""
    rates = " and ".join(dict.fromkeys(_rate(card) for card in cards))
    number = "1 active port" if len(cards) == 1 else f"{len(cards)} active ports"
    return f"{number} of {rates} ({', '.join(card.name for card in cards)})"


def _rate(card: Card) -> str:
    return "an unknown rate" if card.port.rate_gbps is None else f"{card.rate:g} Gb/s"
