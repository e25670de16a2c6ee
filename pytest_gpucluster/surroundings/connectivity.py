"""Does every node reach every other one, on the interface that will carry NCCL's or gloo's own connections?

Plain sockets with deadlines, before any process group is made: where a firewall or a wrong interface lies between two
nodes, a process group would only hang.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from pytest_gpucluster.errors import EnvironmentBroken, HardwareFault
from pytest_gpucluster.surroundings.interfaces import Chosen
from pytest_gpucluster.surroundings.nodes import Board, Nodes
from pytest_gpucluster.surroundings.responder import Caller, Responder

_AT_ONCE = 16
"""Connections that a node makes at the same time: 127 others are through in a few rounds."""
_BESIDE_SECONDS = 30.0
"""What nodes may be apart when they begin and end."""
_PAIRS_TOLD = 20


@dataclass(frozen=True, kw_only=True)
class Reached:
    """Who reaches whom.

    Attributes:
        hosts: node -> its name.
        addresses: node -> its address and interface, as far as it has one.
        seconds: (from, to) -> how long connecting and one exchange took, where it worked.
        failures: (from, to) -> why it did not work.
        absent: node -> why nothing is known of it.
    """

    hosts: Mapping[int, str]
    addresses: Mapping[int, str] = field(default_factory=dict)
    seconds: Mapping[tuple[int, int], float] = field(default_factory=dict)
    failures: Mapping[tuple[int, int], str] = field(default_factory=dict)
    absent: Mapping[int, str] = field(default_factory=dict)

    @property
    def reached_ratio(self) -> float:
        """Part of the pairs that reach each other: each node with every node, itself included, in both directions.
        Nodes that have no address or are silent are no part of any pair."""
        present = len(self.hosts) - len(self.absent)
        return len(self.seconds) / present**2 if present else 0.0

    @property
    def whole_nodes(self) -> int:
        """How many nodes reach all nodes and are reached by all."""
        nodes = list(self.hosts)
        return sum(all((one, two) in self.seconds and (two, one) in self.seconds for two in nodes) for one in nodes)

    def slowest_from(self, node: int) -> float | None:
        """Return the longest time that a connection from this node took; None where none worked."""
        return max((seconds for (one, _), seconds in self.seconds.items() if one == node), default=None)

    def blamed(self) -> tuple[int, ...]:
        """Return the nodes that the failures point to.

        A node that is part of failures with more than half of the others explains them by itself; of a pair that no
        such node explains both ends are named.
        """
        left = set(self.failures)
        blamed = set(self.absent)
        left = {pair for pair in left if not blamed & set(pair)}
        while left:
            partners = {node: {one for pair in left if node in pair for one in pair} - {node} for node in self.hosts}
            worst = max(partners, key=lambda node: (len(partners[node]), -node))
            own = {node for node, other in left if node == other}
            if own:
                found = own
            elif len(partners[worst]) > 1 and 2 * len(partners[worst]) > len(self.hosts) - 1:
                found = {worst}
            else:
                found = {node for pair in left for node in pair}
            blamed |= found
            left = {pair for pair in left if not found & set(pair)}
        return tuple(sorted(blamed))

    def require_whole(self, node: int) -> None:
        """Make sure that all nodes reach each other; it is told on the nodes to which the failures point.

        Raises, on a node that is blamed:
            HardwareFault: each pair that does not, both ends named.
            EnvironmentBroken: all that could be tried works, but a node has no usable interface, or is silent.
        """
        if node not in self.blamed():
            return
        names = ", ".join(self.hosts[one] for one in self.blamed())
        told = [f"- {self.hosts[one]}: {why}" for one, why in sorted(self.absent.items())]
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
        # A node without an address of its own calls nobody: what it could reach says nothing.
        called = {} if "error" in mine else there
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
        reports = nodes.gather(board, "reached", results, within_seconds=within)
    absent = {node: one["error"] for node, one in told.items() if "error" in one}
    return _agreed(nodes, reports, absent, {node: one["where"] for node, one in there.items()})


def _agreed(
    nodes: Nodes, reports: Mapping[int, Mapping[str, Any]], absent: Mapping[int, str], addresses: Mapping[int, str]
) -> Reached:
    """Put together what every node has reached. JSON has made texts of the numbers of nodes."""
    silent = {
        node: "it gave no word in time, though its rank is there: is it busy, or stopped?"
        for node in nodes.hosts
        if node not in reports and node not in absent
    }
    results = {(one, int(two)): result for one, found in reports.items() for two, result in found.items()}
    return Reached(
        hosts=nodes.hosts,
        addresses=addresses,
        seconds={pair: result for pair, result in results.items() if not isinstance(result, str)},
        failures={pair: result for pair, result in results.items() if isinstance(result, str)},
        absent={**absent, **silent},
    )
