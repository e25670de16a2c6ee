"""Variables that old instructions set, and that are best left alone on a healthy node. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from pytest_gpucluster.nccl_advice.advice import GUIDE, TROUBLESHOOTING, Leave
from pytest_gpucluster.nccl_advice.fabric import IB, ROCE, TCP, Fabric, Kind
from pytest_gpucluster.nccl_advice.facts import Facts


@dataclass(frozen=True, kw_only=True)
class Alone:
    """One variable. ``on``: the kinds of fabric, empty for all; ``nvswitch``: only where GPUs are behind NVSwitches."""

    name: str
    why: str
    on: tuple[Kind, ...] = ()
    nvswitch: bool = False
    source: str = GUIDE


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


def advise(facts: Facts, fabric: Fabric) -> Iterator[Leave]:
    """Yield those of this node. Where the fabric is not known, nothing is said."""
    if fabric.kind is None:
        return
    for one in ALONE:
        if (not one.on or fabric.kind in one.on) and (facts.nvls or not one.nvswitch):
            setting = facts.setting(one.name)
            yield Leave(name=one.name, why=one.why, source=one.source, now=setting.value if setting else None)
