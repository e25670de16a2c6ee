"""Is /dev/shm large enough for what the workers of all ranks of a node put into it?

A worker hands each batch over in shared memory, which is a file in /dev/shm under either of torch's sharing strategies
(``file_descriptor`` only removes its name at once). Where it is full, a worker fails, or the kernel ends it by SIGBUS.
So this is looked at before the first worker is started. Source: torch.multiprocessing, sharing strategies; tmpfs(5).
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from pytest_gpucluster.benchmarks.ranks import Ranks
from pytest_gpucluster.errors import EnvironmentBroken

FOLDER = Path("/dev/shm")

SAFETY = 1.25
"""Source: this suite's rule. NCCL and other users of /dev/shm take their part after it was looked at."""

_PAGE_BYTES = 4096
_UNLIMITED_BYTES = 2**52
"""Stands for a tmpfs without a size. Numbers travel between ranks as fp64."""

REMEDY = (
    "Make it larger: docker run --shm-size={size}g, or --ipc=host; in Kubernetes mount an emptyDir with medium: Memory "
    "at /dev/shm; on bare metal and under Slurm mount -o remount,size={size}G /dev/shm. Or ask for less: "
    "--gpucluster-workload vision.workers=2 --gpucluster-workload vision.prefetch=2"
)


@dataclass(frozen=True, kw_only=True)
class Room:
    """What a file system for shared memory has. ``device`` tells it from others on the same host."""

    total_bytes: int
    free_bytes: int
    device: int


def look(folder: Path = FOLDER) -> Room:
    """Return what /dev/shm of this process has.

    Raises: OSError if there is none.
    """
    found = os.statvfs(folder)
    total, free = (blocks * found.f_frsize for blocks in (found.f_blocks, found.f_bavail))
    if found.f_blocks == 0:  # a tmpfs that was mounted without a limit
        total = free = _UNLIMITED_BYTES
    return Room(total_bytes=total, free_bytes=free, device=folder.stat().st_dev)


Look = Callable[[], Room]


def needed_bytes(tensors_bytes: Sequence[int], *, workers: int, prefetch: int) -> int:
    """Return how much of /dev/shm the workers of one rank can fill.

    Args:
        tensors_bytes: sizes of the tensors of one batch. Each is a file of its own, in whole pages.
        workers: of the rank. With none nothing is shared.
        prefetch: batches that each worker makes ahead.

    Beside those that are made ahead, one batch is in use and one is on its way into pinned memory.
    """
    if workers == 0:
        return 0
    batch = sum(math.ceil(size / _PAGE_BYTES) * _PAGE_BYTES for size in tensors_bytes)
    return (workers * prefetch + 2) * batch


def require_shared_memory(ranks: Ranks, *, node: int, needed: int, look: Look = look) -> None:
    """Make sure, on all ranks alike, that each node has enough shared memory for all of its ranks together.

    Collective: every rank of the group must call this.

    Args:
        ranks: that are about to start workers.
        node: number of this rank's node.
        needed: bytes for this rank, of :func:`needed_bytes`.
        look: where this rank looks.

    Raises: EnvironmentBroken on all ranks, if there is too little anywhere: names the rank, what was found, what is
        needed and what to do.
    """
    try:
        mine = look()
        known = [mine.device, mine.total_bytes, mine.free_bytes]
    except OSError:
        known = [-1, 0, 0]
    told = [[int(number) for number in numbers] for numbers in ranks.gather([node, *known, needed])]
    # Ranks of one node share it, unless each is in a container of its own.
    together: dict[tuple[int, int], list[int]] = {}
    for index, (its_node, device, *_) in enumerate(told):
        together.setdefault((its_node, device), []).append(index)
    for (_, device), indices in together.items():
        wanted = math.ceil(SAFETY * sum(told[index][4] for index in indices))
        first, (total, free) = indices[0], told[indices[0]][2:4]
        if not wanted or (device >= 0 and free >= wanted):
            continue
        remedy = REMEDY.format(size=math.ceil((wanted + total - free) / 2**30))
        found = f"has {_gib(free)} free of {_gib(total)}" if device >= 0 else "cannot be looked at"
        raise EnvironmentBroken(
            f"{ranks.name(first)}: {FOLDER} {found}, and the DataLoader workers of the {len(indices)} ranks that share "
            f"it need {_gib(wanted)}. {remedy}"
        )


def shortage(look: Look = look) -> str:
    """Say what there is of /dev/shm now, and how to have more, after something has failed for want of it."""
    try:
        room = look()
    except OSError as error:
        return f"{FOLDER} cannot be looked at: {error}. {REMEDY.format(size=16)}"
    twice = max(1, math.ceil(2 * room.total_bytes / 2**30))
    return f"{FOLDER} has {_gib(room.free_bytes)} free of {_gib(room.total_bytes)} now. {REMEDY.format(size=twice)}"


def _gib(amount: int) -> str:
    return "no limit" if amount >= _UNLIMITED_BYTES else f"{amount / 2**30:.3g} GiB"
