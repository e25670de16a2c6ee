"""Reads GPUs while windows on them are open: one thread for all GPUs of the node's sampler (``sampler_process``).

Nothing that NVML does (raise, hang, lose a GPU) reaches the caller that closes a window: what could not be read is
named, and closing waits a bounded time at most.

Each sample of a GPU asks for the SM clock and the throttle reasons, and in turn for one of the others. Those cover a
longer time anyway (see ``telemetry``), and every call serialises with the driver's other work, launches among it.
Source: a developer of NVIDIA's driver in https://github.com/flightlessmango/MangoHud/pull/1307; measured in
https://github.com/flightlessmango/MangoHud/pull/2104. One thread, because waking one costs more than a sample takes;
and a driver that hangs over one GPU would not report the others either, for its lock is the same for all of them.
"""

from __future__ import annotations

import math
import threading
import time
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from pytest_gpucluster.node.health.telemetry import INTERVAL_SECONDS, OF_THE_CARD, QUERIES, THROTTLE, checked, summary
from pytest_gpucluster.node.nvml import NotAvailable

EACH_LOOK = ("sm_clock_mhz", THROTTLE)
IN_TURN = tuple(key for key in QUERIES if key not in EACH_LOOK)
# What a GPU does not tell now it does not tell later. A failure or a lost GPU is looked at again in the next window.
_LASTING = ("not supported", "no permission")
LEAVE_SECONDS = 0.3
"""Several times what one pass of all queries takes on a busy node; beyond it NVML hangs."""


class Reader(Protocol):
    """What is needed of ``nvml.Nvml``."""

    def read(self, uuid: str, query: str) -> Any:
        """Return the answer to one query. Raises: NotAvailable if this GPU or driver has none."""


class GpuWindow:
    """A time in which the GPU is watched. Opened again, it adds to what it has. Times are of the monotonic clock."""

    def __init__(self, sampler: GpuSampler) -> None:
        self._sampler = sampler
        self._seconds = 0.0
        self._opened_at: float | None = None
        self._numbers: dict[str, array[float]] = {}
        self._reasons: list[tuple[str, ...]] = []
        self._known: dict[tuple[str, ...], tuple[str, ...]] = {}
        """Each tuple of reasons once: there may be a hundred thousand readings, and few different ones."""
        self._throttle_seconds: dict[str, float] = {}
        self._held: tuple[tuple[str, ...], float] | None = None
        """The reasons read last, and from when on no time has been put down to them."""
        self._not_available: dict[str, str] = {}
        self.lost = ""
        """What NVML said when it could not reach the GPU any more."""
        self.passes = 0
        """How often the GPU was asked since the window was opened last."""

    def open(self, at: float | None = None) -> None:
        """Begin to watch."""
        if self._opened_at is not None:
            raise RuntimeError("this window is open already; make another one")
        self.passes = 0
        self._held = None
        self._opened_at = time.monotonic() if at is None else at
        self._sampler._open(self)

    def close(self, at: float | None = None) -> None:
        """End watching. Waits for a first reading, if there is none yet, for a bounded time."""
        end = time.monotonic() if at is None else at
        if self._opened_at is None:
            return
        self._sampler._close(self, end)
        self._seconds += max(0.0, end - self._opened_at)
        self._opened_at = None

    def take(self, read: Mapping[str, Any], at: float) -> None:
        """Add what a pass has read."""
        for key, value in read.items():
            if key != THROTTLE:
                self._numbers.setdefault(key, array("d")).append(value)
                continue
            assert self._opened_at is not None
            reasons = self._known.setdefault(value, value)
            self._reasons.append(reasons)
            # The first reading of a window stands for the time since its beginning.
            self._put_down(at)
            self._held = reasons, self._opened_at if self._held is None else self._held[1]

    def miss(self, key: str, why: str) -> None:
        """Note why a key cannot be read; the first reason stays."""
        self._not_available.setdefault(key, why)

    def finish(self, at: float) -> None:
        """Put the time since the last reading down to its reasons."""
        self._put_down(at)
        self._held = None

    def summary(self) -> dict[str, Any]:
        """Return what was seen, as ``telemetry.summary`` does."""
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

    def _put_down(self, at: float) -> None:
        if self._held is None:
            return
        reasons, since = self._held
        for reason in reasons:
            self._throttle_seconds[reason] = self._throttle_seconds.get(reason, 0.0) + max(0.0, at - since)
        self._held = reasons, max(at, since)


class Pace:
    """The thread that looks at each GPU with open windows, every interval. Every method may be called from any thread.

    Args:
        interval_seconds: the time from one round of looks to the next. A round that takes longer than half of it is
            followed by a pause as long as itself, so that at least half of the time nothing is asked.
        leave_seconds: how long closing a window waits at most for a first reading, by default ``LEAVE_SECONDS``.
    """

    def __init__(self, interval_seconds: float = INTERVAL_SECONDS, *, leave_seconds: float | None = None) -> None:
        if not 0 < interval_seconds < math.inf:
            raise ValueError(f"an interval is a positive number of seconds, not {interval_seconds}")
        self.leave_seconds = LEAVE_SECONDS if leave_seconds is None else leave_seconds
        self.condition = threading.Condition()
        self.asked: tuple[GpuSampler, str, float] | None = None
        """What NVML is being asked, and since when."""
        self.is_closed = False
        self._interval_seconds = interval_seconds
        self._samplers: list[GpuSampler] = []
        self._thread: threading.Thread | None = None

    @property
    def is_running(self) -> bool:
        """Tell whether there is a thread that reads."""
        return self._thread is not None

    def is_stuck(self) -> bool:
        """Tell whether NVML owes an answer for longer than anyone waits for it."""
        return self.asked is not None and time.monotonic() - self.asked[2] >= self.leave_seconds

    def begin(self, sampler: GpuSampler) -> None:
        """Look at a GPU from now on, while it has windows. With the condition held.

        Raises:
            RuntimeError: no more threads here.
        """
        if sampler not in self._samplers:
            self._samplers.append(sampler)
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="gpucluster-telemetry", daemon=True)
            thread.start()
            self._thread = thread
        self.condition.notify_all()

    def close(self) -> None:
        """End the thread. Windows can be opened after it, and tell that nothing was read."""
        with self.condition:
            self.is_closed = True
            self.condition.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join(self.leave_seconds)

    def _run(self) -> None:
        due: float | None = None
        while True:
            with self.condition:
                if not any(one.windows for one in self._samplers):
                    due = None
                    self.condition.wait_for(lambda: self.is_closed or any(one.windows for one in self._samplers))
                due = due or time.monotonic() + self._interval_seconds
                while not self.is_closed:
                    hurried = [one for one in self._samplers if one.is_hurried]
                    left = due - time.monotonic()
                    if hurried or left <= 0:
                        break
                    self.condition.wait(left)
                else:
                    return
                is_round = left <= 0
                looks = [(one, one.prepare()) for one in (self._samplers if is_round else hurried) if one.windows]
            begin = time.monotonic()
            for one, keys in looks:
                one.look(keys)
            spent = time.monotonic() - begin
            if is_round:
                due = begin + spent + max(self._interval_seconds - spent, spent)


class GpuSampler:
    """Reads one GPU for any number of windows. Every method may be called from any thread.

    Args:
        nvml: where to read; None if NVML cannot be used.
        uuid: the GPU.
        pace: when to look at it.
        why_not: why there is no ``nvml``.
    """

    def __init__(self, nvml: Reader | None, uuid: str, pace: Pace, *, why_not: str = "NVML is not available") -> None:
        self.windows: list[GpuWindow] = []
        """Those that are open."""
        self.is_hurried = False
        """Somebody waits for a first reading."""
        self._nvml = nvml
        self._uuid = uuid
        self._pace = pace
        self._condition = pace.condition
        self._turn = 0
        self._read: dict[str, Any] = {}
        """What the look that is under way has read so far. Only its thread writes to it, and it begins a new one."""
        self._reading_for: Sequence[GpuWindow] = ()
        """The windows that were open when that look began."""
        self._card: dict[str, float] | None = None
        self._unsupported: dict[str, str] = {} if nvml is not None else dict.fromkeys(QUERIES, why_not)
        """What this GPU does not tell, and why. It is never asked again."""
        self._failed: dict[str, str] = {}
        """What has failed while the present windows are open. It is asked again in the next."""

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
                except RuntimeError as error:  # no more threads here: the measurement goes on without
                    self._fail_all(f"no thread for the readings: {error}")

    def _close(self, window: GpuWindow, at: float) -> None:
        with self._condition:
            if window not in self.windows:
                return
            is_late = False
            if window.passes == 0 and self._pace.is_running and self._wanted() and not self._pace.is_stuck():
                self.is_hurried = True
                self._condition.notify_all()
                is_late = not self._condition.wait_for(lambda: window.passes > 0, self._pace.leave_seconds)
            self.windows.remove(window)
            if self._pace.asked is not None and (is_late or self._pace.is_stuck()):
                sampler, key, since = self._pace.asked
                self._take_what_there_is(window, sampler, key, since)
            window.finish(at)

    def _take_what_there_is(self, window: GpuWindow, sampler: GpuSampler, key: str, since: float) -> None:
        """NVML hangs over a question to a GPU: give the window what was read before, and say so of the rest."""
        read: Mapping[str, Any] = {}
        hung = f"{key} of {sampler._uuid}"
        if sampler is self:
            read, hung = dict(self._read) if window in self._reading_for else {}, key
            window.take(read, since)
            window.miss(key, f"NVML has not answered for {time.monotonic() - since:.1f} s")
        if not window.passes:
            for other in self._wanted():
                if other not in read:
                    window.miss(other, f"not asked: NVML does not answer for {hung}")

    def _wanted(self) -> list[str]:
        return [key for key in QUERIES if key not in self._unsupported and key not in self._failed]

    def _fail_all(self, why: str) -> None:
        for key in self._wanted():
            self._failed[key] = why
            for window in self.windows:
                window.miss(key, why)

    # ---- for the thread ------------------------------------------------------------------------------------------

    def prepare(self) -> list[str]:
        """Return what a look asks for: everything for a window's first reading, then the others in turn. With the
        condition held."""
        self.is_hurried = False
        self._read, self._reading_for = {}, list(self.windows)
        wanted = self._wanted()
        if any(window.passes == 0 for window in self.windows):
            return wanted
        self._turn = (self._turn + 1) % len(IN_TURN)
        return [key for key in wanted if key in EACH_LOOK or key == IN_TURN[self._turn]]

    def look(self, keys: Sequence[str]) -> None:
        """Ask the GPU, and give the windows what it says. The condition is not held while NVML answers, and NVML's
        binding releases the GIL."""
        begin = time.monotonic()
        for key in keys:
            if not self._ask(key):
                break
        if self._card is None and keys:
            self._card = self._of_the_card()
        self._pace.asked = None
        with self._condition:
            for window in self._reading_for:
                if window in self.windows:  # others have left in the meantime
                    window.take(self._read, begin)
                window.passes += 1
            self._read, self._reading_for = {}, ()
            self._condition.notify_all()

    def _ask(self, key: str) -> bool:
        """Ask for one key; return False if the GPU is lost, so that there is nothing more to ask."""
        assert self._nvml is not None
        self._pace.asked = self, key, time.monotonic()
        try:
            self._read[key] = checked(key, self._nvml.read(self._uuid, QUERIES[key]))
        except NotAvailable as error:
            why, kind = str(error) or "not available", error.kind
        except Exception as error:  # whatever a binding or a driver comes up with; what is lost is named
            why, kind = f"{type(error).__name__}: {error}", "failed"
        else:
            return True
        with self._condition:
            self._pace.asked = None
            present = [window for window in self._reading_for if window in self.windows]
            if kind == "lost":
                self._fail_all(why)
                for window in present:
                    window.lost = why
            else:
                (self._unsupported if kind in _LASTING else self._failed)[key] = why
                for window in present:
                    window.miss(key, why)
        return kind != "lost"

    def _of_the_card(self) -> dict[str, float]:
        """Ask what does not change. It only helps to explain, so that a card that does not tell it lacks nothing."""
        assert self._nvml is not None
        found: dict[str, float] = {}
        for key, query in OF_THE_CARD.items():
            self._pace.asked = self, key, time.monotonic()
            try:
                value = checked(key, self._nvml.read(self._uuid, query))
            except Exception:  # as in _ask; nothing that was promised is missing
                continue
            if value > 0:  # a limit of 0 is how some drivers say that the card has none
                found[key] = value
        return found
