"""The fabric of a node by its facts, and advice about NCCL's variables: what to set, to remove and to do. Pure.

The fabric is the network that carries a node's data, with the cards that belong to it. NCCL itself uses every active
port, InfiniBand and Ethernet alike: also that of a card for storage. Source: NCCL, src/transport/net_ib.cc,
ncclIbInitDevices. Which ports belong to the fabric is this suite's own judgement; where the facts are ambiguous it is
left open, and nothing is advised.

- cards: ``NCCL_IB_HCA``, which cards
- sockets: ``NCCL_SOCKET_IFNAME`` and the threads of TCP, which interfaces and how many connections
- clouds: what a provider's image brings. The values in a provider's script are its own and are not repeated here: the
  script is named, for the operator to source.

Text for people is never wider than requested. In lines for a shell, values are quoted, so that a name with special
characters stays one word; everything else there is in comments of one printable line each.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from pytest_gpucluster.metrics.finding import Finding, note
from pytest_gpucluster.node.fabric.nccl_environment import ENVIRONMENT
from pytest_gpucluster.node.fabric.nccl_facts import SEVERAL_NODES, Card, Facts, Provider
from pytest_gpucluster.node.fabric.nccl_rules import GUIDE, GUIDE_URL, RULES, judge_environment
from pytest_gpucluster.node.infiniband import ETHERNET, INFINIBAND
from pytest_gpucluster.node.info_text import fact
from pytest_gpucluster.node.interfaces import Network, matches, nccl_default_interfaces
from pytest_gpucluster.text import paragraph, printable

FabricKind = Literal["InfiniBand", "RoCE", "EFA", "Ethernet"]
"""What carries the data: InfiniBand verbs, the same over Ethernet, AWS' Elastic Fabric Adapter, or TCP."""
IB: FabricKind = "InfiniBand"
ROCE: FabricKind = "RoCE"
EFA: FabricKind = "EFA"
TCP: FabricKind = "Ethernet"
_OVER_SWITCHES = ("PIX", "PXB")
"""Over PCIe switches only: NCCL uses GPUDirect RDMA by itself. Source: NCCL user guide, Environment Variables,
NCCL_NET_GDR_LEVEL."""


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
    carrying = [card for card in active if card.port.link_layer in (INFINIBAND, ETHERNET)]
    cards = [card for card in carrying if card.pci is not None]
    real = [network.name for network in facts.networks if network.is_real]
    where = f"this container ({facts.container})" if facts.container else "this node"
    if efa:
        return Fabric(kind=EFA, why=f"{_ports(efa)} of the driver efa", cards=tuple(efa))
    if cards:
        soft = [(card, "it is RDMA in software, with no card behind it") for card in carrying if card.pci is None]
        return _of_cards(cards, soft, len(facts.gpus_of_node))
    if facts.cards:
        listed = ", ".join(f"{card.name} {card.port.state or 'state unknown'}" for card in facts.cards)
        why = f"there are RDMA devices, and no card of them carries data: {listed}"
    elif facts.rdma_on_bus:
        why = f"cards for RDMA are on the PCI bus ({', '.join(facts.rdma_on_bus)}), and {where} has no RDMA device"
    elif real:
        return Fabric(kind=TCP, why=f"no RDMA device, and the network interfaces {', '.join(real)}")
    else:
        names = ", ".join(network.name for network in facts.networks) or "none"
        why = f"there is no RDMA device, and {where} does not show the cards behind its interfaces ({names})"
    return Fabric(kind=None, why=why)


def _of_cards(cards: Sequence[Card], soft: Sequence[tuple[Card, str]], gpus: int) -> Fabric:
    """Find the fabric of active ports. ``gpus``: of the node; 0 where they are unknown."""
    ib, ethernet = ([card for card in cards if card.port.link_layer == layer] for layer in (INFINIBAND, ETHERNET))
    # Of equals InfiniBand is the fabric: it is built for nothing else, and Ethernet is everywhere.
    if not ethernet or (ib and len(ib) >= len(ethernet) and _slowest(ib) >= _fastest(ethernet)):
        kind, kept, others = IB, ib, ethernet
    elif not ib or (len(ethernet) > len(ib) and _slowest(ethernet) > _fastest(ib)):
        kind, kept, others = ROCE, ethernet, ib
    else:
        why = f"both InfiniBand ({_ports(ib)}) and Ethernet ({_ports(ethernet)}) carry data, and neither has clearly "
        return Fabric(kind=None, why=f"{why}more ports and faster ones")
    outside = [*soft, *((card, f"it is {card.port.link_layer}, and the fabric is {kind}") for card in others)]
    for rule in (_slow_cards, _far_cards) if len(kept) > 1 else ():
        found, why = rule(kept, gpus)
        if not found and why:
            of_layer = ib if kind == IB else ethernet
            return Fabric(kind=kind, why=_ports(of_layer), cards=tuple(of_layer), unclear=why)
        outside += [(card, why.format(rate=_rate(card), distance=card.distance)) for card in found]
        kept = [card for card in kept if card not in found]
    return Fabric(kind=kind, why=_ports(kept), cards=tuple(kept), outside=tuple(outside))


def _slow_cards(cards: Sequence[Card], gpus: int) -> tuple[list[Card], str]:
    """Return slower ports on another kind of card, which have another purpose, with the reason; none, and why it is
    unclear. Slower ports on the same kind are a fault of the fabric."""
    unknown = [card.name for card in cards if card.port.rate_gbps is None]
    if unknown:
        return [], f"the rate of {', '.join(unknown)} is unknown"
    fast = [card for card in cards if card.port.rate_gbps == _fastest(cards)]
    boards = {card.board for card in fast}
    other = [card for card in cards if card not in fast and card.board and not {"", card.board} & boards]
    if other and len(fast) <= len(other) and not 0 < gpus <= len(fast):
        return [], f"{_ports(fast)} and {_ports(other)} are of different cards: which are for storage is unknown"
    return other, f"it has {{rate}} and is of another kind than the {len(fast)} of {_rate(fast[0])}" if other else ""


def _far_cards(cards: Sequence[Card], gpus: int) -> tuple[list[Card], str]:
    """Return ports that are close to no GPU, with the reason, where the GPUs have others behind their own switches."""
    near = [card for card in cards if card.distance in _OVER_SWITCHES]
    far = [card for card in cards if card.distance and card.distance not in _OVER_SWITCHES]
    if not gpus or not near or not far or len(near) + len(far) != len(cards):
        return [], ""

    def fits(ports: int) -> bool:
        """Whether each GPU has the same number of ports, or each port the same number of GPUs."""
        return ports % gpus == 0 or gpus % ports == 0

    if len(near) < gpus and (not fits(len(near)) or fits(len(cards))):
        return [], ""
    return far, f"it is close to no GPU ({{distance}}), and {len(near)} others are ({near[0].distance})"


def _slowest(cards: Sequence[Card]) -> float:
    return min(card.port.rate_gbps or 0.0 for card in cards)


def _fastest(cards: Sequence[Card]) -> float:
    """An unknown rate may be any."""
    return max(math.inf if card.port.rate_gbps is None else card.port.rate_gbps for card in cards)


def _ports(cards: Sequence[Card]) -> str:
    """Return "8 active ports of 400 Gb/s (mlx5_0:1, ...)"."""
    rates = " and ".join(dict.fromkeys(map(_rate, cards)))
    number = "1 active port" if len(cards) == 1 else f"{len(cards)} active ports"
    return f"{number} of {rates} ({', '.join(card.name for card in cards)})"


def _rate(card: Card) -> str:
    return "an unknown rate" if card.port.rate_gbps is None else f"{card.port.rate_gbps:g} Gb/s"


# ---- advice


@dataclass(frozen=True, kw_only=True)
class Advice:
    """Advice about one variable on this node: to set it, or about what is set.

    Attributes:
        name: of the variable.
        value: the value to set; else the value that is set.
        why: the reason.
        source: of the reason.
        now: the value that is set; None where it is not set.
        origin: where it is set: "environment" or a file; "" where it is not set.
        also: files that set it, too, where the environment does.
        remedy: what to do, where it hurts.
        is_met: what is set has the effect of ``value``.
    """

    name: str
    value: str
    why: str
    source: str = GUIDE_URL
    now: str | None = None
    origin: str = ""
    also: tuple[str, ...] = ()
    remedy: str = ""
    is_met: bool = False

    @property
    def state(self) -> str:
        """Whether the advised value is set, in a few words."""
        if self.now is None:
            return "not set"
        effect = "the same" if self.now == self.value else f"{self.now}, which has the same effect"
        return f"set: {effect}" if self.is_met else f"set otherwise: {self.now} ({self.origin})"


@dataclass(frozen=True, kw_only=True)
class Step:
    """Something to do that is not a variable."""

    what: str
    why: str
    source: str


Item = Advice | Step | str
"""A text is about what is unknown."""


@dataclass(frozen=True, kw_only=True)
class NcclAdvice:
    """All advice for a node.

    Attributes:
        fabric: of the node; where its kind is None, nothing about it is advised.
        set: variables that the node needs.
        remove: variables that are set and hurt here.
        look: variables that are set and help in one place and hurt in another.
        steps: to do besides.
        unknown: what is unknown, and what to do about it.
    """

    fabric: Fabric
    set: tuple[Advice, ...] = ()
    remove: tuple[Advice, ...] = ()
    look: tuple[Advice, ...] = ()
    steps: tuple[Step, ...] = ()
    unknown: tuple[str, ...] = ()

    @property
    def differs(self) -> bool:
        """Whether a variable has to be set or removed."""
        return bool(self.remove) or any(not advice.is_met for advice in self.set)

    def notes(self, host: str) -> list[Finding]:
        """Return a note for each variable that should be set and is not, or is set otherwise."""
        return [
            note(
                f"advice.{one.name.lower()}",
                host,
                f"{one.name} is {one.state}: {one.why}",
                allowed=f"{one.name}={one.value} is advised",
                remedy=f"set it, or keep what works; source: {one.source}",
            )
            for one in self.set
            if not one.is_met
        ]

    def properties(self) -> dict[str, str]:
        """Return the properties to record with a criterion."""
        found = {"advice.fabric": f"{self.fabric.kind or 'unknown'}: {self.fabric.why}"}
        found |= {f"advice.{one.name}": f"{one.value}; {one.state}; {one.why}" for one in self.set}
        found |= {f"advice.step.{number}": f"{one.what}: {one.why}" for number, one in enumerate(self.steps, start=1)}
        return found | {f"advice.unknown.{number}": text for number, text in enumerate(self.unknown, start=1)}

    def to_json(self) -> dict[str, Any]:
        """Return plain types: ``fabric``, and a list for each of the other attributes."""
        fabric = self.fabric
        return {
            **asdict(self),
            "fabric": {
                "kind": fabric.kind,
                "why": fabric.why,
                "ports": [card.name for card in fabric.cards],
                "outside": {card.name: why for card, why in fabric.outside},
                "unclear": fabric.unclear,
            },
        }


def advise(facts: Facts) -> NcclAdvice:
    """Return the advice for a node. Where its fabric is unknown, none is given about it."""
    fabric = find_fabric(facts)
    items: list[Item] = []
    if fabric.kind is None:
        items.append(f"the network that carries the data: {fabric.why}")
    if facts.visible.why_not:
        items.append(f"the GPUs: {facts.visible.why_not}")
    for rule in (_advise_cards, _advise_interfaces, _advise_connections, _advise_steps):
        items += rule(facts, fabric)
    wanted = [item for item in items if isinstance(item, Advice)]
    met = {advice.name for advice in wanted if advice.is_met} | facts.required_by_plugin
    present: dict[str, list[Advice]] = {"note": [], "environment": []}
    for setting in facts.settings:
        # The same rules as the criterion ``nccl.environment``.
        found = judge_environment(setting, facts)
        if found is not None and setting.name not in met:
            rule_of, found_text = RULES.get(setting.name), found.found.partition("): ")[2]
            present[found.kind].append(
                Advice(
                    name=setting.name,
                    value=setting.value,
                    why=rule_of.does if rule_of else found_text,
                    source=rule_of.source if rule_of else GUIDE,
                    now=setting.value,
                    origin=setting.origin,
                    also=setting.instead_of if setting.origin == ENVIRONMENT else (),
                    remedy=found.remedy,
                )
            )
    return NcclAdvice(
        fabric=fabric,
        set=tuple(wanted),
        remove=tuple(present["environment"]),
        look=tuple(present["note"]),
        steps=tuple(item for item in items if isinstance(item, Step)),
        unknown=tuple(item for item in items if isinstance(item, str)),
    )


def _advice_to_set(facts: Facts, name: str, value: str, why: str, has_effect: Callable[[str], bool]) -> Advice:
    """Return the advice to set a variable. ``has_effect``: whether a value that is set has the wanted effect."""
    setting = facts.setting(name)
    if setting is None:
        return Advice(name=name, value=value, why=why)
    is_met = has_effect(setting.value)
    return Advice(name=name, value=value, why=why, now=setting.value, origin=setting.origin, is_met=is_met)


_LISTABLE = re.compile(r"(?![=^])[!-+\--9;-~]+(:\d+)?")
"""Printable ASCII without a blank, comma or colon, which separate the lists of NCCL, and a port."""


def _advice_to_list(
    facts: Facts, name: str, listed: Sequence[str], why: str, has_effect: Callable[[str], bool]
) -> Item:
    unlistable = [one for one in listed if not _LISTABLE.fullmatch(one)]
    if unlistable:
        rename = "Rename it (`rdma dev set`, `ip link set`)"
        return f"{name}: {', '.join(unlistable)} cannot be written into a list of NCCL's. {rename}"
    return _advice_to_set(facts, name, "=" + ",".join(listed), why, has_effect)


HCA, IFNAME = "NCCL_IB_HCA", "NCCL_SOCKET_IFNAME"


def _advise_cards(facts: Facts, fabric: Fabric) -> Iterator[Item]:
    if fabric.kind in (IB, ROCE) and fabric.unclear:
        yield f"{HCA}: {fabric.unclear}. Name the ports of the fabric yourself (`nvidia-smi topo -m`, `ibv_devices`)"
    elif fabric.kind in (IB, ROCE) and fabric.outside:
        names = [card.name for card in fabric.cards]
        active = [card for card in facts.cards if card.port.is_active]
        outside = "; ".join(f"{card.name}: {why}" for card, why in fabric.outside)
        yield _advice_to_list(
            facts,
            HCA,
            names,
            f"NCCL would use every active port, also {outside}",
            lambda value: (
                {card.name for card in active if matches(card.port.device, value, card.port.number)} == set(names)
            ),
        )


_FAST_MBPS, _FAST_VALUE = 100_000, "4"
"""From this speed on the guide recommends 4 threads, and 4 sockets a thread. Source: NCCL user guide, Environment
Variables, NCCL_SOCKET_NTHREADS and NCCL_NSOCKS_PERTHREAD, "generic 100G networks"."""
_GVNIC, _ENA = "gve", "ena"
"""Drivers of Google's and Amazon's own network cards, for which NCCL has defaults of its own."""


def _advise_interfaces(facts: Facts, fabric: Fabric) -> Iterator[Item]:
    names = [interface.name for interface in nccl_default_interfaces(facts.networks)]
    # The interfaces that NCCL uses by itself: the first for its own connections, all of them for TCP.
    default = [network for network in facts.networks if network.name in names]
    # The default route goes over the interface that reaches other hosts, also where that is a bridge.
    real = [one for one in facts.networks if one.is_default or (one.is_real and not one.is_link_local)]
    if fabric.kind is None or len(default) == 1 or _has_google_plugin(facts, fabric):
        return
    if not default:
        yield f"{IFNAME}: no interface is up and has an address"
        return
    if not real:
        listed = ", ".join(network.name for network in default)
        yield f"{IFNAME}: which of {listed} reaches the other nodes is unknown. Name it yourself"
        return
    choose = _interfaces_for_data if fabric.kind == TCP else _interface_for_bootstrap
    chosen, why = choose(fabric, default, real)
    wanted = [network.name for network in chosen]
    if not chosen and why:
        yield f"{IFNAME}: {why}. Name the right ones yourself"
    elif chosen:

        def has_effect(value: str) -> bool:
            # NCCL ignores a value of one character.
            found = [network.name for network in facts.networks if len(value) > 1 and matches(network.name, value)]
            return set(found if fabric.kind == TCP else found[:1]) == set(wanted)

        why = f"{why}. Nodes with other interface names need a value of their own"
        yield _advice_to_list(facts, IFNAME, wanted, why, has_effect)


def _interface_for_bootstrap(
    fabric: Fabric, default: Sequence[Network], real: Sequence[Network]
) -> tuple[list[Network], str]:
    """NCCL's own connections go over its first interface: any that reaches all nodes is good."""
    first, rails = default[0], {card.interface for card in fabric.cards if card.interface}
    elsewhere = [network for network in real if network.name not in rails]
    if first in real and (first.name not in rails or not elsewhere):
        return [], ""
    chosen = [one for one in elsewhere if one.is_default] or (elsewhere if len(elsewhere) == 1 else [])
    if first.name in rails:
        why = f"is a port of the fabric ({fabric.kind})"
    elif first.is_real:
        why = f"leads to its own link only ({first.addresses[0]})"
    else:
        why = "is a bridge or a tunnel of this host"
    why = f"NCCL would use {first.name}, which {why}"
    if len(chosen) == 1:
        return chosen, f"{why}, and {chosen[0].name} reaches other hosts"
    listed = ", ".join(network.name for network in elsewhere) or "none"
    return [], f"{why}; none of the others ({listed}) is obvious"


def _interfaces_for_data(
    fabric: Fabric, default: Sequence[Network], real: Sequence[Network]
) -> tuple[list[Network], str]:
    """Over TCP all data go over all of NCCL's interfaces: the slowest must not be among them."""
    unknown = [network.name for network in real if network.speed_mbps is None]
    if len(real) > 1 and unknown:
        return [], f"the speed of {', '.join(unknown)} is unknown"
    top = max(network.speed_mbps or 0 for network in real)
    fastest = [network for network in real if (network.speed_mbps or 0) == top]
    if {network.name for network in fastest} == {network.name for network in default}:
        return [], ""
    wrong = ", ".join(f"{one.name} ({_speed(one)})" for one in default if one not in fastest) or "others"
    best = ", ".join(f"{network.name} ({_speed(network)})" for network in fastest)
    return fastest, f"TCP carries all data, and NCCL would also send over {wrong}; the network is {best}"


def _advise_connections(facts: Facts, fabric: Fabric) -> Iterator[Item]:
    fast = [one for one in facts.networks if one.is_real and (one.speed_mbps or 0) >= _FAST_MBPS]
    if fabric.kind == TCP and fast and all(network.driver not in (_GVNIC, _ENA) for network in facts.networks):
        why = f"TCP carries all data, and {fast[0].name} has {_speed(fast[0])}: one connection does not fill it"
        for name in ("NCCL_SOCKET_NTHREADS", "NCCL_NSOCKS_PERTHREAD"):
            yield _advice_to_set(facts, name, _FAST_VALUE, why, lambda value: value.strip() == _FAST_VALUE)


def _speed(network: Network) -> str:
    if network.speed_mbps is not None:
        return f"{network.speed_mbps / 1000:g} Gb/s"
    return "of unknown speed" if network.is_real else "no card"


GOOGLE_SCRIPT = "/usr/local/gib/scripts/set_nccl_env.sh"
_CLOUDS: Mapping[tuple[Provider | None, FabricKind | None], str] = {
    ("AWS", EFA): "libfabric and the plugin aws-ofi-nccl in the image, without which NCCL uses TCP",
    ("Azure", IB): "NCCL_TOPO_FILE with the file of this kind of machine, in /opt/microsoft, also in a container",
    ("Google Cloud", ROCE): f"Google's plugin gIB, and {GOOGLE_SCRIPT} sourced in the job before torchrun",
    ("Google Cloud", TCP): "GPUDirect-TCPXO (A3 Mega) or -TCPX, and nccl-env-profile.sh sourced before torchrun",
}
"""Provider and fabric -> what the job needs from the provider's image."""


def _has_google_plugin(facts: Facts, fabric: Fabric) -> bool:
    """Whether Google's plugin carries the data: machines with several cards have one for each GPU, or for two.

    Source: Google Cloud, "GPU machine types", A3 series.
    """
    cards = sum(network.driver == _GVNIC for network in facts.networks)
    return facts.provider == "Google Cloud" and fabric.kind == TCP and cards > 1


def _advise_steps(facts: Facts, fabric: Fabric) -> Iterator[Step]:
    """Yield what the fabric lacks besides variables."""
    cloud = _CLOUDS.get((facts.provider, fabric.kind))
    is_met = fabric.kind == IB and facts.setting("NCCL_TOPO_FILE") is not None
    if cloud is not None and not is_met and (fabric.kind != TCP or _has_google_plugin(facts, fabric)):
        yield Step(what=f"have {cloud}", why=f"this machine is {facts.provider}'s", source="docs/network.md, Clouds")
    if fabric.kind in (IB, ROCE, EFA) and not facts.has_verbs:
        where = f"the container ({facts.container})" if facts.container else "this process"
        yield Step(
            what="give the container the node's RDMA devices (in Kubernetes the resource of the device plugin)",
            why=f"the kernel shows the ports, and {where} has no /dev/infiniband/uverbs*: NCCL would use TCP",
            source="Linux kernel, Documentation/infiniband/user_verbs.rst",
        )


# ---- as text


def render_advice(facts: Facts, advice: NcclAdvice, *, width: int) -> str:
    """Return the facts of the node and all advice, for people."""
    visible, fabric = facts.visible, advice.fabric
    names = " and ".join(dict.fromkeys(gpu.name for gpu in visible.gpus))
    links = "NVSwitches" if visible.nvls else "NVLink" if visible.nvlink else "no known NVLink"
    hidden = len(facts.gpus_of_node) - len(visible.gpus)
    gpus = f"{len(visible.gpus)} {names}, {links} between them" if visible.gpus else visible.why_not or "none"
    within = f" in a job of {facts.scheduler}" if facts.scheduler else ""
    lines = paragraph(f"NCCL's variables on {facts.host}", width)
    for name, text in (
        ("fabric", f"{fabric.kind or 'unknown'}: {fabric.why}"),
        *(("", f"without {card.name}: {why}") for card, why in fabric.outside),
        ("GPUs", gpus + (f"; {hidden} more on the PCI bus, not visible to this process" if hidden else "")),
        ("GPUDirect", str(facts.peer_memory)),
        ("NCCL", facts.nccl or "version unknown"),
        ("machine", facts.provider or "no known cloud"),
        ("container", facts.container or "none detected"),
        ("launcher", f"{facts.launcher or 'none: a shell'}{within}"),
        ("nodes", f"{facts.nnodes or f'unknown; the advice is for {SEVERAL_NODES} and more'}"),
    ):
        lines += fact(name, text, width)
    for title, entries in _sections(advice):
        lines += ["", *paragraph(title, width)]
        for command, comments in entries:
            first, *details = filter(None, (command, *comments))
            lines += paragraph(first, width, first="  ", rest="    ")
            for detail in details:
                lines += paragraph(detail, width, first="    ", rest="    ")
    return "".join(f"{line}\n" for line in lines)


def shell_lines(facts: Facts, advice: NcclAdvice) -> str:
    """Return lines for ``eval`` or ``source``: exports and unsets, with the reasons as comments."""
    kind, why = advice.fabric.kind or "unknown fabric", advice.fabric.why
    lines = [f"# gpucluster node nccl-env on {facts.host}; {kind}: {why}"]
    for title, entries in _sections(advice):
        lines.append(f"# {title}")
        for command, comments in entries:
            lines += [*(f"# {comment}" for comment in comments), command]
    return "".join(f"{printable(line)}\n" for line in lines if line)


def _sections(advice: NcclAdvice) -> Iterator[tuple[str, list[tuple[str, list[str]]]]]:
    """Yield the sections: a title, and for each entry the command for a shell, or "", and the comments."""
    wanted = {one.name for one in advice.set}
    remove = []
    for one in advice.remove:
        in_environment = one.origin == ENVIRONMENT
        comments = [f"{one.name}={one.value} ({one.origin}): {one.why}", f"what to do: {one.remedy} ({one.source})"]
        comments += [] if in_environment else [f"remove it from {one.origin}: unset does not undo it"]
        comments += [f"and remove it where it is {other}" for other in one.also]
        remove.append((f"unset {one.name}" if in_environment and one.name not in wanted else "", comments))
    # Always quoted: zsh takes ``=eth0`` for the path of a program.
    values = {one.name: shlex.quote(one.value) for one in advice.set}
    values = {name: value if value.startswith("'") else f"'{value}'" for name, value in values.items()}
    sections = {
        "Set, and harmful here": remove,
        "To set (a job takes it from the environment)": [
            (f"export {one.name}={values[one.name]}", [f"{one.name} is {one.state}: {one.why} ({one.source})"])
            for one in advice.set
        ],
        "Set, and good in some places only (know why, or remove these)": [
            ("", [f"{one.name}={one.value} ({one.origin}): {one.why} ({one.source})"]) for one in advice.look
        ],
        "To do besides": [("", [f"to do: {step.what}; {step.why} ({step.source})"]) for step in advice.steps],
        "Unknown (nothing is advised about these)": [("", [f"unknown: {text}"]) for text in advice.unknown],
    }
    yield from ((title, entries) for title, entries in sections.items() if entries)
    if not advice.set and not advice.remove and not advice.unknown:
        yield "Nothing is to be set or removed; all other variables are best left unset.", []
