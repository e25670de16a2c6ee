"""The criteria of scaling themselves, run by torchrun over gloo: what they accept, and how each fault fails them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torchrun

ACCEPTANCE = Path(__file__).parent.parent / "acceptance"
NODES = ("node-a", "node-b")

# What can go wrong with four ranks on two nodes, each put in the place of one of the product's own pieces. The file
# that a test is in says which one.
FAULTS = """
import math, os, time
from dataclasses import replace
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from pytest_gpucluster.benchmarks import collectives
from pytest_gpucluster.benchmarks.training import throughput
from pytest_gpucluster.benchmarks.training.step import PARTS, token_mean
from pytest_gpucluster.benchmarks.training.throughput import PIECES

RANK = int(os.environ["RANK"])
SUM = collectives._sum
SECONDS = 0.3

def delayed(batches):
    for rows in batches:
        time.sleep(SECONDS)
        yield rows

def slow_rank(*arguments, **more):
    batches = PIECES.batches(*arguments, **more)
    return delayed(batches) if RANK == 3 else batches

def slow_alone(*arguments, count, **more):
    batches = PIECES.batches(*arguments, count=count, **more)
    return delayed(batches) if count == 1 else batches

def slow_hook(group, bucket):
    time.sleep(SECONDS)
    return allreduce_hook(group, bucket)

def slow_fabric(model, device, group):
    replica = PIECES.replicate(model, device, group)
    if dist.get_world_size(group) == 4:
        replica.register_comm_hook(group, slow_hook)
    return replica

def slow_sum(tensor, group):
    if dist.get_world_size(group) == 4:
        time.sleep(SECONDS / 3)
    SUM(tensor, group)

def nan(*given):
    return token_mean(*given) * (math.nan if RANK == 3 else 1.0)

FOUND = {
    "none": PIECES,
    "rank": replace(PIECES, batches=slow_rank),
    "fabric": replace(PIECES, replicate=slow_fabric),
    "alone": replace(PIECES, batches=slow_alone),
    "nan": replace(PIECES, step=replace(PARTS, loss=nan)),
}

# What says nothing of a fault takes its time all the same.
NEEDLESS = {
    "rank": ("test_scaling[fabric]", "test_busbw_retention"),
    "nan": ("test_scaling[node]", "test_scaling[fabric]"),
    "alone": ("test_stragglers", "test_scaling[fabric]", "test_scaling[total]", "test_busbw_retention"),
}

def pytest_collection_modifyitems(items):
    items[:] = [item for item in items if item.name not in NEEDLESS.get(fault_of(item), ())]

def fault_of(item):
    return item.path.stem.removeprefix("test_scaling_")

def pytest_runtest_setup(item):
    fault = fault_of(item)
    throughput.PIECES = FOUND[fault]
    collectives._sum = slow_sum if fault == "fabric" else SUM
"""

# Between what the faults do and what a busy machine does.
LIMITS = """
schema_version: 1
skus:
  cpu-rehearsal:
    limits:
      scaling.efficiency: {min: 30 %, max: 300 %, source: a test}
      scaling.busbw_retention: {min: 10 %, source: a test}
      scaling.tokens_per_second: {min: 1 tokens/s, min_ratio_to_median: 50 %, source: a test}
"""

KINDS = ("test_scaling[node]", "test_scaling[fabric]", "test_scaling[total]")
TESTS = ("test_stragglers", *KINDS, "test_busbw_retention")


def start(directory, *faults, options=(), **settings):
    text = (ACCEPTANCE / "test_scaling.py").read_text(encoding="utf-8")
    files = {f"test_scaling_{fault}.py": text for fault in faults}
    files |= {"workloads.yaml": (ACCEPTANCE / "workloads.yaml").read_text(encoding="utf-8"), "conftest.py": FAULTS}
    files |= {"limits.yaml": LIMITS}
    run = torchrun.start(
        directory,
        files,
        "--gpucluster-workload=nccl.all_reduce.sizes=1MB",
        # The faults take their time, and what does not settle meanwhile is not what is tried here.
        "--gpucluster-workload=scaling.tolerance=300%",
        *options,
        **settings,
        deadline=120.0,
    )
    run.deadline = 400.0
    return run.wait()


HUGE = [f"--gpucluster-workload=scaling.{key}" for key in ("layers=1000", "width=65536")]
RUNS = {
    "faulty": (
        ("rank", "fabric", "alone", "nan"),
        {"options": ["--gpucluster-thresholds=limits.yaml"], "hosts": NODES},
    ),
    "healthy": (("none",), {"hosts": NODES}),
    "one rank a node": (("none",), {"hosts": NODES, "ranks": 1}),
    "one node": (("none",), {"options": HUGE}),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """All runs, two at once: of the faults most is waiting."""

    def run(name):
        faults, settings = RUNS[name]
        return start(tmp_path_factory.mktemp(name.replace(" ", "-")), *faults, **settings)

    with ThreadPoolExecutor(max_workers=2) as pool:
        return dict(zip(RUNS, pool.map(run, RUNS), strict=True))


@pytest.fixture(scope="module")
def healthy(runs):
    """Two nodes with two ranks each, without a fault, held against the shipped limits."""
    return runs["healthy"]


@pytest.fixture(scope="module")
def faulty(runs):
    """The same with one fault after the other, held against stricter limits."""
    return runs["faulty"]


def result(run, fault, test):
    [found] = [one for one in run.journal.results if one.nodeid == f"test_scaling_{fault}.py::{test}"]
    return found


def measured(run, fault, test, metric="scaling.efficiency"):
    [found] = [one for one in result(run, fault, test).measurements if one.metric == metric]
    return found


def test_two_healthy_nodes_are_accepted(healthy):
    assert healthy.verdicts == dict.fromkeys(TESTS, "passed")
    assert healthy.end[:2] == ("REHEARSED", 0)
    assert healthy.left_over == []


@pytest.mark.parametrize(("kind", "sizes"), [("node", ("2", "1")), ("fabric", ("4", "2")), ("total", ("4", "1"))])
def test_each_ratio_says_what_stands_over_what(healthy, kind, sizes):
    one = measured(healthy, "none", f"test_scaling[{kind}]")
    assert (one.labels["kind"], one.labels["group_size"], one.labels["over"]) == (kind, *sizes)
    assert (one.labels["batch"], one.labels["tokens_per_gpu_and_step"]) == ("4", "128")
    assert len(one.values) == 4
    assert len(set(one.values.values())) == 1, "every rank has come to the same ratio"
    assert all(low <= one.value <= high for low, high in one.intervals.values())


def test_the_ratios_are_of_the_rates_on_record(healthy):
    def recorded(test, size):
        return next(
            one.values
            for one in result(healthy, "none", test).measurements
            if one.metric == "scaling.tokens_per_second" and one.labels["group_size"] == size
        )

    alone, world = recorded("test_stragglers", "1"), recorded("test_scaling[total]", "4")
    assert recorded("test_scaling[node]", "1") == alone, "one pass serves several ratios"
    middle = sum(sorted(alone.values())[1:3]) / 2
    assert measured(healthy, "none", "test_scaling[total]").value == pytest.approx(min(world.values()) / middle)


def test_a_slow_rank_is_named_as_a_straggler_and_lowers_the_ratios(faulty):
    found = result(faulty, "rank", "test_stragglers")
    assert found.outcome == "failed"
    assert 3 in found.culprits
    one = measured(faulty, "rank", "test_stragglers", "scaling.tokens_per_second")
    assert one.worst_rank == 3
    assert min(one.values, key=one.values.get) == 3
    [table] = (faulty.directory / "reports" / "latest" / "artifacts").glob("*scaling_rank*/stragglers.csv")
    rows = [row.split(",") for row in table.read_text().splitlines()[1:]]
    assert rows[0][:2] == ["3", "node-b"]
    assert len(rows) == 4
    for kind in ("node", "total"):
        assert result(faulty, "rank", f"test_scaling[{kind}]").outcome == "failed"
        assert measured(faulty, "rank", f"test_scaling[{kind}]").value < 0.5


def test_a_slow_network_between_nodes_lowers_what_goes_over_it_only(faulty):
    outcomes = {test: result(faulty, "fabric", test).outcome for test in TESTS}
    assert outcomes["test_scaling[fabric]"] == outcomes["test_scaling[total]"] == "failed"
    assert outcomes["test_busbw_retention"] == "failed"
    values = {kind: measured(faulty, "fabric", f"test_scaling[{kind}]").value for kind in ("node", "fabric", "total")}
    assert values["node"] > 3 * values["fabric"]
    assert result(faulty, "fabric", "test_scaling[fabric]").message.startswith("scaling.efficiency 0.")


def test_a_ratio_that_is_too_good_is_not_accepted(faulty):
    assert result(faulty, "alone", "test_scaling[node]").outcome == "failed"
    assert measured(faulty, "alone", "test_scaling[node]").value > 1.5


@pytest.mark.parametrize("test", ["test_stragglers", "test_scaling[total]"])
def test_a_training_that_goes_wrong_has_no_ratio(faulty, test):
    found = result(faulty, "nan", test)
    assert found.outcome == "failed"
    assert 3 in found.culprits
    assert "WrongResult" in found.message
    assert "rank 3 has a loss of nan" in found.text


def test_the_run_goes_on_after_each_fault_and_ends_in_a_rejection(faulty):
    assert faulty.end[:2] == ("REJECTED", 1)
    assert faulty.left_over == []
    assert result(faulty, "nan", "test_busbw_retention").outcome in ("passed", "failed")


def test_with_one_rank_a_node_the_ratio_of_a_node_is_not_run_and_says_why(runs):
    run = runs["one rank a node"]
    skipped = dict.fromkeys(
        ("test_scaling[node]", "test_busbw_retention"), "skipped: needs 2 ranks on each node, and there is 1"
    )
    assert run.verdicts == dict.fromkeys(TESTS, "passed") | skipped
    assert run.end[:2] == ("REHEARSED", 0)


def test_on_one_node_and_with_a_model_that_fits_nowhere_nothing_is_run_and_says_why(runs):
    verdicts = dict(runs["one node"].verdicts)
    for test in TESTS[2:]:
        assert verdicts.pop(test) == "skipped: needs 2 nodes, and there is 1"
    assert set(verdicts) == set(TESTS[:2])
    for told in verdicts.values():
        assert told.startswith("skipped: ")
        assert "parameters with 128 tokens a step: needs about" in told
        assert "take a smaller batch or model (--gpucluster-workload scaling.batch=4)" in told
