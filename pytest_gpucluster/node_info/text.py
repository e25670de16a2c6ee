"""What a node is, as text for people: no line wider than asked for, nothing in it that acts on a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from pytest_gpucluster.node_info import gpu_text, host_text, network_text, topology_text
from pytest_gpucluster.text import paragraph

Told = Mapping[str, Any]
Section = tuple[str, str, Callable[[Told, int], Iterable[str]]]
_SUMMARY: Sequence[Section] = (
    ("system", "System", host_text.of_system),
    ("cpu", "CPUs", host_text.of_cpu),
    ("memory", "Memory", host_text.of_memory),
    ("stack", "Driver stack", host_text.of_stack),
    ("gpus", "GPUs", gpu_text.of_gpus),
    ("infiniband", "InfiniBand and RoCE", network_text.of_infiniband),
    ("network", "Network", network_text.of_network),
    ("mounts", "Mounts of other hosts, and the root", host_text.of_mounts),
)
_WHOLE: Sequence[Section] = (
    ("system", "System", host_text.of_system),
    ("cpu", "CPUs", host_text.of_cpu_whole),
    ("memory", "Memory", host_text.of_memory_whole),
    ("stack", "Driver stack", host_text.of_stack),
    ("gpus", "GPUs", gpu_text.of_gpus_whole),
    ("topology", "Topology", topology_text.of_topology),
    ("infiniband", "InfiniBand and RoCE", network_text.of_infiniband_whole),
    ("network", "Network", network_text.of_network),
    ("mounts", "Mounts", host_text.of_mounts_whole),
)


def render(told: Told, *, width: int) -> str:
    """Return a view as text."""
    sections = _SUMMARY if told["view"] == "summary" else _WHOLE
    lines = _title(told, width)
    for part, title, show in sections:
        if part in told:
            body = list(show(told, width))
            lines += ["", title, *body] if body else []
    return "\n".join(lines) + "\n"


def _title(told: Told, width: int) -> list[str]:
    return paragraph(f"{told['host']}, {told['at']}", width)
