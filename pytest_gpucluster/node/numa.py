"""Whether a rank and its host memory are on the NUMA node of its GPU: CPUs and memory nodes of both, compared."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pytest_gpucluster.errors import EnvironmentBroken
from pytest_gpucluster.metrics.finding import Finding, Kind, finding, identity, note
from pytest_gpucluster.node.sysfs import Tree, format_ranges, parse_ranges

REMEDY = (
    "let the launcher bind each rank to its GPU's node: torchrun --numa-binding=node where torchrun has it, srun "
    "--gpu-bind=closest, or numactl --cpunodebind=... --membind=... around each rank"
)


@dataclass(frozen=True, kw_only=True)
class Place:
    """CPUs and NUMA nodes. ``nodes``: of a rank, those of its memory policy; of a GPU, its own."""

    cpus: frozenset[int]
    nodes: frozenset[int]


def own_place(tree: Tree | None = None) -> Place:
    """Return the CPUs and memory nodes of this process.

    Raises: EnvironmentBroken if the kernel does not report them.
    """
    status = (tree or Tree()).text("/proc/self/status") or ""
    found = re.search(r"^Mems_allowed_list:\s*([0-9,-]+)$", status, re.MULTILINE)
    if found is None:
        raise EnvironmentBroken("the memory nodes of this process are unknown: /proc/self/status has no list of them")
    return Place(cpus=frozenset(os.sched_getaffinity(0)), nodes=parse_ranges(found[1]))


def place_of_gpu(pci: str | None, tree: Tree | None = None) -> Place | None:
    """Return the local CPUs and the node of a GPU; None where the kernel does not report them.

    Args:
        pci: its address as NVML writes it, such as 00000000:3B:00.0; None if unknown.
        tree: where to read.
    """
    tree = tree or Tree()
    node, cpus = tree.numa_node(pci), tree.numbers(f"{tree.pci_device(pci)}/local_cpulist")
    return None if node is None or not cpus else Place(cpus=cpus, nodes=frozenset({node}))


def examine_affinity(who: Mapping[str, Any], rank: Place, gpu: Place | None) -> list[Finding]:
    """Compare the places of a rank and of its GPU.

    A rank with none of its GPU's local CPUs, or without its memory node, is misplaced: the launcher has bound it to
    another node. One that may also run elsewhere gets a note: the kernel may move it away.

    Args:
        who: the rank's entry in the inventory.
        rank: where it may run.
        gpu: where its GPU is; None if unknown.
    """

    rank_name = f"rank {who['rank']}"
    if gpu is None:
        remedy = "nothing on a machine with one node; else make /sys/bus/pci/devices visible to the job"
        return [note("affinity", identity(who), f"{rank_name} has no NUMA information about its GPU", remedy=remedy)]
    allowed = f"the CPUs {format_ranges(gpu.cpus)} and memory of node {format_ranges(gpu.nodes)}"
    problems: list[tuple[Kind, str]] = []
    if not rank.cpus & gpu.cpus:
        problems.append(
            ("environment", f"may run on the CPUs {format_ranges(rank.cpus)}, none of which is local to its GPU")
        )
    elif rank.cpus - gpu.cpus:
        problems.append(
            ("note", f"may run on the CPUs {format_ranges(rank.cpus)}, not all of which are local to its GPU")
        )
    if not rank.nodes & gpu.nodes:
        problems.append(("environment", f"may use memory of node {format_ranges(rank.nodes)}, and not of its GPU's"))
    return [
        finding(kind, "affinity", identity(who), f"{rank_name} {found}", allowed=allowed, remedy=REMEDY)
        for kind, found in problems
    ]


LEAST = 0.95
"""The kernel may place single pages elsewhere."""


def require_local(who: Mapping[str, Any], nodes: Mapping[int, float], gpu: Place | None) -> None:
    """Require that host memory was on the NUMA node of the GPU, where both are known.

    Args:
        who: the rank's entry in the inventory.
        nodes: NUMA node -> part of the memory on it; empty if unknown.
        gpu: where its GPU is; None if unknown.

    Raises: EnvironmentBroken: the measurement included the link between the sockets.
    """
    if gpu is None or not nodes:
        return
    here = sum(part for node, part in nodes.items() if node in gpu.nodes)
    if here < LEAST:
        raise EnvironmentBroken(
            f"{identity(who)}: {100 * here:.3g} % of the host memory of rank {who['rank']} was on NUMA node "
            f"{format_ranges(gpu.nodes)}, local to this GPU; to measure its link, at least {100 * LEAST:g} % must; "
            f"check whether that node is full (`numactl -H`), and {REMEDY}"
        )
