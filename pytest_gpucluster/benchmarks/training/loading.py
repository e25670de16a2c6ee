"""Rows of tokens through torch's DataLoader, without end: every rank its own, read ahead by worker processes."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.context import BaseContext
from typing import Any

import torch
from torch.utils.data import DataLoader, Sampler

from pytest_gpucluster.benchmarks.training.decoder import Geometry
from pytest_gpucluster.benchmarks.training.packed_tokens import PackedTokens
from pytest_gpucluster.errors import EnvironmentBroken

ROWS = 2**31
"""So many rows are different from each other; more than any run reads."""

WAIT_SECONDS = 120.0
"""The longest that a batch may take. Source: this suite's rule; a batch of packed tokens takes milliseconds."""

LOOK_SECONDS = 2.0
"""While nothing comes, the workers are looked after so often: no signal tells of their death, for the server that has
started them is their parent."""


_START = "forkserver"
"""How workers are started. Not by fork: a rank holds a CUDA context, and threads of NCCL and gloo, which no child
survives. Not by spawn: each worker would import torch again. The server is started anew, imports torch once, and holds
nothing else than this module. Source: torch.multiprocessing, "CUDA in multiprocessing"; Python, multiprocessing,
"Contexts and start methods"."""


@dataclass(frozen=True, kw_only=True)
class Loading:
    """How rows are read.

    Attributes:
        batch: rows of each rank in a step.
        workers: processes that read ahead; 0: the training process reads itself, when it needs them.
        prefetch: batches that each of them reads ahead.
        seed: other seeds make other rows.
    """

    batch: int
    workers: int
    prefetch: int
    seed: int = 0


class OwnRows(Sampler[int]):
    """The rows of one rank: every count-th, beginning with its own number. No two ranks share any.

    They come in their order, for each row is as random as any other.
    """

    def __init__(self, *, rank: int, count: int) -> None:
        self._rank, self._count = rank, count

    def __iter__(self) -> Iterator[int]:
        """Return the numbers of the rows."""
        return iter(range(self._rank, ROWS, self._count))


def _next(batches: Iterator[torch.Tensor]) -> torch.Tensor:
    last = time.monotonic() + WAIT_SECONDS
    while True:
        try:
            return next(batches)
        except RuntimeError as error:
            # torch has looked for a dead worker before it says so, and takes the next call as if this one had not been.
            if not str(error).startswith("DataLoader timed out") or time.monotonic() > last:
                raise


def worker_context() -> BaseContext:
    """Return how the workers of a DataLoader are to be started, beside a GPU and process groups."""
    context = multiprocessing.get_context(_START)
    context.set_forkserver_preload([__name__])
    return context


def endless_batches(
    geometry: Geometry, loading: Loading, device: torch.device, *, rank: int, count: int
) -> Iterator[torch.Tensor]:
    """Yield batch after batch of a rank's rows: int64 on the device, batch x (positions + 1).

    On a GPU the copy is started, not waited for.

    Args:
        geometry: tells vocabulary and positions.
        loading: how to read.
        device: where the rows shall be.
        rank: of ``count`` ranks that read.
        count: of the ranks.

    Raises: EnvironmentBroken if no batch comes in ``WAIT_SECONDS``, or a worker has died.
    """
    data = PackedTokens(rows=ROWS, sequence=geometry.sequence, vocab=geometry.vocab, seed=loading.seed)
    ahead: dict[str, Any] = {}
    if loading.workers:
        ahead = {
            "multiprocessing_context": worker_context(),
            "prefetch_factor": loading.prefetch,
            "timeout": LOOK_SECONDS,
        }
    loader = DataLoader(
        data,
        batch_size=loading.batch,
        sampler=OwnRows(rank=rank, count=count),
        num_workers=loading.workers,
        # Only from pinned memory can a copy go on while the host does something else.
        pin_memory=device.type == "cuda",
        **ahead,
    )
    batches = iter(loader)
    while True:
        try:
            rows = _next(batches)
        except (RuntimeError, OSError, EOFError) as error:
            # Besides torch's own words: of a worker that dies while it hands over a batch, only the closed pipe tells.
            if not loading.workers or (isinstance(error, RuntimeError) and "DataLoader" not in str(error)):
                raise
            cause = str(error).partition("\n")[0] or type(error).__name__
            raise EnvironmentBroken(
                f"no batch came from the {loading.workers} workers of the DataLoader: {cause}. "
                "Look at the memory of the node and at the size of its /dev/shm, or read without workers "
                "(--gpucluster-workload, workers=0 of what this test trains)"
            ) from error
        yield rows.to(device, non_blocking=True)
