"""deploy/kubernetes/{trainer,pytorchjob,mpijob}: right, and each thing that could be wrong is found."""

from __future__ import annotations

import copy
import importlib.metadata
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import kubeflow_manifests as kubeflow
import kubernetes_manifests as manifests
import pytest
import yaml
from browser import require_program

from pytest_gpucluster import __version__, options
from pytest_gpucluster.training_inputs import TrainingInputs

HERE = manifests.KUBERNETES
OVERLAYS = [
    HERE / kind / "overlays" / name
    for kind in ("trainer", "pytorchjob", "mpijob")
    for name in ("production", "cpu-rehearsal")
]
KINDS = {"trainer": "ClusterTrainingRuntime", "pytorchjob": "PyTorchJob", "mpijob": "MPIJob"}

Documents = list[dict[str, Any]]
VERSION = manifests.VERSIONS[-1]
"""One is enough here: test_kubernetes_manifests.py holds every folder against all of them."""


@pytest.fixture(scope="module")
def rendered() -> Callable[[str, str], Documents]:
    """Render an overlay once, and hand out copies."""
    require_program("kubectl")
    seen: dict[tuple[str, str], Documents] = {}

    def render(kind: str, name: str) -> Documents:
        if (kind, name) not in seen:
            seen[kind, name] = manifests.render(HERE / kind / "overlays" / name)
        return copy.deepcopy(seen[kind, name])

    return render


def one(documents: Sequence[dict[str, Any]], kind: str) -> dict[str, Any]:
    [found] = [document for document in documents if document["kind"] == kind]
    return found


def containers(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [container for _, pod in manifests.pod_templates(document) for container in pod["spec"]["containers"]]


def at(document: Any, path: str) -> Any:
    for word in path.split("."):
        document = document[int(word)] if isinstance(document, list) else document[word]
    return document


def put(document: dict[str, Any], path: str, value: object) -> None:
    """Set a field, or take it away where the value is None."""
    where, _, last = path.rpartition(".")
    inner = at(document, where) if where else document
    if value is None:
        del inner[last]
    else:
        inner[int(last) if isinstance(inner, list) else last] = value


RUNTIME = "spec.template.spec"
JOB = f"{RUNTIME}.replicatedJobs.0.template.spec"
POD = f"{JOB}.template.spec"
MASTER = "spec.pytorchReplicaSpecs.Master"
LAUNCHER, WORKER = "spec.mpiReplicaSpecs.Launcher", "spec.mpiReplicaSpecs.Worker"


@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda path: f"{path.parents[1].name}-{path.name}")
def test_an_overlay_is_right(overlay: Path, rendered: Callable[[str, str], Documents]) -> None:
    assert kubeflow.problems(rendered(overlay.parents[1].name, overlay.name), VERSION) == []


def test_no_overlay_is_forgotten() -> None:
    assert sorted(kubeflow.kustomizations()) == sorted(OVERLAYS)


def test_the_models_are_those_of_the_operator_that_is_installed() -> None:
    script = (HERE / "install-operator.sh").read_text()
    found = re.search(r"TRAINER_VERSION:-v(\d+\.\d+)\.", script)
    assert found is not None
    assert importlib.metadata.version("kubeflow-trainer-api").startswith(found[1] + ".")


@pytest.mark.parametrize(
    ("kind", "which", "path"),
    [
        ("trainer", "TrainJob", "spec.activeDeadlineSecond"),
        ("trainer", "TrainJob", "spec.trainer.numNode"),
        ("trainer", "TrainJob", "spec.trainer.numProcPerNodes"),
        ("trainer", "TrainJob", "spec.trainer.resourcesPerNode.limit"),
        ("trainer", "TrainJob", "spec.podTemplateOverrides"),
        ("trainer", "ClusterTrainingRuntime", "spec.mlPolicy.torch.numProcPerNode"),
        ("trainer", "ClusterTrainingRuntime", f"{RUNTIME}.failurePolicy.maxRestart"),
        ("trainer", "ClusterTrainingRuntime", f"{JOB}.backoffLimitPerIndexes"),
        ("trainer", "ClusterTrainingRuntime", f"{POD}.restartpolicy"),
        ("trainer", "ClusterTrainingRuntime", f"{POD}.containers.0.securityContext.readOnlyRootFileSystem"),
        ("trainer", "ClusterTrainingRuntime", f"{POD}.volumes.3.emptyDir.sizelimit"),
        ("pytorchjob", "PyTorchJob", "spec.nProcPerNode"),
        ("pytorchjob", "PyTorchJob", "spec.runPolicy.backofflimit"),
        ("pytorchjob", "PyTorchJob", f"{MASTER}.restartpolicy"),
        ("pytorchjob", "PyTorchJob", f"{MASTER}.template.specs"),
        ("pytorchjob", "PyTorchJob", f"{MASTER}.template.spec.restartpolicy"),
        ("pytorchjob", "PyTorchJob", "spec.pytorchReplicaSpecs.Evaluator"),
        ("mpijob", "MPIJob", "spec.slotsPerWorkers"),
        ("mpijob", "MPIJob", "spec.runPolicy.cleanPodPolicys"),
        ("mpijob", "MPIJob", f"{LAUNCHER}.template.spec.containers.0.enviroment"),
        ("mpijob", "MPIJob", "spec.mpiReplicaSpecs.Workers"),
    ],
)
def test_a_misspelt_field_is_found(kind: str, which: str, path: str, rendered: Callable[[str, str], Documents]) -> None:
    documents = rendered(kind, "production")
    document = one(documents, which)
    put(document, path, {} if path.endswith(("Evaluator", "Workers")) else "x")
    found = kubeflow.kind_problems(document) or manifests.pod_problems(document, VERSION)
    assert any(path.rpartition(".")[2] in problem for problem in found), found


@pytest.mark.parametrize(
    ("kind", "which", "path", "value"),
    [
        ("trainer", "TrainJob", "spec.trainer.numNodes", "two"),
        ("trainer", "TrainJob", "spec.trainer.numProcPerNode", "auto"),
        ("trainer", "TrainJob", "spec.runtimeRef", "gpucluster-acceptance"),
        ("trainer", "ClusterTrainingRuntime", f"{RUNTIME}.replicatedJobs", {}),
        ("pytorchjob", "PyTorchJob", "spec.nprocPerNode", 8),
        ("pytorchjob", "PyTorchJob", "spec.runPolicy.cleanPodPolicy", "Never"),
        ("pytorchjob", "PyTorchJob", f"{MASTER}.replicas", 2),
        ("pytorchjob", "PyTorchJob", "spec.pytorchReplicaSpecs.Master", None),
        ("mpijob", "MPIJob", "apiVersion", "kubeflow.org/v1"),
        ("mpijob", "MPIJob", "spec.mpiImplementation", "MVAPICH"),
        ("mpijob", "MPIJob", "spec.slotsPerWorker", 0),
        ("mpijob", "MPIJob", "spec.sshAuthMountPath", "home"),
    ],
)
def test_a_value_that_the_operator_would_refuse_is_found(
    kind: str, which: str, path: str, value: object, rendered: Callable[[str, str], Documents]
) -> None:
    document = one(rendered(kind, "production"), which)
    put(document, path, value)
    assert kubeflow.kind_problems(document) != []


@pytest.mark.parametrize(
    ("kind", "which", "path", "value", "told"),
    [
        ("trainer", "ClusterTrainingRuntime", f"{RUNTIME}.ttlSecondsAfterFinished", 600, "again when its JobSet"),
        ("trainer", "ClusterTrainingRuntime", f"{RUNTIME}.failurePolicy.maxRestarts", 1, "may restart the run"),
        ("trainer", "ClusterTrainingRuntime", f"{RUNTIME}.failurePolicy", None, "may restart the run"),
        ("trainer", "ClusterTrainingRuntime", f"{RUNTIME}.network", None, "have no names"),
        ("trainer", "ClusterTrainingRuntime", f"{JOB}.backoffLimitPerIndex", 1, "backoffLimitPerIndex"),
        ("trainer", "ClusterTrainingRuntime", f"{JOB}.backoffLimitPerIndex", None, "backoffLimitPerIndex"),
        ("trainer", "ClusterTrainingRuntime", f"{JOB}.podFailurePolicy", None, "podFailurePolicy"),
        (
            "trainer",
            "ClusterTrainingRuntime",
            f"{JOB}.podFailurePolicy.rules.1.onExitCodes.containerName",
            "suite",
            "not the suite's container",
        ),
        ("trainer", "ClusterTrainingRuntime", f"{POD}.restartPolicy", "OnFailure", "the kubelet begins the run again"),
        ("trainer", "ClusterTrainingRuntime", f"{POD}.containers.0.name", "trainer", "is not called node"),
        ("trainer", "ClusterTrainingRuntime", f"{POD}.automountServiceAccountToken", True, "API server"),
        ("trainer", "ClusterTrainingRuntime", f"{POD}.securityContext.seccompProfile", None, "seccompProfile"),
        ("trainer", "ClusterTrainingRuntime", f"{POD}.containers.0.securityContext.privileged", True, "allowPriv"),
        (
            "trainer",
            "ClusterTrainingRuntime",
            f"{POD}.containers.0.securityContext.allowPrivilegeEscalation",
            None,
            "allowPrivilegeEscalation",
        ),
        (
            "trainer",
            "ClusterTrainingRuntime",
            f"{POD}.containers.0.securityContext.readOnlyRootFilesystem",
            False,
            "readOnlyRootFilesystem",
        ),
        ("trainer", "ClusterTrainingRuntime", f"{POD}.volumes.3.emptyDir.medium", None, "/dev/shm"),
        ("trainer", "ClusterTrainingRuntime", f"{POD}.volumes.3.emptyDir.sizeLimit", None, "/dev/shm"),
        ("trainer", "ClusterTrainingRuntime", f"{POD}.containers.0.volumeMounts.3.mountPath", "/shm", "/dev/shm"),
        ("trainer", "ClusterTrainingRuntime", f"{POD}.containers.0.volumeMounts.0.mountPath", "/out", "/reports"),
        ("trainer", "ClusterTrainingRuntime", f"{POD}.containers.0.terminationMessagePolicy", None, "terminationM"),
        ("trainer", "TrainJob", "spec.runtimeRef.name", "torch-distributed", "not this runtime"),
        ("trainer", "TrainJob", "spec.activeDeadlineSeconds", None, "hang for ever"),
        ("trainer", "TrainJob", "spec.trainer.numNodes", 3, "GPUCLUSTER_EXPECT=2x8"),
        ("trainer", "TrainJob", "spec.trainer.numProcPerNode", 4, "GPUCLUSTER_EXPECT=2x8"),
        ("trainer", "TrainJob", "spec.trainer.resourcesPerNode.requests", None, "one rank a node"),
        ("trainer", "TrainJob", "spec.trainer.resourcesPerNode.limits.nvidia.com/gpu", None, "not one for each"),
        ("pytorchjob", "PyTorchJob", "spec.runPolicy.cleanPodPolicy", "Running", "before the reports are written"),
        ("pytorchjob", "PyTorchJob", "spec.runPolicy.cleanPodPolicy", None, "before the reports are written"),
        ("pytorchjob", "PyTorchJob", "spec.runPolicy.backoffLimit", 3, "backoffLimit: not 0"),
        ("pytorchjob", "PyTorchJob", f"{MASTER}.restartPolicy", "ExitCode", "Master: restartPolicy"),
        ("pytorchjob", "PyTorchJob", f"{MASTER}.template.spec.activeDeadlineSeconds", None, "run on when"),
        ("pytorchjob", "PyTorchJob", f"{MASTER}.template.spec.containers.0.name", "suite", "is not called pytorch"),
        ("pytorchjob", "PyTorchJob", "spec.nprocPerNode", "4", "GPUCLUSTER_EXPECT=2x8"),
        ("pytorchjob", "PyTorchJob", "spec.pytorchReplicaSpecs.Worker.replicas", 3, "is not 4 nodes"),
        (
            "pytorchjob",
            "PyTorchJob",
            f"{MASTER}.template.spec.containers.0.resources.limits.nvidia.com/gpu",
            1,
            "not one for each of 8 ranks",
        ),
        ("mpijob", "MPIJob", "spec.runLauncherAsWorker", False, "record of the run"),
        ("mpijob", "MPIJob", "spec.slotsPerWorker", 8, "one process a node"),
        ("mpijob", "MPIJob", "spec.launcherCreationPolicy", "AtStartup", "does not wait"),
        ("mpijob", "MPIJob", "spec.runPolicy.backoffLimit", None, "backoffLimit: not 0"),
        ("mpijob", "MPIJob", "spec.runPolicy.activeDeadlineSeconds", None, "hang for ever"),
        ("mpijob", "MPIJob", "spec.runPolicy.cleanPodPolicy", "None", "sshd stays"),
        ("mpijob", "MPIJob", f"{LAUNCHER}.restartPolicy", "OnFailure", "Launcher: restartPolicy"),
        ("mpijob", "MPIJob", f"{WORKER}.template.spec.containers.0.readinessProbe", None, "before its sshd answers"),
        ("mpijob", "MPIJob", f"{WORKER}.template.spec.containers.0.env.0.value", "4", "not the same on launcher"),
        ("mpijob", "MPIJob", f"{WORKER}.replicas", 0, "is not 1 nodes"),
    ],
)
def test_what_a_run_must_not_be_given_is_found(
    kind: str, which: str, path: str, value: object, told: str, rendered: Callable[[str, str], Documents]
) -> None:
    documents = rendered(kind, "production")
    document = one(documents, which)
    if "nvidia.com" in path:
        limits = at(document, path.partition(".nvidia.com")[0])
        limits.pop("nvidia.com/gpu")
        limits.update({} if value is None else {"nvidia.com/gpu": value})
    else:
        put(document, path, value)
    found = kubeflow.run_problems(documents, VERSION)
    assert any(told in problem for problem in found), found


def test_a_job_of_a_runtime_is_held_against_the_schema_of_jobs(rendered: Callable[[str, str], Documents]) -> None:
    documents = rendered("trainer", "production")
    put(one(documents, "ClusterTrainingRuntime"), f"{JOB}.podFailurePolicy.rules.0.actions", "FailIndex")
    assert any("actions" in problem for problem in kubeflow.run_problems(documents, VERSION))


def test_the_numbers_follow_from_the_trainjob(tmp_path: Path) -> None:
    """As an operator changes them: in an overlay over the shipped one."""
    require_program("kubectl")
    overlay = HERE / "trainer" / "overlays" / "production"
    text = (overlay / "kustomization.yaml").read_text()
    assert "path: /spec/trainer/numNodes, value: 2}" in text
    place = tmp_path / "kubernetes"
    shutil.copytree(HERE, place)
    changed = text.replace("/spec/trainer/numNodes, value: 2}", "/spec/trainer/numNodes, value: 16}")
    changed = changed.replace("GPUCLUSTER_EXPECT=2x8", "GPUCLUSTER_EXPECT=2x8xH100")
    (place / "trainer" / "overlays" / "production" / "kustomization.yaml").write_text(changed)
    documents = manifests.render(place / "trainer" / "overlays" / "production")
    settings = next(each for each in documents if each["metadata"]["name"] == "gpucluster-settings")
    assert settings["data"]["GPUCLUSTER_EXPECT"] == "16x8xH100"
    assert kubeflow.problems(documents, VERSION) == []


@pytest.mark.parametrize("kind", KINDS)
def test_it_asks_for_the_image_of_this_version(kind: str, rendered: Callable[[str, str], Documents]) -> None:
    for name, tag in (("production", __version__), ("cpu-rehearsal", f"{__version__}-cpu")):
        document = one(rendered(kind, name), KINDS[kind])
        images = {container["image"] for container in containers(document)}
        assert images == {f"registry.example/gpucluster-acceptance:{tag}"}


@pytest.mark.parametrize("kind", KINDS)
def test_its_pods_have_what_the_pods_of_the_job_have(kind: str, rendered: Callable[[str, str], Documents]) -> None:
    require_program("kubectl")
    job = one(manifests.render(HERE / "overlays" / "cpu-rehearsal"), "Job")
    [(_, base)] = manifests.pod_templates(job)
    for _, pod in manifests.pod_templates(one(rendered(kind, "cpu-rehearsal"), KINDS[kind])):
        for field in ("securityContext", "enableServiceLinks", "terminationGracePeriodSeconds", "restartPolicy"):
            assert pod["spec"][field] == base["spec"][field], field
        ours, suite = pod["spec"]["containers"][0], base["spec"]["containers"][0]
        for field in ("securityContext", "envFrom", "workingDir", "imagePullPolicy", "terminationMessagePolicy"):
            assert ours[field] == suite[field], field


@pytest.mark.parametrize(
    "path", ["trainer/base/runtime.yaml", "pytorchjob/base/pytorchjob.yaml", "mpijob/base/mpijob.yaml"]
)
def test_there_is_as_much_room_for_checkpoints_as_in_the_pods_of_the_job(path: str) -> None:
    """Kubernetes evicts a pod that writes more than its emptyDir may hold, and the reports go with it."""
    rooms = {
        volume["emptyDir"]["sizeLimit"]
        for name in (path, "base/job.yaml")
        for _, pod in manifests.pod_templates(yaml.safe_load((HERE / name).read_text(encoding="utf-8")))
        for volume in pod["spec"]["volumes"]
        if volume["name"] == "reports"
    }
    assert rooms == {"64Gi"}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("component", ["host-network", "reports-volume", "thresholds", "rdma", "rdma-device"])
def test_a_component_reaches_every_pod(kind: str, component: str, tmp_path: Path) -> None:
    require_program("kubectl")
    folder = HERE / kind / "components" / component
    if (kind, component) == ("mpijob", "rdma"):
        assert not folder.exists(), "mpirun's sshd runs without root"
        return
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
    assert manifests.problems(documents, VERSION) == []
    assert [
        problem for each in documents if manifests.is_custom(each) for problem in kubeflow.kind_problems(each)
    ] == []
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


def with_models(kind: str, place: Path) -> Documents:
    """Render production as it is when its comment is none, with a claim of the site's."""
    require_program("kubectl")
    shutil.copytree(HERE, place)
    overlay = place / kind / "overlays" / "production"
    text = (overlay / "kustomization.yaml").read_text()
    edited = text.replace("  # - ../../components/models\n", "  - ../../components/models\n")
    assert edited != text
    (overlay / "kustomization.yaml").write_text(edited)
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "gpucluster-models"},
        "spec": {"accessModes": ["ReadOnlyMany"], "resources": {"requests": {"storage": "1Ti"}}},
    }
    return [*manifests.render(overlay), claim]


@pytest.mark.parametrize("kind", KINDS)
def test_every_pod_has_weights_and_data_that_it_cannot_change(
    kind: str, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    documents = with_models(kind, tmp_path / "kubernetes")
    assert kubeflow.problems(documents, VERSION) == []
    [problem] = manifests.problems(documents[:-1], VERSION)[:1]
    assert problem.endswith("is of the PersistentVolumeClaim gpucluster-models, which is nowhere")
    maps = {each["metadata"]["name"]: each["data"] for each in documents if each["kind"] == "ConfigMap"}
    settings = {**maps["gpucluster-models"], **maps["gpucluster-settings"]}
    inputs = TrainingInputs.of(options.resolve(pytestconfig, settings))
    assert inputs.model is not None
    paths = [source.path for source in (inputs.model, inputs.data["function_calls"]) if source.path is not None]
    assert [str(path) for path in paths] == ["/models/Qwen2-7B", "/models/function-calls.json"]
    assert settings["HF_HUB_OFFLINE"] == "1"
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
        mount["mountPath"] = "/weights"
        assert all("nothing is mounted" in problem for problem in manifests.claim_problems(pod, paths))


@pytest.mark.parametrize("kind", KINDS)
def test_production_does_without_weights(kind: str, rendered: Callable[[str, str], Documents]) -> None:
    text = str(rendered(kind, "production"))
    assert "gpucluster-models" not in text
    assert "GPUCLUSTER_MODEL" not in text


@pytest.mark.parametrize("kind", KINDS)
def test_only_rdma_gives_rights(kind: str, rendered: Callable[[str, str], Documents]) -> None:
    for container in containers(one(rendered(kind, "cpu-rehearsal"), KINDS[kind])):
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }


def test_as_a_program_it_says_which_one_is_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], rendered: Callable[[str, str], Documents]
) -> None:
    def render(path: Path) -> Documents:
        documents = rendered(path.parents[1].name, path.name)
        if path.parents[1].name == "mpijob":
            put(one(documents, "MPIJob"), "spec.slotsPerWorker", 8)
        return documents

    monkeypatch.setattr(manifests, "render", render)
    assert kubeflow.main([]) == 1
    told = capsys.readouterr().out
    assert told.count(": right") == 4
    assert told.count(": wrong") == 2
    assert "slotsPerWorker" in told
    monkeypatch.setattr(manifests, "render", lambda path: (_ for _ in ()).throw(manifests.RenderError("no kubectl")))
    assert kubeflow.main([]) == 2


def test_as_a_program_it_does_not_pass_over_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    require_program("kubectl")
    (tmp_path / "kustomization.yaml").write_text("configMapGenerator: [{name: a, literals: [b=c]}]\n")
    assert kubeflow.main([str(tmp_path)]) == 2
    monkeypatch.setattr(kubeflow, "kustomizations", list)
    assert kubeflow.main([]) == 2
    told = capsys.readouterr().err
    assert "no kind of Kubeflow's is in it" in told
    assert "no kustomization with a kind of Kubeflow's is there" in told


def test_the_reader_of_the_reports_reads_their_claim() -> None:
    [reader] = manifests.load((HERE / "reports-reader.yaml").read_text())
    [claim] = manifests.load((HERE / "components" / "reports-volume" / "claim.yaml").read_text())
    assert manifests.core_problems(reader, VERSION) == []
    assert manifests.reference_problems([reader, claim]) == []
    assert manifests.reference_problems([reader]) != []
    (container,) = containers(reader)
    assert container["image"] == f"registry.example/gpucluster-acceptance:{__version__}"
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
