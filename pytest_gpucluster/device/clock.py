"""Clocks for the work on a device.

A benchmark opens regions one after the other and reads them all at once. On a GPU nothing waits between the
regions: the host runs ahead, the device's queue stays full, and launch times do not show.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch


class Clock(Protocol):
    """A stop watch for work on one device.

    with clock.region():
        torch.mm(a, b, out=c)
    [seconds] = clock.read()
    """

    def region(self) -> AbstractContextManager[None]:
        """Time the work that is started inside. Regions do not nest; one that raises is not counted."""

    def read(self) -> list[float]:
        """Wait for the device once; return the seconds of each region since the last read, in order."""

    def synchronize(self) -> None:
        """Wait until the device has done all work that was started so far."""

    def get_ahead(self, launches: int, *, seconds: float) -> None:
        """Prepare for a region with this number of launches that is expected to take about ``seconds``.

        Before a short region the device is kept waiting until the host has enqueued all of it: otherwise the device
        would run dry between two launches, and the region would measure the host. Call it outside of regions.
        """

    def real(self, count: int) -> int:
        """Return how many of ``count`` equal operations to really start: all, but on a simulated device few."""
        return count

    def scaled(self, ratio: float) -> AbstractContextManager[None]:
        """Let the regions inside count this many times: planned operations for each one that is really started."""
        return nullcontext()


SHORT_REGION_SECONDS = 1e-3
"""In a longer region the first launch on an idle device, some 10 us, is no more than 1 %."""

LAUNCH_SECONDS = 50e-6
"""A generous estimate of the host's time for one launch of a library's kernel through torch."""

_CYCLES_PER_SECOND = 2e9
"""About the highest clock of the GPUs so far. At a lower one the device waits longer, which does no harm."""


RESOLUTION_SECONDS = 0.5e-6
"""About the resolution of CUDA events. Source: CUDA Runtime API, event management, cudaEventElapsedTime."""


class EventClock(Clock):
    """Device time between pairs of CUDA events on the current stream, to about ``RESOLUTION_SECONDS``.

    Source: CUDA Runtime API, event management, cudaEventElapsedTime.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def region(self) -> Iterator[None]:
        """Record one event before the work and one after it, without waiting."""
        stream = torch.cuda.current_stream(self._device)
        begin, end = _timing_event(), _timing_event()
        begin.record(stream)
        yield
        end.record(stream)
        self._pairs.append((begin, end))

    def read(self) -> list[float]:
        """Synchronize, then ask each pair for its time."""
        self.synchronize()
        pairs, self._pairs = self._pairs, []
        return [begin.elapsed_time(end) / 1e3 for begin, end in pairs]

    def synchronize(self) -> None:
        """Wait for all streams of the device."""
        torch.cuda.synchronize(self._device)

    def get_ahead(self, launches: int, *, seconds: float) -> None:
        """Before a short region let one thread of the device spin for as long as the host may need to enqueue it.

        One thread, because a load would heat the device, and a longer rest would cool it.
        """
        if seconds < SHORT_REGION_SECONDS:
            with torch.cuda.device(self._device):
                # torch ships no types for it. It runs on the current stream, ahead of the region.
                torch.cuda._sleep(int(launches * LAUNCH_SECONDS * _CYCLES_PER_SECOND))  # type: ignore[no-untyped-call]


def _timing_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch leaves it untyped


class WallClock(Clock):
    """Host time, for devices that have completed the work when the call returns.

    Args:
        now: a clock in seconds, which only goes forward.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._seconds: list[float] = []

    @contextmanager
    def region(self) -> Iterator[None]:
        """Read the clock before the work and after it."""
        begin = self._now()
        yield
        self._seconds.append(self._now() - begin)

    def read(self) -> list[float]:
        """Return the regions' times; nothing has to be waited for."""
        seconds, self._seconds = self._seconds, []
        return seconds

    def synchronize(self) -> None:
        """Return at once."""

    def get_ahead(self, launches: int, *, seconds: float) -> None:
        """Return at once: nothing is enqueued, each call does its work before it returns."""


class ManualClock(WallClock):
    """A clock that moves only by ``advance``: the fake for tests.

    >>> clock = ManualClock()
    >>> with clock.region():
    ...     clock.advance(0.5)
    >>> clock.read(), clock.read()
    ([0.5], [])
    """

    def __init__(self) -> None:
        super().__init__(lambda: self.now_seconds)
        self.now_seconds = 0.0
        self.prepared: list[tuple[int, float]] = []
        """Launches and expected seconds of each call of ``get_ahead``."""

    def advance(self, seconds: float) -> None:
        """Let the work in the current region take ``seconds``."""
        self.now_seconds += seconds

    def get_ahead(self, launches: int, *, seconds: float) -> None:
        """Record the call."""
        self.prepared.append((launches, seconds))
