"""One frozen snapshot of a node's host: the limits of this process, also by its control group, CPUs, memory, GPUs.

A container's limits are those of its control group. Memory includes /dev/shm and huge pages.

Control groups: version 1 has a tree for each controller, version 2 one for all, and a host can have both. A limit
applies to everything below it, so the lowest one on the path to the root counts.
Sources: Linux kernel, Documentation/admin-guide/cgroup-v2.rst (memory.max, cpu.max, pids.max, cpuset.cpus.effective)
and Documentation/admin-guide/cgroup-v1/ (memory.limit_in_bytes, cpu.cfs_quota_us, pids.max, cpuset.effective_cpus).
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

from pytest_gpucluster.files import Mount
from pytest_gpucluster.metrics.finding import Identity, identity
from pytest_gpucluster.metrics.stats import grouped
from pytest_gpucluster.node import pci
from pytest_gpucluster.node.pci import PciPath
from pytest_gpucluster.node.sysfs import Tree

N = TypeVar("N", int, float)

_UNLIMITED_BYTES = 2**62
"""Version 1 reports unlimited memory as the largest number of pages, about 2**63 bytes."""


@dataclass(frozen=True, kw_only=True)
class Cgroup:
    """The lowest limits on the path to the root; None where there is none.

    Attributes:
        versions: of the trees that could be read; if empty, a None means nothing.
        memory_bytes: all memory of the group, its part of /dev/shm included.
        cpus: the quota of CPU time in CPUs, such as 7.5.
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
        memory_bytes=_lowest(tree, folders, "memory", {2: "memory.max", 1: "memory.limit_in_bytes"}),
        cpus=least(_cpus(tree, *folder) for folder in folders),
        tasks=_lowest(tree, folders, "pids", {2: "pids.max", 1: "pids.max"}),
        cpuset=_cpuset(tree, folders),
    )


def _folders(tree: Tree) -> Iterator[tuple[int, frozenset[str], str]]:
    """Yield each group of this process and those above it: version, controllers, folder. The lowest come first."""
    mounts = tree.mounts()
    for line in (tree.text("/proc/self/cgroup") or "").splitlines():
        _, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        controllers = frozenset(filter(None, names.split(",")))
        version = 1 if controllers else 2
        for mount in mounts:
            fits = (
                mount.kind == "cgroup2" if version == 2 else mount.kind == "cgroup" and controllers <= {*mount.options}
            )
            if not fits:
                continue
            for folder in _ancestors(mount, path):
                if tree.has(folder):
                    yield version, controllers, folder


def _ancestors(mount: Mount, path: str) -> list[str]:
    """Return the folders from a group's own to the mount point."""
    try:
        inside = PurePosixPath(path).relative_to(mount.root)
    except ValueError:  # a group outside of this mount, as in some containers: use the mount point
        inside = PurePosixPath()
    if ".." in inside.parts:
        inside = PurePosixPath()
    own = PurePosixPath(mount.point) / inside
    return [str(own), *(str(above) for above in own.parents if above.is_relative_to(mount.point))]


def _lowest(
    tree: Tree, folders: Iterable[tuple[int, frozenset[str], str]], controller: str, files: Mapping[int, str]
) -> int | None:
    """Return the lowest limit of a controller, from its file in each version; "max" is no number."""
    numbers = (
        tree.number(f"{folder}/{files[version]}")
        for version, controllers, folder in folders
        if version == 2 or controller in controllers
    )
    return least(number for number in numbers if number is not None and number < _UNLIMITED_BYTES)


def _cpus(tree: Tree, version: int, controllers: frozenset[str], folder: str) -> float | None:
    if version == 2:
        quota, _, period = (tree.text(f"{folder}/cpu.max") or "").partition(" ")
        return int(quota) / int(period) if quota.isdecimal() and period.isdecimal() and int(period) else None
    if "cpu" not in controllers:
        return None
    allowed, per = tree.number(f"{folder}/cpu.cfs_quota_us"), tree.number(f"{folder}/cpu.cfs_period_us")
    return allowed / per if allowed is not None and per and allowed > 0 else None  # -1: no quota


def _cpuset(tree: Tree, folders: Iterable[tuple[int, frozenset[str], str]]) -> frozenset[int] | None:
    """Return the CPUs of the lowest group that has them: its effective set includes the limits above."""
    for version, controllers, folder in folders:
        names = ("cpuset.cpus.effective",) if version == 2 else ("cpuset.effective_cpus", "cpuset.cpus")
        if version == 1 and "cpuset" not in controllers:
            continue
        for name in names:
            if tree.text(f"{folder}/{name}"):
                return tree.numbers(f"{folder}/{name}")
    return None


def least(limits: Iterable[N | None]) -> N | None:
    """Return the lowest known limit."""
    return min((limit for limit in limits if limit is not None), default=None)


IPC_LOCK = 14
"""Number of the capability by which a process may lock any amount of memory. Source: capabilities(7); Linux kernel,
include/uapi/linux/capability.h, CAP_IPC_LOCK."""


@dataclass(frozen=True, kw_only=True)
class Limit:
    """The soft and the hard limit. None: unlimited."""

    soft: int | None
    hard: int | None


@dataclass(frozen=True, kw_only=True)
class ProcessLimits:
    """Limits of this process.

    Attributes:
        nofile: open files.
        memlock: locked memory in bytes. RDMA buffers count, CUDA's pinned memory does not.
        nproc: processes and threads of this user.
        may_lock_all: the process has CAP_IPC_LOCK, which overrides memlock.
        max_files: what "unlimited" open files are (``fs.nr_open``); None if unknown.
        max_tasks: of the whole node (threads-max, pid_max); None if unknown.
    """

    nofile: Limit
    memlock: Limit
    nproc: Limit
    may_lock_all: bool = False
    max_files: int | None = None
    max_tasks: int | None = None


def read_process_limits(tree: Tree) -> ProcessLimits | None:
    """Read the limits of this process; None if the kernel does not report them.

    Source: proc_pid_limits(5), proc_sys_fs(5), proc_sys_kernel(5).
    """
    text = tree.text("/proc/self/limits") or ""
    titles = ("Max open files", "Max locked memory", "Max processes")
    nofile, memlock, nproc = (_limit(text, title) for title in titles)
    if nofile is None or memlock is None or nproc is None:
        return None
    of_node = (tree.number(f"/proc/sys/kernel/{name}") for name in ("threads-max", "pid_max"))
    return ProcessLimits(
        nofile=nofile,
        memlock=memlock,
        nproc=nproc,
        may_lock_all=_may_lock_all(tree),
        max_files=tree.number("/proc/sys/fs/nr_open"),
        max_tasks=least(of_node),
    )


def _limit(text: str, title: str) -> Limit | None:
    found = re.search(rf"^{title} +(\d+|unlimited) +(\d+|unlimited)\b", text, re.MULTILINE)
    if found is None:
        return None
    soft, hard = (None if value == "unlimited" else int(value) for value in found.groups())
    return Limit(soft=soft, hard=hard)


def _may_lock_all(tree: Tree) -> bool:
    """Whether the process has the capability on the host.

    In a user namespace, such as a rootless container's, it does not count.
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


_NODES = "/sys/devices/system/node"
_MODEL = re.compile(r"^(?:model name|Model|cpu model|uarch|Processor)\s*:\s*(.+)$", re.MULTILINE)
"""x86 and others. An Arm kernel reports the vendor's numbers only, which are used instead."""


@dataclass(frozen=True, kw_only=True)
class NumaNode:
    """A NUMA node; ``cpus`` is a list as the kernel writes it, ``distances`` are to all nodes."""

    node: int
    cpus: str | None
    memory_total_bytes: int | None
    memory_free_bytes: int | None
    distances: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Processors:
    """The CPUs as the kernel reports them; None where it does not.

    Attributes:
        model: such as "Intel(R) Xeon(R) Platinum 8480+".
        online: CPUs that run.
        offline: CPUs that are switched off.
        sockets: packages of the online CPUs.
        siblings: online CPU -> the threads of its core, itself included.
        max_mhz: the highest clock.
        governors: CPU frequency governor -> its CPUs; empty where the kernel has none, as in most virtual machines.
        autonomous: the CPUs whose driver has a "powersave" of its own, which follows the load and does not keep the
            lowest clock.
        nodes: NUMA nodes.
        numa_balancing: 0 is off.
    """

    online: frozenset[int] | None
    model: str | None = None
    offline: frozenset[int] = frozenset()
    sockets: int | None = None
    siblings: Mapping[int, frozenset[int] | None] = field(default_factory=dict)
    max_mhz: float | None = None
    governors: Mapping[str, frozenset[int]] = field(default_factory=dict)
    autonomous: frozenset[int] = frozenset()
    nodes: tuple[NumaNode, ...] = ()
    numa_balancing: int | None = None

    def cores(self, cpus: Iterable[int] | None = None) -> int | None:
        """Return the number of cores of these CPUs, by default of all that are online; None if one is unknown."""
        cores = {self.siblings.get(cpu) for cpu in (self.siblings if cpus is None else cpus)}
        return None if None in cores or not cores else len(cores)


def read_processors(tree: Tree) -> Processors:
    """Read the CPUs and NUMA nodes.

    Source: Linux kernel, Documentation/admin-guide/cputopology.rst, Documentation/admin-guide/pm/cpufreq.rst
    (scaling_governor), Documentation/admin-guide/sysctl/kernel.rst (numa_balancing) and
    Documentation/ABI/stable/sysfs-devices-node.
    """
    online = tree.numbers(f"{CPUS}/online")
    folders = {cpu: f"{CPUS}/cpu{cpu}" for cpu in sorted(online or ())}
    of_cpu = {cpu: tree.text(f"{folder}/cpufreq/scaling_governor") for cpu, folder in folders.items()}
    governors = grouped((governor, cpu) for cpu, governor in of_cpu.items() if governor)
    drivers = {cpu: tree.text(f"{folders[cpu]}/cpufreq/scaling_driver") for cpus in governors.values() for cpu in cpus}
    sockets = {tree.text(f"{folder}/topology/physical_package_id") for folder in folders.values()}
    kilohertz = (tree.number(f"{folder}/cpufreq/cpuinfo_max_freq") for folder in folders.values())
    return Processors(
        model=_model(tree.text("/proc/cpuinfo") or ""),
        online=online,
        offline=tree.numbers(f"{CPUS}/offline") or frozenset(),
        sockets=None if None in sockets or not sockets else len(sockets),
        siblings={cpu: tree.numbers(f"{folder}/topology/thread_siblings_list") for cpu, folder in folders.items()},
        max_mhz=max((number / 1000 for number in kilohertz if number is not None), default=None),
        governors={governor: frozenset(cpus) for governor, cpus in governors.items()},
        autonomous=frozenset(cpu for cpu, driver in drivers.items() if driver in _AUTONOMOUS),
        nodes=tuple(_numa_node(tree, node) for node in sorted(tree.numbers(f"{_NODES}/online") or ())),
        numa_balancing=tree.number("/proc/sys/kernel/numa_balancing"),
    )


def _model(cpuinfo: str) -> str | None:
    found = _MODEL.search(cpuinfo)
    if found:
        return " ".join(found[1].split())
    arm = (re.search(rf"^({name})\s*:\s*(\S+)", cpuinfo, re.MULTILINE) for name in ("CPU implementer", "CPU part"))
    return ", ".join(f"{each[1]} {each[2]}" for each in arm if each) or None


def _numa_node(tree: Tree, node: int) -> NumaNode:
    folder = f"{_NODES}/node{node}"
    return NumaNode(
        node=node,
        cpus=tree.text(f"{folder}/cpulist"),
        memory_total_bytes=tree.meminfo("MemTotal", f"{folder}/meminfo"),
        memory_free_bytes=tree.meminfo("MemFree", f"{folder}/meminfo"),
        distances=tuple(int(word) for word in (tree.text(f"{folder}/distance") or "").split() if word.isdecimal()),
    )


SHM = "/dev/shm"

Space = Callable[[Path], tuple[int, int]]
"""Returns the size and the free bytes of a file system. Raises OSError."""


@dataclass(frozen=True, kw_only=True)
class SharedMemory:
    """The file system at /dev/shm. ``kind`` is ``tmpfs`` as a rule; None if it is not a mount of its own."""

    kind: str | None
    total_bytes: int
    free_bytes: int


_HUGE = "/sys/kernel/mm/hugepages"


@dataclass(frozen=True, kw_only=True)
class HugePages:
    """Huge pages of one size."""

    size_bytes: int
    total: int | None
    free: int | None


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Memory of the node; None where unknown.

    Attributes:
        shm: None if there is no /dev/shm.
        transparent: transparent huge pages: ``always``, ``madvise`` or ``never``.
    """

    total_bytes: int | None
    available_bytes: int | None = None
    swap_total_bytes: int | None = None
    swap_free_bytes: int | None = None
    shm: SharedMemory | None
    transparent: str | None
    huge_pages: tuple[HugePages, ...] = ()


STATVFS: Callable[[Path], os.statvfs_result] = os.statvfs
"""The state of a file system. The simulation replaces it."""


def space(path: Path) -> tuple[int, int]:
    """Return the size of a file system and the bytes that this user may still use."""
    status = STATVFS(path)
    return status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize


def read_memory(tree: Tree, space: Space = space) -> Memory:
    """Read the memory.

    Source: proc_meminfo(5); Linux kernel, Documentation/admin-guide/mm/hugetlbpage.rst and transhuge.rst, where the
    active word is in brackets.
    """
    chosen = re.search(r"\[(\w+)\]", tree.text("/sys/kernel/mm/transparent_hugepage/enabled") or "")
    return Memory(
        total_bytes=tree.meminfo("MemTotal"),
        available_bytes=tree.meminfo("MemAvailable"),
        swap_total_bytes=tree.meminfo("SwapTotal"),
        swap_free_bytes=tree.meminfo("SwapFree"),
        shm=_shm(tree, space),
        transparent=chosen[1] if chosen else None,
        huge_pages=tuple(_huge_pages(tree)),
    )


def _huge_pages(tree: Tree) -> Iterator[HugePages]:
    names = (re.fullmatch(r"hugepages-(\d+)kB", name) for name in tree.entries(_HUGE))
    for size in sorted(int(found[1]) for found in names if found):
        total, free = (tree.number(f"{_HUGE}/hugepages-{size}kB/{name}") for name in ("nr_hugepages", "free_hugepages"))
        yield HugePages(size_bytes=size * 1024, total=total, free=free)


def _shm(tree: Tree, space: Space) -> SharedMemory | None:
    try:
        total, free = space(tree.path(SHM))
    except OSError:
        return None
    kinds = [mount.kind for mount in tree.mounts() if mount.point == SHM]
    return SharedMemory(kind=kinds[-1] if kinds else None, total_bytes=total, free_bytes=free)


WORKERS = "PYTEST_XDIST_WORKER_COUNT"
"""Number of worker processes on a node without a launcher. Source:
pytest-xdist, "How-tos", "Identifying the worker process during a test"."""


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


def read_node(tree: Tree | None = None, *, host: str = "", ranks: int = 1, space: Space = space) -> NodeSnapshot:
    """Read a node without its GPUs, within milliseconds."""
    tree = tree or Tree()
    return NodeSnapshot(
        host=host,
        ranks=ranks,
        machine=platform.machine(),
        own_cpus=tree.own_cpus(),
        limits=read_process_limits(tree),
        cgroup=read_cgroup(tree),
        memory=read_memory(tree, space),
        processors=read_processors(tree),
        hcas=tuple(tree.entries("/sys/class/infiniband")),
        verbs=tuple(name for name in tree.entries("/dev/infiniband") if name.startswith("uverbs")),
    )


def collect_node(
    inventory: Sequence[Mapping[str, Any]],
    *,
    rank: int,
    environ: Mapping[str, str] = os.environ,
    tree: Tree | None = None,
    space: Space = space,
) -> NodeSnapshot:
    """Read this rank's node, with its GPUs."""
    tree = tree or Tree()
    me = next(who for who in inventory if who["rank"] == rank)
    here = [who for who in inventory if (who["host"], who["node_rank"]) == (me["host"], me["node_rank"])]
    workers = environ.get(WORKERS, "")
    ranks = max(len(here), int(workers) if workers.isdecimal() else 1)
    snapshot = read_node(tree, host=str(me["host"]), ranks=ranks, space=space)
    gpus = [identity(who) for who in here if who["gpu"]]
    return replace(snapshot, gpus=tuple(GpuPath(who=gpu, path=pci.read_pci_path(tree, gpu.pci)) for gpu in gpus))
