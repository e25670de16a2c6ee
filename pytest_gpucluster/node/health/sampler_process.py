"""The node's sampler process: it reads each GPU that a rank of the node named, while a window on it is open.

A rank's messages, each a JSON object and a packet of its own:

    {"gpu": "GPU-1f2e...", "interval": 0.1}     first: its GPU, and how often it is read
    {"open": 7, "at": 12.3}                     window 7 opens, at a time of the monotonic clock
    {"close": 7, "at": 15.4}                    it closes; the answer is {"summary": {...}, "unseen": false}

``unseen`` is true where NVML does not list the GPU here: a launcher may show each rank its own only. An invalid message
is answered by {"failure": "why"}, and the connection is closed.

A thread serves each rank and another one reads the GPUs, so that each rank is answered while NVML hangs: one thread for
all GPUs, because waking one costs more than a sample takes, and a driver that hangs on one GPU would block the others
too, for it has one lock for all of them. The process exits with its parent.

Each sample of a GPU reads the SM clock and the throttle reasons, and one of the others in turn. Those cover a longer
time anyway (see ``telemetry``), and every call serialises with the driver's other work, kernel launches among it.
Source: a developer of NVIDIA's driver in https://github.com/flightlessmango/MangoHud/pull/1307; measured in
https://github.com/flightlessmango/MangoHud/pull/2104.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import select
import socket
import struct
import threading
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from pytest_gpucluster.errors import EnvironmentBroken
from pytest_gpucluster.launch import detached_process
from pytest_gpucluster.node.health.telemetry import (
    CARD_QUERIES,
    MESSAGE_BYTES,
    QUERIES,
    THROTTLE,
    summary,
    validated,
)
from pytest_gpucluster.node.nvml import Nvml, PyNvml, read_values

EACH_SAMPLE = ("sm_clock_mhz", THROTTLE)
IN_TURN = tuple(key for key in QUERIES if key not in EACH_SAMPLE)
CLOSE_SECONDS = 0.3
"""How long closing a window waits for a first reading: several times what one pass of all queries takes on a busy node;
beyond it NVML hangs."""
# These never change, so the query is not repeated. A failure or a lost GPU is retried in the next window.
_PERMANENT = ("not supported", "no permission")
_TICK_SECONDS = 0.5
_CREDENTIALS = struct.Struct("3i")
"""pid, uid and gid of a peer. Source: unix(7), SO_PEERCRED."""


class GpuWindow:
    """A time in which the GPU is sampled. Opened again, it adds to its readings. Times are of the monotonic clock."""

    def __init__(self) -> None:
        self.missing: dict[str, str] = {}
        """Why a key cannot be read; the first reason stays."""
        self.lost = ""
        """NVML's message where the GPU was lost."""
        self.passes = 0
        """How often the GPU was read since the window was opened last."""
        self._seconds = 0.0
        self._opened_at = 0.0
        self._numbers: dict[str, array[float]] = {}
        self._reasons: dict[tuple[str, ...], None] = {}
        self._throttle_seconds: dict[str, float] = {}
        self._active: tuple[tuple[str, ...], float] | None = None
        """The reasons read last, and the time up to which they have been counted."""

    def begin(self, at: float) -> None:
        """Begin at this time."""
        self.passes, self._active, self._opened_at = 0, None, at

    def take(self, read: Mapping[str, Any], at: float) -> None:
        """Add the values of one pass."""
        self.passes += 1
        for key, value in read.items():
            if key != THROTTLE:
                self._numbers.setdefault(key, array("d")).append(value)
                continue
            # The first reading of a window counts for the time since its beginning.
            since = self._opened_at if self._active is None else self._count_reasons(at)
            self._active = value, since
            self._reasons[value] = None

    def miss(self, missing: Mapping[str, str]) -> None:
        """Record why keys cannot be read."""
        self.missing = {**missing, **self.missing}

    def end(self, at: float) -> None:
        """End at this time, up to which the reasons read last are counted."""
        self._count_reasons(at)
        self._active = None
        self._seconds += max(0.0, at - self._opened_at)

    def summary(self, card: Mapping[str, float]) -> dict[str, Any]:
        """Return the summary, as ``telemetry.summary`` does."""
        readings: dict[str, Sequence[Any]] = {**self._numbers, THROTTLE: tuple(self._reasons)}
        return summary(
            readings,
            seconds=self._seconds,
            not_available=self.missing,
            lost=self.lost,
            throttle_seconds=self._throttle_seconds,
            card=card,
        )

    def _count_reasons(self, at: float) -> float:
        if self._active is None:
            return at
        reasons, since = self._active
        for reason in reasons:
            self._throttle_seconds[reason] = self._throttle_seconds.get(reason, 0.0) + max(0.0, at - since)
        return max(at, since)


class _Gpu:
    """One GPU and the windows that are open on it."""

    def __init__(self, uuid: str, missing: Mapping[str, str]) -> None:
        self.uuid = uuid
        self.windows: list[GpuWindow] = []
        self.is_urgent = False
        """A window waits for its first reading."""
        self.turn = 0
        self.card: dict[str, float] | None = None
        """The constants of the card, which are optional: they only help to explain the other values."""
        self.unsupported = dict(missing)
        """Keys that this GPU never has, and why. They are not read again."""
        self.failed: dict[str, str] = {}
        """Keys that failed while the present windows are open. The next window retries them."""

    def wanted(self) -> list[str]:
        """Return the keys that can be read."""
        return [key for key in QUERIES if key not in self.unsupported and key not in self.failed]

    def next_keys(self) -> list[str]:
        """Return the keys of a sample: all for a window's first reading, then the others in turn."""
        self.is_urgent = False
        if any(window.passes == 0 for window in self.windows):
            return self.wanted()
        self.turn = (self.turn + 1) % len(IN_TURN)
        return [key for key in self.wanted() if key in EACH_SAMPLE or key == IN_TURN[self.turn]]


class Sampler:
    """Samples each GPU with open windows, every interval, in a thread. Methods may be called from any thread.

    Args:
        nvml: where to read; None if NVML cannot be used.
        interval_seconds: the time from one round of samples to the next. A round that takes longer than half of it is
            followed by a pause as long as itself, so that at least half of the time there is no query.
        close_seconds: how long closing a window waits at most for a first reading, by default ``CLOSE_SECONDS``.
        why_not: why there is no ``nvml``.

    Raises:
        ValueError: the interval is not a positive number.
        RuntimeError: no thread can be started.
    """

    def __init__(
        self, nvml: Nvml | None, interval_seconds: float, *, close_seconds: float | None = None, why_not: str = ""
    ) -> None:
        if not 0 < interval_seconds < math.inf:
            raise ValueError(f"an interval is a positive number of seconds, not {interval_seconds}")
        self._nvml, self._why_not = nvml, why_not
        self._interval_seconds = interval_seconds
        self._close_seconds = CLOSE_SECONDS if close_seconds is None else close_seconds
        self._condition = threading.Condition()
        self._gpus: dict[str, _Gpu] = {}
        self._due = math.inf
        self._asked: tuple[str, float] | None = None
        """The GPU that is being read, and since when."""
        self._is_closed = False
        threading.Thread(target=self._run, name="gpucluster-telemetry", daemon=True).start()

    def open(self, uuid: str, window: GpuWindow, at: float) -> None:
        """Begin sampling a GPU for a window.

        Raises:
            RuntimeError: the window is open already.
        """
        with self._condition:
            missing = {} if self._nvml is not None else dict.fromkeys(QUERIES, self._why_not)
            gpu = self._gpus.setdefault(uuid, _Gpu(uuid, missing))
            if window in gpu.windows:
                raise RuntimeError("this window is open already; make another one")
            if not gpu.windows:
                gpu.failed.clear()
            if not any(one.windows for one in self._gpus.values()):
                self._due = time.monotonic() + self._interval_seconds
            window.begin(at)
            window.miss({**gpu.unsupported, **gpu.failed})
            gpu.windows.append(window)
            self._condition.notify_all()

    def close(self, uuid: str, window: GpuWindow, at: float) -> None:
        """End sampling. Waits for a first reading, if there is none yet, for a bounded time."""
        with self._condition:
            gpu = self._gpus[uuid]
            if window not in gpu.windows:
                return
            if not window.passes and gpu.wanted() and not self._hangs():
                gpu.is_urgent = True
                self._condition.notify_all()
                self._condition.wait_for(lambda: window.passes > 0, self._close_seconds)
            gpu.windows.remove(window)
            if self._asked is not None and (self._hangs() or not window.passes):
                hung, since = self._asked
                why = f"NVML has not answered about {hung} for {time.monotonic() - since:.1f} s"
                window.miss(dict.fromkeys(gpu.wanted(), why))
            window.end(at)

    def summary(self, uuid: str, window: GpuWindow) -> dict[str, Any]:
        """Return a window's summary."""
        with self._condition:
            return window.summary(self._gpus[uuid].card or {})

    def stop(self) -> None:
        """End the thread."""
        with self._condition:
            self._is_closed = True
            self._condition.notify_all()

    def _hangs(self) -> bool:
        return self._asked is not None and time.monotonic() - self._asked[1] >= self._close_seconds

    def _run(self) -> None:
        while True:
            with self._condition:
                while True:
                    opened = [gpu for gpu in self._gpus.values() if gpu.windows and gpu.wanted()]
                    left = self._due - time.monotonic()
                    is_round = left <= 0
                    due = opened if is_round else [gpu for gpu in opened if gpu.is_urgent]
                    if due or self._is_closed:
                        break
                    self._condition.wait(left if opened else None)
                if self._is_closed:
                    return
                samples = [(gpu, gpu.next_keys(), tuple(gpu.windows)) for gpu in due]
            begin = time.monotonic()
            for gpu, keys, windows in samples:
                self._sample(gpu, keys, windows)
            if is_round:
                spent = time.monotonic() - begin
                self._due = begin + spent + max(self._interval_seconds - spent, spent)

    def _sample(self, gpu: _Gpu, keys: Sequence[str], windows: Sequence[GpuWindow]) -> None:
        """Read the keys for the windows that are open. The condition is not held during NVML's calls."""
        assert self._nvml is not None  # without it no key is wanted
        begin = time.monotonic()
        self._asked = gpu.uuid, begin
        found = read_values(self._nvml, gpu.uuid, {key: QUERIES[key] for key in keys}, validated)
        card = {} if gpu.card is not None else read_values(self._nvml, gpu.uuid, CARD_QUERIES, validated).values
        with self._condition:
            self._asked = None
            if gpu.card is None:
                gpu.card = {
                    key: value for key, value in card.items() if value > 0
                }  # some drivers report 0 for no limit
            for key, why in found.missing.items():
                (gpu.unsupported if why.kind in _PERMANENT else gpu.failed)[key] = why.reason
            if found.lost:
                gpu.failed |= dict.fromkeys(gpu.wanted(), found.lost)
            for window in windows:
                if window in gpu.windows:  # others were closed during the sample
                    window.take(found.values, begin)
                    window.miss({**gpu.unsupported, **gpu.failed})
                    window.lost = found.lost
            self._condition.notify_all()


class Node:
    """NVML and the sampler of a node's GPUs, both opened once."""

    def __init__(self, open_nvml: Callable[[], Nvml]) -> None:
        self._open_nvml = open_nvml
        self._lock = threading.Lock()
        self._sampler: Sampler | None = None
        self._nvml: Nvml | None = None
        self._why_not = ""

    def open(self) -> None:
        """Open NVML. Where that fails, every window has the reason."""
        try:
            self._nvml = self._open_nvml()
        except EnvironmentBroken as error:
            self._why_not = str(error)

    def sampler(self, interval_seconds: float) -> Sampler:
        """Return the sampler. The first rank's interval counts; the others send the same."""
        with self._lock:
            self._sampler = self._sampler or Sampler(self._nvml, interval_seconds, why_not=self._why_not)
            return self._sampler

    def sees(self, uuid: str) -> bool:
        """Whether NVML lists a GPU here; also True without NVML, where another process would not help."""
        return self._nvml is None or self._nvml.find(uuid) is not None


class RankConnection:
    """The connection of one rank."""

    def __init__(self, node: Node, channel: socket.socket) -> None:
        self._node = node
        self._channel = channel
        self._gpu: tuple[Sampler, str, bool] | None = None
        """Its sampler and UUID, and whether NVML lists it."""
        self._windows: dict[int, GpuWindow] = {}

    def serve(self) -> None:
        """Serve requests until the rank disconnects or sends an invalid message."""
        try:
            while packet := self._channel.recv(MESSAGE_BYTES):
                try:
                    answer = self._handle(json.loads(packet))
                except (ValueError, KeyError, TypeError, RuntimeError) as error:
                    self._send({"failure": f"{type(error).__name__}: {error}"})
                    return
                if answer is not None:
                    self._send(answer)
        except OSError:
            return  # it has disconnected, or reads no answers
        finally:
            self._channel.close()
            if self._gpu is not None:
                sampler, uuid, _ = self._gpu
                for window in self._windows.values():
                    sampler.close(uuid, window, time.monotonic())

    def _send(self, answer: Mapping[str, Any]) -> None:
        self._channel.send(json.dumps(answer).encode(), socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)

    def _handle(self, message: Mapping[str, Any]) -> Mapping[str, Any] | None:
        if "gpu" in message:
            uuid = str(message["gpu"])
            self._gpu = self._node.sampler(float(message["interval"])), uuid, self._node.sees(uuid)
            return None
        if self._gpu is None:
            raise ValueError("a window of no GPU")
        sampler, uuid, is_seen = self._gpu
        at = float(message["at"])
        if "open" in message:
            sampler.open(uuid, self._windows.setdefault(int(message["open"]), GpuWindow()), at)
            return None
        window = self._windows[int(message["close"])]
        sampler.close(uuid, window, at)
        return {"summary": sampler.summary(uuid, window), "unseen": not is_seen}


def serve(listener: socket.socket, node: Node) -> None:
    """Accept ranks, each served in a thread of its own, for as long as the process lives."""
    node.open()
    while True:
        channel, _ = listener.accept()
        _, user, _ = _CREDENTIALS.unpack(channel.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
        if user != os.geteuid():
            channel.close()
            continue
        threading.Thread(target=RankConnection(node, channel).serve, name="gpucluster-rank", daemon=True).start()


def wait_for_end(parent: int) -> None:
    """Return when the parent has exited, however it did."""
    end = detached_process.end_descriptor(parent)
    if end is not None:
        select.select([end], [], [])
        return
    while os.getppid() == parent:
        time.sleep(_TICK_SECONDS)


def main(open_nvml: Callable[[], Nvml] = PyNvml) -> NoReturn:
    """Run as the sampler process."""
    detached_process.shield()
    parser = argparse.ArgumentParser(description="The sampler of a node, started by a rank, not by hand.")
    parser.add_argument("--listener", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    options = parser.parse_args()
    listener = socket.socket(fileno=options.listener)
    # The main thread only waits: NVML may hang in any other one, and the process still ends with its parent.
    threading.Thread(target=serve, args=(listener, Node(open_nvml)), daemon=True).start()
    wait_for_end(options.parent)
    os._exit(0)


if __name__ == "__main__":
    main()
