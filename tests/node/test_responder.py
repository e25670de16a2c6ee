"""A responder answers callers with its token only; a caller notices missing and altered answers."""

from __future__ import annotations

import socket
import threading

import pytest

from pytest_gpucluster.node import network
from pytest_gpucluster.node.network import _HEAD, MAX_BYTES, Caller, receive, respond


@pytest.mark.parametrize("payload", [b"", b"x", bytes(range(256)) * 2048], ids=["nothing", "a byte", "512 KiB"])
def test_what_was_sent_comes_back(payload: bytes) -> None:
    with (
        respond("127.0.0.1", deadline_seconds=5) as service,
        Caller(**service, deadline_seconds=5) as caller,
    ):
        caller.echo(payload)
        caller.echo(b"and again")


def test_the_times_are_of_the_other_host_s_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter((100.0, 100.5))
    monkeypatch.setattr(network, "NOW", lambda: next(times))
    with respond("127.0.0.1", deadline_seconds=5) as service, Caller(**service, deadline_seconds=5) as caller:
        assert caller.echo() == (100.0, 100.5)


@pytest.mark.parametrize("token", ["0" * 16, "Ü" * 8], ids=["another token", "other bytes"])
def test_who_does_not_know_the_token_gets_no_answer(token: str) -> None:
    with (
        respond("127.0.0.1", deadline_seconds=5) as service,
        Caller("127.0.0.1", service["port"], token, deadline_seconds=5) as caller,
        pytest.raises(ConnectionError, match="another program"),
    ):
        caller.echo(b"x")


def test_a_length_beyond_reason_gets_no_answer() -> None:
    with (
        respond("127.0.0.1", deadline_seconds=5) as service,
        socket.create_connection(("127.0.0.1", service["port"]), timeout=5) as connection,
    ):
        connection.sendall(_HEAD.pack(service["token"].encode(), MAX_BYTES + 1))
        with pytest.raises(EOFError):
            receive(connection, 1)


def answering(answer: bytes) -> int:
    """Start something that answers these bytes to whatever comes, and return its port."""
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with server, server.accept()[0] as connection:
            connection.recv(1000)
            connection.sendall(answer)
            connection.recv(1000)

    threading.Thread(target=serve, daemon=True).start()
    return int(server.getsockname()[1])


def test_other_bytes_than_were_sent_are_noticed() -> None:
    with (
        Caller("127.0.0.1", answering(bytes(16) + b"abd"), "x" * 16, deadline_seconds=5) as caller,
        pytest.raises(ConnectionError, match="3 bytes"),
    ):
        caller.echo(b"abc")


def test_silence_ends_at_the_deadline_and_a_port_without_a_listener_is_refused() -> None:
    with Caller("127.0.0.1", answering(b""), "x" * 16, deadline_seconds=0.1) as caller, pytest.raises(TimeoutError):
        caller.echo(b"abc")
    with respond("127.0.0.1", deadline_seconds=5) as service:
        port = service["port"]
    with pytest.raises(ConnectionRefusedError):
        Caller("127.0.0.1", port, "x" * 16, deadline_seconds=5)
