"""Rules of the advice about NCCL: cards, interfaces, what a cloud's machines need, and variables best left unset. Pure.

- cards: ``NCCL_IB_HCA`` and ``NCCL_IB_GID_INDEX``, which cards and which of their addresses
- sockets: ``NCCL_SOCKET_IFNAME`` and the threads of TCP, which interfaces and how many connections
- cloud: files and scripts of the provider, which change with its images. The values in a provider's script are its own
  and are not repeated here: the script is named, for the operator to source.
- unneeded: variables that old instructions set, and that are best left alone on a healthy node
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pytest_gpucluster.node.fabric.nccl_facts import (
    EFA,
    GUIDE_URL,
    IB,
    ROCE,
    TCP,
    TROUBLESHOOTING,
    Fabric,
    Facts,
    Kind,
    Leave,
    Network,
    Set,
    Step,
)
from pytest_gpucluster.node.fabric.nccl_rules import number
from pytest_gpucluster.node.fabric.ports import roce_gid, selects
from pytest_gpucluster.node.infiniband import ROCE_V2
from pytest_gpucluster.node.interfaces import by_itself, matches

HCA, GID = "NCCL_IB_HCA", "NCCL_IB_GID_INDEX"
FINDS_GIDS = (2, 21)
"""NCCL finds the address of a RoCE port itself from this version on. Source: NCCL user guide, Environment Variables,
NCCL_IB_ADDR_FAMILY and NCCL_IB_ROCE_VERSION_NUM, "since 2.21"."""

_NAMEABLE = re.compile(r"[!-+\--9;-~]+")
"""Printable ASCII without a blank, comma or colon: these three part the lists of NCCL."""


def nameable(name: str) -> bool:
    """Tell whether a device or interface can be written into a list of NCCL's.

    >>> [nameable(name) for name in ("mlx5_0", "$(id)", "eth0:1", "a,b", "a b", "^eth0", "=eth0", "", "\\xe9th0")]
    [True, True, False, False, False, False, False, False, False]
    """
    return bool(_NAMEABLE.fullmatch(name)) and name[0] not in "^="


def advise_cards(facts: Facts, fabric: Fabric) -> Iterator[Set | Leave | Step | str]:
    """Yield what is to be said of the cards; a text is what cannot be told."""
    if fabric.kind not in (IB, ROCE):
        return
    yield _cards(facts, fabric)
    if fabric.kind == ROCE:
        yield _addresses(facts, fabric)
    else:
        yield Leave(name=GID, why="InfiniBand has no such table of addresses to choose from", source=GUIDE_URL)


def _cards(facts: Facts, fabric: Fabric) -> Set | Leave | str:
    if fabric.unclear:
        return f"{HCA}: {fabric.unclear}. Name the ports of the fabric yourself (`nvidia-smi topo -m`, `ibv_devices`)"
    if not fabric.outside:
        why = f"NCCL takes all active ports by itself, and all {len(fabric.cards)} of them belong to the fabric"
        return Leave(name=HCA, why=why, source=GUIDE_URL)
    hidden = [card.name for card in fabric.cards if not nameable(card.port.device)]
    if hidden:
        return f"{HCA}: {', '.join(hidden)} cannot be written into a list of NCCL's. Rename it (`rdma dev set`)"
    setting = facts.setting(HCA)
    left_out = "; ".join(f"{card.name}: {why}" for card, why in fabric.outside)
    wanted = {card.name for card in fabric.cards}
    active = [card for card in facts.cards if card.port.is_active]
    is_met = setting is not None and {card.name for card in active if selects(setting.value, card.port)} == wanted
    return Set(
        name=HCA,
        value="=" + ",".join(card.name for card in fabric.cards),
        why=f"NCCL would use every active port, also {left_out}",
        source=GUIDE_URL,
        now=setting.value if setting else None,
        origin=setting.origin if setting else "",
        is_met=is_met,
    )


def _addresses(facts: Facts, fabric: Fabric) -> Set | Leave | Step | str:
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
            f"{GID}: NCCL's version is not known here. Before {'.'.join(map(str, FINDS_GIDS))} it must be set to the "
            "address of RoCE v2 with IPv4 (`show_gids`), from then on it is best left alone"
        )
    if version >= FINDS_GIDS:
        return Leave(name=GID, why=f"NCCL {facts.nccl} finds the address of RoCE v2 itself", source=GUIDE_URL)
    chosen = {gid.index for card in fabric.cards if (gid := roce_gid(card.port, None)) is not None}
    if len(chosen) != 1:
        listed = ", ".join(map(str, sorted(chosen)))
        return (
            f"{GID}: the ports have their addresses of RoCE v2 at different places ({listed}). Use NCCL 2.21 or newer"
        )
    [index] = chosen
    setting = facts.setting(GID)
    return Set(
        name=GID,
        value=str(index),
        why=f"NCCL {facts.nccl} does not look for the address of RoCE v2, which is number {index} on every port",
        source=GUIDE_URL,
        now=setting.value if setting else None,
        origin=setting.origin if setting else "",
        is_met=setting is not None and number(setting.value) == index,
    )


IFNAME = "NCCL_SOCKET_IFNAME"
THREADS, SOCKETS = "NCCL_SOCKET_NTHREADS", "NCCL_NSOCKS_PERTHREAD"
FAST_MBPS = 100_000
"""From here on the guide speaks of 4 threads, and of 4 sockets a thread. Source: NCCL user guide, Environment
Variables, NCCL_SOCKET_NTHREADS and NCCL_NSOCKS_PERTHREAD, "generic 100G networks"."""
OF_FAST = "4"
GVNIC, ENA = "gve", "ena"
"""Drivers of Google's and Amazon's own network cards, for which NCCL has figures of its own."""


def of_gpus(facts: Facts) -> int:
    """Return how many of Google's cards a machine has for its GPUs, beside the one for everything else.

    Those with H100 have them: 8 on A3 Mega, 4 on A3 High. Source: Google Cloud, "GPU machine types", A3 series.
    """
    if not any(gpu.name.startswith("NVIDIA H100") for gpu in facts.gpus):
        return 0
    return max(0, sum(one.driver == GVNIC for one in facts.networks) - 1)


def advise_sockets(facts: Facts, fabric: Fabric) -> Iterator[Set | Leave | str]:
    """Yield what is to be said of interfaces; a text is what cannot be told."""
    if fabric.kind is None:
        return
    if fabric.kind == TCP and of_gpus(facts):
        yield Leave(name=IFNAME, why="it belongs to what Google's plugin needs", source=GUIDE_URL)
        return
    yield _interfaces(facts, fabric)
    if fabric.kind == TCP:
        yield from _connections(facts)


def taken(facts: Facts) -> tuple[Network, ...]:
    """Return the interfaces that NCCL takes by itself: the first for its own connections, all of them for TCP."""
    names = [one.name for one in by_itself([one.interface for one in facts.networks])]
    return tuple(one for one in facts.networks if one.name in names)


def _interfaces(facts: Facts, fabric: Fabric) -> Set | Leave | str:
    own = taken(facts)
    if not own:
        return f"{IFNAME}: no interface is up and has an address"
    if len(own) == 1:
        return Leave(name=IFNAME, why=f"NCCL takes {own[0].name} by itself, and there is no other", source=GUIDE_URL)
    # The default route goes over what reaches the rest of the world, also where that is a bridge.
    real = [one for one in facts.networks if one.is_default or (one.is_real and not one.stays_on_link)]
    if not real:
        listed = ", ".join(one.name for one in own)
        return f"{IFNAME}: which of {listed} reaches the other nodes cannot be seen. Name it yourself"
    return _for_data(facts, own, real) if fabric.kind == TCP else _for_bootstrap(facts, fabric, own, real)


def _for_bootstrap(facts: Facts, fabric: Fabric, own: Sequence[Network], real: Sequence[Network]) -> Set | Leave | str:
    """NCCL's own connections go over its first interface: any that reaches all nodes will do."""
    first = own[0]
    rails = {card.interface for card in fabric.cards if card.interface}
    elsewhere = [one for one in real if one.name not in rails]
    if first in real and (first.name not in rails or not elsewhere):
        what = "has the default route" if first.is_default else "is a network card"
        why = f"NCCL takes {first.name} for its own connections by itself, which {what}"
        return Leave(name=IFNAME, why=why, source=GUIDE_URL)
    default = [one for one in elsewhere if one.is_default] or (elsewhere if len(elsewhere) == 1 else [])
    if first.name in rails:
        why_not = f"is a port of the fabric ({fabric.kind})"
    elif first.is_real:
        why_not = f"leads to its own link only ({first.interface.addresses[0]})"
    else:
        why_not = "is a bridge or a tunnel of this host"
    if len(default) != 1:
        listed = ", ".join(one.name for one in elsewhere) or "none"
        return (
            f"{IFNAME}: NCCL would take {first.name}, which {why_not}; of the others ({listed}) none is the obvious one"
        )
    why = f"NCCL would take {first.name}, which {why_not}, and {default[0].name} is what reaches other hosts"
    return _set(facts, default, why, only_first=True)


def _for_data(facts: Facts, own: Sequence[Network], real: Sequence[Network]) -> Set | Leave | str:
    """Over TCP all data go over all of NCCL's interfaces: the slowest must not be among them."""
    if len(real) > 1 and any(one.speed_mbps is None for one in real):
        listed = ", ".join(one.name for one in real if one.speed_mbps is None)
        return f"{IFNAME}: the speed of {listed} is not told. Name the interfaces of the fast network yourself"
    top = max((one.speed_mbps or 0 for one in real), default=0)
    fastest = [one for one in real if (one.speed_mbps or 0) == top]
    if {one.name for one in fastest} == {one.name for one in own}:
        why = "NCCL takes all interfaces by itself, and they are equally fast"
        return Leave(name=IFNAME, why=why, source=GUIDE_URL)
    wrong = [one for one in own if one not in fastest]
    told = ", ".join(f"{one.name} ({_speed(one)})" for one in wrong) or "others"
    best = ", ".join(f"{one.name} ({_speed(one)})" for one in fastest)
    return _set(facts, fastest, f"TCP carries all data, and NCCL would also send over {told}; the network is {best}")


def _set(facts: Facts, chosen: Sequence[Network], why: str, *, only_first: bool = False) -> Set | str:
    hidden = [one.name for one in chosen if not nameable(one.name)]
    if hidden:
        return f"{IFNAME}: {', '.join(hidden)} cannot be written into a list of NCCL's. Rename it (`ip link set`)"
    setting = facts.setting(IFNAME)
    wanted = {one.name for one in chosen}
    # NCCL takes a value of one character for none.
    value = setting.value if setting is not None and len(setting.value) > 1 else ""
    by_setting = [one.name for one in facts.networks if value and matches(one.name, value)]
    return Set(
        name=IFNAME,
        value="=" + ",".join(one.name for one in chosen),
        why=f"{why}. Nodes that name theirs differently need a value of their own",
        source=GUIDE_URL,
        now=setting.value if setting else None,
        origin=setting.origin if setting else "",
        is_met=set(by_setting[:1] if only_first else by_setting) == wanted,
    )


def _connections(facts: Facts) -> Iterator[Set | Leave]:
    cloud = [one.name for one in facts.networks if one.driver in (GVNIC, ENA)]
    if cloud:
        for name in (THREADS, SOCKETS):
            yield Leave(name=name, why=f"NCCL has figures of its own for {', '.join(cloud)}", source=GUIDE_URL)
        return
    fast = [one for one in facts.networks if one.is_real and (one.speed_mbps or 0) >= FAST_MBPS]
    slow = [_speed(one) for one in facts.networks if one.is_real and one.speed_mbps is not None]
    for name in (THREADS, SOCKETS):
        if not fast:
            has = f"the network has {slow[0]}" if slow else "the speed of the network is not told"
            yield Leave(name=name, why=f"the guide speaks of {OF_FAST} from 100 Gb/s on, and {has}", source=GUIDE_URL)
            continue
        setting = facts.setting(name)
        yield Set(
            name=name,
            value=OF_FAST,
            why=f"TCP carries all data, and {fast[0].name} has {_speed(fast[0])}: one connection does not fill it",
            source=GUIDE_URL,
            now=setting.value if setting else None,
            origin=setting.origin if setting else "",
            is_met=setting is not None and setting.value.strip() == OF_FAST,
        )


def _speed(one: Network) -> str:
    if one.speed_mbps is not None:
        return f"{one.speed_mbps / 1000:g} Gb/s"
    return "of unknown speed" if one.is_real else "no card"


TOPOLOGY = "NCCL_TOPO_FILE"
AZURE_TOPOLOGIES: Mapping[str, str] = {
    r"NVIDIA A100.*": "/opt/microsoft/ndv4-topo.xml",
    r"NVIDIA H100.*": "/opt/microsoft/ndv5-topo.xml",
    r"NVIDIA H200.*": "/opt/microsoft/ndv5-topo.xml",
}
"""Pattern of a GPU's name -> the description of the machine that Azure's images have for it."""
AZURE = "https://github.com/Azure/azhpc-images/tree/master/topology"

EFA_PLUGINS = ("libnccl-net.so", "libnccl-net-ofi.so", "libnccl-net-aws-ofi.so")
"""Names under which the plugin is installed. Source: https://github.com/aws/aws-ofi-nccl, INSTALL.md; the last two are
of newer installers."""
AWS = "https://github.com/aws-samples/awsome-distributed-training/blob/main/1.architectures/efa-cheatsheet.md"
AWS_PLUGIN = "https://github.com/aws/aws-ofi-nccl"
AWS_PEER_MEMORY = "https://github.com/amzn/amzn-drivers/issues/282"

GOOGLE_SCRIPTS: Mapping[str, str] = {
    ROCE: "/usr/local/gib/scripts/set_nccl_env.sh",
    TCP: "/var/lib/tcpxo/lib64/nccl-env-profile.sh",
}
"""Fabric of a Google machine -> the script that sets what its plugin needs: gIB (A3 Ultra, A4), GPUDirect-TCPXO (A3
Mega). In a container of GKE the latter is in /usr/local/nvidia/lib64."""
GOOGLE_IN_CONTAINER = "/usr/local/nvidia/lib64/nccl-env-profile.sh"
OF_MEGA = 8
"""Cards for the GPUs of an A3 Mega. With fewer it is an A3 High: GPUDirect-TCPX, which has no such script."""
GOOGLE_PLUGINS = ("NCCL_FASTRAK_", "NCCL_GPUDIRECTTCPX_")
"""How the variables of GPUDirect-TCPXO and -TCPX begin."""
DEMANDED = frozenset(("NCCL_ALGO", "NCCL_NVLS_ENABLE"))
"""What these plugins want set to a value that hurts elsewhere: they check it, or leave NVLS out. Source: the script
nccl-env-profile.sh and the checker's a3plus_guest_config.textproto, which belong to the plugin."""
OF_GOOGLE: Mapping[str, Sequence[str]] = {
    TCP: (*sorted(DEMANDED), "NCCL_PROTO"),
    ROCE: ("NCCL_CROSS_NIC", "NCCL_NET_GDR_LEVEL", "NCCL_IB_TC", "NCCL_IB_QPS_PER_CONNECTION"),
}
"""Fabric of a Google machine -> variables for which its plugin has values of its own."""
GOOGLE = "https://cloud.google.com/kubernetes-engine/docs/how-to/gpu-bandwidth-gpudirect-tcpx"

OF_OLD_EFA = {
    "FI_PROVIDER": "aws-ofi-nccl finds efa itself; it was needed up to 1.5",
    "FI_EFA_USE_DEVICE_RDMA": "needed before libfabric 1.18 and aws-ofi-nccl 1.7 only; where there is no RDMA read it "
    "stops the job",
    "NCCL_PROTO": "aws-ofi-nccl chooses what EFA can do; it was needed up to 1.5",
    "NCCL_MIN_NCHANNELS": "more channels make messages smaller than EFA needs them",
    "NCCL_BUFFSIZE": "AWS recommends the default",
}
"""Variable that older instructions for EFA have -> why it is best left alone by now."""

TOPOLOGY_FILE, EFA_PLUGIN, SCRIPT = "topology", "EFA plugin", "Google's script"
"""Keys of ``Facts.files``."""


def advise_cloud(facts: Facts, fabric: Fabric) -> Iterator[Set | Leave | Step | str]:
    """Yield what is to be said of a provider's machine; a text is what cannot be told."""
    if fabric.kind == EFA:
        yield from _aws(facts)
    elif facts.provider == "Azure" and fabric.kind == IB:
        yield from _azure(facts)
    elif facts.provider == "Google Cloud" and fabric.kind in (ROCE, TCP):
        yield from _google(facts, fabric)


def topology_of(facts: Facts) -> str | None:
    """Return the path of the description that Azure has for this kind of machine; None for one that is not known."""
    names = {gpu.name for gpu in facts.gpus}
    paths = {path for name in names for known, path in AZURE_TOPOLOGIES.items() if re.fullmatch(known, name)}
    return paths.pop() if len(paths) == 1 else None


def _aws(facts: Facts) -> Iterator[Leave | Step]:
    if not facts.files.get(EFA_PLUGIN):
        yield Step(
            what="install aws-ofi-nccl, and let LD_LIBRARY_PATH lead to it",
            why="no plugin for EFA was found where it is installed, nor in LD_LIBRARY_PATH: NCCL would take TCP",
            source=AWS_PLUGIN,
        )
    for name, why in OF_OLD_EFA.items():
        setting = facts.setting(name)
        now = setting.value if setting else facts.environ.get(name)
        yield Leave(name=name, why=why, source=AWS, now=now)


def _azure(facts: Facts) -> Iterator[Set | Step | str]:
    path = topology_of(facts)
    if path is None:
        listed = ", ".join(dict.fromkeys(gpu.name for gpu in facts.gpus)) or facts.gpus_unknown or "no GPU is seen"
        yield f"{TOPOLOGY}: it is not known which of Azure's descriptions belongs to this machine ({listed})"
        return
    setting = facts.setting(TOPOLOGY)
    if not facts.files.get(TOPOLOGY_FILE):
        if setting is None:
            yield Step(
                what=f"bring {path} of the host to the same path here, and set {TOPOLOGY} to it",
                why="the virtual machine hides which GPU is beside which card, and the file that says so is not here",
                source=AZURE,
            )
        return
    yield Set(
        name=TOPOLOGY,
        value=path,
        why="the virtual machine hides which GPU is beside which card; this file of Azure's says it",
        source=f"{GUIDE_URL}; {AZURE}",
        now=setting.value if setting else None,
        origin=setting.origin if setting else "",
        is_met=setting is not None and setting.value in facts.files[TOPOLOGY_FILE],
    )


def demanded(facts: Facts) -> frozenset[str]:
    """Return the variables that a provider's plugin wants set, where it is in use: they are no leftovers there."""
    in_use = any(one.name.startswith(GOOGLE_PLUGINS) for one in facts.settings)
    return DEMANDED if facts.provider == "Google Cloud" and in_use else frozenset()


def _google(facts: Facts, fabric: Fabric) -> Iterator[Leave | Step]:
    if fabric.kind == TCP and not of_gpus(facts):
        return  # a machine without the further cards that GPUs have there
    kind, found = str(fabric.kind), facts.files.get(SCRIPT)
    if found:
        # Without this variable the script of TCPXO ends the shell that sources it.
        given = f", with NCCL_LIB_DIR={found[0].rpartition('/')[0]}" if fabric.kind == TCP else ""
        what = f"source {found[0]} in the job before torchrun{given}"
        why = "it sets what Google's plugin for NCCL needs"
    elif fabric.kind == TCP and of_gpus(facts) < OF_MEGA:
        what = "set up GPUDirect-TCPX: its plugin, its daemon and the variables of Google's guide"
        why = "without the plugin NCCL does not use this network as it is meant to be"
    else:
        what = f"mount Google's plugin for NCCL, and source its script (such as {GOOGLE_SCRIPTS[kind]})"
        why = "without the plugin NCCL does not use this network as it is meant to be"
    yield Step(what=what, why=why, source=GOOGLE)
    for name in OF_GOOGLE[kind]:
        setting = facts.setting(name)
        why = "Google's plugin has a value of its own for it: take that one, or none"
        yield Leave(name=name, why=why, source=GOOGLE, now=setting.value if setting else None)


@dataclass(frozen=True, kw_only=True)
class Alone:
    """One variable. ``on``: the kinds of fabric, empty for all; ``nvswitch``: only where GPUs are behind NVSwitches."""

    name: str
    why: str
    on: tuple[Kind, ...] = ()
    nvswitch: bool = False
    source: str = GUIDE_URL


ALONE = (
    Alone(
        name="NCCL_IB_DISABLE",
        why="1 would send everything over TCP",
        on=(IB, ROCE),
    ),
    Alone(
        name="NCCL_IB_DISABLE",
        why="there is nothing to disable: NCCL takes TCP by itself, and would not notice cards that come later",
        on=(TCP,),
    ),
    Alone(
        name="NCCL_NET_GDR_LEVEL",
        why="by default GPUDirect RDMA is used where a card is behind the GPU's own PCIe switches; measure before any "
        "other value stays",
        on=(IB, ROCE),
    ),
    Alone(
        name="NCCL_CROSS_NIC",
        why="by default NCCL keeps to rails where it can; whether rails have a way across is the network's plan, and "
        "cannot be seen from a node",
        on=(IB, ROCE),
    ),
    Alone(
        name="NCCL_IB_TC",
        why="the traffic class belongs to the switches' configuration: set what the network's owner says, or nothing",
        on=(ROCE,),
    ),
    Alone(
        name="NCCL_IB_SL",
        why="the service level belongs to the subnet manager's configuration: set what the network's owner says, or "
        "nothing",
        on=(IB,),
    ),
    Alone(
        name="NCCL_IB_QPS_PER_CONNECTION",
        why="more connections help on some fabrics of several levels, and nothing on a node tells: measure both",
        on=(IB, ROCE),
    ),
    Alone(
        name="NCCL_ALGO",
        why="NCCL chooses by size and topology; a choice that helps one size hurts the others",
    ),
    Alone(
        name="NCCL_PROTO",
        why="NCCL chooses by size and topology; LL128 where it has not chosen it can corrupt data",
        on=(IB, ROCE, TCP),
    ),
    Alone(
        name="NCCL_NVLS_ENABLE",
        why="NCCL uses the reduction in NVSwitches where there is it",
        nvswitch=True,
    ),
    Alone(
        name="NCCL_P2P_DISABLE",
        why="1 is for machines on which P2P is broken; mend that instead (IOMMU, ACS)",
        source=TROUBLESHOOTING,
    ),
)
"""Source of the reasons: the guide's entry on each variable; that measuring decides is this suite's own rule."""


def advise_unneeded(facts: Facts, fabric: Fabric) -> Iterator[Leave]:
    """Yield those of this node. Where the fabric is not known, nothing is said."""
    if fabric.kind is None:
        return
    for one in ALONE:
        if (not one.on or fabric.kind in one.on) and (facts.nvls or not one.nvswitch):
            setting = facts.setting(one.name)
            yield Leave(name=one.name, why=one.why, source=one.source, now=setting.value if setting else None)
