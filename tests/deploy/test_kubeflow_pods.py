"""Pods of Kubeflow's kinds as processes of this host: the manifests' own commands, with each operator's variables.

Volumes are folders, and what the kubelet alone can do is missing: users, capabilities, limits, DNS. mpirun is the real
one of Open MPI; only its ssh is not, which starts the worker's side on this host.
"""

from __future__ import annotations

import shlex
import signal
import subprocess
import time
import uuid
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import kubernetes_manifests as manifests
import local_pods
import pytest
import torchrun
from junit_files import require_junit
from kubectl import require_kubectl
from local_pods import Pod, over
from ports import free_port
from programs import require_program
from shell import finished

MPI = manifests.KUBERNETES / "mpijob" / "scripts"
SUITE = {
    "test_it.py": """
        import os
        from stamps import RANK

        def test_it(cluster):
            assert sorted(set(cluster.hosts)) == sorted(os.environ["NODES"].split())
            assert len(set(cluster.all_gather_object(os.getpid()))) == cluster.world_size
            assert cluster.world_size == 2 * int(os.environ["RANKS"])
            assert os.environ["GPUCLUSTER_HOSTNAME"] == cluster.hosts[cluster.rank]
            assert os.environ.get("FAULT") != "fail" or RANK != cluster.world_size - 1, "too slow"
        """
}
UID = "5d1f0a52-0000-4000-8000-000000000002"
ELSEWHERE = "192.0.2.77"
"""A host that is not this one, and whose name needs no DNS (RFC 5737). Nothing is ever sent there."""


def prepare(directory: Path, kind: str) -> list[dict[str, Any]]:
    """Render a kind's rehearsal, and prepare its pods."""
    documents = manifests.render(manifests.KUBERNETES / kind / "overlays" / "cpu-rehearsal")
    local_pods.prepare(directory, documents, SUITE)
    (directory / "mpi scripts").mkdir()
    for path in MPI.glob("*.sh"):
        (directory / "mpi scripts" / path.name).write_text(path.read_text())
    return documents


def pod_of(
    documents: list[dict[str, Any]],
    template: Mapping[str, Any],
    directory: Path,
    index: int,
    labels: Mapping[str, str],
    operator: Mapping[str, str],
) -> Pod:
    """Return the pod of a template, with the labels that its controllers give it and the variables of its operator."""
    name = f"pod-{index}"
    fields = {"metadata.name": name, "metadata.uid": f"uid-of-{name}", "spec.nodeName": f"node-of-{name}"}
    fields |= {f"metadata.labels['{key}']": value for key, value in labels.items()}
    container = template["spec"]["containers"][0]
    variables = local_pods.declared(documents, container, fields, operator)
    return Pod(name=name, container=container, variables=variables, directory=directory)


def more(token: str, fault: str, ranks: int) -> dict[str, str]:
    return {
        "RANKS": str(ranks),
        "PET_NPROC_PER_NODE": str(ranks),
        "GPUCLUSTER_EXPECT": f"2x{ranks}",
        "NODES": "pod-0 pod-1",
        "FAULT": fault,
        "PYTEST_ADDOPTS": "-p no:hypothesispytest",
        "GPUCLUSTER_TEST_TOKEN": token,
    }


def run_torchrun(kind: str, directory: Path, fault: str, ranks: int) -> torchrun.Run:
    """Run the pods of a TrainJob or of a PyTorchJob, which start torchrun."""
    documents = prepare(directory, kind)
    port, token = str(free_port()), uuid.uuid4().hex
    # In a cluster the address is acceptance-rehearsal-node-0-0.acceptance-rehearsal, or acceptance-rehearsal-master-0.
    operator = {"PET_NNODES": "2", "PET_MASTER_ADDR": "localhost", "PET_MASTER_PORT": port}
    if kind == "trainer":
        # Source: kubeflow/trainer, pkg/runtime/framework/plugins/torch/torch.go.
        trainer = local_pods.find(documents, "TrainJob")["spec"]["trainer"]
        assert trainer["numNodes"] == 2
        [(_, template)] = manifests.pod_templates(local_pods.find(documents, "ClusterTrainingRuntime"))
        templates, numbers = [template, template], ("PET_NODE_RANK", "JOB_COMPLETION_INDEX")
        operator["PET_NPROC_PER_NODE"] = str(trainer["numProcPerNode"])
        labels = {"jobset.sigs.k8s.io/jobset-name": "acceptance-rehearsal", "batch.kubernetes.io/controller-uid": UID}
    else:
        # Source: kubeflow/training-operator v1.9, pkg/controller.v1/pytorch/envvar.go.
        spec = local_pods.find(documents, "PyTorchJob")["spec"]
        templates = [spec["pytorchReplicaSpecs"][role]["template"] for role in ("Master", "Worker")]
        numbers = ("PET_NODE_RANK", "RANK")
        operator |= {"PYTHONUNBUFFERED": "1", "MASTER_PORT": port, "MASTER_ADDR": "localhost"}
        operator |= {"PET_NPROC_PER_NODE": spec["nprocPerNode"], "WORLD_SIZE": str(2 * int(spec["nprocPerNode"]))}
        labels = {"training.kubeflow.org/job-name": "acceptance-rehearsal"}
    pods = [
        pod_of(documents, template, directory, index, labels, {**operator, **dict.fromkeys(numbers, str(index))})
        for index, template in enumerate(templates)
    ]
    return over(directory, [pod.start(more(token, fault, ranks)) for pod in pods], token)


SSH = """\
#!/bin/bash
# ssh HOST COMMAND, on this host, with what sshd gives a session: worker.sh has told it PATH.
while [[ $1 == -* ]]; do case $1 in -o) shift 2 ;; *) shift ;; esac; done
echo "$1" >> "{log}"
shift
exec env -i {environ} bash -c "$*"
"""


def run_mpijob(directory: Path, fault: str, ranks: int, *, suite: str | None = None, **environ: str) -> torchrun.Run:
    """Run the MPIJob, with ``suite`` instead of suite.sh where one is given."""
    documents = prepare(directory, "mpijob")
    if suite is not None:
        (directory / "scripts" / "suite.sh").write_text(suite)
    roles = local_pods.find(documents, "MPIJob")["spec"]["mpiReplicaSpecs"]
    hostfile = directory / "hostfile"
    hostfile.write_text(f"127.0.0.1 slots=1\n{ELSEWHERE} slots=1\n")
    # Source: kubeflow/mpi-operator v0.8, pkg/controller/mpi_job_controller.go.
    operator = {
        "K_MPI_JOB_ROLE": "launcher",
        "OMPI_MCA_orte_keep_fqdn_hostnames": "true",
        "OMPI_MCA_orte_default_hostfile": str(hostfile),
        "OMPI_MCA_plm_rsh_args": "-o ConnectionAttempts=10",
    }
    labels = {"batch.kubernetes.io/controller-uid": UID}
    launcher, worker = (
        pod_of(documents, roles[role]["template"], directory, index, labels, variables)
        for index, (role, variables) in enumerate((("Launcher", operator), ("Worker", {"K_MPI_JOB_ROLE": "worker"})))
    )
    token, port = uuid.uuid4().hex, str(free_port())
    both = {
        **more(token, fault, ranks),
        "MASTER_PORT": port,
        "MPI_SCRIPTS": str(directory / "mpi scripts"),
        "SUITE_SCRIPTS": str(directory / "scripts"),
        "SUITE_FOLDER": str(directory / "suite"),
        **environ,
    }
    environment = directory / "tmp" / "environment-of-the-worker"
    subprocess.run(
        worker.words,
        env={**worker.environ(both), "POD_ENVIRONMENT": str(environment), "SSHD": "/bin/true"},
        check=True,
        timeout=30,
    )
    session = {
        "PATH": f"{directory / 'bin'}:/usr/bin:/bin",
        "POD_ENVIRONMENT": str(environment),
        "GPUCLUSTER_TEST_TOKEN": token,
    }
    ssh = directory / "bin" / "fake-ssh"
    ssh.write_text(SSH.format(log=directory / "ssh.log", environ=shlex.join(f"{k}={v}" for k, v in session.items())))
    ssh.chmod(0o755)
    here = {
        **both,
        "HOSTFILE": str(hostfile),
        "POD_ENVIRONMENT": str(directory / "tmp" / "environment-of-the-launcher"),
        "EXIT_CODE_FILE": str(directory / "tmp" / "exit-code"),
        "NODE_PID_FILE": str(directory / "tmp" / "node-pid"),
        "OMPI_MCA_plm_rsh_agent": str(ssh),
        "OMPI_MCA_oob_tcp_if_include": "lo",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }
    return over(directory, [launcher.start(here)], token)


CASES = {
    # Two ranks a pod, as the manifest says; the others have one, which is quicker.
    "trainjob": (partial(run_torchrun, "trainer"), "fail", 2),
    "pytorchjob": (partial(run_torchrun, "pytorchjob"), "", 1),
    # One that passes is below, without the suite: what is its own is how the exit code comes through mpirun.
    "mpijob": (run_mpijob, "fail", 1),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torchrun.Run]:
    require_kubectl()
    require_program("mpirun")
    with ThreadPoolExecutor(max_workers=2) as pool:
        started = {
            name: pool.submit(function, tmp_path_factory.mktemp("pods"), fault, ranks)
            for name, (function, fault, ranks) in CASES.items()
        }
        return {name: future.result() for name, future in started.items()}


def said(run: torchrun.Run, pod: int = 0) -> str:
    return (run.directory / f"said-pod-{pod}").read_text()


def report(run: torchrun.Run) -> str:
    [path] = (run.directory / "reports").glob("*/report.xml")
    text = path.read_text()
    require_junit(text)
    return text


@pytest.mark.extended
@pytest.mark.parametrize("case", CASES)
def test_two_pods_are_one_run_with_one_exit_code_and_leave_only_its_reports(
    runs: dict[str, torchrun.Run], case: str
) -> None:
    run, code = runs[case], 1 if CASES[case][1] else 0
    assert set(run.exits) == {code}, run.output
    verdict = "REJECTED" if code else "REHEARSED"
    assert said(run).startswith(f"gpucluster: REHEARSAL, {verdict}, exit code {code}"), said(run)
    assert f'tests="1" failures="{code}"' in report(run)
    assert f"exit code {code}; " in said(run, 1)
    assert not run.left_over
    folders = {"trainjob": f"acceptance-rehearsal-{UID}", "pytorchjob": "acceptance-rehearsal-uid-of-pod-0"}
    folder = run.directory / "reports" / folders.get(case, f"acceptance-{UID}")
    assert {path.name for path in (folder / "latest").iterdir()} >= {"journal.jsonl", "report.html", "results.json"}
    if case == "mpijob":
        assert (run.directory / "ssh.log").read_text().split() == [ELSEWHERE]


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        pytest.param((0, 0), 0, id="all nodes passed"),
        pytest.param((10, 0), 10, id="the first node's is the answer"),
        pytest.param((0, 10), 11, id="the first node knows nothing of the other's end"),
    ],
)
@pytest.mark.extended
def test_exit_codes_come_through_a_real_mpirun(tmp_path: Path, codes: tuple[int, int], expected: int) -> None:
    require_kubectl()
    require_program("mpirun")
    suite = f'codes=({codes[0]} {codes[1]})\nexit "${{codes[PET_NODE_RANK]}}"\n'
    run = run_mpijob(tmp_path, "", 1, suite=suite, LET_FIRST_END_SECONDS="2")
    assert run.exits == [expected], run.output


# ---- launcher.sh with an mpirun that does as it is told


class Launcher:
    """launcher.sh in a folder with a space in its name."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory / "a folder"
        self.directory.mkdir()
        self.bin = local_pods.programs(self.directory / "bin")
        self.hostfile = self.directory / "hostfile"
        self.hostfile.write_text("127.0.0.1 slots=1\n\n# nobody\n localhost slots=1\n")
        self.said = self.directory / "said"

    def start(self, mpirun: str | None, **environ: str) -> subprocess.Popen[str]:
        if mpirun is not None:
            (self.bin / "mpirun").write_text(f'#!/bin/bash\nprintf "%s\\n" "$@" > "{self.directory}/asked"\n{mpirun}\n')
            (self.bin / "mpirun").chmod(0o755)
        path = str(self.bin)
        for name in ("bash", "cat", "sed", "tee", "rm", "sleep", "env", "kill"):
            if not (self.bin / name).exists():
                (self.bin / name).symlink_to(f"/usr/bin/{name}")
        settings = {
            "PATH": path,
            "HOSTFILE": str(self.hostfile),
            "EXIT_CODE_FILE": str(self.directory / "exit code"),
            "NODE_PID_FILE": str(self.directory / "node pid"),
            "POD_ENVIRONMENT": str(self.directory / "environment"),
            "TERMINATION_LOG": str(self.said),
            "GPUCLUSTER_REPORT_DIR": "/reports/a run",
            "NAME_TRIES": "1",
            **environ,
        }
        return subprocess.Popen(
            ["/usr/bin/bash", str(MPI / "launcher.sh"), "acceptance/", "-k", "a b"],
            env={name: value for name, value in settings.items() if value},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, mpirun: str | None, **environ: str) -> tuple[int, str]:
        launcher = self.start(mpirun, **environ)
        output, _ = launcher.communicate(timeout=60)
        return launcher.returncode, output


@pytest.fixture
def launcher(tmp_path: Path) -> Launcher:
    return Launcher(tmp_path)


LEAVE = 'echo {code} > "$EXIT_CODE_FILE"; exit {status}'


def test_the_exit_code_is_that_of_node_0(launcher: Launcher) -> None:
    for code, status, expected in (
        (0, 0, 0),
        (1, 1, 1),
        (10, 10, 10),
        (1, 0, 1),  # mpirun thinks nothing of it
        (10, 143, 10),  # mpirun was ended after the verdict
        (0, 11, 11),  # another node failed after the verdict
        ("", 0, 11),
        ("none", 0, 11),
    ):
        found, output = launcher.run(LEAVE.format(code=code, status=status))
        assert found == expected, (code, status, output)


def test_without_word_of_node_0_it_is_broken_whatever_an_earlier_run_has_left(launcher: Launcher) -> None:
    for status in (0, 1, 137):
        (launcher.directory / "exit code").write_text("0\n")
        found, output = launcher.run(f"exit {status}")
        assert found == 11
        assert f"mpirun ended with {status}, " in output
        assert launcher.said.read_text().startswith("gpucluster: BROKEN, exit code 11")


def test_mpirun_is_told_to_start_one_unbound_process_a_node(launcher: Launcher) -> None:
    tell = LEAVE.format(code=0, status=0)
    code, output = launcher.run(f'echo "master $MASTER_ADDR, reports $GPUCLUSTER_REPORT_DIR"; {tell}')
    assert code == 0
    asked = (launcher.directory / "asked").read_text().splitlines()
    assert asked == [
        *("--hostfile", str(launcher.hostfile), "-np", "2", "--map-by", "ppr:1:node", "--bind-to", "none"),
        *("-x", "MASTER_ADDR", "-x", "GPUCLUSTER_REPORT_DIR"),
        *("bash", "/opt/gpucluster-mpi/node.sh", "acceptance/", "-k", "a b"),
    ]
    assert "master 127.0.0.1, reports /reports/a run" in output


def test_what_is_missing_is_named_before_mpirun_starts(launcher: Launcher) -> None:
    for hosts, environ, told in (
        (None, {}, "hostfile"),
        ("# none\n\n", {}, "hostfile"),
        ("no-such-host.invalid slots=1\n", {}, "no-such-host.invalid"),
        ("127.0.0.1\n", {"GPUCLUSTER_REPORT_DIR": ""}, "GPUCLUSTER_REPORT_DIR"),
    ):
        launcher.hostfile.unlink(missing_ok=True)
        if hosts is not None:
            launcher.hostfile.write_text(hosts)
        code, output = launcher.run("exit 0", **environ)
        assert (code, told in output) == (11, True), output
        assert not (launcher.directory / "asked").exists()
    (launcher.bin / "mpirun").unlink()
    code, output = launcher.run(None)
    assert (code, "no mpirun" in output) == (11, True), output


@pytest.mark.parametrize("begun", [True, False], ids=["node 0 has begun", "mpirun has only begun"])
def test_sigterm_reaches_who_can_end_the_run(launcher: Launcher, begun: bool) -> None:
    """mpirun itself would kill the nodes a second later, so it is asked only where there is no node yet."""
    ready = launcher.directory / "ready"
    pid = 'echo "$$" > "$NODE_PID_FILE"' if begun else ":"
    wait = f': > "{ready}"; while true; do sleep 0.1; done'
    node = f"trap 'echo 2 > \"$EXIT_CODE_FILE\"; exit 143' TERM; {pid}; {wait}"
    mpirun = f"trap 'echo mpirun was asked; exit 1' TERM; {wait}"
    # The node of the one case is a child of mpirun; bash acts on a signal when its child has ended.
    started = launcher.start(f"bash -c {shlex.quote(node)}; exit 143" if begun else mpirun)
    until = time.monotonic() + 30
    while not ready.exists() and time.monotonic() < until:
        time.sleep(0.05)
    started.send_signal(signal.SIGTERM)
    output, _ = started.communicate(timeout=60)
    assert started.returncode == (2 if begun else 11), output
    assert ("mpirun was asked" in output) != begun


# ---- worker.sh and node.sh

HOSTILE = 'a b\n"$(exit 1)"\n\'`;é\\'


def worker(directory: Path, **environ: str) -> Path:
    """Run worker.sh to where it becomes sshd."""
    sshd = directory / "sshd"
    sshd.write_text(f'#!/bin/bash\nprintf "%s\\n" "$@" > "{directory}/sshd was told"\n')
    sshd.chmod(0o755)
    kept = directory / "environment"
    subprocess.run(
        ["bash", str(MPI / "worker.sh")],
        env={"PATH": "/usr/bin:/bin", "SSHD": str(sshd), "POD_ENVIRONMENT": str(kept), **environ},
        check=True,
        timeout=30,
    )
    return kept


def node(directory: Path, kept: Path, rank: int, code: int = 0, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run node.sh with a suite.sh that shows what it got."""
    (directory / "scripts").mkdir(exist_ok=True)
    shown = directory / "shown"
    (directory / "scripts" / "suite.sh").write_text(
        f'printf "%s\\n" "$@" > "{shown}"\nenv -0 > "{directory}/its environment"\nexit {code}\n'
    )
    settings = {
        "PATH": "/usr/bin:/bin",
        "POD_ENVIRONMENT": str(kept),
        "OMPI_COMM_WORLD_RANK": str(rank),
        "OMPI_COMM_WORLD_SIZE": "2",
        "MASTER_ADDR": "launcher",
        "GPUCLUSTER_REPORT_DIR": "/reports/run",
        "SUITE_SCRIPTS": str(directory / "scripts"),
        "SUITE_FOLDER": str(directory),
        "EXIT_CODE_FILE": str(directory / "exit code"),
        "NODE_PID_FILE": str(directory / "node pid"),
        "LET_FIRST_END_SECONDS": "0",
        **environ,
    }
    return finished(
        ["bash", str(MPI / "node.sh"), "acceptance/", "-k", "a b"],
        env={name: value for name, value in settings.items() if value},
    )


def test_a_pods_environment_reaches_the_suite_on_its_node_and_orted_is_found(tmp_path: Path) -> None:
    places = {"PATH": "/opt/venv/bin:/usr/local/mpi/bin:/usr/bin:/bin", "LD_LIBRARY_PATH": "/usr/local/mpi/lib"}
    others = {"MASTER_ADDR": "of the pod", "OMPI_COMM_WORLD_RANK": "7", "OMPI_MCA_odd": "1"}
    kept = worker(tmp_path, GPUCLUSTER_HOSTNAME="gpu-002", PYTEST_ADDOPTS=HOSTILE, **others, **places)
    assert kept.stat().st_mode & 0o077 == 0
    assert (tmp_path / "sshd was told").read_text().splitlines() == [
        *("-D", "-e", "-f", "/etc/ssh/gpucluster_sshd_config"),
        *("-o", "SetEnv " + " ".join(f"{name}={value}" for name, value in places.items())),
    ]
    done = node(tmp_path, kept, 1)
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "its environment").read_text().rstrip("\0").split("\0")
    seen = dict(line.partition("=")[::2] for line in lines)
    expected = {"GPUCLUSTER_HOSTNAME": "gpu-002", "PYTEST_ADDOPTS": HOSTILE, "MASTER_ADDR": "launcher"}
    expected |= {"GPUCLUSTER_REPORT_DIR": "/reports/run", "OMPI_COMM_WORLD_RANK": "1", "PET_NODE_RANK": "1"}
    assert {name: seen[name] for name in expected} == expected
    assert "OMPI_MCA_odd" not in seen
    assert (tmp_path / "shown").read_text().splitlines() == [
        *("--nnodes=2", "--node-rank=1", "--master-addr=launcher", "--master-port=29500", "--rdzv-conf=timeout=1800"),
        *("--", "acceptance/", "-k", "a b", "--junitxml=/reports/run/report.xml"),
    ]


def test_only_node_0_leaves_its_exit_code(tmp_path: Path) -> None:
    for rank, code in ((1, 0), (1, 10), (0, 0), (0, 1)):
        done = node(tmp_path, worker(tmp_path), rank, code)
        assert done.returncode == code
        left = tmp_path / "exit code"
        assert (left.read_text() if left.exists() else None) == (f"{code}\n" if rank == 0 else None)
        assert (tmp_path / "node pid").exists() == (rank == 0)


def test_a_node_that_failed_lets_the_first_one_end_before_it(tmp_path: Path) -> None:
    kept = worker(tmp_path)
    sleeps = tmp_path / "bin"
    sleeps.mkdir()
    (sleeps / "sleep").write_text(f'#!/bin/bash\necho "$1" >> "{tmp_path}/slept"\n')
    (sleeps / "sleep").chmod(0o755)
    kept.write_text(kept.read_text() + f'declare -x PATH="{sleeps}:/usr/bin:/bin"\n')
    for rank, code in ((0, 1), (1, 0), (1, 1)):
        node(tmp_path, kept, rank, code, LET_FIRST_END_SECONDS="")
    assert (tmp_path / "slept").read_text() == "900\n"


def test_a_node_without_what_it_needs_does_not_pass(tmp_path: Path) -> None:
    for environ, told in (
        ({"POD_ENVIRONMENT": "/no/such/file"}, "/no/such/file"),
        ({"MASTER_ADDR": ""}, "MASTER_ADDR"),
        ({"GPUCLUSTER_REPORT_DIR": ""}, "GPUCLUSTER_REPORT_DIR"),
        ({"OMPI_COMM_WORLD_RANK": ""}, "OMPI_COMM_WORLD_RANK"),
        ({"SUITE_FOLDER": "/no/such/folder"}, "/no/such/folder"),
    ):
        done = node(tmp_path, worker(tmp_path), 0, **environ)
        assert done.returncode not in (0, 1, 10), environ
        assert told in done.stderr
        assert not (tmp_path / "exit code").exists()


def test_the_scripts_in_the_manifest_are_these(tmp_path: Path) -> None:
    require_kubectl()
    documents = manifests.render(manifests.KUBERNETES / "mpijob" / "overlays" / "production")
    held = local_pods.find(documents, "ConfigMap", "gpucluster-mpi-scripts")["data"]
    assert held == {path.name: path.read_text() for path in MPI.glob("*.sh")}
