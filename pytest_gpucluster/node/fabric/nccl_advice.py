"""Advice about NCCL's variables on a node: from its facts to what to set, to remove and to do, as text and JSON. Pure.

- cards: ``NCCL_IB_HCA``, which cards
- sockets: ``NCCL_SOCKET_IFNAME`` and the threads of TCP, which interfaces and how many connections
- clouds: what a provider's image brings. The values in a provider's script are its own and are not repeated here: the
  script is named, for the operator to source.

Text for people is never wider than requested. In lines for a shell, values are quoted, so that a name with special
characters stays one word; everything else there is in comments of one printable line each.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pytest_gpucluster.metrics.finding import Finding, Identity
from pytest_gpucluster.node.fabric.nccl_environment import ENVIRONMENT, Setting
from pytest_gpucluster.node.fabric.nccl_facts import (
    EFA,
    IB,
    ROCE,
    SEVERAL_NODES,
    TCP,
    Fabric,
    FabricKind,
    Facts,
    Network,
    Provider,
    find_fabric,
)
from pytest_gpucluster.node.fabric.nccl_rules import GUIDE, GUIDE_URL, RULES, judge_environment
from pytest_gpucluster.node.fabric.ports import selects
from pytest_gpucluster.node.infiniband import ROCE_V2
from pytest_gpucluster.node.info_text import fact
from pytest_gpucluster.node.interfaces import matches, nccl_default_interfaces
from pytest_gpucluster.text import paragraph, printable


@dataclass(frozen=True, kw_only=True)
class Advice:
    """Advice about one variable on this node.

    Attributes:
        kind: "set" it; "remove" it, for it hurts here; "look" at it, for it helps in one place and hurts in another.
        name: of the variable.
        why: the reason.
        source: of the reason.
        setting: the variable where it is set.
        value: the value to set; of the others the value that is set.
        remedy: what to do, where it hurts.
        is_met: what is set has the effect of ``value``.
    """

    kind: Literal["set", "remove", "look"]
    name: str
    why: str
    source: str
    setting: Setting | None = None
    value: str = ""
    remedy: str = ""
    is_met: bool = False

    @property
    def now(self) -> str | None:
        """The value that is set; None where it is not set."""
        return None if self.setting is None else self.setting.value

    @property
    def origin(self) -> str:
        """Where it is set: "environment" or a file; "" where it is not set."""
        return "" if self.setting is None else self.setting.origin

    @property
    def also(self) -> tuple[str, ...]:
        """Files that set it, too, where the environment does."""
        return () if self.setting is None or self.origin != ENVIRONMENT else self.setting.instead_of

    @property
    def state(self) -> str:
        """Whether the advised value is set, in a few words."""
        if self.now is None:
            return "not set"
        effect = "the same" if self.now == self.value else f"{self.now}, which has the same effect"
        return f"set: {effect}" if self.is_met else f"set otherwise: {self.now} ({self.origin})"

    def to_json(self) -> dict[str, Any]:
        """Return plain types: all attributes but ``kind`` and ``setting``, and ``now``, ``origin`` and ``also``."""
        names = ("name", "value", "why", "source", "now", "origin", "remedy", "is_met")
        return {**{name: getattr(self, name) for name in names}, "also": list(self.also)}


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
        set, remove, look: by the kind of advice.
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

    def notes(self, host: str) -> Iterator[Finding]:
        """Yield a note for each variable that should be set and is not, or is set otherwise."""
        for advice in self.set:
            if not advice.is_met:
                yield Finding(
                    code=f"advice.{advice.name.lower()}",
                    kind="note",
                    gpu=Identity(host=host),
                    found=f"{advice.name} is {advice.state}: {advice.why}",
                    allowed=f"{advice.name}={advice.value} is advised",
                    remedy=f"set it, or keep what works; source: {advice.source}",
                )

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
            "fabric": {
                "kind": fabric.kind,
                "why": fabric.why,
                "ports": [card.name for card in fabric.cards],
                "outside": {card.name: why for card, why in fabric.outside},
                "unclear": fabric.unclear,
            },
            "set": [advice.to_json() for advice in self.set],
            "remove": [advice.to_json() for advice in self.remove],
            "look": [advice.to_json() for advice in self.look],
            "steps": [vars(step) for step in self.steps],
            "unknown": list(self.unknown),
        }


def advise(facts: Facts) -> NcclAdvice:
    """Return the advice for a node. Where its fabric is unknown, none is given about it."""
    fabric = find_fabric(facts)
    items: list[Item] = []
    if fabric.kind is None:
        items.append(f"the network that carries the data: {fabric.why}")
    if facts.gpus_unknown:
        items.append(f"the GPUs: {facts.gpus_unknown}")
    for rule in (_cards, _interfaces, _connections, _steps):
        items += rule(facts, fabric)
    wanted = [item for item in items if isinstance(item, Advice)]
    present = list(_advice_on_present(facts, {advice.name for advice in wanted if advice.is_met}))
    return NcclAdvice(
        fabric=fabric,
        set=tuple(wanted),
        remove=tuple(advice for advice in present if advice.kind == "remove"),
        look=tuple(advice for advice in present if advice.kind == "look"),
        steps=tuple(item for item in items if isinstance(item, Step)),
        unknown=tuple(item for item in items if isinstance(item, str)),
    )


def _advice_on_present(facts: Facts, met: set[str]) -> Iterator[Advice]:
    """Judge what is set, by the same rules as the criterion ``nccl.environment``."""
    for setting in facts.settings:
        found = judge_environment(setting, facts)
        if found is None or setting.name in met or setting.name in facts.required_by_plugin:
            continue
        rule = RULES.get(setting.name)
        yield Advice(
            kind="look" if found.kind == "note" else "remove",
            name=setting.name,
            value=setting.value,
            why=rule.does if rule else found.found.partition("): ")[2],
            remedy=found.remedy,
            source=rule.source if rule else GUIDE,
            setting=setting,
        )


def _advice_to_set(facts: Facts, name: str, value: str, why: str, has_effect: Callable[[str], bool]) -> Advice:
    """Return the advice to set a variable. ``has_effect``: whether a value that is set has the wanted effect."""
    setting = facts.setting(name)
    is_met = setting is not None and has_effect(setting.value)
    return Advice(kind="set", name=name, value=value, why=why, source=GUIDE_URL, setting=setting, is_met=is_met)


# ---- cards

HCA = "NCCL_IB_HCA"
_NAMEABLE = re.compile(r"[!-+\--9;-~]+")
"""Printable ASCII without a blank, comma or colon: these three separate the lists of NCCL."""


def nameable(name: str) -> bool:
    """Return whether a device or interface can be written into a list of NCCL's.

    >>> [nameable(name) for name in ("mlx5_0", "$(id)", "eth0:1", "a,b", "a b", "^eth0", "=eth0", "", "\\xe9th0")]
    [True, True, False, False, False, False, False, False, False]
    """
    return bool(_NAMEABLE.fullmatch(name)) and name[0] not in "^="


def _cards(facts: Facts, fabric: Fabric) -> Iterator[Item]:
    if fabric.kind not in (IB, ROCE):
        return
    unnameable = [card.name for card in fabric.cards if not nameable(card.port.device)]
    if fabric.unclear:
        yield f"{HCA}: {fabric.unclear}. Name the ports of the fabric yourself (`nvidia-smi topo -m`, `ibv_devices`)"
    elif fabric.outside and unnameable:
        yield f"{HCA}: {', '.join(unnameable)} cannot be written into a list of NCCL's. Rename it (`rdma dev set`)"
    elif fabric.outside:
        names = [card.name for card in fabric.cards]
        active = [card for card in facts.cards if card.port.is_active]
        outside = "; ".join(f"{card.name}: {why}" for card, why in fabric.outside)
        yield _advice_to_set(
            facts,
            HCA,
            "=" + ",".join(names),
            f"NCCL would use every active port, also {outside}",
            lambda value: {card.name for card in active if selects(value, card.port)} == set(names),
        )


# ---- sockets

IFNAME = "NCCL_SOCKET_IFNAME"
_FAST_MBPS, _FAST_VALUE = 100_000, "4"
"""From this speed on the guide recommends 4 threads, and 4 sockets a thread. Source: NCCL user guide, Environment
Variables, NCCL_SOCKET_NTHREADS and NCCL_NSOCKS_PERTHREAD, "generic 100G networks"."""
_GVNIC, _ENA = "gve", "ena"
"""Drivers of Google's and Amazon's own network cards, for which NCCL has defaults of its own."""


def _interfaces(facts: Facts, fabric: Fabric) -> Iterator[Item]:
    names = [interface.name for interface in nccl_default_interfaces([network.interface for network in facts.networks])]
    # The interfaces that NCCL uses by itself: the first for its own connections, all of them for TCP.
    default = [network for network in facts.networks if network.name in names]
    # The default route goes over the interface that reaches other hosts, also where that is a bridge.
    real = [one for one in facts.networks if one.is_default or (one.is_real and not one.is_link_local)]
    if fabric.kind is None or len(default) == 1 or _has_google_plugin(facts, fabric):
        return
    if not default:
        yield f"{IFNAME}: no interface is up and has an address"
    elif not real:
        listed = ", ".join(network.name for network in default)
        yield f"{IFNAME}: which of {listed} reaches the other nodes is unknown. Name it yourself"
    elif fabric.kind == TCP:
        yield from _interfaces_for_data(facts, default, real)
    else:
        yield from _interface_for_bootstrap(facts, fabric, default[0], real)


def _interface_for_bootstrap(facts: Facts, fabric: Fabric, first: Network, real: Sequence[Network]) -> Iterator[Item]:
    """NCCL's own connections go over its first interface: any that reaches all nodes is good."""
    rails = {card.interface for card in fabric.cards if card.interface}
    elsewhere = [network for network in real if network.name not in rails]
    if first in real and (first.name not in rails or not elsewhere):
        return
    default = [one for one in elsewhere if one.is_default] or (elsewhere if len(elsewhere) == 1 else [])
    if first.name in rails:
        why_not = f"is a port of the fabric ({fabric.kind})"
    elif first.is_real:
        why_not = f"leads to its own link only ({first.interface.addresses[0]})"
    else:
        why_not = "is a bridge or a tunnel of this host"
    if len(default) != 1:
        listed = ", ".join(network.name for network in elsewhere) or "none"
        yield f"{IFNAME}: NCCL would use {first.name}, which {why_not}; none of the others ({listed}) is obvious"
    else:
        why = f"NCCL would use {first.name}, which {why_not}, and {default[0].name} reaches other hosts"
        yield _advice_on_interfaces(facts, default, why, only_first=True)


def _interfaces_for_data(facts: Facts, default: Sequence[Network], real: Sequence[Network]) -> Iterator[Item]:
    """Over TCP all data go over all of NCCL's interfaces: the slowest must not be among them."""
    unknown = [network.name for network in real if network.speed_mbps is None]
    top = max(network.speed_mbps or 0 for network in real)
    fastest = [network for network in real if (network.speed_mbps or 0) == top]
    if len(real) > 1 and unknown:
        speed = f"the speed of {', '.join(unknown)} is unknown"
        yield f"{IFNAME}: {speed}. Name the interfaces of the fast network yourself"
    elif {network.name for network in fastest} != {network.name for network in default}:
        wrong = ", ".join(f"{one.name} ({_speed(one)})" for one in default if one not in fastest) or "others"
        best = ", ".join(f"{network.name} ({_speed(network)})" for network in fastest)
        why = f"TCP carries all data, and NCCL would also send over {wrong}; the network is {best}"
        yield _advice_on_interfaces(facts, fastest, why)


def _advice_on_interfaces(facts: Facts, chosen: Sequence[Network], why: str, *, only_first: bool = False) -> Item:
    names = [network.name for network in chosen]
    unnameable = [name for name in names if not nameable(name)]
    if unnameable:
        return f"{IFNAME}: {', '.join(unnameable)} cannot be written into a list of NCCL's. Rename it (`ip link set`)"

    def has_effect(value: str) -> bool:
        # NCCL ignores a value of one character.
        found = [network.name for network in facts.networks if len(value) > 1 and matches(network.name, value)]
        return set(found[:1] if only_first else found) == set(names)

    why = f"{why}. Nodes with other interface names need a value of their own"
    return _advice_to_set(facts, IFNAME, "=" + ",".join(names), why, has_effect)


def _connections(facts: Facts, fabric: Fabric) -> Iterator[Item]:
    fast = [one for one in facts.networks if one.is_real and (one.speed_mbps or 0) >= _FAST_MBPS]
    if fabric.kind != TCP or not fast or any(network.driver in (_GVNIC, _ENA) for network in facts.networks):
        return
    why = f"TCP carries all data, and {fast[0].name} has {_speed(fast[0])}: one connection does not fill it"
    for name in ("NCCL_SOCKET_NTHREADS", "NCCL_NSOCKS_PERTHREAD"):
        yield _advice_to_set(facts, name, _FAST_VALUE, why, lambda value: value.strip() == _FAST_VALUE)


def _speed(network: Network) -> str:
    if network.speed_mbps is not None:
        return f"{network.speed_mbps / 1000:g} Gb/s"
    return "of unknown speed" if network.is_real else "no card"


# ---- what to do besides

GOOGLE_SCRIPT = "/usr/local/gib/scripts/set_nccl_env.sh"
_GOOGLE = "https://cloud.google.com/kubernetes-engine/docs/how-to/gpu-bandwidth-gpudirect-tcpx"

_CLOUDS: Mapping[tuple[Provider | None, FabricKind | None], Step] = {
    ("AWS", EFA): Step(
        what="have libfabric and aws-ofi-nccl in the image, and unset FI_PROVIDER, FI_EFA_USE_DEVICE_RDMA, NCCL_PROTO "
        "and NCCL_BUFFSIZE, which older instructions set",
        why="without this plugin NCCL uses TCP",
        source="https://github.com/aws-samples/awsome-distributed-training/blob/main/1.architectures/efa-cheatsheet.md",
    ),
    ("Azure", IB): Step(
        what="have NCCL_TOPO_FILE name the file for this kind of machine, of the image's /opt/microsoft "
        "(ndv5-topo.xml for H100 and H200), also in a container",
        why="the virtual machine hides which GPU is close to which card",
        source="https://github.com/Azure/azhpc-images/tree/master/topology",
    ),
    ("Google Cloud", ROCE): Step(
        what=f"mount Google's plugin gIB, and source {GOOGLE_SCRIPT} in the job before torchrun",
        why="it sets what the plugin needs",
        source=_GOOGLE,
    ),
    ("Google Cloud", TCP): Step(
        what="set up GPUDirect-TCPXO (A3 Mega), and source its nccl-env-profile.sh in the job before torchrun with "
        "NCCL_LIB_DIR set; on A3 High set up GPUDirect-TCPX",
        why="without the plugin NCCL does not use this network as intended",
        source=_GOOGLE,
    ),
}
"""Provider and fabric -> what the job needs from the provider's image."""


def _has_google_plugin(facts: Facts, fabric: Fabric) -> bool:
    """Whether Google's plugin carries the data: machines with several cards have one for each GPU, or for two.

    Source: Google Cloud, "GPU machine types", A3 series.
    """
    cards = sum(network.driver == _GVNIC for network in facts.networks)
    return facts.provider == "Google Cloud" and fabric.kind == TCP and cards > 1


def _steps(facts: Facts, fabric: Fabric) -> Iterator[Step]:
    """Yield what the fabric lacks besides variables."""
    cloud = _CLOUDS.get((facts.provider, fabric.kind))
    is_met = fabric.kind == IB and facts.setting("NCCL_TOPO_FILE") is not None
    if cloud is not None and not is_met and (fabric.kind != TCP or _has_google_plugin(facts, fabric)):
        yield cloud
    without = [card.name for card in fabric.cards if not any(gid.kind == ROCE_V2 for gid in card.port.gids)]
    if fabric.kind == ROCE and without:
        yield Step(
            what="give each RoCE port an IP address, so that it has an address of RoCE v2",
            why=f"{', '.join(without)} have none (`show_gids`)",
            source=GUIDE_URL,
        )
    if fabric.kind in (IB, ROCE, EFA) and facts.gpus and not facts.peer_memory.is_reachable:
        module = "Amazon's module efa_nv_peermem" if fabric.kind == EFA else "nvidia_peermem"
        yield Step(
            what=f"load {module}, or use the driver's open kernel modules on Linux 5.12 or newer",
            why=f"network cards cannot access GPU memory: {facts.peer_memory}",
            source="https://github.com/amzn/amzn-drivers/issues/282"
            if fabric.kind == EFA
            else "https://docs.nvidia.com/datacenter/cloud-native/gpu-operator/latest/gpu-operator-rdma.html",
        )
    if fabric.kind in (IB, ROCE, EFA) and not facts.verbs:
        where = f"the container ({facts.container})" if facts.container else "this process"
        yield Step(
            what="give the container the node's RDMA devices (in Kubernetes the resource of the device plugin)",
            why=f"the kernel shows the ports, and {where} has no /dev/infiniband/uverbs*: NCCL would use TCP",
            source="Linux kernel, Documentation/infiniband/user_verbs.rst",
        )


# ---- as text


def render_advice(facts: Facts, advice: NcclAdvice, *, width: int) -> str:
    """Return the facts of the node and all advice, for people."""
    return "\n".join([*_node_lines(facts, advice.fabric, width), *_advice_lines(advice, width)]) + "\n"


def _node_lines(facts: Facts, fabric: Fabric, width: int) -> Iterator[str]:
    names = " and ".join(dict.fromkeys(gpu.name for gpu in facts.gpus))
    links = "NVSwitches between them" if facts.nvls else "NVLink between them" if facts.nvlink else "no known NVLink"
    hidden = len(facts.gpus_of_node) - len(facts.gpus)
    visible = f"{len(facts.gpus)} {names}, {links}" if facts.gpus else facts.gpus_unknown or "none"
    others = f"; {hidden} more on the PCI bus, not visible to this process" if hidden else ""
    within = f" in a job of {facts.scheduler}" if facts.scheduler else ""
    yield from paragraph(f"NCCL's variables on {facts.host}", width)
    for name, text in (
        ("fabric", f"{fabric.kind or 'unknown'}: {fabric.why}"),
        *(("", f"without {card.name}: {why}") for card, why in fabric.outside),
        ("GPUs", f"{visible}{others}"),
        ("GPUDirect", str(facts.peer_memory)),
        ("NCCL", facts.nccl or "version unknown"),
        ("machine", facts.provider or "no known cloud"),
        ("container", facts.container or "none detected"),
        ("launcher", f"{facts.launcher or 'none: a shell'}{within}"),
        ("nodes", f"{facts.nnodes or f'unknown; the advice is for {SEVERAL_NODES} and more'}"),
    ):
        yield from fact(name, text, width)


def _advice_lines(advice: NcclAdvice, width: int) -> Iterator[str]:
    also = {one.name: f"also {', '.join(one.also)}" if one.also else "" for one in advice.remove}
    sections: dict[str, list[Sequence[str]]] = {
        "To set (a job takes it from the environment: see --format)": [
            (f"{one.name}={one.value}", one.state, one.why, one.source) for one in advice.set
        ],
        "Set, and harmful here (remove these)": [
            (f"{one.name}={one.value} ({one.origin})", also[one.name], one.why, f"what to do: {one.remedy}", one.source)
            for one in advice.remove
        ],
        "Set, and good in some places only (know why, or remove these)": [
            (f"{one.name}={one.value} ({one.origin})", one.why, one.source) for one in advice.look
        ],
        "To do besides": [(f"{step.what}: {step.why}", step.source) for step in advice.steps],
        "Unknown (nothing is advised about these)": [(text,) for text in advice.unknown],
    }
    for title, entries in sections.items():
        if entries:
            yield ""
            yield from paragraph(title, width)
        for first, *details in entries:
            yield from paragraph(first, width, first="  ", rest="    ")
            for detail in filter(None, details):
                yield from paragraph(detail, width, first="    ", rest="    ")
    if not advice.set and not advice.remove and advice.fabric.kind is not None and not advice.unknown:
        yield ""
        yield "Nothing is to be set or removed; all other variables are best left unset."


def shell_lines(facts: Facts, advice: NcclAdvice) -> str:
    """Return lines for ``eval`` or ``source``: exports and unsets, with the reasons as comments."""
    return "".join(f"{line}\n" for line in _shell_lines(facts, advice))


def _shell_lines(facts: Facts, advice: NcclAdvice) -> Iterator[str]:
    fabric, wanted = advice.fabric, {one.name for one in advice.set}
    yield _comment(f"gpucluster node nccl-env on {facts.host}; {fabric.kind or 'unknown fabric'}: {fabric.why}")
    if not advice.set and not advice.remove:
        yield _comment("nothing is to be set" if fabric.kind else "the fabric is unknown, so nothing is advised")
    for one in advice.remove:
        yield _comment(f"{one.name}={one.value}: {one.why}")
        if one.origin != ENVIRONMENT:
            yield _comment(f"remove it from {one.origin}: unset does not undo it")
        elif one.name not in wanted:
            yield f"unset {one.name}"
        for other in one.also:
            yield _comment(f"and remove it where it is {other}")
    for new in advice.set:
        quoted = shlex.quote(new.value)
        # Always quoted: zsh takes ``=eth0`` for the path of a program.
        word = quoted if quoted.startswith("'") else f"'{quoted}'"
        yield _comment(f"{new.name}: {new.why} ({new.source})")
        yield f"export {new.name}={word}"
    for step in advice.steps:
        yield _comment(f"to do: {step.what}; {step.why} ({step.source})")
    for text in advice.unknown:
        yield _comment(f"unknown: {text}")


def _comment(text: str) -> str:
    return f"# {printable(text)}"
