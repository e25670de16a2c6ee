"""Which pairs of ranks meet in which round, within nodes and along rails. Pure.

Every link is measured alone, and no rank is in two pairs at a time. A rail is the local rank: GPUs with the same number
on different nodes reach each other through NICs with the same number, and in many fabrics through the same leaf switch.

>>> rounds(4)
(((0, 3), (1, 2)), ((0, 1), (2, 3)), ((0, 2), (1, 3)))
>>> rounds(3)
(((1, 2),), ((0, 1),), ((0, 2),))

within a node    every GPU with every other one: GPUs - 1 rounds, on all nodes at the same time
across nodes     every node with every other one, all rails of two nodes at once: nodes - 1 rounds. So 1,024 GPUs
                 on 128 nodes take 127 rounds, the same as 128 GPUs on 128 nodes
remeasured       pairs that are far below the others, without the traffic that could have shared their path: one pair
                 of a node at a time, or one rail of each pair of nodes at a time
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pytest_gpucluster.errors import EnvironmentBroken


@dataclass(frozen=True, kw_only=True)
class Places:
    """Node and rail of every rank.

    Attributes:
        ranks: the rank at each rail of each node: ``ranks[node][rail]``. Nodes count from 0 in the order of their rank.
        hosts: name of each node.
        names: of each rank, in reports.
    """

    ranks: tuple[tuple[int, ...], ...]
    hosts: tuple[str, ...]
    names: tuple[str, ...]

    @classmethod
    def of(cls, inventory: Sequence[Mapping[str, Any]]) -> Places:
        """Read them from the inventory, the facts of every rank: rank, host, node_rank, local_rank, gpu.

        Raises:
            EnvironmentBroken: the nodes have different numbers of ranks, or their local ranks do not count from 0.
        """
        found: dict[int, dict[int, int]] = {}
        hosts: dict[int, str] = {}
        for entry in inventory:
            hosts.setdefault(entry["node_rank"], str(entry["host"]))
            found.setdefault(entry["node_rank"], {})[entry["local_rank"]] = entry["rank"]
        nodes = sorted(found)
        if len({len(found[node]) for node in nodes}) > 1:
            counts = ", ".join(f"{hosts[node]} has {len(found[node])}" for node in nodes)
            raise EnvironmentBroken(
                f"the nodes have different numbers of ranks ({counts}), so not every GPU has a partner on each "
                "other node. Start the same number of ranks on every node (--nproc-per-node), or run the suite "
                "on nodes of one kind"
            )
        for node in nodes:
            if sorted(found[node]) != list(range(len(found[node]))):
                raise EnvironmentBroken(
                    f"{hosts[node]}: the local ranks are {sorted(found[node])}, but they must count from 0 to "
                    f"{len(found[node]) - 1}: look at LOCAL_RANK, or at the launcher's own variable for it"
                )
        return cls(
            ranks=tuple(tuple(found[node][rail] for rail in sorted(found[node])) for node in nodes),
            hosts=tuple(hosts[node] for node in nodes),
            names=tuple(_name(entry) for entry in sorted(inventory, key=lambda entry: int(entry["rank"]))),
        )

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return len(self.ranks)

    @property
    def rails(self) -> int:
        """Number of ranks of each node."""
        return len(self.ranks[0])

    def where(self) -> dict[int, tuple[int, int]]:
        """Return node and rail of every rank."""
        return {rank: (node, rail) for node, ranks in enumerate(self.ranks) for rail, rank in enumerate(ranks)}


def _name(entry: Mapping[str, Any]) -> str:
    gpu = entry.get("gpu")
    index = f", GPU {gpu['index']}" if gpu else ""
    return f"rank {entry['rank']} ({entry['host']}{index})"


def count_of_rounds(players: int) -> int:
    """Return the number of rounds: players - 1, or players where their number is odd.

    Raises:
        ValueError: there are fewer than two.
    """
    if players < 2:
        raise ValueError(f"a tournament takes two players or more, not {players}")
    return players - 1 + players % 2


def partner(player: int, round_: int, players: int) -> int | None:
    """Return the partner of a player in a round, or None where an odd number leaves it out.

    Two players meet in the round that is the sum of their numbers, modulo an odd number m. Where their number is even,
    the last one is not among these m, and meets the one that would meet itself.

    Raises:
        ValueError: a number is out of its range.

    Source: the circle method, https://en.wikipedia.org/wiki/Round-robin_tournament#Circle_method, as modular sums.
    """
    modulus = count_of_rounds(players)
    if not (0 <= player < players and 0 <= round_ < modulus):
        raise ValueError(f"player {player} of {players} in round {round_} of {modulus}: out of range")
    last = players - 1 if players % 2 == 0 else None
    if player == last:
        return round_ * ((modulus + 1) // 2) % modulus
    other = (round_ - player) % modulus
    return last if other == player else other


def rounds(players: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Return the pairs of each round, the lower number first, in ascending order.

    Raises:
        ValueError: there are fewer than two players.
    """
    schedule = []
    for round_ in range(count_of_rounds(players)):
        met = ((player, partner(player, round_, players)) for player in range(players))
        schedule.append(tuple((one, other) for one, other in met if other is not None and one < other))
    return tuple(schedule)


Pair = tuple[int, int]
"""Two ranks, the lower one first."""

Round = tuple[Pair, ...]
"""Pairs that are measured at the same time; no rank is in two of them."""


def pair(one: int, other: int) -> Pair:
    """Return two ranks as a pair."""
    return (one, other) if one < other else (other, one)


def within_node(places: Places, node: int) -> tuple[Round, ...]:
    """Return the rounds of one node's GPUs.

    Raises:
        ValueError: the nodes have one rank each.
    """
    ranks = places.ranks[node]
    return tuple(
        tuple(sorted(pair(ranks[one], ranks[other]) for one, other in round_)) for round_ in rounds(places.rails)
    )


def across_nodes(places: Places) -> tuple[Round, ...]:
    """Return the rounds of all nodes, all rails at once.

    Raises:
        ValueError: there is one node only.
    """
    return tuple(
        tuple(sorted(link for one, other in round_ for link in rails_between(places, one, other)))
        for round_ in rounds(places.nodes)
    )


def rail_by_rail(places: Places, suspects: Sequence[Pair], *, max_rounds: int) -> tuple[Round, ...]:
    """Return at most ``max_rounds`` rounds, in which the nodes of the suspects meet again, one rail after the other.

    Pairs of nodes without a common node do so at the same time. All their rails are repeated, the good ones too: that
    shows whether a rail is slow by itself or because of its neighbours. The first suspects come first; a node takes
    part ``max_rounds`` over the number of rails times, and what does not fit is not repeated.
    """
    where = places.where()
    nodes = dict.fromkeys(pair(where[one][0], where[other][0]) for one, other in suspects)
    meetings: list[list[Pair]] = [[] for _ in range(max_rounds // places.rails)]
    for one, other in nodes:
        free = (met for met in meetings if not any({one, other} & set(taken) for taken in met))
        found = next(free, None)
        if found is not None:
            found.append((one, other))
    return tuple(
        tuple(sorted(rails_between(places, one, other)[rail] for one, other in met))
        for met in meetings
        if met
        for rail in range(places.rails)
    )


def rails_between(places: Places, one: int, other: int) -> list[Pair]:
    """Return the pairs of ranks on the same rail of two nodes."""
    return [pair(first, second) for first, second in zip(places.ranks[one], places.ranks[other], strict=True)]
