"""Keep one device and its link to the host busy, so that what is read meanwhile is true of work and not of rest."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch

from pytest_gpucluster.benchmarks.footprint import memory_returned

LOOK_SECONDS = 0.2
"""About how long the device works between two looks."""

COPY_BYTES = 64 * 2**20
"""Enough for one copy to last milliseconds on any link, so that the link does not fall asleep between copies."""

SMALLEST, LARGEST = 256, 8192
"""Rows and columns of the matrices. The largest takes a data center GPU to its power limit."""

PRODUCT_SECONDS = 0.001
"""Matrices grow until a product takes so long: then launching it costs nothing beside it."""

_STEPS_AT_MOST = 10_000


def keep_busy(device: torch.device, look: Callable[[], None], *, seconds: float) -> int:
    """Multiply bf16 matrices and copy from the host until the time is up, and look at the device meanwhile.

    Products and copies are enqueued for about ``LOOK_SECONDS``; ``look`` is called while they run, then they are waited
    for. On cpu, where nothing runs by itself, it is called after them.

    Args:
        device: what to keep busy.
        look: called at least once, from this thread.
        seconds: how long.

    Returns: how often ``look`` was called.

    Raises:
        ValueError: the time is not positive and finite.
        RuntimeError: the device failed.
    """
    if not 0 < seconds < math.inf:
        raise ValueError(f"seconds must be positive and finite, not {seconds}")
    with memory_returned():
        return _keep_busy(device, look, seconds=seconds)


def held_bytes(device: torch.device) -> int:
    """Return what this process's allocator holds on a device, used or not; 0 on cpu, where there is none."""
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else 0


def _keep_busy(device: torch.device, look: Callable[[], None], *, seconds: float) -> int:
    step = _large_enough(device)
    until, looks, steps = time.monotonic() + seconds, 0, 1
    while looks == 0 or time.monotonic() < until:
        begin = time.monotonic()
        for _ in range(steps):
            step.enqueue()
        look()
        step.wait()
        looks += 1
        took = max(time.monotonic() - begin, 1e-6)
        # As many as last for the time between two looks; doubling at most, for the first are slow.
        steps = max(1, min(_STEPS_AT_MOST, 2 * steps, round(steps * LOOK_SECONDS / took)))
    return looks


def _large_enough(device: torch.device) -> _Step:
    n = SMALLEST
    while True:
        step = _Step(device, n)
        took = []
        for _ in range(2):  # the first one of a size loads its kernel
            begin = time.monotonic()
            step.enqueue()
            step.wait()
            took.append(time.monotonic() - begin)
        if took[-1] >= PRODUCT_SECONDS or n >= LARGEST:
            return step
        n *= 2


class _Step:
    """One product and one copy, which run at the same time where the device has streams."""

    def __init__(self, device: torch.device, n: int) -> None:
        generator = torch.Generator().manual_seed(0)
        # Random: zeros would let the device run cooler than work does.
        self._a, self._b = (torch.randn(n, n, generator=generator).to(device, torch.bfloat16) for _ in range(2))
        self._out = torch.empty_like(self._a)
        self._device = device
        self._streams = device.type == "cuda"
        # Pinned, or the copy would go through a buffer of the driver at a fraction of the link's speed.
        self._host = torch.empty(COPY_BYTES if self._streams else 2**16, dtype=torch.uint8, pin_memory=self._streams)
        self._there = torch.empty_like(self._host, device=device, pin_memory=False)
        # torch ships no types for it.
        self._side = torch.cuda.Stream(device) if self._streams else None  # type: ignore[no-untyped-call]

    def enqueue(self) -> None:
        torch.mm(self._a, self._b, out=self._out)
        with torch.cuda.stream(self._side):
            self._there.copy_(self._host, non_blocking=True)

    def wait(self) -> None:
        if self._streams:
            torch.cuda.synchronize(self._device)
