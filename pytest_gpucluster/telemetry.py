"""What the GPU did while it was measured: clocks, power, temperature, utilisation and throttle reasons.

A daemon thread reads NVML every interval, and only while a window is open. Nothing that NVML does (raise, hang, lose
the GPU) reaches the code that is measured: what could not be read is named in the summary, and leaving a window waits
a bounded time at most.

    with sampler.window() as window:
        ...  # what is measured
    window.summary()  # {"seconds": 3.1, "samples": 31, "sm_clock_mhz": [1740, 1755, 1980], ...}

Some figures look back further than one interval: utilisation is that of the last 1/6 to 1 s, and from the Ampere
generation on (but for the A100) power is the mean of the last second. So the first second of a window also tells of
what was before it.
Source: NVML API Reference, nvmlUtilization_t and nvmlDeviceGetPowerUsage,
https://docs.nvidia.com/deploy/nvml-api/.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType, TracebackType
from typing import Any, Protocol

from pytest_gpucluster import stats
from pytest_gpucluster.nvml import NotAvailable

THROTTLE = "throttle"
QUERIES: Mapping[str, str] = MappingProxyType(
    {
        "sm_clock_mhz": "clock.sm",
        "memory_clock_mhz": "clock.memory",
        "power_watts": "power.draw",
        "temperature_celsius": "temperature.gpu",
        "utilization_percent": "utilization.gpu",
        THROTTLE: "throttle.reasons",
    }
)
"""Key in a summary -> NVML query. What each is in is in its name; ``throttle`` lists names of reasons."""

# An idle GPU is said to be throttled by its idleness.
_NO_THROTTLE = "gpu_idle"
# What a GPU does not tell now it does not tell later. A failure or a lost GPU is looked at again in the next window.
_LASTING = ("not supported", "no permission")
# Several times what one pass of all queries takes on a busy node; beyond it NVML hangs.
_LEAVE_SECONDS = 0.5


class Reader(Protocol):
    """What is needed of ``nvml.Nvml``."""

    def read(self, uuid: str, query: str) -> Any:
        """Return the answer to one query. Raises: NotAvailable if this GPU or driver has none."""


def summary(
    readings: Mapping[str, Sequence[Any]], *, seconds: float, not_available: Mapping[str, str], lost: str = ""
) -> dict[str, Any]:
    """Sum up a window in plain JSON types.

    Args:
        readings: key of ``QUERIES`` -> what was read, in the order of time.
        seconds: how long the window was open.
        not_available: key -> why it could not be read, or not any longer.
        lost: what NVML said when it could not reach the GPU any more.

    Returns:
        ``seconds``; ``samples``, the most readings of any key; for each key that was read ``[min, median, max]``, but
        for ``throttle`` all reasons seen; ``not_available``, which names every other key, and those that failed later;
        ``lost`` only if the GPU was lost.
    """
    missing = dict(not_available)
    result: dict[str, Any] = {
        "seconds": round(seconds, 3),
        "samples": max((len(read) for read in readings.values()), default=0),
    }
    for key in QUERIES:
        read = readings.get(key, ())
        if not read:
            missing.setdefault(key, "no reading in this window")
        elif key == THROTTLE:
            reasons = dict.fromkeys(reason for names in read for reason in names)
            result[key] = [reason for reason in reasons if reason != _NO_THROTTLE]
        else:
            result[key] = [round(value, 1) for value in (min(read), stats.median(read), max(read))]
    result["not_available"] = {key: missing[key] for key in QUERIES if key in missing}
    if lost:
        result["lost"] = lost
    return result


class Window:
    """A time in which the GPU is watched, as a context manager. Entered again, it adds to what it has."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self._seconds = 0.0
        self._entered_at: float | None = None
        self._readings: dict[str, list[Any]] = {}
        self._not_available: dict[str, str] = {}
        self.lost = ""
        """What NVML said when it could not reach the GPU any more."""
        self.passes = 0
        """How often all queries were asked since the window was entered last."""

    def __enter__(self) -> Window:
        if self._entered_at is not None:
            raise RuntimeError("this window is open already; make another one")
        self.passes = 0
        self._sampler._open(self)
        self._entered_at = time.monotonic()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if self._entered_at is not None:
            self._seconds += time.monotonic() - self._entered_at
        self._entered_at = None
        self._sampler._close(self)

    def take(self, key: str, value: Any) -> None:
        """Add a reading."""
        self._readings.setdefault(key, []).append(value)

    def miss(self, key: str, why: str) -> None:
        """Note why a key cannot be read; the first reason stays."""
        self._not_available.setdefault(key, why)

    def summary(self) -> dict[str, Any]:
        """Return what was seen, as :func:`summary` does; nothing at all on cpu."""
        if not self._sampler.has_gpu:
            return {}
        with self._sampler._condition:
            readings = {key: tuple(read) for key, read in self._readings.items()}
            return summary(readings, seconds=self._seconds, not_available=self._not_available, lost=self.lost)


class Sampler:
    """Reads one GPU for any number of windows. Every method may be called from any thread.

    Args:
        nvml: where to read; None if NVML cannot be used.
        uuid: the GPU; None on cpu, where windows do nothing.
        interval_seconds: the time from one pass to the next. A pass that takes longer than half of it is followed by
            a pause as long as itself, so that at least half of the time nothing is asked.
        why_not: why there is no ``nvml``.
        leave_seconds: how long leaving a window waits at most for the first reading.
    """

    def __init__(
        self,
        nvml: Reader | None,
        uuid: str | None,
        interval_seconds: float = 0.1,
        *,
        why_not: str = "NVML is not available",
        leave_seconds: float = _LEAVE_SECONDS,
    ) -> None:
        if not 0 < interval_seconds < math.inf:
            raise ValueError(f"an interval is a positive number of seconds, not {interval_seconds}")
        self._nvml = nvml
        self._uuid = uuid
        self._interval_seconds = interval_seconds
        self._leave_seconds = leave_seconds
        self._condition = threading.Condition()
        self._thread: threading.Thread | None = None
        self._windows: list[Window] = []
        self._is_hurried = False
        self._is_closed = False
        self._asked: tuple[str, float] | None = None
        """The key that NVML is being asked for, and since when."""
        self._unsupported: dict[str, str] = {} if nvml is not None else dict.fromkeys(QUERIES, why_not)
        """What this GPU does not tell, and why. It is never asked again."""
        self._failed: dict[str, str] = {}
        """What has failed while the present windows are open. It is asked again in the next."""

    @property
    def has_gpu(self) -> bool:
        """Tell whether there is a GPU to watch."""
        return self._uuid is not None

    def window(self) -> Window:
        """Return a new window, not yet open."""
        return Window(self)

    def close(self) -> None:
        """End the thread. Windows can be opened after it, and tell that nothing was read."""
        with self._condition:
            self._is_closed = True
            self._condition.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join(self._leave_seconds)

    # ---- for windows ---------------------------------------------------------------------------------------------

    def _open(self, window: Window) -> None:
        if not self.has_gpu:
            return
        with self._condition:
            if not self._windows:
                self._failed.clear()
            self._windows.append(window)
            for key, why in {**self._unsupported, **self._failed}.items():
                window.miss(key, why)
            if self._is_closed:
                self._fail_all("the sampler is closed")
            elif self._thread is None and self._wanted():
                thread = threading.Thread(target=self._run, name="gpucluster-telemetry", daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:  # no more threads here: the measurement goes on without
                    self._fail_all(f"no thread for the readings: {error}")
                else:
                    self._thread = thread
            self._condition.notify_all()

    def _close(self, window: Window) -> None:
        with self._condition:
            if window not in self._windows:
                return
            is_late = False
            if window.passes == 0 and self._thread is not None and self._wanted() and not self._is_stuck():
                self._is_hurried = True
                self._condition.notify_all()
                is_late = not self._condition.wait_for(lambda: window.passes > 0, self._leave_seconds)
            self._windows.remove(window)
            if self._asked is not None and (is_late or self._is_stuck()):
                key, since = self._asked
                window.miss(key, f"NVML has not answered for {time.monotonic() - since:.1f} s")
                if not window.passes:
                    for other in self._wanted():
                        window.miss(other, f"not asked: NVML does not answer for {key}")

    def _is_stuck(self) -> bool:
        """Tell whether NVML owes an answer for longer than anyone waits for it."""
        return self._asked is not None and time.monotonic() - self._asked[1] >= self._leave_seconds

    def _wanted(self) -> list[str]:
        return [key for key in QUERIES if key not in self._unsupported and key not in self._failed]

    def _fail_all(self, why: str) -> None:
        for key in self._wanted():
            self._failed[key] = why
            for window in self._windows:
                window.miss(key, why)

    # ---- the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        pause = self._interval_seconds
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._windows or self._is_closed)
                self._condition.wait_for(lambda: self._is_hurried or self._is_closed, pause)
                self._is_hurried = False
                if self._is_closed:
                    return
                windows, wanted = list(self._windows), self._wanted()
            if not windows:
                continue
            begin = time.monotonic()
            for key in wanted:
                if not self._ask(key, windows):
                    break
            with self._condition:
                for window in windows:
                    window.passes += 1
                self._condition.notify_all()
            spent = time.monotonic() - begin
            pause = max(self._interval_seconds - spent, spent)

    def _ask(self, key: str, windows: Sequence[Window]) -> bool:
        """Ask for one key; return False if the GPU is lost, so that there is nothing more to ask.

        The lock is not held while NVML answers, and NVML's binding releases the GIL.
        """
        assert self._nvml is not None
        assert self._uuid is not None
        with self._condition:
            self._asked = key, time.monotonic()
        value, why, kind = None, "", ""
        try:
            value = _checked(key, self._nvml.read(self._uuid, QUERIES[key]))
        except NotAvailable as error:
            why, kind = str(error) or "not available", error.kind
        except Exception as error:  # whatever a binding or a driver comes up with; what is lost is named
            why = f"{type(error).__name__}: {error}"
        with self._condition:
            self._asked = None
            present = [window for window in windows if window in self._windows]  # others have left in the meantime
            if not why:
                for window in present:
                    window.take(key, value)
            elif kind == "lost":
                self._fail_all(why)
                for window in present:
                    window.lost = why
            else:
                (self._unsupported if kind in _LASTING else self._failed)[key] = why
                for window in present:
                    window.miss(key, why)
        return kind != "lost"


def _checked(key: str, value: Any) -> Any:
    """Return a reading that can be summed up.

    Raises:
        ValueError: NVML gave something else.
    """
    if key == THROTTLE:
        if isinstance(value, (tuple, list, set, frozenset)) and all(isinstance(name, str) for name in value):
            return tuple(value)
    elif isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    raise ValueError(f"NVML gave {value!r:.60}")
