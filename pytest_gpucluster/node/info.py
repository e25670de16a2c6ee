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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from pytest_gpucluster.launch.launchers import Allocation, allocation
from pytest_gpucluster.node import info_gpus, info_software, limits
from pytest_gpucluster.node.host import NodeSnapshot, read_node
from pytest_gpucluster.node.interfaces import Interface
from pytest_gpucluster.node.interfaces import interfaces as own_interfaces
from pytest_gpucluster.node.limits import Space
from pytest_gpucluster.node.processes import Process, find_process
from pytest_gpucluster.node.programs import Output, Run, run_program
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


def cpu_part(node: NodeSnapshot) -> dict[str, Any]:
    """Return the CPUs.

    Returns:
        ``model``; ``sockets``, ``cores``, ``cpus`` that are online, ``offline`` ones; ``cpus_allowed``, those that this
        process may run on, as the kernel writes a list; ``cpus_of_group``, the CPU quota of its control group, null for
        no limit; ``max_mhz``; ``governors``; ``numa_balancing``; ``numa_nodes``: each with ``node``, ``cpus``,
        ``memory_total_bytes``, ``memory_free_bytes`` and ``distances`` to all nodes.
    """
    known = node.processors
    return {
        "model": known.model,
        "sockets": known.sockets,
        "cores": known.cores(),
        "cpus": len(known.online) if known.online is not None else None,
        "offline": len(known.offline),
        "cpus_allowed": format_ranges(node.own_cpus),
        "cpus_of_group": node.cgroup.cpus,
        "max_mhz": known.max_mhz,
        "governors": {name: len(cpus) for name, cpus in sorted(known.governors.items())},
        "numa_balancing": None if known.numa_balancing is None else bool(known.numa_balancing),
        "numa_nodes": [asdict(numa) for numa in known.nodes],
    }


def memory_part(node: NodeSnapshot) -> dict[str, Any]:
    """Return the memory.

    Returns:
        ``total_bytes``, ``available_bytes``, ``swap_total_bytes``, ``swap_free_bytes``; ``group_bytes``, the limit of
        the control group, null for none; ``shm``: ``kind``, ``total_bytes``, ``free_bytes`` of /dev/shm;
        ``transparent_huge_pages``; ``huge_pages``: for each size ``size_bytes``, ``total``, ``free``; ``limits``:
        ``nofile``, ``memlock_bytes`` and ``nproc``, each "unlimited" or a number, and ``may_lock_all``.
    """
    known = asdict(node.memory)
    limits = node.limits
    return {
        **{key: known[key] for key in ("total_bytes", "available_bytes", "swap_total_bytes", "swap_free_bytes")},
        "group_bytes": node.cgroup.memory_bytes,
        "shm": known["shm"],
        "transparent_huge_pages": known["transparent"],
        "huge_pages": list(known["huge_pages"]),
        "limits": limits
        and {
            "nofile": _or_unlimited(limits.nofile.soft),
            "memlock_bytes": _or_unlimited(limits.memlock.soft),
            "nproc": _or_unlimited(limits.nproc.soft),
            "may_lock_all": limits.may_lock_all,
        },
    }


def _or_unlimited(limit: int | None) -> int | str:
    return "unlimited" if limit is None else limit


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
    gpus: Callable[[], Output] = info_gpus.run_child
    run: Run = run_program
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
    node = read_node(tree, host=host, space=sources.space)
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
        "cpu": lambda: cpu_part(node),
        "memory": lambda: memory_part(node),
        "stack": lambda: info_software.read_stack(tree, sources.run, version=sources.version, nccl=sources.nccl),
        "gpus": lambda: known,
        "topology": lambda: info_gpus.read_topology(known or {}, adapters or {}, tree),
        "infiniband": lambda: adapters,
        "network": lambda: info_software.network_interfaces(tree, sources.interfaces),
        "mounts": lambda: read_mounts(tree),
    }
    return info | {part: parts[part]() for part in wanted}
