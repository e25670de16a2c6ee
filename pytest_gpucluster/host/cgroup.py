"""What the control group of this process allows: memory, CPUs, tasks. A container's limits are these.

Version 1 has a tree for each controller, version 2 one for all, and a host can have both. A limit holds for everything
below it, so the tightest on the way up decides.

Sources: Linux kernel, Documentation/admin-guide/cgroup-v2.rst (memory.max, cpu.max, pids.max, cpuset.cpus.effective)
and Documentation/admin-guide/cgroup-v1/ (memory.limit_in_bytes, cpu.cfs_quota_us, pids.max, cpuset.effective_cpus).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TypeVar

from pytest_gpucluster.affinity import parse
from pytest_gpucluster.files import Mount
from pytest_gpucluster.host.tree import Tree

N = TypeVar("N", int, float)

_UNLIMITED_BYTES = 2**62
"""Version 1 has no word for unlimited memory: it gives the largest number of pages, about 2**63 bytes."""


@dataclass(frozen=True, kw_only=True)
class Cgroup:
    """The tightest limits on the way up; None where there is none.

    Attributes:
        versions: of the trees that could be looked at; empty if there was none, and then no None means anything.
        memory_bytes: all memory of the group, its part of /dev/shm included.
        cpus: how many CPUs' time the group gets, such as 7.5.
        tasks: processes and threads.
        cpuset: the CPUs that it may run on.
    """

    versions: tuple[int, ...] = ()
    memory_bytes: int | None = None
    cpus: float | None = None
    tasks: int | None = None
    cpuset: frozenset[int] | None = None


def read(tree: Tree) -> Cgroup:
    """Read the limits of this process's control groups."""
    folders = list(_folders(tree))
    return Cgroup(
        versions=tuple(sorted({version for version, _, _ in folders})),
        memory_bytes=_least(_memory(tree, *folder) for folder in folders),
        cpus=_least(_cpus(tree, *folder) for folder in folders),
        tasks=_least(_tasks(tree, *folder) for folder in folders),
        cpuset=_cpuset(tree, folders),
    )


def _folders(tree: Tree) -> Iterator[tuple[int, frozenset[str], str]]:
    """Yield each group of this process and those above it: version, controllers, folder. The lowest come first."""
    seen = tree.mounts()
    for line in (tree.text("/proc/self/cgroup") or "").splitlines():
        _, _, rest = line.partition(":")
        written, _, path = rest.partition(":")
        controllers = frozenset(filter(None, written.split(",")))
        version = 1 if controllers else 2
        for mount in seen:
            fits = (
                mount.kind == "cgroup2" if version == 2 else mount.kind == "cgroup" and controllers <= {*mount.options}
            )
            if not fits:
                continue
            for folder in _way_up(mount, path):
                if tree.has(folder):
                    yield version, controllers, folder


def _way_up(mount: Mount, path: str) -> list[str]:
    """Return the folders from a group's own up to the mount point."""
    try:
        inside = PurePosixPath(path).relative_to(mount.root)
    except ValueError:  # a group outside of what is mounted here, as in some containers: the mount is what there is
        inside = PurePosixPath()
    if ".." in inside.parts:
        inside = PurePosixPath()
    own = PurePosixPath(mount.point) / inside
    return [str(own), *(str(above) for above in own.parents if above.is_relative_to(mount.point))]


def _memory(tree: Tree, version: int, controllers: frozenset[str], folder: str) -> int | None:
    if version == 2:
        return tree.number(f"{folder}/memory.max")  # "max" is no number
    if "memory" not in controllers:
        return None
    limit = tree.number(f"{folder}/memory.limit_in_bytes")
    return None if limit is None or limit >= _UNLIMITED_BYTES else limit


def _cpus(tree: Tree, version: int, controllers: frozenset[str], folder: str) -> float | None:
    if version == 2:
        quota, _, period = (tree.text(f"{folder}/cpu.max") or "").partition(" ")
        return int(quota) / int(period) if quota.isdecimal() and period.isdecimal() and int(period) else None
    if "cpu" not in controllers:
        return None
    allowed, per = tree.number(f"{folder}/cpu.cfs_quota_us"), tree.number(f"{folder}/cpu.cfs_period_us")
    return allowed / per if allowed is not None and per and allowed > 0 else None  # -1: no quota


def _tasks(tree: Tree, version: int, controllers: frozenset[str], folder: str) -> int | None:
    return tree.number(f"{folder}/pids.max") if version == 2 or "pids" in controllers else None


def _cpuset(tree: Tree, folders: Iterable[tuple[int, frozenset[str], str]]) -> frozenset[int] | None:
    """Return the CPUs of the lowest group that tells: what is effective there holds the limits of those above."""
    for version, controllers, folder in folders:
        names = ("cpuset.cpus.effective",) if version == 2 else ("cpuset.effective_cpus", "cpuset.cpus")
        if version == 1 and "cpuset" not in controllers:
            continue
        for name in names:
            written = tree.text(f"{folder}/{name}")
            if written:
                return _cpus_of(written)
    return None


def _cpus_of(written: str) -> frozenset[int] | None:
    try:
        return parse(written)
    except ValueError:
        return None


def _least(limits: Iterable[N | None]) -> N | None:
    return min((limit for limit in limits if limit is not None), default=None)
