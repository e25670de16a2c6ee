import pytest

from pytest_gpucluster.errors import EnvironmentBroken
from pytest_gpucluster.isolation.round_robin import Places


def who(rank, node_rank, local_rank, **more):
    return {"rank": rank, "host": f"node-{'abc'[node_rank]}", "node_rank": node_rank, "local_rank": local_rank} | more


def test_the_ranks_of_a_node_are_found_by_their_local_rank_also_where_they_are_dealt_out_in_turn():
    places = Places.of([who(0, 0, 0), who(1, 1, 0), who(2, 0, 1), who(3, 1, 1)])
    assert places.ranks == ((0, 2), (1, 3))
    assert (places.nodes, places.rails, places.hosts) == (2, 2, ("node-a", "node-b"))
    assert places.where() == {0: (0, 0), 2: (0, 1), 1: (1, 0), 3: (1, 1)}


def test_a_rank_is_called_by_its_host_and_gpu():
    places = Places.of([who(1, 0, 1, gpu={"index": 5}), who(0, 0, 0, gpu=None)])
    assert places.names == ("rank 0 (node-a)", "rank 1 (node-a, GPU 5)")


def test_uneven_nodes_are_refused_and_named():
    with pytest.raises(EnvironmentBroken, match=r"node-a has 2, node-b has 1.*--nproc-per-node"):
        Places.of([who(0, 0, 0), who(1, 0, 1), who(2, 1, 0)])


def test_local_ranks_that_do_not_count_from_zero_are_refused():
    with pytest.raises(EnvironmentBroken, match=r"node-b: .*\[1, 2\].* 0 to 1"):
        Places.of([who(0, 0, 0), who(1, 0, 1), who(2, 1, 1), who(3, 1, 2)])
