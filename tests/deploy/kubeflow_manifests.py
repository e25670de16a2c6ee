"""Manifests of Kubeflow's kinds, held against what their operators take.

As a program it does so for every kustomization below deploy/kubernetes that has such a kind:

    python tests/deploy/kubeflow_manifests.py [FOLDER]...

It ends with 0 where nothing is wrong, with 1 where something is, and with 2 where it could not look.

TrainJob and ClusterTrainingRuntime go through the models of kubeflow-trainer-api and back: a field that is lost on the
way is one that Trainer does not know. PyTorchJob has no model that could be installed here, so it is held against a
closed schema of the fields that we use (schemas/pytorchjob.json, which names its source).
"""

import json
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import jsonschema
import kubernetes_manifests
import pydantic
from kubernetes_manifests import KUBERNETES, is_custom, name_of

SCHEMAS = Path(__file__).with_name("schemas")
_MODELS = ("TrainJob", "ClusterTrainingRuntime")
_CLOSED = {"PyTorchJob": "pytorchjob.json"}


def kind_problems(document):
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
def _schema(kind):
    schema = json.loads((SCHEMAS / _CLOSED[kind]).read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def _lost(document):
    from kubeflow_trainer_api import models  # here, because it takes most of a second

    model = getattr(models, f"TrainerV1alpha1{document['kind']}")
    try:
        read = model.from_dict(dict(document))
    except (pydantic.ValidationError, ValueError, AttributeError, TypeError) as error:
        # The generated readers meet a mapping where a text stands, and the like, with whatever Python raises there.
        return [f"its model refuses it: {' '.join(str(error).split())}"]
    return list(_differences(document, json.loads(json.dumps(read.to_dict(), default=str)), ""))


def _differences(ours, back, where):
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


def problems(documents, version=None):
    """Return all that is wrong with the documents of one kustomization."""
    found = kubernetes_manifests.problems(documents, version)
    for document in documents:
        found += kind_problems(document) if is_custom(document) else []
    return found


def kustomizations():
    """Return every folder that can be applied and has a kind of Kubeflow's."""
    return [
        path
        for path in kubernetes_manifests.kustomizations(KUBERNETES)
        if path.parent.name == "overlays" and path.parent.parent != KUBERNETES
    ]


def _judge(documents):
    kinds = ", ".join(document["kind"] for document in documents if is_custom(document))
    if not kinds:
        raise kubernetes_manifests.RenderError("no kind of Kubeflow's is in it")
    # All versions are kubernetes_manifests' own business, which looks at the same pods.
    return kinds, problems(documents, kubernetes_manifests.VERSIONS[-1])


def main(arguments):
    """Look at all of them, or at those that are named, tell of each, and return the exit code."""
    folders = [Path(argument) for argument in arguments] or kustomizations()
    return kubernetes_manifests.judge_all(folders, _judge)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
