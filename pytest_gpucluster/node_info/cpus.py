"""The CPUs of a node: model, sockets, cores, NUMA nodes, and what this process may use of them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from typing import Any

from pytest_gpucluster.affinity import shown
from pytest_gpucluster.host import cgroup, processors
from pytest_gpucluster.host.tree import Tree

_NODES = "/sys/devices/system/node"
_MODEL = re.compile(r"^(?:model name|Model|cpu model|uarch|Processor)\s*:\s*(.+)$", re.MULTILINE)
"""x86 and others. An Arm kernel tells the maker's numbers only, which are told in their place."""


def read(tree: Tree) -> dict[str, Any]:
    """Tell of the CPUs.

    Returns:
        ``model``; ``sockets``, ``cores``, ``cpus`` that are online, ``offline`` ones; ``cpus_allowed``, those that this
        process may run on, as the kernel writes a list; ``cpus_of_group``, how many CPUs' time its control group gets,
        null for no limit; ``max_mhz``; ``governors``; ``numa_balancing``; ``numa_nodes``: each with ``node``, ``cpus``,
        ``memory_total_bytes``, ``memory_free_bytes`` and ``distances`` to all nodes.

    Source: Linux kernel, Documentation/admin-guide/cputopology.rst and Documentation/ABI/stable/sysfs-devices-node.
    """
    known = processors.read(tree)
    online = sorted(known.online or ())
    return {
        "model": _model(tree),
        "sockets": _different(tree, online, "physical_package_id"),
        "cores": _different(tree, online, "thread_siblings_list"),
        "cpus": len(online) if known.online is not None else None,
        "offline": len(known.offline),
        "cpus_allowed": shown(os.sched_getaffinity(0)),
        "cpus_of_group": cgroup.read(tree).cpus,
        "max_mhz": _max_mhz(tree, online),
        "governors": {name: len(cpus) for name, cpus in sorted(known.governors.items())},
        "numa_balancing": None if known.numa_balancing is None else bool(known.numa_balancing),
        "numa_nodes": [_node(tree, node) for node in sorted(known.nodes or ())],
    }


def _model(tree: Tree) -> str | None:
    text = tree.text("/proc/cpuinfo") or ""
    found = _MODEL.search(text)
    if found:
        return " ".join(found[1].split())
    arm = {name: _field(text, name) for name in ("CPU implementer", "CPU part")}
    return ", ".join(f"{name} {value}" for name, value in arm.items() if value) or None


def _field(text: str, name: str) -> str:
    found = re.search(rf"^{name}\s*:\s*(\S+)", text, re.MULTILINE)
    return found[1] if found else ""


def _different(tree: Tree, cpus: Iterable[int], name: str) -> int | None:
    """Count the different values of an attribute of all CPUs' topology; None where the kernel lacks one of them."""
    told = {tree.text(f"{processors.CPUS}/cpu{cpu}/topology/{name}") for cpu in cpus}
    return None if None in told or not told else len(told)


def _max_mhz(tree: Tree, cpus: Iterable[int]) -> float | None:
    told = (tree.number(f"{processors.CPUS}/cpu{cpu}/cpufreq/cpuinfo_max_freq") for cpu in cpus)
    return max((number / 1000 for number in told if number is not None), default=None)


def _node(tree: Tree, node: int) -> dict[str, Any]:
    folder = f"{_NODES}/node{node}"
    memory = tree.text(f"{folder}/meminfo") or ""
    distances = tree.text(f"{folder}/distance") or ""
    return {
        "node": node,
        "cpus": tree.text(f"{folder}/cpulist"),
        "memory_total_bytes": _kilobytes(memory, "MemTotal"),
        "memory_free_bytes": _kilobytes(memory, "MemFree"),
        "distances": [int(word) for word in distances.split() if word.isdecimal()],
    }


def _kilobytes(text: str, name: str) -> int | None:
    found = re.search(rf"\b{name}:\s+(\d+) kB", text)
    return int(found[1]) * 1024 if found else None
