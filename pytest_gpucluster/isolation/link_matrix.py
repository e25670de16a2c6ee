"""The matrix of links, and which GPU, node, rail or single link explains the bad ones.

A link is judged, in each direction, by comparison with the other links. Many bad links mostly have one cause: a GPU
that is slow by itself is slow with every partner, and its partners are not at fault. The rule, among units that have
all been paired with each other: a unit that is bad in more than half of its links, and in at least two, is the culprit
for all of these; then the others are evaluated without it. The bad links that remain are culprits by themselves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pytest_gpucluster.isolation.round_robin import Pair, Places, pair, rails_between
from pytest_gpucluster.metrics import stats


@dataclass(frozen=True, kw_only=True)
class Reading:
    """One direction of one link, as measured by the receiving rank.

    Attributes:
        sender, receiver: ranks.
        bytes_per_second: payload over time; the median of some windows.
        low, high: the slowest and the fastest of these windows.
        payload_bytes: of one transfer.
        defect: number of wrong 64-bit words; of the first of them the offset in bytes, the found and the expected word.
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
        """The difference between received and sent data; empty if there is none."""
        count, offset, found, expected = self.defect
        if not count:
            return ""
        return (
            f"{count} of {self.payload_bytes // 8} words from rank {self.sender} to rank {self.receiver} are wrong, "
            f"the first at byte {offset}: found {found:#018x}, expected {expected:#018x}"
        )

    @property
    def pair(self) -> Pair:
        """The two ranks, the lower one first."""
        return pair(self.sender, self.receiver)


class Matrix:
    """All readings of one scope: of all nodes' inner links, or of all links between nodes.

    Args:
        readings: at most one for each sender and receiver.
        unit_of: rank -> the unit that can be slow as a whole, such as its node; by default the rank.

    Attributes:
        readings: by sender and receiver.
        pairs: every pair with its readings, usually one in each direction.
        touching: every rank with the readings in which it sends or receives.
    """

    def __init__(self, readings: Iterable[Reading], unit_of: Callable[[int], int] = lambda rank: rank) -> None:
        ordered = sorted(readings, key=lambda reading: (reading.sender, reading.receiver))
        self.readings: Mapping[tuple[int, int], Reading] = {(one.sender, one.receiver): one for one in ordered}
        self.pairs = stats.grouped((one.pair, one) for one in self.readings.values())
        self.touching = stats.grouped((rank, one) for one in self.readings.values() for rank in one.pair)
        by_rate = sorted(self.readings.values(), key=lambda reading: reading.bytes_per_second)
        self._rates = [reading.bytes_per_second for reading in by_rate]
        self._places_of_pair = stats.grouped((one.pair, place) for place, one in enumerate(by_rate))
        places_of_unit = stats.grouped(
            (unit, place) for place, one in enumerate(by_rate) for unit in set(map(unit_of, one.pair))
        )
        without = (stats.median_without(self._rates, places) for places in places_of_unit.values())
        self._best_median = max((median for median in without if median is not None), default=None)

    @property
    def median(self) -> float:
        """The median of all readings, in bytes a second.

        Raises:
            ValueError: there are none.
        """
        return stats.median(self._rates)

    def reference_rate(self, of: Pair) -> float | None:
        """Return the rate to compare a pair with, in bytes a second: the median without the unit that lowers it most.

        It is the largest of the medians that are left when one unit is left out. A unit that is slow as a whole would
        else be compared with itself: with three GPUs it is in two thirds of all readings. Of many units none changes
        much. Where nothing is left without a unit, as with two nodes, it is the median of all other pairs; None where
        there is no other pair.
        """
        if self._best_median is not None:
            return self._best_median
        return stats.median_without(self._rates, self._places_of_pair[of])

    def ratio(self, reading: Reading) -> float | None:
        """Return a reading over its pair's reference rate; None where there is none."""
        others = self.reference_rate(reading.pair)
        if others is None:
            return None
        return math.inf if others == 0 else reading.bytes_per_second / others

    def worst(self, of: Pair) -> Reading:
        """Return the slower direction of a pair."""
        return min(self.pairs[of], key=lambda reading: reading.bytes_per_second)

    def slow(self, below: float) -> list[Pair]:
        """Return the pairs with a direction below this ratio, the slowest first."""
        found = {}
        for link in self.pairs:
            ratio = self.ratio(self.worst(link))
            if ratio is not None and ratio < below:
                found[link] = self.worst(link).bytes_per_second
        return sorted(found, key=lambda link: (found[link], link))

    def wrong(self) -> list[Pair]:
        """Return the pairs that delivered wrong data."""
        return [link for link, readings in self.pairs.items() if any(reading.wrong for reading in readings)]

    def of_rank(self, rank: int, *, without: Iterable[Pair] = ()) -> Reading:
        """Return a rank's slowest reading, as sender or receiver.

        Args:
            rank: of the readings.
            without: pairs with another culprit; they count where the rank has no others.

        Raises:
            KeyError: the rank has no reading.
        """
        excluded = set(without)
        readings = self.touching[rank]
        counted = [reading for reading in readings if reading.pair not in excluded]
        return min(counted or readings, key=lambda reading: reading.bytes_per_second)


Kind = Literal["gpu", "port", "link", "node link", "node", "rail", "fabric"]
"""``gpu``: with the others of its node. ``port``: a GPU with those of its rail on other nodes, so its NIC is suspected.
``link``: two ranks. ``node link``: two nodes, most rails. ``node``: all GPUs of it. ``rail``: the same rail of most
nodes. ``fabric``: most of all."""

Scope = Literal["node", "world"]


@dataclass(frozen=True, kw_only=True)
class Culprit:
    """The explanation of some bad links.

    Attributes:
        kind: see :data:`Kind`.
        ranks: ascending. Of a link its two ends: which of them is at fault is unknown.
        pairs: the bad links that it explains.
        links: number of its links that were measured.
    """

    kind: Kind
    ranks: tuple[int, ...]
    pairs: tuple[Pair, ...]
    links: int


@dataclass(frozen=True, kw_only=True)
class _Explanation:
    """Culprits among units that have all been paired: all units, or some of them and some single links."""

    all_units: bool = False
    units: tuple[int, ...] = ()
    links: tuple[Pair, ...] = ()


def culprits(bad: Iterable[Pair], measured: Iterable[Pair], places: Places, scope: Scope) -> tuple[Culprit, ...]:
    """Explain the bad ones among the measured pairs of ranks.

    Args:
        bad: slow or wrong.
        measured: all of them, the bad ones included.
        places: where the ranks are.
        scope: whether the pairs are those within nodes, or those across nodes on the same rail.
    """
    bad, measured = frozenset(bad), frozenset(measured)
    return tuple(_within(bad, measured, places) if scope == "node" else _across(bad, measured, places))


def explained_by_others(found: Iterable[Culprit], rank: int) -> set[Pair]:
    """Return the pairs whose culprits are other ranks only."""
    of_others = {link for culprit in found if rank not in culprit.ranks for link in culprit.pairs}
    return of_others - {link for culprit in found if rank in culprit.ranks for link in culprit.pairs}


def _within(bad: frozenset[Pair], measured: frozenset[Pair], places: Places) -> list[Culprit]:
    found = []
    for ranks in places.ranks:
        cause = _explain(ranks, bad, measured)
        if cause.all_units:
            found.append(_culprit("node", ranks, bad, measured, inside=ranks))
            continue
        found += [_culprit("gpu", [rank], bad, measured, inside=ranks) for rank in cause.units]
        found += [_culprit("link", link, bad, measured, only=[link]) for link in cause.links]
    return found


def _across(bad: frozenset[Pair], measured: frozenset[Pair], places: Places) -> list[Culprit]:
    rails = {pair(one, other): rails_between(places, one, other) for one in range(places.nodes) for other in range(one)}
    met = {nodes: [link for link in links if link in measured] for nodes, links in rails.items()}
    # Two nodes have a bad connection where most of their rails are bad.
    bad_nodes = {nodes for nodes, links in met.items() if 2 * sum(link in bad for link in links) > len(links)}
    cause = _explain(range(places.nodes), bad_nodes, {nodes for nodes, links in met.items() if links})
    if cause.all_units:
        return [_culprit("fabric", [rank for ranks in places.ranks for rank in ranks], bad, measured)]
    # With one rail a node is its only GPU.
    found = [_culprit("node", places.ranks[node], bad, measured) for node in cause.units]
    for nodes in cause.links:
        links = [link for link in met[nodes] if link in bad]
        ranks = sorted(rank for link in links for rank in link)
        found.append(_culprit("node link" if len(met[nodes]) > 1 else "link", ranks, bad, measured, only=met[nodes]))
    explained = {link for culprit in found for link in culprit.pairs}
    in_bad_nodes = {rank for culprit in found if culprit.kind == "node" for rank in culprit.ranks}
    unexplained, remaining = bad - explained, measured - explained
    for rail in range(places.rails):
        ranks_of_rail = [ranks[rail] for ranks in places.ranks]
        ranks_left = [rank for rank in ranks_of_rail if rank not in in_bad_nodes]
        cause = _explain(ranks_left, unexplained, remaining)
        if cause.all_units:
            found.append(_culprit("rail", ranks_left, unexplained, remaining, inside=ranks_left))
            continue
        found += [_culprit("port", [rank], unexplained, remaining, inside=ranks_of_rail) for rank in cause.units]
        found += [_culprit("link", link, unexplained, remaining, only=[link]) for link in cause.links]
    return found


def _explain(units: Iterable[int], bad: Iterable[Pair], measured: Iterable[Pair]) -> _Explanation:
    """Find the fewest culprits that explain the bad pairs among the units."""
    all_units = frozenset(units)
    bad_left = {link for link in bad if all_units.issuperset(link)}
    if not bad_left:
        return _Explanation()
    links: dict[int, set[Pair]] = {unit: set() for unit in all_units}
    for link in measured:
        if all_units.issuperset(link):
            for unit in link:
                links[unit].add(link)
    # Three, because two have one link only, and then that link is the culprit.
    if len(all_units) > 2 and all(bad_left >= own for own in links.values()):
        return _Explanation(all_units=True)
    culprits: list[int] = []
    while True:
        counts = {unit: len(own & bad_left) for unit, own in links.items()}
        mostly_bad = [unit for unit, count in counts.items() if count > 1 and 2 * count > len(links[unit])]
        if not mostly_bad:
            break
        worst = max(mostly_bad, key=lambda unit: (counts[unit] / len(links[unit]), counts[unit], -unit))
        culprits.append(worst)
        explained = links.pop(worst)
        bad_left -= explained
        for own in links.values():
            own -= explained
        if 2 * len(culprits) > len(all_units):
            return _Explanation(all_units=True)
    return _Explanation(units=tuple(sorted(culprits)), links=tuple(sorted(bad_left)))


def _culprit(
    kind: Kind,
    ranks: Sequence[int],
    bad: frozenset[Pair] | set[Pair],
    measured: frozenset[Pair] | set[Pair],
    *,
    inside: Sequence[int] | None = None,
    only: Iterable[Pair] | None = None,
) -> Culprit:
    """Make a culprit of the links ``only``, or else of those of its ranks, both ends of which are ``inside``."""
    if only is not None:
        links = set(only) & measured
    else:
        within = None if inside is None else set(inside)
        links = {link for link in measured if set(ranks) & set(link) and (within is None or within.issuperset(link))}
    return Culprit(kind=kind, ranks=tuple(sorted(ranks)), pairs=tuple(sorted(links & bad)), links=len(links))
