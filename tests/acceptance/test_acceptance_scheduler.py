"""The criteria slurm, slurm.allocation and kubernetes themselves, with a scheduler of files and executables."""

import os
import re

import pytest
from planted_runs import acceptance_file, measured

from pytest_gpucluster.node import scheduler as job
from pytest_gpucluster.node import sysfs

UP, DOWN = (f"Slurmctld(primary) at head is {state}" for state in ("UP", "DOWN"))
SLURM = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "gpu-001", "SLURM_JOB_PARTITION": "train"}
LOST = "#!/bin/sh\necho 'gpu-001|train*|up|down*|Not responding'\n"
LIMITS = """
schema_version: 1
skus:
  cpu-rehearsal:
    limits:
      slurm.controller: {max: 1 us, source: a test}
"""


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A host on which nothing is shown and nothing is left."""
    for name in ("sys/devices/system/cpu", "shm", "bin"):
        (tmp_path / name).mkdir(parents=True)
    monkeypatch.setattr(sysfs, "ROOT", tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    return tmp_path


@pytest.fixture
def under_slurm(project, root, monkeypatch):
    """Run the criteria in a job of Slurm."""

    def run(*options, state="mixed", ping=UP, **more):
        for name, output in (("scontrol", ping), ("sinfo", f"gpu-001|train*|up|{state}|none")):
            (root / "bin" / name).write_text(f"#!/bin/sh\ncat <<'END'\n{output}\nEND\n")
            (root / "bin" / name).chmod(0o755)
        cpus = len(os.sched_getaffinity(0))
        for name, value in {**SLURM, "SLURM_CPUS_ON_NODE": str(cpus), **more}.items():
            monkeypatch.setenv(name, value)
        project.suite(acceptance_file("test_scheduler.py"))
        return project.run(*options)

    return run


def test_under_neither_scheduler_nothing_runs_and_nothing_is_missing(project, root):
    project.suite(acceptance_file("test_scheduler.py"), test_b="def test_b(): pass")
    left = project.run()
    for scheduler, name in (
        ("slurm", "test_slurm[before]"),
        ("slurm", "test_slurm[after]"),
        ("kubernetes", "test_kubernetes"),
    ):
        assert re.match(rf"skipped: .* {scheduler}\b", left.verdicts[name])
    assert left.end == ("REHEARSED", 0)


def test_a_healthy_slurm_job_passes(under_slurm):
    left = under_slurm()
    assert left.verdicts.pop("test_kubernetes").startswith("skipped: ")
    assert left.verdicts == dict.fromkeys(
        ("test_slurm[before]", "test_slurm_allocation", "test_slurm[after]"), "passed"
    ), left.output
    [result] = [each for each in left.journal.results if each.nodeid.endswith("::test_slurm[before]")]
    values = measured(result)
    assert values["slurm.controller"].status == "passed"
    assert (values["slurm.nodes"].value, values["slurm.nodes"].status) == (1, "recorded")
    assert left.end == ("REHEARSED", 0)


def test_a_node_that_was_lost_during_the_run_is_named_by_the_last_test(project, root, under_slurm):
    """As where slurmd dies: the ranks on the node live on."""
    sinfo = root / "bin" / "sinfo"
    lost = f"import pathlib\ndef test_others(): pathlib.Path({str(sinfo)!r}).write_text({LOST!r})"
    project.suite(test_z=lost)
    left = under_slurm()
    assert left.verdicts["test_slurm[before]"] == left.verdicts["test_others"] == "passed", left.output
    assert left.verdicts["test_slurm[after]"].startswith("error: ")
    assert "slurm.node: gpu-001" in left.verdicts["test_slurm[after]"]
    assert left.end == ("BROKEN", 11)


@pytest.mark.parametrize(
    ("more", "found"),
    [
        ({"state": "draining*"}, "slurm.node: gpu-001"),
        ({"ping": DOWN}, "controller"),
        ({"SLURM_JOB_NODELIST": "gpu-[001-002]"}, "slurm.node: gpu-002"),
    ],
    ids=["draining", "no controller", "a node too few"],
)
def test_slurm_s_own_trouble_is_an_error(under_slurm, more, found):
    left = under_slurm(**more)
    assert left.verdicts["test_slurm[before]"].startswith("error: ")
    assert found in left.verdicts["test_slurm[before]"]
    assert left.end == ("BROKEN", 11)


def test_where_slurm_s_commands_are_missing_the_run_is_incomplete(under_slurm, monkeypatch):
    monkeypatch.setattr(job, "_COMMANDS", ("scontrol", "sinfo-of-no-container"))
    left = under_slurm()
    assert left.verdicts["test_slurm[before]"].startswith("skipped: sinfo-of-no-container ")
    assert left.end == ("INCOMPLETE", 10)


def test_a_slow_controller_misses_its_limit_and_more_cpus_than_given_are_an_error(project, under_slurm, monkeypatch):
    (project.path / "limits.yaml").write_text(LIMITS)
    monkeypatch.setattr(job, "place_of", lambda rank, environ: {"rank": rank, "cpus": [0, 1], "visible_devices": None})
    left = under_slurm("--gpucluster-thresholds=limits.yaml", SLURM_CPUS_ON_NODE="1")
    assert left.verdicts["test_slurm[before]"].startswith("failure: slurm.controller ")
    assert left.verdicts["test_slurm_allocation"].startswith("error: ")
    assert "slurm.cpus" in left.verdicts["test_slurm_allocation"]
    assert "allowed: the 1 " in left.body("test_slurm_allocation")
    assert left.end == ("REJECTED", 1)


@pytest.mark.parametrize(
    ("mounted", "verdict", "end"), [(True, "passed", ("REHEARSED", 0)), (False, "error: ", ("BROKEN", 11))]
)
def test_a_pod_shows_its_control_group(project, root, monkeypatch, mounted, verdict, end):
    for name, text in {
        "proc/self/mountinfo": "30 1 0:30 / /sys/fs/cgroup ro - cgroup2 cgroup rw\n" if mounted else "",
        "proc/self/cgroup": "0::/\n",
        "sys/fs/cgroup/cpu.max": "max 100000\n",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")
    project.suite(acceptance_file("test_scheduler.py"))
    left = project.run()
    assert left.verdicts["test_kubernetes"].startswith(verdict), left.output
    if not mounted:
        assert "kubernetes.resources" in left.verdicts["test_kubernetes"]
    assert left.end == end
