"""Telemetry of a GPU during a window of time: a rank's link to the node's sampler, and the summary of what was read.

    with link.window() as window:
        ...  # the measurement
    window.summary()

    {"seconds": 3.1, "samples": 31, "sm_clock_mhz": [1740, 1755, 1980], "throttle": ["hw_thermal"],
     "throttle_share": {"hw_thermal": 0.62}, ..., "not_available": {}}

A summary (:func:`summary`, pure) is in plain JSON types: clocks, power, temperature, utilisation and throttle reasons.
Some values cover more than one interval: utilisation is that of the last 1/6 to 1 s, and from the Ampere generation on
(but for the A100) power is the mean of the last second. So the first second of a window also covers the time before it.
Source: NVML API Reference, nvmlUtilization_t and nvmlDeviceGetPowerUsage,
https://docs.nvidia.com/deploy/nvml-api/.

The sampler is one small process a node that reads the GPUs of its ranks (NVML, no torch): see
:mod:`pytest_gpucluster.node.health.sampler_process`. The node's first rank starts it (:func:`start_sampler`) and gives
the others its address. A rank sends when a window opens and closes, by the monotonic clock, which all processes of a
node share, and gets the summary. A sampler that hangs or exits does not disturb the measurement: opening a window never
waits, closing one waits a bounded time, and each missing value has its reason.

The socket is a Unix socket in Linux's abstract namespace: it leaves no file, however the process exits. Its name is
random, and the process serves its own user only. Source: unix(7).
"""

from __future__ import annotations

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
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from pytest_gpucluster.launch import detached_process
from pytest_gpucluster.metrics import stats
from pytest_gpucluster.node.nvml_queries import keys
from pytest_gpucluster.node.processes import kill

THROTTLE = "throttle"
QUERIES = keys("clock.sm", "clock.memory", "power.draw", "temperature.gpu", "utilization.gpu", "throttle.reasons")
"""Key in a summary -> NVML query. The key has the unit; ``throttle`` lists names of reasons."""

CARD_QUERIES = keys("clock.sm.max", "temperature.slowdown")
"""Key in a summary -> NVML query, of constants of the card. They are optional."""

INTERVAL_SECONDS = 0.1
"""Default; a workload's ``telemetry.interval`` overrides it."""

# NVML reports it for every idle GPU.
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
    """Summarise a window in plain JSON types.

    Args:
        readings: key of ``QUERIES`` -> its values, in the order of time.
        seconds: how long the window was open.
        not_available: key -> why it could not be read, or not any longer.
        lost: NVML's message where the GPU was lost.
        throttle_seconds: throttle reason -> how long it was active.
        card: key of ``CARD_QUERIES`` -> its value.

    Returns:
        ``seconds``; ``samples``, the most readings of any key; for each key that was read ``[min, median, max]``, but
        for ``throttle`` all reasons seen; ``throttle_share``, the part of the window, from 0 to 1, in which each of
        them was active; ``card``'s keys; ``not_available``, which names every other key, and those that failed later;
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
                # 1 in a window of no duration.
                parts = {one: throttle_seconds.get(one, 0.0) / seconds if seconds > 0 else 1.0 for one in result[key]}
                result["throttle_share"] = {reason: round(min(1.0, part), 4) for reason, part in parts.items()}
        else:
            result[key] = [round(value, 1) for value in (min(read), stats.median(read), max(read))]
    result |= {key: round(value, 1) for key, value in (card or {}).items()}
    result["not_available"] = {key: missing[key] for key in QUERIES if key in missing}
    if lost:
        result["lost"] = lost
    return result


def empty_summary(why: str, *, seconds: float = 0.0) -> dict[str, Any]:
    """Return the summary of a window without readings."""
    return summary({}, seconds=seconds, not_available=dict.fromkeys(QUERIES, why))


def validated(key: str, value: Any) -> Any:
    """Return a valid reading: a finite float, or for ``throttle`` a tuple of names.

    Raises:
        ValueError: NVML returned another type or a value that is not finite.
    """
    if key == THROTTLE:
        if isinstance(value, (tuple, list, set, frozenset)) and all(isinstance(name, str) for name in value):
            return tuple(value)
    elif isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    raise ValueError(f"NVML gave {value!r:.60}")


COMMAND: tuple[str, ...] = (sys.executable, "-m", "pytest_gpucluster.node.health.sampler_process")
"""The command line. The simulation and tests replace it."""

MESSAGE_BYTES = 64 * 1024
"""Larger than any message, smaller than the default send buffer of a Unix socket."""
_BACKLOG = 64
ANSWER_SECONDS = 0.5
"""The longest wait of closing a window. The process waits less for NVML, so that its answer comes in time."""
_AGAIN_SECONDS = 0.05
"""The longest wait after a request that was not answered."""


@dataclass(frozen=True)
class NodeSampler:
    """The sampler process, for the rank that started it, and the address that ranks of this node connect to."""

    process: subprocess.Popen[bytes]
    address: str

    def close(self) -> None:
        """Kill it. It writes no files, so it can be killed at any moment."""
        kill(self.process)


def start_sampler() -> NodeSampler:
    """Start the sampler of this node. It takes milliseconds; ranks may connect before the process is ready.

    Raises:
        OSError: no process can be started.
    """
    address = f"gpucluster-{secrets.token_hex(16)}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(_abstract(address))
        listener.listen(_BACKLOG)
        command = [*COMMAND, "--listener", str(listener.fileno()), "--parent", str(os.getpid())]
        # The child inherits the mask, so these signals cannot end it before it handles them.
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
    """A time in which this rank's GPU is sampled, as a context manager. Entered again, it adds to its readings."""

    def __init__(self, link: Link, number: int) -> None:
        self._link = link
        self._number = number
        self._is_open = False
        self._seconds = 0.0
        self._entered_at = 0.0
        self._summary: dict[str, Any] | None = None

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
        answer = self._link._close(self._number, end)
        if isinstance(answer, str):
            self._miss(answer)
        else:
            self._summary = answer

    def summary(self) -> dict[str, Any]:
        """Return the summary (:func:`summary`); empty on cpu."""
        if not self._link.has_gpu:
            return {}
        return dict(self._summary) if self._summary is not None else empty_summary("the window was never opened")

    def _miss(self, why: str) -> None:
        """Keep an earlier summary, if there is one, and add why the newest readings are missing."""
        if self._summary is None or not self._summary["samples"]:
            self._summary = empty_summary(why, seconds=self._seconds)
        else:
            missing = {**dict.fromkeys(QUERIES, why), **self._summary["not_available"]}
            self._summary = {**self._summary, "seconds": round(self._seconds, 3), "not_available": missing}


class Link:
    """A rank's connection to its node's sampler, made when the first window opens. Usable from any thread.

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
        """Windows that could not be opened, and why."""
        self._collected: list[int] = []
        """Windows that were collected, which the process may delete."""
        self._is_silent = False
        """An answer is overdue: later waits are shorter."""
        self.is_unseen = False
        """The sampler reported that NVML does not list this rank's GPU there."""

    @property
    def has_gpu(self) -> bool:
        """Whether there is a GPU to sample."""
        return self._uuid is not None

    def window(self) -> Window:
        """Return a new window, not yet open."""
        with self._lock:
            self._numbers += 1
            window = Window(self, self._numbers)
        weakref.finalize(window, self._collected.append, self._numbers).atexit = False
        return window

    def close(self) -> None:
        """Disconnect. Windows can still be opened, and their summaries are empty."""
        with self._lock:
            self._address, self._why_not = None, "the sampler is closed"
            self._hang_up()

    # ---- for windows ---------------------------------------------------------------------------------------------

    def _open(self, number: int, at: float) -> None:
        """Send that a window opens. Never waits for the process."""
        if not self.has_gpu:
            return
        if not self._lock.acquire(timeout=self._patience):
            self._unopened[number] = "another window still waits for the sampler's answer"
            return
        try:
            self._unopened.pop(number, None)
            forget = []
            while self._collected:  # garbage collection may append at any moment
                forget.append(self._collected.pop())
            why = self._connect() or self._send({"open": number, "at": at, "forget": forget})
            if why:
                self._unopened[number] = why
        finally:
            self._lock.release()

    def _close(self, number: int, at: float) -> dict[str, Any] | str:
        """Send that a window closes; return its summary, or why there is none."""
        if not self.has_gpu:
            return {}
        if number in self._unopened:
            return self._unopened[number]
        deadline = time.monotonic() + self._patience
        if not self._lock.acquire(timeout=self._patience):
            return self._no_answer("another window waits for it")
        try:
            self._requests += 1
            why = self._send({"close": number, "at": at, "request": self._requests})
            return why or self._answer(self._requests, deadline)
        finally:
            self._lock.release()

    @property
    def _patience(self) -> float:
        return min(self._answer_seconds, _AGAIN_SECONDS) if self._is_silent else self._answer_seconds

    def _connect(self) -> str:
        """Connect if not connected; return the problem, or ""."""
        if os.getpid() != self._owner:
            return "this process was forked from the rank, and only the rank is sampled"
        if self._channel is not None:
            return ""
        if self._address is None:
            return self._why_not
        channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            channel.setblocking(False)  # it has been listening since before it started; a full queue fails at once
            channel.connect(_abstract(self._address))
        except OSError as error:
            channel.close()
            return f"the node's sampler cannot be reached: {error.strerror or error}"
        self._channel = channel
        return self._send({"gpu": self._uuid, "interval": self._interval_seconds})

    def _send(self, message: Mapping[str, Any]) -> str:
        """Send a message without waiting; return the problem, or ""."""
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
            return f"the node's sampler exited: {error.strerror or error}"
        return ""

    def _answer(self, request: int, deadline: float) -> dict[str, Any] | str:
        """Wait for the answer to a request; late answers to earlier ones are dropped."""
        while self._channel is not None:
            left = deadline - time.monotonic()
            try:
                self._channel.settimeout(max(0.0, left))
                packet = self._channel.recv(MESSAGE_BYTES)
                answer = json.loads(packet) if packet else None
            except (BlockingIOError, TimeoutError):
                return self._no_answer(f"no answer within {self._patience:g} s")
            except (OSError, ValueError) as error:
                self._hang_up()
                return f"the node's sampler has failed: {error}"
            if answer is None:
                self._hang_up()
                return "the node's sampler exited"
            if "failure" in answer:
                self._hang_up()
                return f"the node's sampler rejected a message: {answer['failure']}"
            self._is_silent = False
            self.is_unseen = bool(answer.get("unseen"))
            if answer["request"] == request:
                summary: dict[str, Any] = answer["summary"]
                return summary
        return "the node's sampler exited"

    def _no_answer(self, how: str) -> str:
        self._is_silent = True
        return f"the node's sampler does not answer: {how}"

    def _hang_up(self) -> None:
        if self._channel is not None and os.getpid() == self._owner:
            self._channel.close()
            self._channel = None


def _abstract(address: str) -> str:
    return f"\0{address}"
