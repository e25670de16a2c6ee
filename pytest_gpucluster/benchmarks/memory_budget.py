"""Memory of the device: what a benchmark needs, what it must exceed, and its release at the end."""

from __future__ import annotations

import functools
import gc
import math
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import ParamSpec, TypeVar

import torch

from pytest_gpucluster.benchmarks.group import Ranks
from pytest_gpucluster.device.backends import accelerator, return_memory
from pytest_gpucluster.errors import EnvironmentBroken

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

CACHES = 3
"""Buffers that are used in turn exceed the device's last cache by this factor together: then none is still in it when
its turn comes again. Source: this suite's rule; twice would do for a cache that forgets the oldest first."""


@contextmanager
def memory_released(*, cycles: bool = False) -> Iterator[None]:
    """Return the memory that is allocated inside to the device, on return and on errors.

    torch's allocator would keep it, and NCCL, which allocates for itself, would run out of memory later. The
    tensors must belong to a function called inside: those of the caller are still in use.

    Args:
        cycles: the code inside makes objects with reference cycles, as FSDP2 and DistributedDataParallel do. Without
            this they stay until Python's garbage collection; and on gloo, one that outlives its process group aborts
            the process.
    """
    try:
        yield
    except BaseException as error:
        # A report keeps the traceback, the traceback its frames, and the frames gigabytes of tensors.
        raised: BaseException | None = error
        known: set[int] = set()  # the chain may be a circle: two errors, each raised from the other
        while raised is not None and id(raised) not in known:
            known.add(id(raised))
            traceback.clear_frames(raised.__traceback__)
            raised = raised.__cause__ or raised.__context__
        if cycles:
            gc.collect()
        with suppress(RuntimeError):  # on a lost device this fails as well, and must not hide the cause
            return_memory()
        raise
    if cycles:
        gc.collect()
    return_memory()


def releases_memory(*, cycles: bool = False) -> Callable[[Callable[Parameters, Result]], Callable[Parameters, Result]]:
    """Decorate a function so that all its memory is released when it returns or raises: see :func:`memory_released`.

    No frame of a kept traceback refers to its local variables or arguments, among them the process group: on gloo, one
    that outlives its end aborts the process.
    """

    def decorate(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
        @functools.wraps(function)
        def call(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
            try:
                with memory_released(cycles=cycles):
                    return function(*args, **kwargs)
            finally:
                del args, kwargs

        return call

    return decorate


def sets_beyond_cache(set_bytes: int, cache: int) -> int:
    """Return how many sets of buffers to use in turn, so that no set is in the cache when its turn comes.

    One, if it is large enough by itself.

    >>> sets_beyond_cache(500, 50), sets_beyond_cache(150, 50), sets_beyond_cache(100, 50), sets_beyond_cache(1, 0)
    (1, 1, 2, 1)
    """
    return max(1, math.ceil(CACHES * cache / set_bytes))


def require_free(device: torch.device, needed_bytes: int, what: str, *, instead: str) -> None:
    """Check that there is enough memory, before a benchmark allocates it.

    Args:
        device: whose memory.
        needed_bytes: of the benchmark.
        what: the benchmark, for the message.
        instead: how to ask for less, for the message.

    Raises: EnvironmentBroken if less is free. It is no failure: another process may use the memory.
    """
    free = accelerator(device).free_bytes()
    _require(str(device), UNKNOWN_BYTES if free is None else free, needed_bytes, what, instead)


def _require(where: str, free: float, needed_bytes: int, what: str, instead: str) -> None:
    if free < needed_bytes:
        raise EnvironmentBroken(
            f"{where}: {what} needs {needed_bytes / 1e9:.3g} GB of memory, and {free / 1e9:.3g} GB are free; end what"
            f" else uses this device (nvidia-smi names the processes), or {instead}"
        )


UNKNOWN_BYTES = 2**52
"""Stands for unknown free memory in an exchange: then the allocation itself fails if there is too little."""


def free_on_all(ranks: Ranks, device: torch.device) -> list[float]:
    """Return the free bytes on each rank; ``UNKNOWN_BYTES`` where unknown. Collective: every rank must call this."""
    free = accelerator(device).free_bytes()
    return [its for [its] in ranks.gather([UNKNOWN_BYTES if free is None else free])]


def require_free_on_all(ranks: Ranks, device: torch.device, needed_bytes: int, what: str, *, instead: str) -> None:
    """Check that every rank has enough memory, on all of them alike. Collective: every rank must call this.

    Args:
        ranks: of the group.
        device: this rank's.
        needed_bytes, what, instead: as for ``require_free``.

    Raises: EnvironmentBroken on all ranks, naming the one with the least.
    """
    free = free_on_all(ranks, device)
    least = min(range(len(free)), key=free.__getitem__)
    _require(ranks.name(least), free[least], needed_bytes, what, instead)
