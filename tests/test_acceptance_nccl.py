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
from pytest_gpucluster.cluster import Cluster
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
    path.write_text(os.environ.get("NCCL_SAYS", "NCCL INFO something\\n" * 3))
    cluster.nccl_log = NcclLog(path)

if "NCCL_SAYS" in os.environ:
    read = Cluster.carried_by

    def carried_by(self, group):  # what is asked after the measurement, as on GPUs
        self.backend = "nccl"
        try:
            return read(self, group)
        finally:
            self.backend = "gloo"

    Cluster.carried_by = carried_by
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


SOCKETS = """\
node-a:1:2 [0] NCCL INFO NCCL_SOCKET_IFNAME set by environment to eth0
node-a:1:2 [0] NCCL INFO NET/IB : No device found.
node-a:1:2 [0] NCCL INFO NET/Socket : Using [0]eth0:10.0.0.4<0>
node-a:1:2 [0] NCCL INFO Using network Socket
node-a:1:9 [0] NCCL INFO Channel 00/0 : 1[0] -> 0[0] [receive] via NET/Socket/0
node-a:1:9 [0] NCCL INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/Socket/0
node-a:1:2 [0] NCCL INFO AllReduce: 64000 Bytes -> Algo RING proto LL channel{Lo..Hi}={0..0}
"""
OVER_INFINIBAND = """
schema_version: 1
skus:
  cpu-rehearsal:
    limits:
      nccl.all_reduce.busbw: {min: 1 kB/s, source: planted, expect_transport: NET/IB}
"""


@pytest.mark.parametrize("known", [True, False], ids=["known", "not known"])
def test_a_silent_fall_back_to_sockets_fails_with_the_reason_in_the_log(tmp_path, known):
    run = torchrun.torchrun(
        tmp_path,
        files() | {"limits.yaml": OVER_INFINIBAND},
        *OPTIONS,
        "--gpucluster-thresholds=limits.yaml",
        "-k=world-fp32",
        ranks=1,
        hosts=("node-a", "node-b"),
        environment={"NCCL_SAYS": SOCKETS if known else "NCCL INFO something\n"},
    )
    found = run.verdicts["test_all_reduce[world-fp32]"]
    told = dict(map(tuple, measured(run, "world-fp32").properties))
    if not known:  # then it is no fault of the fabric, and no pass
        assert found.startswith("error: nccl.all_reduce.busbw"), run.output
        assert "transport not known: rank 0: NCCL's log has no line about a connection" in run.body(
            "test_all_reduce[world-fp32]"
        )
        return
    assert found.startswith("failure: nccl.all_reduce.busbw: NET/Socket carries it, expected is NET/IB"), run.output
    why = "NCCL has found no InfiniBand device; NCCL_SOCKET_IFNAME=eth0 is set; sockets go over eth0"
    assert why in run.body("test_all_reduce[world-fp32]")
    assert (told["nccl.transport"], told["nccl.why"]) == ("NET/Socket", why)
    assert told["nccl.algorithms"] == "64000 B: Ring LL"
    assert run.end[:2] == ("REJECTED", 1)


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
    assert run.verdicts["test_all_reduce[node-bf16]"].startswith("skipped: too slow to rehearse here: ")
    [busbw] = [one for one in measured(run, "node-bf16").measurements if one.metric == "nccl.all_reduce.busbw"]
    assert "5 % is allowed" in busbw.inconclusive
    assert busbw.status == "recorded"


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
