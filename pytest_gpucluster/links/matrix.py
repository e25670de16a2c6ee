"""What every link carries in each direction, beside what the others carry."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from pytest_gpucluster import stats
from pytest_gpucluster.links.plan import Pair, pair


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
