"""Endless batches of a rank's share of the images, made by worker processes ahead of their use."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Sampler, default_collate

from pytest_gpucluster.benchmarks.training.loading import worker_context
from pytest_gpucluster.benchmarks.training.shares import MakeSampler
from pytest_gpucluster.benchmarks.vision.images import Images, Sample
from pytest_gpucluster.benchmarks.vision.shared_memory import Look, look, shortage
from pytest_gpucluster.errors import EnvironmentBroken

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
        look: Look = look,
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
                return f"{who} died of SIGBUS, as a rule because shared memory is full. {shortage(self._look)}"
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
    return f"a DataLoader worker found no room for its batch in shared memory. {shortage(look)}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
