"""The commands that docs/kubernetes.md and docs/kubeflow.md show for a pod, held against what the manifests start.

Command, arguments and scripts are the rendered ones, and bash runs them; `gpucluster` alone is replaced, and notes its
words. Each variable has its own name for a value, so that what comes out can be read as it was written.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import kubernetes_manifests as manifests
import local_pods
import pytest
from browser import require_program

Documents = list[dict[str, Any]]
SCRIPTS = "/opt/gpucluster-scripts"
RUN = "gpucluster run "
JOBS = ("cpu-rehearsal", "production", "single-node", "standard")
KUBEFLOW = ("trainer", "pytorchjob", "mpijob")
"""In the order of the page."""
ROLES = {"trainer": 1, "pytorchjob": 2, "mpijob": 1}
"""Kind -> pods with a command of the suite's. An MPIJob's worker serves ssh."""
SECONDS = 60


def shown(page: str, number: int = 0) -> list[str]:
    """The words of a line of the one block of commands that `suite.sh` starts, by its own sign: the cache's place."""
    text = (manifests.ROOT / "docs" / page).read_text(encoding="utf-8")
    blocks = re.findall(r"```console\n(.*?)```", text, re.DOTALL)
    [block] = [each for each in blocks if "cache_dir" in each]
    return block.splitlines()[number].split()


class Names(dict[str, str]):
    """Of every variable $(NAME) in a manifest, the value $NAME."""

    def get(self, key: str, default: object = None) -> str:  # type: ignore[override]
        return f"${key}"


def started(documents: Documents, words: Sequence[str], folder: Path) -> list[str]:
    """Run a container's words with the rendered scripts, and return those that `gpucluster run` gets."""
    local_pods.write_scripts(documents, folder / "scripts")
    programs = folder / "bin"
    programs.mkdir()
    noted = folder / "noted"
    (programs / "gpucluster").write_text(
        f'#!/bin/sh\n[ "$1" != run ] || for word in gpucluster "$@"; do printf "%s\\n" "$word"; done >"{noted}"\n'
    )
    (programs / "python").write_text("#!/bin/sh\n")
    for program in programs.iterdir():
        program.chmod(0o755)
    (folder / "pod-environment").write_text("")
    values = ("MASTER_ADDR", "GPUCLUSTER_REPORT_DIR", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
    own = {
        "PATH": f"{programs}:/usr/bin:/bin",
        "TERMINATION_LOG": str(folder / "said"),
        "JOB_COMPLETION_INDEX": "1",
        "PET_MASTER_ADDR": "$PET_MASTER_ADDR",
        "POD_ENVIRONMENT": str(folder / "pod-environment"),
        "SUITE_SCRIPTS": str(folder / "scripts"),
        "SUITE_FOLDER": str(folder),
    }
    done = subprocess.run(
        [local_pods.expanded(word, Names()).replace(SCRIPTS, str(folder / "scripts")) for word in words],
        cwd=folder,
        env={**{name: f"${name}" for name in values}, **own},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert noted.exists(), done.stdout + done.stderr
    return noted.read_text().splitlines()


def containers(documents: Documents) -> list[Mapping[str, Any]]:
    """The suite's container of each pod that starts it."""
    return [
        container
        for document in documents
        for _, template in manifests.pod_templates(document)
        for container in template["spec"]["containers"]
        if "acceptance/" in container.get("args", ())
    ]


def of_job(documents: Documents, folder: Path) -> list[list[str]]:
    found = []
    for number, container in enumerate(containers(documents)):
        place = folder / str(number)
        place.mkdir()
        found.append(started(documents, [*container["command"], *container["args"]], place))
    return found


def of_mpijob(documents: Documents, folder: Path) -> list[list[str]]:
    """As mpirun starts it: launcher.sh hands its words to node.sh; test_kubeflow_pods.py sees that by a real mpirun."""
    [launcher] = containers(documents)
    assert launcher["command"] == ["bash", "/opt/gpucluster-mpi/launcher.sh"]
    node = folder / "node.sh"
    node.write_text(local_pods.find(documents, "ConfigMap", "gpucluster-mpi-scripts")["data"]["node.sh"])
    return [started(documents, ["bash", str(node), *launcher["args"]], folder)]


@pytest.fixture(scope="module")
def rendered() -> Callable[[str], Documents]:
    require_program("kubectl")
    return lambda path: manifests.render(manifests.KUBERNETES / path)


@pytest.mark.parametrize("overlay", JOBS)
def test_the_page_shows_what_a_pod_of_a_job_runs(
    overlay: str, rendered: Callable[[str], Documents], tmp_path: Path
) -> None:
    assert of_job(rendered(f"overlays/{overlay}"), tmp_path) == [shown("kubernetes.md")]


@pytest.mark.parametrize("kind", KUBEFLOW)
def test_the_page_shows_what_a_pod_of_an_operator_runs(
    kind: str, rendered: Callable[[str], Documents], tmp_path: Path
) -> None:
    run = of_mpijob if kind == "mpijob" else of_job
    found = run(rendered(f"{kind}/overlays/production"), tmp_path)
    assert found == [shown("kubeflow.md", KUBEFLOW.index(kind))] * ROLES[kind]


def test_another_command_in_a_manifest_is_found(rendered: Callable[[str], Documents], tmp_path: Path) -> None:
    documents = rendered("overlays/standard")
    [container] = containers(documents)
    words = [word.replace("1800", "600") for word in [*container["command"], *container["args"]]]
    assert started(documents, words, tmp_path) != shown("kubernetes.md")


def test_another_command_in_a_script_is_found(rendered: Callable[[str], Documents], tmp_path: Path) -> None:
    documents = rendered("mpijob/overlays/production")
    scripts = local_pods.find(documents, "ConfigMap", "gpucluster-mpi-scripts")["data"]
    scripts["node.sh"] = scripts["node.sh"].replace("--rdzv-conf=timeout=1800 ", "")
    assert of_mpijob(documents, tmp_path) != [shown("kubeflow.md", KUBEFLOW.index("mpijob"))]


@pytest.mark.parametrize("page", ["kubernetes.md", "kubeflow.md"])
def test_what_is_shown_is_one_line_for_each(page: str) -> None:
    lines = [line for line in (manifests.ROOT / "docs" / page).read_text().splitlines() if line.startswith(RUN)]
    assert len(lines) == (1 if page == "kubernetes.md" else len(KUBEFLOW))
    assert all(shlex.split(line) == line.split() for line in lines)
