"""The GPUs of a node through NVML, queried by a child process (this module as a program), and their topology.

A driver that hangs blocks its caller for ever, without a reaction to signals. So a child queries it, writes one line of
JSON for each GPU, and is killed at the deadline: the lines written by then are kept.

The topology has the path between two GPUs, and between a GPU and a network card, in the terms of
``nvidia-smi topo -m``.
"""

from __future__ import annotations

import itertools
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pytest_gpucluster.errors import EnvironmentBroken
from pytest_gpucluster.launch import detached_process
from pytest_gpucluster.node.nvml import Nvml, open_nvml, read_values
from pytest_gpucluster.node.nvml_queries import keys
from pytest_gpucluster.node.processes import Output, Process, find_process, run_program
from pytest_gpucluster.node.sysfs import Tree, pci_address

ANSWER_SECONDS = 30.0
"""Several times the time to initialise eight GPUs where persistence mode is off."""
_CHILD = (sys.executable, "-m", "pytest_gpucluster.node.info_gpus")

QUERIES = keys(
    *("serial", "board.part_number", "vbios", "inforom", "gsp.firmware", "memory.total", "memory.used"),
    *("clock.sm", "clock.sm.max", "clock.memory", "clock.memory.max", "power.draw", "power.limit"),
    *("power.limit.default", "temperature.gpu", "utilization.gpu", "throttle.reasons", "ecc.mode"),
    *("ecc.uncorrected.volatile", "ecc.uncorrected.aggregate", "rows.pending", "rows.failed", "mig.mode"),
    *("persistence.mode", "pcie.generation", "pcie.generation.max", "pcie.width", "pcie.width.max", "nvlink.up"),
    *("nvlink.version", "nvlink.ends", "fabric", "processes"),
)
"""Key of a GPU -> NVML query. The key has the unit."""


def query_gpus(open_nvml: Callable[[], Nvml], write: Callable[[dict[str, Any]], None]) -> None:
    """In the child: run all queries; write the name of each before it, and the values of each GPU after the last."""
    try:
        nvml = open_nvml()
        write({"driver": nvml.driver_version()})
        write({"query": "the list of GPUs"})
        permitted = nvml.gpus()
        write({"count": len(permitted)})
    except EnvironmentBroken as error:
        write({"why_not": str(error)})
        return
    for gpu in filter(None, permitted):
        values: dict[str, Any] = {"index": gpu.index, "name": gpu.name, "uuid": gpu.uuid, "pci": gpu.pci_bus_id}
        missing: dict[str, str] = {}
        for key, query in QUERIES.items():
            write({"query": f"{query} of GPU {gpu.index}"})
            found = read_values(nvml, gpu.uuid, {key: query})
            values[key] = found.get(key)
            missing |= {name: why.reason for name, why in found.missing.items()}
        write({"gpu": {**values, "not_available": missing}})
    write({"why_not": ""})


def run_child(command: Sequence[str] = _CHILD, seconds: float = ANSWER_SECONDS) -> Output:
    """Run the child, and return what it has written by the deadline."""
    return run_program(command, seconds, environ=detached_process.child_environment())


def read_gpus(child: Output, find_process: Callable[[int], Process] = find_process) -> dict[str, Any]:
    """Parse the child's lines.

    Returns:
        ``why_not``: why nothing, or not all, is known; "" where the child finished. ``driver``: its version. ``count``:
        GPUs that this process may use, also those that do not answer. ``gpus``: each with ``index``, ``name``,
        ``uuid``, ``pci``, a key for each of ``QUERIES``, and ``not_available``, why a key is null.
    """
    result: dict[str, Any] = {"why_not": None, "driver": None, "count": None, "gpus": []}
    query = "NVML's initialisation"
    for line in child.text.splitlines():
        try:
            answer = json.loads(line)
        except ValueError:
            continue  # the last line of a child that was killed while it wrote
        if "query" in answer:
            query = answer["query"]
        elif "gpu" in answer:
            gpu = answer["gpu"]
            found = [(find_process(pid), used) for pid, used in gpu["processes"] or ()]
            owners = [
                {"pid": one.pid, "memory_bytes": used, "user": one.user or None, "command": one.command or None}
                for one, used in found
            ]
            result["gpus"].append({**gpu, "processes": None if gpu["processes"] is None else owners})
        else:
            result |= answer
    if result["why_not"] is None:
        why = child.why_not or "the child that queries NVML exited early"
        result["why_not"] = f"{why}; its last query was {query}" if child.text else why
    return result


SELF, UNKNOWN = "X", "?"
LEGEND: Mapping[str, str] = {
    SELF: "itself",
    "NV#": "# NVLinks, of each other or to the same switches",
    "PIX": "at most one PCIe switch",
    "PXB": "several PCIe switches, and not the CPU's host bridge",
    "PHB": "a PCIe host bridge, typically the CPU",
    "NODE": "host bridges of one NUMA node",
    "SYS": "the link between NUMA nodes",
    UNKNOWN: "unknown",
}
"""Source: `nvidia-smi topo -m`, its legend."""


def read_topology(gpus: Mapping[str, Any], adapters: Mapping[str, Any], tree: Tree) -> dict[str, Any]:
    """Return the paths between GPUs and HCAs: NVLinks by NVML, all else by the kernel's PCI devices.

    ``adapters`` is the result of ``info.network_adapters``.

    Returns:
        ``gpus``: their indices; ``between_gpus``: for each GPU, the path to each of them; ``adapters``: their names;
        ``to_gpus``: for each HCA, the path to each GPU; ``numa_nodes``: of each GPU, null where unknown; ``cpus``:
        local to each GPU.
    """
    listed: Sequence[Mapping[str, Any]] = gpus["gpus"]
    cards: Sequence[Mapping[str, Any]] = adapters["devices"]

    def between(one: Mapping[str, Any], other: Mapping[str, Any]) -> str:
        if one["uuid"] == other["uuid"]:
            return SELF
        links = nvlinks(one, other)
        return f"NV{links}" if links else by_kernel(tree, one["pci"], other["pci"])

    return {
        "gpus": [gpu["index"] for gpu in listed],
        "between_gpus": [[between(one, other) for other in listed] for one in listed],
        "adapters": [card["name"] for card in cards],
        "to_gpus": [[by_kernel(tree, card["pci"], gpu["pci"]) for gpu in listed] for card in cards],
        "numa_nodes": [tree.numa_node(gpu["pci"]) for gpu in listed],
        "cpus": [tree.text(f"{tree.pci_device(gpu['pci'])}/local_cpulist") or None for gpu in listed],
    }


def nvlinks(one: Mapping[str, Any], other: Mapping[str, Any]) -> int:
    """Count the NVLinks between two GPUs: those to each other, or the fewer of those that go to switches."""

    def to(gpu: Mapping[str, Any], pci: str | None) -> int:
        ends = (gpu["nvlink_ends"] or {}).values()
        if pci is None:
            return sum(kind == "switch" for kind, _ in ends)
        return sum(kind == "gpu" and pci_address(address) == pci for kind, address in ends)

    direct = min(to(one, pci_address(other["pci"])), to(other, pci_address(one["pci"])))
    return direct or min(to(one, None), to(other, None))


def by_kernel(tree: Tree, one: str | None, other: str | None) -> str:
    """Return the path between two PCI devices, by the common part of their sysfs paths.

    PIX: the common part ends at most two steps above each of them, at the upstream port of one switch. Source: NCCL
    2.5, src/graph/topo.cc, pciDistance, which compares the same paths.
    """
    first, second = _path(tree, one), _path(tree, other)
    if not first or not second:
        return UNKNOWN
    shared = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))
    if shared >= 2:
        return "PIX" if max(len(first), len(second)) - shared <= 2 else "PXB"
    if shared == 1:
        return "PHB"
    nodes = {tree.numa_node(first[-1]), tree.numa_node(second[-1])}
    if None in nodes:
        return UNKNOWN
    return "NODE" if len(nodes) == 1 else "SYS"


def _path(tree: Tree, pci: str | None) -> list[str]:
    """Return the host bridge, each bridge below it, and the device."""
    folder = tree.pci_device(pci)
    parts = tree.path(folder).resolve().parts if folder is not None else ()
    return [*itertools.dropwhile(lambda part: re.match(r"pci\w", part) is None, parts)]


if __name__ == "__main__":
    # Each line at once, since the next query may hang.
    query_gpus(open_nvml, lambda line: print(json.dumps(line), flush=True))
