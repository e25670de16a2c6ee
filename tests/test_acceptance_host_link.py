"""The criterion host_link itself, run by torchrun on the CPU: what it accepts, and how a fault fails it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torchrun

ACCEPTANCE = Path(__file__).parent.parent / "acceptance"

# A link whose copies take a millisecond on a busy machine too, and what rank 1's does wrong, by test and its id.
FAULTS = """
import os, time
import pytest
import torch
from pytest_gpucluster.benchmarks import host_link, host_link_memory, host_link_together
from pytest_gpucluster.benchmarks.host_link_copies import Copier

FAULTS = dict(pair.split("=") for pair in os.environ["FAULTS"].split()) if os.environ["RANK"] == "1" else {}
FAULT, CALLS = None, 0
nodes_of = host_link_memory.nodes_of

def pytest_runtest_setup(item):
    global FAULT, CALLS
    case = getattr(item, "callspec", None)
    FAULT, CALLS = FAULTS.get(f"{item.originalname.removeprefix('test_host_')}-{case.id}") if case else None, 0
    host_link_memory.nodes_of = (lambda address: {0: 1.0}) if FAULT == "far" else nodes_of

class Faulty(Copier):
    def copy(self, direction, source, target):
        global CALLS
        super().copy(direction, source, target)
        CALLS += 1
        time.sleep(0.03 if FAULT == "slow" else 0.001)
        if FAULT == "bit" and CALLS == 5:
            target.view(torch.uint8)[40] ^= 16

host_link.Copier = host_link_together.Copier = Faulty

if os.environ["RANK"] == "1":
    import test_host_link
    from pytest_gpucluster.affinity import Place

    # Its GPU is near node 7, which is not where its memory is.
    test_host_link.place_of_gpu = lambda pci: Place(cpus=frozenset(), nodes=frozenset({7})) if FAULT == "far" else None
"""

OPTIONS = tuple(
    f"--gpucluster-workload=host_link.{setting}"
    for setting in ("size=64KiB", "copies=4", "warmup=0.02s", "window=0.1s", "longest=0.3s")
)
RANK_1 = "rank 1 (node-a)"
CASES = "link-h2d=bit link-d2h=slow link-both=far links_together-h2d=bit links_together-d2h=slow"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    names = ("test_host_link.py", "workloads.yaml")
    files = {name: (ACCEPTANCE / name).read_text(encoding="utf-8") for name in names} | {"conftest.py": FAULTS}
    return torchrun.torchrun(tmp_path_factory.mktemp("faulty"), files, *OPTIONS, environment={"FAULTS": CASES})


@pytest.fixture(scope="module")
def healthy(tmp_path_factory):
    names = ("test_host_link.py", "test_host.py", "workloads.yaml")
    files = {name: (ACCEPTANCE / name).read_text(encoding="utf-8") for name in names} | {"conftest.py": FAULTS}
    return torchrun.torchrun(tmp_path_factory.mktemp("healthy"), files, *OPTIONS, environment={"FAULTS": ""})


def result(run, name):
    [found] = [each for each in run.journal.results if each.nodeid.endswith(f"::{name}")]
    return found


def test_a_healthy_node_passes_and_each_rank_has_its_rate_in_each_mode(healthy):
    assert set(healthy.verdicts.values()) == {"passed"}, healthy.output
    seen = {
        (one.metric.split(".")[1], one.labels["mode"], one.labels["size"])
        for each in healthy.journal.results
        for one in each.measurements
        if one.metric.startswith("host_link")
    }
    ways = {(direction, mode) for direction in ("h2d", "d2h") for mode in ("alone", "both", "together")}
    assert seen == {(*way, "64 KiB") for way in ways}
    for each in healthy.journal.results:
        for one in each.measurements:
            ranks = {0} if one.metric.startswith("host.") else {0, 1}
            assert set(map(int, one.values)) == ranks, "one rank of a node tells of its host, all of their links"
            if one.metric.startswith("host_link"):
                assert "NUMA node" in one.telemetry[0]["memory"]


@pytest.mark.parametrize(
    ("test", "told"),
    [
        ("test_host_link[h2d]", "WrongResult: cpu: host link h2d, "),
        ("test_host_links_together[h2d]", "WrongResult: cpu: host link h2d together, "),
    ],
)
def test_wrong_data_reject_and_name_rank_and_copy(run, test, told):
    assert run.verdicts[test].startswith(f"failure: {RANK_1}: {told}")
    assert "h2d copy 4: 1 of 8192 8-byte words are wrong, first at byte 40" in run.verdicts[test]
    assert list(result(run, test).culprits) == [1]
    assert run.end[:2] == ("REJECTED", 1)


@pytest.mark.parametrize(
    ("test", "metric"),
    [("test_host_link[d2h]", "host_link.d2h.bandwidth"), ("test_host_links_together[d2h]", "host_link.d2h.bandwidth")],
)
def test_a_slow_link_misses_the_limit_and_is_named(run, test, metric):
    assert run.verdicts[test].startswith(f"failure: {metric} 0.00")
    assert RANK_1 in run.verdicts[test]


def test_memory_that_is_not_beside_the_gpu_is_an_error_that_says_so(run):
    assert run.verdicts["test_host_link[both]"].startswith(f"error: {RANK_1}: EnvironmentBroken: ")
    assert "0 % of the host memory of rank 1 lay on NUMA node 7" in run.body("test_host_link[both]")
