"""Manifests of Kubeflow's kinds, held against what their operators take and against what a run of ours needs.

As a program it does so for every kustomization below deploy/kubernetes that has such a kind:

    python tests/deploy/kubeflow_manifests.py [FOLDER]...

It ends with 0 where nothing is wrong, with 1 where something is, and with 2 where it could not look.

TrainJob and ClusterTrainingRuntime go through the models of kubeflow-trainer-api and back: a field that is lost on the
way is one that Trainer does not know. The other two kinds have no such models that could be installed here, so they are
held against closed schemas of the fields that we use (schemas/*.json, which name their source).
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_manifests
import pydantic
import yaml
from kubeflow_trainer_api.models.trainer_v1alpha1_cluster_training_runtime import TrainerV1alpha1ClusterTrainingRuntime
from kubeflow_trainer_api.models.trainer_v1alpha1_train_job import TrainerV1alpha1TrainJob
from kubernetes_manifests import KUBERNETES, core_problems, is_custom, name_of, pod_templates

Document = Mapping[str, Any]
SCHEMAS = Path(__file__).with_name("schemas")
_MODELS = {"TrainJob": TrainerV1alpha1TrainJob, "ClusterTrainingRuntime": TrainerV1alpha1ClusterTrainingRuntime}
_CLOSED = {"PyTorchJob": "pytorchjob.json", "MPIJob": "mpijob.json"}
CONTAINERS = {"ClusterTrainingRuntime": "node", "PyTorchJob": "pytorch", "MPIJob": "suite"}
"""Kind -> what the suite's container is called. Trainer and Training Operator know theirs by these names."""
ROLES = {"PyTorchJob": "pytorchReplicaSpecs", "MPIJob": "mpiReplicaSpecs"}


def kind_problems(document: Document) -> list[str]:
    """Return what the operator would not take, or would take and forget."""
    kind = str(document["kind"])
    if kind in _MODELS:
        found = _lost(document)
    elif kind in _CLOSED:
        found = [
            f"{'.'.join(map(str, e.absolute_path)) or '.'}: {e.message}" for e in _schema(kind).iter_errors(document)
        ]
    else:
        found = ["no schema is known for this kind"]
    return [f"{name_of(document)}: {problem}" for problem in found]


@cache
def _schema(kind: str) -> jsonschema.Draft202012Validator:
    schema = json.loads((SCHEMAS / _CLOSED[kind]).read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def _lost(document: Document) -> list[str]:
    model = _MODELS[str(document["kind"])]
    try:
        read = model.from_dict(dict(document))
    except (pydantic.ValidationError, ValueError, AttributeError, TypeError) as error:
        # The generated readers meet a mapping where a text stands, and the like, with whatever Python raises there.
        return [f"its model refuses it: {' '.join(str(error).split())}"]
    assert read is not None
    return list(_differences(document, json.loads(json.dumps(read.to_dict(), default=str)), ""))


def _differences(ours: object, back: object, where: str) -> Iterator[str]:
    if isinstance(ours, Mapping) and isinstance(back, Mapping):
        for key in ours:
            if key not in back:
                yield f"{where}.{key}: not a field of this kind".lstrip(".")
            else:
                yield from _differences(ours[key], back[key], f"{where}.{key}")
        yield from (f"{where}.{key}: came from nowhere".lstrip(".") for key in back if key not in ours)
    elif isinstance(ours, list) and isinstance(back, list) and len(ours) == len(back):
        for index, (one, other) in enumerate(zip(ours, back, strict=True)):
            yield from _differences(one, other, f"{where}.{index}")
    elif ours != back:
        yield f"{where.lstrip('.')}: {ours!r} was read as {back!r}"


def jobs_in(runtime: Document) -> list[dict[str, Any]]:
    """Return the Jobs that JobSet makes of a runtime, complete but for what Trainer adds: their number of pods."""
    jobs = []
    for replicated in runtime["spec"]["template"]["spec"]["replicatedJobs"]:
        template = replicated["template"]
        number = {"completions": 2, "parallelism": 2}
        jobs.append(
            {
                "apiVersion": "batch/v1",
                "kind": "Job",
                "metadata": {"name": replicated["name"], **template.get("metadata", {})},
                "spec": {**number, **template["spec"]},
            }
        )
    return jobs


def run_problems(documents: Sequence[Document], version: str | None = None) -> list[str]:
    """Return where a run could be repeated, cut short, miscounted, or given more rights than it needs.

    Args:
        documents: of one kustomization.
        version: of Kubernetes, by which the Jobs of a runtime are judged; each of them where none is named.
    """
    by_kind = {str(document["kind"]): document for document in documents}
    settings = next(document["data"] for document in documents if document["metadata"]["name"] == "gpucluster-settings")
    found: list[str] = []
    for kind, container in CONTAINERS.items():
        document = by_kind.get(kind)
        if document is None:
            continue
        problems = [*_OF_KIND[kind](by_kind, settings)]
        for job in jobs_in(document) if kind == "ClusterTrainingRuntime" else ():
            problems += core_problems(job, version)
        for where, template in pod_templates(document):
            problems += [f"{where}: {problem}" for problem in _pod(template["spec"], container)]
        found += [f"{name_of(document)}: {problem}" for problem in problems]
    return found


def _trainer(by_kind: Mapping[str, Document], settings: Mapping[str, str]) -> Iterator[str]:
    runtime, job = by_kind["ClusterTrainingRuntime"], by_kind["TrainJob"]
    template = runtime["spec"]["template"]["spec"]
    if "ttlSecondsAfterFinished" in template:
        yield "ttlSecondsAfterFinished: Trainer runs a failed TrainJob again when its JobSet is gone"
    if template.get("failurePolicy") != {"maxRestarts": 0}:
        yield "failurePolicy: JobSet may restart the run"
    if template.get("network", {}).get("publishNotReadyAddresses") is not True:
        yield "network: pods that are not ready have no names"
    for each in jobs_in(runtime):
        spec = each["spec"]
        if spec.get("backoffLimitPerIndex") != 0 or "backoffLimit" in spec:
            yield "backoffLimitPerIndex: not 0, so a pod may be tried again, or end the others"
        rules = spec.get("podFailurePolicy", {}).get("rules", [])
        if [rule["action"] for rule in rules] != ["FailIndex", "FailIndex"]:
            yield "podFailurePolicy: a disruption is not the end of its pod"
        names = {rule["onExitCodes"]["containerName"] for rule in rules if "onExitCodes" in rule}
        if names != {CONTAINERS["ClusterTrainingRuntime"]}:
            yield f"podFailurePolicy: of {sorted(names)}, which is not the suite's container"
    if job["spec"]["runtimeRef"] != {
        "apiGroup": "trainer.kubeflow.org",
        "kind": "ClusterTrainingRuntime",
        "name": runtime["metadata"]["name"],
    }:
        yield "runtimeRef: not this runtime"
    trainer = job["spec"]["trainer"]
    if not job["spec"].get("activeDeadlineSeconds"):
        yield "activeDeadlineSeconds: it may hang for ever"
    if not {"requests", "limits"} <= trainer["resourcesPerNode"].keys():
        yield "resourcesPerNode: without requests and limits Trainer starts one rank a node"
    yield from _counted(settings, trainer["numNodes"], trainer["numProcPerNode"])
    yield from _gpus(settings, trainer["resourcesPerNode"].get("limits", {}), trainer["numProcPerNode"])


def _pytorchjob(by_kind: Mapping[str, Document], settings: Mapping[str, str]) -> Iterator[str]:
    spec = by_kind["PyTorchJob"]["spec"]
    if spec["runPolicy"].get("cleanPodPolicy") != "None":
        yield "cleanPodPolicy: not None, so one failed node ends the others before the reports are written"
    if spec["runPolicy"].get("backoffLimit") != 0:
        yield "backoffLimit: not 0"
    yield from _replicas(spec[ROLES["PyTorchJob"]], settings, ranks=spec["nprocPerNode"])
    for role, replica in spec[ROLES["PyTorchJob"]].items():
        if not replica["template"]["spec"].get("activeDeadlineSeconds"):
            yield f"{role}: activeDeadlineSeconds: the operator lets pods run on when the job is over time"


def _mpijob(by_kind: Mapping[str, Document], settings: Mapping[str, str]) -> Iterator[str]:
    spec = by_kind["MPIJob"]["spec"]
    if spec["runPolicy"].get("backoffLimit") != 0:
        yield "backoffLimit: not 0"
    if not spec["runPolicy"].get("activeDeadlineSeconds"):
        yield "activeDeadlineSeconds: it may hang for ever"
    if spec["runPolicy"].get("cleanPodPolicy") != "Running":
        yield "cleanPodPolicy: not Running, so the workers' sshd stays"
    if spec.get("runLauncherAsWorker") is not True:
        yield "runLauncherAsWorker: the record of the run is not where its exit code is made"
    if spec.get("slotsPerWorker") != 1:
        yield "slotsPerWorker: mpirun starts one process a node"
    if spec.get("launcherCreationPolicy") != "WaitForWorkersReady":
        yield "launcherCreationPolicy: the launcher does not wait for the workers' sshd"
    roles = spec[ROLES["MPIJob"]]
    worker = _container(roles["Worker"]["template"]["spec"])
    port = next((each["containerPort"] for each in worker.get("ports", []) if each["name"] == "ssh"), None)
    if port is None or worker.get("readinessProbe", {}).get("tcpSocket") != {"port": "ssh"}:
        yield "Worker: it is ready before its sshd answers"
    ranks = {
        variable["value"]
        for replica in roles.values()
        for variable in _container(replica["template"]["spec"])["env"]
        if variable["name"] == "PET_NPROC_PER_NODE"
    }
    if len(ranks) != 1:
        yield f"PET_NPROC_PER_NODE: {sorted(ranks)}, not the same on launcher and workers"
    yield from _replicas(roles, settings, ranks=min(ranks, default="0"))


_OF_KIND: Mapping[str, Callable[[Mapping[str, Document], Mapping[str, str]], Iterator[str]]] = {
    "ClusterTrainingRuntime": _trainer,
    "PyTorchJob": _pytorchjob,
    "MPIJob": _mpijob,
}


def _replicas(roles: Mapping[str, Any], settings: Mapping[str, str], *, ranks: str) -> Iterator[str]:
    for role, replica in roles.items():
        if replica["restartPolicy"] != "Never":
            yield f"{role}: restartPolicy: not Never"
        yield from (
            f"{role}: {problem}"
            for problem in _gpus(settings, _container(replica["template"]["spec"])["resources"]["limits"], ranks)
        )
    yield from _counted(settings, sum(replica["replicas"] for replica in roles.values()), ranks)


def _counted(settings: Mapping[str, str], nodes: int, ranks: int | str) -> Iterator[str]:
    expect = settings["GPUCLUSTER_EXPECT"].split("x")
    if expect[:2] != [str(nodes), str(ranks)]:
        yield f"GPUCLUSTER_EXPECT={settings['GPUCLUSTER_EXPECT']} is not {nodes} nodes with {ranks} ranks each"


def _gpus(settings: Mapping[str, str], limits: Mapping[str, Any], ranks: int | str) -> Iterator[str]:
    wanted = "0" if settings.get("GPUCLUSTER_DEVICE") == "cpu" else str(ranks)
    if str(limits.get("nvidia.com/gpu", 0)) != wanted:
        yield f"nvidia.com/gpu: {limits.get('nvidia.com/gpu')}, not one for each of {ranks} ranks"


def _container(spec: Mapping[str, Any]) -> Mapping[str, Any]:
    first: Mapping[str, Any] = spec["containers"][0]
    return first


def _pod(spec: Mapping[str, Any], name: str) -> Iterator[str]:
    if spec.get("restartPolicy") != "Never":
        yield "restartPolicy: not Never, so the kubelet begins the run again"
    if spec.get("automountServiceAccountToken") is not False:
        yield "automountServiceAccountToken: the suite asks nothing of the API server"
    if spec.get("securityContext", {}).get("seccompProfile") != {"type": "RuntimeDefault"}:
        yield "seccompProfile: not RuntimeDefault"
    if spec.get("securityContext", {}).get("runAsNonRoot") is not True:
        yield "runAsNonRoot: not said"
    shm = [volume for volume in spec["volumes"] if volume.get("emptyDir", {}).get("medium") == "Memory"]
    for container in spec["containers"]:
        if container["name"] != name:
            yield f"the container {container['name']} is not called {name}"
        rights = container["securityContext"]
        if rights.get("privileged") or rights.get("allowPrivilegeEscalation") is not False:
            yield "allowPrivilegeEscalation: not false"
        if rights.get("capabilities", {}).get("drop") != ["ALL"]:
            yield "capabilities: not all dropped"
        if rights.get("readOnlyRootFilesystem") is not True:
            yield "readOnlyRootFilesystem: not true"
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        if not shm or mounts.get("/dev/shm") != shm[0]["name"] or "sizeLimit" not in shm[0]["emptyDir"]:
            yield "/dev/shm: no memory of a given size"
        if "/reports" not in mounts:
            yield "/reports: nowhere to write reports to"
        if container.get("terminationMessagePolicy") != "FallbackToLogsOnError":
            yield "terminationMessagePolicy: what failed before the suite is not told"


def problems(documents: Sequence[Document], version: str | None = None) -> list[str]:
    """Return all that is wrong with the documents of one kustomization."""
    found = kubernetes_manifests.problems(documents, version)
    for document in documents:
        found += kind_problems(document) if is_custom(document) else []
    return found + run_problems(documents, version)


def kustomizations() -> list[Path]:
    """Return every folder that can be applied and has a kind of Kubeflow's."""
    return [
        path
        for path in kubernetes_manifests.kustomizations(KUBERNETES)
        if path.parent.name == "overlays" and path.parent.parent != KUBERNETES
    ]


def main(arguments: Sequence[str]) -> int:
    """Look at all of them, or at those that are named, tell of each, and return the exit code."""
    folders = [Path(argument) for argument in arguments] or kustomizations()
    if not folders:
        print(f"{KUBERNETES}: no kustomization with a kind of Kubeflow's is there", file=sys.stderr)
        return 2
    code = 0
    for folder in folders:
        try:
            documents = kubernetes_manifests.render(folder)
        except (kubernetes_manifests.RenderError, OSError, yaml.YAMLError, subprocess.TimeoutExpired) as error:
            print(f"{folder}: {error}", file=sys.stderr)
            code = 2
            continue
        kinds = ", ".join(document["kind"] for document in documents if is_custom(document))
        if not kinds:
            print(f"{folder}: no kind of Kubeflow's is in it", file=sys.stderr)
            code = 2
            continue
        # All versions are kubernetes_manifests' own business, which looks at the same pods.
        found = problems(documents, kubernetes_manifests.VERSIONS[-1])
        print(f"{folder}: {len(documents)} documents, {kinds}: {'wrong' if found else 'right'}")
        for problem in found:
            print(f"  {problem}")
        code = max(code, 1 if found else 0)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
