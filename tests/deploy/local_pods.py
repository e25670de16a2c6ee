"""The pods of a Job as processes of this host: command, arguments, variables and scripts as Kubernetes makes them.

Volumes are folders. What the kubelet alone can do is missing: users, capabilities, limits, DNS; the name of pod 0 is
replaced by this host's.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import sessions
import torchrun

UID = "0b3f5f3e-0000-4000-8000-000000000001"
_REFERENCE = re.compile(r"\$\$|\$\(([A-Za-z_][A-Za-z0-9_.-]*)\)")


class PodError(Exception):
    """Kubernetes would not start this pod: a variable refers to what is not there."""


def find(documents: Sequence[Mapping[str, Any]], kind: str, name: str | None = None) -> Mapping[str, Any]:
    """Return the one document of a kind."""
    [found] = [each for each in documents if each["kind"] == kind and name in (None, each["metadata"]["name"])]
    return found


def container(job: Mapping[str, Any], name: str = "suite") -> Mapping[str, Any]:
    """Return a container of a Job's pod template."""
    [found] = [each for each in job["spec"]["template"]["spec"]["containers"] if each["name"] == name]
    return found


def expanded(text: str, environ: Mapping[str, str]) -> str:
    """Replace $(NAME) as Kubernetes does: an unknown one stays as it is, and $$ is one $.

    Source: https://kubernetes.io/docs/tasks/inject-data-application/define-interdependent-environment-variables/.
    """
    return _REFERENCE.sub(lambda found: "$" if found[0] == "$$" else environ.get(found[1], found[0]), text)


def from_maps(documents: Sequence[Mapping[str, Any]], container: Mapping[str, Any]) -> dict[str, str]:
    """Return what a container takes from ConfigMaps, the last one counting; an optional one need not be there."""
    there = {each["metadata"]["name"] for each in documents if each["kind"] == "ConfigMap"}
    found: dict[str, str] = {}
    for source in container.get("envFrom") or ():
        told = source["configMapRef"]
        if told["name"] in there or not told.get("optional"):
            found |= find(documents, "ConfigMap", told["name"])["data"]
    return found


def environment(
    documents: Sequence[Mapping[str, Any]], index: int, *, node: str, name: str = "suite"
) -> dict[str, str]:
    """Return the variables of a container of pod number ``index``, which runs on ``node``.

    Raises:
        PodError: a ConfigMap or a field is not there.
    """
    job = find(documents, "Job")
    fields = {
        "metadata.name": f"{job['metadata']['name']}-{index}-x7k2p",
        "spec.nodeName": node,
        "metadata.labels['batch.kubernetes.io/controller-uid']": UID,
    }
    # What the Job controller adds stands last in a container's list, and is known to its arguments.
    environ: dict[str, str] = {"KUBERNETES_SERVICE_HOST": "10.96.0.1"}
    environ |= from_maps(documents, container(job, name))
    for variable in container(job, name).get("env") or ():
        if "valueFrom" in variable:
            path = variable["valueFrom"]["fieldRef"]["fieldPath"]
            if path not in fields:
                raise PodError(f"{variable['name']}: the field {path} is not known here")
            environ[variable["name"]] = fields[path]
        else:
            environ[variable["name"]] = expanded(variable["value"], environ)
    return {**environ, "JOB_COMPLETION_INDEX": str(index)}


def command(documents: Sequence[Mapping[str, Any]], environ: Mapping[str, str], name: str = "suite") -> list[str]:
    """Return the words that a container is started with."""
    which = container(find(documents, "Job"), name)
    return [expanded(word, environ) for word in [*which.get("command", ()), *which.get("args", ())]]


def write_scripts(documents: Sequence[Mapping[str, Any]], folder: Path) -> None:
    """Write the ConfigMap of the scripts, as it is mounted."""
    folder.mkdir(exist_ok=True)
    for name, text in find(documents, "ConfigMap", "gpucluster-scripts")["data"].items():
        (folder / name).write_text(text)


def programs(folder: Path) -> Path:
    """Make a folder with the programs of the image: this interpreter, and its gpucluster."""
    folder.mkdir(exist_ok=True)
    for name in ("python", "gpucluster"):
        module = " -m pytest_gpucluster" if name == "gpucluster" else ""
        (folder / name).write_text(f'#!/bin/sh\nexec "{sys.executable}"{module} "$@"\n')
        (folder / name).chmod(0o755)
    return folder


def start(
    documents: Sequence[Mapping[str, Any]],
    directory: Path,
    indexes: Sequence[int],
    *,
    nodes: Sequence[str],
    more: Mapping[str, str] | None = None,
    options: Sequence[str] = (),
) -> torchrun.Run:
    """Start the suite's container of some pods, in ``directory/suite``; /reports is ``directory/reports``.

    Args:
        documents: what kustomize has rendered.
        directory: for everything.
        indexes: of the pods.
        nodes: what their nodes are called.
        more: variables instead of the manifest's.
        options: more words at the end of the command.
    """
    for name in ("reports", "tmp", "stamps"):
        (directory / name).mkdir(exist_ok=True)
    write_scripts(documents, directory / "scripts")
    bin_folder = programs(directory / "bin")
    token, port = uuid.uuid4().hex, str(torchrun.free_port())
    job = find(documents, "Job")
    first = f"{job['metadata']['name']}-0.{find(documents, 'Service')['metadata']['name']}"
    places = {
        "/opt/gpucluster-scripts": str(directory / "scripts"),
        "/reports": str(directory / "reports"),
        first: "localhost",
        container(job)["env"][[each["name"] for each in container(job)["env"]].index("MASTER_PORT")]["value"]: port,
    }

    def here(text: str) -> str:
        for there, place in places.items():
            text = text.replace(there, place)
        return text

    agents = []
    for index, node in zip(indexes, nodes, strict=True):
        environ = environment(documents, index, node=node)
        words = [here(word) for word in command(documents, environ)]
        environ = {key: here(value) for key, value in environ.items()}
        own = {
            "PATH": f"{bin_folder}:/usr/bin:/bin",
            "HOME": str(directory / "tmp"),
            "TMPDIR": str(directory / "tmp"),
            "TERMINATION_LOG": str(directory / f"said-{index}"),
            "STAMPS": str(directory / "stamps"),
            "GPUCLUSTER_TEST_TOKEN": token,
        }
        with (directory / f"output{index}.txt").open("wb") as output:
            agents.append(
                subprocess.Popen(
                    [*words, *options],
                    cwd=directory / "suite",
                    env={**sessions.environment(), **environ, **own, **(more or {})},
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )
    return torchrun.Run(
        directory=directory, agents=agents, token=token, started=time.monotonic(), deadline=torchrun.DEADLINE_SECONDS
    )
