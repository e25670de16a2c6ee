"""How far apart the clocks of the nodes are. Pure, but for :func:`compare` and :func:`skew_of_nodes`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pytest_gpucluster.errors import EnvironmentBroken
from pytest_gpucluster.metrics.sampling import Series
from pytest_gpucluster.node.interfaces import Board, Chosen, Nodes
from pytest_gpucluster.node.network import Caller, Responder

NOW: Callable[[], float] = time.time
"""This host's clock, in seconds since the epoch. Tests replace it by a wrong one."""
_MARGIN_SECONDS = 30.0


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


def compare(
    address: str,
    port: int,
    token: str,
    *,
    samples: int,
    deadline_seconds: float,
    now: Callable[[], float],
) -> Offset:
    """Query another host's responder for its time, several times, and return how far the own clock is behind.

    Raises: OSError if it does not answer.
    """
    exchanges = []
    with Caller(address, port, token, deadline_seconds=deadline_seconds) as caller:
        for _ in range(samples):
            sent = now()
            arrived, answered = caller.clock()
            exchanges.append((sent, arrived, answered, now()))
    return offset(exchanges)


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
    if nodes.me == first:
        try:
            address = choose().address
        except EnvironmentBroken as error:
            board.post("clock", {"error": str(error)})
            raise
        with Responder(address, deadline_seconds=deadline_seconds, now=lambda: NOW()) as responder:
            board.post("clock", {"address": address, "port": responder.port, "token": responder.token})
            answers = nodes.gather(board, "offset", [0.0, 0.0], within_seconds=2 * within)
    else:
        server = board.read("clock", [nodes.representatives[first]], within_seconds=within)
        mine = _query(nodes.hosts[first], server.get(nodes.representatives[first], {}), samples, deadline_seconds)
        # Sent to all, also where it failed: an unknown clock must not count as right.
        answers = nodes.gather(board, "offset", mine, within_seconds=2 * within)
    unknown = {node: answers.get(node, "no answer in time") for node in nodes.hosts}
    lines = [f"- {nodes.hosts[node]}: {why}" for node, why in unknown.items() if isinstance(why, str)]
    if lines:
        raise EnvironmentBroken("\n".join(["the clocks of these nodes are unknown:", *lines]))
    offsets = {node: Offset(seconds=one[0], error=one[1]) for node, one in answers.items()}
    print("\n".join(f"{nodes.hosts[n]}: {one.seconds:+.6f} s +- {one.error:.6f} s" for n, one in offsets.items()))
    value, doubt = skew(offsets, nodes.me)
    return Series(samples=(value,), median=value, low=max(0.0, value - doubt), high=value + doubt)


def _query(host: str, server: Mapping[str, Any], samples: int, deadline_seconds: float) -> list[float] | str:
    """Return offset and error of the own clock, or why they are unknown."""
    if "token" not in server:
        return f"cannot query the time of {host}: {server.get('error', 'no answer in time')}"
    try:
        found = compare(**server, samples=samples, deadline_seconds=deadline_seconds, now=lambda: NOW())
    except OSError as error:
        return f"cannot query the time of {host}: {error or type(error).__name__}"
    return [found.seconds, found.error]
