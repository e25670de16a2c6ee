"""deploy/kubernetes/{trainer,pytorchjob}: right, and each thing that could be wrong is found."""

import copy
import shutil

import kubeflow_manifests as kubeflow
import kubernetes_manifests as manifests
import pytest
from kubectl import require_kubectl

from pytest_gpucluster.session import options
from pytest_gpucluster.session.selection import TrainingInputs

HERE = manifests.KUBERNETES
OVERLAYS = [
    HERE / kind / "overlays" / name for kind in ("trainer", "pytorchjob") for name in ("production", "cpu-rehearsal")
]
KINDS = {"trainer": "ClusterTrainingRuntime", "pytorchjob": "PyTorchJob"}

VERSION = manifests.VERSIONS[-1]
"""One is enough here: test_kubernetes_manifests.py holds every folder against all of them."""


@pytest.fixture(scope="module")
def rendered():
    """Render an overlay once, and hand out copies."""
    require_kubectl()
    seen = {}

    def render(kind, name):
        if (kind, name) not in seen:
            seen[kind, name] = manifests.render(HERE / kind / "overlays" / name)
        return copy.deepcopy(seen[kind, name])

    return render


def one(documents, kind):
    [found] = [document for document in documents if document["kind"] == kind]
    return found


def containers(document):
    return [container for _, pod in manifests.pod_templates(document) for container in pod["spec"]["containers"]]


def at(document, path):
    """Return a field, or None where there is none."""
    for word in path.split("."):
        document = document[int(word)] if isinstance(document, list) else document.get(word)
        if document is None:
            return None
    return document


def put(document, path, value):
    where, _, last = path.rpartition(".")
    inner = at(document, where) if where else document
    inner[int(last) if isinstance(inner, list) else last] = value


RUNTIME = "spec.template.spec"
JOB = f"{RUNTIME}.replicatedJobs.0.template.spec"
POD = f"{JOB}.template.spec"
MASTER, WORKER = "spec.pytorchReplicaSpecs.Master", "spec.pytorchReplicaSpecs.Worker"
RUN_ONCE = {
    "TrainJob": {},
    "ClusterTrainingRuntime": {
        f"{RUNTIME}.ttlSecondsAfterFinished": None,  # Trainer runs a failed TrainJob again when its JobSet is gone
        f"{RUNTIME}.failurePolicy": {"maxRestarts": 0},
        f"{RUNTIME}.network.publishNotReadyAddresses": True,
        f"{JOB}.backoffLimitPerIndex": 0,
        f"{JOB}.backoffLimit": None,  # it would end the other pods at the first failure
        f"{JOB}.podFailurePolicy.rules.0.action": "FailIndex",
        f"{JOB}.podFailurePolicy.rules.1.action": "FailIndex",
        f"{JOB}.podFailurePolicy.rules.1.onExitCodes.containerName": "node",
    },
    "PyTorchJob": {
        "spec.runPolicy.cleanPodPolicy": "None",  # or one failed node ends the others before the reports are written
        "spec.runPolicy.backoffLimit": 0,
        f"{MASTER}.restartPolicy": "Never",
        f"{WORKER}.restartPolicy": "Never",
    },
}
"""Kind -> what keeps a run from being repeated, or cut short; None is a field that must not be there."""
DEADLINES = {
    "TrainJob": ["spec.activeDeadlineSeconds"],
    "PyTorchJob": [f"{role}.template.spec.activeDeadlineSeconds" for role in (MASTER, WORKER)],
}
NAMES = {"trainer": "node", "pytorchjob": "pytorch"}
"""What the suite's container is called. Trainer and Training Operator know theirs by these names."""


def sizes(documents, kind):
    """Return the number of nodes, the ranks that the nodes are told, and what the nodes are limited to."""
    if kind == "trainer":
        told = one(documents, "TrainJob")["spec"]["trainer"]
        return told["numNodes"], {str(told["numProcPerNode"])}, [told["resourcesPerNode"]["limits"]]
    spec = one(documents, KINDS[kind])["spec"]
    roles = spec["pytorchReplicaSpecs"].values()
    limits = [role["template"]["spec"]["containers"][0]["resources"]["limits"] for role in roles]
    return sum(role["replicas"] for role in roles), {spec["nprocPerNode"]}, limits


@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda path: f"{path.parents[1].name}-{path.name}")
def test_an_overlay_is_right_and_its_run_neither_repeated_nor_cut_short_nor_miscounted(overlay, rendered):
    kind = overlay.parents[1].name
    documents = rendered(kind, overlay.name)
    assert kubeflow.problems(documents, VERSION) == []
    locks = {"root", "IPC_LOCK"} if overlay.name == "production" else set()
    assert set(manifests.dangers(documents)) == locks
    for document in filter(manifests.is_custom, documents):
        which = document["kind"]
        for path, value in RUN_ONCE[which].items():
            assert at(document, path) == value, path
        for path in DEADLINES.get(which, ()):
            assert at(document, path) > 0, path
        for _, pod in manifests.pod_templates(document):
            assert pod["spec"]["restartPolicy"] == "Never"
            (container,) = pod["spec"]["containers"]
            assert container["name"] == NAMES[kind]
            assert container["terminationMessagePolicy"] == "FallbackToLogsOnError"
            mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
            [shm] = [each for each in pod["spec"]["volumes"] if each.get("emptyDir", {}).get("medium") == "Memory"]
            assert (mounts["/dev/shm"], "sizeLimit" in shm["emptyDir"]) == (shm["name"], True)
            assert "/reports" in mounts
    if kind == "trainer":
        job, runtime = one(documents, "TrainJob")["spec"], one(documents, "ClusterTrainingRuntime")
        named = {"kind": "ClusterTrainingRuntime", "name": runtime["metadata"]["name"]}
        assert job["runtimeRef"] == {"apiGroup": "trainer.kubeflow.org", **named}
        # Without requests and limits Trainer starts one rank a node.
        assert {"requests", "limits"} <= job["trainer"]["resourcesPerNode"].keys()
    nodes, told, limits = sizes(documents, kind)
    (ranks,) = told
    settings = next(each["data"] for each in documents if each["metadata"]["name"] == "gpucluster-settings")
    assert settings["GPUCLUSTER_EXPECT"].split("x")[:2] == [str(nodes), ranks]
    gpus = "0" if overlay.name == "cpu-rehearsal" else ranks
    assert {str(each.get("nvidia.com/gpu", 0)) for each in limits} == {gpus}


MISSPELT = [
    ("TrainJob", "spec.trainer.numNode"),
    ("TrainJob", "spec.podTemplateOverrides"),
    ("ClusterTrainingRuntime", f"{JOB}.backoffLimitPerIndexes"),
    ("ClusterTrainingRuntime", f"{POD}.containers.0.securityContext.readOnlyRootFileSystem"),
    ("PyTorchJob", "spec.runPolicy.backofflimit"),
    ("PyTorchJob", f"{MASTER}.template.spec.restartpolicy"),
]
REFUSED = [
    ("TrainJob", "spec.trainer.numNodes", "two"),
    ("ClusterTrainingRuntime", f"{RUNTIME}.replicatedJobs", {}),
    ("PyTorchJob", "spec.nprocPerNode", 8),
    ("PyTorchJob", MASTER, {}),
]


def test_what_the_operator_would_forget_or_refuse_is_found(rendered):
    def planted(which, path, value):
        folder = "trainer" if which in ("TrainJob", "ClusterTrainingRuntime") else which.lower()
        document = one(rendered(folder, "production"), which)
        put(document, path, value)
        return document

    for which, path in MISSPELT:
        document = planted(which, path, "x")
        found = kubeflow.kind_problems(document) or manifests.pod_problems(document, VERSION)
        assert any(path.rpartition(".")[2] in problem for problem in found), (path, found)
    for which, path, value in REFUSED:
        assert kubeflow.kind_problems(planted(which, path, value)) != [], path


COMPONENTS = [
    (kind, component)
    for kind in KINDS
    for component in ("host-network", "reports-volume", "thresholds", "rdma", "rdma-device")
]


@pytest.mark.parametrize(("kind", "component"), COMPONENTS)
def test_a_component_reaches_every_pod(kind, component, tmp_path):
    require_kubectl()
    place = tmp_path / "kubernetes"
    shutil.copytree(HERE, place)
    overlay = place / "site"
    overlay.mkdir()
    (overlay / "thresholds.yaml").write_text("schema_version: 1\n")
    (overlay / "kustomization.yaml").write_text(
        "apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\n"
        f"resources: [../{kind}/overlays/cpu-rehearsal]\ncomponents: [../{kind}/components/{component}]\n"
        "generatorOptions: {disableNameSuffixHash: true}\n"
        "configMapGenerator: [{name: gpucluster-thresholds, files: [thresholds.yaml]}]\n"
    )
    documents = manifests.render(overlay)
    assert kubeflow.problems(documents, VERSION) == []
    document = one(documents, KINDS[kind])
    for _, pod in manifests.pod_templates(document):
        spec, container = pod["spec"], pod["spec"]["containers"][0]
        if component == "host-network":
            assert (spec["hostNetwork"], spec["dnsPolicy"]) == (True, "ClusterFirstWithHostNet")
        elif component == "reports-volume":
            claim = one(documents, "PersistentVolumeClaim")["metadata"]["name"]
            assert {"name": "reports", "persistentVolumeClaim": {"claimName": claim}} in spec["volumes"]
        elif component == "thresholds":
            (path,) = (each["value"] for each in container["env"] if each["name"] == "GPUCLUSTER_THRESHOLDS")
            assert path == "/etc/gpucluster/thresholds.yaml"
            assert "/etc/gpucluster" in [mount["mountPath"] for mount in container["volumeMounts"]]
        else:
            job = one(documents, "TrainJob")["spec"]["trainer"]["resourcesPerNode"] if kind == "trainer" else None
            limits = (job or container["resources"])["limits"]
            assert str(limits["rdma/rdma_shared_device_a"]) == "1"
            added = container["securityContext"]["capabilities"].get("add", [])
            assert added == (["IPC_LOCK"] if component == "rdma" else [])


@pytest.mark.parametrize("kind", KINDS)
def test_every_pod_has_weights_and_data_that_it_cannot_change(kind, tmp_path, pytestconfig):
    """Production, as it is when its comment is none, with a claim of the site's."""
    require_kubectl()
    shutil.copytree(HERE, tmp_path / "kubernetes")
    overlay = tmp_path / "kubernetes" / kind / "overlays" / "production"
    text = (overlay / "kustomization.yaml").read_text()
    assert "  # - ../../components/models\n" in text
    (overlay / "kustomization.yaml").write_text(
        text.replace("# - ../../components/models\n", "- ../../components/models\n")
    )
    documents = manifests.render(overlay)
    spec = {"accessModes": ["ReadOnlyMany"], "resources": {"requests": {"storage": "1Ti"}}}
    claim = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "spec": spec}
    claim["metadata"] = {"name": "gpucluster-models"}
    assert kubeflow.problems([*documents, claim], VERSION) == []
    assert "PersistentVolumeClaim gpucluster-models" in manifests.problems(documents, VERSION)[0]
    maps = {each["metadata"]["name"]: each["data"] for each in documents if each["kind"] == "ConfigMap"}
    settings = {**maps["gpucluster-models"], **maps["gpucluster-settings"]}
    inputs = TrainingInputs.of(options.resolve(pytestconfig, settings))
    paths = [source.path for source in (inputs.model, inputs.data["function_calls"]) if source.path is not None]
    assert (len(paths), settings["HF_HUB_OFFLINE"]) == (2, "1")
    pods = [template for _, template in manifests.pod_templates(one(documents, KINDS[kind]))]
    assert len(pods) == (1 if kind == "trainer" else 2)
    for pod in pods:
        # The last one counts: what the overlay says of its own.
        sources = [each["configMapRef"]["name"] for each in pod["spec"]["containers"][0]["envFrom"]]
        assert sources == ["gpucluster-models", "gpucluster-nccl", "gpucluster-settings"]
        assert manifests.claim_problems(pod, paths) == []
        [mount] = [each for each in pod["spec"]["containers"][0]["volumeMounts"] if each["name"] == "models"]
        mount["readOnly"] = False
        assert len(manifests.claim_problems(pod, paths)) == len(paths)
