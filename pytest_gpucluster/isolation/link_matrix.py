"""The matrix of links, and which GPU, node, rail or single link explains the bad ones.

A link is judged, in each direction, by comparison with the other links. Many bad links mostly have one cause: a GPU
that is slow by itself is slow with every partner, and its partners are not at fault. The rule, among units that have
all been paired with each other: a unit that is bad in more than half of its links, and in at least two, is the culprit
for all of these; then the others are evaluated without it. What remains are single links.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pytest_gpucluster.isolation.round_robin import Pair, Places, pair
from pytest_gpucluster.metrics import stats


@dataclass(frozen=True, kw_only=True)
class Reading:
    """One direction of one link, as the receiving rank saw it.

    Attributes:
        sender, receiver: ranks.
        bytes_per_second: payload over time; the median of some windows.
        low, high: the slowest and the fastest of these windows.
        payload_bytes: what was sent at a time.
        defect: how many words of 32 bits were wrong; of the first of them the offset in bytes, and what was found and
            expected there.
    """

    sender: int
    receiver: int
    bytes_per_second: float
    low: float
    high: float
    payload_bytes: int
    defect: tuple[int, int, int, int] = (0, 0, 0, 0)

    @property
    def wrong(self) -> str:
        """What was wrong with the data that arrived; empty if they were as sent."""
        count, offset, found, expected = self.defect
        if not count:
            return ""
        return (
            f"{count} of {self.payload_bytes // 4} words from rank {self.sender} to rank {self.receiver} are wrong, "
            f"the first at byte {offset}: found {found:#010x}, expected {expected:#010x}"
        )

    @property
    def pair(self) -> Pair:
        """The two ranks, the lower one first."""
        return pair(self.sender, self.receiver)


class Matrix:
    """All readings of one scope: of all nodes' inner links, or of all links between nodes.

    Args:
        readings: at most one for each sender and receiver.
        unit_of: what a rank belongs to that can be slow as a whole, such as its node; by default itself.

    Attributes:
        readings: by sender and receiver.
        pairs: every pair with its readings, usually one in each direction.
        touching: every rank with the readings in which it sends or receives.
    """

    def __init__(self, readings: Iterable[Reading], unit_of: Callable[[int], int] = lambda rank: rank) -> None:
        ordered = sorted(readings, key=lambda reading: (reading.sender, reading.receiver))
        self.readings: Mapping[tuple[int, int], Reading] = {(one.sender, one.receiver): one for one in ordered}
        self.pairs: dict[Pair, list[Reading]] = {}
        self.touching: dict[int, list[Reading]] = {}
        for reading in self.readings.values():
            self.pairs.setdefault(reading.pair, []).append(reading)
            for rank in reading.pair:
                self.touching.setdefault(rank, []).append(reading)
        by_rate = sorted(self.readings.values(), key=lambda reading: reading.bytes_per_second)
        self._rates = [reading.bytes_per_second for reading in by_rate]
        places_of_unit: dict[int, list[int]] = {}
        self._places_of_pair: dict[Pair, list[int]] = {}
        for place, reading in enumerate(by_rate):
            self._places_of_pair.setdefault(reading.pair, []).append(place)
            for unit in {unit_of(rank) for rank in reading.pair}:
                places_of_unit.setdefault(unit, []).append(place)
        without = (_median_without(self._rates, places) for places in places_of_unit.values())
        self._best_median = max((median for median in without if median is not None), default=None)

    @property
    def median(self) -> float:
        """The median of all readings, in bytes a second.

        Raises:
            ValueError: there are none.
        """
        return stats.median(self._rates)

    def yardstick(self, of: Pair) -> float | None:
        """Return what a pair stands beside, in bytes a second: the median without whoever lowers it most.

        It is the largest of the medians that are left when one unit takes no part. One that is slow as a whole would
        else be its own yardstick: with three GPUs it is in two thirds of all readings. Of many units none changes much.
        Where nothing is left without a unit, as with two nodes, it is the median of all other pairs; None where there
        is no other pair.
        """
        if self._best_median is not None:
            return self._best_median
        return _median_without(self._rates, self._places_of_pair[of])

    def ratio(self, reading: Reading) -> float | None:
        """Return a reading over its pair's yardstick; None where there is none."""
        others = self.yardstick(reading.pair)
        if others is None:
            return None
        return math.inf if others == 0 else reading.bytes_per_second / others

    def worst(self, of: Pair) -> Reading:
        """Return the slower direction of a pair."""
        return min(self.pairs[of], key=lambda reading: reading.bytes_per_second)

    def slow(self, below: float) -> list[Pair]:
        """Return the pairs of which a direction has a smaller ratio, the slowest first."""
        found = {}
        for link in self.pairs:
            ratio = self.ratio(self.worst(link))
            if ratio is not None and ratio < below:
                found[link] = self.worst(link).bytes_per_second
        return sorted(found, key=lambda link: (found[link], link))

    def wrong(self) -> list[Pair]:
        """Return the pairs in which data arrived that were not as sent."""
        return [link for link, readings in self.pairs.items() if any(reading.wrong for reading in readings)]

    def of_rank(self, rank: int, *, without: Iterable[Pair] = ()) -> Reading:
        """Return a rank's slowest reading, as sender or receiver.

        Args:
            rank: whose.
            without: pairs that another rank is to blame for; they count where the rank has no others.

        Raises:
            KeyError: the rank has no reading.
        """
        left_out = set(without)
        mine = self.touching[rank]
        counted = [reading for reading in mine if reading.pair not in left_out]
        return min(counted or mine, key=lambda reading: reading.bytes_per_second)


def _median_without(ordered: Sequence[float], gone: Sequence[int]) -> float | None:
    """Return the median of sorted values without those at some places, which are sorted, too; None of nothing."""
    count = len(ordered) - len(gone)
    if not count:
        return None
    # So many values are left before each of those that are gone.
    before = [place - index for index, place in enumerate(gone)]

    def at(index: int) -> float:
        return ordered[index + bisect.bisect_right(before, index)]

    low, high = at((count - 1) // 2), at(count // 2)
    return low + (high - low) / 2


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
