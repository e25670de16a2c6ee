"""Which ranks are paired in which round, so that every link is measured for itself and no rank is in two pairs at once.

within a node    every GPU with every other one: GPUs - 1 rounds, on all nodes at the same time
across nodes     every node with every other one, all rails of two nodes at once: nodes - 1 rounds. So 1,024 GPUs
                 on 128 nodes take 127 rounds, as 128 GPUs on as many nodes do
once more        pairs that are far behind, without what could have shared their way: one pair of a node at a time,
                 or one rail of each pair of nodes at a time
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pytest_gpucluster.links import tournament
from pytest_gpucluster.links.places import Places

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
        tuple(sorted(pair(ranks[one], ranks[other]) for one, other in round_))
        for round_ in tournament.rounds(places.rails)
    )


def across_nodes(places: Places) -> tuple[Round, ...]:
    """Return the rounds of all nodes, all rails at once.

    Raises:
        ValueError: there is one node only.
    """
    return tuple(
        tuple(sorted(link for one, other in round_ for link in _rails(places, one, other)))
        for round_ in tournament.rounds(places.nodes)
    )


def one_at_a_time(suspects: Iterable[Pair], *, most: int) -> tuple[Round, ...]:
    """Return at most so many rounds, each of them with one pair, in the order in which they are given."""
    return tuple((suspect,) for suspect in suspects)[:most]


def rail_by_rail(places: Places, suspects: Sequence[Pair], *, most: int) -> tuple[Round, ...]:
    """Return at most so many rounds, in which the nodes of the suspects meet again, one rail after the other.

    Pairs of nodes that have no node in common do so at the same time. All their rails are repeated, the good ones too:
    so it shows whether a rail is slow by itself or because of its neighbours. The first suspects come first; a node
    takes part ``most`` over the number of rails times, and what does not fit is not repeated.
    """
    where = places.where()
    nodes = dict.fromkeys(pair(where[one][0], where[other][0]) for one, other in suspects)
    meetings: list[list[Pair]] = [[] for _ in range(most // places.rails)]
    for one, other in nodes:
        free = (met for met in meetings if not any({one, other} & set(taken) for taken in met))
        found = next(free, None)
        if found is not None:
            found.append((one, other))
    return tuple(
        tuple(sorted(_rails(places, one, other)[rail] for one, other in met))
        for met in meetings
        if met
        for rail in range(places.rails)
    )


def predicted_seconds(rounds: Sequence[Round], round_seconds: float) -> float:
    """Return about how long so many rounds take: what each is planned to take, the making of connections aside."""
    return len(rounds) * round_seconds


def _rails(places: Places, one: int, other: int) -> list[Pair]:
    return [pair(first, second) for first, second in zip(places.ranks[one], places.ranks[other], strict=True)]
