"""A node's part of a job: the places of its ranks are collected, and other processes on its GPUs are named."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from complaints import in_order
from fake_nvml import FakeNvml
from torch.distributed import HashStore

from pytest_gpucluster.agreement.store import Board
from pytest_gpucluster.errors import EnvironmentBroken
from pytest_gpucluster.metrics.finding import Finding
from pytest_gpucluster.node import host, processes, slurm
from pytest_gpucluster.node.interfaces import Nodes
from pytest_gpucluster.node.processes import Process
from pytest_gpucluster.node.slurm import examine_allocation
from pytest_gpucluster.node.sysfs import Tree

ENVIRON = {"SLURM_GPUS_ON_NODE": "2", "SLURM_CPUS_ON_NODE": "2", "SLURM_JOB_START_TIME": "1000"}


def nvml(*processes: tuple[tuple[int, int | None], ...] | None) -> FakeNvml:
    """GPUs with the processes on each; None: not supported."""
    return FakeNvml({f"GPU-{n}": {} if of is None else {"processes": of} for n, of in enumerate(processes)})


def inventory(ranks: int = 2) -> list[dict[str, Any]]:
    return [
        {
            "rank": rank,
            "node_rank": 0,
            "local_rank": rank,
            "host": "node-a",
            "pid": 100 + rank,
            "visible_gpus": 2,
            "gpu": {"uuid": f"GPU-{rank}", "index": rank},
        }
        for rank in range(ranks)
    ]


@pytest.fixture(autouse=True)
def clean_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node with two CPUs, of which each rank has one, and nothing in its folders."""
    cpu = tmp_path / "sys/devices/system/cpu"
    cpu.mkdir(parents=True)
    (cpu / "online").write_text("0-1\n")
    (tmp_path / "files").mkdir()
    monkeypatch.setattr(host, "TREE", Tree(root=tmp_path))
    monkeypatch.setattr(processes, "SHM", tmp_path / "files")
    monkeypatch.setattr(
        slurm, "place_of", lambda rank, environ: {"rank": rank, "cpus": [rank], "visible_devices": None}
    )


def examined(asked: FakeNvml | None, *, silent: bool = False, environ: Mapping[str, str] = ENVIRON) -> list[Finding]:
    store = HashStore()
    sources = (
        None if asked is None else SimpleNamespace(nvml=asked, find_process=lambda pid: Process(pid=pid, user="ann"))
    )
    found = None
    for rank in (0,) if silent else (1, 0):
        who = inventory()
        nodes = Nodes.of(who, 0)
        board = Board(store, rank, lambda: 1)
        found = examine_allocation(board, nodes, who, environ, rank=rank, sources=sources)
        assert (found is None) == (rank != 0)
    assert found is not None
    return found


def test_a_node_that_is_this_job_s_alone_has_no_findings() -> None:
    assert examined(nvml(((100, 10),), ((101, None),))) == []
    assert examined(None, environ={"SLURM_CPUS_ON_NODE": "2"}) == [], "a rehearsal asks no GPU"


def test_other_processes_on_the_gpus_are_named() -> None:
    [finding] = examined(nvml(((100, 10), (7, 10**9)), ((101, 10),)))
    assert (finding.code, finding.kind) == ("leftovers.process", "environment")
    assert finding.found.startswith("pid 7 of user ann")
    [unknown] = examined(nvml(((100, 10),), None))
    assert unknown.kind == "environment"
    assert in_order(unknown.found, "GPU 1 unknown processes")


def test_what_an_earlier_job_has_left_in_shared_memory_is_an_error_on_a_node_of_one_s_own(tmp_path: Path) -> None:
    (tmp_path / "files/nccl-x").write_bytes(bytes(processes.LEAST_BYTES))
    both = nvml(((100, 10),), ((101, 10),))
    later = {**ENVIRON, "SLURM_JOB_START_TIME": "9999999999"}
    assert examined(both) == [], "it came after the job had begun"
    [shm] = examined(both, environ=later)
    assert (shm.code, shm.kind) == ("leftovers.files", "environment")
    assert "/files has 1 entries with 1.0" in shm.found
    shared = examined(both, environ={**later, "SLURM_CPUS_ON_NODE": "1"})
    assert [one.code for one in shared if one.kind == "environment"] == ["slurm.cpus"]


@pytest.mark.parametrize(
    ("siblings", "kind"), [("0-1", "note"), (None, "environment")], ids=["one core", "cores are not known"]
)
def test_all_threads_of_the_allocated_cores_are_no_error(tmp_path: Path, siblings: str | None, kind: str) -> None:
    for cpu in range(2) if siblings else ():
        folder = tmp_path / f"sys/devices/system/cpu/cpu{cpu}/topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{siblings}\n")
    [finding] = examined(None, environ={"SLURM_CPUS_ON_NODE": "1"})
    assert (finding.code, finding.kind) == ("slurm.cpus", kind)
    assert ("which are 1 cores" in finding.found) == (siblings is not None)


def test_a_rank_that_does_not_answer_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm, "_WITHIN_SECONDS", 0.05)
    with pytest.raises(EnvironmentBroken, match="node-a: rank 1 "):
        examined(None, silent=True)
