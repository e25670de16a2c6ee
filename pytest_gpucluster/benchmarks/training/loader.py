"""Batches of a rank's rows from worker processes, and whether shared memory has room for them.

A worker passes on each batch in shared memory, which is a file in /dev/shm under either of torch's sharing strategies
(``file_descriptor`` only removes its name at once). Where it is full, a worker fails, or the kernel kills it by SIGBUS.
So the room for all ranks of a node is checked before the first worker is started. Source: torch.multiprocessing,
sharing strategies; tmpfs(5).
"""

from __future__ import annotations

import itertools
import math
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

from torch.utils.data import DataLoader

from pytest_gpucluster.benchmarks.group import Ranks
from pytest_gpucluster.errors import EnvironmentBroken

T = TypeVar("T")
FOLDER = Path("/dev/shm")

SAFETY = 1.25
"""Source: this suite's rule. NCCL and other users of /dev/shm take their part after the check."""

_PAGE_BYTES = 4096
_UNLIMITED_BYTES = 2**52
"""Stands for a tmpfs without a size. Numbers are exchanged between ranks as fp64."""

REMEDY = (
    "Make it larger: docker run --shm-size={size}g, or --ipc=host; in Kubernetes mount an emptyDir with medium: Memory "
    "at /dev/shm; on bare metal and under Slurm mount -o remount,size={size}G /dev/shm. Or reduce the need by the "
    "workload of this test, such as --gpucluster-workload vision.workers=2 --gpucluster-workload vision.prefetch=2"
)

_ENLARGE = REMEDY.format(size=16)


def inspect_shared_memory(folder: Path = FOLDER) -> tuple[int, int, int]:
    """Return number, total and free bytes of /dev/shm of this process. The number distinguishes it from others on the
    same host.

    Raises: OSError if there is none.
    """
    found = os.statvfs(folder)
    total, free = (blocks * found.f_frsize for blocks in (found.f_blocks, found.f_bavail))
    if found.f_blocks == 0:  # a tmpfs that was mounted without a limit
        total = free = _UNLIMITED_BYTES
    return folder.stat().st_dev, total, free


def needed_bytes(tensors_bytes: Sequence[int], *, workers: int, prefetch: int) -> int:
    """Return how much of /dev/shm the workers of one rank can fill.

    Args:
        tensors_bytes: sizes of the tensors of one batch. Each is a file of its own, in whole pages.
        workers: of the rank. With none nothing is shared.
        prefetch: batches that each worker reads ahead.

    Besides those that are read ahead, one batch is in use and one is being copied into pinned memory.
    """
    if workers == 0:
        return 0
    batch = sum(math.ceil(size / _PAGE_BYTES) * _PAGE_BYTES for size in tensors_bytes)
    return (workers * prefetch + 2) * batch


def require_shared_memory(ranks: Ranks, *, node: int, needed: int) -> None:
    """Check, on all ranks alike, that each node has enough shared memory for all of its ranks together.

    Collective: every rank of the group must call this.

    Args:
        ranks: that are about to start workers.
        node: number of this rank's node.
        needed: bytes for this rank, of :func:`needed_bytes`.

    Raises: EnvironmentBroken on all ranks, if there is too little on any node: names the rank, what was found, what is
        needed and what to do.
    """
    try:
        known = inspect_shared_memory()
    except OSError:
        known = (-1, 0, 0)
    of_ranks = [[int(number) for number in numbers] for numbers in ranks.gather([node, *known, needed])]
    # Ranks of one node share it, unless each is in a container of its own.
    sharing: dict[tuple[int, int], list[int]] = {}
    for index, (its_node, device, *_) in enumerate(of_ranks):
        sharing.setdefault((its_node, device), []).append(index)
    for (_, device), indices in sharing.items():
        wanted = math.ceil(SAFETY * sum(of_ranks[index][4] for index in indices))
        first, (total, free) = indices[0], of_ranks[indices[0]][2:4]
        if not wanted or (device >= 0 and free >= wanted):
            continue
        remedy = REMEDY.format(size=math.ceil((wanted + total - free) / 2**30))
        found = f"has {_gib(free)} free of {_gib(total)}" if device >= 0 else "cannot be inspected"
        raise EnvironmentBroken(
            f"{ranks.name(first)}: {FOLDER} {found}, and the DataLoader workers of the {len(indices)} ranks that share "
            f"it need {_gib(wanted)}. {remedy}"
        )


def _gib(amount: int) -> str:
    return "no limit" if amount >= _UNLIMITED_BYTES else f"{amount / 2**30:.3g} GiB"


_START = "forkserver"
"""How workers are started. Not by fork: a rank has a CUDA context, and threads of NCCL and gloo, which no child
survives. Not by spawn: each worker would import torch again. The server is a new process, and imports torch once.
Source: torch.multiprocessing, "CUDA in multiprocessing"; Python, multiprocessing, "Contexts and start methods"."""

_END_SECONDS = 2.0
"""How long workers may take to end by themselves."""

_DEAD_SECONDS = 1.0
"""How long it may take until a worker's exit code is known."""


def worker_context() -> BaseContext:
    """Return the start method of a DataLoader's workers, next to a GPU and process groups."""
    context = multiprocessing.get_context(_START)
    context.set_forkserver_preload([f"{__package__}.data"])
    return context


def in_batches(rows: Iterable[T], batch: int) -> Iterator[list[T]]:
    """Yield rows, or their numbers, a batch at a time.

    >>> list(in_batches(range(5), 2))
    [[0, 1], [2, 3], [4]]
    """
    each = iter(rows)
    while chunk := list(itertools.islice(each, batch)):
        yield chunk


class Batches:
    """Batches of one rank, as torch's ``default_collate`` makes them of the rows.

    Each worker is a process of its own, and ends with the rank, however that ends. Where one dies, or a row cannot
    be read, the next batch is an error: no row is skipped.

    Args:
        data: raises EnvironmentBroken for a row that cannot be read.
        rows: the numbers of each batch's rows, without an end: between the epochs of a usual loop the workers run dry.
        workers: number of processes; with none the rank itself reads each batch.
        prefetch: batches that each worker reads ahead.
        pinned: return them in pinned memory, from which a GPU copies while the rank continues.
    """

    def __init__(
        self,
        data: Any,
        rows: Iterable[list[int]],
        *,
        workers: int,
        prefetch: int,
        pinned: bool,
    ) -> None:
        ahead: dict[str, Any] = {}
        if workers:
            ahead = {"multiprocessing_context": worker_context(), "prefetch_factor": prefetch}
        loader = DataLoader(
            data,
            batch_sampler=rows,
            num_workers=workers,
            pin_memory=pinned,
            worker_init_fn=_end_with_rank,
            **ahead,
        )
        before = set(multiprocessing.active_children())
        self._batches: Iterator[Any] | None = iter(loader)
        self._workers: list[BaseProcess] = [one for one in multiprocessing.active_children() if one not in before]

    def __next__(self) -> Any:
        """Return the next batch. While it waits, torch checks every few seconds whether the workers are alive.

        Raises: EnvironmentBroken if a row cannot be read, or a worker has died.
        """
        assert self._batches is not None  # or they have been closed
        batch: Any = None
        problem = ""
        try:
            batch = next(self._batches)
        except EnvironmentBroken as error:
            # A worker's has its traceback before it.
            problem = str(error).rpartition("EnvironmentBroken: ")[2].strip() or "a row cannot be read"
        except (RuntimeError, OSError, EOFError) as error:
            # A worker can die after it has announced a batch and before it has passed it on: then a connection breaks.
            problem = self._dead_worker()
            # Source: torch, ATen/MapAllocator.cpp, "unable to allocate shared memory(shm) for file".
            if not problem and ("shared memory" in str(error) or "No space left on device" in str(error)):
                problem = f"a DataLoader worker found no room for its batch in shared memory. {_ENLARGE}"
            if not problem:
                raise
        # Not inside: an exception raised there would keep the iterator, and with it the other workers, in its context.
        if problem:
            raise EnvironmentBroken(problem)
        return batch

    def close(self) -> None:
        """End the workers and wait for them. There is no next batch after it."""
        self._batches = None  # its finalizer ends them, unless a traceback still refers to it
        for worker in self._workers:
            worker.join(_END_SECONDS / len(self._workers))
            if worker.is_alive():
                worker.terminate()
                worker.join(_END_SECONDS)

    def _dead_worker(self) -> str:
        for worker in self._workers:
            worker.join(_DEAD_SECONDS / len(self._workers))
            code = worker.exitcode
            if code is None or code == 0:
                continue
            how = f"died of {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            why = "Its output is in the output of this test"
            if code == -signal.SIGBUS:
                why = f"Usually shared memory is full. {_ENLARGE}"
            elif code == -signal.SIGKILL:
                why = (
                    "Usually the kernel kills it for lack of memory: check dmesg and the memory limit of the job or "
                    "container, or use fewer, such as --gpucluster-workload vision.workers=2"
                )
            return f"DataLoader worker (process {worker.pid}) {how}. {why}"
        return ""


def _end_with_rank(_worker: int) -> None:
    """Make this worker end when its rank does.

    torch's own watch looks for another parent, and a worker's parent is the fork server, which lives as long as a
    worker does: a rank that is killed would leave all of them behind.
    """
    rank = multiprocessing.parent_process()
    if rank is None:
        return  # no worker process: the rank reads for itself

    def wait(join: Callable[[], None]) -> None:
        join()
        os._exit(1)

    threading.Thread(target=wait, args=(rank.join,), daemon=True).start()
