"""The Jobs and the service of a sweep on Kubernetes, as plain JSON types, and the operator's Pod that they use.

The operator's Pod sets image, resources and volumes, and nothing that the sweep itself sets.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from pytest_gpucluster.errors import OptionError
from pytest_gpucluster.runners.plan import LAUNCHER, SweepPlan
from pytest_gpucluster.runners.sweep_outcome import JOINT

GPU = "nvidia.com/gpu"
"""The extended resource of NVIDIA's device plugin. Source:
https://kubernetes.io/docs/tasks/manage-gpus/scheduling-gpus/."""
HOSTNAME = "GPUCLUSTER_HOSTNAME"

_RESERVED_IN_POD = {
    "nodeName": "the sweep chooses the nodes",
    "affinity": "the sweep chooses the nodes, one pod on each",
    "hostname": "an Indexed Job names its pods",
    "subdomain": "the sweep has a service of its own",
    "activeDeadlineSeconds": "use --alone-within and --together-within",
}
_RESERVED_IN_CONTAINER = {
    "command": "the sweep runs torchrun in it",
    "args": "the sweep runs torchrun in it",
    "terminationMessagePath": "it carries the pod's result",
    "terminationMessagePolicy": "it carries the pod's result",
}


def read_template(text: str, name: str, *, gpus: int) -> Mapping[str, Any]:
    """Read a Pod with one container, as plain JSON types.

    Args:
        text: the operator's file as converted by kubectl.
        name: of that file, for messages.
        gpus: of each node.

    Raises:
        OptionError: not a Pod, with fields that the sweep sets, or another number of GPUs: all problems at once.
    """
    try:
        pod = json.loads(text)
    except ValueError:
        raise OptionError(f"--pod-template {name}: kubectl returned no JSON") from None
    if not isinstance(pod, dict) or pod.get("kind") != "Pod" or not isinstance(pod.get("spec"), dict):
        kind = pod.get("kind") if isinstance(pod, dict) else None
        raise OptionError(f"--pod-template {name}: a {kind or 'file without a kind'}, not a Pod with a spec")
    spec = pod["spec"]
    problems = [f"spec.{field}: not in a template: {why}" for field, why in _RESERVED_IN_POD.items() if field in spec]
    if spec.get("restartPolicy", "Never") != "Never":
        problems.append(f"spec.restartPolicy: {spec['restartPolicy']}; must be Never: a retry hides a fault")
    containers = spec.get("containers") or []
    if len(containers) != 1:
        problems.append(f"spec.containers: {len(containers)} containers; must be one, which ends the pod")
    else:
        problems += _container_problems(containers[0], gpus)
    if problems:
        raise OptionError("\n".join(f"--pod-template {name}: {problem}" for problem in problems))
    return pod


def _container_problems(container: Mapping[str, Any], gpus: int) -> list[str]:
    where = "spec.containers[0]"
    ours = [field for field in _RESERVED_IN_CONTAINER if field in container]
    problems = [f"{where}.{field}: not in a template: {_RESERVED_IN_CONTAINER[field]}" for field in ours]
    problems += [f"{where}.{field}: missing" for field in ("name", "image") if not container.get(field)]
    if any(each.get("name") == HOSTNAME for each in container.get("env") or ()):
        problems.append(f"{where}.env: {HOSTNAME} is set to the node's name by the sweep")
    limits = (container.get("resources") or {}).get("limits") or {}
    if GPU in limits and str(limits[GPU]) != str(gpus):
        problems.append(f"{where}.resources.limits: {limits[GPU]} {GPU}, but --expect has {gpus}")
    return problems


ALONE = "alone"
JOB_LABEL = "batch.kubernetes.io/job-name"
INDEX_ANNOTATION = "batch.kubernetes.io/job-completion-index"
"""Source of these two: https://kubernetes.io/docs/reference/labels-annotations-taints/."""
_SWEEP_LABEL = "gpucluster-sweep"
_HOST_LABEL = "kubernetes.io/hostname"
_RESULT_FILE = "/dev/termination-log"
_JOB_TTL_SECONDS = 24 * 3600
_LOOKUP_TRIES = 150

# `gpucluster verdict` writes the result from the journal; if the launcher fails after a pass, it is no pass. The
# arguments are torchrun's, without its module name.
_RUN_SCRIPT = f"""\
"$0" -m {LAUNCHER} "$@" --gpucluster-report-dir="$report" --junitxml="$report/junit.xml"
launcher=$?
[ "$rank" -ne 0 ] && exit "$launcher"
"$0" -m pytest_gpucluster verdict "$report" --json {_RESULT_FILE}
verdict=$?
[ "$launcher" -ne 0 ] && [ "$verdict" -eq 0 ] && exit 11
exit "$verdict"
"""

_NODE_SCRIPT = """\
report={report}-"$JOB_COMPLETION_INDEX"
rank=0
"""

# The cluster's DNS knows a pod's name only some time after the pod has its address. The pod of index 0 has rank 0 and
# the journal.
_JOINT_SCRIPT = f"""\
report={{report}}
rank="$JOB_COMPLETION_INDEX"
tries=0
until "$0" -c 'import socket, sys; socket.getaddrinfo(sys.argv[1], None)' {{master}} 2>/dev/null; do
  tries=$((tries + 1))
  [ "$tries" -ge {_LOOKUP_TRIES} ] && echo "ERROR: no address of {{master}}" && exit 11
  sleep 2
done
set -- --node-rank="$rank" "$@"
"""


def sweep_job(
    sweep: str, step: str, template: Mapping[str, Any], plan: SweepPlan, hosts: Sequence[str], report_dir: str
) -> dict[str, Any]:
    """Return an Indexed Job with one pod on each host, without retries.

    Without ``backoffLimitPerIndex`` the first pod that fails would end all others.

    Args:
        sweep: its name.
        step: ``ALONE`` for runs of one node each, or ``JOINT`` for one run, whose rendezvous is on the pod of index 0.
        template: the Pod of :func:`read_template`.
        plan: what runs in them.
        hosts: of the nodes, their labels ``kubernetes.io/hostname``.
        report_dir: in the pod.

    Source: https://kubernetes.io/docs/concepts/workloads/controllers/job/#backoff-limit-per-index (stable in 1.33),
    #pod-replacement-policy.
    """
    name, metadata = f"{sweep}-{step}", template.get("metadata") or {}
    nnodes = len(hosts) if step == JOINT else 1
    master = f"{name}-0.{name}"
    report = "'" + f"{report_dir}/{sweep}/{step}".replace("'", "'\\''") + "'"
    script = (_JOINT_SCRIPT if step == JOINT else _NODE_SCRIPT).format(report=report, master=master) + _RUN_SCRIPT
    command = ["sh", "-c", script, plan.python, *plan.arguments(nnodes, master)]
    [container] = template["spec"]["containers"]
    node = {"name": HOSTNAME, "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}
    container = {
        **container,
        # Kubernetes itself replaces $(NAME); a doubled $ stays one. Source:
        # https://kubernetes.io/docs/tasks/inject-data-application/define-interdependent-environment-variables/.
        "command": [word.replace("$", "$$") for word in command],
        "env": [*(container.get("env") or ()), node],
        "terminationMessagePath": _RESULT_FILE,
        "terminationMessagePolicy": "File",
    }
    terms = [{"matchExpressions": [{"key": _HOST_LABEL, "operator": "In", "values": list(hosts)}]}]
    apart = {"labelSelector": {"matchLabels": {JOB_LABEL: name}}, "topologyKey": _HOST_LABEL}
    spec = {
        **template["spec"],
        "restartPolicy": "Never",
        "affinity": {
            "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}},
            "podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [apart]},
        },
        "containers": [container],
        **({"subdomain": name} if step == JOINT else {}),
    }
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name, "labels": {_SWEEP_LABEL: sweep}},
        "spec": {
            "completionMode": "Indexed",
            "completions": len(hosts),
            "parallelism": len(hosts),
            "backoffLimitPerIndex": 0,
            "podReplacementPolicy": "Failed",
            "activeDeadlineSeconds": math.ceil(plan.seconds(nnodes)),
            "ttlSecondsAfterFinished": _JOB_TTL_SECONDS,
            "template": {
                "metadata": {
                    "labels": {**(metadata.get("labels") or {}), _SWEEP_LABEL: sweep},
                    "annotations": dict(metadata.get("annotations") or {}),
                },
                "spec": spec,
            },
        },
    }


def joint_service(sweep: str) -> dict[str, Any]:
    """Return the headless service that gives the survivors' pods names, also before they are ready.

    Source: https://kubernetes.io/docs/tasks/job/job-with-pod-to-pod-communication/.
    """
    name = f"{sweep}-{JOINT}"
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "labels": {_SWEEP_LABEL: sweep}},
        "spec": {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": {JOB_LABEL: name}},
    }
