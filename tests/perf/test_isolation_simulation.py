"""docs/isolation-simulations.md: made by perf/isolation.py with the planner that is shipped, and true of it."""

from __future__ import annotations

import sys
from pathlib import Path
from random import Random

import pytest

from pytest_gpucluster.isolation import finding
from pytest_gpucluster.isolation.finding import Isolated

PERF = Path(__file__).parents[2] / "perf"
sys.path.insert(0, str(PERF))  # programs, not a package: they import each other by name
try:
    import isolation
    import isolation_trials
    from isolation_cluster import Cluster, Plant
    from isolation_trials import CLAIMED, NODES, SCENARIOS, Found, Scenario, bound, run
finally:
    sys.path.remove(str(PERF))

BY_NAME = {scenario.name: scenario for scenario in SCENARIOS}
SMALL = 64


def test_the_page_was_made_with_these_parameters() -> None:
    assert isolation.PAGE.read_text(encoding="utf-8").startswith(isolation.header(isolation.TRIALS))


# The promise: at the size that it is made for, and with less room.


@pytest.mark.parametrize("scenario", CLAIMED, ids=lambda scenario: scenario.name)
def test_bad_nodes_and_nics_are_found_in_time_and_nobody_else_is_accused(scenario: Scenario) -> None:
    for total, trials in ((NODES, 2), (SMALL, 6), (16, 10), (8, 10)):
        found = run(scenario, total, trials)
        assert (found.missed, found.accused_falsely, found.half_right) == (0, 0, 0)
        assert found.undecided == 0
        assert max(found.rounds) <= bound(total)


@pytest.mark.parametrize(
    "name", ["slow pair", "dead pair, as neighbours in a ring only", "1 node, in groups of 8 or more"]
)
def test_links_and_faults_of_larger_groups_are_found(name: str) -> None:
    found = run(BY_NAME[name], SMALL, 6)
    assert (found.missed, found.accused_falsely, found.half_right) == (0, 0, 0)


def test_what_fails_now_and_then_is_mostly_found_and_blames_nobody_else() -> None:
    found = run(BY_NAME["1 node, slow 1 of 2"], SMALL, 8)
    assert found.missed <= 2
    assert found.accused_falsely <= 1
    rare = run(BY_NAME["1 node, slow 1 of 8"], SMALL, 8)
    assert rare.accused_falsely == 0


def test_in_a_healthy_cluster_nobody_is_accused_and_it_is_not_reproduced() -> None:
    found = run(BY_NAME["healthy"], SMALL, 4)
    assert (found.accused_falsely, found.reproduced, found.undecided) == (0, 0, 0)
    noisy = run(BY_NAME["healthy, 1 of 1000 probes fails"], SMALL, 4)
    assert noisy.accused_falsely == 0


# That the cluster is what it says, and the planner is driven as a real one.


def made(*plants: Plant, total: int = 8) -> Cluster:
    return Cluster(nodes=total, plants=plants, random=Random(1))


def test_a_fault_shows_where_it_is_planted_and_nowhere_else() -> None:
    cluster = made(Plant(units=(3,), sort="dead"), Plant(units=(4, 5), factor=0.5))
    dead, slow, good = cluster.probe([(2, 3), (4, 5), (6, 7)])
    assert (dead.busbw, dead.failure) == (None, "not done after 60 s")
    assert slow.busbw is not None
    assert good.busbw is not None
    assert slow.busbw < 0.6 * good.busbw
    alone = cluster.probe([(3,)])[0]
    assert not alone.broken
    assert not cluster.probe([(0, 4), (5, 6)])[1].broken


def test_what_is_counted_is_what_was_planted_and_accused(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a planner's answer that is known: one right, one missed, one innocent."""
    right = finding.Culprit(units=(1,), kind="unit", failed=3, probes=3, evidence=())
    innocent = finding.Culprit(units=(7,), kind="unit", failed=3, probes=3, evidence=())
    end = finding.Culprit(units=(4,), kind="unit", failed=3, probes=3, evidence=())
    plants = [Plant(units=(1,)), Plant(units=(4, 5))]

    def counted(*culprits: finding.Culprit) -> Found:
        answer = Isolated(culprits=culprits, cleared=(), undecided=(6,), rounds=(), why_undecided="", reproduced=True)
        monkeypatch.setattr(isolation_trials, "search", lambda cluster, floor: answer)
        return run(Scenario(name="x", make=lambda random, total: plants), 8, 1)

    found = counted(right)
    assert (found.planted, found.missed, found.accused_falsely, found.half_right) == (2, 1, 0, 0)
    assert (found.reproduced, found.undecided, found.rounds) == (1, 1, [0])
    found = counted(right, innocent)
    assert (found.missed, found.accused_falsely) == (1, 1)
    found = counted(right, end)
    assert (found.missed, found.accused_falsely, found.half_right) == (1, 0, 1)
