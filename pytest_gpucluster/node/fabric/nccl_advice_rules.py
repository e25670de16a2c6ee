"""Rules of the advice about NCCL: cards, interfaces, and what the machines of a cloud need. Pure.

- cards: ``NCCL_IB_HCA`` and ``NCCL_IB_GID_INDEX``, which cards and which of their addresses
- sockets: ``NCCL_SOCKET_IFNAME`` and the threads of TCP, which interfaces and how many connections
- cloud: files and scripts of the provider, which change with its images. The values in a provider's script are its own
  and are not repeated here: the script is named, for the operator to source.

Each rule yields :class:`Advice`, a :class:`Step`, or a text about what is unknown.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pytest_gpucluster.node.fabric.nccl_environment import ENVIRONMENT, Setting
from pytest_gpucluster.node.fabric.nccl_facts import EFA, IB, ROCE, TCP, Fabric, Facts, Network
from pytest_gpucluster.node.fabric.nccl_rules import GUIDE_URL, number
from pytest_gpucluster.node.fabric.ports import roce_gid, selects
from pytest_gpucluster.node.infiniband import ROCE_V2
from pytest_gpucluster.node.interfaces import matches, nccl_default_interfaces

AdviceKind = Literal["set", "remove", "look", "leave"]
_JSON_FIELDS: Mapping[AdviceKind, Sequence[str]] = {
    "set": ("name", "value", "why", "source", "now", "origin", "is_met"),
    "remove": ("name", "value", "origin", "why", "remedy", "source", "also"),
    "look": ("name", "value", "origin", "why", "source"),
    "leave": ("name", "why", "source", "now"),
}


@dataclass(frozen=True, kw_only=True)
class Advice:
    """Advice about one variable on this node.

    Attributes:
        kind: "set" it; "remove" it, for it hurts here; "look" at it, for it helps in one place and hurts in another;
            "leave" it unset.
        name: of the variable.
        why: the reason.
        source: of the reason.
        setting: the variable where it is set.
        value: the value to set; of the others the value that is set.
        remedy: what to do, where it hurts.
        is_met: what is set has the effect of ``value``.
    """

    kind: AdviceKind
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
        """Return plain types: the fields of its kind."""
        fields = {name: getattr(self, name) for name in _JSON_FIELDS[self.kind]}
        return fields | ({"also": list(self.also)} if "also" in fields else {})


@dataclass(frozen=True, kw_only=True)
class Step:
    """Something to do that is not a variable."""

    what: str
    why: str
    source: str


Item = Advice | Step | str
"""A text is about what is unknown."""


def leave(facts: Facts, name: str, why: str, source: str = GUIDE_URL) -> Advice:
    """Return the advice to leave a variable unset."""
    return Advice(kind="leave", name=name, why=why, source=source, setting=facts.setting(name))


# ---- cards

HCA, GID = "NCCL_IB_HCA", "NCCL_IB_GID_INDEX"
_FINDS_GIDS = (2, 21)
"""NCCL finds the address of a RoCE port itself from this version on. Source: NCCL user guide, Environment Variables,
NCCL_IB_ADDR_FAMILY and NCCL_IB_ROCE_VERSION_NUM, "since 2.21"."""
_NAMEABLE = re.compile(r"[!-+\--9;-~]+")
"""Printable ASCII without a blank, comma or colon: these three separate the lists of NCCL."""


def nameable(name: str) -> bool:
    """Return whether a device or interface can be written into a list of NCCL's.

    >>> [nameable(name) for name in ("mlx5_0", "$(id)", "eth0:1", "a,b", "a b", "^eth0", "=eth0", "", "\\xe9th0")]
    [True, True, False, False, False, False, False, False, False]
    """
    return bool(_NAMEABLE.fullmatch(name)) and name[0] not in "^="


def advise_cards(facts: Facts, fabric: Fabric) -> Iterator[Item]:
    """Yield the advice about cards and their addresses."""
    if fabric.kind not in (IB, ROCE):
        return
    yield _cards(facts, fabric)
    if fabric.kind == ROCE:
        yield _addresses(facts, fabric)
    else:
        yield leave(facts, GID, "InfiniBand has no such table of addresses to choose from")


def _cards(facts: Facts, fabric: Fabric) -> Item:
    if fabric.unclear:
        return f"{HCA}: {fabric.unclear}. Name the ports of the fabric yourself (`nvidia-smi topo -m`, `ibv_devices`)"
    if not fabric.outside:
        why = f"NCCL uses all active ports by itself, and all {len(fabric.cards)} of them belong to the fabric"
        return leave(facts, HCA, why)
    unnameable = [card.name for card in fabric.cards if not nameable(card.port.device)]
    if unnameable:
        return f"{HCA}: {', '.join(unnameable)} cannot be written into a list of NCCL's. Rename it (`rdma dev set`)"
    setting = facts.setting(HCA)
    outside = "; ".join(f"{card.name}: {why}" for card, why in fabric.outside)
    wanted = {card.name for card in fabric.cards}
    active = [card for card in facts.cards if card.port.is_active]
    return Advice(
        kind="set",
        name=HCA,
        value="=" + ",".join(card.name for card in fabric.cards),
        why=f"NCCL would use every active port, also {outside}",
        source=GUIDE_URL,
        setting=setting,
        is_met=setting is not None and {card.name for card in active if selects(setting.value, card.port)} == wanted,
    )


def _addresses(facts: Facts, fabric: Fabric) -> Item:
    without = [card.name for card in fabric.cards if not any(gid.kind == ROCE_V2 for gid in card.gids)]
    if without:
        return Step(
            what="give each RoCE port an IP address, so that it has an address of RoCE v2",
            why=f"{', '.join(without)} have none (`show_gids`)",
            source=GUIDE_URL,
        )
    version = facts.nccl_number
    if version is None:
        return (
            f"{GID}: NCCL's version is unknown here. Before {'.'.join(map(str, _FINDS_GIDS))} it must be set to the "
            "address of RoCE v2 with IPv4 (`show_gids`), from then on leave it unset"
        )
    if version >= _FINDS_GIDS:
        return leave(facts, GID, f"NCCL {facts.nccl} finds the address of RoCE v2 itself")
    indexes = {gid.index for card in fabric.cards if (gid := roce_gid(card.port, None)) is not None}
    if len(indexes) != 1:
        listed = ", ".join(map(str, sorted(indexes)))
        return f"{GID}: the index of the RoCE v2 address differs between the ports ({listed}). Use NCCL 2.21 or newer"
    [index] = indexes
    setting = facts.setting(GID)
    return Advice(
        kind="set",
        name=GID,
        value=str(index),
        why=f"NCCL {facts.nccl} does not look for the address of RoCE v2, which is number {index} on every port",
        source=GUIDE_URL,
        setting=setting,
        is_met=setting is not None and number(setting.value) == index,
    )


# ---- sockets

IFNAME = "NCCL_SOCKET_IFNAME"
THREADS, SOCKETS = "NCCL_SOCKET_NTHREADS", "NCCL_NSOCKS_PERTHREAD"
_FAST_MBPS, _FAST_VALUE = 100_000, "4"
"""From this speed on the guide recommends 4 threads, and 4 sockets a thread. Source: NCCL user guide, Environment
Variables, NCCL_SOCKET_NTHREADS and NCCL_NSOCKS_PERTHREAD, "generic 100G networks"."""
_GVNIC, _ENA = "gve", "ena"
"""Drivers of Google's and Amazon's own network cards, for which NCCL has defaults of its own."""


def advise_sockets(facts: Facts, fabric: Fabric) -> Iterator[Item]:
    """Yield the advice about interfaces and TCP connections."""
    if fabric.kind is None:
        return
    if fabric.kind == TCP and _google_gpu_cards(facts):
        yield leave(facts, IFNAME, "Google's plugin has a value of its own for it")
        return
    yield _interfaces(facts, fabric)
    if fabric.kind == TCP:
        yield from _connections(facts)


def _interfaces(facts: Facts, fabric: Fabric) -> Item:
    names = [interface.name for interface in nccl_default_interfaces([network.interface for network in facts.networks])]
    # The interfaces that NCCL uses by itself: the first for its own connections, all of them for TCP.
    default = [network for network in facts.networks if network.name in names]
    if not default:
        return f"{IFNAME}: no interface is up and has an address"
    if len(default) == 1:
        return leave(facts, IFNAME, f"NCCL uses {default[0].name} by itself, and there is no other")
    # The default route goes over the interface that reaches other hosts, also where that is a bridge.
    real = [one for one in facts.networks if one.is_default or (one.is_real and not one.is_link_local)]
    if not real:
        listed = ", ".join(network.name for network in default)
        return f"{IFNAME}: which of {listed} reaches the other nodes is unknown. Name it yourself"
    if fabric.kind == TCP:
        return _for_data(facts, default, real)
    return _for_bootstrap(facts, fabric, default[0], real)


def _for_bootstrap(facts: Facts, fabric: Fabric, first: Network, real: Sequence[Network]) -> Item:
    """NCCL's own connections go over its first interface: any that reaches all nodes is good."""
    rails = {card.interface for card in fabric.cards if card.interface}
    elsewhere = [network for network in real if network.name not in rails]
    if first in real and (first.name not in rails or not elsewhere):
        what = "has the default route" if first.is_default else "is a network card"
        return leave(facts, IFNAME, f"NCCL uses {first.name} for its own connections by itself, which {what}")
    default = [one for one in elsewhere if one.is_default] or (elsewhere if len(elsewhere) == 1 else [])
    if first.name in rails:
        why_not = f"is a port of the fabric ({fabric.kind})"
    elif first.is_real:
        why_not = f"leads to its own link only ({first.interface.addresses[0]})"
    else:
        why_not = "is a bridge or a tunnel of this host"
    if len(default) != 1:
        listed = ", ".join(network.name for network in elsewhere) or "none"
        return (
            f"{IFNAME}: NCCL would use {first.name}, which {why_not}; of the others ({listed}) none is the obvious one"
        )
    why = f"NCCL would use {first.name}, which {why_not}, and {default[0].name} reaches other hosts"
    return _set_interfaces(facts, default, why, only_first=True)


def _for_data(facts: Facts, default: Sequence[Network], real: Sequence[Network]) -> Item:
    """Over TCP all data go over all of NCCL's interfaces: the slowest must not be among them."""
    if len(real) > 1 and any(network.speed_mbps is None for network in real):
        listed = ", ".join(network.name for network in real if network.speed_mbps is None)
        return f"{IFNAME}: the speed of {listed} is unknown. Name the interfaces of the fast network yourself"
    top = max((network.speed_mbps or 0 for network in real), default=0)
    fastest = [network for network in real if (network.speed_mbps or 0) == top]
    if {network.name for network in fastest} == {network.name for network in default}:
        return leave(facts, IFNAME, "NCCL uses all interfaces by itself, and they are equally fast")
    wrong = ", ".join(f"{one.name} ({_speed(one)})" for one in default if one not in fastest) or "others"
    best = ", ".join(f"{network.name} ({_speed(network)})" for network in fastest)
    why = f"TCP carries all data, and NCCL would also send over {wrong}; the network is {best}"
    return _set_interfaces(facts, fastest, why)


def _set_interfaces(facts: Facts, chosen: Sequence[Network], why: str, *, only_first: bool = False) -> Item:
    unnameable = [network.name for network in chosen if not nameable(network.name)]
    if unnameable:
        return f"{IFNAME}: {', '.join(unnameable)} cannot be written into a list of NCCL's. Rename it (`ip link set`)"
    setting = facts.setting(IFNAME)
    # NCCL ignores a value of one character.
    value = setting.value if setting is not None and len(setting.value) > 1 else ""
    by_setting = [network.name for network in facts.networks if value and matches(network.name, value)]
    return Advice(
        kind="set",
        name=IFNAME,
        value="=" + ",".join(network.name for network in chosen),
        why=f"{why}. Nodes with other interface names need a value of their own",
        source=GUIDE_URL,
        setting=setting,
        is_met=set(by_setting[:1] if only_first else by_setting) == {network.name for network in chosen},
    )


def _connections(facts: Facts) -> Iterator[Item]:
    cloud = [network.name for network in facts.networks if network.driver in (_GVNIC, _ENA)]
    cards = [network for network in facts.networks if network.is_real and network.speed_mbps is not None]
    fast = [network for network in cards if (network.speed_mbps or 0) >= _FAST_MBPS]
    for name in (THREADS, SOCKETS):
        if cloud:
            yield leave(facts, name, f"NCCL has defaults of its own for {', '.join(cloud)}")
        elif not fast:
            speed = f"the network has {_speed(cards[0])}" if cards else "the speed of the network is unknown"
            yield leave(facts, name, f"the guide recommends {_FAST_VALUE} from 100 Gb/s on, and {speed}")
        else:
            setting = facts.setting(name)
            yield Advice(
                kind="set",
                name=name,
                value=_FAST_VALUE,
                why=f"TCP carries all data, and {fast[0].name} has {_speed(fast[0])}: one connection does not fill it",
                source=GUIDE_URL,
                setting=setting,
                is_met=setting is not None and setting.value.strip() == _FAST_VALUE,
            )


def _speed(network: Network) -> str:
    if network.speed_mbps is not None:
        return f"{network.speed_mbps / 1000:g} Gb/s"
    return "of unknown speed" if network.is_real else "no card"


# ---- clouds

TOPOLOGY = "NCCL_TOPO_FILE"
_AZURE_TOPOLOGIES: Mapping[str, str] = {
    r"NVIDIA A100.*": "/opt/microsoft/ndv4-topo.xml",
    r"NVIDIA H100.*": "/opt/microsoft/ndv5-topo.xml",
    r"NVIDIA H200.*": "/opt/microsoft/ndv5-topo.xml",
}
"""Pattern of a GPU's name -> the description of the machine in Azure's images."""
_AZURE = "https://github.com/Azure/azhpc-images/tree/master/topology"

EFA_PLUGINS = ("libnccl-net.so", "libnccl-net-ofi.so", "libnccl-net-aws-ofi.so")
"""File names of the plugin. Source: https://github.com/aws/aws-ofi-nccl, INSTALL.md; the last two are of newer
installers."""
_AWS = "https://github.com/aws-samples/awsome-distributed-training/blob/main/1.architectures/efa-cheatsheet.md"
_AWS_PLUGIN = "https://github.com/aws/aws-ofi-nccl"
AWS_PEER_MEMORY = "https://github.com/amzn/amzn-drivers/issues/282"
_OBSOLETE_FOR_EFA = {
    "FI_PROVIDER": "aws-ofi-nccl finds efa itself; it was needed up to 1.5",
    "FI_EFA_USE_DEVICE_RDMA": "needed before libfabric 1.18 and aws-ofi-nccl 1.7 only; where there is no RDMA read it "
    "stops the job",
    "NCCL_PROTO": "aws-ofi-nccl chooses what EFA can do; it was needed up to 1.5",
    "NCCL_MIN_NCHANNELS": "more channels make messages smaller than EFA needs them",
    "NCCL_BUFFSIZE": "AWS recommends the default",
}
"""Variable of older instructions for EFA -> why to leave it unset now."""

GOOGLE_SCRIPTS: Mapping[str, str] = {
    ROCE: "/usr/local/gib/scripts/set_nccl_env.sh",
    TCP: "/var/lib/tcpxo/lib64/nccl-env-profile.sh",
}
"""Fabric of a Google machine -> the script that sets what its plugin needs: gIB (A3 Ultra, A4), GPUDirect-TCPXO (A3
Mega). In a container of GKE the latter is in /usr/local/nvidia/lib64."""
GOOGLE_IN_CONTAINER = "/usr/local/nvidia/lib64/nccl-env-profile.sh"
_MEGA_CARDS = 8
"""Cards for the GPUs of an A3 Mega. With fewer it is an A3 High: GPUDirect-TCPX, which has no such script."""
_GOOGLE_VARIABLES: Mapping[str, Sequence[str]] = {
    TCP: ("NCCL_ALGO", "NCCL_NVLS_ENABLE", "NCCL_PROTO"),
    ROCE: ("NCCL_CROSS_NIC", "NCCL_NET_GDR_LEVEL", "NCCL_IB_TC", "NCCL_IB_QPS_PER_CONNECTION"),
}
"""Fabric of a Google machine -> variables for which its plugin has values of its own."""
_GOOGLE = "https://cloud.google.com/kubernetes-engine/docs/how-to/gpu-bandwidth-gpudirect-tcpx"

TOPOLOGY_FILE, EFA_PLUGIN, SCRIPT = "topology", "EFA plugin", "Google's script"
"""Keys of ``Facts.files``."""


def advise_cloud(facts: Facts, fabric: Fabric) -> Iterator[Item]:
    """Yield the advice about a provider's machine."""
    if fabric.kind == EFA:
        yield from _aws(facts)
    elif facts.provider == "Azure" and fabric.kind == IB:
        yield from _azure(facts)
    elif facts.provider == "Google Cloud" and fabric.kind in (ROCE, TCP):
        yield from _google(facts, fabric)


def azure_topology(facts: Facts) -> str | None:
    """Return the path of Azure's description of this kind of machine; None for an unknown kind."""
    names = {gpu.name for gpu in facts.gpus}
    paths = {path for name in names for pattern, path in _AZURE_TOPOLOGIES.items() if re.fullmatch(pattern, name)}
    return paths.pop() if len(paths) == 1 else None


def _aws(facts: Facts) -> Iterator[Item]:
    if not facts.files.get(EFA_PLUGIN):
        yield Step(
            what="install aws-ofi-nccl, and add it to LD_LIBRARY_PATH",
            why="no plugin for EFA was found in its usual folders, nor in LD_LIBRARY_PATH: NCCL would use TCP",
            source=_AWS_PLUGIN,
        )
    for name, why in _OBSOLETE_FOR_EFA.items():
        setting = facts.setting(name)
        if setting is None and name in facts.environ:
            setting = Setting(name=name, value=facts.environ[name], origin=ENVIRONMENT)
        yield Advice(kind="leave", name=name, why=why, source=_AWS, setting=setting)


def _azure(facts: Facts) -> Iterator[Item]:
    path = azure_topology(facts)
    if path is None:
        listed = ", ".join(dict.fromkeys(gpu.name for gpu in facts.gpus)) or facts.gpus_unknown or "no GPU is visible"
        yield f"{TOPOLOGY}: it is unknown which of Azure's descriptions belongs to this machine ({listed})"
        return
    setting = facts.setting(TOPOLOGY)
    why = "the virtual machine hides which GPU is close to which card"
    if facts.files.get(TOPOLOGY_FILE):
        yield Advice(
            kind="set",
            name=TOPOLOGY,
            value=path,
            why=f"{why}; this file of Azure's has it",
            source=f"{GUIDE_URL}; {_AZURE}",
            setting=setting,
            is_met=setting is not None and setting.value in facts.files[TOPOLOGY_FILE],
        )
    elif setting is None:
        yield Step(
            what=f"bring {path} of the host to the same path here, and set {TOPOLOGY} to it",
            why=f"{why}, and the file with it is not here",
            source=_AZURE,
        )


def _google_gpu_cards(facts: Facts) -> int:
    """Return the number of Google's cards for the GPUs of a machine, which has one more for everything else.

    Machines with H100 have them: 8 on A3 Mega, 4 on A3 High. Source: Google Cloud, "GPU machine types", A3 series.
    """
    if not any(gpu.name.startswith("NVIDIA H100") for gpu in facts.gpus):
        return 0
    return max(0, sum(network.driver == _GVNIC for network in facts.networks) - 1)


def _google(facts: Facts, fabric: Fabric) -> Iterator[Item]:
    cards = _google_gpu_cards(facts)
    if fabric.kind == TCP and not cards:
        return  # a machine without the further cards that GPUs have there
    kind, found = str(fabric.kind), facts.files.get(SCRIPT)
    why = "without the plugin NCCL does not use this network as intended"
    if found:
        # Without this variable the script of TCPXO ends the shell that sources it.
        given = f", with NCCL_LIB_DIR={found[0].rpartition('/')[0]}" if fabric.kind == TCP else ""
        what, why = (
            f"source {found[0]} in the job before torchrun{given}",
            "it sets what Google's plugin for NCCL needs",
        )
    elif fabric.kind == TCP and cards < _MEGA_CARDS:
        what = "set up GPUDirect-TCPX: its plugin, its daemon and the variables of Google's guide"
    else:
        what = f"mount Google's plugin for NCCL, and source its script (such as {GOOGLE_SCRIPTS[kind]})"
    yield Step(what=what, why=why, source=_GOOGLE)
    for name in _GOOGLE_VARIABLES[kind]:
        yield leave(facts, name, "Google's plugin has a value of its own for it: use that one, or none", _GOOGLE)
