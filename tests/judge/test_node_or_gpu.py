"""A slow node and a slow GPU are distinguished, and a fleet that is slow throughout is neither."""

from dataclasses import replace

import pytest
from complaints import in_order
from verdicts import LIMITS, all_ranks, bf16, busbw, hold, world_of

from pytest_gpucluster.judge.judge import describe_nodes, judge

NODES = {0: [0, 1, 2, 3], 1: [4, 5, 6, 7], 2: [8, 9, 10, 11]}
HOSTS = {rank: f"gpu-{node}" for node, ranks in NODES.items() for rank in ranks}


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        pytest.param([5], "", id="a GPU"),
        pytest.param([5, 4, 6], "", id="all GPUs of a node but one"),
        pytest.param([7, 4, 5, 6], "all 4 GPUs of gpu-1 (look at the node)", id="a node"),
        pytest.param([0, 7, 4, 5, 6], "all 4 GPUs of gpu-1 (look at the node) and 1 more GPUs", id="a node and a GPU"),
        pytest.param(range(8), "all GPUs of gpu-0 and gpu-1 (look at the nodes)", id="two nodes"),
        pytest.param(range(12), "", id="every rank: no node stands out"),
        pytest.param([], "", id="no rank"),
    ],
)
def test_a_node_is_named_if_all_of_it_is_concerned(ranks, text):
    assert describe_nodes(ranks, nodes=NODES, host_of=HOSTS, noun="GPUs") == text


def test_more_than_two_nodes_are_counted_and_a_single_one_is_no_node_among_others():
    nodes = {node: [2 * node, 2 * node + 1] for node in range(5)}
    assert in_order(describe_nodes(range(8), nodes=nodes, host_of={}, noun="ranks"), "node 0 3 more nodes")
    assert hold(all_ranks(300.0)).message.endswith("ranks: look at what they share"), "none of them is accused"
    assert held({11: 612.0}).message.endswith("on rank 11 (gpu-01, GPU 3 GPU-1f2e)"), "one slow GPU is named alone"


@pytest.mark.parametrize("nodes", [{0: [0, 1]}, {0: [0], 1: [1]}], ids=["one node", "one GPU on each"])
def test_where_node_and_gpu_are_the_same_nothing_is_distinguished(nodes):
    for ranks in ([0, 1], [1]):
        assert describe_nodes(ranks, nodes=nodes, host_of=HOSTS, noun="GPUs") == ""


def held(slow, good=790.0):
    by_rank = {rank: [bf16(slow.get(rank, good))] for rank in range(16)}
    return judge(
        by_rank,
        world=world_of(16),
        node_of={rank: rank // 8 for rank in range(16)},
        limits=LIMITS,
        sku="H100 SXM",
        gpu_name="NVIDIA H100 80GB HBM3",
        host_of={rank: f"gpu-{rank // 8:02}" for rank in range(16)},
    )


def test_a_slow_node_is_named_as_a_node_and_none_of_its_gpus():
    verdict = held({rank: 612.0 + rank for rank in range(8, 16)})
    assert in_order(verdict.message, "matmul.bf16.tflops 620 TFLOPS < 700 TFLOPS 8 GPUs gpu-01")
    assert "rank 8" not in verdict.message
    assert sorted(verdict.measurements[0].misses) == list(range(8, 16))


def test_a_node_behind_the_others_is_named_though_all_its_gpus_keep_the_floor():
    verdict = held(dict.fromkeys(range(8, 16), 705.0))
    assert verdict.outcome == "failed"
    assert in_order(verdict.message, "8 GPUs gpu-01")


def test_a_fleet_that_is_slow_throughout_is_caught_by_the_floor_and_no_node_is_blamed():
    verdict = held({}, good=612.0)
    assert verdict.outcome == "failed"
    assert in_order(verdict.message, "matmul.bf16.tflops 612 TFLOPS < 700 TFLOPS all 16 ranks")
    assert "gpu-0" not in verdict.message
    assert verdict.measurements[0].ratio_to_median == 1.0


@pytest.mark.parametrize(("low", "missed"), [(399.0, range(8, 16)), (300.0, [9])], ids=["at its rate", "alone"])
def test_a_rank_that_misses_the_limit_of_a_collective_does_so_with_those_at_its_rate(low, missed):
    """Each rank times the collective itself: just below the limit some do, and none of them is the culprit."""
    labels = {"size": "1 GB", "world_size": "8", "nnodes": "1"}
    values = dict.fromkeys(range(16), 442.0) | dict.fromkeys(range(8, 16), 401.0) | {9: low}
    by_rank = {rank: [busbw(value, labels=labels)] for rank, value in values.items()}
    floors = tuple(replace(limit, min_ratio_to_median=None) for limit in LIMITS.limits)
    verdict = hold(by_rank, size=16, limits=replace(LIMITS, limits=floors))
    assert sorted(verdict.measurements[0].misses) == [*missed]
    assert ("on all 8 GPUs of" in verdict.message) is (len(missed) == 8)


def test_a_gpu_that_is_far_below_the_others_of_its_node_is_named_whatever_they_miss():
    """They are only a little below the limit, or their values did not settle."""
    low = held({rank: 500.0 if rank == 11 else 699.0 for rank in range(8, 16)})
    assert "on rank 11 (gpu-01, GPU 3 GPU-1f2e), and 7 more ranks" in low.message
    by_rank = {rank: [replace(bf16(730.0), inconclusive="wide")] for rank in range(8)} | {3: [bf16(500.0)]}
    assert hold(by_rank).message.partition("; also")[0].endswith("on rank 3 (gpu-00, GPU 3 GPU-1f2e)")


def test_a_node_is_named_where_some_of_its_gpus_miss_the_limit_in_another_way():
    """Half of them are below the floor, and the others above it but behind the ranks of the other node."""
    verdict = held({rank: 699.0 if rank % 2 else 701.0 for rank in range(8, 16)})
    assert in_order(verdict.message, "699 TFLOPS < 700 TFLOPS all 8 GPUs of gpu-01")
    assert "rank 9" not in verdict.message


def test_the_worst_gpu_is_named_where_a_node_misses_the_limit_too():
    verdict = held({3: 500.0} | dict.fromkeys(range(8, 16), 650.0))
    assert "500 TFLOPS < 700 TFLOPS on rank 3 (gpu-00, GPU 3 GPU-1f2e), and all 8 GPUs of gpu-01" in verdict.message
