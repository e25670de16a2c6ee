"""What lies between two GPUs, and between a GPU and a network card, in the words of ``nvidia-smi topo -m``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pytest_gpucluster.host.tree import Tree
from pytest_gpucluster.kernel_log import normalised

DEVICES = "/sys/bus/pci/devices"
SELF, UNKNOWN = "X", "?"
LEGEND: Mapping[str, str] = {
    SELF: "itself",
    "NV#": "# NVLinks, of each other or to the same switches",
    "PIX": "at most one PCIe switch",
    "PXB": "several PCIe switches, and not the CPU's host bridge",
    "PHB": "a PCIe host bridge, which is mostly the CPU",
    "NODE": "host bridges of one NUMA node",
    "SYS": "the link between NUMA nodes",
    UNKNOWN: "not told",
}
"""Source: `nvidia-smi topo -m`, its legend."""
_BY_NVML = {
    "internal": "PIX",
    "single": "PIX",
    "multiple": "PXB",
    "hostbridge": "PHB",
    "node": "NODE",
    "system": "SYS",
}


def read(gpus: Mapping[str, Any], adapters: Mapping[str, Any], tree: Tree) -> dict[str, Any]:
    """Tell what lies between GPUs and HCAs.

    GPUs are told apart by NVML, and where it does not tell, by the kernel's PCI devices; HCAs by the latter.

    Args:
        gpus: as ``gpus.read`` tells.
        adapters: as ``network.adapters`` tells.

    Returns:
        ``gpus``: their indices; ``between_gpus``: for each GPU, the way to each of them; ``adapters``: their names;
        ``to_gpus``: for each HCA, the way to each GPU; ``numa_nodes``: of each GPU, null where the kernel does not
        know; ``cpus``: beside each GPU.
    """
    listed: Sequence[Mapping[str, Any]] = gpus["gpus"]
    common = {frozenset((way["from"], way["to"])): way["common"] for way in gpus["ways"]}
    cards: Sequence[Mapping[str, Any]] = adapters["devices"]

    def between(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
        if one["uuid"] == other["uuid"]:
            return SELF
        links = nvlinks(one, other)
        if links:
            return f"NV{links}"
        told = common.get(frozenset((one["uuid"], other["uuid"])))
        return _BY_NVML.get(str(told)) or by_kernel(tree, one["pci"], other["pci"])

    return {
        "gpus": [gpu["index"] for gpu in listed],
        "between_gpus": [[between(one, other) for other in listed] for one in listed],
        "adapters": [card["name"] for card in cards],
        "to_gpus": [[by_kernel(tree, card["pci"], gpu["pci"]) for gpu in listed] for card in cards],
        "numa_nodes": [_numa_node(tree, normalised(gpu["pci"])) for gpu in listed],
        "cpus": [_cpus(tree, gpu["pci"]) for gpu in listed],
    }


def nvlinks(one: Mapping[str, Any], other: Mapping[str, Any]) -> int:
    """Count the NVLinks between two GPUs: those to each other, or the fewer of those that go to switches."""

    def to(gpu: Mapping[str, Any], pci: str | None) -> int:
        ends = (gpu["nvlink_ends"] or {}).values()
        if pci is None:
            return sum(kind == "switch" for kind, _ in ends)
        return sum(kind == "gpu" and normalised(address) == pci for kind, address in ends)

    direct = min(to(one, normalised(other["pci"])), to(other, normalised(one["pci"])))
    return direct or min(to(one, None), to(other, None))


def by_kernel(tree: Tree, one: str | None, other: str | None) -> str:
    """Return what lies between two PCI devices, by what the kernel's paths to them have in common.

    PIX: what they share ends at most two steps above each of them, at the upstream port of one switch. Source: NCCL
    2.5, src/graph/topo.cc, pciDistance, which compares the same paths.
    """
    first, second = _path(tree, one), _path(tree, other)
    if not first or not second:
        return UNKNOWN
    shared = 0
    for a, b in zip(first, second, strict=False):
        if a != b:
            break
        shared += 1
    if shared >= 2:
        return "PIX" if max(len(first), len(second)) - shared <= 2 else "PXB"
    if shared == 1:
        return "PHB"
    nodes = {_numa_node(tree, first[-1]), _numa_node(tree, second[-1])}
    if None in nodes:
        return UNKNOWN
    return "NODE" if len(nodes) == 1 else "SYS"


def _path(tree: Tree, pci: str | None) -> list[str]:
    """Return the host bridge, each bridge below it, and the device."""
    address = normalised(pci or "")
    folder = f"{DEVICES}/{address}"
    if address is None or not tree.has(folder):
        return []
    parts = tree.path(folder).resolve().parts
    root = next((at for at, part in enumerate(parts) if part.startswith("pci") and part[3:4].isalnum()), None)
    return list(parts[root:]) if root is not None else []


def _numa_node(tree: Tree, address: str | None) -> int | None:
    node = tree.number(f"{DEVICES}/{address}/numa_node") if address else None
    return None if node is None or node < 0 else node


def _cpus(tree: Tree, pci: str | None) -> str | None:
    address = normalised(pci or "")
    return tree.text(f"{DEVICES}/{address}/local_cpulist") or None if address else None
