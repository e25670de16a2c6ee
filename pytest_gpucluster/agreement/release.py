"""Release of a main thread that is blocked in a gloo collective or Python code (loop, sleep, lock).

From NCCL's kernels ``device.process_group`` releases it.

gloo: neither abort, shutdown nor destroy of a group frees a rank before the group's own timeout. Shutting down the
group's connections does, within milliseconds: every pending operation fails with "Connection closed by peer". gloo does
not report which sockets are a group's, so they are found as the difference of the process's open files around the
group's creation.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import types
from collections.abc import Iterator
from typing import Protocol

from _pytest.outcomes import Failed  # pytest.fail.Exception, under the name that type checkers know

_FDS = "/proc/self/fd"


def open_sockets() -> dict[int, str]:
    """Return this process's open sockets: file descriptor -> "socket:[inode]"."""
    found: dict[int, str] = {}
    for name in os.listdir(_FDS):
        try:
            target = os.readlink(f"{_FDS}/{name}")
        except FileNotFoundError:  # the descriptor of the listing itself
            continue
        if target.startswith("socket:"):
            found[int(name)] = target
    return found


class SocketReleaser:
    """Shuts down the connections of gloo groups, and of the store through which any group is being made."""

    def __init__(self) -> None:
        self._sockets: dict[int, str] = {}
        self._making: dict[int, str] | None = None

    @property
    def making_group(self) -> bool:
        """Return whether a block of :meth:`taking` is open."""
        return self._making is not None

    @contextlib.contextmanager
    def taking(self) -> Iterator[None]:
        """Take every socket opened inside the block, also when it is released in the middle of it."""
        self._making = open_sockets()
        try:
            yield
            self._take(self._making)
        finally:
            self._making = None

    def release(self) -> None:
        """Shut the connections down; a listening socket stays, because gloo aborts the process without it."""
        making = self._making  # the main thread may leave the block, and take sockets, at any moment
        if making is not None:
            self._take(making)
        for fd, inode in list(self._sockets.items()):
            try:
                # The number may have been given to another file since: the inode shows it.
                if os.readlink(f"{_FDS}/{fd}") != inode:
                    continue
                connection = socket.socket(fileno=os.dup(fd))
            except OSError:
                continue  # closed in the meantime: no thread waits on it any more
            with connection, contextlib.suppress(OSError):  # the peer was faster
                if not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    connection.shutdown(socket.SHUT_RDWR)

    def _take(self, before: dict[int, str]) -> None:
        self._sockets.update((fd, inode) for fd, inode in open_sockets().items() if before.get(fd) != inode)


RELEASE_SIGNAL = signal.SIGUSR2


class Released(Failed):
    """Raised in the main thread to end a phase of a test that cannot end by itself.

    It is one of pytest's outcome exceptions, hence no ``Exception``: a test's ``except Exception`` lets it through.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason, pytrace=False)


class PythonReleaser:
    """Raises :class:`Released` in the main thread, but only while that is armed.

    The handler itself looks at the armed reason, so a signal that arrives late, when the phase is over, does nothing.
    """

    def __init__(self) -> None:
        self.reason: str | None = None
        """Why the main thread is about to be released; None once it has come back."""
        self._main = threading.main_thread()

    def install(self) -> None:
        """Install the handler. Must be called in the main thread, and again when a test may have replaced it."""
        signal.signal(RELEASE_SIGNAL, self._raise)

    def release(self) -> None:
        """Interrupt the main thread."""
        if self.reason is not None and self._main.ident is not None:
            signal.pthread_kill(self._main.ident, RELEASE_SIGNAL)

    def _raise(self, signum: int, frame: types.FrameType | None) -> None:
        reason, self.reason = self.reason, None
        if reason is not None:
            raise Released(reason)


class Releaser(Protocol):
    """Ends whatever blocks the main thread, from another thread of the same process."""

    @property
    def making_group(self) -> bool:
        """Return whether the main thread is inside the making of a process group, where no flight recorder looks."""

    def release(self) -> None:
        """Make the blocked call return or raise. Safe to call again, and after the call has ended by itself."""
