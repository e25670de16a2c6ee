"""All that is known of one node's host, gathered and frozen: what is judged always says the same."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pytest_gpucluster.metrics.finding import Identity, identity
from pytest_gpucluster.node import limits, pci
from pytest_gpucluster.node.limits import Cgroup, Memory, ProcessLimits, Processors, Space, Tree
from pytest_gpucluster.node.numa import DEVICES, place_of_gpu
from pytest_gpucluster.node.pci import PciPath

WORKERS = "PYTEST_XDIST_WORKER_COUNT"
"""How many processes share a node without a launcher, each of which takes itself for the only one. Source:
pytest-xdist, "How-tos", "Identifying the worker process during a test"."""

TREE = Tree()
"""Where it is read from, unless the caller says otherwise."""


@dataclass(frozen=True, kw_only=True)
class GpuPath:
    """A GPU of this node and the way to it. ``node``: its NUMA node; None where the kernel knows of none."""

    who: Identity
    node: int | None
    path: PciPath | None


@dataclass(frozen=True, kw_only=True)
class HostFacts:
    """What one rank tells of its node.

    Attributes:
        host: its name.
        ranks: processes that share it.
        machine: kind of CPU, such as ``x86_64``.
        own_cpus: where this rank may run.
        limits: None if the kernel does not tell.
        gpus: of all ranks here.
    """

    host: str
    ranks: int
    machine: str
    own_cpus: frozenset[int]
    limits: ProcessLimits | None
    cgroup: Cgroup
    memory: Memory
    processors: Processors
    gpus: tuple[GpuPath, ...] = ()

    @property
    def cpus(self) -> float | None:
        """How many CPUs' time all ranks can have together; None if that is not known.

        Not the CPUs of this rank: a launcher that binds ranks gives each a part of them.
        """
        there = self.cgroup.cpuset or self.processors.online
        told = (None if there is None else float(len(there)), self.cgroup.cpus)
        return min((number for number in told if number is not None), default=None)

    @property
    def cpus_per_rank(self) -> float | None:
        """The time that a rank can count on: its part of all, and no more than the CPUs that it may run on."""
        return None if self.cpus is None else min(self.cpus / self.ranks, float(len(self.own_cpus)))

    @property
    def memory_bytes(self) -> int | None:
        """Memory that all ranks can have together."""
        told = (self.memory.total_bytes, self.cgroup.memory_bytes)
        return min((number for number in told if number is not None), default=None)

    @property
    def shm_bytes(self) -> int | None:
        """What all ranks can still put into /dev/shm: it counts as memory of the control group."""
        if self.memory.shm is None:
            return None
        free = self.memory.shm.free_bytes
        return free if self.cgroup.memory_bytes is None else min(free, self.cgroup.memory_bytes)

    @property
    def nofile(self) -> int | None:
        """Files that a rank can have open."""
        if self.limits is None:
            return None
        return self.limits.files_at_most if self.limits.nofile.soft is None else self.limits.nofile.soft

    @property
    def memlock_ratio(self) -> float | None:
        """The part of the node's memory that a rank may lock."""
        if self.limits is None or self.memory_bytes is None:
            return None
        allowed = self.limits.memlock.soft
        return 1.0 if allowed is None or self.limits.may_lock_all else min(1.0, allowed / self.memory_bytes)

    @property
    def tasks(self) -> int | None:
        """Processes and threads that all ranks can have together."""
        if self.limits is None:
            return None
        told = (self.limits.nproc.soft, self.limits.tasks_at_most, self.cgroup.tasks)
        return min((number for number in told if number is not None), default=None)


def gather(
    inventory: Sequence[Mapping[str, Any]],
    *,
    rank: int,
    environ: Mapping[str, str] = os.environ,
    tree: Tree | None = None,
    space: Space = limits.space,
) -> HostFacts:
    """Read all that is known of this rank's node. It takes milliseconds, and writes nothing.

    Args:
        inventory: what every rank has said of itself (``inventory.identify``).
        rank: which of them this is.
        environ: the environment, for the number of workers.
        tree: where to read; by default ``TREE``.
        space: how large a file system is.
    """
    tree = TREE if tree is None else tree
    me = next(who for who in inventory if who["rank"] == rank)
    here = [who for who in inventory if (who["host"], who["node_rank"]) == (me["host"], me["node_rank"])]
    workers = environ.get(WORKERS, "")
    return HostFacts(
        host=str(me["host"]),
        ranks=max(len(here), int(workers) if workers.isdecimal() else 1),
        machine=platform.machine(),
        own_cpus=frozenset(os.sched_getaffinity(0)),
        limits=limits.read_process_limits(tree),
        cgroup=limits.read_cgroup(tree),
        memory=limits.read_memory(tree, space),
        processors=limits.read_processors(tree),
        gpus=tuple(_gpu(tree, who) for who in here if who["gpu"]),
    )


def _gpu(tree: Tree, who: Mapping[str, Any]) -> GpuPath:
    named = identity(who)
    place = place_of_gpu(named.pci, tree.path(str(DEVICES)))
    return GpuPath(who=named, node=min(place.nodes) if place else None, path=pci.read_pci_path(tree, named.pci))
