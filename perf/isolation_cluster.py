"""A made-up cluster with planted faults, which answers probes as a real one would. The planner never sees it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal

from pytest_gpucluster.isolation.finding import Outcome

ALONE_GB_PER_SECOND = 440.0
TOGETHER_GB_PER_SECOND = 380.0
"""busbw of a healthy node alone, over NVLink, and of two over the fabric. Any figures would do: only groups of the
same size are held beside each other."""
PER_DOUBLING = 0.99
"""What each doubling of a group beyond a pair leaves of it."""
SPREAD = 0.01
"""Standard deviation between healthy nodes, as a share. A group does what its slowest member does."""
NOISE = 0.02
"""Standard deviation between two probes of one group, as a share."""
FLOOR_SHARE = 0.8
"""The limit for a group of each size, as a share of what a healthy group does."""

Sort = Literal["slow", "dead", "wrong"]


@dataclass(frozen=True, kw_only=True)
class Plant:
    """A fault. ``units``: one, or the two ends of a link.

    ``smallest``: groups of fewer units do not show it; 1 shows alone too. ``chance``: of showing in a probe.
    ``neighbours``: a link is used only where its ends are neighbours in the ring of the group, which runs through the
    units in ascending order.
    """

    units: tuple[int, ...]
    sort: Sort = "slow"
    smallest: int = 2
    factor: float = 0.5
    chance: float = 1.0
    neighbours: bool = False

    def shows_in(self, members: Sequence[int], random: Random) -> bool:
        """Whether a probe of this group meets the fault."""
        if len(members) < self.smallest or not set(self.units) <= set(members):
            return False
        if self.neighbours:
            one, other = (members.index(unit) for unit in self.units)
            if abs(one - other) not in (1, len(members) - 1):
                return False
        return random.random() < self.chance


@dataclass(kw_only=True)
class Cluster:
    """So many nodes. ``transient``: how likely a probe is slow or broken without anybody's fault."""

    nodes: int
    plants: Sequence[Plant]
    random: Random
    noise: float = NOISE
    transient: float = 0.0

    def __post_init__(self) -> None:
        self._level = [self.random.gauss(1.0, SPREAD) for _ in range(self.nodes)]

    def probe(self, groups: Sequence[Sequence[int]]) -> list[Outcome]:
        """Return what comes of disjoint groups that are probed at once."""
        busy = [unit for members in groups for unit in members]
        if len(busy) != len(set(busy)) or not set(busy) <= set(range(self.nodes)):
            raise ValueError(f"groups must be disjoint, and of units of this cluster: {groups!r:.200}")
        return [self._outcome(tuple(members)) for members in groups]

    def _outcome(self, members: tuple[int, ...]) -> Outcome:
        shown = [plant for plant in self.plants if plant.shows_in(members, self.random)]
        if self.transient and self.random.random() < self.transient:
            shown.append(Plant(units=members, sort=self.random.choice(("slow", "dead"))))
        if any(plant.sort == "dead" for plant in shown):
            return Outcome(members=members, busbw=None, failure="not done after 60 s")
        busbw = usual(len(members)) * min(self._level[unit] for unit in members)
        busbw *= max(0.01, self.random.gauss(1.0, self.noise))
        busbw *= min((plant.factor for plant in shown if plant.sort == "slow"), default=1.0)
        wrong = any(plant.sort == "wrong" for plant in shown)
        return Outcome(members=members, busbw=busbw, wrong=f"rank of {self.random.choice(members)}" if wrong else "")


def usual(units: int) -> float:
    """Return the GB/s of a healthy group of so many units."""
    if units == 1:
        return ALONE_GB_PER_SECOND
    return TOGETHER_GB_PER_SECOND * PER_DOUBLING ** (math.log2(units) - 1)


def floor(units: int) -> float:
    """Return the GB/s that the limits of this cluster demand of a group."""
    return FLOOR_SHARE * usual(units)
