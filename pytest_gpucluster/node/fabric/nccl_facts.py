"""The data of the advice about NCCL: the facts of one node, the fabric found from them, and the advice itself. Pure.

The facts are as the kernel, NVML and the launcher report them. The fabric is the network that carries a node's data,
with the cards that belong to it; the advice is next to what is set.

NCCL itself takes every port that is active, InfiniBand and Ethernet alike: also that of a card for storage. Source:
NCCL, src/transport/net_ib.cc, ncclIbInitDevices. Which ports belong to the fabric is this suite's own judgement; where
the facts allow two answers it is left open, and nothing is advised.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pytest_gpucluster.metrics.finding import Finding, Identity
from pytest_gpucluster.node.fabric.nccl_environment import Setting
from pytest_gpucluster.node.infiniband import ETHERNET, INFINIBAND, Adapters, Gid, Port
from pytest_gpucluster.node.interfaces import Interface
from pytest_gpucluster.node.pci import PeerMemory

Provider = Literal["AWS", "Azure", "Google Cloud"]

BESIDE = ("PIX", "PXB")
"""Ways between a card and a GPU over PCIe switches only, in the words of ``nvidia-smi topo -m``. Up to the latter NCCL
uses GPUDirect RDMA by itself. Source: NCCL user guide, Environment Variables, NCCL_NET_GDR_LEVEL."""
WAYS = ("PIX", "PXB", "PHB", "NODE", "SYS")
"""All of them, the nearest first."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU. ``name`` is NVML's, ``pci`` its address in any writing."""

    name: str
    pci: str


@dataclass(frozen=True, kw_only=True)
class Card:
    """An active or inactive port of an RDMA device, with what is known of the device.

    Attributes:
        port: state, rate and addresses.
        board: the maker's id of the card, "" where it is not told.
        driver: such as mlx5_core or efa; "" where it is not told.
        pci: None for RDMA in software, which has no card.
        interface: the network interface of a RoCE port, "" where there is none.
        near: the way to the nearest GPU, one of ``WAYS``; "" where it is not known.
        is_default: its interface carries the default route.
    """

    port: Port
    board: str = ""
    driver: str = ""
    pci: str | None = None
    interface: str = ""
    near: str = ""
    is_default: bool = False

    @property
    def name(self) -> str:
        """Device and port as ``NCCL_IB_HCA`` has them, such as ``mlx5_0:1``."""
        return f"{self.port.device}:{self.port.number}"

    @property
    def gids(self) -> Sequence[Gid]:
        """The addresses of the port."""
        return self.port.gids


@dataclass(frozen=True, kw_only=True)
class Network:
    """A network interface that is up and has an address.

    Attributes:
        interface: name and addresses.
        is_real: it is a card, or a bond or VLAN of cards; not a bridge, a tunnel or one end of a pair.
        driver: such as ena or gve; "" for none.
        speed_mbps: None where the driver does not tell, as in most virtual machines.
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
    def stays_on_link(self) -> bool:
        """Tell whether its addresses are good for its own link only, as of the one to a server's BMC over USB."""
        return all(ipaddress.ip_address(address).is_link_local for address in self.interface.addresses)


@dataclass(frozen=True, kw_only=True)
class Facts:
    """One node.

    Attributes:
        host: its name.
        launcher: what has started this process, such as torchrun; "" for a shell.
        launcher_unknown: what is wrong with the launcher's variables; "" if nothing is.
        scheduler: slurm, kubernetes or None.
        nnodes: of this launch or job; None outside of one.
        container: the kind of container around this process; None for none that is known.
        provider: whose virtual machine this is; None for none of those known here.
        machine: the type of machine, as its firmware calls it.
        gpus: those seen; ``gpus_unknown`` is why they are not known, "" where they are.
        gpus_of_node: PCI addresses of all GPUs of the node, also of those that a job or container was not given.
        nvlink, nvls: the GPUs of a node reach each other over NVLink, and through a switch that can sum up.
        adapters: the RDMA devices; ``cards``: their ports, one by one.
        on_the_bus: addresses of PCI devices that can do RDMA, for a node that shows no RDMA device.
        verbs: device files of RDMA that this process sees, such as uverbs0.
        peer_memory: the way of network cards to GPU memory.
        networks: interfaces that are up and have an address, but the loopback, in the kernel's order.
        interfaces: names of all interfaces, also of those that are down.
        nccl: its version; None where it is not known.
        settings: variables that are set, and where.
        environ: the environment, for variables that are not NCCL's.
        files: what was looked for -> the paths at which it was found.
    """

    host: str
    launcher: str = ""
    launcher_unknown: str = ""
    scheduler: str | None = None
    nnodes: int | None = None
    container: str | None = None
    provider: Provider | None = None
    machine: str = ""
    gpus: tuple[Gpu, ...] = ()
    gpus_unknown: str = ""
    gpus_of_node: tuple[str, ...] = ()
    nvlink: bool = False
    nvls: bool = False
    adapters: Adapters = field(default_factory=Adapters)
    cards: tuple[Card, ...] = ()
    on_the_bus: tuple[str, ...] = ()
    verbs: tuple[str, ...] = ()
    peer_memory: PeerMemory
    networks: tuple[Network, ...] = ()
    interfaces: tuple[str, ...] = ()
    nccl: str | None = None
    settings: tuple[Setting, ...] = ()
    environ: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def setting(self, name: str) -> Setting | None:
        """Return a variable of NCCL's that is set."""
        return next((one for one in self.settings if one.name == name), None)

    @property
    def nccl_number(self) -> tuple[int, int] | None:
        """Major and minor version of NCCL; None where it is not known.

        >>> from pytest_gpucluster.node.pci import PeerMemory
        >>> none = PeerMemory(module="", why_no_dma_buf="no driver")
        >>> [Facts(host="a", peer_memory=none, nccl=nccl).nccl_number for nccl in ("2.27.5", None, "?")]
        [(2, 27), None, None]
        """
        parts = (self.nccl or "").split(".")
        if len(parts) < 2 or not all(part.isascii() and part.isdecimal() for part in parts[:2]):
            return None
        return int(parts[0]), int(parts[1])


Kind = Literal["InfiniBand", "RoCE", "EFA", "Ethernet"]
IB: Kind = "InfiniBand"
ROCE: Kind = "RoCE"
EFA: Kind = "EFA"
TCP: Kind = "Ethernet"
KINDS: Mapping[Kind, str] = {
    IB: "InfiniBand verbs",
    ROCE: "InfiniBand verbs over Ethernet",
    EFA: "AWS Elastic Fabric Adapter, which needs a plugin",
    TCP: "TCP, without RDMA",
}
"""Kind of a fabric -> what carries the data."""

EFA_DRIVER = "efa"
_LAYERS: Mapping[str, Kind] = {INFINIBAND: IB, ETHERNET: ROCE}


@dataclass(frozen=True, kw_only=True)
class Fabric:
    """What was found.

    Attributes:
        kind: None where it is not known.
        why: what tells so, or why it is not known.
        cards: the ports that carry data.
        outside: active ports that do not, each with the reason.
        unclear: why it cannot be told which ports are which; then ``outside`` is empty. "" where it can.
        slow: ports that belong to the fabric and are slower than others of the same card.
    """

    kind: Kind | None
    why: str
    cards: tuple[Card, ...] = ()
    outside: tuple[tuple[Card, str], ...] = ()
    unclear: str = ""
    slow: tuple[Card, ...] = ()


def find(facts: Facts) -> Fabric:
    """Tell which fabric a node has."""
    active = [card for card in facts.cards if card.port.is_active]
    efa = [card for card in active if card.driver == EFA_DRIVER]
    if efa:
        return Fabric(kind=EFA, why=f"{_ports(efa)} of the driver efa", cards=tuple(efa))
    carrying = [card for card in active if card.port.link_layer in _LAYERS]
    cards = [card for card in carrying if card.pci is not None]
    soft = [(card, "it is RDMA in software, with no card behind it") for card in carrying if card.pci is None]
    if cards:
        return _of_cards(cards, soft, len(facts.gpus_of_node) or None)
    if facts.cards:
        listed = ", ".join(f"{card.name} {card.port.state or 'state unknown'}" for card in facts.cards)
        return Fabric(kind=None, why=f"there are RDMA devices, and no card of them carries data: {listed}")
    return _without_rdma(facts)


def _without_rdma(facts: Facts) -> Fabric:
    if facts.on_the_bus:
        where = f"in this container ({facts.container})" if facts.container else "here"
        listed = ", ".join(facts.on_the_bus)
        return Fabric(
            kind=None, why=f"cards for RDMA are on the PCI bus ({listed}), and no RDMA device is shown {where}"
        )
    real = [one for one in facts.networks if one.is_real]
    if real:
        listed = ", ".join(one.name for one in real)
        return Fabric(kind=TCP, why=f"no RDMA device, and the network interfaces {listed}")
    there = ", ".join(one.name for one in facts.networks) or "none"
    of = f" of this container ({facts.container})" if facts.container else ""
    return Fabric(
        kind=None,
        why=f"no RDMA device is shown, and what lies behind the interfaces{of} cannot be seen ({there})",
    )


def _of_cards(cards: Sequence[Card], soft: Sequence[tuple[Card, str]], gpus: int | None) -> Fabric:
    layers = {layer: [card for card in cards if card.port.link_layer == layer] for layer in _LAYERS}
    present = {layer: some for layer, some in layers.items() if some}
    outside = list(soft)
    if len(present) == 1:
        [layer] = present
    else:
        chosen = _greater(present)
        if chosen is None:
            return Fabric(
                kind=None,
                why=f"both InfiniBand ({_ports(layers[INFINIBAND])}) and Ethernet ({_ports(layers[ETHERNET])}) carry "
                "data, and neither has clearly more ports and faster ones",
            )
        layer = chosen
        other = next(one for one in present if one != layer)
        outside += [(card, f"it is {other}, and the fabric is {layer}") for card in present[other]]
    kind, of_layer = _LAYERS[layer], present[layer]
    unclear, reasons, slow = _foreign(of_layer, gpus)
    if unclear:
        return Fabric(kind=kind, why=_ports(of_layer), cards=tuple(of_layer), unclear=unclear)
    kept = tuple(card for card in of_layer if card.name not in reasons)
    outside += [(card, reasons[card.name]) for card in of_layer if card.name in reasons]
    return Fabric(kind=kind, why=_ports(kept), cards=kept, outside=tuple(outside), slow=tuple(slow))


def _greater(present: Mapping[str, Sequence[Card]]) -> str | None:
    """Return the link layer with at least as many ports, none of which is slower than the fastest of the other."""
    for layer, other in ((INFINIBAND, ETHERNET), (ETHERNET, INFINIBAND)):
        ours, theirs = present[layer], present[other]
        rates = [card.port.rate_gbps for card in (*ours, *theirs)]
        if None in rates:
            return None
        slowest = min(card.port.rate_gbps or 0.0 for card in ours)
        fastest = max(card.port.rate_gbps or 0.0 for card in theirs)
        # Of equals InfiniBand is the fabric: nobody builds it for anything else, and Ethernet is everywhere.
        enough = len(ours) >= len(theirs) if layer == INFINIBAND else len(ours) > len(theirs)
        if enough and (slowest >= fastest if layer == INFINIBAND else slowest > fastest):
            return layer
    return None


def _foreign(cards: Sequence[Card], gpus: int | None) -> tuple[str, dict[str, str], list[Card]]:
    """Tell which ports of one link layer are no part of the fabric.

    Returns: why that is not clear, or ""; port -> the reason; ports that are slow and belong to it.
    """
    if len(cards) == 1:
        return "", {}, []
    reasons: dict[str, str] = {}
    unclear, slow = _by_rate(cards, gpus, reasons)
    if unclear:
        return unclear, {}, []
    rest = [card for card in cards if card.name not in reasons]
    unclear = _by_place(rest, gpus, reasons)
    if unclear:
        return unclear, {}, []
    rest = [card for card in rest if card.name not in reasons]
    unclear = _by_route(rest, gpus, reasons)
    # What is no part of the fabric may be slow.
    return unclear, {} if unclear else reasons, [card for card in slow if unclear or card.name not in reasons]


def _by_rate(cards: Sequence[Card], gpus: int | None, reasons: dict[str, str]) -> tuple[str, list[Card]]:
    """Slower ports on another kind of card are for something else; on the same kind they are a fault of the fabric."""
    rates = {card.name: card.port.rate_gbps for card in cards}
    if None in rates.values():
        return f"the rate of {', '.join(name for name, rate in rates.items() if rate is None)} is not known", []
    top = max(rate for rate in rates.values() if rate is not None)
    fast = [card for card in cards if rates[card.name] == top]
    slower = [card for card in cards if rates[card.name] != top]
    boards = {card.board for card in fast}
    other = [card for card in slower if card.board and "" not in boards and card.board not in boards]
    if other and len(fast) <= len(other) and not (gpus and len(fast) >= gpus):
        return (
            f"{_ports(fast)} and {_ports(other)} are of different cards, and it cannot be told which are for storage",
            [],
        )
    for card in other:
        reasons[card.name] = f"it has {_rate(card)} and is another card than the {len(fast)} of {top:g} Gb/s"
    return "", [card for card in slower if card.name not in reasons]


def _by_place(cards: Sequence[Card], gpus: int | None, reasons: dict[str, str]) -> str:
    """Where the GPUs have cards behind their own PCIe switches, cards elsewhere are for something else."""
    beside = [card for card in cards if card.near in BESIDE]
    far = [card for card in cards if card.near and card.near not in BESIDE]
    if not gpus or not beside or not far or len(beside) + len(far) != len(cards):
        return ""
    if len(beside) >= gpus or (_fits(len(beside), gpus) and not _fits(len(cards), gpus)):
        for card in far:
            reasons[card.name] = f"it is beside no GPU ({card.near}), and {len(beside)} others are ({beside[0].near})"
    return ""


def _by_route(cards: Sequence[Card], gpus: int | None, reasons: dict[str, str]) -> str:
    """A RoCE port with the default route is the way to the rest of the world, unless it makes the number of rails."""
    default = [card for card in cards if card.is_default]
    others = len(cards) - len(default)
    if not default or not others:
        return ""
    if not gpus:
        return f"{_ports(default)} has the default route, and without knowing the GPUs it may be one of the rails"
    if _fits(len(cards), gpus):
        return ""
    if not _fits(others, gpus):
        return f"{len(cards)} ports for {gpus} GPUs are no number of rails, and neither are {others} of them"
    for card in default:
        reasons[card.name] = (
            f"its interface {card.interface} has the default route, and {others} other ports are the rails"
        )
    return ""


def _fits(ports: int, gpus: int) -> bool:
    """Tell whether so many ports are the same number for every GPU, or so many GPUs for every port."""
    return ports % gpus == 0 or gpus % ports == 0


def _ports(cards: Sequence[Card]) -> str:
    """Return "8 active ports of 400 Gb/s: mlx5_0:1, ..." ."""
    rates = " and ".join(dict.fromkeys(_rate(card) for card in cards))
    number = "1 active port" if len(cards) == 1 else f"{len(cards)} active ports"
    return f"{number} of {rates} ({', '.join(card.name for card in cards)})"


def _rate(card: Card) -> str:
    return "an unknown rate" if card.port.rate_gbps is None else f"{card.port.rate_gbps:g} Gb/s"


GUIDE_URL = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html"
"""NCCL user guide, Environment Variables."""
TROUBLESHOOTING = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html"


@dataclass(frozen=True, kw_only=True)
class Set:
    """A variable that this node needs.

    Attributes:
        name, value: of the variable.
        why: what was seen that asks for it.
        source: what says that this is the variable for it.
        now: its value at present, None where it is not set; ``origin``: where that is from.
        is_met: what is set has the same effect.
    """

    name: str
    value: str
    why: str
    source: str
    now: str | None = None
    origin: str = ""
    is_met: bool = False

    @property
    def state(self) -> str:
        """How it stands, in a few words."""
        if self.now is None:
            return "not set"
        is_same = "the same" if self.now == self.value else f"{self.now}, which has the same effect"
        return f"set: {is_same}" if self.is_met else f"set otherwise: {self.now} ({self.origin})"


@dataclass(frozen=True, kw_only=True)
class Remove:
    """A variable that is set and hurts here. ``origin``: "environment" or a file; ``also``: files that set it, too."""

    name: str
    value: str
    origin: str
    why: str
    remedy: str
    source: str
    also: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Look:
    """A variable that is set, and helps in one place and hurts in another."""

    name: str
    value: str
    origin: str
    why: str
    source: str


@dataclass(frozen=True, kw_only=True)
class Leave:
    """A variable that is best left alone here. ``now``: its value where it is set all the same."""

    name: str
    why: str
    source: str
    now: str | None = None


@dataclass(frozen=True, kw_only=True)
class Step:
    """Something to do that is no variable."""

    what: str
    why: str
    source: str


@dataclass(frozen=True, kw_only=True)
class Advised:
    """All that there is to say of a node.

    Attributes:
        fabric: what was found of it; where its kind is None, nothing about it is advised.
        set, remove, look, leave, steps: see the types.
        unknown: what could not be told, and what to do about it.
    """

    fabric: Fabric
    set: tuple[Set, ...] = ()
    remove: tuple[Remove, ...] = ()
    look: tuple[Look, ...] = ()
    leave: tuple[Leave, ...] = ()
    steps: tuple[Step, ...] = ()
    unknown: tuple[str, ...] = ()

    @property
    def differs(self) -> bool:
        """Tell whether anything should be set or removed that is not."""
        return bool(self.remove) or any(not one.is_met for one in self.set)

    def notes(self, host: str) -> Iterator[Finding]:
        """Yield a note for each variable that should be set and is not, or is set otherwise."""
        for one in self.set:
            if not one.is_met:
                yield Finding(
                    code=f"advice.{one.name.lower()}",
                    kind="note",
                    gpu=Identity(host=host),
                    found=f"{one.name} is {one.state}: {one.why}",
                    allowed=f"{one.name}={one.value} is advised",
                    remedy=f"set it, or keep what works; source: {one.source}",
                )

    def properties(self) -> dict[str, str]:
        """Return what goes on record beside a criterion's values."""
        kind = self.fabric.kind or "unknown"
        told = {"advice.fabric": f"{kind}: {self.fabric.why}"}
        told |= {f"advice.{one.name}": f"{one.value}; {one.state}; {one.why}" for one in self.set}
        told |= {f"advice.step.{number}": f"{one.what}: {one.why}" for number, one in enumerate(self.steps, start=1)}
        return told | {f"advice.unknown.{number}": text for number, text in enumerate(self.unknown, start=1)}

    def to_json(self) -> dict[str, Any]:
        """Return plain types: ``fabric``, and a list for each of the other attributes."""
        fabric = self.fabric
        return {
            "fabric": {
                "kind": fabric.kind,
                "why": fabric.why,
                "ports": [card.name for card in fabric.cards],
                "outside": {card.name: why for card, why in fabric.outside},
                "slow": [card.name for card in fabric.slow],
                "unclear": fabric.unclear,
            },
            "set": [
                {
                    "name": one.name,
                    "value": one.value,
                    "why": one.why,
                    "source": one.source,
                    "now": one.now,
                    "origin": one.origin,
                    "is_met": one.is_met,
                }
                for one in self.set
            ],
            "remove": [vars(one) | {"also": list(one.also)} for one in self.remove],
            "look": [vars(one) for one in self.look],
            "leave": [vars(one) for one in self.leave],
            "steps": [vars(one) for one in self.steps],
            "unknown": list(self.unknown),
        }
