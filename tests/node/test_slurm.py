"""What Slurm's commands report, and a node's part of a job."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from complaints import in_order
from each import of_each
from fake_nvml import FakeNvml
from torch.distributed import HashStore

from pytest_gpucluster.agreement.store import Board
from pytest_gpucluster.errors import EnvironmentBroken
from pytest_gpucluster.metrics.finding import Finding
from pytest_gpucluster.node import host, scheduler
from pytest_gpucluster.node.interfaces import Nodes
from pytest_gpucluster.node.processes import Process
from pytest_gpucluster.node.scheduler import (
    NodeState,
    Ping,
    examine_allocation,
    examine_slurm,
    healthy_count,
    node_states,
    nodes_of_job,
    ping,
)
from pytest_gpucluster.node.sysfs import Tree

PING = Ping(up=("primary head",), down=(), seconds=0.1)


class Commands:
    """Executables in a folder that is first on PATH."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")

    def say(self, name: str, output: str, code: int = 0, before: str = "", stderr: str = "") -> None:
        path = self.folder / name
        begin = f'#!/bin/sh\necho "$@" > {path}.asked\n{before}\necho "{stderr}" >&2\n'
        path.write_text(f'{begin}cat <<"END"\n{output}\nEND\nexit {code}\n')
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    def asked(self, name: str) -> list[str]:
        return (self.folder / f"{name}.asked").read_text().split()


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Commands:
    return Commands(tmp_path, monkeypatch)


def test_a_controller_that_answers_is_timed(commands: Commands) -> None:
    commands.say("scontrol", "Slurmctld(primary) at head1 is UP\nSlurmctld(backup) at head2 is DOWN")
    found = ping()
    assert (found.up, found.down) == (("primary head1",), ("backup head2",))
    assert 0 < found.seconds < scheduler.ANSWER_SECONDS
    assert commands.asked("scontrol") == ["ping"]


@of_each("case", [("Slurmctld(primary) at head1 is DOWN", 1), ("slurm_load_ctl_conf error", 1), ("", 0)])
def test_no_controller_that_answers_is_an_error(commands: Commands, case: tuple[str, int]) -> None:
    output, code = case
    commands.say("scontrol", output, code)
    with pytest.raises(EnvironmentBroken, match="controller") as raised:
        ping()
    assert (output or "exit code 0") in str(raised.value)


def test_a_command_that_does_not_end_or_is_not_there_is_an_error(
    commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands.say("scontrol", "Slurmctld(primary) at head1 is UP", before="exec sleep 30")
    with pytest.raises(EnvironmentBroken, match=r"scontrol: no answer within 0\.2 s"):
        ping(answer_seconds=0.2)
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(EnvironmentBroken, match=r"scontrol .* container"):
        ping()


def test_the_states_of_the_job_s_nodes_are_asked_for(commands: Commands) -> None:
    commands.say("sinfo", "gpu-001|train*|up|allocated|none\ngpu-002|train*|up|Draining@|bad cable|x")
    assert node_states(["gpu-001", "gpu-002"], "train") == (
        NodeState(node="gpu-001", partition="train", available="up", state="allocated", reason=""),
        NodeState(node="gpu-002", partition="train", available="up", state="draining@", reason="bad cable|x"),
    )
    asked = commands.asked("sinfo")
    assert asked[asked.index("--nodes") + 1] == "gpu-001,gpu-002"
    assert asked[asked.index("--partition") + 1] == "train"


@of_each("case", [("slurm_load_partitions: Unable to contact", 1), ("gpu-001 allocated", 0), ("", 0)])
def test_what_is_no_list_of_states_is_an_error(commands: Commands, case: tuple[str, int]) -> None:
    commands.say("sinfo", *case)
    with pytest.raises(EnvironmentBroken, match="gpu-001"):
        node_states(["gpu-001"], None)


def test_a_warning_is_not_part_of_the_answer(commands: Commands) -> None:
    warning = "sinfo: error: If munged is up, restart with --num-threads=10"
    commands.say("sinfo", "gpu-001|train*|up|mixed|none", stderr=warning)
    assert [one.state for one in node_states(["gpu-001"], "train")] == ["mixed"]
    commands.say("sinfo", "", 1, stderr=warning)
    with pytest.raises(EnvironmentBroken, match=r"gpu-001 \(exit code 1\): sinfo: error: "):
        node_states(["gpu-001"], "train")


def test_what_is_missing_in_a_container_is_reported_with_the_way_to_bring_it_in(
    commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands.say("scontrol", "")
    monkeypatch.setenv("PATH", str(commands.folder))
    assert in_order(str(scheduler.why_unavailable()), "sinfo container")
    commands.say("sinfo", "")
    assert scheduler.why_unavailable() is None


def of(state: str, *, available: str = "up", reason: str = "") -> list[NodeState]:
    return [NodeState(node="gpu-001", partition="train", available=available, state=state, reason=reason)]


@of_each("state", ["allocated", "mixed", "allocated+", "mixed-", "allocated$", "mixed@"])
def test_a_node_that_runs_jobs_is_well(state: str) -> None:
    assert examine_slurm(PING, of(state), ["gpu-001"], "head") == []
    assert healthy_count(of(state), ["gpu-001"]) == 1


@of_each("state", ["draining", "drained*", "down", "mixed*", "allocated^", "allocated#", "idle", "something new"])
def test_a_node_in_another_state_is_named_with_slurm_s_reason(state: str) -> None:
    [finding] = examine_slurm(PING, of(state, reason="ECC errors"), ["gpu-001"], "head")
    assert (finding.code, finding.kind, str(finding.gpu)) == ("slurm.node", "environment", "gpu-001")
    assert in_order(finding.found, f"{state} (ECC errors)")
    assert healthy_count(of(state), ["gpu-001"]) == 0


def test_a_node_that_sinfo_does_not_list_and_a_partition_that_is_not_up_are_named() -> None:
    found = examine_slurm(PING, of("mixed", available="drain"), ["gpu-001", "gpu-002"], "head")
    assert [(one.code, one.kind, str(one.gpu)) for one in found] == [
        ("slurm.node", "environment", "gpu-002"),
        ("slurm.partition", "environment", "head"),
    ]
    assert in_order(found[1].found, "train is drain")
    [backup] = examine_slurm(Ping(up=("primary a",), down=("backup b",), seconds=1.0), of("mixed"), ["gpu-001"], "head")
    assert (backup.kind, in_order(backup.found, "backup b")) == ("note", True)


def test_the_nodes_of_the_job_are_slurm_s() -> None:
    assert nodes_of_job({"SLURM_JOB_NODELIST": "gpu-[001-002,7]"}) == ["gpu-001", "gpu-002", "gpu-7"]
    assert nodes_of_job({"SLURM_NODELIST": "a"}) == ["a"]
    for environ in ({}, {"SLURM_JOB_NODELIST": "gpu-[1"}):
        with pytest.raises(EnvironmentBroken, match="SLURM_JOB_NODELIST"):
            nodes_of_job(environ)
    # Of a step its own nodes count, and not those that srun has left out; one that is interactive has none of its own.
    environ = {"SLURM_JOB_NODELIST": "gpu-[001-004]", "SLURM_STEP_NODELIST": "gpu-[001,003]"}
    assert nodes_of_job({**environ, "SLURM_STEP_ID": "2", "SLURM_STEP_NUM_TASKS": "2"}) == ["gpu-001", "gpu-003"]
    interactive = {"SLURM_STEP_ID": "4294967290", "SLURM_STEP_NUM_TASKS": "1", "SLURM_STEP_NODELIST": "gpu-001"}
    assert len(nodes_of_job({**environ, **interactive})) == len(nodes_of_job(environ)) == 4


@pytest.mark.parametrize(("partition", "asked"), [("train", "--partition"), (None, "--all")])
def test_sinfo_is_never_asked_for_all_partitions_and_for_one(
    commands: Commands, partition: str | None, asked: str
) -> None:
    # Slurm 22.05: "Conflicting options, -a and -p, specified. Please choose one or the other."
    commands.say("sinfo", "n1|train*|up|mixed|none")
    assert [state.node for state in node_states(["n1"], partition)] == ["n1"]
    assert {"--all", "--partition"} & set(commands.asked("sinfo")) == {asked}


ENVIRON = {"SLURM_GPUS_ON_NODE": "2", "SLURM_CPUS_ON_NODE": "2"}


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
    """A node with two CPUs, of which each rank has one."""
    cpu = tmp_path / "sys/devices/system/cpu"
    cpu.mkdir(parents=True)
    (cpu / "online").write_text("0-1\n")
    monkeypatch.setattr(host, "TREE", Tree(root=tmp_path))
    monkeypatch.setattr(
        scheduler, "place_of", lambda rank, environ: {"rank": rank, "cpus": [rank], "visible_devices": None}
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
    monkeypatch.setattr(scheduler, "_WITHIN_SECONDS", 0.05)
    with pytest.raises(EnvironmentBroken, match="node-a: rank 1 "):
        examined(None, silent=True)
