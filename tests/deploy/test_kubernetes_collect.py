"""What collect.sh asks of kubectl, by a real kubectl and an API server that knows a few objects."""

import json

import kubernetes_manifests as manifests
import local_pods
import pytest
from fake_api_server import ApiServer, serving
from kubectl import require_kubectl
from shell import finished

pytestmark = pytest.mark.extended

COLLECT = manifests.KUBERNETES / "collect.sh"


def job(overlay, *conditions):
    require_kubectl()
    documents = manifests.render(manifests.KUBERNETES / "overlays" / overlay)
    found = dict(local_pods.find(documents, "Job"))
    found["metadata"] = {**found["metadata"], "namespace": "default", "uid": "u1"}
    return {**found, "status": {"conditions": [{"type": each, "status": "True"} for each in conditions]}}


def pod(job_name, index, node, code=None, **status):
    state = {"waiting": {"reason": "ImagePullBackOff", "message": "not found"}}
    if code is not None:
        reason = "OOMKilled" if code == 137 else "Completed"
        state = {"terminated": {"exitCode": code, "reason": reason, "message": "gpucluster: REJECTED"}}
    # The collector stands first: the suite's own state is what counts.
    containers = [{"name": "collector", "state": {"running": {}}}, {"name": "suite", "state": state}]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": f"{job_name}-{index}-x",
            "namespace": "default",
            "labels": {"batch.kubernetes.io/job-name": job_name},
            "annotations": {"batch.kubernetes.io/job-completion-index": str(index)},
        },
        "spec": {"nodeName": node, "containers": [{"name": "suite"}, {"name": "collector"}]}
        if node
        else {"containers": []},
        "status": {"phase": "Running", "containerStatuses": containers, **status},
    }


def collect(server, tmp_path, *arguments, **environ):
    config = {"apiVersion": "v1", "kind": "Config", "current-context": "it"}
    config["contexts"] = [{"name": "it", "context": {"cluster": "it", "user": "it"}}]
    config["clusters"] = [{"name": "it", "cluster": {"server": server.address}}]
    config["users"] = [{"name": "it", "user": {}}]
    (tmp_path / "kubeconfig").write_text(json.dumps(config))
    folder = require_kubectl().rpartition("/")[0]
    own = {"PATH": f"{folder}:/usr/bin:/bin", "KUBECONFIG": str(tmp_path / "kubeconfig"), "HOME": str(tmp_path)}
    done = finished(
        ["bash", str(COLLECT), *arguments, str(tmp_path / "out")], env={**own, "POLL_SECONDS": "0.05", **environ}
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.smoke
def test_discovery_by_a_real_kubectl(tmp_path):
    waiting = [
        {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes: 1 cordoned"}
    ]
    pods = [
        pod("discovery", 0, "gpu-001", 0),
        {**pod("discovery", 1, ""), "status": {"phase": "Pending", "conditions": waiting}},
        pod("other", 0, "gpu-009", 0),
    ]
    nodes = [
        {"kind": "Node", "apiVersion": "v1", "metadata": {"name": f"gpu-00{n}", "labels": {"gpu": "yes"}}}
        for n in (1, 2)
    ]
    objects = {"batch/v1/jobs": [job("discovery", "Failed")], "v1/pods": pods, "v1/nodes": nodes}
    with serving(ApiServer(objects, logs={"discovery-0-x": '{"node": 1}\n'})) as server:
        code, out, err = collect(server, tmp_path, "--job", "discovery", "--nodes", "gpu=yes")
    assert code == 11
    assert {path.name: path.read_text() for path in (tmp_path / "out").iterdir()} == {"gpu-001.json": '{"node": 1}\n'}
    assert "job/discovery: Failed" in out
    assert "pod discovery-1-x on no node: " in err
    assert "Pending: 0/3 nodes: 1 cordoned" in err
    assert "gpu-002" in err


def test_a_run_by_a_real_kubectl(tmp_path):
    """The suite has ended and the collector has not. exec is what this API server cannot do: there are no reports."""
    objects = {"batch/v1/jobs": [job("single-node")], "v1/pods": [pod("acceptance", 0, "gpu-001", 1)]}
    with serving(ApiServer(objects, logs={"acceptance-0-x": "its log\n"})) as server:
        code, out, err = collect(server, tmp_path)
    assert code == 1
    assert "gpucluster: REJECTED" in out
    assert "no reports" in err
    assert (tmp_path / "out" / "gpu-001-0.log").read_text() == "its log\n"


def test_why_pods_have_no_verdict_is_told_by_a_real_kubectl(tmp_path):
    evicted = pod("acceptance", 2, "gpu-003", 137, phase="Failed", reason="Evicted", message="emptyDir is\nfull")
    pods = [pod("acceptance", 0, "gpu-001"), pod("acceptance", 1, "gpu-002", 137), evicted]
    with serving(ApiServer({"batch/v1/jobs": [job("single-node")], "v1/pods": pods})) as server:
        code, _, err = collect(server, tmp_path, "--within", "0")
    assert code == 11
    for name, *parts in (
        ("acceptance-0-x on gpu-001", "no exit code", "Running: ImagePullBackOff"),
        ("acceptance-1-x on gpu-002", "exit code 137", "Running: OOMKilled"),
        ("acceptance-2-x on gpu-003", "exit code 137", "Failed: Evicted emptyDir"),
    ):
        lines = [line for line in err.splitlines() if name in line]
        assert any(all(part in line for part in parts) for line in lines), err
    assert ": 0 1 2" in err


def test_the_volume_and_the_user_are_read_from_the_job(tmp_path):
    """The words are those of collect.sh."""
    kubectl = require_kubectl()
    text = COLLECT.read_text()
    expected = {
        "claim": ("production", "gpucluster-reports"),
        "image": ("production", "registry.example/gpucluster-acceptance:0.1.0"),
        "user": ("production", "0"),
        "deadline": ("production", "14400"),
        "tolerations": ("standard", '[{"effect":"NoSchedule","key":"nvidia.com/gpu","operator":"Exists"}]'),
        "secrets": ("standard", ""),
    }
    for name, (overlay, value) in expected.items():
        path = next(line.split("'")[1] for line in text.splitlines() if line.strip().startswith(f"{name}=$(of_job '"))
        with serving(ApiServer({"batch/v1/jobs": [job(overlay)]})) as server:
            words = [f"--server={server.address}", f"--cache-dir={tmp_path}", "get", "job", "acceptance"]
            done = finished([kubectl, *words, f"--output=jsonpath={path}"])
        assert done.stdout == value, done.stderr
