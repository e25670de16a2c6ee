"""The node's sampler process: it reads each GPU that a rank of the node named, while a window on it is open.

A rank's messages, each a JSON object and a packet of its own:

    {"gpu": "GPU-1f2e...", "interval": 0.1}     first: its GPU, and how often it is read
    {"open": 7, "at": 12.3, "forget": [5, 6]}   window 7 opens, at a time of the monotonic clock; 5 and 6 are deleted
    {"close": 7, "at": 15.4, "request": 12}     it closes; the answer is {"request": 12, "summary": {...}}

An answer has ``"unseen": true`` too where NVML does not list the GPU here: a launcher may show each rank its own only.
An invalid message is answered by {"failure": "why"}, and the connection is closed.

A thread serves each rank and another one reads the GPUs, so that each rank is answered while NVML hangs. The process
exits with its parent.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from pytest_gpucluster.errors import EnvironmentBroken
from pytest_gpucluster.launch import detached_process
from pytest_gpucluster.node.health.gpu_sampler import GpuSampler, GpuWindow, Pace
from pytest_gpucluster.node.health.telemetry import MESSAGE_BYTES
from pytest_gpucluster.node.nvml import Nvml, open_nvml

_TICK_SECONDS = 0.5
_CREDENTIALS = struct.Struct("3i")
"""pid, uid and gid of a peer. Source: unix(7), SO_PEERCRED."""


class Node:
    """The GPUs that are read here, one sampler each. Where NVML cannot be opened, every window has the reason."""

    def __init__(self, open_nvml: Callable[[], Nvml]) -> None:
        self._lock = threading.Lock()
        self._pace: Pace | None = None
        self._samplers: dict[str, GpuSampler] = {}
        self._nvml: Nvml | None = None
        self._why_not = ""
        try:
            self._nvml = open_nvml()
        except EnvironmentBroken as error:
            self._why_not = str(error)

    def sampler(self, uuid: str, interval_seconds: float) -> GpuSampler:
        """Return the sampler of a GPU. The first rank's interval counts; the others send the same."""
        with self._lock:
            self._pace = self._pace or Pace(interval_seconds)
            if uuid not in self._samplers:
                self._samplers[uuid] = GpuSampler(self._nvml, uuid, self._pace, why_not=self._why_not)
            return self._samplers[uuid]

    def sees(self, uuid: str) -> bool:
        """Whether NVML lists a GPU here; also True without NVML, where another process would not help."""
        return self._nvml is None or self._nvml.find(uuid) is not None


class RankConnection:
    """The connection of one rank."""

    def __init__(self, node: Node, channel: socket.socket) -> None:
        self._node = node
        self._channel = channel
        self._sampler: GpuSampler | None = None
        self._is_unseen = False
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
            now = time.monotonic()
            for window in self._windows.values():
                window.close(now)

    def _send(self, answer: Mapping[str, Any]) -> None:
        self._channel.send(json.dumps(answer).encode(), socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)

    def _handle(self, message: Mapping[str, Any]) -> Mapping[str, Any] | None:
        if "gpu" in message:
            self._sampler = self._node.sampler(str(message["gpu"]), float(message["interval"]))
            self._is_unseen = not self._node.sees(str(message["gpu"]))
            return None
        at = float(message["at"])
        if "open" in message:
            number = int(message["open"])
            if self._sampler is None:
                raise ValueError("a window of no GPU")
            for done in message["forget"]:
                self._windows.pop(int(done), None)
            if number not in self._windows:
                self._windows[number] = self._sampler.window()
            self._windows[number].open(at)
            return None
        window = self._windows[int(message["close"])]
        window.close(at)
        unseen = {"unseen": True} if self._is_unseen else {}
        return {"request": message["request"], "summary": window.summary(), **unseen}


def serve(listener: socket.socket, open_nvml: Callable[[], Nvml]) -> None:
    """Open NVML, and accept ranks, each served in a thread of its own, for as long as the process lives."""
    node = Node(open_nvml)
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


def main(open_nvml: Callable[[], Nvml] = open_nvml) -> NoReturn:
    """Run as the sampler process."""
    detached_process.shield()
    parser = argparse.ArgumentParser(description="The sampler of a node, started by a rank, not by hand.")
    parser.add_argument("--listener", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    options = parser.parse_args()
    listener = socket.socket(fileno=options.listener)
    # The main thread only waits: NVML may hang in any other one, and the process still ends with its parent.
    threading.Thread(target=serve, args=(listener, open_nvml), daemon=True).start()
    wait_for_end(options.parent)
    os._exit(0)


if __name__ == "__main__":
    main()
