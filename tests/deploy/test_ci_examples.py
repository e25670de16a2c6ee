"""The examples for GitHub, GitLab and Jenkins, and this project's own workflow: what they run, and with which rights.

None of them was run in its CI system here. What is run is their shell, with a stand-in for gpucluster.
"""

import re
import shlex
from pathlib import Path

import embedded_shell
import pytest
import yaml
from packaging.requirements import Requirement
from shell import finished

from pytest_gpucluster import __version__
from pytest_gpucluster.cli import main
from pytest_gpucluster.session import options

ROOT = Path(__file__).resolve().parents[2]
CI = ROOT / ".github" / "workflows" / "ci.yml"
GITHUB = {path.name: path for path in sorted((ROOT / "deploy" / "github").glob("*.yml"))}
GITLAB = ROOT / "deploy" / "gitlab" / "gitlab-ci.yml"
JENKINS = ROOT / "deploy" / "jenkins" / "Jenkinsfile"
WORKFLOWS = [CI, *GITHUB.values()]
workflows = pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)

# Beyond reading the repository: what each job has to write.
RIGHTS = {
    ("image.yml", "image"): {"packages": "write"},
    ("release.yml", "image"): {"packages": "write"},
    ("release.yml", "publish"): {"contents": "write"},
}


def content(path):
    """Return a workflow; YAML 1.1 takes its key `on` for true."""
    read = yaml.safe_load(path.read_text())
    read["on"] = read.pop(True)
    return read


def scripts():
    """Return every piece of shell in the examples: (where, text)."""
    found = [piece for path in WORKFLOWS for piece in embedded_shell.of_workflow(path)]
    return [*found, *embedded_shell.of_gitlab(GITLAB), *embedded_shell.of_jenkins(JENKINS)]


def calls(name):
    for where, text in scripts():
        for line in text.splitlines():
            match = re.match(rf"\s*(?:\.venv/bin/)?({name} .*?)(?:\s*>>.*)?$", line)
            if match:
                # An expansion that is empty unless something was given.
                yield where, shlex.split(re.sub(r"\$\{\w+:\+.*?\}(?=\s|$)", "", match[1]))


def test_actions_are_pinned_by_their_commit_with_the_version_beside_it_the_same_everywhere():
    assert set(GITHUB) == {"rehearsal.yml", "acceptance.yml", "image.yml", "release.yml"}
    pins = {}
    for path in WORKFLOWS:
        used = re.findall(r"^\s*-? ?uses: (.*)$", path.read_text(), re.MULTILINE)
        assert used, path
        for use in used:
            if use.startswith("./"):
                assert use.removeprefix("./.github/workflows/") in GITHUB
            else:
                action, _, pin = use.partition("@")
                assert re.fullmatch(r"[0-9a-f]{40} # v\d+\.\d+\.\d+", pin), use
                assert pins.setdefault(action, pin) == pin, use


@workflows
def test_jobs_have_the_rights_they_need_a_time_limit_and_no_second_run_beside_them(path):
    workflow = content(path)
    assert workflow["permissions"] == {"contents": "read"}
    assert "group" in workflow["concurrency"]
    assert "pull_request_target" not in workflow["on"]
    for name, job in workflow["jobs"].items():
        more = {key: value for key, value in job.get("permissions", {}).items() if value != "read"}
        assert more == RIGHTS.get((path.name, name), {})
        assert "timeout-minutes" in job or job["uses"].startswith("./")
        for step in job.get("steps", ()):
            assert "${{" not in step.get("run", ""), "give it by env, where the shell does not read it"
            if step.get("uses", "").startswith("actions/checkout@"):
                assert step["with"]["persist-credentials"] is False


def test_a_run_on_gpus_is_started_by_people_of_the_repository_alone_and_never_ended_by_another():
    workflow = content(GITHUB["acceptance.yml"])
    assert set(workflow["on"]) == {"workflow_dispatch", "workflow_call"}
    assert workflow["concurrency"]["cancel-in-progress"] is False
    jobs = yaml.safe_load(GITLAB.read_text())
    assert [rule["if"] for rule in jobs["acceptance"]["rules"]] == ["$CI_COMMIT_BRANCH == $CI_DEFAULT_BRANCH"]
    assert jobs["acceptance"]["interruptible"] is False
    assert "disableConcurrentBuilds()" in JENKINS.read_text()
    assert not any("params." in text for _, text in embedded_shell.of_jenkins(JENKINS)), "what is typed in is no shell"


def test_every_call_of_gpucluster_is_one_that_it_takes():
    found = list(calls("gpucluster"))
    assert len(found) >= 9
    for where, words in found:
        parsed = main.parse(words[1:])
        if parsed.command == "run":
            assert parsed.forwarded[0] == "acceptance/", where
            assert set(parsed.for_torchrun) <= {"--nproc-per-node=2"}, where
    known = {f"GPUCLUSTER_{option.name.upper().replace('-', '_')}" for option in options.OPTIONS}
    named = set(re.findall(r"\bGPUCLUSTER_\w+", "".join(p.read_text() for p in (*WORKFLOWS, GITLAB, JENKINS))))
    assert {"GPUCLUSTER_EXPECT", "GPUCLUSTER_REPORT_DIR"} <= named <= known


def test_what_is_installed_lets_every_criterion_run():
    """Without the extras criteria are skipped, and every run would be INCOMPLETE: exit code 10."""
    installed = [(where, line) for where, text in scripts() for line in text.splitlines() if " -e " in line]
    assert len(installed) == 5
    assert [found for found in installed if not found[1].endswith("-c constraints.txt -e '.[lora,vision]'")] == []


def test_the_junit_that_is_taken_is_the_one_that_is_written():
    written = {word for _, words in calls("gpucluster") for word in words if word.startswith("--junitxml=")}
    assert written == {"--junitxml=reports/report.xml"}
    jobs = yaml.safe_load(GITLAB.read_text())
    assert jobs[".reports"]["artifacts"]["reports"]["junit"] == "reports/report.xml"
    assert jobs[".reports"]["artifacts"]["when"] == "always"
    assert {jobs[name]["extends"] for name in ("rehearsal", "acceptance")} == {".reports"}
    taken = "junit testResults: 'reports/report.xml', keepProperties: true, allowEmptyResults: false"
    assert re.search(rf"post \{{\s+always \{{.*{re.escape(taken)}", JENKINS.read_text(), re.DOTALL)
    steps = content(GITHUB["acceptance.yml"])["jobs"]["acceptance"]["steps"]
    kept = [step for step in steps if step.get("uses", "").startswith("actions/upload-artifact@")]
    assert [step["if"] for step in kept] == ["${{ always() }}"]
    assert kept[0]["with"]["if-no-files-found"] == "error"


def piece(where):
    [text] = [text for place, text in scripts() if place.endswith(where)]
    return text


@pytest.fixture
def stand_in(tmp_path):
    """A folder in which gpucluster ends with the code in the file `code`, and python does nothing."""
    for folder in (tmp_path / "bin", tmp_path / ".venv" / "bin"):
        folder.mkdir(parents=True)
        for name, body in (
            ("gpucluster", 'echo "$@" >> calls; case "$1" in run) exit "$(cat code)" ;; report) echo summary ;; esac'),
            ("python", "true"),
            ("python3", "true"),
        ):
            (folder / name).write_text(f"#!/bin/sh\n{body}\n")
            (folder / name).chmod(0o755)
    return tmp_path


def run_shell(folder, text, shell=("bash", "-e"), **more):
    environ = {"PATH": f"{folder / 'bin'}:/usr/bin:/bin", "HOME": str(folder), **more}
    return finished([*shell, "-c", text], cwd=folder, env=environ)


@pytest.mark.parametrize(
    ("where", "shell"),
    [
        ("acceptance.yml: acceptance, step 4", ("bash", "-e")),
        ("rehearsal.yml: rehearsal, step 5", ("bash", "-e")),
        ("gitlab-ci.yml: acceptance, script", ("bash", "-eo", "pipefail")),
        ("gitlab-ci.yml: rehearsal, script", ("bash", "-eo", "pipefail")),
        ("Jenkinsfile: sh 2", ("sh", "-xe")),
    ],
)
def test_the_exit_code_of_the_run_is_that_of_the_job(stand_in, where, shell):
    for code in (0, 1, 10, 11):
        (stand_in / "code").write_text(str(code))
        assert run_shell(stand_in, piece(where), shell).returncode == code
    assert "run " in (stand_in / "calls").read_text()


def test_the_summary_is_added_limits_are_checked_and_a_tag_must_be_the_version(stand_in):
    (stand_in / "summary").write_text("before\n")
    text = piece("acceptance.yml: acceptance, step 5")
    assert run_shell(stand_in, text, GITHUB_STEP_SUMMARY=str(stand_in / "summary")).returncode == 0
    assert (stand_in / "summary").read_text() == "before\nsummary\n"
    text = piece("rehearsal.yml: rehearsal, step 4")
    for given, told in (("", "thresholds check"), ("my limits.yaml", "thresholds check my limits.yaml")):
        (stand_in / "calls").unlink(missing_ok=True)
        assert run_shell(stand_in, text, THRESHOLDS=given).returncode == 0
        assert (stand_in / "calls").read_text() == f"{told}\n"
    (stand_in / "dist").mkdir()
    (stand_in / "dist" / f"pytest_gpucluster-{__version__}-py3-none-any.whl").write_text("")
    for tag, code in ((f"v{__version__}", 0), ("v9.9.9", 1)):
        assert run_shell(stand_in, piece("release.yml: package, step 4"), TAG=tag).returncode == code


def test_the_oldest_versions_are_the_least_that_pyproject_allows():
    text = (ROOT / "pyproject.toml").read_text()
    lists = re.findall(r"^(?:dependencies|lora|vision) = \[(.*?)\]$", text, re.DOTALL | re.MULTILINE)
    assert len(lists) == 3
    needed = {Requirement(name) for names in lists for name in re.findall(r'"(.*?)"', names)}
    lines = (ROOT / "constraints-oldest.txt").read_text().splitlines()
    pinned = {
        line.partition("==")[0].lower().replace("_", "-"): line.partition("==")[2] for line in lines if "==" in line
    }
    assert {requirement.name.lower() for requirement in needed} == set(pinned)
    for requirement in needed:
        [least] = requirement.specifier
        pin = pinned[requirement.name.lower()]
        assert least.operator == ">="
        # "8.2" is 8.2.0 and nothing later, where a release has that number.
        assert (pin + ".").startswith(least.version + "."), f"{requirement} and {pin}"
