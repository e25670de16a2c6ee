"""Host memory, the part of it that files in /dev/shm may take, and its huge pages."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pytest_gpucluster.host.tree import Tree

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


def read(tree: Tree, space: Space = space) -> Memory:
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
