"""Planted faults are named, and nothing else: in nodes with 8 GPUs, and in a fabric of 128 nodes."""

import pytest
from simulated_fabric import everything, measured, places

from pytest_gpucluster.isolation.link_matrix import culprits, explained_by_others
from pytest_gpucluster.isolation.link_survey import matrix_of
from pytest_gpucluster.isolation.round_robin import across_nodes, pair, within_node

BELOW = 0.75


def touching(*ranks, left=0.3):
    return lambda sender, receiver: left if {sender, receiver} & set(ranks) else 1.0


def between(*links, left=0.3):
    return lambda sender, receiver: left if pair(sender, receiver) in links else 1.0


def found_culprits(readings, scope, there):
    matrix = matrix_of(readings, scope, there)
    return culprits(matrix.slow(BELOW), matrix.pairs, there, scope)


def kinds_and_ranks(readings, scope, there):
    return sorted((one.kind, one.ranks) for one in found_culprits(readings, scope, there))


# Within nodes ------------------------------------------------------------------------------------------------------

TWO_NODES = places(2, 8)
WITHIN = [round_ for node in range(2) for round_ in within_node(TWO_NODES, node)]


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        pytest.param(touching(), [], id="none"),
        pytest.param(touching(3), [("gpu", (3,))], id="a GPU"),
        pytest.param(touching(0, 7, 12), [("gpu", (0,)), ("gpu", (7,)), ("gpu", (12,))], id="three GPUs"),
        pytest.param(between((2, 5)), [("link", (2, 5))], id="a link"),
        pytest.param(between((2, 5), (8, 9)), [("link", (2, 5)), ("link", (8, 9))], id="two links"),
        pytest.param(
            lambda s, r: min(touching(4)(s, r), between((1, 2))(s, r)), [("gpu", (4,)), ("link", (1, 2))], id="both"
        ),
        pytest.param(lambda s, r: 0.2 if s == 9 else 1.0, [("gpu", (9,))], id="a GPU that only sends slowly"),
        # With 2 links of 7 the end is unknown.
        pytest.param(between((0, 1), (0, 2)), [("link", (0, 1)), ("link", (0, 2))], id="two links of one GPU"),
    ],
)
def test_in_a_node_the_gpu_or_the_link_is_named_and_not_the_partners(fault, expected):
    assert kinds_and_ranks(measured(WITHIN, fault, seed=1), "node", TWO_NODES) == expected


def test_a_node_that_is_slow_throughout_is_named_as_a_whole():
    there = places(4, 8)
    rounds = [round_ for node in range(4) for round_ in within_node(there, node)]
    [found] = found_culprits(measured(rounds, touching(*there.ranks[2])), "node", there)
    assert (found.kind, found.ranks, found.links) == ("node", there.ranks[2], 28)


@pytest.mark.parametrize("rails", [2, 3, 4])
def test_with_few_gpus_only_what_is_certain_is_reported(rails):
    there = places(4, rails)
    rounds = [round_ for node in range(4) for round_ in within_node(there, node)]
    assert kinds_and_ranks(measured(rounds, touching(0)), "node", there) == (
        [("link", (0, 1))] if rails == 2 else [("gpu", (0,))]
    )


# Across nodes ------------------------------------------------------------------------------------------------------

RAILS = 4
FABRIC = places(24, RAILS)
ACROSS = across_nodes(FABRIC)


def of_nodes(*nodes, rails=RAILS):
    return lambda sender, receiver: 0.4 if {sender // rails, receiver // rails} & set(nodes) else 1.0


FAULTS = [
    pytest.param(of_nodes(), [], id="none"),
    pytest.param(of_nodes(17), [("node", FABRIC.ranks[17])], id="a node"),
    pytest.param(of_nodes(0, 23), [("node", FABRIC.ranks[0]), ("node", FABRIC.ranks[23])], id="two nodes"),
    pytest.param(touching(42), [("port", (42,))], id="a port"),
    pytest.param(touching(42, 43, 90), [("port", (42,)), ("port", (43,)), ("port", (90,))], id="three ports"),
    pytest.param(
        lambda sender, receiver: 0.4 if sender % RAILS == 1 else 1.0, [("rail", tuple(range(1, 96, 4)))], id="a rail"
    ),
    pytest.param(between((16, 80)), [("link", (16, 80))], id="a link"),
    pytest.param(
        lambda sender, receiver: 0.4 if {sender // RAILS, receiver // RAILS} == {3, 20} else 1.0,
        [("node link", FABRIC.ranks[3] + FABRIC.ranks[20])],
        id="two nodes with each other",
    ),
    pytest.param(
        lambda s, r: min(of_nodes(9)(s, r), touching(42)(s, r), between((16, 80))(s, r)),
        [("link", (16, 80)), ("node", FABRIC.ranks[9]), ("port", (42,))],
        id="one of each",
    ),
]


@pytest.mark.parametrize(("fault", "expected"), FAULTS)
def test_across_nodes_the_planted_fault_is_named_and_nothing_else(fault, expected):
    assert kinds_and_ranks(measured(ACROSS, fault, seed=2), "world", FABRIC) == expected


def test_among_1024_gpus_a_node_a_port_and_a_link_are_found_at_once_and_nothing_else():
    there = places(128, 8)

    def fault(sender, receiver):
        faults = (of_nodes(9, rails=8), touching(83), between((16, 800)))
        return min(each(sender, receiver) for each in faults)

    expected = [("link", (16, 800)), ("node", there.ranks[9]), ("port", (83,))]
    assert kinds_and_ranks(measured(across_nodes(there), fault), "world", there) == expected


@pytest.mark.parametrize(
    ("nodes", "rails", "fault", "expected"),
    [
        (3, 1, touching(2), [("node", (2,))]),
        (3, 2, touching(4, 5), [("node", (4, 5))]),
        (3, 8, of_nodes(2, rails=8), [("node", tuple(range(16, 24)))]),
        (3, 2, touching(4), [("port", (4,))]),
        (2, 2, touching(3), [("link", (1, 3))]),
        (4, 4, lambda s, r: 0.4 if s % 4 == 1 else 1.0, [("rail", (1, 5, 9, 13))]),
    ],
    ids=[
        "a node of 3",
        "with 2 rails",
        "with 8 rails",
        "a port of 3 nodes",
        "the other rail of 2 nodes",
        "a rail of 4",
    ],
)
def test_in_small_clusters_too(nodes, rails, fault, expected):
    there = places(nodes, rails)
    assert kinds_and_ranks(measured(across_nodes(there), fault), "world", there) == expected


def test_where_everything_is_bad_the_fabric_is_the_culprit():
    there = places(4, 2)
    links = everything(across_nodes(there))
    [found] = culprits(links, links, there, "world")
    assert (found.kind, len(found.ranks), found.links) == ("fabric", 8, 12)


def test_a_link_that_a_culprit_explains_is_excused_for_its_partners():
    found = found_culprits(measured(WITHIN, touching(3)), "node", TWO_NODES)
    assert explained_by_others(found, 0) == {pair(3, other) for other in range(8) if other != 3}
    assert explained_by_others(found, 3) == set()


def test_of_two_slow_gpus_each_keeps_the_link_between_them():
    found = found_culprits(measured(WITHIN, touching(3, 4)), "node", TWO_NODES)
    assert {len(one.pairs) for one in found} == {7}
    for rank in (3, 4):
        assert (3, 4) not in explained_by_others(found, rank)
