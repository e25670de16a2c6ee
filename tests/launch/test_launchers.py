"""Ranks that no torchrun has started: they meet at a store that rank 0 hosts, agree, and leave one report.

Two processes on this host stand for the tasks of a Slurm step, the ranks of mpirun and the pods of an Indexed Job.
"""

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ports import free_port
from sessions import CPU, PLUGINS, Process, environment

from pytest_gpucluster.launch.launchers import detect

SUITE = """
    import pytest

    def test_all_reduce(cluster):
        import torch
        ones = torch.ones(4)
        torch.distributed.all_reduce(ones, group=cluster.group)
        assert ones.tolist() == [2.0] * 4
        assert cluster.all_gather_object(cluster.rank) == [0, 1]

    @pytest.mark.criterion("ranks")
    def test_measured(cluster, measure, inventory):
        measure("matmul.fp32.tflops", 2 - cluster.rank, unit="TFLOPS")
        assert len(inventory) == 2
"""
PYTEST = ("-m", "pytest", *PLUGINS, "--junitxml=report.xml")
_HOST = "pytest_gpucluster.agreement.store"
UNKNOWN = "no-such-host.invalid"
"""Never a name of a host. Source: RFC 2606, 2."""
ASKS_NO_DNS = """
    def test_the_store_looks_up_no_name(cluster):
        import os
        from pathlib import Path

        def read(entry, name):
            try:
                return (entry / name).read_bytes().split(bytes(1))
            except OSError:
                return []

        port = os.environ["MASTER_PORT"].encode()
        hosts = [
            entry
            for entry in Path("/proc").iterdir()
            if {b"pytest_gpucluster.agreement.store", port} <= set(read(entry, "cmdline"))
        ]
        assert [[word for word in read(host, "environ") if b"RES_" in word] for host in hosts] == [
            [b"RES_OPTIONS=rotate attempts:0"]
        ]
"""


def slurm(rank, port):
    """What a step of two tasks on one node gives to a task."""
    return {
        "SLURM_JOB_ID": "4711",
        "SLURM_STEP_ID": "3",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_STEP_TASKS_PER_NODE": "2",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_JOB_NUM_NODES": "1",
        "SLURM_NODEID": "0",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "MASTER_PORT": str(port),
    }


def openmpi(rank, port):
    """What mpirun -n 2 gives to a rank."""
    return {
        "OMPI_COMM_WORLD_SIZE": "2",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
        "PMIX_NAMESPACE": f"prterun-{port}@1",
        "MASTER_PORT": str(port),
    }


def kubernetes(rank, port):
    """What an Indexed Job of two pods gives to a pod, with the documented template."""
    return {
        "JOB_COMPLETION_INDEX": str(rank),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "pod-0.localhost",
        "MASTER_PORT": str(port),
        "KUBERNETES_SERVICE_HOST": "10.0.0.1",
        "GPUCLUSTER_HOSTNAME": f"pod-{rank}",
    }


def slurm_without_a_name(rank, port):
    """A step on one node whose name nothing resolves."""
    return {**slurm(rank, port), "MASTER_ADDR": UNKNOWN, "SLURM_STEP_NODELIST": UNKNOWN}


LAUNCHERS = {"slurm": slurm_without_a_name, "kubernetes": kubernetes}


@contextlib.contextmanager
def started(project, variables, port, *options, ranks=2, inside=()):
    """Start ranks, inside of another command if there is one; kill them, and a store of theirs, in the end."""
    command = [*inside, sys.executable, *PYTEST, CPU, *options]
    processes = []
    with contextlib.ExitStack() as stack:
        stack.callback(lambda: [os.kill(pid, 9) for pid in stores(port)])
        for rank in range(ranks):
            environ = variables(rank, port)
            if environ.get("MASTER_ADDR") == "pod-0.localhost" and not resolves("pod-0.localhost"):
                environ["MASTER_ADDR"] = socket.gethostname()
            process = Process(command, project.path, environment(environ), forked=not inside)
            processes.append(stack.enter_context(process))
        yield processes


def resolves(name):
    try:
        socket.getaddrinfo(name, None)
    except OSError:
        return False
    return True


def stores(port):
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                words = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
                if _HOST in words and str(port) in words:
                    found.append(int(entry.name))
    return found


def wait_until_gone(port, seconds):
    """Check that the store's process ends."""
    until = time.monotonic() + seconds
    while left := stores(port):
        assert time.monotonic() < until, f"the store's process {left} is still there {seconds:g} s after the ranks"
        time.sleep(0.05)


def run(project, variables, *options):
    port = free_port()
    with started(project, variables, port, *options) as processes:
        left = [process.wait() for process in processes]
        wait_until_gone(port, 15.0)  # it lingers for 20 s where it has heard no goodbye
    return left


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_ranks_meet_agree_and_leave_one_report(project, launcher):
    variables = LAUNCHERS[launcher]
    assert detect(variables(1, 1), "here").launcher == launcher
    project.suite(SUITE)
    first, second = run(project, variables)
    assert (first.exit, second.exit) == (0, 0), first.output + second.output
    assert first.end == ("REHEARSED", 0)
    assert first.verdicts == {"test_all_reduce": "passed", "test_measured": "passed"}
    assert (first.journal.run.launcher, first.journal.run.world_size) == (launcher, 2)
    (judged,) = first.journal.results[1].measurements
    assert (judged.worst_rank, judged.values) == (1, {0: 2.0, 1: 1.0})
    assert "2 passed" in first.stdout
    assert second.output.strip() == ""


def test_ranks_on_a_host_that_does_not_know_its_own_name_meet(project):
    inside = ["unshare", "--user", "--map-root-user", "--uts", "sh", "-c", f'hostname {UNKNOWN} && exec "$@"', "sh"]
    if (
        shutil.which("unshare") is None
        or subprocess.run([*inside, "true"], check=False, capture_output=True).returncode
    ):
        pytest.skip("no name of its own can be given to a process here")

    def variables(rank, port):
        return {**slurm(rank, port), "SLURM_STEP_NODELIST": UNKNOWN}

    project.suite(SUITE)
    with started(project, variables, free_port(), "--gpucluster-timeouts=join=60", inside=inside) as processes:
        first, second = [process.wait() for process in processes]
    assert (first.exit, second.exit) == (0, 0), first.output + second.output
    assert first.journal.run.hostname == UNKNOWN
    assert first.verdicts == {"test_all_reduce": "passed", "test_measured": "passed"}


def two_nodes(rank, port):
    """What a step of one task on each of two nodes gives to a task."""
    return {
        **slurm(rank, port),
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
        "SLURM_STEP_NODELIST": "node-[0-1]",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_NODEID": str(rank),
        "SLURM_LOCALID": "0",
        "GPUCLUSTER_HOSTNAME": f"node-{rank}",
    }


@pytest.mark.parametrize(
    ("variables", "origin"),
    [
        (
            lambda rank, port: {**two_nodes(rank, port), "SLURM_STEP_NODELIST": f"{UNKNOWN},{UNKNOWN}2"},
            "the first of SLURM_STEP_NODELIST",
        ),
        (lambda rank, port: {**kubernetes(rank, port), "MASTER_ADDR": UNKNOWN}, "MASTER_ADDR"),
    ],
    ids=["slurm's own list", "kubernetes"],
)
def test_a_name_that_no_node_knows_ends_every_rank_with_a_report(project, variables, origin):
    project.suite(SUITE)
    (project.path / "report.xml").write_text("<testsuites/>")
    first, second = run(project, variables)
    assert (first.exit, second.exit) == (4, 4), first.output + second.output
    assert max(first.seconds, second.seconds) < 60  # torch asks for the name for 300 s
    for rank, left in enumerate((first, second)):
        where = variables(rank, 1)["GPUCLUSTER_HOSTNAME"]
        for part in (f"rank {rank} on {where}: {UNKNOWN}, ", f"({origin})", "what to do: `export MASTER_ADDR="):
            assert part in left.stderr
        assert "Traceback" not in left.output
    assert first.end == ("BROKEN", 4)
    assert list(first.verdicts) == ["usage"]
    assert f"{UNKNOWN}, " in first.verdicts["usage"]
    assert f"({origin})" in first.verdicts["usage"]
    assert "what to do: " in first.body("usage")


def test_a_name_that_one_node_does_not_know_is_reported_there_and_the_rank_is_missed(project):
    def variables(rank, port):
        return {**two_nodes(rank, port), "MASTER_ADDR": ("pod-0.localhost", UNKNOWN)[rank]}

    project.suite(SUITE)
    with started(project, variables, free_port(), "--gpucluster-timeouts=join=3") as processes:
        first, second = [process.wait() for process in processes]
    assert (first.exit, second.exit) == (11, 4), first.output + second.output
    assert "(1 of 2 ranks did)" in first.verdicts["preflight"]
    assert f"rank 1 on node-1: {UNKNOWN}, " in second.stderr


def test_a_failure_on_one_rank_is_the_same_exit_code_on_all(project):
    assert detect(openmpi(1, 1), "here").launcher == "openmpi"
    project.suite(
        SUITE + ASKS_NO_DNS + "\n    def test_fails(cluster):\n        assert cluster.rank == 0, 'only here'\n"
    )
    more = {"RES_OPTIONS": "rotate", "MASTER_ADDR": UNKNOWN}  # on one node no name is needed
    first, second = run(project, lambda rank, port: {**openmpi(rank, port), **more})
    assert (first.exit, second.exit) == (1, 1), first.output + second.output
    assert first.end == ("REJECTED", 1)
    assert first.journal.run.launcher == "openmpi"
    assert first.verdicts["test_fails"].startswith("failure: rank 1 (")
    assert "only here" in first.verdicts["test_fails"]
    assert first.verdicts["test_all_reduce"] == "passed"
    assert first.verdicts["test_the_store_looks_up_no_name"] == "passed"
    assert second.output.strip() == ""


def test_a_killed_rank_0_is_named_by_the_store_and_leaves_a_report(project):
    project.suite(
        """
        import os, signal, time

        def test_killed(cluster):
            cluster.barrier()
            if cluster.rank == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(30)
        """
    )
    first, second = run(project, slurm)
    assert first.exit == -9
    assert second.exit == 11, second.output
    assert second.seconds < 90
    assert first.verdicts["test_killed"].startswith("error: ")
    assert ": rank 0 (" in first.verdicts["test_killed"]
    assert first.journal.end.by == "recorder"


def no_store(rank, port):
    """Rank 1 of a step whose rank 0 has no store."""
    return {**slurm(1, port), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


@pytest.mark.parametrize(
    ("variables", "taken", "parts"),
    [
        pytest.param(slurm, True, (" port {port} of ", "MASTER_PORT"), id="a port in use"),
        pytest.param(slurm, False, ("rank 1 on ", "(1 of 2 ranks did)"), id="a missing rank"),
        pytest.param(no_store, False, ("rank 1 on ", " 127.0.0.1:1 within 2 s"), id="no store"),
    ],
)
def test_a_rank_without_a_rendezvous_ends_in_time_and_reports_why(project, variables, taken, parts):
    project.suite(SUITE)
    with socket.socket() as holder:
        port = free_port()
        if taken:
            holder.bind(("0.0.0.0", 0))
            holder.listen()
            port = holder.getsockname()[1]
        with started(project, variables, port, "--gpucluster-timeouts=join=2", ranks=1) as (process,):
            left = process.wait()
    assert left.exit == 11, left.output
    assert left.seconds < 90  # by default they wait for 300
    for part in parts:
        assert part.format(port=port) in left.stderr
    assert "Traceback" not in left.output
    if variables is slurm:
        assert left.verdicts["preflight"].startswith("error: ")
        assert parts[0].format(port=port) in left.verdicts["preflight"]


def test_what_one_rank_cannot_do_is_reported_once_for_all(project):
    def one_is_wrong(rank, port):
        return {**slurm(rank, port), **({"GPUCLUSTER_DEADLINE": "soon"} if rank == 1 else {})}

    project.suite(SUITE)
    first, second = run(project, one_is_wrong)
    assert (first.exit, second.exit) == (4, 4), first.output + second.output
    assert "GPUCLUSTER_DEADLINE=soon" in first.stderr
    assert "GPUCLUSTER_DEADLINE=soon" in first.verdicts["usage"]
    assert second.output.strip() == ""


def torchrun(project, *options, more=None):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-addr=127.0.0.1"]
    command += [f"--master-port={free_port()}", *PYTEST]
    with Process([*command, *options], project.path, environment(more), forked=True) as process:
        return process.wait()


def test_fewer_ranks_than_expected_are_named_under_torchrun(project):
    project.suite(SUITE)
    left = torchrun(project, CPU, "--gpucluster-expect=2x8")
    assert left.exit == 1  # torchrun's, whatever the ranks' is
    message = left.verdicts["preflight"].removeprefix("error: ")
    assert "--gpucluster-expect=2x8 " in message
    assert left.end == ("BROKEN", 11)
    assert left.stderr.count(f"ERROR: {message}") == 1
    assert f"REHEARSAL, BROKEN (exit code 11): {message}" in left.stderr  # in torchrun's own summary
    assert "torchrun --nnodes=2 --nproc-per-node=8" in left.stderr


@pytest.mark.parametrize("where", ["0", "1"])
def test_a_suite_that_one_rank_does_not_find_is_reported_on_all(project, where):
    project.suite(
        "def test_it(): raise AssertionError('must not run')",
        conftest=f"""
        import os, pytest

        def pytest_collection_modifyitems():
            if os.environ["RANK"] == "{where}":
                raise pytest.UsageError("file or directory not found: acceptance")
        """,
    )
    left = torchrun(project, CPU)
    assert left.end == ("BROKEN", 11)
    assert f": rank {where} (" in left.verdicts["collection"]
    assert "UsageError: " in left.verdicts["collection"]
    assert left.exit == 1
    assert left.seconds < 90  # by default they wait for 300


def test_no_gpu_on_any_rank_is_reported_once_under_torchrun(project):
    project.suite(SUITE)
    left = torchrun(project, "--gpucluster-device=cuda", more={"CUDA_VISIBLE_DEVICES": ""})
    assert left.exit == 1
    assert left.end == ("BROKEN", 4)
    for rank in (0, 1):
        assert f"rank {rank} on " in left.body("usage")
    assert left.stderr.count("ERROR: rank 0 on ") == 1
    assert left.stderr.count("what to do: ") == left.body("usage").count("what to do: ")
    assert "--gpucluster-device=cpu" in left.stderr
