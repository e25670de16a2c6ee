"""The criterion failure_propagation itself, run by torchrun over gloo: what it accepts, and how each fault fails it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torchrun

ACCEPTANCE = Path(__file__).parent.parent / "acceptance"

# The jobs that a node can have: their launcher, or what their ranks run, is put in the place of the product's own. The
# file that a test is in says which one.
FAULTS = """
import sys
from dataclasses import replace
from pathlib import Path
from pytest_gpucluster.benchmarks.training import propagation
from pytest_gpucluster.benchmarks.training.propagation import PIECES


TORCHRUN = PIECES.launcher
BROKEN = str(Path(__file__).with_name("launchers.py"))

JOBS = {
    "none": PIECES,
    "hidden": replace(PIECES, launcher=("sh", "-c", '"$@"; exit 0', "sh", *TORCHRUN)),
    "unnamed": replace(PIECES, launcher=("sh", "-c", '"$@" >/dev/null 2>&1', "sh", *TORCHRUN)),
    "stubborn": replace(PIECES, module="stubborn"),
    "unwatched": replace(PIECES, launcher=(sys.executable, BROKEN, "waits"), module="stubborn"),
    "leaves": replace(PIECES, launcher=(sys.executable, BROKEN, "leaves"), module="stubborn"),
    "silent": replace(PIECES, module="this_module_is_not_there"),
}

def pytest_runtest_setup(item):
    propagation.PIECES = JOBS[item.path.stem.removeprefix("test_propagation_")]
    propagation.LEFT_OVER_SECONDS = 1.0
"""

# A rank that hears of nothing: neither of its peer's death nor of a SIGTERM.
STUBBORN = """
import os, signal, time
from dataclasses import replace
from pytest_gpucluster.benchmarks.training import dying_rank
from pytest_gpucluster.benchmarks.training.step import PARTS, optimizer_step

STEPS = []

def update(model, optimizer):
    optimizer_step(model, optimizer)
    STEPS.append(1)
    if os.environ["RANK"] == "0" and len(STEPS) == 2:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            time.sleep(1)

dying_rank.PARTS = replace(PARTS, update=update)
dying_rank.main()
"""

# Launchers that start the ranks and do not watch over them.
LAUNCHERS = """
import os, subprocess, sys

kind, *options = sys.argv[1:]
at = options.index("-m")
ranks = [
    subprocess.Popen(
        [sys.executable, *options[at:]],
        env={
            **os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(20000 + os.getpid() % 10000),
        },
        start_new_session=True,
    )
    for rank in range(2)
]
ranks[1].wait()
if kind == "waits":
    ranks[0].wait()
sys.exit(1)
"""

# A job that hangs is given little time; one that ends, all that a busy machine may need.
RUNS = {
    "ends": (("none", "hidden", "unnamed", "leaves", "silent"), "--gpucluster-workload=failure_propagation.end=120s"),
    "hangs": (("stubborn", "unwatched"), "--gpucluster-workload=failure_propagation.end=3s"),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs over all jobs: after each the ranks go on."""

    def run(name):
        jobs, option = RUNS[name]
        directory = tmp_path_factory.mktemp(name)
        test = (ACCEPTANCE / "test_failure_propagation.py").read_text(encoding="utf-8")
        files = {f"test_propagation_{job}.py": test for job in jobs}
        files |= {"workloads.yaml": (ACCEPTANCE / "workloads.yaml").read_text(encoding="utf-8"), "conftest.py": FAULTS}
        files |= {"stubborn.py": STUBBORN, "launchers.py": LAUNCHERS}
        started = torchrun.start(directory, files, option, environment={"PYTHONPATH": str(directory / "suite")})
        started.deadline = 400.0  # the jobs come one after the other
        return started.wait()

    with ThreadPoolExecutor(max_workers=2) as pool:
        return dict(zip(RUNS, pool.map(run, RUNS), strict=True))


def result(runs, job):
    name = f"test_propagation_{job}.py::"
    [found] = [one for run in runs.values() for one in run.journal.results if one.nodeid.startswith(name)]
    return found


def test_a_job_that_ends_and_names_the_rank_is_accepted_with_the_time_it_took(runs):
    found = result(runs, "none")
    assert (found.outcome, found.culprits) == ("passed", ())
    [one] = found.measurements
    assert (one.metric, one.status) == ("failure_propagation.seconds", "passed")
    assert one.labels == {"death": "exit", "ranks": "2"}
    assert list(one.values) == [0], "the first rank of the node speaks for it"
    assert 0 < one.value < 60


@pytest.mark.parametrize(
    ("job", "told"),
    [
        ("hidden", "has died (exit), and the launcher ended with exit code 0"),
        ("unnamed", "does not say so: it names no rank, and rank 1 with the exit code 43 is meant"),
        ("stubborn", "has died (exit), and 3 s later the job has not ended: "),
        ("unwatched", "has died (exit), and 3 s later the job has not ended: "),
        ("leaves", "has died (exit), the launcher has ended, and 1 s later this is left over: rank 0, last seen at st"),
    ],
)
def test_each_job_that_does_not_end_well_is_rejected(runs, job, told):
    found = result(runs, job)
    assert (found.outcome, found.culprits) == ("failed", (0,))
    assert "WrongResult" in found.message
    assert told in found.text


@pytest.mark.parametrize("job", ["stubborn", "unwatched"])
def test_the_ranks_that_do_not_end_are_named(runs, job):
    told = result(runs, job).text
    assert "rank 0, last seen at step-1 (pid " in told
    assert "the launcher (pid " in told


def test_a_job_that_does_not_come_as_far_is_an_error_with_what_it_said(runs):
    found = result(runs, "silent")
    assert found.outcome == "error"
    assert "of which rank 1 should die, has ended with 1 (rank 0: not started, rank 1: not started)" in found.text
    assert "No module named this_module_is_not_there" in found.text


@pytest.mark.parametrize("name", RUNS)
def test_nothing_of_any_job_is_left_and_their_outputs_are_kept(runs, name):
    run = runs[name]
    assert run.left_over == []
    assert run.end[:2] == ("REJECTED", 1)
    kept = sorted((run.directory / "reports" / "latest" / "artifacts").glob("*/node-0-exit/output.txt"))
    assert len(kept) == len(RUNS[name][0])
    assert name == "hangs" or any("ChildFailedError" in path.read_text() for path in kept)


def test_with_one_rank_on_a_node_it_is_not_run_and_says_why(tmp_path):
    files = {
        name: (ACCEPTANCE / name).read_text(encoding="utf-8")
        for name in ("test_failure_propagation.py", "workloads.yaml")
    }
    run = torchrun.torchrun(tmp_path, files, ranks=1)
    assert run.verdicts == {"test_failure_propagation": "skipped: needs 2 ranks on each node, and there is 1"}
