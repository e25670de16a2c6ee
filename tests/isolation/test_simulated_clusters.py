"""The planner in simulated clusters with noise and planted faults: it finds them in time and accuses no other unit."""

import math
from dataclasses import dataclass
from random import Random
from typing import Literal

import pytest

from pytest_gpucluster.isolation.finding import Outcome
from pytest_gpucluster.isolation.planner import MAX_ROUNDS, Planner

NODE_SPREAD, PROBE_NOISE = 0.01, 0.02
"""Standard deviations between healthy nodes, and between two probes of one group, as shares of the rate."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A fault of one unit, or of the link between two.

    ``smallest``: groups of fewer units do not show it. ``chance``: of showing in a probe. ``neighbours``: a link is
    used only where its ends are neighbours in the ring of the group, in ascending order.
    """

    units: tuple[int, ...]
    kind: Literal["slow", "dead", "wrong"] = "slow"
    smallest: int = 2
    chance: float = 1.0
    neighbours: bool = False

    def shows_in(self, members, random):
        if len(members) < self.smallest or not set(self.units) <= set(members):
            return False
        if self.neighbours:
            one, other = (members.index(unit) for unit in self.units)
            if abs(one - other) not in (1, len(members) - 1):
                return False
        return random.random() < self.chance


def usual(units):
    return 440.0 if units == 1 else 380.0 * 0.99 ** (math.log2(units) - 1)


class Cluster:
    """Answers probes as a real cluster would; the planner never sees the faults."""

    def __init__(self, nodes, faults, random, transient=0.0):
        self.nodes, self._faults, self._random, self._transient = nodes, faults, random, transient
        self._level = [random.gauss(1.0, NODE_SPREAD) for _ in range(nodes)]

    def probe(self, members):
        kinds = {fault.kind for fault in self._faults if fault.shows_in(members, self._random)}
        if self._random.random() < self._transient:
            kinds.add(self._random.choice(("slow", "dead")))
        if "dead" in kinds:
            return Outcome(members=members, busbw=None, failure="not done after 60 s")
        busbw = usual(len(members)) * min(self._level[unit] for unit in members)
        busbw *= max(0.01, self._random.gauss(1.0, PROBE_NOISE)) * (0.5 if "slow" in kinds else 1.0)
        return Outcome(members=members, busbw=busbw, wrong="rank 3" if "wrong" in kinds else "")

    def search(self, repeats):
        planner = Planner(range(self.nodes), floor=lambda units: 0.8 * usual(units))
        while (groups := planner.next_round()) is not None and (repeats or not planner.repeats):
            planner.take([self.probe(members) for members in groups])
        return planner.finding()


def nodes(count, **fault):
    return lambda random, total: [Fault(units=(unit,), **fault) for unit in random.sample(range(total), count)]


def link(**fault):
    return lambda random, total: [Fault(units=tuple(sorted(random.sample(range(total), 2))), **fault)]


def ring_link(random, total):
    unit = random.randrange(total - 1)
    return [Fault(units=(unit, unit + 1), kind="dead", neighbours=True)]


@dataclass
class Tally:
    """Over all trials: missed faults, searches with a falsely accused unit, undecided units, rounds of each."""

    missed: int = 0
    false: int = 0
    undecided: int = 0
    reproduced: int = 0
    rounds: tuple[int, ...] = ()


def one_each_time_and_one_in_8(random, total):
    always, seldom = random.sample(range(total), 2)
    return [Fault(units=(always,)), Fault(units=(seldom,), chance=1 / 8)]


def trials(name, plant, total, count, transient=0.0, *, repeats=True):
    """Search in ``count`` clusters; with ``repeats=False`` only until pairs are repeated."""
    tally = Tally()
    for number in range(count):
        random = Random(f"{name} {total} {number}")
        faults = plant(random, total)
        found = Cluster(total, faults, random, transient).search(repeats)
        planted, accused = {fault.units for fault in faults}, {culprit.units for culprit in found.culprits}
        tally.missed += len(planted - accused)
        tally.false += bool(accused - planted)
        tally.undecided += len(found.undecided)
        tally.reproduced += found.reproduced
        tally.rounds += (len(found.rounds),)
    return tally


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize(
    "fault", [{}, {"kind": "dead"}, {"kind": "wrong"}, {"smallest": 1}], ids=["slow", "dead", "wrong", "slow alone"]
)
def test_bad_nodes_are_found_within_2_log2_n_plus_5_rounds_and_no_other_unit_is_accused(count, fault):
    for total, number in ((256, 2), (64, 6), (16, 10), (8, 10)):
        tally = trials(f"{count} {fault}", nodes(count, **fault), total, number, repeats=False)
        assert (tally.missed, tally.false, tally.undecided) == (0, 0, 0)
        assert max(tally.rounds) <= 2 * math.ceil(math.log2(total)) + 5


@pytest.mark.parametrize(
    "plant",
    [link(), link(kind="wrong"), ring_link, nodes(1, kind="dead", smallest=8)],
    ids=["slow", "wrong", "ring", "8"],
)
def test_bad_links_and_faults_of_larger_groups_are_found(plant):
    tally = trials("links", plant, 64, 6)
    assert (tally.missed, tally.false) == (0, 0)


def test_a_node_that_fails_now_and_then_is_found_and_no_other_unit_is_accused():
    for name, plant, total, count, missed in (
        ("half", nodes(1, chance=0.5), 16, 10, 0),
        ("eighth", nodes(1, chance=1 / 8), 8, 20, 0.1),
        ("eighth", nodes(1, chance=1 / 8), 32, 10, 0.1),
        ("eighth", nodes(1, chance=1 / 8), 256, 1, 0.1),
        ("eighth, also alone", nodes(1, chance=1 / 8, smallest=1), 2, 20, 0.1),
        ("eighth beside another", one_each_time_and_one_in_8, 16, 20, 0.1),
        ("sixteenth", nodes(1, chance=1 / 16), 16, 10, 0.4),
    ):
        tally = trials(name, plant, total, count)
        assert tally.missed <= missed * count, name
        assert tally.false == 0, name
        assert max(tally.rounds) <= MAX_ROUNDS


@pytest.mark.parametrize(("total", "missed"), [(8, 0), (48, 1)])
def test_a_link_that_fails_half_of_the_time_is_found(total, missed):
    tally = trials("half a link", link(chance=0.5), total, 20 if total == 8 else 5)
    assert tally.missed <= missed
    assert tally.false == 0


def test_in_a_healthy_cluster_no_unit_is_accused():
    healthy = trials("healthy", nodes(0), 32, 3)
    assert (healthy.false, healthy.reproduced, healthy.undecided) == (0, 0, 0)
    assert trials("noisy", nodes(0), 32, 3, transient=0.001).false == 0
