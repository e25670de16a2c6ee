"""The Pod that an operator gives for a sweep: image, resources and volumes, and nothing that the sweep itself sets."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pytest_gpucluster.errors import OptionError

GPU = "nvidia.com/gpu"
"""The extended resource of NVIDIA's device plugin. Source:
https://kubernetes.io/docs/tasks/manage-gpus/scheduling-gpus/."""
HOSTNAME = "GPUCLUSTER_HOSTNAME"

_OF_POD = {
    "nodeName": "the sweep chooses the nodes",
    "affinity": "the sweep chooses the nodes, one pod on each",
    "hostname": "an Indexed Job names its pods",
    "subdomain": "the sweep has a service of its own",
    "activeDeadlineSeconds": "use --alone-within and --together-within",
}
_OF_CONTAINER = {
    "command": "the sweep runs torchrun in it",
    "args": "the sweep runs torchrun in it",
    "terminationMessagePath": "by it the pod answers",
    "terminationMessagePolicy": "by it the pod answers",
}


@dataclass(frozen=True, kw_only=True)
class PodTemplate:
    """A Pod as plain JSON types, with one container."""

    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    spec: Mapping[str, Any]

    @property
    def container(self) -> Mapping[str, Any]:
        """Return its container."""
        container: Mapping[str, Any] = self.spec["containers"][0]
        return container


def read(text: str, name: str, *, gpus: int) -> PodTemplate:
    """Read a Pod, as JSON.

    Args:
        text: what kubectl makes of the operator's file.
        name: of that file, for complaints.
        gpus: of each node.

    Raises:
        OptionError: it is no Pod, sets what the sweep sets, or asks for another number of GPUs. All complaints at once.
    """
    try:
        pod = json.loads(text)
    except ValueError:
        raise OptionError(f"--pod-template {name}: kubectl has made no JSON of it") from None
    if not isinstance(pod, dict) or pod.get("kind") != "Pod" or not isinstance(pod.get("spec"), dict):
        kind = pod.get("kind") if isinstance(pod, dict) else None
        raise OptionError(f"--pod-template {name}: a {kind or 'file without a kind'}, not a Pod with a spec")
    spec, metadata = pod["spec"], pod.get("metadata") or {}
    complaints = [f"spec.{field}: not in a template: {why}" for field, why in _OF_POD.items() if field in spec]
    if spec.get("restartPolicy", "Never") != "Never":
        complaints.append(f"spec.restartPolicy: {spec['restartPolicy']}; must be Never: a second try hides a fault")
    containers = spec.get("containers") or []
    if len(containers) != 1:
        complaints.append(f"spec.containers: {len(containers)} containers; must be one, whose end is the pod's")
    else:
        complaints += _of_container(containers[0], gpus)
    if complaints:
        raise OptionError("\n".join(f"--pod-template {name}: {complaint}" for complaint in complaints))
    return PodTemplate(
        labels=dict(metadata.get("labels") or {}), annotations=dict(metadata.get("annotations") or {}), spec=spec
    )


def _of_container(container: Mapping[str, Any], gpus: int) -> list[str]:
    where = "spec.containers[0]"
    ours = [field for field in _OF_CONTAINER if field in container]
    complaints = [f"{where}.{field}: not in a template: {_OF_CONTAINER[field]}" for field in ours]
    complaints += [f"{where}.{field}: missing" for field in ("name", "image") if not container.get(field)]
    if any(each.get("name") == HOSTNAME for each in container.get("env") or ()):
        complaints.append(f"{where}.env: {HOSTNAME} is set to the node's name by the sweep")
    limits = (container.get("resources") or {}).get("limits") or {}
    if GPU in limits and str(limits[GPU]) != str(gpus):
        complaints.append(f"{where}.resources.limits: {limits[GPU]} {GPU}, but --expect says {gpus}")
    return complaints
