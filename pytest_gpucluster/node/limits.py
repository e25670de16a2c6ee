"""What the kernel lets this process use: limits of its control group and of the process, CPUs, and host memory.

The files are read below one root (:class:`Tree`), so that tests can plant their own: what is not there is None, never a
guess. A container's limits are those of its control group. Memory includes the part of it that files in /dev/shm may
take, and huge pages.

Control groups: version 1 has a tree for each controller, version 2 one for all, and a host can have both. A limit holds
for everything below it, so the tightest on the way up decides.
Sources: Linux kernel, Documentation/admin-guide/cgroup-v2.rst (memory.max, cpu.max, pids.max, cpuset.cpus.effective)
and Documentation/admin-guide/cgroup-v1/ (memory.limit_in_bytes, cpu.cfs_quota_us, pids.max, cpuset.effective_cpus).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TypeVar

from pytest_gpucluster import files
from pytest_gpucluster.files import Mount
from pytest_gpucluster.node.numa import parse

_NUMBER = re.compile(r"-?[0-9]+")


@dataclass(frozen=True, kw_only=True)
class Tree:
    """A tree of files as the kernel shows it below ``/``."""

    root: Path = Path("/")

    def path(self, absolute: str) -> Path:
        """Return where ``/proc/...`` or ``/sys/...`` is below the root."""
        return self.root / absolute.lstrip("/")

    def has(self, absolute: str) -> bool:
        """Tell whether there is such a file or folder; what this process may not look at is as good as not there."""
        # Path.exists raises where a folder above is closed to this user.
        return os.path.exists(self.path(absolute))

    def text(self, absolute: str) -> str | None:
        """Return a file's text without the space around it; None if it cannot be read."""
        try:
            return self.path(absolute).read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            return None

    def number(self, absolute: str) -> int | None:
        """Return the whole number that a file holds; None if there is none."""
        text = self.text(absolute)
        return int(text) if text is not None and _NUMBER.fullmatch(text) else None

    def numbers(self, absolute: str) -> frozenset[int] | None:
        """Return the set of CPUs or nodes that a file lists; None if it does not."""
        text = self.text(absolute)
        try:
            return None if text is None else parse(text)
        except ValueError:
            return None

    def mounts(self) -> tuple[Mount, ...]:
        """Return what this process sees mounted, in the order of mounting; nothing if the kernel does not tell."""
        try:
            return files.read_mounts(self.path(str(files.MOUNTINFO)))
        except OSError:
            return ()


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


def read_cgroup(tree: Tree) -> Cgroup:
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


IPC_LOCK = 14
"""Number of the capability by which a process may lock any amount of memory. Source: capabilities(7); Linux kernel,
include/uapi/linux/capability.h, CAP_IPC_LOCK."""

_NAMES = {"nofile": "Max open files", "memlock": "Max locked memory", "nproc": "Max processes"}


@dataclass(frozen=True, kw_only=True)
class Limit:
    """The limit in force, and how far the process could raise it itself. None: unlimited."""

    soft: int | None
    hard: int | None


@dataclass(frozen=True, kw_only=True)
class ProcessLimits:
    """Limits of this process.

    Attributes:
        nofile: open files.
        memlock: locked memory in bytes. RDMA counts registered buffers against it, CUDA's pinned memory does not.
        nproc: processes and threads of this user.
        may_lock_all: the process has CAP_IPC_LOCK, by which memlock does not hold.
        files_at_most: what "unlimited" open files are (``fs.nr_open``); None if the kernel does not tell.
        tasks_at_most: what the kernel has numbers for, and lets run, on the whole node; None if it does not tell.
    """

    nofile: Limit
    memlock: Limit
    nproc: Limit
    may_lock_all: bool = False
    files_at_most: int | None = None
    tasks_at_most: int | None = None


def read_process_limits(tree: Tree) -> ProcessLimits | None:
    """Read the limits of this process; None if the kernel does not tell.

    Source: proc_pid_limits(5), proc_sys_fs(5), proc_sys_kernel(5).
    """
    text = tree.text("/proc/self/limits") or ""
    found = {name: _limit(text, title) for name, title in _NAMES.items()}
    nofile, memlock, nproc = found["nofile"], found["memlock"], found["nproc"]
    if nofile is None or memlock is None or nproc is None:
        return None
    of_node = (tree.number(f"/proc/sys/kernel/{name}") for name in ("threads-max", "pid_max"))
    return ProcessLimits(
        nofile=nofile,
        memlock=memlock,
        nproc=nproc,
        may_lock_all=_may_lock_all(tree),
        files_at_most=tree.number("/proc/sys/fs/nr_open"),
        tasks_at_most=min((number for number in of_node if number is not None), default=None),
    )


def _limit(text: str, title: str) -> Limit | None:
    found = re.search(rf"^{title} +(\d+|unlimited) +(\d+|unlimited)\b", text, re.MULTILINE)
    if found is None:
        return None
    soft, hard = (None if written == "unlimited" else int(written) for written in found.groups())
    return Limit(soft=soft, hard=hard)


def _may_lock_all(tree: Tree) -> bool:
    """Tell whether the process has the capability, and has it on the host.

    In a user namespace, as of a rootless container, it does not count: the kernel asks for the host's.
    Source: Linux kernel, drivers/infiniband/core/umem.c, ib_umem_get: ``capable(CAP_IPC_LOCK)``.
    """
    found = re.search(r"^CapEff:\s*([0-9a-fA-F]+)$", tree.text("/proc/self/status") or "", re.MULTILINE)
    mapped = (tree.text("/proc/self/uid_map") or "").split()
    on_host = mapped in ([], ["0", "0", "4294967295"])  # a kernel without user namespaces has no such file
    return found is not None and bool(int(found[1], 16) >> IPC_LOCK & 1) and on_host


CPUS = "/sys/devices/system/cpu"
_AUTONOMOUS = ("intel_pstate", "amd-pstate-epp", "amd_pstate_epp")
"""``scaling_driver`` in the active mode, in which the driver or the CPU itself follows the load, also with "powersave";
in the passive mode it is intel_cpufreq or amd-pstate. Source: Linux kernel,
Documentation/admin-guide/pm/intel_pstate.rst (Active Mode) and amd-pstate.rst (Active Mode)."""


@dataclass(frozen=True, kw_only=True)
class Processors:
    """What the kernel tells of the CPUs. None: it does not.

    Attributes:
        online: CPUs that run.
        offline: CPUs that are there and switched off.
        governors: what chooses the clock -> the CPUs that it does so for; empty where the clock is not the kernel's to
            choose, as in most virtual machines.
        autonomous: of these the CPUs whose driver has a governor "powersave" that is another one than the kernel's: it
            does not keep the lowest clock.
        nodes: NUMA nodes.
        numa_balancing: whether the kernel moves memory after the threads that use it: 0 is no.
    """

    online: frozenset[int] | None
    offline: frozenset[int] = frozenset()
    governors: Mapping[str, frozenset[int]] = field(default_factory=dict)
    autonomous: frozenset[int] = frozenset()
    nodes: frozenset[int] | None = None
    numa_balancing: int | None = None


def read_processors(tree: Tree) -> Processors:
    """Read what the kernel tells of the CPUs.

    Source: Linux kernel, Documentation/admin-guide/cputopology.rst, Documentation/admin-guide/pm/cpufreq.rst
    (scaling_governor) and Documentation/admin-guide/sysctl/kernel.rst (numa_balancing).
    """
    online = tree.numbers(f"{CPUS}/online")
    governors: dict[str, set[int]] = {}
    autonomous: set[int] = set()
    for cpu in sorted(online or ()):
        governor = tree.text(f"{CPUS}/cpu{cpu}/cpufreq/scaling_governor")
        if governor:
            governors.setdefault(governor, set()).add(cpu)
            if tree.text(f"{CPUS}/cpu{cpu}/cpufreq/scaling_driver") in _AUTONOMOUS:
                autonomous.add(cpu)
    return Processors(
        online=online,
        offline=tree.numbers(f"{CPUS}/offline") or frozenset(),
        governors={governor: frozenset(cpus) for governor, cpus in governors.items()},
        autonomous=frozenset(autonomous),
        nodes=tree.numbers("/sys/devices/system/node/online"),
        numa_balancing=tree.number("/proc/sys/kernel/numa_balancing"),
    )


SHM = "/dev/shm"

Space = Callable[[Path], tuple[int, int]]
"""Tells the bytes that a file system has, and those of them that are free. Raises OSError."""


@dataclass(frozen=True, kw_only=True)
class SharedMemory:
    """The file system at /dev/shm. ``kind`` is ``tmpfs`` where it is memory; None if it is no mount of its own."""

    kind: str | None
    total_bytes: int
    free_bytes: int


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Memory of the node as the kernel counts it.

    Attributes:
        total_bytes: None if the kernel does not tell.
        shm: None if there is no /dev/shm.
        transparent: how transparent huge pages are given: ``always``, ``madvise`` or ``never``; None if not told.
        reserved_pages: huge pages that are set aside, which nothing else can use; None if not told.
    """

    total_bytes: int | None
    shm: SharedMemory | None
    transparent: str | None
    reserved_pages: int | None


def space(path: Path) -> tuple[int, int]:
    """Return the bytes of a file system, and those of them that this user may still take."""
    told = os.statvfs(path)
    return told.f_blocks * told.f_frsize, told.f_bavail * told.f_frsize


def read_memory(tree: Tree, space: Space = space) -> Memory:
    """Read what the kernel tells of memory.

    Source: proc_meminfo(5); Linux kernel, Documentation/admin-guide/mm/transhuge.rst, where the chosen word is the
    one in brackets.
    """
    chosen = re.search(r"\[(\w+)\]", tree.text("/sys/kernel/mm/transparent_hugepage/enabled") or "")
    kilobytes = _of_meminfo(tree, "MemTotal")
    return Memory(
        total_bytes=None if kilobytes is None else kilobytes * 1024,
        shm=_shm(tree, space),
        transparent=chosen[1] if chosen else None,
        reserved_pages=_of_meminfo(tree, "HugePages_Total"),
    )


def _shm(tree: Tree, space: Space) -> SharedMemory | None:
    try:
        total, free = space(tree.path(SHM))
    except OSError:
        return None
    kinds = [mount.kind for mount in tree.mounts() if mount.point == SHM]
    return SharedMemory(kind=kinds[-1] if kinds else None, total_bytes=total, free_bytes=free)


def _of_meminfo(tree: Tree, name: str) -> int | None:
    found = re.search(rf"^{name}:\s+(\d+)", tree.text("/proc/meminfo") or "", re.MULTILINE)
    return int(found[1]) if found else None
