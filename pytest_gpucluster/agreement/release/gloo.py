"""Release of ranks that wait in a gloo collective.

Neither abort, shutdown nor destroy of a gloo group frees a rank before the group's own timeout. Shutting down the
group's connections does, within milliseconds: every pending operation fails with "Connection closed by peer". gloo does
not tell which sockets are a group's, so they are found as the difference of the process's open files around the
group's creation.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator

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
        """Tell whether a block of :meth:`taking` is open."""
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
                # The number may have been given to another file since: the inode tells.
                if os.readlink(f"{_FDS}/{fd}") != inode:
                    continue
                connection = socket.socket(fileno=os.dup(fd))
            except OSError:
                continue  # closed in the meantime: nobody waits on it any more
            with connection, contextlib.suppress(OSError):  # the peer was faster
                if not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    connection.shutdown(socket.SHUT_RDWR)

    def _take(self, before: dict[int, str]) -> None:
        self._sockets.update((fd, inode) for fd, inode in open_sockets().items() if before.get(fd) != inode)
