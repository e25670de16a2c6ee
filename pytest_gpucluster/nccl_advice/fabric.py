"""Which network carries a node's data, and which of its cards belong to it. Pure.

NCCL itself takes every port that is active, InfiniBand and Ethernet alike: also that of a card for storage. Source:
NCCL, src/transport/net_ib.cc, ncclIbInitDevices. Which ports belong to the fabric is this suite's own judgement; where
the facts allow two answers it is left open, and nothing is advised.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pytest_gpucluster.infiniband import ETHERNET, INFINIBAND
from pytest_gpucluster.nccl_advice.facts import BESIDE, Card, Facts

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
