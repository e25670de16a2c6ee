"""A small TCP service of a host, which other hosts call to learn whether they reach it and what its clock says."""

from __future__ import annotations

import secrets
import socket
import socketserver
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress

TOKEN_BYTES = 16
_HEAD = struct.Struct(f"!{TOKEN_BYTES}scI")
"""The token, what is asked, and how many bytes follow."""
_TIMES = struct.Struct("!dd")
_ECHO, _CLOCK = b"E", b"C"
MOST_BYTES = 2**26
_CHUNK_BYTES = 2**16


class Responder:
    """Answers on a port of its own, in a thread, until it is closed. Use it as a context manager.

    Whoever does not know the token gets no answer: a port scanner or another job is no peer.

    Args:
        address: where to listen; the port is a free one.
        deadline_seconds: how long a connection may be silent.
        now: this host's clock.

    Raises: OSError if nothing can listen there.
    """

    def __init__(self, address: str, *, deadline_seconds: float, now: Callable[[], float] = time.time) -> None:
        self.address = address
        self.token = secrets.token_hex(TOKEN_BYTES // 2)
        token = self.token.encode()

        class Connection(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                self.request.settimeout(deadline_seconds)
                with suppress(OSError, EOFError):  # the caller sees it too, and tells
                    while True:
                        came, asked, length = _HEAD.unpack(receive(self.request, _HEAD.size))
                        arrived = now()
                        if came != token or length > MOST_BYTES:
                            return
                        if asked == _ECHO:
                            self.request.sendall(receive(self.request, length))
                        else:
                            self.request.sendall(_TIMES.pack(arrived, now()))

        class Server(socketserver.ThreadingTCPServer):
            address_family = socket.AF_INET6 if ":" in address else socket.AF_INET
            allow_reuse_address = True
            daemon_threads = True
            block_on_close = False
            request_queue_size = 1024

        self._server = Server((address, 0), Connection)
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, name="gpucluster-responder", daemon=True
        )

    def __enter__(self) -> Responder:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class Caller:
    """A connection to a :class:`Responder`. Use it as a context manager.

    Raises: OSError if it cannot be reached, or is silent for longer than the deadline.
    """

    def __init__(self, address: str, port: int, token: str, *, deadline_seconds: float) -> None:
        self._token = token.encode()
        self._socket = socket.create_connection((address, port), timeout=deadline_seconds)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def __enter__(self) -> Caller:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def echo(self, payload: bytes) -> None:
        """Send bytes, and make sure that the same bytes come back.

        Raises: OSError if they do not.
        """
        self._socket.sendall(_HEAD.pack(self._token, _ECHO, len(payload)) + payload)
        try:
            back = receive(self._socket, len(payload))
        except EOFError:
            raise ConnectionError("it accepts connections and then closes them: is it another program?") from None
        if back != payload:
            raise ConnectionError(f"of {len(payload)} bytes that were sent there others came back")

    def clock(self) -> tuple[float, float]:
        """Return what the other host's clock said when the question came, and when the answer went.

        Raises: OSError if no answer comes.
        """
        self._socket.sendall(_HEAD.pack(self._token, _CLOCK, 0))
        try:
            arrived, left = _TIMES.unpack(receive(self._socket, _TIMES.size))
        except EOFError:
            raise ConnectionError("it accepts connections and then closes them: is it another program?") from None
        return float(arrived), float(left)


def receive(connection: socket.socket, length: int) -> bytes:
    """Read so many bytes.

    Raises:
        EOFError: the connection was closed before.
        OSError: it failed, or was silent for too long.
    """
    parts = []
    while length:
        part = connection.recv(min(length, _CHUNK_BYTES))
        if not part:
            raise EOFError
        parts.append(part)
        length -= len(part)
    return b"".join(parts)
