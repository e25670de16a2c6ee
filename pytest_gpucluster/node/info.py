"""The data of ``gpucluster node info``: system, CPUs, memory, mounts, software, network and HCAs, and all together.

File systems are not accessed, only listed: a server that is down would block. GPUs are read in ``node.info_gpus``.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from typing import Any

from pytest_gpucluster.launch.launchers import Allocation, allocation
from pytest_gpucluster.node import host, infiniband, info_gpus, pci
from pytest_gpucluster.node.host import NodeSnapshot, Space, read_node
from pytest_gpucluster.node.interfaces import Interface, read_networks
from pytest_gpucluster.node.interfaces import interfaces as own_interfaces
from pytest_gpucluster.node.processes import Output, Process, Run, find_process, run_program
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
    release = tree.text("/etc/os-release") or tree.text("/usr/lib/os-release") or ""
    distribution = re.search(r'^PRETTY_NAME="?([^"\n]*)', release, re.MULTILINE)
    uptime = re.match(r"\d+(\.\d+)?", tree.text("/proc/uptime") or "")
    return {
        "host": host,
        "system": distribution[1] if distribution else None,
        "kernel": tree.text("/proc/sys/kernel/osrelease"),
        "machine": platform.machine(),
        "uptime_seconds": float(uptime[0]) if uptime else None,
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
    if runtime := tree.text("/run/systemd/container") or environ.get("container", ""):
        return runtime
    files = {"/run/.containerenv": "podman", "/.dockerenv": "docker"}
    return next((name for path, name in files.items() if tree.has(path)), None)


def _scheduler(environ: Mapping[str, str], allocation: Allocation) -> dict[str, Any] | None:
    if allocation.name is None:
        return None
    names = {"job": "JOB_ID", "partition": "JOB_PARTITION", "nodes": "JOB_NODELIST", "gpus": "STEP_GPUS"}
    names = {key: f"SLURM_{name}" for key, name in names.items()}
    if allocation.name == "kubernetes":
        names = {"pod": "HOSTNAME", "namespace": "POD_NAMESPACE", "node": "NODE_NAME"}
    values = {key: environ.get(name) or None for key, name in names.items()}
    return {"name": allocation.name, "nnodes": allocation.nnodes, "gpus_per_node": allocation.gpus_per_node, **values}


def cpu_part(node: NodeSnapshot) -> dict[str, Any]:
    """Return the CPUs: ``cpus`` that are online, ``cpus_allowed`` to this process as the kernel writes a list,
    ``cpus_of_group``, the quota of its control group (null for no limit), and the NUMA nodes with their distances."""
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
    """Return the memory: ``group_bytes``, the limit of the control group, is null for none; each of ``limits`` is a
    number or "unlimited"."""
    known, own = asdict(node.memory), node.limits
    soft: dict[str, int | None] = {}
    if own is not None:
        soft = {"nofile": own.nofile.soft, "memlock_bytes": own.memlock.soft, "nproc": own.nproc.soft}
    allowed = {name: "unlimited" if limit is None else limit for name, limit in soft.items()}
    return {
        **{key: known[key] for key in ("total_bytes", "available_bytes", "swap_total_bytes", "swap_free_bytes")},
        "group_bytes": node.cgroup.memory_bytes,
        "shm": known["shm"],
        "transparent_huge_pages": known["transparent"],
        "huge_pages": list(known["huge_pages"]),
        "limits": own and {**allowed, "may_lock_all": own.may_lock_all},
    }


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
    names = {"point": "point", "kind": "kind", "source": "source", "network": "is_network", "read_only": "read_only"}
    return [{key: getattr(mount, name) for key, name in names.items()} for mount in mounts.values()]


_VERSION = "/proc/driver/nvidia/version"
_MODULES = ("nvidia", "nvidia_uvm", "nvidia_peermem", "nv_peer_mem", "gdrdrv", "nvidia_fs", "mlx5_ib", "ib_uverbs")
"""Of the driver, of GPUDirect RDMA, of GDRCopy, of GPUDirect Storage, and of the RDMA stack."""
_LOADED = "/sys/module"
_LIBRARIES = ("usr/lib/*-linux-gnu", "usr/lib64")
_TOOLKIT = "/usr/local/cuda/version.json"
_FABRIC_MANAGER = ("systemctl", "is-active", "nvidia-fabricmanager")
_OFED = ("ofed_info", "-s")


def version_of(distribution: str) -> str | None:
    """Return the version of an installed Python distribution, without importing it."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def installed_nccl() -> str | None:
    """Return the version of the NCCL package installed for torch, such as nvidia-nccl-cu12."""
    names = {str(one.metadata["Name"]).lower(): one.version for one in metadata.distributions() if one.metadata["Name"]}
    return next((version for name, version in sorted(names.items()) if name.startswith("nvidia-nccl")), None)


def installed_library(tree: Tree) -> str | None:
    """Return the version of the system's NCCL, as in NVIDIA's containers, by the name of its file."""
    names = (path.name for folder in _LIBRARIES for path in tree.path("/").glob(f"{folder}/libnccl.so.*"))
    versions = [found[1] for found in (re.fullmatch(r"libnccl\.so\.(\d+\.\d+\.\d+)", name) for name in names) if found]
    return max(versions, key=lambda version: [int(part) for part in version.split(".")], default=None)


def read_stack(
    tree: Tree,
    run: Run,
    *,
    version: Callable[[str], str | None] = version_of,
    nccl: Callable[[], str | None] = installed_nccl,
) -> dict[str, Any]:
    """Read the software stack.

    Returns:
        ``driver``, the loaded kernel driver's version; ``driver_kind``: "open" or "proprietary" kernel modules;
        ``toolkit``, of the CUDA toolkit in /usr/local/cuda; ``torch``, ``nccl``, ``pytest_gpucluster``: installed for
        this Python, or else the system's NCCL library; ``fabric_manager``, such as active; ``ofed``;
        ``modules``, relevant kernel modules, each with its version, "" where it has none;
        ``not_available``, why a key is null.

    Source: NVIDIA driver's README, "The /proc/driver/nvidia Interface"; systemctl(1), is-active.
    """
    missing: dict[str, str] = {}
    text = tree.text(_VERSION)
    if text is None:
        missing["driver"] = f"{_VERSION} cannot be read: no NVIDIA driver is loaded, or it is hidden here"
    found = re.search(r"Module.*?\s(\d+\.\d+(?:\.\d+)?)", text or "")
    manager, ofed = run(_FABRIC_MANAGER), run(_OFED)
    # The exit code is 3 where the service does not run, with its state as output.
    state = re.fullmatch(r"[a-z-]+", manager.text.strip())
    if state is None:
        missing["fabric_manager"] = manager.why_not or "systemctl printed nothing"
    if ofed.why_not:
        missing["ofed"] = ofed.why_not
    modules = None
    if tree.has(_LOADED):
        loaded = [name for name in _MODULES if tree.has(f"{_LOADED}/{name}")]
        modules = {name: tree.text(f"{_LOADED}/{name}/version") or "" for name in loaded}
    else:
        missing["modules"] = f"{_LOADED} cannot be read"
    return {
        "driver": found[1] if found else None,
        "driver_kind": None if text is None else "open" if "Open Kernel Module" in text else "proprietary",
        "toolkit": _toolkit(tree),
        "torch": version("torch"),
        "nccl": nccl() or installed_library(tree),
        "pytest_gpucluster": version("pytest-gpucluster"),
        "fabric_manager": state and state[0],
        "ofed": None if ofed.why_not else ofed.text.strip().rstrip(":") or None,
        "modules": modules,
        "not_available": missing,
    }


def _toolkit(tree: Tree) -> str | None:
    try:
        return str(json.loads(tree.text(_TOOLKIT) or "")["cuda"]["version"])
    except (ValueError, KeyError, TypeError):
        return None  # no toolkit, or a much older one


def network_adapters(tree: Tree) -> dict[str, Any]:
    """Read each HCA and its ports.

    Returns:
        ``why_not``, why there is none, "" where there are some; ``devices``: ``name``, ``kind``, ``firmware``,
        ``board``, ``guid``, ``pci``, ``numa_node`` and ``ports``, each with ``number``, ``state``, ``phys_state``,
        ``rate``, ``rate_gbps``, ``link_layer``, ``lid``, ``sm_lid`` and ``errors``, the error counters that are not
        zero; ``peer_memory``: ``module`` and ``why_no_dma_buf``.
    """
    known = asdict(infiniband.read(tree.path("/sys"), gids=False))
    bad = (*infiniband.ERRORS, *infiniband.HARDWARE_ERRORS, infiniband.CARRIER_DOWN)
    for device in known["devices"]:
        device["ports"] = [
            {
                **{name: value for name, value in port.items() if name not in ("device", "gids", "counters")},
                "errors": {name: count for name, count in port["counters"].items() if name in bad and count},
            }
            for port in device["ports"]
        ]
    return {**known, "devices": list(known["devices"]), "peer_memory": asdict(pci.read_peer_memory(tree))}


SCHEMA_VERSION = 1
_ALL = ("system", "cpu", "memory", "stack", "gpus", "topology", "infiniband", "network", "mounts")
VIEWS: Mapping[str, tuple[str, ...]] = {
    "summary": _ALL,
    "gpu": ("stack", "gpus", "topology"),
    "ib": ("infiniband", "network"),
    "cpu": ("system", "cpu", "memory"),
    "all": _ALL,
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
    space: Space = host.space
    version: Callable[[str], str | None] = version_of
    nccl: Callable[[], str | None] = installed_nccl


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
    adapters = network_adapters(tree) if {"infiniband", "topology"} & {*wanted} else {}
    known = info_gpus.read_gpus(sources.gpus(), sources.find_process) if "gpus" in wanted else {}
    parts: dict[str, Callable[[], Any]] = {
        "system": lambda: read_system(tree, sources.environ, host=host, allocation=allocation(sources.environ)),
        "cpu": lambda: cpu_part(node),
        "memory": lambda: memory_part(node),
        "stack": lambda: read_stack(tree, sources.run, version=sources.version, nccl=sources.nccl),
        "gpus": lambda: known,
        "topology": lambda: info_gpus.read_topology(known, adapters, tree),
        "infiniband": lambda: adapters,
        "network": lambda: [
            {key: value for key, value in asdict(one).items() if key != "running"}
            for one in read_networks(tree, sources.interfaces())
        ],
        "mounts": lambda: read_mounts(tree),
    }
    return info | {part: parts[part]() for part in wanted}
