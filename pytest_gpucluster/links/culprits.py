"""What explains the links that are slow or wrong: a GPU, a node, a rail, or one link.

Many bad links mostly have one cause. A GPU that is slow by itself is slow with everybody, and its partners are not to
blame. The rule, among those who all meet each other: whoever is bad in more than half of its links, and in two of them
at least, is to blame for all of these; then the others are looked at without it. What remains are single links.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from pytest_gpucluster.links.places import Places
from pytest_gpucluster.links.plan import Pair, pair

Kind = Literal["gpu", "port", "link", "node link", "node", "rail", "fabric"]
"""``gpu``: with the others of its node. ``port``: a GPU with those of its rail on other nodes, so its NIC may be it.
``link``: two ranks. ``node link``: two nodes, most rails. ``node``: all GPUs of it. ``rail``: the same rail of most
nodes. ``fabric``: most of all."""

Scope = Literal["node", "world"]


@dataclass(frozen=True, kw_only=True)
class Culprit:
    """What explains some bad links.

    Attributes:
        kind: see :data:`Kind`.
        ranks: who it is, ascending. Of a link its two ends: it cannot be told which of them it is.
        pairs: the bad links that it explains.
        links: how many of its links were measured.
    """

    kind: Kind
    ranks: tuple[int, ...]
    pairs: tuple[Pair, ...]
    links: int


@dataclass(frozen=True, kw_only=True)
class _Blamed:
    """Of those who all meet each other: everybody, or some of them and some pairs."""

    everybody: bool
    some: tuple[int, ...]
    links: tuple[Pair, ...]


def culprits(bad: Iterable[Pair], measured: Iterable[Pair], places: Places, scope: Scope) -> tuple[Culprit, ...]:
    """Explain the bad ones among the measured pairs of ranks.

    Args:
        bad: slow or wrong.
        measured: all of them, the bad ones included.
        places: where the ranks are.
        scope: whether the pairs are those within nodes, or those across nodes on the same rail.
    """
    wrong, there = frozenset(bad), frozenset(measured)
    return tuple(_within(wrong, there, places) if scope == "node" else _across(wrong, there, places))


def explained_by_others(found: Iterable[Culprit], rank: int) -> set[Pair]:
    """Return the pairs that only other ranks are to blame for."""
    theirs = {link for one in found if rank not in one.ranks for link in one.pairs}
    return theirs - {link for one in found if rank in one.ranks for link in one.pairs}


def _within(bad: frozenset[Pair], there: frozenset[Pair], places: Places) -> list[Culprit]:
    found = []
    for ranks in places.ranks:
        blamed = _blame(ranks, bad, there)
        if blamed.everybody:
            found.append(_made("node", ranks, bad, there, inside=ranks))
            continue
        found += [_made("gpu", [rank], bad, there, inside=ranks) for rank in blamed.some]
        found += [_made("link", link, bad, there, only=[link]) for link in blamed.links]
    return found


def _across(bad: frozenset[Pair], there: frozenset[Pair], places: Places) -> list[Culprit]:
    rails = {
        pair(one, other): [pair(a, b) for a, b in zip(places.ranks[one], places.ranks[other], strict=True)]
        for one in range(places.nodes)
        for other in range(one)
    }
    met = {nodes: [link for link in links if link in there] for nodes, links in rails.items()}
    # Two nodes have a bad connection where most of their rails are bad.
    mostly = {nodes for nodes, links in met.items() if 2 * sum(link in bad for link in links) > len(links)}
    blamed = _blame(range(places.nodes), mostly, {nodes for nodes, links in met.items() if links})
    if blamed.everybody:
        every = [rank for ranks in places.ranks for rank in ranks]
        return [_made("fabric", every, bad, there)]
    # With one rail a node is its only GPU.
    found = [_made("node", places.ranks[node], bad, there) for node in blamed.some]
    for nodes in blamed.links:
        links = [link for link in met[nodes] if link in bad]
        ranks = sorted(rank for link in links for rank in link)
        found.append(_made("node link" if len(met[nodes]) > 1 else "link", ranks, bad, there, only=met[nodes]))
    told = {link for one in found for link in one.pairs}
    gone = {rank for one in found if one.kind == "node" for rank in one.ranks}
    for rail in range(places.rails):
        ranks_of_rail = [ranks[rail] for ranks in places.ranks]
        players = [rank for rank in ranks_of_rail if rank not in gone]
        left, among = bad - told, there - told
        of_rail = _blame(players, left, among)
        if of_rail.everybody:
            found.append(_made("rail", players, left, among, inside=players))
            continue
        found += [_made("port", [rank], left, among, inside=ranks_of_rail) for rank in of_rail.some]
        found += [_made("link", link, left, among, only=[link]) for link in of_rail.links]
    return found


def _blame(players: Iterable[int], bad: Iterable[Pair], there: Iterable[Pair]) -> _Blamed:
    """Blame as few as explain the bad pairs among the players."""
    everyone = frozenset(players)
    wrong = {link for link in bad if everyone.issuperset(link)}
    if not wrong:
        return _Blamed(everybody=False, some=(), links=())
    links: dict[int, set[Pair]] = {player: set() for player in everyone}
    for link in there:
        if everyone.issuperset(link):
            for player in link:
                links[player].add(link)
    # Three, because two have one link only, and then it is that.
    if len(everyone) > 2 and all(wrong >= its for its in links.values()):
        return _Blamed(everybody=True, some=(), links=())
    some: list[int] = []
    while True:
        hurt = {player: len(its & wrong) for player, its in links.items()}
        guilty = [player for player, count in hurt.items() if count > 1 and 2 * count > len(links[player])]
        if not guilty:
            break
        worst = max(guilty, key=lambda player: (hurt[player] / len(links[player]), hurt[player], -player))
        some.append(worst)
        its = links.pop(worst)
        wrong -= its
        for others in links.values():
            others -= its
        if 2 * len(some) > len(everyone):
            return _Blamed(everybody=True, some=(), links=())
    return _Blamed(everybody=False, some=tuple(sorted(some)), links=tuple(sorted(wrong)))


def _made(
    kind: Kind,
    ranks: Sequence[int],
    bad: frozenset[Pair] | set[Pair],
    there: frozenset[Pair] | set[Pair],
    *,
    inside: Sequence[int] | None = None,
    only: Iterable[Pair] | None = None,
) -> Culprit:
    """Make a culprit of what touches its ranks, inside of a larger circle, or of these pairs only."""
    if only is not None:
        its = set(only) & there
    else:
        circle = None if inside is None else set(inside)
        its = {link for link in there if set(ranks) & set(link) and (circle is None or circle.issuperset(link))}
    return Culprit(kind=kind, ranks=tuple(sorted(ranks)), pairs=tuple(sorted(its & bad)), links=len(its))
