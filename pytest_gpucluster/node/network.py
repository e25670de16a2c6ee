"""Whether every node reaches every other one over TCP, on the interface that NCCL or gloo will use for its connections.

Each host runs a small TCP service (:class:`Responder`), which other hosts call to learn whether they reach it and what
its clock says. Plain sockets with deadlines, before any process group is made: where a firewall or a wrong interface
lies between two nodes, a process group would only hang.
"""

from __future__ import annotations

import secrets
import socket
import socketserver
import struct
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

from pytest_gpucluster.errors import EnvironmentBroken, HardwareFault
from pytest_gpucluster.node.interfaces import Board, Chosen, Nodes

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


_AT_ONCE = 16
"""Connections that a node makes at the same time: 127 others are through in a few rounds."""
_BESIDE_SECONDS = 30.0
"""What nodes may be apart when they begin and end."""
_PAIRS_TOLD = 20
_NODES_TOLD = 20
_SILENT = "it gave no word in time, though its rank is there: is it busy, or stopped?"


@dataclass(frozen=True, kw_only=True)
class Reached:
    """Who reaches whom.

    Attributes:
        hosts: node -> its name.
        addresses: node -> its address and interface, as far as it has one.
        slowest: node -> how long the slowest of its connections took, with one exchange, of those that worked.
        failures: (from, to) -> why it did not work.
        untried: (from, to) that nobody has tried, or told of.
        absent: node -> why it has no address.
        silent: nodes of which nothing was heard, or not enough.
    """

    hosts: Mapping[int, str]
    addresses: Mapping[int, str] = field(default_factory=dict)
    slowest: Mapping[int, float] = field(default_factory=dict)
    failures: Mapping[tuple[int, int], str] = field(default_factory=dict)
    untried: frozenset[tuple[int, int]] = frozenset()
    absent: Mapping[int, str] = field(default_factory=dict)
    silent: tuple[int, ...] = ()

    @property
    def reached_ratio(self) -> float:
        """Part of the pairs that reach each other: each node with every node, itself included, in both directions.
        Nodes that have no address are no part of any pair."""
        present = len(self.hosts) - len(self.absent)
        return 1 - len({*self.failures, *self.untried}) / present**2 if present else 0.0

    @property
    def whole_nodes(self) -> int:
        """How many nodes reach all nodes and are reached by all."""
        if self.absent or self.silent:
            return 0
        return len(set(self.hosts) - {node for pair in (*self.failures, *self.untried) for node in pair})

    def slowest_from(self, node: int) -> float | None:
        """Return the longest time that a connection from this node took; None where none worked."""
        return self.slowest.get(node)

    def blamed(self) -> tuple[int, ...]:
        """Return the nodes that the failures point to.

        A node that is part of failures with more than half of the others explains them by itself; of a pair that no
        such node explains both ends are named.
        """
        blamed = {*self.absent, *self.silent, *(one for one, two in self.failures if one == two)}
        partners: dict[int, set[int]] = {}
        for one, two in self.failures:
            if not blamed & {one, two}:
                partners.setdefault(one, set()).add(two)
                partners.setdefault(two, set()).add(one)
        while partners:
            worst = max(partners, key=lambda node: (len(partners[node]), -node))
            if len(partners[worst]) == 1 or 2 * len(partners[worst]) <= len(self.hosts) - 1:
                blamed |= {*partners}
                break
            blamed.add(worst)
            for other in partners.pop(worst):
                partners[other].discard(worst)
                if not partners[other]:
                    del partners[other]
        return tuple(sorted(blamed))

    def require_whole(self, node: int) -> None:
        """Make sure that all nodes reach each other; it is told on the nodes to which the failures point, and for a
        node that is silent by the first one.

        Raises, on such a node:
            HardwareFault: each pair that does not, both ends named.
            EnvironmentBroken: all that could be tried works, but a node has no usable interface, or is silent.
        """
        blamed = self.blamed()
        if node not in blamed and not (self.silent and node == min(self.hosts)):
            return
        names = ", ".join(self.hosts[one] for one in blamed[:_NODES_TOLD])
        names += f" and {len(blamed) - _NODES_TOLD} more" if len(blamed) > _NODES_TOLD else ""
        told = [f"- {self.hosts[one]}: {why}" for one, why in sorted(self.absent.items())]
        told += [f"- {self.hosts[one]}: {_SILENT}" for one in self.silent]
        told += [
            f"- {self._name(one)} does not reach {self._name(two)}: {why}"
            for (one, two), why in sorted(self.failures.items())
        ]
        if len(told) > _PAIRS_TOLD:
            told[_PAIRS_TOLD:] = [f"- and {len(told) - _PAIRS_TOLD} more"]
        text = "\n".join(
            [
                f"{self.whole_nodes} of {len(self.hosts)} nodes reach all others; look at {names}",
                *told,
                "what to do: compare NCCL_SOCKET_IFNAME with the nodes' interfaces (`ip -br addr`), and look for a "
                "firewall, a switch port that is down, and different MTUs between the named hosts",
            ]
        )
        raise HardwareFault(text) if self.failures else EnvironmentBroken(text)

    def _name(self, node: int) -> str:
        where = self.addresses.get(node)
        return f"{self.hosts[node]} ({where})" if where else self.hosts[node]


@dataclass(frozen=True, kw_only=True)
class Pieces:
    """What is done between two hosts. A test puts one that is broken in the place of another."""

    call: Callable[..., float]


def call(address: str, port: int, token: str, *, payload: bytes, deadline_seconds: float) -> float:
    """Connect to a node's responder, and exchange a few bytes and then the payload; return the seconds until the few
    bytes are back.

    The payload fills many packets: between hosts whose MTUs differ, few bytes pass and many do not.

    Raises: OSError if any of this fails or takes too long.
    """
    begin = time.perf_counter()
    with Caller(address, port, token, deadline_seconds=deadline_seconds) as caller:
        caller.echo(b"are you there?")
        seconds = time.perf_counter() - begin
        try:
            caller.echo(payload)
        except OSError as error:
            raise OSError(
                f"a few bytes pass, and {len(payload)} do not ({error or type(error).__name__}): compare the MTUs of "
                "both hosts' interfaces and of the switches between them"
            ) from error
    return seconds


PIECES = Pieces(call=call)


def longest_seconds(count: int, deadline_seconds: float) -> float:
    """Return how long :func:`connect_all` can take with so many nodes."""
    return 2 * (deadline_seconds * (2 + 2 * count / _AT_ONCE) + _BESIDE_SECONDS)


def connect_all(
    board: Board,
    nodes: Nodes,
    choose: Callable[[], Chosen],
    *,
    payload_bytes: int,
    deadline_seconds: float,
    pieces: Pieces | None = None,
) -> Reached:
    """Let every node connect to every node, itself included; return on all of them who reached whom.

    The rank that speaks for each node must call this, and no other one.

    Args:
        board: where nodes tell their addresses.
        nodes: who takes part.
        choose: says which address this node uses.
        payload_bytes: what is exchanged over each connection.
        deadline_seconds: how long a connection may be silent.
        pieces: what is done between two hosts; by default ``PIECES`` of this module.

    Raises: StoreError if the store has stopped answering.
    """
    pieces = pieces or PIECES
    within = longest_seconds(len(nodes.hosts), deadline_seconds) / 2
    with ExitStack() as stack:
        mine: dict[str, Any]
        try:
            chosen = choose()
            responder = stack.enter_context(Responder(chosen.address, deadline_seconds=deadline_seconds))
        except (EnvironmentBroken, OSError) as error:  # told to all: they must not wait for this node's address
            mine = {"error": str(error)}
        else:
            mine = {
                "address": chosen.address,
                "port": responder.port,
                "token": responder.token,
                "where": f"{chosen.address} on {chosen.interface}, {chosen.why}",
            }
        told = nodes.gather(board, "address", mine, within_seconds=within)
        there = {node: one for node, one in told.items() if "error" not in one}
        # A node without an address of its own calls nobody: what it could reach says nothing. Each one begins with the
        # node after it: if all began with the first one, that would have to answer them all at once.
        called = {} if "error" in mine else _from(nodes.me, there)
        payload = bytes(index * 7 % 251 for index in range(payload_bytes))

        def attempt(one: Mapping[str, Any]) -> float | str:
            try:
                return pieces.call(
                    one["address"], one["port"], one["token"], payload=payload, deadline_seconds=deadline_seconds
                )
            except OSError as error:  # it is told to all nodes
                return str(error) or type(error).__name__

        with ThreadPoolExecutor(max_workers=_AT_ONCE) as pool:
            results = dict(zip(called, pool.map(attempt, called.values()), strict=True))
        # Who has told its results needs no answer any more: when all have, the responder may end.
        reports = nodes.gather(board, "reached", _report(nodes, results), within_seconds=within)
    absent = {node: one["error"] for node, one in told.items() if "error" in one}
    return _agreed(nodes, reports, absent, {node: one["where"] for node, one in there.items()})


def _from(me: int, there: Mapping[int, Any]) -> dict[int, Any]:
    """Return the nodes in the order in which one of them calls: those after it, then those before it, then itself."""
    return {node: there[node] for node in sorted(there, key=lambda node: (node <= me, node))}


def _report(nodes: Nodes, results: Mapping[int, float | str]) -> dict[str, Any]:
    """Return what a node tells all others of its calls, in few words: each of them reads it, however many they are."""
    failed: dict[str, list[int]] = {}
    for node, result in results.items():
        if isinstance(result, str):
            failed.setdefault(result, []).append(node)
    worked = [result for result in results.values() if not isinstance(result, str)]
    left_out = [node for node in nodes.hosts if node not in results]
    return {"slowest": max(worked, default=None), "failed": failed, "left_out": left_out}


def _agreed(
    nodes: Nodes, reports: Mapping[int, Mapping[str, Any]], absent: Mapping[int, str], addresses: Mapping[int, str]
) -> Reached:
    """Put together what every node has reached."""
    told = {node: report for node, report in reports.items() if node not in absent}
    silent = tuple(node for node in nodes.hosts if node not in told and node not in absent)
    untried = {(one, two) for one in silent for two in nodes.hosts}
    untried |= {(one, two) for one, report in told.items() for two in report["left_out"]}
    return Reached(
        hosts=nodes.hosts,
        addresses=addresses,
        slowest={node: report["slowest"] for node, report in told.items() if report["slowest"] is not None},
        failures={
            (one, two): why
            for one, report in told.items()
            for why, others in report["failed"].items()
            for two in others
        },
        untried=frozenset((one, two) for one, two in untried if two not in absent),
        absent=absent,
        silent=silent,
    )
