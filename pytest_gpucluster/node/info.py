"""The data of ``gpucluster node info``: system, CPUs, memory and mounts, and all parts together.

File systems are not accessed, only listed: a server that is down would block. GPUs are read in ``node.info_gpus``,
software and network in ``node.info_software``.
"""

from __future__ import annotations

import datetime
import os
import platform
import re
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pytest_gpucluster.launch.launchers import Allocation, allocation
from pytest_gpucluster.node import info_gpus, info_software, limits
from pytest_gpucluster.node.info_software import Answer, Run
from pytest_gpucluster.node.interfaces import Interface
from pytest_gpucluster.node.interfaces import interfaces as own_interfaces
from pytest_gpucluster.node.limits import Space
from pytest_gpucluster.node.processes import Process, find_process
from pytest_gpucluster.node.sysfs import Tree, format_ranges

_APPTAINER = ("APPTAINER_CONTAINER", "SINGULARITY_CONTAINER")


def read_system(tree: Tree, environ: Mapping[str, str], *, host: str, allocation: Allocation) -> dict[str, Any]:
    """Read the system.

    Returns:
        ``host``; ``system``, the distribution; ``kernel``; ``machine``, such as x86_64; ``uptime_seconds``; ``load``,
        runnable tasks averaged over 1, 5 and 15 minutes; ``root``, whether this process is root here; ``container``,
        of this process, null for none that is known; ``scheduler``.

    Source: os-release(5), proc_uptime(5), proc_loadavg(5).
    """
    return {
        "host": host,
        "system": _distribution(tree),
        "kernel": tree.text("/proc/sys/kernel/osrelease"),
        "machine": platform.machine(),
        "uptime_seconds": _first_number(tree.text("/proc/uptime")),
        "load": tree.load(),
        "root": os.geteuid() == 0,
        "container": container(tree, environ),
        "scheduler": _scheduler(environ, allocation),
    }


def container(tree: Tree, environ: Mapping[str, str]) -> str | None:
    """Return the container runtime of this process, or None where none is recognised.

    Source: systemd, "The Container Interface" (/run/systemd/container, /run/host); podman-run(1),
    /run/.containerenv; Docker makes /.dockerenv; Apptainer, "Environment and Metadata".
    """
    if "KUBERNETES_SERVICE_HOST" in environ:
        return "kubernetes"
    if any(environ.get(name) for name in _APPTAINER):
        return "apptainer"
    runtime = tree.text("/run/systemd/container") or environ.get("container", "")
    if runtime:
        return runtime
    if tree.has("/run/.containerenv"):
        return "podman"
    if tree.has("/.dockerenv"):
        return "docker"
    return None


def _distribution(tree: Tree) -> str | None:
    for path in ("/etc/os-release", "/usr/lib/os-release"):
        found = re.search(r'^PRETTY_NAME="?([^"\n]*)', tree.text(path) or "", re.MULTILINE)
        if found:
            return found[1]
    return None


def _scheduler(environ: Mapping[str, str], allocation: Allocation) -> dict[str, Any] | None:
    if allocation.name is None:
        return None
    names = {
        "job": "SLURM_JOB_ID",
        "partition": "SLURM_JOB_PARTITION",
        "nodes": "SLURM_JOB_NODELIST",
        "gpus": "SLURM_STEP_GPUS",
    }
    if allocation.name == "kubernetes":
        names = {"pod": "HOSTNAME", "namespace": "POD_NAMESPACE", "node": "NODE_NAME"}
    values = {key: environ.get(name) or None for key, name in names.items()}
    return {"name": allocation.name, "nnodes": allocation.nnodes, "gpus_per_node": allocation.gpus_per_node, **values}


def _first_number(text: str | None) -> float | None:
    found = re.match(r"\d+(\.\d+)?", text or "")
    return float(found[0]) if found else None


_NODES = "/sys/devices/system/node"
_MODEL = re.compile(r"^(?:model name|Model|cpu model|uarch|Processor)\s*:\s*(.+)$", re.MULTILINE)
"""x86 and others. An Arm kernel reports the vendor's numbers only, which are shown instead."""


def read_cpus(tree: Tree) -> dict[str, Any]:
    """Read the CPUs.

    Returns:
        ``model``; ``sockets``, ``cores``, ``cpus`` that are online, ``offline`` ones; ``cpus_allowed``, those that this
        process may run on, as the kernel writes a list; ``cpus_of_group``, the CPU quota of its control group, null for
        no limit; ``max_mhz``; ``governors``; ``numa_balancing``; ``numa_nodes``: each with ``node``, ``cpus``,
        ``memory_total_bytes``, ``memory_free_bytes`` and ``distances`` to all nodes.

    Source: Linux kernel, Documentation/admin-guide/cputopology.rst and Documentation/ABI/stable/sysfs-devices-node.
    """
    known = limits.read_processors(tree)
    online = sorted(known.online or ())
    return {
        "model": _model(tree),
        "sockets": _different(tree, online, "physical_package_id"),
        "cores": _different(tree, online, "thread_siblings_list"),
        "cpus": len(online) if known.online is not None else None,
        "offline": len(known.offline),
        "cpus_allowed": format_ranges(os.sched_getaffinity(0)),
        "cpus_of_group": limits.read_cgroup(tree).cpus,
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
    """Count the different values of a topology attribute of all CPUs; None where one is missing."""
    values = {tree.text(f"{limits.CPUS}/cpu{cpu}/topology/{name}") for cpu in cpus}
    return None if None in values or not values else len(values)


def _max_mhz(tree: Tree, cpus: Iterable[int]) -> float | None:
    kilohertz = (tree.number(f"{limits.CPUS}/cpu{cpu}/cpufreq/cpuinfo_max_freq") for cpu in cpus)
    return max((number / 1000 for number in kilohertz if number is not None), default=None)


def _node(tree: Tree, node: int) -> dict[str, Any]:
    folder = f"{_NODES}/node{node}"
    distances = tree.text(f"{folder}/distance") or ""
    return {
        "node": node,
        "cpus": tree.text(f"{folder}/cpulist"),
        "memory_total_bytes": tree.meminfo("MemTotal", f"{folder}/meminfo"),
        "memory_free_bytes": tree.meminfo("MemFree", f"{folder}/meminfo"),
        "distances": [int(word) for word in distances.split() if word.isdecimal()],
    }


_HUGE = "/sys/kernel/mm/hugepages"


def read_memory(tree: Tree, space: Space = limits.space) -> dict[str, Any]:
    """Read the memory.

    Returns:
        ``total_bytes``, ``available_bytes``, ``swap_total_bytes``, ``swap_free_bytes``; ``group_bytes``, the limit of
        the control group, null for none; ``shm``: ``kind``, ``total_bytes``, ``free_bytes`` of /dev/shm;
        ``transparent_huge_pages``; ``huge_pages``: for each size ``size_bytes``, ``total``, ``free``; ``limits``:
        ``nofile``, ``memlock_bytes`` and ``nproc``, each "unlimited" or a number, and ``may_lock_all``.

    Source: proc_meminfo(5); Linux kernel, Documentation/admin-guide/mm/hugetlbpage.rst.
    """
    known = limits.read_memory(tree, space)
    shm = known.shm
    return {
        "total_bytes": known.total_bytes,
        "available_bytes": tree.meminfo("MemAvailable"),
        "swap_total_bytes": tree.meminfo("SwapTotal"),
        "swap_free_bytes": tree.meminfo("SwapFree"),
        "group_bytes": limits.read_cgroup(tree).memory_bytes,
        "shm": shm and {"kind": shm.kind, "total_bytes": shm.total_bytes, "free_bytes": shm.free_bytes},
        "transparent_huge_pages": known.transparent,
        "huge_pages": _huge_pages(tree),
        "limits": _limits(tree),
    }


def _huge_pages(tree: Tree) -> list[dict[str, Any]]:
    names = (re.fullmatch(r"hugepages-(\d+)kB", name) for name in tree.entries(_HUGE))
    sizes = sorted(int(found[1]) for found in names if found)
    return [
        {
            "size_bytes": size * 1024,
            "total": tree.number(f"{_HUGE}/hugepages-{size}kB/nr_hugepages"),
            "free": tree.number(f"{_HUGE}/hugepages-{size}kB/free_hugepages"),
        }
        for size in sizes
    ]


def _limits(tree: Tree) -> dict[str, Any] | None:
    known = limits.read_process_limits(tree)
    if known is None:
        return None
    soft = {"nofile": known.nofile.soft, "memlock_bytes": known.memlock.soft, "nproc": known.nproc.soft}
    values: dict[str, Any] = {name: "unlimited" if limit is None else limit for name, limit in soft.items()}
    return {**values, "may_lock_all": known.may_lock_all}


PSEUDO_FILE_SYSTEMS = frozenset(
    (
        *("autofs", "binfmt_misc", "bpf", "cgroup", "cgroup2", "configfs", "debugfs", "devpts", "devtmpfs", "efivarfs"),
        *("fusectl", "hugetlbfs", "mqueue", "nsfs", "proc", "pstore", "ramfs", "rpc_pipefs", "securityfs", "selinuxfs"),
        *("squashfs", "sysfs", "tracefs"),
    )
)
"""Types of file systems without user data. Source: filesystems(5) and the kernel's documentation."""


def read_mounts(tree: Tree) -> list[dict[str, Any]]:
    """Return ``point``, ``kind``, ``source``, ``network`` and ``read_only`` of each mount. A later one at the same
    point hides the earlier one."""
    mounts = {mount.point: mount for mount in tree.mounts() if mount.kind not in PSEUDO_FILE_SYSTEMS}
    return [
        {
            "point": mount.point,
            "kind": mount.kind,
            "source": mount.source,
            "network": mount.is_network,
            "read_only": mount.read_only,
        }
        for mount in mounts.values()
    ]


SCHEMA_VERSION = 1

VIEWS: Mapping[str, tuple[str, ...]] = {
    "summary": ("system", "cpu", "memory", "stack", "gpus", "topology", "infiniband", "network", "mounts"),
    "gpu": ("stack", "gpus", "topology"),
    "ib": ("infiniband", "network"),
    "cpu": ("system", "cpu", "memory"),
    "all": ("system", "cpu", "memory", "stack", "gpus", "topology", "infiniband", "network", "mounts"),
}
"""View -> its parts."""


@dataclass(frozen=True, kw_only=True)
class Sources:
    """Where a node is read. Tests replace all of it."""

    tree: Tree = field(default_factory=Tree)
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    hostname: Callable[[], str] = socket.gethostname
    gpus: Callable[[], Answer] = info_gpus.run_child
    run: Run = info_software.run_program
    find_process: Callable[[int], Process] = find_process
    interfaces: Callable[[], Sequence[Interface]] = own_interfaces
    space: Space = limits.space
    version: Callable[[str], str | None] = info_software.version_of
    nccl: Callable[[], str | None] = info_software.installed_nccl


def collect_info(view: str, sources: Sources) -> dict[str, Any]:
    """Return the parts of a view, as plain JSON types.

    Returns:
        ``schema_version``, ``view``, ``host``, ``at`` (ISO 8601, UTC), and a key for each part in ``VIEWS``.
    """
    wanted, tree, host = VIEWS[view], sources.tree, sources.hostname()
    info: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "view": view,
        "host": host,
        "at": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }
    adapters = info_software.network_adapters(tree) if {"infiniband", "topology"} & {*wanted} else None
    known = info_gpus.read_gpus(sources.gpus(), sources.find_process) if "gpus" in wanted else None
    parts: dict[str, Callable[[], Any]] = {
        "system": lambda: read_system(tree, sources.environ, host=host, allocation=allocation(sources.environ)),
        "cpu": lambda: read_cpus(tree),
        "memory": lambda: read_memory(tree, sources.space),
        "stack": lambda: info_software.read_stack(tree, sources.run, version=sources.version, nccl=sources.nccl),
        "gpus": lambda: known,
        "topology": lambda: info_gpus.read_topology(known or {}, adapters or {}, tree),
        "infiniband": lambda: adapters,
        "network": lambda: info_software.network_interfaces(tree, sources.interfaces),
        "mounts": lambda: read_mounts(tree),
    }
    return info | {part: parts[part]() for part in wanted}
