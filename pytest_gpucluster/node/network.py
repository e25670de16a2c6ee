"""Whether every node reaches every other one over TCP, on the interface that NCCL or gloo will use, and how far apart
their clocks are.

Each host runs a small TCP service (:func:`respond`), which other hosts connect to. Plain sockets with deadlines, before
any process group is made: with a firewall or a wrong interface, a process group would hang.
"""

from __future__ import annotations

import secrets
import socket
import socketserver
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from pytest_gpucluster.errors import EnvironmentBroken, HardwareFault
from pytest_gpucluster.metrics.sampling import Series
from pytest_gpucluster.metrics.stats import grouped
from pytest_gpucluster.node.interfaces import Board, Chosen, Nodes
from pytest_gpucluster.text import some_of

NOW: Callable[[], float] = time.time
"""This host's clock, in seconds since the epoch. Tests replace it by a wrong one."""
TOKEN_BYTES = 16
_HEAD = struct.Struct(f"!{TOKEN_BYTES}sI")
"""The token, and the number of bytes that follow."""
_TIMES = struct.Struct("!dd")
"""When the request arrived, and when the answer was sent; the request's bytes follow."""
MAX_BYTES = 2**26
_CHUNK_BYTES = 2**16


@contextmanager
def respond(address: str, *, deadline_seconds: float) -> Iterator[dict[str, Any]]:
    """Answer callers on a free port, in a thread, until the block ends; yield ``address``, ``port`` and ``token``.

    A caller without the token, such as a port scanner or another job, gets no answer.

    Raises: OSError if it cannot listen there.
    """
    token = secrets.token_hex(TOKEN_BYTES // 2)

    class Connection(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.settimeout(deadline_seconds)
            with suppress(OSError, EOFError):  # the caller reports it
                while True:
                    token_received, length = _HEAD.unpack(receive(self.request, _HEAD.size))
                    arrived = NOW()
                    if token_received != token.encode() or length > MAX_BYTES:
                        return
                    payload = receive(self.request, length)
                    self.request.sendall(_TIMES.pack(arrived, NOW()) + payload)

    class Server(socketserver.ThreadingTCPServer):
        address_family = socket.AF_INET6 if ":" in address else socket.AF_INET
        allow_reuse_address = True
        daemon_threads = True
        block_on_close = False
        request_queue_size = 1024

    with Server((address, 0), Connection) as server:
        serve = threading.Thread(target=server.serve_forever, args=(0.05,), name="gpucluster-responder", daemon=True)
        serve.start()
        try:
            yield {"address": address, "port": int(server.server_address[1]), "token": token}
        finally:
            server.shutdown()
            serve.join()


@contextmanager
def respond_as_chosen(choose: Callable[[], Chosen], *, deadline_seconds: float) -> Iterator[dict[str, Any]]:
    """As :func:`respond` on this node's address; also yield ``where`` that is, or nothing but the ``error``.

    It is sent to all: they must not wait for the address of a node that has none.
    """
    mine: dict[str, Any]
    with ExitStack() as stack:
        try:
            chosen = choose()
            mine = stack.enter_context(respond(chosen.address, deadline_seconds=deadline_seconds))
        except (EnvironmentBroken, OSError) as error:
            mine = {"error": str(error)}
        else:
            mine["where"] = f"{chosen.address} on {chosen.interface}, {chosen.why}"
        yield mine


class Caller:
    """A connection to a node's service. Use it as a context manager.

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

    def echo(self, payload: bytes = b"") -> tuple[float, float]:
        """Send bytes, and return the other host's time when they had arrived, and when its answer was sent.

        Raises: OSError unless the same bytes come back.
        """
        self._socket.sendall(_HEAD.pack(self._token, len(payload)) + payload)
        try:
            answer = receive(self._socket, _TIMES.size + len(payload))
        except EOFError:
            raise ConnectionError("it accepts connections and then closes them: is it another program?") from None
        if answer[_TIMES.size :] != payload:
            raise ConnectionError(f"{len(payload)} bytes came back altered")
        arrived, sent = _TIMES.unpack(answer[: _TIMES.size])
        return float(arrived), float(sent)


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
        names = some_of([self.hosts[one] for one in suspects], _MAX_NODES)
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

    ``exchange`` is what two hosts exchange, by default :func:`call`.

    Raises: StoreError if the store has stopped answering.
    """
    exchange = exchange or call
    within = longest_seconds(len(nodes.hosts), deadline_seconds) / 2
    payload = (bytes(index * 7 % 251 for index in range(251)) * (1 + payload_bytes // 251))[:payload_bytes]

    def attempt(one: Mapping[str, Any]) -> float | str:
        try:
            return exchange(
                one["address"], one["port"], one["token"], payload=payload, deadline_seconds=deadline_seconds
            )
        except OSError as error:  # sent to all nodes
            return str(error) or type(error).__name__

    with respond_as_chosen(choose, deadline_seconds=deadline_seconds) as mine:
        answers = nodes.gather(board, "address", mine, within_seconds=within)
        present = {node: one for node, one in answers.items() if "error" not in one}
        # A node without an address makes no connections. Each one begins with the node after it: if all began with the
        # first one, that would have to answer all of them at once.
        order = sorted(present, key=lambda node: (node <= nodes.me, node)) if "error" not in mine else []
        with ThreadPoolExecutor(max_workers=_CONCURRENT) as pool:
            results = dict(zip(order, pool.map(attempt, [present[node] for node in order]), strict=True))
        # A node that has sent its results makes no more connections: when all have, the service may end.
        reports = nodes.gather(board, "reached", _report(nodes, results), within_seconds=within)
    absent = {node: one["error"] for node, one in answers.items() if "error" in one}
    return _combine(nodes, reports, absent, {node: one["where"] for node, one in present.items()})


def _report(nodes: Nodes, results: Mapping[int, float | str]) -> dict[str, Any]:
    """Return a node's results in a short form, which every other node reads."""
    failed = grouped((result, node) for node, result in results.items() if isinstance(result, str))
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


@dataclass(frozen=True, kw_only=True)
class Offset:
    """How far a clock is behind another one (negative: ahead), in seconds, and the error of that."""

    seconds: float
    error: float


def offset(samples: list[tuple[float, float, float, float]]) -> Offset:
    """Estimate an offset from samples of (sent, arrived, answered, received).

    The first and the last are times of the own clock, the two between of the other one. The sample with the shortest
    round trip counts. Its two directions may take different times: the error is half of the round trip.

    Source: RFC 5905 (NTPv4), section 8: theta = ((T2 - T1) + (T3 - T4)) / 2, delta = (T4 - T1) - (T3 - T2).

    >>> offset([(10.0, 15.001, 15.002, 10.003)])
    Offset(seconds=5.0, error=0.001)

    Raises: ValueError without a sample.
    """
    if not samples:
        raise ValueError("no sample of the other clock")
    sent, arrived, answered, received = min(samples, key=lambda one: (one[3] - one[0]) - (one[2] - one[1]))
    # A clock that is set during the exchange can make the round trip seem negative.
    round_trip = max(0.0, (received - sent) - (answered - arrived))
    seconds = round(((arrived - sent) + (answered - received)) / 2, 9)
    return Offset(seconds=seconds, error=round(round_trip / 2, 9))


def skew(of: Mapping[int, Offset], node: int) -> tuple[float, float]:
    """Return by how much a node's clock differs from the median of the other nodes' clocks, and the error of that.

    With an even number of others, the nearer one of the two middle clocks counts: else one wrong clock among three
    nodes would move the median of the two right ones.

    Raises: ValueError if there is no other node.
    """
    mine = of[node]
    others = sorted((one for other, one in of.items() if other != node), key=lambda one: one.seconds)
    if not others:
        raise ValueError("there is no other clock to compare with")
    middle = others[(len(others) - 1) // 2 : len(others) // 2 + 1]
    nearest = min(middle, key=lambda one: abs(one.seconds - mine.seconds))
    return abs(mine.seconds - nearest.seconds), mine.error + nearest.error


def skew_of_nodes(
    board: Board,
    nodes: Nodes,
    choose: Callable[[], Chosen],
    *,
    samples: int,
    deadline_seconds: float,
) -> Series:
    """Return by how many seconds this node's clock differs from the others', with its confidence interval.

    Every node queries the first one. Collective: exactly the ranks that represent a node must call this.

    Raises: EnvironmentBroken on all nodes: the first one cannot be queried, or a node's clock is unknown.
    """
    first, within = min(nodes.hosts), 2 * deadline_seconds + _MARGIN_SECONDS
    rank = nodes.representatives[first]
    mine: list[float] | str
    if nodes.me == first:
        with respond_as_chosen(choose, deadline_seconds=deadline_seconds) as server:
            board.post("clock", server)
            mine = server.get("error", [0.0, 0.0])
            answers = nodes.gather(board, "offset", mine, within_seconds=2 * within)
    else:
        server = board.read("clock", [rank], within_seconds=within).get(rank, {"error": "no answer in time"})
        # Sent to all, also where it failed: an unknown clock must not count as right.
        mine = _offset_to(nodes.hosts[first], server, samples, deadline_seconds)
        answers = nodes.gather(board, "offset", mine, within_seconds=2 * within)
    unknown = {node: answers.get(node, "no answer in time") for node in nodes.hosts}
    lines = [f"- {nodes.hosts[node]}: {why}" for node, why in unknown.items() if isinstance(why, str)]
    if lines:
        raise EnvironmentBroken("\n".join(["the clocks of these nodes are unknown:", *lines]))
    offsets = {node: Offset(seconds=one[0], error=one[1]) for node, one in answers.items()}
    print("\n".join(f"{nodes.hosts[n]}: {one.seconds:+.6f} s +- {one.error:.6f} s" for n, one in offsets.items()))
    value, doubt = skew(offsets, nodes.me)
    return Series(samples=(value,), median=value, low=max(0.0, value - doubt), high=value + doubt)


def _offset_to(host: str, server: Mapping[str, Any], samples: int, deadline_seconds: float) -> list[float] | str:
    """Return offset and error of the own clock, or why they are unknown."""
    exchanges = []
    try:
        if "error" in server:
            raise ConnectionError(server["error"])
        with Caller(server["address"], server["port"], server["token"], deadline_seconds=deadline_seconds) as caller:
            for _ in range(samples):
                sent = NOW()
                arrived, answered = caller.echo()
                exchanges.append((sent, arrived, answered, NOW()))
    except OSError as error:
        return f"cannot query the time of {host}: {error or type(error).__name__}"
    found = offset(exchanges)
    return [found.seconds, found.error]
