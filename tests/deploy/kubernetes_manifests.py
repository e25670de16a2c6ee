"""Kubernetes manifests for tests: rendered by kustomize, held against Kubernetes' own schemas and against each other.

As a program it does so for every kustomization below deploy/kubernetes, or for those that are named:

    python tests/deploy/kubernetes_manifests.py [FOLDER]...

It ends with 0 where nothing is wrong, with 1 where something is, and with 2 where it could not look.

What a schema cannot say is looked at here as well: a volume that is mounted must be there, and so must the ConfigMap
that a pod reads. Kubernetes takes such a manifest, and its pods wait for ever.
"""

import functools
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import kubectl
import kubernetes_validate
import yaml
from kubernetes_validate.utils import all_versions, major_minor

ROOT = Path(__file__).resolve().parents[2]
KUBERNETES = ROOT / "deploy" / "kubernetes"
OLDEST = "1.29"
"""Where the fields that the manifests rest on are on by default: backoffLimitPerIndex, podReplacementPolicy. Source:
https://kubernetes.io/docs/concepts/workloads/controllers/job/."""
VERSIONS = tuple(
    dict.fromkeys(  # each stands twice: with schemas that are strict, and with others
        major_minor(version)
        for version in all_versions()
        if tuple(map(int, major_minor(version).split("."))) >= tuple(map(int, OLDEST.split(".")))
    )
)
"""Of Kubernetes, by which manifests are judged, oldest first."""
kubernetes_validate.utils.schema_contents = functools.cache(kubernetes_validate.utils.schema_contents)
CUSTOM = ("trainer.kubeflow.org/", "kubeflow.org/", "jobset.x-k8s.io/")
"""Groups whose schemas are not Kubernetes' own. Of their documents only the pod templates are judged here."""

_SECONDS = 60
_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*", re.ASCII)
"""Source: https://kubernetes.io/docs/concepts/overview/working-with-objects/names/#dns-subdomain-names."""
_OF_THE_HOST = ("privileged", "hostPID", "hostIPC", "hostNetwork", "hostPath", "hostPort", "procMount", "sysctls")


class RenderError(Exception):
    """A kustomization that cannot be rendered, with kustomize's words; or kubectl is missing."""


def load(text):
    """Return the documents of a YAML text; empty ones are left out."""
    return [document for document in yaml.load_all(text, Loader=yaml.CSafeLoader) if document]


def kustomizations(root=KUBERNETES):
    """Return every folder below with a kustomization that can be applied.

    Components are parts of others, and so are folders that hold nothing but configuration of kustomize's transformers.
    """
    return [path.parent for path in sorted(root.rglob("kustomization.yaml")) if _can_be_applied(path)]


def _can_be_applied(path):
    [kustomization] = load(path.read_text())
    if kustomization.get("kind", "Kustomization") != "Kustomization":
        return False
    resources = [path.parent / name for name in kustomization.get("resources") or ()]
    documents = [document for file in resources if file.is_file() for document in load(file.read_text())]
    only_files = all(file.is_file() for file in resources)
    return not (documents and only_files and all(each.get("apiVersion") == "builtin" for each in documents))


def render(path):
    """Return what ``kubectl apply -k`` would send. A test asks for kubectl first: ``kubectl.require_kubectl()``.

    Raises:
        RenderError: kustomize refuses it, or there is no kubectl.
    """
    if shutil.which("kubectl") is None:
        raise RenderError(kubectl.problem())
    command = ["kubectl", "kustomize", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    if done.returncode != 0 or "deprecated" in done.stderr:
        raise RenderError(f"{path}: kubectl kustomize ended with {done.returncode}: {done.stderr.strip()}")
    documents = load(done.stdout)
    if not documents:
        raise RenderError(f"{path}: nothing is in it")
    return documents


def name_of(document):
    """Return kind and name of a document, as kubectl names it."""
    return f"{document.get('kind', '?')}/{(document.get('metadata') or {}).get('name', '?')}"


def core_problems(document, version=None):
    """Hold a document against the schemas of one Kubernetes, or of all ``VERSIONS``; an unknown field is an error."""
    wrong = {}
    for each in VERSIONS if version is None else [version]:
        try:
            kubernetes_validate.validate(dict(document), each, strict=True)
        except kubernetes_validate.ValidationError as error:
            where = ".".join(map(str, error.path)) or "the document"
            wrong.setdefault(f"{where}: {error.message}", []).append(each)
        except kubernetes_validate.SchemaNotFoundError as error:
            wrong.setdefault(error.message, []).append(each)
        except KeyError as error:
            wrong.setdefault(f"there is no {error.args[0]}", []).append(each)
    return [f"{name_of(document)} ({', '.join(versions)}): {problem}" for problem, versions in wrong.items()]


def pod_templates(document):
    """Return every pod template in a document, or the pod that it is, each with the place where it stands."""
    return list(_templates(document, ""))


def _templates(value, where):
    if isinstance(value, Mapping):
        spec = value.get("spec")
        if isinstance(spec, Mapping) and "containers" in spec:
            yield where or ".", value
            return
        for key, inner in value.items():
            yield from _templates(inner, f"{where}.{key}".lstrip("."))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _templates(inner, f"{where}.{index}")


def pod_problems(document, version=None):
    """Hold every pod template in a document against the schema of a Pod."""
    found = []
    for where, template in pod_templates(document):
        pod = {"apiVersion": "v1", "kind": "Pod", **{key: template[key] for key in template if key != "kind"}}
        found += [f"{name_of(document)}: {where}: {problem}" for problem in core_problems(pod, version)]
    return found


def reference_problems(documents):
    """Return what a pod refers to and nobody has: volumes, ConfigMaps, claims, accounts, services; and bad names."""
    there = {(document["kind"], document["metadata"]["name"]) for document in documents}
    found = [] if len(there) == len(documents) else ["two documents have the same kind and name"]
    for document in documents:
        name = str(document["metadata"]["name"])
        if not _SUBDOMAIN.fullmatch(name) or len(name) > 63:
            found.append(f"{name_of(document)}: no name that Kubernetes takes")
        for where, template in pod_templates(document):
            found += [
                f"{name_of(document)}: {where}: {problem}" for problem in _dangling(template["spec"], document, there)
            ]
    return found


def _dangling(spec, document, there):
    volumes = [volume["name"] for volume in spec.get("volumes") or ()]
    yield from _twice("volume", volumes)
    for volume in spec.get("volumes") or ():
        for key, kind, field in (
            ("configMap", "ConfigMap", "name"),
            ("secret", "Secret", "secretName"),
            ("persistentVolumeClaim", "PersistentVolumeClaim", "claimName"),
        ):
            wanted = volume.get(key)
            if wanted and not wanted.get("optional") and (kind, wanted[field]) not in there:
                yield f"the volume {volume['name']} is of the {kind} {wanted[field]}, which is nowhere"
    account = spec.get("serviceAccountName")
    if account and account != "default" and ("ServiceAccount", account) not in there:
        yield f"the ServiceAccount {account} is nowhere"
    subdomain = spec.get("subdomain")
    if subdomain and ("Service", subdomain) not in there and document["kind"] == "Job":
        yield f"the Service {subdomain} is nowhere, so the pods have no names"
    containers = [*(spec.get("initContainers") or ()), *spec["containers"]]
    yield from _twice("container", [container["name"] for container in containers])
    mounted = set()
    for container in containers:
        who = f"the container {container['name']}"
        mounts = container.get("volumeMounts") or ()
        mounted |= {mount["name"] for mount in mounts}
        yield from (f"{who} mounts {m['name']}, which is no volume" for m in mounts if m["name"] not in volumes)
        yield from _twice(f"mount of {who} at", [mount["mountPath"] for mount in mounts])
        yield from _twice(f"variable of {who}", [variable["name"] for variable in container.get("env") or ()])
        for source in [*(container.get("envFrom") or ()), *_sources(container)]:
            wanted = source.get("configMapRef") or source.get("configMapKeyRef")
            if wanted and not wanted.get("optional") and ("ConfigMap", wanted["name"]) not in there:
                yield f"{who} reads the ConfigMap {wanted['name']}, which is nowhere"
    yield from (f"the volume {name} is mounted nowhere" for name in volumes if name not in mounted)


def _sources(container):
    return [variable["valueFrom"] for variable in container.get("env") or () if "valueFrom" in variable]


def _twice(what, names):
    yield from (f"the {what} {name} stands twice" for name in sorted({n for n in names if names.count(n) > 1}))


def dangers(documents):
    """Return what is against Kubernetes' Pod Security Standard `restricted`, and some more that no pod here needs.

    Source: https://kubernetes.io/docs/concepts/security/pod-security-standards/.
    """
    found = []
    for document in documents:
        for _, template in pod_templates(document):
            spec = template["spec"]
            of_pod = spec.get("securityContext", {})
            found += [name for name in _OF_THE_HOST if f"'{name}'" in str(spec)]
            if of_pod.get("seccompProfile", {}).get("type") != "RuntimeDefault":
                found.append("seccomp")
            for each in [*spec.get("initContainers", ()), *spec["containers"]]:
                own = {**of_pod, **each.get("securityContext", {})}
                if own.get("runAsNonRoot") is not True or not own.get("runAsUser"):
                    found.append("root")
                if own.get("allowPrivilegeEscalation") is not False:
                    found.append("escalation")
                if own.get("readOnlyRootFilesystem") is not True:
                    found.append("root file system")
                capabilities = own.get("capabilities", {})
                if capabilities.get("drop") != ["ALL"]:
                    found.append("capabilities")
                found += capabilities.get("add", [])
            if spec.get("automountServiceAccountToken") is not False:
                found.append("token")
    return found


def claim_problems(template, paths):
    """Return which containers of a pod have a path not on a claim that they can only read."""
    volumes = template["spec"]["volumes"]
    claims = [each["name"] for each in volumes if each.get("persistentVolumeClaim", {}).get("readOnly")]
    found = []
    for container in template["spec"]["containers"]:
        mounts = [each for each in container["volumeMounts"] if each["name"] in claims]
        read = [each["mountPath"] for each in mounts if each.get("readOnly")]
        found += [f"{container['name']}: {path}" for path in paths if not any(path.is_relative_to(at) for at in read)]
    return found


def is_custom(document):
    """Tell whether a document is of a kind that an operator has brought."""
    return str(document.get("apiVersion", "")).startswith(CUSTOM)


def problems(documents, version=None):
    """Return all that is wrong with the documents of one kustomization."""
    found = reference_problems(documents)
    for document in documents:
        found += pod_problems(document, version) if is_custom(document) else core_problems(document, version)
    return found


def judge_all(folders, judge):
    """Look at kustomizations, of which there must be one, tell of each, and return the exit code.

    ``judge`` returns what the documents are, in some words, and what is wrong with them.
    """
    if not folders:
        print(f"{KUBERNETES}: no such kustomization is there", file=sys.stderr)
        return 2
    code = 0
    for folder in folders:
        try:
            documents = render(folder)
            what, found = judge(documents)
        except (RenderError, OSError, yaml.YAMLError, subprocess.TimeoutExpired) as error:
            print(f"{folder}: {error}", file=sys.stderr)
            code = 2
            continue
        print(f"{folder}: {len(documents)} documents, {what}: {'wrong' if found else 'right'}")
        for problem in found:
            print(f"  {problem}")
        code = max(code, 1 if found else 0)
    return code


def _judge(documents):
    custom = sorted({document["kind"] for document in documents if is_custom(document)})
    beside = f"; of {', '.join(custom)} only the pod templates" if custom else ""
    return f"Kubernetes {VERSIONS[0]} to {VERSIONS[-1]}{beside}", problems(documents)


if __name__ == "__main__":
    sys.exit(judge_all([Path(argument) for argument in sys.argv[1:]] or kustomizations(), _judge))
