"""What the kernel lets one process have: open files, locked memory, processes."""

from __future__ import annotations

import re
from dataclasses import dataclass

from pytest_gpucluster.host.tree import Tree

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


def read(tree: Tree) -> ProcessLimits | None:
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
