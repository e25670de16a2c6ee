"""Endless batches of a rank's images from worker processes, and whether shared memory has room for them.

A worker hands each batch over in shared memory, which is a file in /dev/shm under either of torch's sharing strategies
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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Sampler, default_collate

from pytest_gpucluster.benchmarks.group import Ranks
from pytest_gpucluster.benchmarks.training.data import MakeSampler, worker_context
from pytest_gpucluster.benchmarks.vision.datasets import Images, Sample
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


def inspect_shared_memory(folder: Path = FOLDER) -> Room:
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


def require_shared_memory(ranks: Ranks, *, node: int, needed: int, look: Look = inspect_shared_memory) -> None:
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


def shared_memory_shortage(look: Look = inspect_shared_memory) -> str:
    """Say what there is of /dev/shm now, and how to have more, after something has failed for want of it."""
    try:
        room = look()
    except OSError as error:
        return f"{FOLDER} cannot be looked at: {error}. {REMEDY.format(size=16)}"
    twice = max(1, math.ceil(2 * room.total_bytes / 2**30))
    return f"{FOLDER} has {_gib(room.free_bytes)} free of {_gib(room.total_bytes)} now. {REMEDY.format(size=twice)}"


def _gib(amount: int) -> str:
    return "no limit" if amount >= _UNLIMITED_BYTES else f"{amount / 2**30:.3g} GiB"


Batch = tuple[torch.Tensor, torch.Tensor]
"""Images, uint8, batch x height x width x colours, and labels, int64, batch."""

_END_SECONDS = 2.0
"""How long workers that nothing has ended may take to end by themselves."""

_DEAD_SECONDS = 1.0
"""How long it may take until it is known how a worker has ended."""


class EpochAfterEpoch(Sampler[list[int]]):
    """The rows of batch after batch without an end. An epoch's rest goes into the first batch of the next one.

    Between the epochs of a usual loop the workers run dry, which says more of how large the data set is than of how
    fast it is read.
    """

    def __init__(self, images: Images, *, batch: int, rank: int, world_size: int, seed: int, make: MakeSampler):
        self._batch = batch
        self._sampler = make(images, num_replicas=world_size, rank=rank, seed=seed, shuffle=True)

    def __iter__(self) -> Iterator[list[int]]:
        rows = self._rows()
        while True:
            yield list(itertools.islice(rows, self._batch))

    def _rows(self) -> Iterator[int]:
        for epoch in itertools.count():
            self._sampler.set_epoch(epoch)  # type: ignore[attr-defined]  # DistributedSampler has it
            yield from self._sampler


class Batches:
    """Batches of one rank.

    Each worker is a process of its own, and ends with the rank, however that ends. Where one dies, or an image cannot
    be read, the next batch is an error: nothing is left out.

    Args:
        images: to read.
        batch: images of a batch.
        workers: processes; with none the rank reads for itself, as it needs them.
        prefetch: batches that each worker makes ahead.
        rank, world_size: which share of the images.
        seed: of their order.
        pinned: hand them over in pinned memory, from which a GPU copies while the rank goes on.
        make_sampler: as torch's ``DistributedSampler``.
        look: at /dev/shm, where a worker dies.
    """

    def __init__(
        self,
        images: Images,
        *,
        batch: int,
        workers: int,
        prefetch: int,
        rank: int,
        world_size: int,
        seed: int,
        pinned: bool,
        make_sampler: MakeSampler = DistributedSampler,
        look: Look = inspect_shared_memory,
    ) -> None:
        settings: dict[str, Any] = {}
        if workers:
            settings = {
                "multiprocessing_context": worker_context(),
                "prefetch_factor": prefetch,
                "persistent_workers": True,
            }
        rows = EpochAfterEpoch(images, batch=batch, rank=rank, world_size=world_size, seed=seed, make=make_sampler)
        loader = DataLoader(
            _Readable(images),
            batch_sampler=rows,
            num_workers=workers,
            collate_fn=_together,
            pin_memory=pinned,
            worker_init_fn=_end_with_rank,
            **settings,
        )
        self._look = look
        before = set(multiprocessing.active_children())
        self._batches: Iterator[Any] | None = iter(loader)
        self._workers: list[BaseProcess] = [one for one in multiprocessing.active_children() if one not in before]

    def __next__(self) -> Batch:
        """Return the next batch. It waits for it, and looks every few seconds whether the workers are alive.

        Raises: EnvironmentBroken if an image cannot be read, or a worker has died.
        """
        if self._batches is None:
            raise ValueError("these batches have been closed")
        made: Any = None
        why = ""
        try:
            made = next(self._batches)
        except (RuntimeError, OSError, EOFError) as error:
            # A worker can die after it has told of a batch, and before it has handed it over: then a connection breaks.
            why = self._why_dead() or _why_not_shared(error, self._look)
            if not why:
                raise
        # Not inside: what is raised there would keep the iterator, and with it the other workers, in its context.
        if why:
            raise EnvironmentBroken(why)
        if isinstance(made, _Unreadable):
            raise EnvironmentBroken(made.why)
        images, labels = made
        return images, labels

    def close(self) -> None:
        """End the workers and wait for them. There is no next batch then."""
        self._batches = None  # its finalizer ends them, unless a traceback still holds it
        for worker in self._workers:
            worker.join(_END_SECONDS / len(self._workers))
            if worker.is_alive():
                worker.terminate()
                worker.join(_END_SECONDS)

    def _why_dead(self) -> str:
        for worker in self._workers:
            worker.join(_DEAD_SECONDS / len(self._workers))
            code = worker.exitcode
            if code is None or code == 0:
                continue
            who = f"DataLoader worker (process {worker.pid})"
            if code == -signal.SIGBUS:
                shortage = shared_memory_shortage(self._look)
                return f"{who} died of SIGBUS, as a rule because shared memory is full. {shortage}"
            if code == -signal.SIGKILL:
                return (
                    f"{who} was killed (SIGKILL), as a rule by the kernel for want of memory: look at dmesg and at the "
                    "memory limit of the job or container, or ask for fewer: --gpucluster-workload vision.workers=2"
                )
            how = f"died of {_signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
            return f"{who} {how}. What it has printed is in the output of this test"
        return ""


class _Unreadable:
    """Comes from a worker in the place of a batch."""

    def __init__(self, why: str) -> None:
        self.why = why


class _Readable(Dataset["Sample | _Unreadable"]):
    """Images of which one that cannot be read is told as a value: an exception would get a worker's traceback."""

    def __init__(self, images: Images) -> None:
        self._images = images

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, row: int) -> Sample | _Unreadable:
        try:
            return self._images[row]
        except EnvironmentBroken as error:
            return _Unreadable(str(error))


def _together(samples: list[Sample | _Unreadable]) -> Any:
    unreadable = next((one for one in samples if isinstance(one, _Unreadable)), None)
    # default_collate makes the batch in shared memory at once, where a lack of it is an exception.
    return default_collate(samples) if unreadable is None else unreadable


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


def _why_not_shared(error: Exception, look: Look) -> str:
    # Source: torch, ATen/MapAllocator.cpp, "unable to allocate shared memory(shm) for file".
    if "shared memory" not in str(error) and "No space left on device" not in str(error):
        return ""
    return f"a DataLoader worker found no room for its batch in shared memory. {shared_memory_shortage(look)}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
