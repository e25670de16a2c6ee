"""Keep one device and its link to the host busy, so that what is read meanwhile is true of work and not of rest."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch

from pytest_gpucluster.benchmarks.footprint import memory_returned
from pytest_gpucluster.metrics.time_budget import MEASURING, counted

LOOK_SECONDS = 0.2
"""About how long the device still works after a look."""

ROWS = {"cuda": 8192, "cpu": 256}
"""Rows and columns of the matrices. A product of 8192 takes a data center GPU to its power limit."""

COPY_BYTES = 64 * 2**20
"""Enough for one copy to last milliseconds on a link of PCIe, so that the link does not fall asleep in between."""

PRODUCTS_PER_COPY = 4
"""So many take longer than the copy on every GPU: then the multipliers never wait for the link."""

_MEASURED_SECONDS = 0.1
_STEPS_AT_MOST = 10_000


def keep_busy(device: torch.device, look: Callable[[], None], *, seconds: float) -> int:
    """Multiply bf16 matrices and copy from the host until the time is up, and look at the device meanwhile.

    Products and copies are enqueued for as long as the last look took and ``LOOK_SECONDS`` more; ``look`` is called
    while they run, then they are waited for. On cpu, where nothing runs by itself, it is called after them.

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
    with counted(MEASURING), memory_returned():
        return _keep_busy(device, look, seconds=seconds)


def held_bytes(device: torch.device) -> int:
    """Return what this process's allocator holds on a device, used or not; 0 on cpu, where there is none."""
    return torch.cuda.memory_reserved(device) if device.type == "cuda" else 0


def _keep_busy(device: torch.device, look: Callable[[], None], *, seconds: float) -> int:
    step = _Step(device)
    each = _seconds_of(step)
    until, looks, look_seconds = time.monotonic() + seconds, 0, 0.0
    while looks == 0 or time.monotonic() < until:
        for _ in range(max(1, min(_STEPS_AT_MOST, round((LOOK_SECONDS + look_seconds) / each)))):
            step.enqueue()
        begin = time.monotonic()
        look()
        look_seconds = min(time.monotonic() - begin, seconds)
        step.wait()
        looks += 1
    return looks


def _seconds_of(step: _Step) -> float:
    """Measure one step with ever more of them, which also loads the kernels and wakes the clocks."""
    count = 1
    while True:
        begin = time.monotonic()
        for _ in range(count):
            step.enqueue()
        step.wait()
        took = time.monotonic() - begin
        if took >= _MEASURED_SECONDS or count >= _STEPS_AT_MOST:
            return max(took / count, 1e-6)
        count *= 2


class _Step:
    """Some products and one copy, which run at the same time where the device has streams."""

    def __init__(self, device: torch.device) -> None:
        generator = torch.Generator(device).manual_seed(0)
        n = ROWS[device.type]
        # Random: zeros would let the device run cooler than work does.
        self._a, self._b = (
            torch.randn(n, n, generator=generator, device=device, dtype=torch.bfloat16) for _ in range(2)
        )
        self._out = torch.empty_like(self._a)
        self._device = device
        self._streams = device.type == "cuda"
        # Pinned, or the copy would go through a buffer of the driver at a fraction of the link's speed.
        self._host = torch.empty(COPY_BYTES if self._streams else 2**16, dtype=torch.uint8, pin_memory=self._streams)
        self._there = torch.empty_like(self._host, device=device, pin_memory=False)
        # torch ships no types for it.
        self._side = torch.cuda.Stream(device) if self._streams else None  # type: ignore[no-untyped-call]

    def enqueue(self) -> None:
        for _ in range(PRODUCTS_PER_COPY):
            torch.mm(self._a, self._b, out=self._out)
        with torch.cuda.stream(self._side):
            self._there.copy_(self._host, non_blocking=True)

    def wait(self) -> None:
        if self._streams:
            torch.cuda.synchronize(self._device)
