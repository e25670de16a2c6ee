"""How well isolation finds planted faults: many made-up clusters, searched by the planner that searches real ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

import isolation_cluster
from isolation_cluster import Cluster, Plant

from pytest_gpucluster.isolation.finding import Isolated
from pytest_gpucluster.isolation.planner import Planner

SEED = 20260514
NODES = 256

Make = Callable[[Random, int], list[Plant]]


def nodes(count: int, **fault: object) -> Make:
    """Return what plants a fault on so many nodes, each drawn by chance."""
    return lambda random, total: [
        Plant(units=(unit,), **fault)  # type: ignore[arg-type]  # the fault's own fields
        for unit in random.sample(range(total), count)
    ]


def link(**fault: object) -> Make:
    """Return what plants a fault between two nodes that are drawn by chance."""

    def make(random: Random, total: int) -> list[Plant]:
        return [Plant(units=tuple(sorted(random.sample(range(total), 2))), **fault)]  # type: ignore[arg-type]

    return make


def neighbours(**fault: object) -> Make:
    """Return what plants a fault between two nodes in a row, which shows only where they are neighbours in a ring."""

    def make(random: Random, total: int) -> list[Plant]:
        unit = random.randrange(total - 1)
        return [Plant(units=(unit, unit + 1), neighbours=True, **fault)]  # type: ignore[arg-type]

    return make


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """Clusters of one kind. ``deterministic``: each probe that meets the fault shows it."""

    name: str
    make: Make
    deterministic: bool = True
    noise: float = isolation_cluster.NOISE
    transient: float = 0.0
    floor: bool = True


CLAIMED = tuple(
    Scenario(name=f"{count} {what}", make=nodes(count, sort=sort, **more))
    for what, sort, more in (
        ("slow NIC", "slow", {}),
        ("dead NIC", "dead", {}),
        ("wrong data", "wrong", {}),
        ("slow alone", "slow", {"smallest": 1, "factor": 0.6}),
    )
    for count in (1, 2, 3)
)
"""Bad nodes and NICs that show in each probe: what the number of rounds is promised for."""

SCENARIOS = (
    Scenario(name="healthy", make=nodes(0)),
    *CLAIMED,
    Scenario(name="3 slow NIC, no limit to hold against", make=nodes(3), floor=False),
    Scenario(name="3 slow NIC, noise 5 %", make=nodes(3), noise=0.05),
    Scenario(name="8 dead NIC", make=nodes(8, sort="dead")),
    Scenario(name="1 node, in groups of 8 or more", make=nodes(1, sort="dead", smallest=8)),
    Scenario(name="1 node, in groups of 200 or more", make=nodes(1, sort="dead", smallest=200)),
    Scenario(name="slow pair", make=link()),
    Scenario(name="pair with wrong data", make=link(sort="wrong")),
    Scenario(name="dead pair, as neighbours in a ring only", make=neighbours(sort="dead")),
    *(
        Scenario(name=f"1 node, slow 1 of {often}", make=nodes(1, chance=1 / often), deterministic=False)
        for often in (2, 4, 8, 16)
    ),
    Scenario(name="1 pair, slow 1 of 2", make=link(chance=0.5), deterministic=False),
    Scenario(name="healthy, 1 of 1000 probes fails", make=nodes(0), transient=0.001, deterministic=False),
    Scenario(
        name="2 dead NIC, 1 of 1000 probes fails", make=nodes(2, sort="dead"), transient=0.001, deterministic=False
    ),
)


@dataclass(kw_only=True)
class Found:
    """What came of the trials of a scenario.

    ``rounds`` of each trial. ``planted``, ``missed``: faults. ``accused_falsely``: trials in which a unit was accused
    that is no part of a fault. ``half_right``: trials in which a unit was accused for its link, or a link for its unit.
    ``undecided``: how many units in all were neither accused nor cleared.
    """

    trials: int
    rounds: list[int]
    planted: int = 0
    missed: int = 0
    accused_falsely: int = 0
    half_right: int = 0
    reproduced: int = 0
    undecided: int = 0


def bound(total: int) -> int:
    """Return the rounds in which 1 to 3 bad nodes or NICs are found: 2 log2(N) + 5."""
    return 2 * math.ceil(math.log2(total)) + 5


def search(cluster: Cluster, *, floor: bool = True) -> Isolated:
    """Let the planner search a cluster to the end."""
    planner = Planner(range(cluster.nodes), floor=isolation_cluster.floor if floor else lambda units: None)
    while (groups := planner.next_round()) is not None:
        planner.take(cluster.probe(groups))
    return planner.finding()


def trial(scenario: Scenario, total: int, number: int) -> tuple[Sequence[Plant], Isolated]:
    """Make a cluster, and search it. The same number gives the same."""
    random = Random(f"{SEED} {scenario.name} {total} {number}")
    plants = scenario.make(random, total)
    cluster = Cluster(nodes=total, plants=plants, random=random, noise=scenario.noise, transient=scenario.transient)
    return plants, search(cluster, floor=scenario.floor)


def run(scenario: Scenario, total: int, trials: int) -> Found:
    """Run so many trials of a scenario."""
    found = Found(trials=trials, rounds=[])
    for number in range(trials):
        plants, isolated = trial(scenario, total, number)
        planted = {plant.units for plant in plants}
        accused = {culprit.units for culprit in isolated.culprits}
        guilty = {unit for units in planted for unit in units}
        found.rounds.append(len(isolated.rounds))
        found.planted += len(planted)
        found.missed += len(planted - accused)
        # Of a bad link one end is left out, so an end alone is no innocent; whoever is beside a bad node is.
        wrong = [units for units in accused - planted if not set(units) <= guilty]
        found.accused_falsely += bool(wrong)
        found.half_right += bool(accused - planted) and not wrong
        found.reproduced += isolated.reproduced
        found.undecided += len(isolated.undecided)
    return found
