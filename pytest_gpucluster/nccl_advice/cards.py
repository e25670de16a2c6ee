"""``NCCL_IB_HCA`` and ``NCCL_IB_GID_INDEX``: which cards, and which of their addresses. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator

from pytest_gpucluster.fabric_ports import roce_gid, selects
from pytest_gpucluster.infiniband import ROCE_V2
from pytest_gpucluster.nccl_advice.advice import GUIDE, Leave, Set, Step
from pytest_gpucluster.nccl_advice.fabric import IB, ROCE, Fabric
from pytest_gpucluster.nccl_advice.facts import Facts
from pytest_gpucluster.nccl_values import number

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


def advise(facts: Facts, fabric: Fabric) -> Iterator[Set | Leave | Step | str]:
    """Yield what is to be said of the cards; a text is what cannot be told."""
    if fabric.kind not in (IB, ROCE):
        return
    yield _cards(facts, fabric)
    if fabric.kind == ROCE:
        yield _addresses(facts, fabric)
    else:
        yield Leave(name=GID, why="InfiniBand has no such table of addresses to choose from", source=GUIDE)


def _cards(facts: Facts, fabric: Fabric) -> Set | Leave | str:
    if fabric.unclear:
        return f"{HCA}: {fabric.unclear}. Name the ports of the fabric yourself (`nvidia-smi topo -m`, `ibv_devices`)"
    if not fabric.outside:
        why = f"NCCL takes all active ports by itself, and all {len(fabric.cards)} of them belong to the fabric"
        return Leave(name=HCA, why=why, source=GUIDE)
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
        source=GUIDE,
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
            source=GUIDE,
        )
    version = facts.nccl_number
    if version is None:
        return (
            f"{GID}: NCCL's version is not known here. Before {'.'.join(map(str, FINDS_GIDS))} it must be set to the "
            "address of RoCE v2 with IPv4 (`show_gids`), from then on it is best left alone"
        )
    if version >= FINDS_GIDS:
        return Leave(name=GID, why=f"NCCL {facts.nccl} finds the address of RoCE v2 itself", source=GUIDE)
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
        source=GUIDE,
        now=setting.value if setting else None,
        origin=setting.origin if setting else "",
        is_met=setting is not None and number(setting.value) == index,
    )
