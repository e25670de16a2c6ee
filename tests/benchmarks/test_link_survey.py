"""A survey by three ranks on three nodes, and by four on two: what is measured once more, and what all of them know."""

from __future__ import annotations

from typing import Any

import forked_ranks
import pytest

from pytest_gpucluster.benchmarks.links import rounds_of
from pytest_gpucluster.isolation.round_robin import Places

SCRIPT = """
from pytest_gpucluster.benchmarks import links
from pytest_gpucluster.device.clock import ManualClock
from pytest_gpucluster.isolation.round_robin import Places

honest, clock, met = links._exchange, ManualClock(), []
links.clock_for = lambda device: clock

def exchange(group, outgoing, incoming, peer):
    honest(group, outgoing, incoming, peer)
    met.append(peer)
    clock.advance(0.1 if {rank, peer} == {2, 3} else 0.001)
links._exchange = exchange

places = Places.of([{"rank": r, "host": "ab"[r // 2], "node_rank": r // 2, "local_rank": r % 2} for r in range(4)])

def surveyed(group, scope, **more):
    given = {"payload_bytes": 4096, "round_seconds": 0.1, "repeats": 4, "below": 0.5, "longest_seconds": 60.0}
    return links.survey(dist.group.WORLD, group, device, places, scope, **given | more)

def told(found):
    culprits = [[one.kind, list(one.ranks)] for one in found.culprits("slow")]
    alone = [[one.sender, one.receiver] for one in found.alone.readings.values()]
    return [len(found.matrix.pairs), alone, culprits, found.rounds, found.planned_seconds, len(found.left_out)]

# torch makes groups in an order that all ranks share.
nodes = [dist.new_group([0, 1]), dist.new_group([2, 3])]
mine = nodes[rank // 2]
say(told(surveyed(mine, "node")))
say(told(surveyed(mine, "node", repeats=0)))
say(told(surveyed(mine, "node", below=None)))
met.clear()
say(told(surveyed(dist.group.WORLD, "world")))
say(sorted(set(met)))

entered = []
class During:
    def __enter__(self):
        entered.append("in")
    def __exit__(self, *error):
        entered.append("out")
surveyed(mine, "node", during=During())
say(entered)

# What is entered while only the group is used: the tournament and once more, and not when all tell each other.
entered.clear()
whole = links.gather_readings
links.gather_readings = lambda *given: (entered.append("told"), whole(*given))[1]
surveyed(mine, "node", sweeping=During)
say(entered)
nodes = mine = None
"""


@pytest.fixture(scope="module")
def said() -> list[list[Any]]:
    """What four ranks said, by line and rank."""
    lines = forked_ranks.run_script(SCRIPT, ranks=4)
    return [list(line) for line in zip(*lines, strict=True)]


def same(line: list[Any]) -> Any:
    """What all ranks said alike."""
    assert all(one == line[0] for one in line)
    return line[0]


def test_the_nodes_tell_each_other_and_the_slow_link_is_measured_once_more(said: list[list[Any]]) -> None:
    assert same(said[0]) == [2, [[2, 3], [3, 2]], [["link", [2, 3]]], 1, 0.1, 0]


def test_nothing_is_measured_once_more_where_nobody_asks_or_nothing_is_known_to_be_slow(said: list[list[Any]]) -> None:
    assert same(said[1]) == [2, [], [["link", [2, 3]]], 1, 0.1, 0]
    assert same(said[2]) == [2, [], [], 1, 0.1, 0]


def test_across_nodes_only_ranks_of_one_rail_meet(said: list[list[Any]]) -> None:
    assert same(said[3]) == [2, [], [], 1, 0.1, 0]
    assert said[4] == [[2], [3], [0], [1]]


def test_what_accompanies_the_tournament_is_left_again(said: list[list[Any]]) -> None:
    assert same(said[5]) == ["in", "out"]


def test_what_the_nodes_tell_each_other_is_outside_of_what_is_taken_for_the_group_s(said: list[list[Any]]) -> None:
    assert same(said[6]) == ["in", "out", "told", "in", "out", "told"]


def test_a_rank_takes_part_in_the_rounds_of_its_node_or_of_all() -> None:
    places = Places.of(
        [{"rank": r, "host": "ab"[r % 2], "node_rank": r % 2, "local_rank": r // 2} for r in range(4)],
    )
    assert rounds_of("node", places, 1) == (((1, 3),),)
    assert rounds_of("world", places, 1) == (((0, 1), (2, 3)),)


def test_with_one_rank_a_node_there_is_nobody_to_meet_inside() -> None:
    places = Places.of([{"rank": 0, "host": "a", "node_rank": 0, "local_rank": 0}])
    with pytest.raises(ValueError, match="takes two players"):
        rounds_of("node", places, 0)
