"""The criterion nccl.all_reduce itself, run by torchrun over gloo: what it accepts, and how each fault fails it."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torchrun

ROOT = Path(__file__).parent.parent
ACCEPTANCE = ROOT / "acceptance"

# What rank 1's fabric does to a sum that all ranks have made.
FAULTS = """
import os, time
from pathlib import Path
import pytest
import torch
import torch.distributed as dist
from pytest_gpucluster.benchmarks import collectives
from pytest_gpucluster.nccl_log import NcclLog

FAULTS = dict(pair.split("=") for pair in os.environ.get("FAULTS", "").split())
FAULT = None

def pytest_runtest_setup(item):
    global FAULT
    FAULT = FAULTS.get(item.callspec.id)

def faulty(tensor, group):
    dist.all_reduce(tensor, group=group)
    if FAULT == "slow":
        time.sleep(0.1)
    elif FAULT == "bit":
        tensor.view(torch.uint8)[3] ^= 16
    elif FAULT == "nan":
        tensor[1] = float("nan")
    elif FAULT == "noisy" and int(time.monotonic() / 0.15) % 2:
        time.sleep(0.01)

if os.environ["RANK"] == "1":
    collectives._sum = faulty

@pytest.fixture(autouse=True, scope="session")
def log_as_of_nccl(cluster):
    path = Path(os.environ["TMPDIR"], f"{os.getpid()}.log")
    path.write_text("NCCL INFO something\\n" * 3)
    cluster.nccl_log = NcclLog(path)
"""

OPTIONS = (
    "--gpucluster-workload=nccl.all_reduce.sizes=64kB",
    "--gpucluster-workload=nccl.all_reduce.latency_sizes=8B",
    "--gpucluster-workload=isolation.budget=0s",  # the search for who is to blame has tests of its own
)
RANK_1 = "rank 1 (node-a)"
CASES = {
    "wrong": ("node-bf16=bit node-fp32=nan",),
    "slow": (
        "node-bf16=noisy node-fp32=slow",
        "--gpucluster-workload=nccl.all_reduce.tolerance=5%",
        "--gpucluster-workload=nccl.all_reduce.longest=0.3s",
    ),
}


def files():
    names = ("test_nccl.py", "workloads.yaml")
    return {name: (ACCEPTANCE / name).read_text(encoding="utf-8") for name in names} | {"conftest.py": FAULTS}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs with two faults each, at once: the ranks mostly wait."""

    def run(case):
        faults, *options = CASES[case]
        environment = {"FAULTS": faults}
        directory = tmp_path_factory.mktemp(case)
        return torchrun.torchrun(directory, files(), *OPTIONS, "-k=node", *options, environment=environment)

    with ThreadPoolExecutor(max_workers=2) as pool:
        return dict(zip(CASES, pool.map(run, CASES), strict=True))


@pytest.fixture(scope="module")
def healthy(tmp_path_factory):
    """Two nodes with two ranks each, without a fault."""
    directory = tmp_path_factory.mktemp("healthy")
    return torchrun.torchrun(directory, files(), *OPTIONS, "-k=fp32", ranks=2, hosts=("node-a", "node-b"))


def measured(run, name):
    [result] = [result for result in run.journal.results if result.nodeid.endswith(f"[{name}]")]
    return result


@pytest.mark.parametrize(
    ("scope", "ranks", "nodes"),
    [("gpu", "1", "1"), ("node", "2", "1"), ("world", "4", "2")],
    ids=["gpu", "node", "world"],
)
def test_one_gpu_one_node_and_the_world_are_measured_side_by_side(healthy, scope, ranks, nodes):
    assert healthy.verdicts[f"test_all_reduce[{scope}-fp32]"] == "passed"
    judged = measured(healthy, f"{scope}-fp32").measurements
    for one in judged:
        assert (one.labels["world_size"], one.labels["nnodes"]) == (ranks, nodes)
        assert (one.labels["dtype"], one.labels["transport"]) == ("fp32", "gloo")
        assert len(one.values) == 4, "every rank of the run has its own value"
    names = {one.metric.removeprefix("nccl.all_reduce."): one for one in judged}
    assert set(names) == {"latency", "algbw"} | (set() if scope == "gpu" else {"busbw", "average_busbw"})
    assert names["latency"].labels["size"] == "8B"
    assert names["algbw"].labels["size"] == "64kB"
    if scope != "gpu":
        assert (names["busbw"].status, names["average_busbw"].status) == ("passed", "recorded")
    if scope == "world":
        assert len(set(names["average_busbw"].values.values())) == 1


def test_what_carried_the_data_is_on_record_with_the_test(healthy):
    assert ("nccl.transport", "gloo") in map(tuple, measured(healthy, "world-fp32").properties)


@pytest.mark.parametrize("run", ["healthy", "wrong"])
def test_every_ranks_log_lies_in_the_tests_folder_however_the_test_ends(healthy, runs, run):
    run, ranks, name = (healthy, 4, "node-fp32") if run == "healthy" else (runs["wrong"], 2, "node-fp32")
    [folder] = (run.directory / "reports" / "latest" / "artifacts").glob(f"*{name}*")
    kept = {path.name: path.read_text() for path in folder.iterdir()}
    assert set(kept) == {f"nccl-rank-{rank}.log" for rank in range(ranks)}
    assert all(text.startswith("NCCL INFO something\n(2 lines left out here") for text in kept.values())


def test_a_slow_rank_misses_the_shipped_limit_and_is_named(runs):
    found = runs["slow"].verdicts["test_all_reduce[node-fp32]"]
    assert found.startswith("failure: nccl.all_reduce.busbw 0.00")
    assert " < 0.001 GB/s" in found
    assert RANK_1 in found
    assert runs["slow"].end[:2] == ("REJECTED", 1)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("node-bf16", "8 B bf16 over 2 ranks: 1 of 4 sums are wrong, the first at offset 1: found "),
        (
            "node-fp32",
            "8 B fp32 over 2 ranks: 1 of 2 sums are wrong, the first at offset 1: found nan, expected ",
        ),
    ],
    ids=["flipped bit", "nan"],
)
def test_a_wrong_sum_on_one_rank_rejects_and_names_rank_and_element(runs, name, told):
    run = runs["wrong"]
    found = run.verdicts[f"test_all_reduce[{name}]"]
    assert found.startswith(f"failure: {RANK_1}: WrongResult: rank 1: all_reduce of ")
    assert told in run.body(f"test_all_reduce[{name}]")
    assert list(measured(run, name).culprits) == [1]
    assert run.end[:2] == ("REJECTED", 1)


def test_a_noisy_series_is_inconclusive_and_that_is_no_pass(runs):
    run = runs["slow"]
    assert run.verdicts["test_all_reduce[node-bf16]"] != "passed"
    [busbw] = [one for one in measured(run, "node-bf16").measurements if one.metric == "nccl.all_reduce.busbw"]
    assert "5 % is allowed" in busbw.inconclusive
    assert busbw.status == "failed"


def collected(*arguments):
    command = [sys.executable, "-m", "pytest", "acceptance", "--collect-only", "-q", "--gpucluster-device=cpu"]
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST_", "GPUCLUSTER_"))}
    listed = subprocess.run(
        [*command, "-p", "no:cacheprovider", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env=environment,
    )
    return {line for line in listed.stdout.splitlines() if "::" in line}


@pytest.mark.parametrize("option", ["-k", "-m"])
def test_the_keyword_and_the_marker_nccl_select_what_measures_collectives_and_what_is_named_so(option):
    found = collected(option, "nccl")
    all_reduce = {f"{scope}-{dtype}" for scope in ("gpu", "node", "world") for dtype in ("bf16", "fp32")}
    others = {
        f"{scope}-{collective}-{dtype}"
        for scope in ("node", "world")
        for collective in ("all_gather", "reduce_scatter", "all_to_all", "broadcast", "send_recv")
        for dtype in ("bf16", "fp32")
    }
    measured = {f"acceptance/test_nccl.py::test_all_reduce[{name}]" for name in all_reduce}
    measured |= {f"acceptance/test_collectives.py::test_collective[{name}]" for name in others}
    measured |= {"acceptance/test_scaling.py::test_busbw_retention"}
    assert measured <= found
    # What NCCL is told by its environment belongs to it, but measures nothing of it.
    assert {name.partition("::")[0] for name in found - measured} <= {"acceptance/test_nccl_environment.py"}
