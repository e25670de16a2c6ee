"""The criteria nccl.all_reduce, nccl.collectives and links themselves, over several nodes: what they accept, and how a
link, a rail or a node that is slow or wrong fails them.

Two nodes of two ranks each: ranks 0 and 1, 2 and 3; across nodes 0 and 2 are on rail 0, 1 and 3 on rail 1. In planted
time.
"""

import json
import re

import pytest
from each import of_each
from planted_runs import artifacts_of, measured, result_of, run_planted

from pytest_gpucluster.benchmarks.collective_payload import COLLECTIVES

WITHIN, ACROSS = "links_within_node", "links_across_nodes"
MEASURED = [name for name in COLLECTIVES if name != "all_reduce"]
SCOPES = {"gpu": ("1", "1"), "node": ("2", "1"), "world": ("4", "2")}
"""Scope -> ranks and nodes."""
PLAN = {
    "nccl": {f"test_all_reduce[{scope}-fp32]": "" for scope in SCOPES},
    "collectives": {f"test_collective[{scope}-{name}-fp32]": "" for scope in ("node", "world") for name in MEASURED},
    "links__right": {f"test_{WITHIN}": "", f"test_{ACROSS}": ""},
    "links__pairs": {f"test_{WITHIN}": "slow:2-3", f"test_{ACROSS}": "wrong:3>1"},
    "links__rails": {f"test_{WITHIN}": "wrong:1>0", f"test_{ACROSS}": "slow:1-3"},
}
THREE_NODES = {"links": {f"test_{WITHIN}": "", f"test_{ACROSS}": "slow-node:2"}}
OPTIONS = (
    "--gpucluster-workload=nccl.all_reduce.sizes=64 KiB",
    "--gpucluster-workload=nccl.collectives.sizes=64 KiB",
    "--gpucluster-workload=nccl.all_reduce.latency_sizes=8B",
    "--gpucluster-workload=nccl.collectives.latency_sizes=16B",
    "--gpucluster-workload=links.size=16kB",
    "--gpucluster-workload=links.round=0.05s",
)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Two nodes of two ranks each, and all faults one after the other."""
    directory = tmp_path_factory.mktemp("links")
    return run_planted(directory, PLAN, "on_devices", *OPTIONS, ranks=2, hosts=("node-a", "node-b"))


@pytest.fixture(scope="module")
def three_nodes(tmp_path_factory):
    """An odd number of nodes, of one rank each; all links of one of them are slow."""
    directory, hosts = tmp_path_factory.mktemp("three"), ("node-a", "node-b", "node-c")
    return run_planted(directory, THREE_NODES, "on_devices", *OPTIONS, ranks=1, hosts=hosts)


def test_the_run_goes_on_after_each_fault_and_nothing_is_left_over(run, three_nodes):
    healthy = [(copy, test.removeprefix("test_")) for copy, tests in PLAN.items() for test in tests if not tests[test]]
    assert {case: result_of(run, *case).outcome for case in healthy} == dict.fromkeys(healthy, "passed")
    for each in (run, three_nodes):
        assert each.end[:2] == ("REJECTED", 1)
        assert each.left_over == []


# ---- collectives -----------------------------------------------------------------------------------------------------


@of_each("scope", list(SCOPES))
def test_one_gpu_one_node_and_the_world_are_measured_side_by_side(run, scope):
    found = result_of(run, "nccl", f"all_reduce[{scope}-fp32]")
    for one in found.measurements:
        assert (one.labels["world_size"], one.labels["nnodes"]) == SCOPES[scope]
        assert (one.labels["dtype"], one.labels["transport"]) == ("fp32", "gloo")
        assert len(one.values) == 4, "every rank of the run has its own value"
    names = {metric.removeprefix("nccl.all_reduce."): one for metric, one in measured(found).items()}
    assert set(names) == {"latency", "algbw"} | (set() if scope == "gpu" else {"busbw", "average_busbw"})
    assert (names["latency"].labels["size"], names["algbw"].labels["size"]) == ("8B", "64 KiB")
    if scope != "gpu":
        assert (names["busbw"].status, names["average_busbw"].status) == ("passed", "recorded")
    if scope == "world":
        assert [len(set(names[name].values.values())) for name in ("algbw", "average_busbw")] == [4, 1]
    assert dict(found.properties)["nccl.transport"] == "gloo"
    kept = artifacts_of(run, "nccl", f"all_reduce[{scope}-fp32]")
    assert set(kept) == {f"nccl-rank-{rank}.log" for rank in range(4)}


@of_each("case", [(scope, name) for scope in ("node", "world") for name in MEASURED])
def test_each_collective_is_measured_in_each_node_and_over_all_of_them(run, case):
    scope, collective = case
    found = measured(result_of(run, "collectives", f"collective[{scope}-{collective}-fp32]"))
    judged = {metric.removeprefix(f"nccl.{collective}."): one for metric, one in found.items()}
    assert {name: one.status for name, one in judged.items()} == {
        "latency": "recorded",
        "algbw": "recorded",
        "busbw": "passed",
        "average_busbw": "recorded",
    }
    for one in judged.values():
        assert (one.labels["world_size"], one.labels["nnodes"]) == SCOPES[scope]
        assert (one.labels["dtype"], one.labels["transport"]) == ("fp32", "gloo")
        assert len(one.values) == 4, "every rank of the run has its own value"
    assert {judged["latency"].labels["size"], judged["busbw"].labels["size"]} == {"16B", "64 KiB"}
    assert judged["busbw"].limit.min_ratio_to_median == 0.05


# ---- links -----------------------------------------------------------------------------------------------------------


@of_each("case", [(WITHIN, "node", "2", "1"), (ACROSS, "world", "4", "2")])
def test_every_rank_has_a_bandwidth_and_a_ratio(run, case):
    name, scope, world_size, nnodes = case
    judged = measured(result_of(run, "links__right", name))
    assert set(judged) == {"link.bandwidth", "link.ratio_to_median"}
    expected = {"scope": scope, "world_size": world_size, "nnodes": nnodes, "size": "16kB", "transport": "gloo"}
    for one in judged.values():
        assert len(one.values) == 4
        assert expected.items() <= one.labels.items()
        assert one.status == "passed"


def test_the_matrix_lies_in_the_tests_folder_and_in_the_journal(run):
    kept = artifacts_of(run, "links__right", WITHIN)
    body = json.loads(kept["links-node.json"])
    assert {tuple(row[:2]) for row in body["readings"]} == {(0, 1), (1, 0), (2, 3), (3, 2)}
    assert body["culprits"] == []
    assert "node-b, GB/s, " in kept["links-node.txt"]
    across = json.loads(dict(result_of(run, "links__right", ACROSS).properties)["links.matrix"])
    assert {tuple(row[:2]) for row in across["readings"]} == {(0, 2), (2, 0), (1, 3), (3, 1)}


def test_of_all_ranks_the_first_alone_shows_how_far_it_is(three_nodes):
    lines = [line for line in three_nodes.output.splitlines() if line.startswith(f"test_{ACROSS}: step ")]
    assert len([line for line in lines if re.search(r"step (\d+) of \1$", line)]) == 1, lines


def test_a_slow_link_in_a_node_rejects_both_ends_and_nobody_else(run):
    found = result_of(run, "links__pairs", WITHIN)
    named = r"ranks 2-3: HardwareFault: .* rank 2 \(node-b\) and rank 3 \(node-b\): 0\.000"
    assert re.match(named, found.message), found.message
    assert list(found.culprits) == [2, 3]
    ratio = measured(found)["link.ratio_to_median"]
    assert ratio.status == "failed"
    assert ratio.values[2] < 0.02 < ratio.values[0]
    assert "slow by itself" in found.text
    assert "  rank 2 (node-b) to rank 3 (node-b): 0.000" in found.text


def test_wrong_data_across_nodes_reject_and_tell_who_sent_what_to_whom(run):
    found = result_of(run, "links__pairs", ACROSS)
    named = r"ranks 1, 3: WrongResult: .* rank 1 \(node-a\) and rank 3 \(node-b\): wrong data: 1 of "
    assert re.match(named, found.message), found.message
    assert re.search("from rank 3 to rank 1 .* byte 136: found 0x", found.text)
    assert list(found.culprits) == [1, 3]


def test_a_slow_rail_between_two_nodes_is_told_apart_from_the_other_one(run):
    found = result_of(run, "links__rails", ACROSS)
    assert re.match(r"ranks 1, 3: HardwareFault: .* rank 1 \(node-a\) and", found.message), found.message
    assert list(found.culprits) == [1, 3]
    kept = artifacts_of(run, "links__rails", ACROSS)
    assert "rail 1, GB/s" in kept["links-world.txt"]
    # Both rails were measured once more, one after the other.
    alone = json.loads(kept["links-world.json"])["alone"]
    assert {tuple(row[:2]) for row in alone} == {(0, 2), (2, 0), (1, 3), (3, 1)}


def test_one_wrong_word_in_a_node_rejects_although_all_links_are_fast(run):
    found = result_of(run, "links__rails", WITHIN)
    assert re.match(r"ranks 0-1: WrongResult: .* rank 0 \(node-a\) and rank", found.message), found.message
    assert {one.status for one in found.measurements} == {"passed"}


def test_of_three_nodes_the_slow_one_is_named_and_not_those_that_wait_for_it(three_nodes):
    found = result_of(three_nodes, "links", ACROSS)
    assert re.match(r"rank 2 \(node-c\): HardwareFault: .* node-c: all its 2 links,", found.message), found.message
    assert list(found.culprits) == [2]
    ratio = measured(found)["link.ratio_to_median"]
    assert ratio.worst_rank == 2
    assert min(ratio.values[0], ratio.values[1]) > 0.005 > ratio.values[2]
    within = result_of(three_nodes, "links", WITHIN)
    assert (within.outcome, within.message.startswith("needs 2 ranks ")) == ("skipped", True)
