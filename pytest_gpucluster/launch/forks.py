"""Launchers and ranks as forks: the side that asks a server of forks for them. The server is another process.

To load torch and pytest costs 3 CPU seconds in each process. One process loads them, and each launcher and each of its
ranks is a fork of it: :mod:`pytest_gpucluster.session.fork_server`. Here nothing of that is loaded.

What a fork has not of its own: ``/proc/PID/cmdline`` and ``/proc/PID/environ`` are those of the server. So each process
of a session keeps a descriptor by which :func:`holders` finds it.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

SERVER = ("-m", "pytest_gpucluster.session.fork_server")
_READY_SECONDS = 120.0


class Forked:
    """A process that a server has forked, with the part of ``subprocess.Popen`` that callers need."""

    def __init__(self, reply: socket.socket) -> None:
        self._reply = reply
        self._received = b""
        self.returncode: int | None = None
        while b"\n" not in self._received:
            self._receive()
        self.pid = int(self._received.partition(b"\n")[0])

    def poll(self) -> int | None:
        """Return None while it runs, else its exit code, which is negative for a signal."""
        while self.returncode is None and _is_readable(self._reply, 0.0):
            self._receive()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end.

        Raises:
            subprocess.TimeoutExpired: it still runs after ``timeout`` seconds.
        """
        while self.returncode is None:
            if not _is_readable(self._reply, timeout):
                raise subprocess.TimeoutExpired("a forked session", timeout or 0.0)
            self._receive()
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill it."""
        self.send_signal(signal.SIGKILL)

    def _receive(self) -> None:
        received = self._reply.recv(64)
        if not received:
            raise RuntimeError("the fork server has ended")
        self._received += received
        lines = self._received.split(b"\n")
        if len(lines) > 2:
            self.returncode = int(lines[1])
            self._reply.close()


class ForkServer:
    """A server of forks, which ends with the process that has started it. Threads may share one.

    Args:
        start: starts the server, given its end of the socket; by default a new Python.

    Raises:
        RuntimeError: it has not started.
    """

    def __init__(self, start: Callable[[int], subprocess.Popen[bytes] | Forked] | None = None) -> None:
        self._lock = threading.Lock()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = (start or start_server)(theirs.fileno())
        if not _is_readable(self._socket, _READY_SECONDS) or self._socket.recv(64) != b"ready":
            raise RuntimeError("the fork server has not started")

    def start(
        self, command: Sequence[str], *, cwd: Path, env: Mapping[str, str | bytes], output: int, errors: int, token: str
    ) -> Forked:
        """Start ``python -m MODULE ...`` in a session of its own, without input.

        Args:
            command: of Python; options before ``-m`` but ``-u`` are not supported.
            cwd: its working directory.
            env: its whole environment.
            output: the descriptor of its standard output.
            errors: that of its standard error.
            token: by which :func:`holders` finds it and its forks, not what they start as new programs.
        """
        request = {
            "command": list(command),
            "cwd": str(cwd),
            "env": {name: os.fsdecode(value) for name, value in env.items()},
        }
        ours, theirs = socket.socketpair()
        marker = os.memfd_create(token)
        with theirs:
            descriptors = [theirs.fileno(), output, errors, marker]
            with self._lock:
                socket.send_fds(self._socket, [json.dumps(request).encode()], descriptors)
        os.close(marker)
        return Forked(ours)

    def close(self) -> None:
        """End the server; what it has started goes on."""
        self._socket.close()
        self._process.wait()


def start_server(descriptor: int, program: Sequence[str] = SERVER) -> subprocess.Popen[bytes]:
    """Start a server in a Python of its own, on its end of the socket.

    Args:
        descriptor: of that end.
        program: Python's arguments before the descriptor.
    """
    return subprocess.Popen(
        [sys.executable, *program, str(descriptor)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        pass_fds=[descriptor],
        start_new_session=True,  # Ctrl-C is for the caller, which ends its sessions itself
    )


def holders(token: str) -> set[int]:
    """Return the processes of this host that hold the descriptor of a session."""
    found = set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # it has just ended
            for descriptor in os.scandir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):  # it has just been closed
                    if os.readlink(descriptor).startswith(f"/memfd:{token} "):
                        found.add(int(pid))
    return found


def _is_readable(waiting: socket.socket, timeout: float | None) -> bool:
    """Wait until a socket is readable. Not by select: pytest may have more than the 1,024 descriptors that it takes."""
    poller = select.poll()
    poller.register(waiting, select.POLLIN)
    return bool(poller.poll(None if timeout is None else 1000 * timeout))
