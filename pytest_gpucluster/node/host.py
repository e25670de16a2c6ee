"""One frozen snapshot of a node's host, for host checks, pods, Slurm's allocation and ``node info``."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pytest_gpucluster.metrics.finding import Identity, identity
from pytest_gpucluster.node import limits, pci
from pytest_gpucluster.node.limits import Cgroup, Memory, ProcessLimits, Processors, Space, least
from pytest_gpucluster.node.pci import PciPath
from pytest_gpucluster.node.sysfs import Tree

WORKERS = "PYTEST_XDIST_WORKER_COUNT"
"""Number of worker processes on a node without a launcher. Source:
pytest-xdist, "How-tos", "Identifying the worker process during a test"."""

TREE = Tree()
"""Where facts are read, unless the caller gives another tree."""


@dataclass(frozen=True, kw_only=True)
class GpuPath:
    """A GPU of this node and its PCIe path."""

    who: Identity
    path: PciPath | None


@dataclass(frozen=True, kw_only=True)
class NodeSnapshot:
    """A node as one of its processes sees it.

    Attributes:
        host: its name.
        ranks: processes that share it.
        machine: CPU architecture, such as ``x86_64``.
        own_cpus: where this rank may run.
        limits: None if the kernel does not report them.
        hcas: RDMA devices of the node; ``verbs``: those that this process may open.
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
    hcas: tuple[str, ...] = ()
    verbs: tuple[str, ...] = ()
    gpus: tuple[GpuPath, ...] = ()

    @property
    def cpus(self) -> float | None:
        """CPU time of all ranks together, in CPUs; None if unknown.

        Not the CPUs of this rank: a launcher that binds ranks gives each a part of them.
        """
        available = self.cgroup.cpuset or self.processors.online
        return least([None if available is None else float(len(available)), self.cgroup.cpus])

    @property
    def cpus_per_rank(self) -> float | None:
        """CPUs of one rank: its part of all, and at most those that it may run on."""
        return None if self.cpus is None else min(self.cpus / self.ranks, float(len(self.own_cpus)))

    @property
    def memory_bytes(self) -> int | None:
        """Memory of all ranks together."""
        return least([self.memory.total_bytes, self.cgroup.memory_bytes])

    @property
    def shm_bytes(self) -> int | None:
        """Free space of /dev/shm for all ranks; it counts as memory of the control group."""
        if self.memory.shm is None:
            return None
        free = self.memory.shm.free_bytes
        return free if self.cgroup.memory_bytes is None else min(free, self.cgroup.memory_bytes)

    @property
    def nofile(self) -> int | None:
        """Open files of one rank."""
        if self.limits is None:
            return None
        return self.limits.max_files if self.limits.nofile.soft is None else self.limits.nofile.soft

    @property
    def memlock_ratio(self) -> float | None:
        """Part of the node's memory that a rank may lock."""
        if self.limits is None or self.memory_bytes is None:
            return None
        allowed = self.limits.memlock.soft
        return 1.0 if allowed is None or self.limits.may_lock_all else min(1.0, allowed / self.memory_bytes)

    @property
    def tasks(self) -> int | None:
        """Processes and threads of all ranks together."""
        if self.limits is None:
            return None
        return least([self.limits.nproc.soft, self.limits.max_tasks, self.cgroup.tasks])


def read_node(tree: Tree | None = None, *, host: str = "", ranks: int = 1, space: Space = limits.space) -> NodeSnapshot:
    """Read a node without its GPUs, within milliseconds.

    Args:
        tree: where to read; by default ``TREE``.
        host, ranks: as in :class:`NodeSnapshot`.
        space: returns size and free bytes of a file system.
    """
    tree = TREE if tree is None else tree
    return NodeSnapshot(
        host=host,
        ranks=ranks,
        machine=platform.machine(),
        own_cpus=frozenset(os.sched_getaffinity(0)),
        limits=limits.read_process_limits(tree),
        cgroup=limits.read_cgroup(tree),
        memory=limits.read_memory(tree, space),
        processors=limits.read_processors(tree),
        hcas=tuple(tree.entries("/sys/class/infiniband")),
        verbs=tuple(name for name in tree.entries("/dev/infiniband") if name.startswith("uverbs")),
    )


def collect_node(
    inventory: Sequence[Mapping[str, Any]],
    *,
    rank: int,
    environ: Mapping[str, str] = os.environ,
    tree: Tree | None = None,
    space: Space = limits.space,
) -> NodeSnapshot:
    """Read this rank's node, with its GPUs.

    Args:
        inventory: of every rank (``inventory.identify``).
        rank: this one.
        environ: the environment, for the number of workers.
        tree, space: as for :func:`read_node`.
    """
    tree = TREE if tree is None else tree
    me = next(who for who in inventory if who["rank"] == rank)
    here = [who for who in inventory if (who["host"], who["node_rank"]) == (me["host"], me["node_rank"])]
    workers = environ.get(WORKERS, "")
    ranks = max(len(here), int(workers) if workers.isdecimal() else 1)
    snapshot = read_node(tree, host=str(me["host"]), ranks=ranks, space=space)
    return replace(snapshot, gpus=tuple(_gpu(tree, who) for who in here if who["gpu"]))


def _gpu(tree: Tree, who: Mapping[str, Any]) -> GpuPath:
    gpu = identity(who)
    return GpuPath(who=gpu, path=pci.read_pci_path(tree, gpu.pci))
