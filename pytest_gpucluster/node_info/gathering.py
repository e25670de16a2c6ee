"""All that is known of a node, gathered once and put together."""

from __future__ import annotations

import datetime
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pytest_gpucluster.host import memory as host_memory
from pytest_gpucluster.host.memory import Space
from pytest_gpucluster.host.tree import Tree
from pytest_gpucluster.launch.launchers import allocation
from pytest_gpucluster.node_info import cpus, gpus, memory, mounted, network, program, stack, system, topology
from pytest_gpucluster.node_info.program import Answer, Ask
from pytest_gpucluster.process_table import Who, who_is
from pytest_gpucluster.surroundings.interfaces import Interface
from pytest_gpucluster.surroundings.interfaces import interfaces as own_interfaces

SCHEMA_VERSION = 1

VIEWS: Mapping[str, tuple[str, ...]] = {
    "summary": ("system", "cpu", "memory", "stack", "gpus", "topology", "infiniband", "network", "mounts"),
    "gpu": ("stack", "gpus", "topology"),
    "ib": ("infiniband", "network"),
    "cpu": ("system", "cpu", "memory"),
    "all": ("system", "cpu", "memory", "stack", "gpus", "topology", "infiniband", "network", "mounts"),
}
"""What is shown -> the parts that it is made of. A summary tells less of each."""


@dataclass(frozen=True, kw_only=True)
class Sources:
    """Where a node is asked: all of it can be planted."""

    tree: Tree = field(default_factory=Tree)
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    hostname: Callable[[], str] = socket.gethostname
    gpus: Callable[[], Answer] = gpus.ask_child
    ask: Ask = program.ask
    who_is: Callable[[int], Who] = who_is
    interfaces: Callable[[], Sequence[Interface]] = own_interfaces
    space: Space = host_memory.space
    version: Callable[[str], str | None] = stack.version_of
    nccl: Callable[[], str | None] = stack.installed_nccl


def gather(view: str, sources: Sources) -> dict[str, Any]:
    """Return the parts of a view, as plain JSON types.

    Returns:
        ``schema_version``, ``view``, ``host``, ``at`` (ISO 8601, UTC), and a key for each part in ``VIEWS``.
    """
    wanted, tree, host = VIEWS[view], sources.tree, sources.hostname()
    told: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "view": view,
        "host": host,
        "at": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }
    adapters = network.adapters(tree) if {"infiniband", "topology"} & {*wanted} else None
    known = gpus.read(sources.gpus(), sources.who_is) if "gpus" in wanted else None
    parts: dict[str, Callable[[], Any]] = {
        "system": lambda: system.read(tree, sources.environ, host=host, allocation=allocation(sources.environ)),
        "cpu": lambda: cpus.read(tree),
        "memory": lambda: memory.read(tree, sources.space),
        "stack": lambda: stack.read(tree, sources.ask, version=sources.version, nccl=sources.nccl),
        "gpus": lambda: known,
        "topology": lambda: topology.read(known or {}, adapters or {}, tree),
        "infiniband": lambda: adapters,
        "network": lambda: network.interfaces(tree, sources.interfaces),
        "mounts": lambda: mounted.read(tree),
    }
    return told | {part: parts[part]() for part in wanted}
