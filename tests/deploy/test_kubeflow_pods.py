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
from pathlib import Path
from typing import Any

import kubernetes_manifests as manifests
import local_pods
import pytest
import sessions
import torchrun
from browser import require_program

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


class Pod:
    """A container of a rendered manifest, on this host."""

    def __init__(
        self,
        documents: list[dict[str, Any]],
        container: Mapping[str, Any],
        directory: Path,
        *,
        name: str,
        labels: Mapping[str, str],
        operator: Mapping[str, str],
    ) -> None:
        """Take note of it.

        Args:
            documents: what kustomize has rendered.
            container: the suite's.
            directory: for everything.
            name: of the pod.
            labels: of the pod, by its controllers.
            operator: the variables that the operator sets; they stand behind the manifest's own.
        """
        self.container, self.directory, self.name = container, directory, name
        fields = {"metadata.name": name, "metadata.uid": f"uid-of-{name}", "spec.nodeName": f"node-of-{name}"}
        fields |= {f"metadata.labels['{key}']": value for key, value in labels.items()}
        environ: dict[str, str] = {"KUBERNETES_SERVICE_HOST": "10.96.0.1"}
        environ |= local_pods.from_maps(documents, container)
        for variable in container["env"]:
            value = variable.get("value") or fields[variable["valueFrom"]["fieldRef"]["fieldPath"]]
            environ[variable["name"]] = local_pods.expanded(value, environ)
        self.declared = {**environ, **operator}

    def here(self, text: str) -> str:
        places = {
            "/opt/gpucluster-scripts": "scripts",
            "/opt/gpucluster-mpi": "mpi scripts",
            "/opt/pytest-gpucluster": "suite",
            "/reports": "reports",
        }
        for there, place in places.items():
            text = text.replace(there, str(self.directory / place))
        return text

    @property
    def words(self) -> list[str]:
        words = [*self.container["command"], *self.container.get("args", ())]
        return [self.here(local_pods.expanded(word, self.declared)) for word in words]

    def environ(self, more: Mapping[str, str]) -> dict[str, str]:
        own = {
            "PATH": f"{self.directory / 'bin'}:/usr/bin:/bin",
            "TMPDIR": str(self.directory / "tmp"),
            "TERMINATION_LOG": str(self.directory / f"said-{self.name}"),
            "STAMPS": str(self.directory / "stamps"),
        }
        declared = {key: self.here(value) for key, value in self.declared.items()}
        declared["HOME"] = str(self.directory / "tmp")
        return {**sessions.environment(), **declared, **own, **more}

    def start(self, more: Mapping[str, str]) -> subprocess.Popen[bytes]:
        with (self.directory / f"output-{self.name}.txt").open("wb") as output:
            return subprocess.Popen(
                self.words,
                cwd=self.directory / "suite",
                env=self.environ(more),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )


def prepare(directory: Path, documents: list[dict[str, Any]]) -> None:
    torchrun.write_suite(directory, SUITE)
    (directory / "suite" / "acceptance").mkdir()
    for name in ("test_it.py", "stamps.py"):
        (directory / "suite" / name).rename(directory / "suite" / "acceptance" / name)
    for name in ("reports", "tmp", "stamps", "mpi scripts"):
        (directory / name).mkdir(exist_ok=True)
    local_pods.write_scripts(documents, directory / "scripts")
    local_pods.programs(directory / "bin")
    for path in MPI.glob("*.sh"):
        (directory / "mpi scripts" / path.name).write_text(path.read_text())


def over(directory: Path, agents: list[subprocess.Popen[bytes]], token: str) -> torchrun.Run:
    run = torchrun.Run(
        directory=directory, agents=agents, token=token, started=time.monotonic(), deadline=torchrun.DEADLINE_SECONDS
    )
    return run.wait()


def more(token: str, pods: list[Pod], fault: str, ranks: int) -> dict[str, str]:
    return {
        "RANKS": str(ranks),
        "PET_NPROC_PER_NODE": str(ranks),
        "GPUCLUSTER_EXPECT": f"2x{ranks}",
        "NODES": " ".join(pod.name for pod in pods),
        "FAULT": fault,
        "PYTEST_ADDOPTS": "-p no:hypothesispytest",
        "GPUCLUSTER_TEST_TOKEN": token,
    }


def run_trainjob(directory: Path, fault: str, ranks: int) -> torchrun.Run:
    documents = manifests.render(manifests.KUBERNETES / "trainer" / "overlays" / "cpu-rehearsal")
    prepare(directory, documents)
    trainer = local_pods.find(documents, "TrainJob")["spec"]["trainer"]
    runtime = local_pods.find(documents, "ClusterTrainingRuntime")
    [(_, template)] = manifests.pod_templates(runtime)
    port, name = str(torchrun.free_port()), "acceptance-rehearsal"

    def operator(index: int) -> dict[str, str]:
        """What Trainer's torch plugin sets. Source: kubeflow/trainer, pkg/runtime/framework/plugins/torch/torch.go."""
        return {
            "PET_NNODES": str(trainer["numNodes"]),
            "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]),
            "PET_NODE_RANK": str(index),
            "PET_MASTER_ADDR": "localhost",  # in a cluster acceptance-rehearsal-node-0-0.acceptance-rehearsal
            "PET_MASTER_PORT": port,
            "JOB_COMPLETION_INDEX": str(index),
        }

    labels = {"jobset.sigs.k8s.io/jobset-name": name, "batch.kubernetes.io/controller-uid": UID}
    pods = [
        Pod(
            documents,
            template["spec"]["containers"][0],
            directory,
            name=f"pod-{index}",
            labels=labels,
            operator=operator(index),
        )
        for index in range(trainer["numNodes"])
    ]
    token = uuid.uuid4().hex
    return over(directory, [pod.start(more(token, pods, fault, ranks)) for pod in pods], token)


def run_pytorchjob(directory: Path, fault: str, ranks: int) -> torchrun.Run:
    documents = manifests.render(manifests.KUBERNETES / "pytorchjob" / "overlays" / "cpu-rehearsal")
    prepare(directory, documents)
    spec = local_pods.find(documents, "PyTorchJob")["spec"]
    port = str(torchrun.free_port())

    def operator(index: int) -> dict[str, str]:
        """What the operator sets. Source: kubeflow/training-operator v1.9, pkg/controller.v1/pytorch/envvar.go."""
        return {
            "PYTHONUNBUFFERED": "1",
            "MASTER_PORT": port,
            "PET_MASTER_PORT": port,
            "MASTER_ADDR": "localhost",  # in a cluster acceptance-rehearsal-master-0
            "PET_MASTER_ADDR": "localhost",
            "WORLD_SIZE": str(2 * int(spec["nprocPerNode"])),
            "RANK": str(index),
            "PET_NPROC_PER_NODE": spec["nprocPerNode"],
            "PET_NODE_RANK": str(index),
            "PET_NNODES": "2",
        }

    pods = [
        Pod(
            documents,
            spec["pytorchReplicaSpecs"][role]["template"]["spec"]["containers"][0],
            directory,
            name=f"pod-{index}",
            labels={"training.kubeflow.org/job-name": "acceptance-rehearsal"},
            operator=operator(index),
        )
        for index, role in enumerate(("Master", "Worker"))
    ]
    token = uuid.uuid4().hex
    return over(directory, [pod.start(more(token, pods, fault, ranks)) for pod in pods], token)


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
    documents = manifests.render(manifests.KUBERNETES / "mpijob" / "overlays" / "cpu-rehearsal")
    prepare(directory, documents)
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
    launcher, worker = (
        Pod(
            documents,
            roles[role]["template"]["spec"]["containers"][0],
            directory,
            name=name,
            labels={"batch.kubernetes.io/controller-uid": UID},
            operator=operator if role == "Launcher" else {"K_MPI_JOB_ROLE": "worker"},
        )
        for role, name in (("Launcher", "pod-0"), ("Worker", "pod-1"))
    )
    token, port = uuid.uuid4().hex, str(torchrun.free_port())
    both = {
        **more(token, [launcher, worker], fault, ranks),
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
    "trainjob": (run_trainjob, "fail", 2),
    "pytorchjob": (run_pytorchjob, "", 1),
    # One that passes is below, without the suite: what is its own is how the exit code comes through mpirun.
    "mpijob": (run_mpijob, "fail", 1),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torchrun.Run]:
    require_program("kubectl")
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
    torchrun.SCHEMA.validate(text)
    return text


@pytest.mark.parametrize("case", CASES)
def test_two_pods_are_one_run_with_one_exit_code(runs: dict[str, torchrun.Run], case: str) -> None:
    run, code = runs[case], 1 if CASES[case][1] else 0
    assert set(run.exits) == {code}, run.output
    verdict = "REJECTED" if code else "REHEARSED"
    assert said(run).startswith(f"gpucluster: REHEARSAL, {verdict}, exit code {code}"), said(run)
    assert f'tests="1" failures="{code}"' in report(run)
    assert f"exit code {code}; the verdict is told by pod 0" in said(run, 1)


@pytest.mark.parametrize("case", CASES)
def test_a_run_of_pods_leaves_nothing_behind_but_its_reports(runs: dict[str, torchrun.Run], case: str) -> None:
    run = runs[case]
    assert not run.left_over
    folders = {"trainjob": f"acceptance-rehearsal-{UID}", "pytorchjob": "acceptance-rehearsal-uid-of-pod-0"}
    folder = run.directory / "reports" / folders.get(case, f"acceptance-{UID}")
    assert {path.name for path in (folder / "latest").iterdir()} >= {"journal.jsonl", "report.html", "results.json"}


def test_mpirun_has_started_the_other_node_by_ssh(runs: dict[str, torchrun.Run]) -> None:
    assert (runs["mpijob"].directory / "ssh.log").read_text().split() == [ELSEWHERE]


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        pytest.param((0, 0), 0, id="all nodes passed"),
        pytest.param((10, 0), 10, id="the first node's is the answer"),
        pytest.param((0, 10), 11, id="the first node knows nothing of the other's end"),
    ],
)
def test_exit_codes_come_through_a_real_mpirun(tmp_path: Path, codes: tuple[int, int], expected: int) -> None:
    require_program("kubectl")
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


@pytest.mark.parametrize(
    ("code", "status", "expected"),
    [
        (0, 0, 0),
        (1, 1, 1),
        (10, 10, 10),
        pytest.param(1, 0, 1, id="mpirun thinks nothing of it"),
        pytest.param(10, 143, 10, id="mpirun was ended after the verdict"),
        pytest.param(0, 11, 11, id="another node failed after the verdict"),
        pytest.param("", 0, 11, id="an empty file"),
        pytest.param("none", 0, 11, id="no number"),
    ],
)
def test_the_exit_code_is_that_of_node_0(launcher: Launcher, code: object, status: int, expected: int) -> None:
    found, output = launcher.run(LEAVE.format(code=code, status=status))
    assert found == expected, output


@pytest.mark.parametrize("status", [0, 1, 137])
def test_without_word_of_node_0_it_is_broken(launcher: Launcher, status: int) -> None:
    found, output = launcher.run(f"exit {status}")
    assert found == 11
    assert f"mpirun ended with {status}, and node 0 left no exit code" in output
    assert launcher.said.read_text().startswith("gpucluster: BROKEN, exit code 11")


def test_an_earlier_run_says_nothing(launcher: Launcher) -> None:
    (launcher.directory / "exit code").write_text("0\n")
    found, _ = launcher.run("exit 0")
    assert found == 11


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


@pytest.mark.parametrize(
    ("hosts", "environ", "told"),
    [
        pytest.param(None, {}, "is not there", id="no hostfile"),
        pytest.param("# none\n\n", {}, "names no host", id="no host"),
        pytest.param("no-such-host.invalid slots=1\n", {}, "no address of no-such-host.invalid", id="no address"),
        pytest.param("127.0.0.1\n", {"GPUCLUSTER_REPORT_DIR": ""}, "GPUCLUSTER_REPORT_DIR is not set", id="no reports"),
    ],
)
def test_what_is_missing_is_named_before_mpirun_starts(
    launcher: Launcher, hosts: str | None, environ: dict[str, str], told: str
) -> None:
    launcher.hostfile.unlink()
    if hosts is not None:
        launcher.hostfile.write_text(hosts)
    code, output = launcher.run("exit 0", **environ)
    assert code == 11
    assert told in output
    assert not (launcher.directory / "asked").exists()


def test_an_image_without_mpirun_is_named(launcher: Launcher) -> None:
    code, output = launcher.run(None)
    assert code == 11
    assert "there is no mpirun in this image" in output


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
    return subprocess.run(
        ["bash", str(MPI / "node.sh"), "acceptance/", "-k", "a b"],
        env={name: value for name, value in settings.items() if value},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def test_a_pods_environment_reaches_the_suite_on_its_node(tmp_path: Path) -> None:
    kept = worker(
        tmp_path,
        GPUCLUSTER_HOSTNAME="gpu-002",
        PYTEST_ADDOPTS=HOSTILE,
        MASTER_ADDR="of the pod",
        OMPI_COMM_WORLD_RANK="7",
        OMPI_MCA_odd="1",
    )
    assert kept.stat().st_mode & 0o077 == 0
    done = node(tmp_path, kept, 1)
    assert done.returncode == 0, done.stderr
    seen = dict(
        line.partition("=")[::2] for line in (tmp_path / "its environment").read_text().rstrip("\0").split("\0")
    )
    assert (seen["GPUCLUSTER_HOSTNAME"], seen["PYTEST_ADDOPTS"]) == ("gpu-002", HOSTILE)
    assert (seen["MASTER_ADDR"], seen["GPUCLUSTER_REPORT_DIR"]) == ("launcher", "/reports/run")
    assert (seen["OMPI_COMM_WORLD_RANK"], seen["PET_NODE_RANK"]) == ("1", "1")
    assert "OMPI_MCA_odd" not in seen
    assert (tmp_path / "shown").read_text().splitlines() == [
        *("--nnodes=2", "--node-rank=1", "--master-addr=launcher", "--master-port=29500", "--rdzv-conf=timeout=1800"),
        *("--", "acceptance/", "-k", "a b", "--junitxml=/reports/run/report.xml"),
    ]


def test_sshd_lets_orted_be_found(tmp_path: Path) -> None:
    worker(tmp_path, PATH="/opt/venv/bin:/usr/local/mpi/bin:/usr/bin:/bin", LD_LIBRARY_PATH="/usr/local/mpi/lib")
    told = (tmp_path / "sshd was told").read_text().splitlines()
    assert told[:4] == ["-D", "-e", "-f", "/etc/ssh/gpucluster_sshd_config"]
    assert told[4:] == [
        "-o",
        "SetEnv PATH=/opt/venv/bin:/usr/local/mpi/bin:/usr/bin:/bin LD_LIBRARY_PATH=/usr/local/mpi/lib",
    ]


@pytest.mark.parametrize(("rank", "code"), [(0, 0), (0, 1), (1, 0), (1, 10)])
def test_only_node_0_leaves_its_exit_code(tmp_path: Path, rank: int, code: int) -> None:
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


@pytest.mark.parametrize(
    ("environ", "told"),
    [
        ({"POD_ENVIRONMENT": "/no/such/file"}, "/no/such/file is not there"),
        ({"MASTER_ADDR": ""}, "MASTER_ADDR"),
        ({"GPUCLUSTER_REPORT_DIR": ""}, "GPUCLUSTER_REPORT_DIR"),
        ({"OMPI_COMM_WORLD_RANK": ""}, "mpirun starts this"),
        ({"SUITE_FOLDER": "/no/such/folder"}, "/no/such/folder"),
    ],
)
def test_a_node_without_what_it_needs_does_not_pass(tmp_path: Path, environ: dict[str, str], told: str) -> None:
    done = node(tmp_path, worker(tmp_path), 0, **environ)
    assert done.returncode not in (0, 1, 10), done.returncode
    assert told in done.stderr
    assert not (tmp_path / "exit code").exists()


def test_the_scripts_in_the_manifest_are_these(tmp_path: Path) -> None:
    require_program("kubectl")
    documents = manifests.render(manifests.KUBERNETES / "mpijob" / "overlays" / "production")
    held = local_pods.find(documents, "ConfigMap", "gpucluster-mpi-scripts")["data"]
    assert held == {path.name: path.read_text() for path in MPI.glob("*.sh")}
