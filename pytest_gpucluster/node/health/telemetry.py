"""Telemetry of a GPU during a window of time: a rank's link to the node's sampler, and the summary of what was read.

    with link.window() as window:
        ...  # what is measured
    window.summary()

    {"seconds": 3.1, "samples": 31, "sm_clock_mhz": [1740, 1755, 1980], "throttle": ["hw_thermal"],
     "throttle_share": {"hw_thermal": 0.62}, ..., "not_available": {}}

A summary (:func:`summary`, pure) is in plain JSON types: clocks, power, temperature, utilisation and what held the
clocks down. Some figures look back further than one interval: utilisation is that of the last 1/6 to 1 s, and from the
Ampere generation on (but for the A100) power is the mean of the last second. So the first second of a window also
covers what was before it. Source: NVML API Reference, nvmlUtilization_t and nvmlDeviceGetPowerUsage,
https://docs.nvidia.com/deploy/nvml-api/.

The sampler is one small process a node that reads the GPUs of its ranks (NVML, no torch): see
:mod:`pytest_gpucluster.node.health.sampler_process`. The node's first rank starts it (:func:`start_sampler`) and gives
the others its address. A rank sends when a window opens and closes, by the monotonic clock, which all processes of a
node share, and gets the summary. Nothing that the process does or fails to do disturbs what is measured: opening a
window never waits, closing one waits a bounded time, and what is missing is named with its reason.

The socket is a Unix socket in Linux's abstract namespace: nothing of it is left on disk, however the process ends. Its
name is random, and the process talks to its own user only. Source: unix(7).
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from types import MappingProxyType, TracebackType
from typing import Any

from pytest_gpucluster.launch import detached_process
from pytest_gpucluster.metrics import stats

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

OF_THE_CARD: Mapping[str, str] = MappingProxyType(
    {"sm_clock_max_mhz": "clock.sm.max", "slowdown_celsius": "temperature.slowdown"}
)
"""Key in a summary -> NVML query, of what does not change. A card that does not tell them is none the worse for it."""

INTERVAL_SECONDS = 0.1
"""As a rule; a workload's ``telemetry.interval`` says otherwise."""

# An idle GPU is said to be throttled by its idleness.
_NO_THROTTLE = "gpu_idle"


def summary(
    readings: Mapping[str, Sequence[Any]],
    *,
    seconds: float,
    not_available: Mapping[str, str],
    lost: str = "",
    throttle_seconds: Mapping[str, float] | None = None,
    card: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """Sum up a window in plain JSON types.

    Args:
        readings: key of ``QUERIES`` -> what was read, in the order of time.
        seconds: how long the window was open.
        not_available: key -> why it could not be read, or not any longer.
        lost: what NVML said when it could not reach the GPU any more.
        throttle_seconds: throttle reason -> how long it was there.
        card: key of ``OF_THE_CARD`` -> its value.

    Returns:
        ``seconds``; ``samples``, the most readings of any key; for each key that was read ``[min, median, max]``, but
        for ``throttle`` all reasons seen; ``throttle_share``, the part of the window, from 0 to 1, in which each of
        them was there; ``card``'s keys; ``not_available``, which names every other key, and those that failed later;
        ``lost`` only if the GPU was lost.
    """
    missing = dict(not_available)
    result: dict[str, Any] = {
        "seconds": round(seconds, 3),
        "samples": max((len(read) for read in readings.values()), default=0),
    }
    for key in QUERIES:
        read = readings.get(key, ())
        if not len(read):
            missing.setdefault(key, "no reading in this window")
        elif key == THROTTLE:
            reasons = dict.fromkeys(reason for names in read for reason in names)
            result[key] = [reason for reason in reasons if reason != _NO_THROTTLE]
            if throttle_seconds is not None:
                result["throttle_share"] = _shares(result[key], throttle_seconds, seconds)
        else:
            result[key] = [round(value, 1) for value in (min(read), stats.median(read), max(read))]
    result |= {key: round(value, 1) for key, value in (card or {}).items()}
    result["not_available"] = {key: missing[key] for key in QUERIES if key in missing}
    if lost:
        result["lost"] = lost
    return result


def _shares(reasons: Sequence[str], spent: Mapping[str, float], seconds: float) -> dict[str, float]:
    """Return the part of the window of each reason; where the window took no time, it was there or was not."""
    if seconds <= 0:
        return dict.fromkeys(reasons, 1.0)
    return {reason: round(min(1.0, spent.get(reason, 0.0) / seconds), 4) for reason in reasons}


def nothing(why: str, *, seconds: float = 0.0) -> dict[str, Any]:
    """Return the summary of a window in which nothing could be read."""
    return summary({}, seconds=seconds, not_available=dict.fromkeys(QUERIES, why))


def checked(key: str, value: Any) -> Any:
    """Return a reading that can be summed up: a finite float, or for ``throttle`` a tuple of names.

    Raises:
        ValueError: NVML gave something else.
    """
    if key == THROTTLE:
        if isinstance(value, (tuple, list, set, frozenset)) and all(isinstance(name, str) for name in value):
            return tuple(value)
    elif isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    raise ValueError(f"NVML gave {value!r:.60}")


COMMAND: tuple[str, ...] = (sys.executable, "-m", "pytest_gpucluster.node.health.sampler_process")
"""What is started. A test puts its own in the place, with GPUs that are not there."""

MESSAGE_BYTES = 64 * 1024
"""More than any message has. Below the default send buffer of a Unix socket."""
_BACKLOG = 64
ANSWER_SECONDS = 0.5
"""Closing a window waits no longer. The process waits for a hanging NVML less long, so that it can say what it has."""
_AGAIN_SECONDS = 0.05
"""For a process that has not answered before."""
_END_SECONDS = 1.0


class NodeSampler:
    """The process, for the one that has started it."""

    def __init__(self, process: subprocess.Popen[bytes], address: str) -> None:
        self._process = process
        self.address = address
        """What ranks of this node connect to."""

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    def close(self) -> None:
        """End it. It writes nothing, so it can be ended at any moment."""
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # stuck in the driver: it is gone when that answers
            self._process.wait(timeout=_END_SECONDS)
        self._process.returncode = self._process.returncode or 0  # no warning about it, either


def start_sampler() -> NodeSampler:
    """Start the sampler of this node. That takes milliseconds: ranks may connect before it is ready.

    Raises:
        OSError: no process can be started.
    """
    address = f"gpucluster-{secrets.token_hex(16)}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(_abstract(address))
        listener.listen(_BACKLOG)
        command = [*COMMAND, "--listener", str(listener.fileno()), "--parent", str(os.getpid())]
        # It inherits the mask, so there is no moment in which one of these could end it.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, detached_process.SHIELDED)
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(listener.fileno(),),
                start_new_session=True,
                env=detached_process.child_environment(),
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    return NodeSampler(process, address)


class Window:
    """A time in which this rank's GPU is watched, as a context manager. Entered again, it adds to what it has."""

    def __init__(self, link: Link, number: int) -> None:
        self._link = link
        self._number = number
        self._is_open = False
        self._seconds = 0.0
        self._entered_at = 0.0
        self._told: dict[str, Any] | None = None

    def __enter__(self) -> Window:
        if self._is_open:
            raise RuntimeError("this window is open already; make another one")
        self._is_open = True
        self._entered_at = time.monotonic()
        self._link._open(self._number, self._entered_at)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        end = time.monotonic()
        self._seconds += end - self._entered_at
        self._is_open = False
        told = self._link._close(self._number, end)
        if isinstance(told, str):
            self._miss(told)
        else:
            self._told = told

    def summary(self) -> dict[str, Any]:
        """Return what was seen, as ``telemetry.summary`` does; nothing at all on cpu."""
        if not self._link.has_gpu:
            return {}
        return dict(self._told) if self._told is not None else nothing("the window was never opened")

    def _miss(self, why: str) -> None:
        """Keep what was told before, if anything was, and say that there was more."""
        if self._told is None or not self._told["samples"]:
            self._told = nothing(why, seconds=self._seconds)
        else:
            missing = {**dict.fromkeys(QUERIES, why), **self._told["not_available"]}
            self._told = {**self._told, "seconds": round(self._seconds, 3), "not_available": missing}


class Link:
    """A rank's connection to its node's sampler, made when the first window opens. From any thread.

    Args:
        address: of the sampler; None if there is none.
        uuid: this rank's GPU; None on cpu, where windows do nothing.
        interval_seconds: from one reading to the next.
        why_not: why there is no ``address``.
        answer_seconds: how long closing a window waits at most, by default ``ANSWER_SECONDS``.
    """

    def __init__(
        self,
        address: str | None,
        uuid: str | None,
        interval_seconds: float = INTERVAL_SECONDS,
        *,
        why_not: str = "no sampler was started on this node",
        answer_seconds: float | None = None,
    ) -> None:
        self._address = address
        self._uuid = uuid
        self._interval_seconds = interval_seconds
        self._why_not = why_not
        self._answer_seconds = ANSWER_SECONDS if answer_seconds is None else answer_seconds
        self._lock = threading.Lock()
        self._owner = os.getpid()
        self._channel: socket.socket | None = None
        self._numbers = 0
        self._requests = 0
        self._unopened: dict[int, str] = {}
        """Windows that the process does not know of, and why."""
        self._done_with: list[int] = []
        """Windows that nobody can enter again, which the process may forget."""
        self._is_silent = False
        """It owes an answer: it is not waited for as long again."""
        self.is_unseen = False
        """The sampler has said that it does not see this rank's GPU."""

    @property
    def has_gpu(self) -> bool:
        """Tell whether there is a GPU to watch."""
        return self._uuid is not None

    def window(self) -> Window:
        """Return a new window, not yet open."""
        with self._lock:
            self._numbers += 1
            window = Window(self, self._numbers)
        weakref.finalize(window, self._done_with.append, self._numbers).atexit = False
        return window

    def close(self) -> None:
        """Leave the sampler. Windows can be opened after it, and tell that nothing was read."""
        with self._lock:
            self._address, self._why_not = None, "the sampler is closed"
            self._hang_up()

    # ---- for windows ---------------------------------------------------------------------------------------------

    def _open(self, number: int, at: float) -> None:
        """Say that a window opens. Never waits for the process."""
        if not self.has_gpu:
            return
        if not self._lock.acquire(timeout=self._patience):
            self._unopened[number] = "another window still waits for the sampler's answer"
            return
        try:
            self._unopened.pop(number, None)
            forget = []
            while self._done_with:  # a window may be collected at any moment
                forget.append(self._done_with.pop())
            why = self._connect() or self._say({"open": number, "at": at, "forget": forget})
            if why:
                self._unopened[number] = why
        finally:
            self._lock.release()

    def _close(self, number: int, at: float) -> dict[str, Any] | str:
        """Say that a window closes; return its summary, or why there is none."""
        if not self.has_gpu:
            return {}
        if number in self._unopened:
            return self._unopened[number]
        deadline = time.monotonic() + self._patience
        if not self._lock.acquire(timeout=self._patience):
            return self._no_answer("another window waits for it")
        try:
            self._requests += 1
            why = self._say({"close": number, "at": at, "request": self._requests})
            return why or self._answer(self._requests, deadline)
        finally:
            self._lock.release()

    @property
    def _patience(self) -> float:
        return min(self._answer_seconds, _AGAIN_SECONDS) if self._is_silent else self._answer_seconds

    def _connect(self) -> str:
        """Connect if that has not been done; return why it cannot be."""
        if os.getpid() != self._owner:
            return "this process was forked from the rank, which alone is watched"
        if self._channel is not None:
            return ""
        if self._address is None:
            return self._why_not
        channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            channel.setblocking(False)  # it listens since before it was started; a full queue is refused at once
            channel.connect(_abstract(self._address))
        except OSError as error:
            channel.close()
            return f"the node's sampler cannot be reached: {error.strerror or error}"
        self._channel = channel
        return self._say({"gpu": self._uuid, "interval": self._interval_seconds})

    def _say(self, message: Mapping[str, Any]) -> str:
        """Send a message without waiting; return why it cannot be."""
        if self._channel is None or os.getpid() != self._owner:
            return "there is no connection to the node's sampler"
        try:
            self._channel.setblocking(False)
            self._channel.send(json.dumps(message).encode(), socket.MSG_NOSIGNAL)
        except BlockingIOError:
            self._is_silent = True
            return "the node's sampler takes no messages"
        except OSError as error:
            self._hang_up()
            return f"the node's sampler has ended: {error.strerror or error}"
        return ""

    def _answer(self, request: int, deadline: float) -> dict[str, Any] | str:
        """Wait for the answer to a request; those to earlier ones, which nobody waits for any more, are dropped."""
        while self._channel is not None:
            left = deadline - time.monotonic()
            try:
                self._channel.settimeout(max(0.0, left))
                answer = self._channel.recv(MESSAGE_BYTES)
                told = json.loads(answer) if answer else None
            except (BlockingIOError, TimeoutError):
                return self._no_answer(f"no answer within {self._patience:g} s")
            except (OSError, ValueError) as error:
                self._hang_up()
                return f"the node's sampler has failed: {error}"
            if told is None:
                self._hang_up()
                return "the node's sampler has ended"
            if "failure" in told:
                self._hang_up()
                return f"the node's sampler has refused: {told['failure']}"
            self._is_silent = False
            self.is_unseen = bool(told.get("unseen"))
            if told["request"] == request:
                summary: dict[str, Any] = told["summary"]
                return summary
        return "the node's sampler has ended"

    def _no_answer(self, how: str) -> str:
        self._is_silent = True
        return f"the node's sampler does not answer: {how}"

    def _hang_up(self) -> None:
        if self._channel is not None and os.getpid() == self._owner:
            self._channel.close()
            self._channel = None


def _abstract(address: str) -> str:
    return f"\0{address}"
