"""suite.sh, keep.sh and collect.sh: the real scripts of the manifests, with a real suite or a stand-in for it."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import kubernetes_manifests as manifests
import local_pods
import pytest
from junit_files import require_junit
from kubectl import require_kubectl
from recordings import wait_until
from shell import finished

from pytest_gpucluster.reports.registry import FILES

SCRIPTS = manifests.KUBERNETES / "components" / "scripts"
COLLECT = manifests.KUBERNETES / "collect.sh"
WITHIN_SECONDS = 60


# ---- two pods with a real suite

SUITE = {
    "test_it.py": """
        import os

        def test_it(cluster, measure):
            assert sorted(set(cluster.hosts)) == sorted(os.environ["NODES"].split())
            assert len(set(cluster.all_gather_object(os.getpid()))) == cluster.world_size
        """
}


@pytest.mark.extended
@pytest.mark.smoke
def test_two_pods_are_one_run_with_one_verdict_and_leave_their_reports(tmp_path):
    """With a failure, and of Kubeflow's kinds: test_kubeflow_pods.py."""
    require_kubectl()
    documents = manifests.render(manifests.KUBERNETES / "overlays" / "cpu-rehearsal")
    local_pods.prepare(tmp_path, documents, SUITE)
    # In a rehearsal a node is called as its pod.
    nodes = ("acceptance-0-x7k2p", "acceptance-1-x7k2p")
    more = {"NODES": " ".join(nodes), "GPUCLUSTER_DEVICE": "cpu", "PYTEST_ADDOPTS": "-p no:hypothesispytest"}
    run = local_pods.run_job(documents, tmp_path, nodes, more)
    assert run.exits == [0, 0], run.output
    said = [(tmp_path / f"said-{index}").read_text() for index in (0, 1)]
    assert said[0].startswith("gpucluster: REHEARSAL, REHEARSED, exit code 0"), said
    assert said[1].startswith("gpucluster: exit code 0")
    assert not run.left_over
    folder = tmp_path / "reports" / f"acceptance-{local_pods.UID}"
    assert {path.name for path in (folder / "latest").iterdir()} >= set(FILES.values())
    require_junit((folder / "report.xml").read_text())


# ---- suite.sh with a stand-in for gpucluster

FAKE = """\
#!/bin/bash
echo "$*" >> "{log}"
case $1 in
  run) {run} ;;
  report) {report} ;;
  verdict) {verdict} ;;
esac
"""


class Pod:
    """suite.sh in a folder, with a gpucluster that does as it is told."""

    def __init__(self, directory):
        self.directory = directory
        self.log = directory / "log"
        self.answer = directory / "answer"
        self.bin = local_pods.programs(directory / "bin")

    def start(self, *arguments, run="exit 0", report=":", verdict="echo gpucluster: told", **environ):
        (self.bin / "gpucluster").write_text(FAKE.format(log=self.log, run=run, report=report, verdict=verdict))
        settings = {
            "PATH": f"{self.bin}:/usr/bin:/bin",
            "GPUCLUSTER_REPORT_DIR": str(self.directory / "my reports"),
            "TERMINATION_LOG": str(self.answer),
            "JOB_COMPLETION_INDEX": "0",
            **environ,
        }
        return subprocess.Popen(
            ["bash", str(SCRIPTS / "suite.sh"), *arguments],
            env={key: value for key, value in settings.items() if value is not None},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )

    def run(self, *arguments, **settings):
        process = self.start(*arguments, **settings)
        try:
            output, _ = process.communicate(timeout=WITHIN_SECONDS)
        finally:
            _kill(process)
        return process.returncode, output


def _kill(process):
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture
def pod(tmp_path):
    return Pod(tmp_path)


def test_the_arguments_reach_the_suite_as_they_are(pod):
    code, _ = pod.run("--nnodes=2", "--", "acceptance/", "-k", "a b")
    assert code == 0
    report = pod.directory / "my reports"
    assert pod.log.read_text().splitlines() == [
        "run --nnodes=2 -- acceptance/ -k a b",
        f"report {report} --text - --all {report}/latest",
        f"verdict {report}",
    ]
    assert pod.answer.read_text() == "gpucluster: told\n"


def test_the_exit_code_is_the_suites_and_any_other_end_is_broken(pod):
    codes = (0, 1, 2, 3, 4, 5, 10, 11)
    assert [pod.run(run=f"exit {code}", verdict=f"exit {code}")[0] for code in codes] == list(codes)
    for code in (7, 126, 127, 137):
        assert pod.run(run=f"exit {code}", verdict=f"exit {code}")[0] == 11
        assert pod.answer.read_text().startswith("gpucluster: BROKEN, exit code 11: ")
        assert f" {code}" in pod.answer.read_text()
    # A pass that the record does not confirm.
    assert pod.run(run="exit 0", verdict="echo gpucluster: no verdict; exit 11")[0] == 11
    assert "gpucluster: no verdict" in pod.answer.read_text()


def test_the_reports_are_rendered_again_whatever_happened(pod):
    assert pod.run(run="kill -9 $$", report="echo rendered; exit 4", verdict="exit 1")[0] == 11
    assert "report " in pod.log.read_text()


def test_other_pods_leave_the_record_to_pod_0(pod):
    for environ in ({"JOB_COMPLETION_INDEX": "3"}, {"JOB_COMPLETION_INDEX": None, "PET_NODE_RANK": "3"}):
        code, _ = pod.run(run="exit 1", **environ)
        assert code == 1
        assert pod.answer.read_text().startswith("gpucluster: exit code 1; ")
    assert "verdict" not in pod.log.read_text()


@pytest.mark.parametrize(
    ("environ", "told"),
    [
        pytest.param({"GPUCLUSTER_REPORT_DIR": None}, "GPUCLUSTER_REPORT_DIR", id="no report directory"),
        pytest.param({"GPUCLUSTER_REPORT_DIR": "/proc/1/reports"}, "/proc/1/reports", id="cannot be written to"),
        pytest.param({"MASTER_ADDR": "a-0.invalid", "NAME_TRIES": "1"}, "a-0.invalid", id="no DNS name"),
        pytest.param({"SUITE_SOURCE": "/nowhere.sh"}, "/nowhere.sh", id="no script of the provider"),
        pytest.param({"SUITE_LOCK": "/proc/1/lock"}, "/proc/1/lock", id="no lock"),
        pytest.param({"PATH": "/usr/bin:/bin"}, "no gpucluster ", id="another image"),
    ],
)
def test_what_is_missing_is_told_and_broken_but_no_rejection(pod, environ, told):
    code, output = pod.run(**environ)
    assert code == 11, output
    assert told in pod.answer.read_text()
    assert not pod.log.exists()


def test_what_the_provider_sets_reaches_the_suite(pod, tmp_path):
    script = tmp_path / "set env.sh"
    script.write_text("export NCCL_NET=gIB\n[[ -n $NOT_SET_ANYWHERE ]] || true\n")
    _, output = pod.run(run="echo net=$NCCL_NET", SUITE_SOURCE=str(script))
    assert "net=gIB" in output
    script.write_text("false\n")
    assert pod.run(SUITE_SOURCE=str(script))[0] == 11


@pytest.mark.parametrize("begun", [True, False], ids=["the suite runs", "the suite has not begun"])
def test_sigterm_reaches_the_run_which_ends_in_its_own_way(pod, begun):
    trap = "trap 'echo writing reports; sleep 0.5; exit 2' TERM; touch \"$GPUCLUSTER_REPORT_DIR/runs\"; "
    run = trap + "while true; do sleep 0.05; done"
    process = pod.start(
        run=run, verdict="echo interrupted; exit 2", MASTER_ADDR=None if begun else "acceptance-0.invalid"
    )
    try:
        wait_until((pod.directory / "my reports" / ("runs" if begun else "")).exists)
        time.sleep(0 if begun else 0.2)
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=WITHIN_SECONDS)
    finally:
        _kill(process)
    assert process.returncode == 2, output
    assert ("writing reports" in output) == pod.log.exists() == begun
    assert ("interrupted\n" if begun else "exit code 2") in pod.answer.read_text()


# ---- keep.sh


def test_a_collector_stays_until_the_suite_is_dead_and_the_reports_are_fetched(pod, tmp_path):
    lock = tmp_path / "reports" / ".suite"
    lock.parent.mkdir()
    suite = pod.start(run='touch "$GPUCLUSTER_REPORT_DIR/runs"; sleep 60', SUITE_LOCK=str(lock))
    with (tmp_path / "kept").open("w") as kept:
        keeper = subprocess.Popen(
            ["bash", str(SCRIPTS / "keep.sh")],
            env={"PATH": "/usr/bin:/bin", "SUITE_LOCK": str(lock), "KEEP_SECONDS": "300"},
            stdout=kept,
            start_new_session=True,
        )
    try:
        wait_until((pod.directory / "my reports" / "runs").exists)
        assert subprocess.run(["flock", "--nonblock", str(lock), "true"], check=False).returncode == 1
        assert keeper.poll() is None
        # As by the kernel's OOM killer: nothing of the suite can say that it ends.
        os.killpg(suite.pid, signal.SIGKILL)
        wait_until(lambda: "suite has ended" in (tmp_path / "kept").read_text())
        assert keeper.poll() is None
        (lock.parent / ".collected").touch()
        assert keeper.wait(timeout=WITHIN_SECONDS) == 0
        assert "collected" in (tmp_path / "kept").read_text()
    finally:
        for process in (suite, keeper):
            _kill(process)
        suite.stdout.close()


def test_a_collector_does_not_wait_for_ever(tmp_path):
    lock = tmp_path / ".suite"
    lock.write_text("locked\n")
    environ = {"PATH": "/usr/bin:/bin", "SUITE_LOCK": str(lock), "KEEP_SECONDS": "0"}
    assert finished(["bash", SCRIPTS / "keep.sh"], env=environ).returncode == 0


def test_two_pods_do_not_share_a_lock(pod, tmp_path):
    lock = tmp_path / ".suite"
    with subprocess.Popen(["flock", str(lock), "sh", "-c", "echo held; read gone"], stdin=-1, stdout=-1) as holder:
        assert holder.stdout.readline() == b"held\n"
        assert pod.run(SUITE_LOCK=str(lock))[0] == 11
        assert str(lock) in pod.answer.read_text()
        holder.stdin.close()


# ---- collect.sh, with a kubectl that tells of pods as it is told

KUBECTL = """\
#!{python} -S
import json, pathlib, re, subprocess, sys, time

root = pathlib.Path({root!r})
told = json.loads((root / "told.json").read_text())
words = [word for word in sys.argv[1:] if not word.startswith("--namespace=")]
with (root / "calls").open("a") as calls:
    calls.write(json.dumps(sys.argv[1:]) + "\\n")
out = next((word.partition("=")[2].partition("=")[2] for word in words if word.startswith("--output=")), "")

def fail(text):
    sys.stderr.write(text + "\\n")
    sys.exit(1)

def look(name):
    count = root / name
    count.write_text(str(int(count.read_text()) + 1 if count.exists() else 1))
    return int(count.read_text())

if words[:2] == ["get", "job"]:
    if told.get("no_job"):
        fail('Error from server (NotFound): jobs.batch "acceptance" not found')
    if told.get("no_fields") and "uid" not in out:
        fail("the connection was refused")
    fields = {{"metadata.uid": "u1", "spec.completions": str(told["completions"]), '"suite")].image': "suite:1",
        "persistentVolumeClaim": told.get("claim", ""), '"suite")].securityContext': told.get("user", ""),
        "securityContext.runAsUser": "10001", "activeDeadlineSeconds": told.get("deadline", ""),
        "tolerations": '[{{"key":"nvidia.com/gpu","operator":"Exists"}}]', "imagePullSecrets": ""}}
    if "conditions" in out:
        print(told.get("conditions", "") if look("looks") >= told.get("after", 1) else "", end="")
    else:
        print(next(value for key, value in fields.items() if key in out), end="")
elif words[:2] == ["get", "pods"]:
    for pod in told["pods"]:
        print("|".join(str(pod.get(key, "")) for key in ("index", "name", "node", "code", "phase", "why")))
elif words[:2] == ["get", "pod"]:
    print(told.get("message", "gpucluster: ACCEPTED, exit code 0"), end="")
elif words[:2] == ["get", "nodes"]:
    if told["nodes"] is None:
        fail("nodes is forbidden")
    print(*told["nodes"])
elif words[0] == "logs":
    if words[1] in told.get("no_log", []):
        fail("container creating")
    print(f"log of {{words[1]}}", flush=True)
    if words[1] in told.get("log_stalls", []):
        time.sleep(600)
elif words[0] == "exec":
    command = words[words.index("--") + 1:]
    if command[0] == "tar":
        if told.get("no_tar"):
            fail("command terminated with exit code 2")
        if words[1] in told.get("tar_stalls", []):
            sys.stdout.write("the beginning of a tar")
            sys.stdout.flush()
            time.sleep(600)
        here = root / "volume"
        sys.exit(subprocess.run([word.replace("/reports", str(here)) for word in command]).returncode)
elif words[0] == "create":
    (root / "reader.json").write_text(sys.stdin.read())
    print("pod/acceptance-reader-x7k2p")
elif words[0] in ("wait", "delete"):
    sys.exit(1 if words[0] == "wait" and told.get("never_ready") else 0)
else:
    fail(f"unknown: {{words}}")
"""


@pytest.fixture
def cluster(tmp_path):
    """A kubectl that tells of a Job; the function runs collect.sh with it."""
    folder = tmp_path / "fake"
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "kubectl").write_text(KUBECTL.format(python=sys.executable, root=str(folder)))
    (folder / "bin" / "kubectl").chmod(0o755)
    run_folder = folder / "volume" / "acceptance-u1" / "20260102-030405"
    run_folder.mkdir(parents=True)
    (run_folder / "journal.jsonl").write_text("{}\n")

    def collect(*arguments, path=f"{folder}/bin:/usr/bin:/bin", into="out put", environ=None, **told):
        (folder / "told.json").write_text(json.dumps(told))
        done = finished(
            ["bash", str(COLLECT), *arguments, *([into] if into else [])],
            env={"PATH": path, "POLL_SECONDS": "0.05", **(environ or {})},
            cwd=tmp_path,
        )
        return done.returncode, done.stdout, done.stderr

    collect.folder = tmp_path / "out put"
    collect.root = folder
    collect.calls = lambda: [json.loads(line) for line in (folder / "calls").read_text().splitlines()]
    return collect


def pod_told(index, code="0", node=None, **more):
    return {"index": index, "name": f"acceptance-{index}-x", "node": node or f"gpu-00{index + 1}", "code": code, **more}


def test_logs_and_reports_are_brought_from_the_collector(cluster):
    code, out, err = cluster(
        "--namespace", "gpu", completions=2, pods=[pod_told(0, "1"), pod_told(1, "1")], message="gpucluster: REJECTED"
    )
    assert code == 1, err
    assert "gpucluster: REJECTED" in out
    assert {path.name for path in cluster.folder.iterdir()} == {"gpu-001-0.log", "gpu-002-1.log", "acceptance-u1"}
    assert (cluster.folder / "acceptance-u1" / "20260102-030405" / "journal.jsonl").is_file()
    # What pod 0 has replaces what the others have.
    fetched = [call[2] for call in cluster.calls() if "tar" in call]
    assert fetched == ["acceptance-1-x", "acceptance-0-x"]
    released = [call for call in cluster.calls() if "touch" in call]
    assert len(released) == 2
    assert all(call[0] == "--namespace=gpu" for call in cluster.calls())


def test_reports_are_brought_from_a_volume_by_a_pod_that_is_deleted(cluster):
    code, _, err = cluster(completions=1, pods=[pod_told(0)], claim="gpucluster-reports", conditions="Complete ")
    assert code == 0, err
    assert (cluster.folder / "acceptance-u1").is_dir()
    pod = json.loads((cluster.root / "reader.json").read_text())
    assert manifests.core_problems(pod) == []
    # Its name is made by the API server: one that was left behind is in nobody's way.
    named = {**pod, "metadata": {"name": pod["metadata"]["generateName"] + "x7k2p"}}
    [problem] = manifests.reference_problems([named])
    assert "PersistentVolumeClaim gpucluster-reports" in problem
    assert manifests.dangers([pod]) == []
    assert pod["spec"]["containers"][0]["volumeMounts"][0]["readOnly"] is True
    assert pod["spec"]["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists"}]
    [near] = pod["spec"]["affinity"]["nodeAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    assert near["preference"]["matchFields"][0]["values"] == ["gpu-001"]
    assert any("delete" in call and "pod/acceptance-reader-x7k2p" in call for call in cluster.calls())


def test_reports_of_root_are_read_by_root_also_where_pod_0_is_gone(cluster):
    code, _, err = cluster(completions=1, pods=[], claim="c", conditions="Failed ", user="0")
    assert code == 11, err
    assert (cluster.folder / "acceptance-u1").is_dir()
    pod = json.loads((cluster.root / "reader.json").read_text())
    assert manifests.core_problems(pod) == []
    assert manifests.dangers([pod]) == ["root"]


def test_it_waits_until_the_job_is_over(cluster):
    going = [pod_told(0, ""), pod_told(1, "0")]
    code, _, _ = cluster(completions=2, pods=going, conditions="Failed ", after=3, claim="c")
    assert code == 11, "pod 0 has no exit code"
    assert int((cluster.root / "looks").read_text()) == 3


BOTH = [pod_told(0), pod_told(1)]
PENDING = {**pod_told(1, ""), "node": "", "phase": "Pending", "why": "0/2 nodes are available"}
KILLED = pod_told(0, "137", phase="Failed", why="OOMKilled")


@pytest.mark.parametrize(
    ("told", "words"),
    [
        pytest.param({"pods": [pod_told(0), pod_told(1, "11")]}, "", id="another pod failed beside a pass"),
        pytest.param({"pods": [pod_told(0), PENDING]}, "0/2 nodes ", id="a pod that never ran"),
        pytest.param({"pods": [pod_told(1)], "conditions": "Failed "}, "pod 0 of job/acceptance", id="no pod 0"),
        pytest.param({"pods": BOTH, "no_tar": True}, "no reports", id="no reports"),
        pytest.param({"pods": BOTH, "never_ready": True, "claim": "c"}, "the volume c", id="no volume"),
        pytest.param({"pods": BOTH, "no_log": ["acceptance-1-x"]}, "no log", id="no log"),
        pytest.param({"pods": [], "no_job": True}, "not found", id="no Job"),
        pytest.param({"pods": [], "no_fields": True}, "line ", id="an API server that is gone soon"),
        pytest.param({"pods": [pod_told(0)], "conditions": "Complete "}, ": 0\n", id="a pod is gone beside a pass"),
        pytest.param({"pods": [*BOTH, {**BOTH[1], "name": "acceptance-1-y"}]}, ": 0 1 1\n", id="two of one index"),
        pytest.param({"pods": [KILLED, pod_told(1, "137")]}, "acceptance-0-x on gpu-001: exit code 137, ", id="killed"),
        pytest.param({"pods": BOTH, "claim": "c", "conditions": "Failed "}, "Job has failed", id="a Job has failed"),
    ],
)
def test_what_is_not_all_there_is_no_pass(cluster, told, words):
    code, _, err = cluster("--within", "1", completions=2, **told)
    assert code == 11, err
    assert words in err + "\n"


STALLED = {"LOG_SECONDS": "3", "REPORTS_SECONDS": "3"}


def test_a_log_that_never_ends_ends_the_pass_and_not_the_script(cluster):
    code, _, err = cluster(completions=2, pods=BOTH, log_stalls=["acceptance-0-x"], claim="c", environ=STALLED)
    assert code == 11
    assert "acceptance-0-x on gpu-001: " in err
    assert " 3 s" in err
    assert (cluster.folder / "gpu-001-0.log.part").read_text() == "log of acceptance-0-x\n"
    # All else is brought.
    assert {path.name for path in cluster.folder.iterdir()} == {"gpu-001-0.log.part", "gpu-002-1.log", "acceptance-u1"}


@pytest.mark.parametrize("stalled", ["acceptance-reader-x7k2p", "acceptance-1-x", "acceptance-0-x"])
def test_reports_that_never_come_end_the_pass_and_not_the_script(cluster, stalled):
    claim = "c" if "reader" in stalled else ""
    code, _, err = cluster(completions=2, pods=BOTH, tar_stalls=[stalled], claim=claim, environ=STALLED)
    assert code == 11
    assert f"pod {stalled}: " in err
    assert " 3 s" in err
    assert {"gpu-001-0.log", "gpu-002-1.log"} <= {path.name for path in cluster.folder.iterdir()}
    assert not (cluster.folder / ".reports.tar").exists()
    deleted = [call for call in cluster.calls() if "delete" in call]
    assert len(deleted) == bool(claim), "the pod that reads the volume does not stay"


def test_a_rejection_stays_one_where_the_reports_are_lost(cluster):
    assert cluster(completions=1, pods=[pod_told(0, "1")], no_tar=True)[0] == 1


def test_discovery_is_one_file_a_node_and_names_who_is_missing(cluster):
    words = ("--job", "discovery", "--nodes", "gpu=yes")
    pods = [pod_told(0), pod_told(1, "4"), pod_told(2, "", node="gpu-003", phase="Running")]
    nodes = ["gpu-001", "gpu-002", "gpu-003", "gpu-004"]
    code, out, err = cluster(*words, "--within", "0", completions=3, pods=pods, nodes=nodes)
    assert code == 11
    assert {path.name for path in cluster.folder.iterdir()} == {"gpu-001.json"}
    assert "1 of 3 pods " in out
    assert ["gpu-001" in err, *(f"{node} has not answered" in err for node in nodes[1:])] == [False, True, True, True]
    for nodes in (None, []):  # they cannot be listed, or there is none
        code, _, err = cluster(*words, completions=1, pods=[pod_told(0)], conditions="Complete ", nodes=nodes)
        assert (code, " gpu=yes " in err) == (11, True), err


def test_it_waits_longer_than_the_job_may_take(cluster):
    told = {"completions": 1, "pods": [pod_told(0, "")], "conditions": ""}
    assert cluster(**told, deadline="-600")[0] == 11
    assert cluster(**{**told, "pods": [pod_told(0)]}, after=3, deadline="1")[0] == 0


def test_wrong_usage_is_told(cluster):
    for arguments, told in (
        (["--jobb", "x"], "--jobb"),
        (["--within", "soon"], "--within"),
        (["one"], "two folders"),
        (["--job", ""], "--job"),
        (["--nodes", "gpu=yes"], "--nodes"),
    ):
        code, _, err = cluster(*arguments)
        assert (code, told in err) == (2, True), err
    assert cluster(into="")[0] == 2
    for name in ("LOG_SECONDS", "REPORTS_SECONDS"):
        for value in ("0", "soon", "-1", "1.5"):  # by 0 `timeout` would mean none
            code, _, err = cluster(environ={name: value})
            assert (code, f"{name}={value}" in err) == (2, True), err


def test_without_its_programs_it_says_so(cluster, tmp_path):
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("bash", "sed", "cat"):
        (tools / name).symlink_to(shutil.which(name))
    code, _, err = cluster(path=str(tools))
    assert (code, "no kubectl" in err) == (2, True)
    (tools / "kubectl").symlink_to(cluster.root / "bin" / "kubectl")
    code, _, err = cluster(path=str(tools))
    assert (code, "no timeout" in err) == (2, True)
