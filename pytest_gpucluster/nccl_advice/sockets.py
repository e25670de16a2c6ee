"""``NCCL_SOCKET_IFNAME`` and the threads of TCP: which interfaces, and how many connections. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pytest_gpucluster.nccl_advice.advice import GUIDE, Leave, Set
from pytest_gpucluster.nccl_advice.cards import nameable
from pytest_gpucluster.nccl_advice.fabric import TCP, Fabric
from pytest_gpucluster.nccl_advice.facts import Facts, Network
from pytest_gpucluster.surroundings.interfaces import by_itself, matches

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


def advise(facts: Facts, fabric: Fabric) -> Iterator[Set | Leave | str]:
    """Yield what is to be said of interfaces; a text is what cannot be told."""
    if fabric.kind is None:
        return
    if fabric.kind == TCP and of_gpus(facts):
        yield Leave(name=IFNAME, why="it belongs to what Google's plugin needs", source=GUIDE)
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
        return Leave(name=IFNAME, why=f"NCCL takes {own[0].name} by itself, and there is no other", source=GUIDE)
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
        return Leave(name=IFNAME, why=why, source=GUIDE)
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
        return Leave(name=IFNAME, why=why, source=GUIDE)
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
        source=GUIDE,
        now=setting.value if setting else None,
        origin=setting.origin if setting else "",
        is_met=set(by_setting[:1] if only_first else by_setting) == wanted,
    )


def _connections(facts: Facts) -> Iterator[Set | Leave]:
    cloud = [one.name for one in facts.networks if one.driver in (GVNIC, ENA)]
    if cloud:
        for name in (THREADS, SOCKETS):
            yield Leave(name=name, why=f"NCCL has figures of its own for {', '.join(cloud)}", source=GUIDE)
        return
    fast = [one for one in facts.networks if one.is_real and (one.speed_mbps or 0) >= FAST_MBPS]
    slow = [_speed(one) for one in facts.networks if one.is_real and one.speed_mbps is not None]
    for name in (THREADS, SOCKETS):
        if not fast:
            has = f"the network has {slow[0]}" if slow else "the speed of the network is not told"
            yield Leave(name=name, why=f"the guide speaks of {OF_FAST} from 100 Gb/s on, and {has}", source=GUIDE)
            continue
        setting = facts.setting(name)
        yield Set(
            name=name,
            value=OF_FAST,
            why=f"TCP carries all data, and {fast[0].name} has {_speed(fast[0])}: one connection does not fill it",
            source=GUIDE,
            now=setting.value if setting else None,
            origin=setting.origin if setting else "",
            is_met=setting is not None and setting.value.strip() == OF_FAST,
        )


def _speed(one: Network) -> str:
    if one.speed_mbps is not None:
        return f"{one.speed_mbps / 1000:g} Gb/s"
    return "of unknown speed" if one.is_real else "no card"
