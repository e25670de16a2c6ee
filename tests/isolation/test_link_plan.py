import pytest
from simulated_fabric import everything, places

from pytest_gpucluster.isolation.round_robin import across_nodes, pair, rail_by_rail, within_node


def assert_disjoint(rounds):
    for round_ in rounds:
        taken = [rank for link in round_ for rank in link]
        assert len(taken) == len(set(taken))


@pytest.mark.parametrize("rails", [2, 3, 8])
def test_every_gpu_of_a_node_meets_every_other_one_of_it(rails):
    there = places(2, rails)
    rounds = within_node(there, 1)
    own = there.ranks[1]
    assert len(rounds) == rails - 1 + rails % 2
    assert_disjoint(rounds)
    assert sorted(everything(rounds)) == [(one, other) for one in own for other in own if one < other]


@pytest.mark.parametrize(("nodes", "rails"), [(2, 1), (2, 8), (3, 2), (5, 4), (16, 8)])
def test_every_gpu_meets_that_of_its_rail_on_every_other_node(nodes, rails):
    there = places(nodes, rails)
    rounds = across_nodes(there)
    assert len(rounds) == nodes - 1 + nodes % 2
    assert_disjoint(rounds)
    expected = {
        pair(there.ranks[one][rail], there.ranks[other][rail])
        for one in range(nodes)
        for other in range(one)
        for rail in range(rails)
    }
    found = everything(rounds)
    assert len(found) == len(expected)
    assert set(found) == expected


def test_1024_gpus_take_127_rounds_of_512_pairs_and_about_a_minute():
    rounds = across_nodes(places(128, 8))
    assert len(rounds) == 127
    assert {len(round_) for round_ in rounds} == {512}
    assert_disjoint(rounds)
    assert len(set(everything(rounds))) == 128 * 127 // 2 * 8


def test_suspects_across_nodes_meet_again_with_one_rail_at_a_time():
    there = places(4, 2)
    # Nodes 0 and 1 on rail 1; then 2 and 3 on both; 0 and 2 would need another meeting.
    suspects = [(1, 3), (4, 6), (5, 7), (0, 4)]
    assert rail_by_rail(there, suspects, max_rounds=2) == (((0, 2), (4, 6)), ((1, 3), (5, 7)))
    again = rail_by_rail(there, suspects, max_rounds=5)
    assert again == (((0, 2), (4, 6)), ((1, 3), (5, 7)), ((0, 4),), ((1, 5),))
    assert_disjoint(again)


def test_no_meeting_is_cut_in_the_middle_of_its_rails():
    there = places(2, 8)
    assert rail_by_rail(there, [(0, 8)], max_rounds=7) == ()
    assert len(rail_by_rail(there, [(0, 8)], max_rounds=15)) == 8
    assert rail_by_rail(there, [], max_rounds=100) == ()


def test_a_node_that_is_suspect_with_all_others_does_not_take_all_the_time():
    there = places(128, 8)
    suspects = [(there.ranks[0][0], there.ranks[node][0]) for node in range(1, 128)]
    assert len(rail_by_rail(there, suspects, max_rounds=32)) == 32
