"""The criterion fabric.ports itself: what it accepts, and how a bad node fails it. The kernel's files are planted."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torchrun
from sessions import Left, Project
from sysfs_ports import add_port, write

TESTS = Path(__file__).parent
ACCEPTANCE = TESTS.parent / "acceptance"

# Each host has a sysfs of its own, and the fabric of two nodes of H100 is expected of this rehearsal.
CONFTEST = """
import dataclasses
import os
from pathlib import Path
import pytest
from pytest_gpucluster import fabric_ports
from pytest_gpucluster.fabric_ports import FabricSources

@pytest.fixture(scope="session")
def fabric_sources(cluster):
    root = Path(os.environ["SYSFS"]) / cluster.hostname
    return FabricSources(sysfs=root, proc=root / "proc", environ={}, home=lambda: None, system_file=root / "none")

if os.environ.get("EXPECTED"):
    whole = fabric_ports.expects_infiniband

    @pytest.fixture(autouse=True)
    def expect_a_fabric(monkeypatch, request):
        def asked(*arguments, on_cpu, nnodes, **named):
            return whole(*arguments, **named, nnodes=max(nnodes, int(os.environ["EXPECTED"])), on_cpu=False)

        monkeypatch.setattr(request.module, "expects_infiniband", asked)
"""
LIMITS = """
schema_version: 1
skus:
  cpu-rehearsal:
    limits:
      fabric.active_ports: {min: 2 ports, source: planted}
      fabric.port_rate: {min: 400 Gb/s, source: planted}
      nccl.all_reduce.busbw:
        - {when: {nnodes: 2 or more}, min: 1 GB/s, source: planted, expect_transport: NET/IB}
        - {when: {nnodes: 1}, min: 1 GB/s, source: planted}
"""


def files() -> dict[str, str]:
    # Under another name: in this process a test module of that name is loaded already.
    names = {"test_the_criterion_ports.py": "test_infiniband.py", "workloads.yaml": "workloads.yaml"}
    suite = {name: (ACCEPTANCE / of).read_text(encoding="utf-8") for name, of in names.items()}
    return {**suite, "conftest.py": CONFTEST, "limits.yaml": LIMITS}


def plant(folder: Path, *hosts: str) -> Path:
    for host in hosts:
        for index in range(2):
            add_port(folder / host, f"mlx5_{index}", pci=f"0000:{index + 16}:00.0")
        (folder / host / "module" / "nvidia_peermem").mkdir(parents=True)
    return folder


def run(folder: Path, sysfs: Path, expected: str = "1") -> torchrun.Run:
    path = os.pathsep.join([str(TESTS)])
    environment = {"SYSFS": str(sysfs), "EXPECTED": expected, "PYTHONPATH": path}
    return torchrun.torchrun(
        folder,
        files(),
        "--gpucluster-thresholds=limits.yaml",
        ranks=1,
        hosts=("node-a", "node-b"),
        environment=environment,
        deadline=30.0,
    )


def values(run: torchrun.Run | Left) -> dict[str, float | None]:
    return {one.metric: one.value for one in run.journal.results[0].measurements}


def test_two_nodes_that_are_alike_are_accepted(tmp_path: Path) -> None:
    found = run(tmp_path, plant(tmp_path / "sys", "node-a", "node-b"))
    assert found.verdicts == {"test_fabric_ports": "passed"}, found.output
    assert values(found) == {"fabric.active_ports": 2, "fabric.port_rate": 400}
    [judged] = [one for one in found.journal.results[0].measurements if one.metric == "fabric.active_ports"]
    assert judged.status == "passed"
    assert {rank: told["cards"][0] for rank, told in judged.telemetry.items()} == dict.fromkeys(
        (0, 1), "mlx5_0: MT_0000000838, firmware 28.39.2048, PCI 0000:16:00.0, NUMA node 0"
    )
    second = {
        "name": "mlx5_1",
        "board": "MT_0000000838",
        "guid": "a088:c203:00ab:1234",
        "firmware": "28.39.2048",
        "pci_bus_id": "0000:17:00.0",
    }
    assert [told["adapters"][1] for told in judged.telemetry.values()] == [second, second]
    properties = dict(found.journal.results[0].properties)
    assert properties["fabric.expected"].startswith("yes: ")
    assert properties["fabric.peer_memory"] == "module nvidia_peermem"


def test_a_port_that_is_down_on_one_node_rejects_it_by_name_and_misses_the_limit(tmp_path: Path) -> None:
    sysfs = plant(tmp_path / "sys", "node-a", "node-b")
    write(sysfs / "node-b/class/infiniband/mlx5_1/ports/1/state", "1: DOWN")
    found = run(tmp_path, sysfs)
    assert found.verdicts["test_fabric_ports"].startswith("failure: "), found.output
    body = found.body("test_fabric_ports")
    for words in (
        "node-b: port_state (hardware): mlx5_1/1 InfiniBand DOWN (LinkUp)",
        "on 1 of 2 nodes it is Active",
        "what to do: look at the cable",
        "fabric.active_ports 1 ports < 2 ports",
    ):
        assert words in body
    assert found.end[:2] == ("REJECTED", 1)


def rehearse(project: Project, monkeypatch: pytest.MonkeyPatch, *hosts: str, expected: str = "") -> Left:
    monkeypatch.setenv("SYSFS", str(plant(project.path / "sys", *hosts)))
    monkeypatch.setenv("EXPECTED", expected)
    monkeypatch.setenv("GPUCLUSTER_HOSTNAME", "node-a")
    for name, text in files().items():
        (project.path / name).write_text(text, encoding="utf-8")
    return project.run("--gpucluster-thresholds=limits.yaml")


def test_a_rehearsal_of_one_process_records_what_there_is(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    left = rehearse(project, monkeypatch, "node-a")
    assert left.verdicts == {"test_fabric_ports": "passed"}, left.output
    assert values(left) == {"fabric.active_ports": 2, "fabric.port_rate": 400}
    assert {one.status for one in left.journal.results[0].measurements} == {"recorded"}
    assert left.last_line[:2] == ("REHEARSED", 0)


def test_a_rehearsal_without_any_port_records_that(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    left = rehearse(project, monkeypatch)
    assert left.verdicts == {"test_fabric_ports": "passed"}, left.output
    assert values(left) == {"fabric.active_ports": 0}


def test_one_node_expects_no_fabric_also_on_gpus(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    left = rehearse(project, monkeypatch, expected="1")
    assert left.verdicts == {"test_fabric_ports": "passed"}, left.output
    assert dict(left.journal.results[0].properties)["fabric.expected"] == "no: one node"


def test_a_node_without_any_port_is_rejected_where_a_fabric_is_expected(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = rehearse(project, monkeypatch, expected="2")
    assert left.verdicts["test_fabric_ports"].startswith("failure: "), left.output
    body = left.body("test_fabric_ports")
    assert "node-a: no_ports (hardware): no InfiniBand or RoCE port" in body
    assert "fabric.active_ports 0 ports < 2 ports" in body
    assert values(left) == {"fabric.active_ports": 0, "fabric.port_rate": 0}


def test_a_node_whose_cards_cannot_reach_gpu_memory_is_an_error(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pytest_gpucluster.peer_memory.MODULES", ())
    left = rehearse(project, monkeypatch, "node-a", expected="2")
    assert left.verdicts["test_fabric_ports"].startswith("error: "), left.output
    assert "network cards cannot reach GPU memory" in left.body("test_fabric_ports")
    assert left.last_line[:2] == ("BROKEN", 11)
