"""The criteria slurm, slurm.allocation and kubernetes themselves, with a scheduler of files and executables."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from sessions import Left, Project

from pytest_gpucluster.host.tree import Tree
from pytest_gpucluster.surroundings import job, kubernetes, leftovers, slurm

SUITE = (Path(__file__).parent.parent / "acceptance" / "test_scheduler.py").read_text(encoding="utf-8")
SLURM = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "gpu-001", "SLURM_JOB_PARTITION": "train"}
UP = "Slurmctld(primary) at head is UP"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A host on which nothing is shown and nothing is left."""
    for name in ("sys/devices/system/cpu", "shm", "tmp", "bin"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.setattr(job, "ROOT", Tree(root=tmp_path))
    monkeypatch.setattr(kubernetes, "ROOT", Tree(root=tmp_path))
    monkeypatch.setattr(leftovers, "SHM", tmp_path / "shm")
    monkeypatch.setattr(leftovers, "TMP", tmp_path / "tmp")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    return tmp_path


def say(root: Path, name: str, output: str) -> None:
    path = root / "bin" / name
    path.write_text(f"#!/bin/sh\ncat <<'END'\n{output}\nEND\n")
    path.chmod(0o755)


def under_slurm(project: Project, root: Path, monkeypatch: pytest.MonkeyPatch, *, state: str, **more: str) -> Left:
    say(root, "scontrol", more.pop("ping", UP))
    say(root, "sinfo", f"gpu-001|train*|up|{state}|none")
    cpus = len(os.sched_getaffinity(0))
    for name, value in {**SLURM, "SLURM_CPUS_ON_NODE": str(cpus), **more}.items():
        monkeypatch.setenv(name, value)
    project.suite(SUITE)
    return project.run()


def test_under_neither_scheduler_nothing_runs_and_nothing_is_missing(project: Project, root: Path) -> None:
    project.suite(SUITE, test_b="def test_b(): pass")
    left = project.run()
    assert left.verdicts["test_slurm"] == "skipped: needs a job of slurm, and this is none"
    assert left.verdicts["test_kubernetes"] == "skipped: needs a job of kubernetes, and this is none"
    assert left.end == ("REHEARSED", 0)


def test_a_healthy_slurm_job_passes(project: Project, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = under_slurm(project, root, monkeypatch, state="mixed")
    assert left.verdicts == {
        "test_slurm": "passed",
        "test_slurm_allocation": "passed",
        "test_kubernetes": "skipped: needs a job of kubernetes, and this is none",
    }, left.output
    [result] = [each for each in left.journal.results if each.nodeid.endswith("::test_slurm")]
    values = {one.metric: (one.value, one.status) for one in result.measurements}
    assert values["slurm.controller"][1] == "passed"
    assert values["slurm.nodes"] == (1, "recorded")
    assert left.end == ("REHEARSED", 0)


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"state": "draining*"}, "slurm.node: gpu-001"),
        ({"state": "mixed", "ping": "Slurmctld(primary) at head is DOWN"}, "no controller of Slurm answers"),
        ({"state": "mixed", "SLURM_JOB_NODELIST": "gpu-[001-002]"}, "slurm.node: gpu-002"),
    ],
    ids=["draining", "no controller", "a node too few"],
)
def test_slurm_s_own_trouble_is_an_error(
    project: Project, root: Path, monkeypatch: pytest.MonkeyPatch, more: dict[str, str], told: str
) -> None:
    left = under_slurm(project, root, monkeypatch, **more)
    assert left.verdicts["test_slurm"].startswith("error: ")
    assert told in left.verdicts["test_slurm"]
    assert left.end == ("BROKEN", 11)


def test_where_slurm_s_commands_are_missing_the_run_is_incomplete(
    project: Project, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm, "_COMMANDS", ("scontrol", "sinfo-of-no-container"))
    left = under_slurm(project, root, monkeypatch, state="mixed")
    assert left.verdicts["test_slurm"].startswith("skipped: sinfo-of-no-container cannot be found, so Slurm was not")
    assert left.end == ("INCOMPLETE", 10)


def test_a_slow_controller_misses_its_limit(project: Project, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = project.path / "limits.yaml"
    limits.write_text(
        "schema_version: 1\nskus:\n  cpu-rehearsal:\n    limits:\n      slurm.controller: {max: 1 us, source: a test}\n"
    )
    project.ini(f"gpucluster = true\ngpucluster_thresholds = {limits}")
    left = under_slurm(project, root, monkeypatch, state="mixed")
    assert left.verdicts["test_slurm"].startswith("failure: slurm.controller ")


def test_ranks_that_may_run_on_more_than_was_given_are_an_error(
    project: Project, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job, "place_of", lambda rank, environ: {"rank": rank, "cpus": [0, 1], "visible_devices": None})
    left = under_slurm(project, root, monkeypatch, state="mixed", SLURM_CPUS_ON_NODE="1")
    assert left.verdicts["test_slurm_allocation"].startswith("error: ")
    assert "slurm.cpus" in left.verdicts["test_slurm_allocation"]
    assert "allowed: the 1 that were allocated" in left.body("test_slurm_allocation")
    assert left.end == ("BROKEN", 11)


def pod(root: Path, *, shm_kind: str = "tmpfs") -> None:
    files = {
        "proc/self/mountinfo": f"30 1 0:30 / /sys/fs/cgroup ro - cgroup2 cgroup rw\n"
        f"31 1 0:31 / /dev/shm rw - {shm_kind} shm rw\n",
        "proc/self/cgroup": "0::/\n",
        "sys/fs/cgroup/cpu.max": "max 100000\n",
    }
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (root / "dev/shm").mkdir(parents=True)


def test_a_pod_that_has_what_ranks_need_passes(project: Project, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pod(root)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")
    project.suite(SUITE)
    left = project.run()
    assert left.verdicts["test_kubernetes"] == "passed", left.output
    assert left.end == ("REHEARSED", 0)


def test_a_pod_without_shared_memory_is_an_error(project: Project, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pod(root, shm_kind="overlay")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")
    project.suite(SUITE)
    left = project.run()
    assert left.verdicts["test_kubernetes"].startswith("error: ")
    assert "kubernetes.shm" in left.verdicts["test_kubernetes"]
    assert "emptyDir with medium: Memory" in left.body("test_kubernetes")
    assert left.end == ("BROKEN", 11)
