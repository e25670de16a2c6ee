"""Whether every node reaches every other one over TCP, on the interface that NCCL or gloo will use.

Each host runs a small TCP service (:class:`Responder`), which other hosts connect to, also for its clock. Plain sockets
with deadlines, before any process group is made: with a firewall or a wrong interface, a process group would hang.
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
"""The token, the request, and the number of bytes that follow."""
_TIMES = struct.Struct("!dd")
_ECHO, _CLOCK = b"E", b"C"
MAX_BYTES = 2**26
_CHUNK_BYTES = 2**16


class Responder:
    """Answers on a port of its own, in a thread, until it is closed. Use it as a context manager.

    A caller without the token, such as a port scanner or another job, gets no answer.

    Args:
        address: where to listen; the port is a free one.
        deadline_seconds: of each receive.
        now: this host's clock.

    Raises: OSError if it cannot listen there.
    """

    def __init__(self, address: str, *, deadline_seconds: float, now: Callable[[], float] = time.time) -> None:
        self.address = address
        self.token = secrets.token_hex(TOKEN_BYTES // 2)
        token = self.token.encode()

        class Connection(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                self.request.settimeout(deadline_seconds)
                with suppress(OSError, EOFError):  # the caller reports it
                    while True:
                        token_received, request, length = _HEAD.unpack(receive(self.request, _HEAD.size))
                        arrived = now()
                        if token_received != token or length > MAX_BYTES:
                            return
                        if request == _ECHO:
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

    Raises: OSError if it cannot be reached, or a receive exceeds the deadline.
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
        """Send bytes and require the same bytes back.

        Raises: OSError otherwise.
        """
        back = self._ask(_HEAD.pack(self._token, _ECHO, len(payload)) + payload, len(payload))
        if back != payload:
            raise ConnectionError(f"{len(payload)} bytes came back altered")

    def clock(self) -> tuple[float, float]:
        """Return the other host's time when the request arrived, and when the answer was sent.

        Raises: OSError without an answer.
        """
        arrived, sent = _TIMES.unpack(self._ask(_HEAD.pack(self._token, _CLOCK, 0), _TIMES.size))
        return float(arrived), float(sent)

    def _ask(self, request: bytes, length: int) -> bytes:
        self._socket.sendall(request)
        try:
            return receive(self._socket, length)
        except EOFError:
            raise ConnectionError("it accepts connections and then closes them: is it another program?") from None


def receive(connection: socket.socket, length: int) -> bytes:
    """Receive ``length`` bytes.

    Raises:
        EOFError: the connection was closed before.
        OSError: it failed or timed out.
    """
    parts = []
    while length:
        part = connection.recv(min(length, _CHUNK_BYTES))
        if not part:
            raise EOFError
        parts.append(part)
        length -= len(part)
    return b"".join(parts)


_CONCURRENT = 16
"""Concurrent connections of a node: 127 others take a few rounds."""
_MARGIN_SECONDS = 30.0
"""How far apart nodes may begin and end."""
_MAX_PAIRS = 20
_MAX_NODES = 20
_SILENT = "no answer in time, though its rank is running: is it busy, or stopped?"


@dataclass(frozen=True, kw_only=True)
class Reachability:
    """Which node reaches which.

    Attributes:
        hosts: node -> its name.
        addresses: node -> its address and interface, if it has one.
        slowest: node -> duration of its slowest connection, with one exchange, of those that worked.
        failures: (from, to) -> why it failed.
        untried: (from, to) without a result.
        absent: node -> why it has no address.
        silent: nodes that did not answer.
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
        Nodes without an address are not counted."""
        present = len(self.hosts) - len(self.absent)
        return 1 - len({*self.failures, *self.untried}) / present**2 if present else 0.0

    @property
    def whole_nodes(self) -> int:
        """Number of nodes that reach all nodes and are reached by all."""
        if self.absent or self.silent:
            return 0
        return len(set(self.hosts) - {node for pair in (*self.failures, *self.untried) for node in pair})

    def slowest_from(self, node: int) -> float | None:
        """Return the duration of this node's slowest connection; None where none worked."""
        return self.slowest.get(node)

    def suspects(self) -> tuple[int, ...]:
        """Return the suspected nodes.

        A node with failures to more than half of the others explains these; of a pair without such a node, both ends
        are suspects.
        """
        suspects = {*self.absent, *self.silent, *(one for one, two in self.failures if one == two)}
        partners: dict[int, set[int]] = {}
        for one, two in self.failures:
            if not suspects & {one, two}:
                partners.setdefault(one, set()).add(two)
                partners.setdefault(two, set()).add(one)
        while partners:
            worst = max(partners, key=lambda node: (len(partners[node]), -node))
            if len(partners[worst]) == 1 or 2 * len(partners[worst]) <= len(self.hosts) - 1:
                suspects |= {*partners}
                break
            suspects.add(worst)
            for other in partners.pop(worst):
                partners[other].discard(worst)
                if not partners[other]:
                    del partners[other]
        return tuple(sorted(suspects))

    def require_whole(self, node: int) -> None:
        """Require that all nodes reach each other. The suspected nodes raise, and for a silent node the first one.

        Raises:
            HardwareFault: each failed pair with both ends.
            EnvironmentBroken: no pair failed, but a node has no usable interface, or is silent.
        """
        suspects = self.suspects()
        if node not in suspects and not (self.silent and node == min(self.hosts)):
            return
        names = ", ".join(self.hosts[one] for one in suspects[:_MAX_NODES])
        names += f" and {len(suspects) - _MAX_NODES} more" if len(suspects) > _MAX_NODES else ""
        lines = [f"- {self.hosts[one]}: {why}" for one, why in sorted(self.absent.items())]
        lines += [f"- {self.hosts[one]}: {_SILENT}" for one in self.silent]
        lines += [
            f"- {self._name(one)} does not reach {self._name(two)}: {why}"
            for (one, two), why in sorted(self.failures.items())
        ]
        if len(lines) > _MAX_PAIRS:
            lines[_MAX_PAIRS:] = [f"- and {len(lines) - _MAX_PAIRS} more"]
        text = "\n".join(
            [
                f"{self.whole_nodes} of {len(self.hosts)} nodes reach all others; look at {names}",
                *lines,
                "what to do: compare NCCL_SOCKET_IFNAME with the nodes' interfaces (`ip -br addr`), and look for a "
                "firewall, a switch port that is down, and different MTUs between the named hosts",
            ]
        )
        raise HardwareFault(text) if self.failures else EnvironmentBroken(text)

    def _name(self, node: int) -> str:
        where = self.addresses.get(node)
        return f"{self.hosts[node]} ({where})" if where else self.hosts[node]


def call(address: str, port: int, token: str, *, payload: bytes, deadline_seconds: float) -> float:
    """Connect to a node's responder, and exchange a few bytes and then the payload; return the seconds until the few
    bytes are back.

    The payload fills many packets: with different MTUs, few bytes pass and many do not.

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


CALL: Callable[..., float] = call
"""The exchange between two hosts. Tests replace it by a failing one."""


def longest_seconds(count: int, deadline_seconds: float) -> float:
    """Return how long :func:`connect_all` can take with ``count`` nodes."""
    return 2 * (deadline_seconds * (2 + 2 * count / _CONCURRENT) + _MARGIN_SECONDS)


def connect_all(
    board: Board,
    nodes: Nodes,
    choose: Callable[[], Chosen],
    *,
    payload_bytes: int,
    deadline_seconds: float,
    exchange: Callable[..., float] | None = None,
) -> Reachability:
    """Connect every node to every node, itself included; return the results on all of them.

    Collective: exactly the ranks that represent a node must call this.

    Args:
        board: for the exchange of addresses and results.
        nodes: of the run.
        choose: returns this node's address.
        payload_bytes: exchanged over each connection.
        deadline_seconds: of each receive.
        exchange: between two hosts; by default ``CALL`` of this module.

    Raises: StoreError if the store has stopped answering.
    """
    exchange = exchange or CALL
    within = longest_seconds(len(nodes.hosts), deadline_seconds) / 2
    with ExitStack() as stack:
        mine: dict[str, Any]
        try:
            chosen = choose()
            responder = stack.enter_context(Responder(chosen.address, deadline_seconds=deadline_seconds))
        except (EnvironmentBroken, OSError) as error:  # sent to all: they must not wait for this node's address
            mine = {"error": str(error)}
        else:
            mine = {
                "address": chosen.address,
                "port": responder.port,
                "token": responder.token,
                "where": f"{chosen.address} on {chosen.interface}, {chosen.why}",
            }
        answers = nodes.gather(board, "address", mine, within_seconds=within)
        present = {node: one for node, one in answers.items() if "error" not in one}
        # A node without an address makes no connections. Each one begins with the node after it: if all began with the
        # first one, that would have to answer all of them at once.
        called = {} if "error" in mine else _call_order(nodes.me, present)
        payload = bytes(index * 7 % 251 for index in range(payload_bytes))

        def attempt(one: Mapping[str, Any]) -> float | str:
            try:
                return exchange(
                    one["address"], one["port"], one["token"], payload=payload, deadline_seconds=deadline_seconds
                )
            except OSError as error:  # sent to all nodes
                return str(error) or type(error).__name__

        with ThreadPoolExecutor(max_workers=_CONCURRENT) as pool:
            results = dict(zip(called, pool.map(attempt, called.values()), strict=True))
        # A node that has sent its results makes no more connections: when all have, the responder may end.
        reports = nodes.gather(board, "reached", _report(nodes, results), within_seconds=within)
    absent = {node: one["error"] for node, one in answers.items() if "error" in one}
    return _combine(nodes, reports, absent, {node: one["where"] for node, one in present.items()})


def _call_order(me: int, present: Mapping[int, Any]) -> dict[int, Any]:
    """Return the nodes in the order of a node's calls: those after it, then those before it, then itself."""
    return {node: present[node] for node in sorted(present, key=lambda node: (node <= me, node))}


def _report(nodes: Nodes, results: Mapping[int, float | str]) -> dict[str, Any]:
    """Return a node's results in a short form, which every other node reads."""
    failed: dict[str, list[int]] = {}
    for node, result in results.items():
        if isinstance(result, str):
            failed.setdefault(result, []).append(node)
    worked = [result for result in results.values() if not isinstance(result, str)]
    left_out = [node for node in nodes.hosts if node not in results]
    return {"slowest": max(worked, default=None), "failed": failed, "left_out": left_out}


def _combine(
    nodes: Nodes, reports: Mapping[int, Mapping[str, Any]], absent: Mapping[int, str], addresses: Mapping[int, str]
) -> Reachability:
    """Combine the results of all nodes."""
    known = {node: report for node, report in reports.items() if node not in absent}
    silent = tuple(node for node in nodes.hosts if node not in known and node not in absent)
    untried = {(one, two) for one in silent for two in nodes.hosts}
    untried |= {(one, two) for one, report in known.items() for two in report["left_out"]}
    return Reachability(
        hosts=nodes.hosts,
        addresses=addresses,
        slowest={node: report["slowest"] for node, report in known.items() if report["slowest"] is not None},
        failures={
            (one, two): why
            for one, report in known.items()
            for why, others in report["failed"].items()
            for two in others
        },
        untried=frozenset((one, two) for one, two in untried if two not in absent),
        absent=absent,
        silent=silent,
    )
