"""Sampling of GPUs while windows on them are open: one thread for all GPUs of the sampler (``sampler_process``).

NVML may raise, hang or lose a GPU: the caller that closes a window gets the reason of each missing value, and waits a
bounded time at most.

Each sample of a GPU reads the SM clock and the throttle reasons, and one of the others in turn. Those cover a longer
time anyway (see ``telemetry``), and every call serialises with the driver's other work, kernel launches among it.
Source: a developer of NVIDIA's driver in https://github.com/flightlessmango/MangoHud/pull/1307; measured in
https://github.com/flightlessmango/MangoHud/pull/2104. One thread, because waking one costs more than a sample takes;
and a driver that hangs on one GPU would block the others too, for it has one lock for all of them.
"""

from __future__ import annotations

import math
import threading
import time
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from pytest_gpucluster.node.health.telemetry import (
    CARD_QUERIES,
    INTERVAL_SECONDS,
    QUERIES,
    THROTTLE,
    summary,
    validated,
)
from pytest_gpucluster.node.nvml import Nvml, read_values

EACH_SAMPLE = ("sm_clock_mhz", THROTTLE)
IN_TURN = tuple(key for key in QUERIES if key not in EACH_SAMPLE)
# These never change, so the query is not repeated. A failure or a lost GPU is retried in the next window.
_PERMANENT = ("not supported", "no permission")
CLOSE_SECONDS = 0.3
"""Several times what one pass of all queries takes on a busy node; beyond it NVML hangs."""


class GpuWindow:
    """A time in which the GPU is sampled. Opened again, it adds to its readings. Times are of the monotonic clock."""

    def __init__(self, sampler: GpuSampler) -> None:
        self._sampler = sampler
        self._seconds = 0.0
        self._opened_at: float | None = None
        self._numbers: dict[str, array[float]] = {}
        self._reasons: list[tuple[str, ...]] = []
        self._known: dict[tuple[str, ...], tuple[str, ...]] = {}
        """Each tuple of reasons once: there may be 100,000 readings with few different ones."""
        self._throttle_seconds: dict[str, float] = {}
        self._active: tuple[tuple[str, ...], float] | None = None
        """The reasons read last, and the time up to which they have been counted."""
        self._not_available: dict[str, str] = {}
        self.lost = ""
        """NVML's message where the GPU was lost."""
        self.passes = 0
        """How often the GPU was read since the window was opened last."""

    def open(self, at: float | None = None) -> None:
        """Begin sampling."""
        if self._opened_at is not None:
            raise RuntimeError("this window is open already; make another one")
        self.passes = 0
        self._active = None
        self._opened_at = time.monotonic() if at is None else at
        self._sampler._open(self)

    def close(self, at: float | None = None) -> None:
        """End sampling. Waits for a first reading, if there is none yet, for a bounded time."""
        end = time.monotonic() if at is None else at
        if self._opened_at is None:
            return
        self._sampler._close(self, end)
        self._seconds += max(0.0, end - self._opened_at)
        self._opened_at = None

    def __enter__(self) -> None:
        self.open()

    def __exit__(self, *error: object) -> None:
        self.close()

    def take(self, read: Mapping[str, Any], at: float) -> None:
        """Add the values of one pass."""
        for key, value in read.items():
            if key != THROTTLE:
                self._numbers.setdefault(key, array("d")).append(value)
                continue
            assert self._opened_at is not None
            reasons = self._known.setdefault(value, value)
            self._reasons.append(reasons)
            # The first reading of a window counts for the time since its beginning.
            self._count_reasons(at)
            self._active = reasons, self._opened_at if self._active is None else self._active[1]

    def miss(self, key: str, why: str) -> None:
        """Record why a key cannot be read; the first reason stays."""
        self._not_available.setdefault(key, why)

    def finish(self, at: float) -> None:
        """Count the time since the last reading for its reasons."""
        self._count_reasons(at)
        self._active = None

    def summary(self) -> dict[str, Any]:
        """Return the summary, as ``telemetry.summary`` does."""
        with self._sampler._condition:
            readings: dict[str, Sequence[Any]] = {key: tuple(read) for key, read in self._numbers.items()}
            readings[THROTTLE] = tuple(self._reasons)
            return summary(
                readings,
                seconds=self._seconds,
                not_available=self._not_available,
                lost=self.lost,
                throttle_seconds=self._throttle_seconds,
                card=self._sampler._card,
            )

    def _count_reasons(self, at: float) -> None:
        if self._active is None:
            return
        reasons, since = self._active
        for reason in reasons:
            self._throttle_seconds[reason] = self._throttle_seconds.get(reason, 0.0) + max(0.0, at - since)
        self._active = reasons, max(at, since)


class Pace:
    """The thread that samples each GPU with open windows, every interval. Methods may be called from any thread.

    Args:
        interval_seconds: the time from one round of samples to the next. A round that takes longer than half of it is
            followed by a pause as long as itself, so that at least half of the time there is no query.
        close_seconds: how long closing a window waits at most for a first reading, by default ``CLOSE_SECONDS``.
    """

    def __init__(self, interval_seconds: float = INTERVAL_SECONDS, *, close_seconds: float | None = None) -> None:
        if not 0 < interval_seconds < math.inf:
            raise ValueError(f"an interval is a positive number of seconds, not {interval_seconds}")
        self.close_seconds = CLOSE_SECONDS if close_seconds is None else close_seconds
        self.condition = threading.Condition()
        self.current: tuple[GpuSampler, str, float] | None = None
        """The query that runs, and since when."""
        self.is_closed = False
        self._interval_seconds = interval_seconds
        self._samplers: list[GpuSampler] = []
        self.thread: threading.Thread | None = None
        """None before it is started."""

    def is_stuck(self) -> bool:
        """Whether a query has been running for longer than closing a window waits."""
        return self.current is not None and time.monotonic() - self.current[2] >= self.close_seconds

    def begin(self, sampler: GpuSampler) -> None:
        """Sample a GPU from now on, while it has windows. With the condition held.

        Raises:
            RuntimeError: no thread can be started.
        """
        if sampler not in self._samplers:
            self._samplers.append(sampler)
        if self.thread is None:
            thread = threading.Thread(target=self._run, name="gpucluster-telemetry", daemon=True)
            thread.start()
            self.thread = thread
        self.condition.notify_all()

    def close(self) -> None:
        """End the thread. Windows can still be opened, and their summaries are empty."""
        with self.condition:
            self.is_closed = True
            self.condition.notify_all()
            thread = self.thread
        if thread is not None:
            thread.join(self.close_seconds)

    def _run(self) -> None:
        due: float | None = None
        while True:
            with self.condition:
                if not any(one.windows for one in self._samplers):
                    due = None
                    self.condition.wait_for(lambda: self.is_closed or any(one.windows for one in self._samplers))
                due = due or time.monotonic() + self._interval_seconds
                while not self.is_closed:
                    urgent = [one for one in self._samplers if one.is_urgent]
                    left = due - time.monotonic()
                    if urgent or left <= 0:
                        break
                    self.condition.wait(left)
                else:
                    return
                is_round = left <= 0
                due_now = [(one, one.prepare()) for one in (self._samplers if is_round else urgent) if one.windows]
            begin = time.monotonic()
            for one, keys in due_now:
                one.sample(keys)
            spent = time.monotonic() - begin
            if is_round:
                due = begin + spent + max(self._interval_seconds - spent, spent)


class GpuSampler:
    """Reads one GPU for any number of windows. Every method may be called from any thread.

    Where NVML cannot be used ``nvml`` is None, and ``why_not`` the reason.
    """

    def __init__(self, nvml: Nvml | None, uuid: str, pace: Pace, *, why_not: str = "NVML is not available") -> None:
        self.windows: list[GpuWindow] = []
        """The open ones."""
        self.is_urgent = False
        """A window waits for its first reading."""
        self._nvml = nvml
        self._uuid = uuid
        self._pace = pace
        self._condition = pace.condition
        self._turn = 0
        self._read: dict[str, Any] = {}
        """The values of the current sample so far. Only the thread writes to it, and each sample begins a new one."""
        self._reading_for: Sequence[GpuWindow] = ()
        """The windows that were open when that sample began."""
        self._card: dict[str, float] | None = None
        self._unsupported: dict[str, str] = {} if nvml is not None else dict.fromkeys(QUERIES, why_not)
        """Keys that this GPU never has, and why. They are not read again."""
        self._failed: dict[str, str] = {}
        """Keys that failed while the present windows are open. The next window retries them."""

    def window(self) -> GpuWindow:
        """Return a new window, not yet open."""
        return GpuWindow(self)

    # ---- for windows ---------------------------------------------------------------------------------------------

    def _open(self, window: GpuWindow) -> None:
        with self._condition:
            if not self.windows:
                self._failed.clear()
            self.windows.append(window)
            for key, why in {**self._unsupported, **self._failed}.items():
                window.miss(key, why)
            if self._pace.is_closed:
                self._fail_all("the sampler is closed")
            elif self._wanted():
                try:
                    self._pace.begin(self)
                except RuntimeError as error:  # the measurement continues without telemetry
                    self._fail_all(f"no thread for the readings: {error}")

    def _close(self, window: GpuWindow, at: float) -> None:
        with self._condition:
            if window not in self.windows:
                return
            is_late = False
            if window.passes == 0 and self._pace.thread is not None and self._wanted() and not self._pace.is_stuck():
                self.is_urgent = True
                self._condition.notify_all()
                is_late = not self._condition.wait_for(lambda: window.passes > 0, self._pace.close_seconds)
            self.windows.remove(window)
            if self._pace.current is not None and (is_late or self._pace.is_stuck()):
                sampler, key, since = self._pace.current
                self._take_partial(window, sampler, key, since)
            window.finish(at)

    def _take_partial(self, window: GpuWindow, sampler: GpuSampler, key: str, since: float) -> None:
        """NVML hangs on a query: give the window what was read before it, and the reason for the rest."""
        read: Mapping[str, Any] = {}
        hung = f"{key} of {sampler._uuid}"
        if sampler is self:
            read, hung = dict(self._read) if window in self._reading_for else {}, key
            window.take(read, since)
            window.miss(key, f"NVML has not answered for {time.monotonic() - since:.1f} s")
        if not window.passes:
            for other in self._wanted():
                if other not in read:
                    window.miss(other, f"not read: NVML does not answer for {hung}")

    def _wanted(self) -> list[str]:
        return [key for key in QUERIES if key not in self._unsupported and key not in self._failed]

    def _fail_all(self, why: str) -> None:
        for key in self._wanted():
            self._failed[key] = why
            for window in self.windows:
                window.miss(key, why)

    # ---- for the thread ------------------------------------------------------------------------------------------

    def prepare(self) -> list[str]:
        """Return the keys of a sample: all for a window's first reading, then the others in turn. With the condition
        held."""
        self.is_urgent = False
        self._read, self._reading_for = {}, list(self.windows)
        wanted = self._wanted()
        if any(window.passes == 0 for window in self.windows):
            return wanted
        self._turn = (self._turn + 1) % len(IN_TURN)
        return [key for key in wanted if key in EACH_SAMPLE or key == IN_TURN[self._turn]]

    def sample(self, keys: Sequence[str]) -> None:
        """Read the keys, and give the values to the windows. The condition is not held during NVML's calls, and its
        binding releases the GIL."""
        begin = time.monotonic()
        for key in keys:
            if not self._query(key):
                break
        if self._card is None and keys:
            # Constants of the card, which are optional. Some drivers report 0 for a card without a limit.
            assert self._nvml is not None
            self._pace.current = self, "the card's limits", time.monotonic()
            known = read_values(self._nvml, self._uuid, CARD_QUERIES, validated).values
            self._card = {key: value for key, value in known.items() if value > 0}
        self._pace.current = None
        with self._condition:
            for window in self._reading_for:
                if window in self.windows:  # others were closed during the sample
                    window.take(self._read, begin)
                window.passes += 1
            self._read, self._reading_for = {}, ()
            self._condition.notify_all()

    def _query(self, key: str) -> bool:
        """Read one key; return False if the GPU is lost."""
        assert self._nvml is not None
        self._pace.current = self, key, time.monotonic()
        found = read_values(self._nvml, self._uuid, {key: QUERIES[key]}, validated)
        self._read |= found.values
        for why in found.missing.values():
            with self._condition:
                self._pace.current = None
                present = [window for window in self._reading_for if window in self.windows]
                if found.lost:
                    self._fail_all(why.reason)
                    for window in present:
                        window.lost = why.reason
                else:
                    (self._unsupported if why.kind in _PERMANENT else self._failed)[key] = why.reason
                    for window in present:
                        window.miss(key, why.reason)
        return not found.lost
