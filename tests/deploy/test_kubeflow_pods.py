"""Pods of Kubeflow's kinds as processes of this host: the manifests' own commands, with each operator's variables.

Volumes are folders, and what the kubelet alone can do is missing: users, capabilities, limits, DNS.
"""

import uuid
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import kubernetes_manifests as manifests
import local_pods
import pytest
from junit_files import require_junit
from kubectl import require_kubectl
from local_pods import Pod, over
from ports import free_port

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


def prepare(directory, kind):
    documents = manifests.render(manifests.KUBERNETES / kind / "overlays" / "cpu-rehearsal")
    local_pods.prepare(directory, documents, SUITE)
    return documents


def pod_of(documents, template, directory, index, labels, operator):
    name = f"pod-{index}"
    fields = {"metadata.name": name, "metadata.uid": f"uid-of-{name}", "spec.nodeName": f"node-of-{name}"}
    fields |= {f"metadata.labels['{key}']": value for key, value in labels.items()}
    container = template["spec"]["containers"][0]
    variables = local_pods.declared(documents, container, fields, operator)
    return Pod(name=name, container=container, variables=variables, directory=directory)


def more(token, fault, ranks):
    return {
        "RANKS": str(ranks),
        "PET_NPROC_PER_NODE": str(ranks),
        "GPUCLUSTER_EXPECT": f"2x{ranks}",
        "NODES": "pod-0 pod-1",
        "FAULT": fault,
        "PYTEST_ADDOPTS": "-p no:hypothesispytest",
        "GPUCLUSTER_TEST_TOKEN": token,
    }


def run_torchrun(kind, directory, fault, ranks):
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


CASES = {
    # Two ranks a pod, as the manifest says; the others have one, which is quicker.
    "trainjob": (partial(run_torchrun, "trainer"), "fail", 2),
    "pytorchjob": (partial(run_torchrun, "pytorchjob"), "", 1),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    require_kubectl()
    with ThreadPoolExecutor(max_workers=2) as pool:
        started = {
            name: pool.submit(function, tmp_path_factory.mktemp("pods"), fault, ranks)
            for name, (function, fault, ranks) in CASES.items()
        }
        return {name: future.result() for name, future in started.items()}


def said(run, pod=0):
    return (run.directory / f"said-pod-{pod}").read_text()


def report(run):
    [path] = (run.directory / "reports").glob("*/report.xml")
    text = path.read_text()
    require_junit(text)
    return text


@pytest.mark.extended
@pytest.mark.parametrize("case", CASES)
def test_two_pods_are_one_run_with_one_exit_code_and_leave_only_its_reports(runs, case):
    run, code = runs[case], 1 if CASES[case][1] else 0
    assert set(run.exits) == {code}, run.output
    verdict = "REJECTED" if code else "REHEARSED"
    assert said(run).startswith(f"gpucluster: REHEARSAL, {verdict}, exit code {code}"), said(run)
    assert f'tests="1" failures="{code}"' in report(run)
    assert f"exit code {code}; " in said(run, 1)
    assert not run.left_over
    folders = {"trainjob": f"acceptance-rehearsal-{UID}", "pytorchjob": "acceptance-rehearsal-uid-of-pod-0"}
    folder = run.directory / "reports" / folders[case]
    assert {path.name for path in (folder / "latest").iterdir()} >= {"journal.jsonl", "report.html", "results.json"}
