"""The memory of a node, and the limits that this process has."""

from __future__ import annotations

import re
from typing import Any

from pytest_gpucluster.host import cgroup, process_limits
from pytest_gpucluster.host import memory as host_memory
from pytest_gpucluster.host.memory import Space
from pytest_gpucluster.host.tree import Tree

_HUGE = "/sys/kernel/mm/hugepages"


def read(tree: Tree, space: Space = host_memory.space) -> dict[str, Any]:
    """Tell of the memory.

    Returns:
        ``total_bytes``, ``available_bytes``, ``swap_total_bytes``, ``swap_free_bytes``; ``group_bytes``, what the
        control group may use, null for no limit; ``shm``: ``kind``, ``total_bytes``, ``free_bytes`` of /dev/shm;
        ``transparent_huge_pages``; ``huge_pages``: for each size ``size_bytes``, ``total``, ``free``; ``limits``:
        ``nofile``, ``memlock_bytes`` and ``nproc``, each "unlimited" or a number, and ``may_lock_all``.

    Source: proc_meminfo(5); Linux kernel, Documentation/admin-guide/mm/hugetlbpage.rst.
    """
    known = host_memory.read(tree, space)
    text = tree.text("/proc/meminfo") or ""
    shm = known.shm
    return {
        "total_bytes": known.total_bytes,
        "available_bytes": _bytes(text, "MemAvailable"),
        "swap_total_bytes": _bytes(text, "SwapTotal"),
        "swap_free_bytes": _bytes(text, "SwapFree"),
        "group_bytes": cgroup.read(tree).memory_bytes,
        "shm": shm and {"kind": shm.kind, "total_bytes": shm.total_bytes, "free_bytes": shm.free_bytes},
        "transparent_huge_pages": known.transparent,
        "huge_pages": _huge_pages(tree),
        "limits": _limits(tree),
    }


def _huge_pages(tree: Tree) -> list[dict[str, Any]]:
    try:
        names = [entry.name for entry in tree.path(_HUGE).iterdir()]
    except OSError:
        return []  # a kernel without them
    sizes = sorted(int(found[1]) for found in (re.fullmatch(r"hugepages-(\d+)kB", name) for name in names) if found)
    return [
        {
            "size_bytes": size * 1024,
            "total": tree.number(f"{_HUGE}/hugepages-{size}kB/nr_hugepages"),
            "free": tree.number(f"{_HUGE}/hugepages-{size}kB/free_hugepages"),
        }
        for size in sizes
    ]


def _limits(tree: Tree) -> dict[str, Any] | None:
    known = process_limits.read(tree)
    if known is None:
        return None
    soft = {"nofile": known.nofile.soft, "memlock_bytes": known.memlock.soft, "nproc": known.nproc.soft}
    told: dict[str, Any] = {name: "unlimited" if limit is None else limit for name, limit in soft.items()}
    return {**told, "may_lock_all": known.may_lock_all}


def _bytes(text: str, name: str) -> int | None:
    found = re.search(rf"^{name}:\s+(\d+) kB", text, re.MULTILINE)
    return int(found[1]) * 1024 if found else None
