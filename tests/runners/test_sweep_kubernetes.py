"""A sweep on Kubernetes: the Jobs that are made, what their pods answer, and what is left when it ends."""

import json
import sys
import time
from types import SimpleNamespace

import pytest
from fake_kubernetes import FakeKubernetes, node
from fake_ssh import found, journal_lines
from journal_lines import journal_of
from ports import free_port
from sessions import clean_environment

from pytest_gpucluster.cli import main
from pytest_gpucluster.runners.run_result import RunResult
from pytest_gpucluster.runners.sweep_kubernetes import Kubernetes

TEMPLATE = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {"name": "mine", "labels": {"team": "x"}, "annotations": {"k8s.v1.cni.cncf.io/networks": "ib"}},
    "spec": {
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
        "containers": [
            {
                "name": "suite",
                "image": "registry/acceptance:1",
                "env": [{"name": "NCCL_IB_HCA", "value": "mlx5"}],
                "resources": {"limits": {"nvidia.com/gpu": 8}},
            }
        ],
    },
}


def says(exit=0, code=None, **lines):
    """What a pod is that has run the suite: its answer, and its exit code where that is another."""
    message = RunResult.of(journal_of(journal_lines(exit=exit, **lines)), "/tmp/journal.jsonl").to_json()
    return {"do": "end", "exit": exit if code is None else code, "message": message}


PASSED = says()
REJECTED = says(outcome="failed", message="slow", verdict="REJECTED", exit=1)
TOGETHER = says(nnodes=2) | {"exit": [0, 0]}


@pytest.fixture
def fake(tmp_path):
    return FakeKubernetes(tmp_path / "kubernetes")


@pytest.fixture
def sweep(fake, tmp_path, monkeypatch, capsys):
    """Run the command: exit code, sweep.json, standard output and error."""
    monkeypatch.setenv("PATH", fake.path)
    monkeypatch.setattr(Kubernetes, "poll_seconds", 0.01)
    template = tmp_path / "pod.yaml"
    template.write_text(json.dumps(TEMPLATE))

    def run(*words, which=("--selector", "gpu=yes"), pod=None):
        if pod is not None:
            template.write_text(json.dumps(pod))
        arguments = ["sweep", "kubernetes", "--expect=8xH100", f"--report-dir={tmp_path / 'out'}", *which]
        code = main.main([*arguments, f"--pod-template={template}", *words])
        printed = capsys.readouterr()
        kept = tmp_path / "out" / "latest" / "sweep.json"
        return code, json.loads(kept.read_text()) if kept.exists() else {}, printed

    return run


def test_every_node_has_a_pod_of_its_own_and_then_all_meet(fake, sweep, tmp_path):
    fake.acts([node("n1"), node("n2")], **{"*": PASSED, "together": TOGETHER})
    code, kept, printed = sweep("--namespace=gpu", "--", "acceptance/", "-k", "a$b")
    assert code == 0, printed
    assert found(kept) == {"n1": ("ACCEPTED", 0, ""), "n2": ("ACCEPTED", 0, "")}
    assert kept["together"]["verdict"] == "ACCEPTED"
    alone, together = fake.created("Job")
    [service] = fake.created("Service")
    name = alone["metadata"]["labels"]["gpucluster-sweep"]
    assert name.startswith("gpucluster-")
    script = alone["spec"]["template"]["spec"]["containers"][0]["command"][2]
    arguments = ["--standalone", "--nproc-per-node=8", "-m", "pytest", "acceptance/", "-k", "a$$b"]
    assert alone == expected_job(
        f"{name}-alone", name, ["sh", "-c", script, "python", *arguments, "--gpucluster-expect=1x8xH100"], seconds=7200
    )
    script = together["spec"]["template"]["spec"]["containers"][0]["command"][2]
    arguments = ["--nnodes=2", f"--master-addr={name}-together-0.{name}-together", "--master-port=29500"]
    arguments += ["--nproc-per-node=8", "-m", "pytest", "acceptance/", "-k", "a$$b", "--gpucluster-expect=2x8xH100"]
    expected = expected_job(f"{name}-together", name, ["sh", "-c", script, "python", *arguments], seconds=14400)
    expected["spec"]["template"]["spec"]["subdomain"] = f"{name}-together"
    assert together == expected
    assert service == {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": f"{name}-together", "labels": {"gpucluster-sweep": name}},
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {"batch.kubernetes.io/job-name": f"{name}-together"},
        },
    }
    assert sorted(fake.deleted()) == [f"job/{name}-alone", f"job/{name}-together", f"service/{name}-together"]
    assert {call["argv"][0] for call in fake.notes} == {"--namespace=gpu"}
    assert (tmp_path / "out" / "latest" / "nodes" / "n1.log").read_text() == "its output\n"
    assert (tmp_path / "out" / "latest" / "together.log").is_file()


def expected_job(name, sweep, command, *, seconds):
    """A Job with all its fields: an unexpected one, above all a privilege, fails."""
    host, required = "kubernetes.io/hostname", "requiredDuringSchedulingIgnoredDuringExecution"
    hosts = {"matchExpressions": [{"key": host, "operator": "In", "values": ["host-n1", "host-n2"]}]}
    apart = {"labelSelector": {"matchLabels": {"batch.kubernetes.io/job-name": name}}, "topologyKey": host}
    [suite] = TEMPLATE["spec"]["containers"]
    node = {"name": "GPUCLUSTER_HOSTNAME", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}
    message = {"terminationMessagePath": "/dev/termination-log", "terminationMessagePolicy": "File"}
    labels = {"gpucluster-sweep": sweep}
    pod = {
        "tolerations": TEMPLATE["spec"]["tolerations"],
        "restartPolicy": "Never",
        "affinity": {
            "nodeAffinity": {required: {"nodeSelectorTerms": [hosts]}},
            "podAntiAffinity": {required: [apart]},
        },
        "containers": [{**suite, "command": command, "env": [*suite["env"], node], **message}],
    }
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name, "labels": labels},
        "spec": {
            "completionMode": "Indexed",
            "completions": 2,
            "parallelism": 2,
            "backoffLimitPerIndex": 0,
            "podReplacementPolicy": "Failed",
            "activeDeadlineSeconds": seconds,
            "ttlSecondsAfterFinished": 86400,
            "template": {
                "metadata": {"labels": {"team": "x", **labels}, "annotations": TEMPLATE["metadata"]["annotations"]},
                "spec": pod,
            },
        },
    }


def test_nodes_that_fail_alone_are_listed_and_left_out(fake, sweep, tmp_path):
    names = [f"n{number}" for number in range(1, 8)]
    fake.acts(
        [*map(node, names), node("off", ready="Unknown"), node("shut", cordoned=True)],
        n1=PASSED,
        n2=REJECTED,
        n3={"do": "evict"},
        n4={"do": "run forever"},
        n5={"do": "end", "exit": 137, "reason": "OOMKilled"},
        n6=says(code=11),
        n7=says(verdict="INCOMPLETE", exit=10, message="did not run: hbm"),
        together=TOGETHER,
        job={"after": 3},
    )
    code, kept, _ = sweep()
    assert code == 1
    expected = {
        "off": ("NO ANSWER", 11, "kubelet says so"),
        "shut": ("NO ANSWER", 11, "cordoned"),
        "n1": ("ACCEPTED", 0, ""),
        "n2": ("REJECTED", 1, "matmul: slow"),
        "n3": ("NO ANSWER", 11, "Evicted: "),
        "n4": ("NO ANSWER", 11, " 7200 s"),
        "n5": ("NO ANSWER", 11, "exit code 137 and no journal: OOMKilled"),
        "n6": ("BROKEN", 11, "exit code 11"),
        "n7": ("INCOMPLETE", 10, "did not run: hbm"),
    }
    assert {name: each[:2] for name, each in found(kept).items()} == {name: each[:2] for name, each in expected.items()}
    assert [name for name, each in expected.items() if each[2] not in found(kept)[name][2]] == []
    _, together = fake.created("Job")
    terms = together["spec"]["template"]["spec"]["affinity"]["nodeAffinity"]
    [term] = terms["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert term["matchExpressions"][0]["values"] == ["host-n1", "host-n7"]
    excluded = (tmp_path / "out" / "latest" / "exclude.txt").read_text()
    assert excluded.endswith("[kubernetes]\nn2\nn3\nn4\nn5\nn6\noff\nshut\n")


def test_a_second_pod_on_a_node_makes_it_worse_never_better(fake, sweep):
    nodes = [node("n1"), node("n2"), node("n3")]
    fake.acts(nodes, n1=PASSED, n2=REJECTED | {"node": "n1"}, n3=PASSED | {"node": "n1"})
    _, kept, _ = sweep()
    assert {name: each[0] for name, each in found(kept).items()} == {
        "n1": "REJECTED",
        "n2": "NO ANSWER",
        "n3": "NO ANSWER",
    }


def test_a_pod_that_finds_no_place_is_no_answer_and_says_why(fake, sweep):
    fake.acts([node("n1"), node("n2")], n1=PASSED, n2={"do": "pend"}, job={"after": 2})
    code, kept, _ = sweep()
    assert code == 11
    assert "Unschedulable: 0/3 " in found(kept)["n2"][2]


@pytest.mark.parametrize(
    ("together", "verdict", "failure"),
    [
        (TOGETHER | {"exit": [0, 1]}, "BROKEN", "exit code 1"),
        (TOGETHER | {"exit": [0, None]}, "BROKEN", "did not end"),
        (TOGETHER | {"exit": [None, 0]}, "NO ANSWER", "rank 0 has not ended: "),
        (REJECTED | {"exit": [1, 1]}, "REJECTED", "matmul: slow"),
        (says() | {"exit": [0, 0]}, "BROKEN", "8 ranks on 1 nodes, but 16 on 2"),
        ({"do": "end", "exit": [1, 1], "message": "Killed"}, "NO ANSWER", "`gpucluster verdict`: 'Killed'"),
    ],
    ids=["another pod failed", "another pod hangs", "rank 0 hangs", "rejected", "not together", "no answer"],
)
def test_the_joint_run_passes_only_if_all_its_pods_say_so(fake, sweep, together, verdict, failure):
    fake.acts([node("n1"), node("n2")], **{"*": PASSED, "together": together, "job": {"after": 3}})
    code, kept, _ = sweep()
    assert (kept["together"]["verdict"], code) == (verdict, 1 if verdict == "REJECTED" else 11)
    assert failure in kept["together"]["failure"]


def test_an_api_server_that_does_not_serve_breaks_the_sweep_and_its_jobs_are_deleted(fake, sweep):
    for act, reason in (({"refuse": "Job"}, "Job is forbidden"), ({"deaf": True}, "refused")):
        fake.acts([node("n1"), node("n2")], **{"*": PASSED, **act})
        code, kept, _ = sweep()
        assert (code, kept["finished"]) == (11, True)
        assert reason in kept["reason"]
    assert [name.partition("/")[0] for name in fake.deleted()][-1] == "job"


def changed(path, value):
    """The template with a value somewhere else."""
    pod = json.loads(json.dumps(TEMPLATE))
    place = pod
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return pod


IN_CONTAINER = ("spec", "containers", 0)


def test_a_template_that_cannot_be_used_is_refused_with_all_that_is_wrong(fake, sweep):
    fake.acts([node("n1"), node("n2")])
    for pod, message in (
        (changed(("kind",), "Deployment"), "a Deployment, "),
        (changed(("spec",), None), "spec"),
        (changed(("spec", "affinity"), {}), "spec.affinity: "),
        (changed(("spec", "nodeName"), "n1"), "spec.nodeName: "),
        (changed(("spec", "restartPolicy"), "OnFailure"), "Never: "),
        (changed(("spec", "containers"), []), "spec.containers: 0 "),
        (changed((*IN_CONTAINER, "command"), ["sh"]), "spec.containers[0].command: "),
        (changed((*IN_CONTAINER, "image"), ""), "spec.containers[0].image: "),
        (changed((*IN_CONTAINER, "env"), [{"name": "GPUCLUSTER_HOSTNAME"}]), "GPUCLUSTER_HOSTNAME"),
        (changed((*IN_CONTAINER, "resources", "limits"), {"nvidia.com/gpu": "4"}), "4 nvidia.com/gpu, "),
    ):
        code, kept, printed = sweep(pod=pod)
        assert (code, kept, fake.created("Job")) == (2, {}, [])
        assert message in printed.err


def test_nodes_and_files_that_are_not_there_are_named(fake, sweep):
    fake.acts([node("n1")])
    for which, words, message in (
        (["--nodes", "n1,n9"], [], '"n9"'),
        (["--nodes", "n["], [], "'n['"),
        (["--selector", "none"], [], "--selector none: "),
        (["--nodes", "n1"], ["--pod-template=missing.yaml"], "--pod-template missing.yaml: "),
    ):
        code, _, printed = sweep(*words, which=which)
        assert (code, message in printed.err) == (2, True), printed.err


def test_a_missing_kubectl_is_named(fake, sweep, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    code, _, printed = sweep()
    assert code == 2
    assert "kubectl " in printed.err


SUITE = """\
import pytest

@pytest.mark.criterion("inventory")
def test_node(cluster, measure):
    measure("inventory.ranks", cluster.world_size, unit="ranks", record_only=True)
    assert cluster.hostname != "n3", "bad node"
"""


@pytest.mark.extended
def test_the_pods_commands_do_what_they_are_for(fake, sweep, tmp_path, monkeypatch):
    """Three pods on this host, one CPU rank each: one is bad alone, the others meet."""
    clean_environment(monkeypatch)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Kubernetes, "poll_seconds", 0.5)
    nodes = [node("n1"), node("n2"), node("n3")]
    fake.acts(nodes, **{"*": {"do": "run"}, "together": {"do": "run"}})
    (tmp_path / "test_tiny.py").write_text(SUITE)
    (tmp_path / "pytest.ini").write_text("[pytest]\ngpucluster = true\n")
    words = [f"--pod-report-dir={tmp_path}/it's here", f"--port={free_port()}", f"--python={sys.executable}"]
    words += ["--expect=1", "--", ".", "-p", "no:hypothesispytest", "--gpucluster-device=cpu"]
    code, kept, printed = sweep(*words, pod=changed((*IN_CONTAINER, "resources"), {}))
    assert code == 1, printed
    assert {node: each[0] for node, each in found(kept).items()} == {
        "n1": "REHEARSED",
        "n2": "REHEARSED",
        "n3": "REJECTED",
    }
    assert "bad node" in found(kept)["n3"][2]
    assert kept["together"]["verdict"] == "REHEARSED"
    assert "bad node" in (tmp_path / "out" / "latest" / "nodes" / "n3.log").read_text()


def test_a_job_that_never_ends_is_given_up_and_deleted(fake, sweep, monkeypatch):
    monkeypatch.setattr(Kubernetes, "grace_seconds", 0.0)
    fake.acts([node("n1"), node("n2")], n1=PASSED, n2={"do": "run forever"})
    code, kept, _ = sweep("--alone-within=1s")
    assert code == 11
    assert found(kept)["n2"][:2] == ("NO ANSWER", 11)
    assert " 1 s: " in found(kept)["n2"][2]
    assert [name.partition("/")[0] for name in fake.deleted()] == ["job"]


def test_an_interrupted_sweep_deletes_what_it_made(fake, sweep, monkeypatch):
    def interrupted(seconds):
        raise KeyboardInterrupt

    fake.acts([node("n1"), node("n2")], n1=REJECTED, n2={"do": "run forever"})
    clock = SimpleNamespace(sleep=interrupted, monotonic=time.monotonic)
    monkeypatch.setattr("pytest_gpucluster.runners.sweep_kubernetes.time", clock)
    code, kept, printed = sweep()
    assert (code, kept["finished"], list(found(kept))) == (2, False, ["n1"])
    assert "interrupted by Ctrl-C: 1 of 2 nodes ended" in printed.out
    assert [name.partition("/")[0] for name in fake.deleted()] == ["job"]
