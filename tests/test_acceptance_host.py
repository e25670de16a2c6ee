"""The criterion host.limits itself: what it accepts, and how each limit and setting of a host fails it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from sessions import Left, Project

sys.path.insert(0, str(Path(__file__).parent / "host"))

from fake_host import limits, plant

ACCEPTANCE = Path(__file__).parent.parent / "acceptance"

CONFTEST = """
from pathlib import Path
from pytest_gpucluster.host import facts
from pytest_gpucluster.host.tree import Tree

facts.TREE = Tree(root=Path({root!r}))
"""


@pytest.fixture
def criterion(project: Project, monkeypatch: pytest.MonkeyPatch):
    """Run the criterion as the operator does, on a planted host."""
    from pytest_gpucluster.host import facts

    monkeypatch.setattr(facts, "TREE", facts.TREE)  # what the conftest changes is as before in the end

    def run(files: dict[str, str | None] | None = None, *options: str, shm: bool = True) -> Left:
        root = project.path / "root"
        (root / "dev").mkdir(parents=True)
        if shm:
            (root / "dev" / "shm").mkdir()
        plant(root, files or {})
        for name in ("test_host.py", "workloads.yaml"):
            (project.path / name).write_text((ACCEPTANCE / name).read_text(encoding="utf-8"), encoding="utf-8")
        (project.path / "conftest.py").write_text(CONFTEST.format(root=str(root)), encoding="utf-8")
        return project.run(*options)

    return run


def test_a_healthy_host_passes_and_its_figures_are_on_record(criterion) -> None:
    left = criterion()
    assert left.verdicts == {"test_host_limits": "passed"}, left.output
    judged = {one.metric: one for one in left.journal.results[0].measurements}
    assert set(judged) == {f"host.{name}" for name in ("nofile", "memlock", "shm", "cpus", "tasks", "memory")}
    assert (judged["host.nofile"].value, judged["host.nofile"].status) == (1048576, "passed")
    assert judged["host.memory"].status == "recorded"


@pytest.mark.parametrize(
    ("files", "told", "found"),
    [
        ({"/proc/self/limits": limits(nofile=63)}, "host.nofile 63 files < 64 files", "open files 63, which can be"),
        ({"/sys/fs/cgroup/pids.max": "7\n"}, "host.tasks 7 tasks < 8 tasks", "the control group 7"),
        ({"/sys/fs/cgroup/cpu.max": "1000 100000\n"}, "host.cpus 0.01 CPUs < 0.05 CPUs", "the time of 0.01"),
        (
            {"/sys/fs/cgroup/memory.max": "500000\n"},
            "host.shm 0.0005 GB < 0.001 GB",
            "the control group may use 0.0005 GB",
        ),
    ],
    ids=["nofile", "tasks", "cpus", "shm"],
)
def test_a_limit_that_is_too_low_rejects_and_says_what_was_found(criterion, files, told, found) -> None:
    left = criterion(files)
    metric = told.partition(" ")[0]
    assert left.verdicts["test_host_limits"].startswith(f"failure: {told} "), left.output
    assert left.end == ("REJECTED", 1)
    [judged] = [one for one in left.journal.results[0].measurements if one.metric == metric]
    assert found in judged.telemetry[0]["found"]
    assert judged.telemetry[0]["for more"]


GOVERNOR = {"/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor": "powersave\n"}


def test_a_setting_that_slows_gpus_down_is_an_error_with_the_way_out(criterion) -> None:
    left = criterion(GOVERNOR, "--gpucluster-workload=host.governor=performance")
    verdict = left.verdicts["test_host_limits"]
    assert verdict.startswith("error: ")
    assert "governor (environment): the CPU frequency governor is powersave on the CPUs 0" in verdict
    assert "cpupower frequency-set -g performance" in left.body("test_host_limits")
    assert left.end == ("BROKEN", 11)


def test_the_same_setting_is_noted_where_it_is_accepted(criterion) -> None:
    left = criterion(GOVERNOR)
    assert left.verdicts == {"test_host_limits": "passed"}, left.output


@pytest.mark.parametrize(
    ("files", "shm", "metric"),
    [({"/proc/self/limits": None}, True, "host.nofile"), ({}, False, "host.shm")],
    ids=["limits", "shm"],
)
def test_what_the_host_does_not_tell_is_an_error_and_no_pass(criterion, files, shm, metric) -> None:
    left = criterion(files, shm=shm)
    assert left.verdicts["test_host_limits"].startswith("error: ")
    assert f"{metric} is not known" in left.verdicts["test_host_limits"]
    assert left.end == ("BROKEN", 11)


def test_a_dev_shm_on_disk_is_an_error(criterion) -> None:
    left = criterion({"/proc/self/mountinfo": "30 1 0:27 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"})
    assert "/dev/shm is no mount of its own" in left.verdicts["test_host_limits"]
    assert left.end == ("BROKEN", 11)
