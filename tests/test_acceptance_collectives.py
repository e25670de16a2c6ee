"""The criterion nccl.collectives itself, run by torchrun over gloo: what it accepts, and how each fault fails it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torchrun

from pytest_gpucluster.benchmarks.collective_shape import COLLECTIVES

ACCEPTANCE = Path(__file__).parent.parent / "acceptance"
MEASURED = [name for name in COLLECTIVES if name != "all_reduce"]

# What becomes of the data that rank 1 gets, by the test's id.
FAULTS = """
import os, time
import pytest
import torch
from pytest_gpucluster.benchmarks.collectives import CALLS

FAULTS = dict(pair.split("=") for pair in os.environ.get("FAULTS", "").split())
FAULT = None

def pytest_runtest_setup(item):
    global FAULT
    FAULT = FAULTS.get(item.callspec.id)

def faulty(call):
    def carried_out(sent, received, group):
        before = received.clone() if FAULT == "nothing" else None
        call(sent, received, group)
        if FAULT == "slow":
            time.sleep(0.2)
        elif FAULT == "bit":
            received.view(torch.uint8)[3] ^= 16
        elif FAULT == "nan":
            received[1] = float("nan")
        elif FAULT == "nothing":
            received.copy_(before)
    return carried_out

if os.environ["RANK"] == "1":
    for name in CALLS:
        CALLS[name] = faulty(CALLS[name])
"""

CASES = {
    "node-all_gather-fp32": "bit",
    "node-reduce_scatter-fp32": "nan",
    "node-all_to_all-fp32": "slow",
    "node-broadcast-bf16": "nothing",
    "node-send_recv-bf16": "nothing",
}
SMALL = (
    "--gpucluster-workload=nccl.collectives.latency_sizes=16B",
    "--gpucluster-workload=isolation.budget=0s",  # the search for who is to blame has tests of its own
)
RANK_1 = "rank 1 (node-a)"


def run(directory, faults, *options, **settings):
    files = {
        name: (ACCEPTANCE / name).read_text(encoding="utf-8") for name in ("test_collectives.py", "workloads.yaml")
    }
    environment = {"FAULTS": " ".join(f"{name}={fault}" for name, fault in faults.items())}
    return torchrun.torchrun(
        directory, files | {"conftest.py": FAULTS}, *SMALL, *options, environment=environment, **settings
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run with a fault in each collective, and a healthy one on two nodes, at once: the ranks mostly wait."""
    wanted = " or ".join(name.partition("-")[2] for name in CASES)
    with ThreadPoolExecutor(max_workers=2) as pool:
        broken = pool.submit(
            run,
            tmp_path_factory.mktemp("broken"),
            CASES,
            "--gpucluster-workload=nccl.collectives.sizes=64kB",
            f"-k={wanted}",
        )
        healthy = pool.submit(
            run, tmp_path_factory.mktemp("healthy"), {}, "--gpucluster-sizes=64k", "-k=fp32", hosts=("node-a", "node-b")
        )
        return {"broken": broken.result(), "healthy": healthy.result()}


def measured(run, name):
    [result] = [result for result in run.journal.results if result.nodeid.endswith(f"[{name}]")]
    return result


@pytest.mark.parametrize("collective", MEASURED)
@pytest.mark.parametrize(("scope", "ranks", "nodes"), [("node", "2", "1"), ("world", "4", "2")], ids=["node", "world"])
def test_each_collective_is_measured_in_each_node_and_over_all_of_them(runs, scope, ranks, nodes, collective):
    run = runs["healthy"]
    assert run.verdicts[f"test_collective[{scope}-{collective}-fp32]"] == "passed"
    judged = {
        one.metric.removeprefix(f"nccl.{collective}."): one
        for one in measured(run, f"{scope}-{collective}-fp32").measurements
    }
    assert {name: one.status for name, one in judged.items()} == {
        "latency": "recorded",
        "algbw": "recorded",
        "busbw": "passed",
        "average_busbw": "recorded",
    }
    for one in judged.values():
        assert (one.labels["world_size"], one.labels["nnodes"]) == (ranks, nodes)
        assert (one.labels["dtype"], one.labels["transport"]) == ("fp32", "gloo")
        assert len(one.values) == 4, "every rank of the run has its own value"
    assert {judged["latency"].labels["size"], judged["busbw"].labels["size"]} == {"16B", "64 KiB"}
    assert judged["busbw"].limit.min_ratio_to_median == 0.05


def test_the_sizes_of_the_option_are_on_record_as_its_own(runs):
    record = runs["healthy"].journal.workload
    for key in ("nccl.all_reduce.sizes", "nccl.collectives.sizes"):
        assert record.values[key] == "64 KiB"
        assert record.origins[key] == "command line: --gpucluster-sizes 64k"
    assert "nccl.collectives.sizes=64 KiB" in runs["healthy"].output


@pytest.mark.parametrize(
    ("name", "told"),
    [
        (
            "node-all_gather-fp32",
            "all_gather of 16 B fp32 over 2 ranks: 1 of 4 elements are wrong, the first at offset 0:",
        ),
        ("node-reduce_scatter-fp32", "reduce_scatter of 16 B fp32 over 2 ranks: 1 of 2 sums are wrong, the first at "),
        (
            "node-broadcast-bf16",
            "broadcast of 16 B bf16 over 2 ranks: 8 of 8 elements are wrong, the first at offset 0:",
        ),
        (
            "node-send_recv-bf16",
            "send_recv of 16 B bf16 over 2 ranks: 8 of 8 elements are wrong, the first at offset 0:",
        ),
    ],
    ids=["all_gather", "reduce_scatter", "broadcast", "send_recv"],
)
def test_wrong_data_on_one_rank_reject_and_name_the_rank_the_element_and_whose_it_is(runs, name, told):
    run = runs["broken"]
    found = run.verdicts[f"test_collective[{name}]"]
    assert found.startswith(f"failure: {RANK_1}: WrongResult: rank 1: ")
    body = run.body(f"test_collective[{name}]")
    assert told in body
    assert ", which rank " in body
    assert list(measured(run, name).culprits) == [1]


def test_a_slow_rank_misses_the_shipped_limit(runs):
    found = runs["broken"].verdicts["test_collective[node-all_to_all-fp32]"]
    assert found.startswith("failure: nccl.all_to_all.busbw 0.000")
    assert " < 0.001 GB/s" in found
    assert runs["broken"].end[:2] == ("REJECTED", 1)
