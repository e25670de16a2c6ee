"""The pods of a Job as processes of this host: command, arguments, variables and scripts as Kubernetes makes them.

Volumes are folders. What the kubelet alone can do is missing: users, capabilities, limits, DNS; the name of pod 0 is
replaced by this host's.
"""

import re
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import sessions
import torchrun
from ports import free_port

UID = "0b3f5f3e-0000-4000-8000-000000000001"
_REFERENCE = re.compile(r"\$\$|\$\(([A-Za-z_][A-Za-z0-9_.-]*)\)")


class PodError(Exception):
    """Kubernetes would not start this pod: a variable refers to what is not there."""


def find(documents, kind, name=None):
    """Return the one document of a kind."""
    [found] = [each for each in documents if each["kind"] == kind and name in (None, each["metadata"]["name"])]
    return found


def container(job, name="suite"):
    """Return a container of a Job's pod template."""
    [found] = [each for each in job["spec"]["template"]["spec"]["containers"] if each["name"] == name]
    return found


def expanded(text, environ):
    """Replace $(NAME) as Kubernetes does: an unknown one stays as it is, and $$ is one $.

    Source: https://kubernetes.io/docs/tasks/inject-data-application/define-interdependent-environment-variables/.
    """
    return _REFERENCE.sub(lambda found: "$" if found[0] == "$$" else environ.get(found[1], found[0]), text)


def from_maps(documents, container):
    """Return what a container takes from ConfigMaps, the last one counting; an optional one need not be there."""
    there = {each["metadata"]["name"] for each in documents if each["kind"] == "ConfigMap"}
    found = {}
    for source in container.get("envFrom") or ():
        told = source["configMapRef"]
        if told["name"] in there or not told.get("optional"):
            found |= find(documents, "ConfigMap", told["name"])["data"]
    return found


def declared(documents, container, fields, operator):
    """Return a container's variables: of ConfigMaps, its own with the pod's fields, and what the operator adds last.

    Raises:
        PodError: a ConfigMap or a field is not there.
    """
    environ = {"KUBERNETES_SERVICE_HOST": "10.96.0.1", **from_maps(documents, container)}
    for variable in container.get("env") or ():
        if "valueFrom" in variable:
            path = variable["valueFrom"]["fieldRef"]["fieldPath"]
            if path not in fields:
                raise PodError(f"{variable['name']}: the field {path} is not known here")
            environ[variable["name"]] = fields[path]
        else:
            environ[variable["name"]] = expanded(variable["value"], environ)
    return {**environ, **operator}


def environment(documents, index, *, node, name="suite"):
    """Return the variables of a container of pod number ``index`` of a Job, which runs on ``node``."""
    job = find(documents, "Job")
    fields = {
        "metadata.name": f"{job['metadata']['name']}-{index}-x7k2p",
        "spec.nodeName": node,
        "metadata.labels['batch.kubernetes.io/controller-uid']": UID,
    }
    return declared(documents, container(job, name), fields, {"JOB_COMPLETION_INDEX": str(index)})


def command(documents, environ, name="suite"):
    """Return the words that a container is started with."""
    which = container(find(documents, "Job"), name)
    return [expanded(word, environ) for word in [*which.get("command", ()), *which.get("args", ())]]


def write_scripts(documents, folder):
    """Write the ConfigMap of the scripts, as it is mounted."""
    folder.mkdir(exist_ok=True)
    for name, text in find(documents, "ConfigMap", "gpucluster-scripts")["data"].items():
        (folder / name).write_text(text)


def programs(folder):
    """Make a folder with the programs of the image: this interpreter, and its gpucluster."""
    folder.mkdir(exist_ok=True)
    for name in ("python", "gpucluster"):
        module = " -m pytest_gpucluster" if name == "gpucluster" else ""
        (folder / name).write_text(f'#!/bin/sh\nexec "{sys.executable}"{module} "$@"\n')
        (folder / name).chmod(0o755)
    return folder


def prepare(directory, documents, suite):
    """Write a suite, the scripts and the programs of pods, and make the folders that are their volumes."""
    torchrun.write_suite(directory, suite)
    (directory / "suite" / "acceptance").mkdir()
    for name in (*suite, "stamps.py"):
        (directory / "suite" / name).rename(directory / "suite" / "acceptance" / name)
    for name in ("reports", "tmp", "stamps"):
        (directory / name).mkdir(exist_ok=True)
    write_scripts(documents, directory / "scripts")
    programs(directory / "bin")


@dataclass(kw_only=True)
class Pod:
    """A container of a rendered manifest, on this host.

    Attributes:
        name: by which its output and its termination message are known.
        container: the suite's.
        variables: that it has, as of :func:`declared`.
        directory: for everything, as :func:`prepare` has made it.
        places: more texts of the manifest, and what stands for them here.
    """

    name: str
    container: Mapping[str, Any]
    variables: Mapping[str, str]
    directory: Path
    places: Mapping[str, str] = field(default_factory=dict)

    def here(self, text):
        """Replace the manifest's paths and names."""
        folders = {
            "/opt/gpucluster-scripts": "scripts",
            "/opt/pytest-gpucluster": "suite",
            "/reports": "reports",
        }
        own = {there: str(self.directory / name) for there, name in folders.items()}
        for there, place in {**own, **self.places}.items():
            text = text.replace(there, place)
        return text

    @property
    def words(self):
        """What it is started with."""
        words = [*self.container["command"], *self.container.get("args", ())]
        return [self.here(expanded(word, self.variables)) for word in words]

    def environ(self, more):
        """Return its whole environment; ``more`` stands instead of the manifest's."""
        tmp = str(self.directory / "tmp")
        own = {
            "PATH": f"{self.directory / 'bin'}:/usr/bin:/bin",
            "HOME": tmp,
            "TMPDIR": tmp,
            "TERMINATION_LOG": str(self.directory / f"said-{self.name}"),
            "STAMPS": str(self.directory / "stamps"),
        }
        return {
            **sessions.environment(),
            **{key: self.here(value) for key, value in self.variables.items()},
            **own,
            **more,
        }

    def start(self, more):
        """Start it, in the folder of the suite."""
        with (self.directory / f"output-{self.name}.txt").open("wb") as output:
            return subprocess.Popen(
                self.words,
                cwd=self.directory / "suite",
                env=self.environ(more),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )


def over(directory, agents, token):
    """Wait for the end of pods that have been started."""
    run = torchrun.Run(
        directory=directory, agents=agents, token=token, started=time.monotonic(), deadline=torchrun.DEADLINE_SECONDS
    )
    return run.wait()


def run_job(documents, directory, nodes, more):
    """Run a pod of a Job for each node to its end, with some variables instead of the manifest's."""
    job = find(documents, "Job")
    suite = container(job)
    [port] = [each["value"] for each in suite["env"] if each["name"] == "MASTER_PORT"]
    first = f"{job['metadata']['name']}-0.{find(documents, 'Service')['metadata']['name']}"
    places = {first: "localhost", port: str(free_port())}
    token = uuid.uuid4().hex
    agents = []
    for index, node in enumerate(nodes):
        variables = environment(documents, index, node=node)
        pod = Pod(name=f"{index}", container=suite, variables=variables, directory=directory, places=places)
        agents.append(pod.start({**more, "GPUCLUSTER_TEST_TOKEN": token}))
    return over(directory, agents, token)
