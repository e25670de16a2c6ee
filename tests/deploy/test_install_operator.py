"""deploy/kubernetes/install-operator.sh, with a kubectl that takes notes."""

from __future__ import annotations

import os
import re
import shlex
import stat
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "deploy" / "kubernetes" / "install-operator.sh"
KUBECTL = """\
#!/usr/bin/env bash
printf '%q ' "$@" >> "$NOTES"; echo >> "$NOTES"
case "$1 $2" in
  "get crd") [[ -z ${CRD_ERROR:-} ]] || { echo "Forbidden" >&2; exit 1; }; printf '%s' "${MPIJOB_VERSIONS:-}" ;;
  "version "*) exit "${VERSION_CODE:-0}" ;;
  "apply "*) exit "${APPLY_CODE:-0}" ;;
  "wait "*) exit "${WAIT_CODE:-0}" ;;
  "rollout "*) [[ $3 != "${NEVER_READY:-}" ]] ;;
esac
"""
PROGRAMS = ("bash", "env", "sed", "git", "kubectl")


@dataclass(frozen=True)
class Installed:
    """How the script ended, what it said, and what kubectl was asked."""

    code: int
    out: str
    err: str
    asked: list[list[str]]

    @property
    def changes(self) -> list[list[str]]:
        return [words for words in self.asked if words[0] in ("apply", "create", "delete", "patch", "replace")]


Install = Callable[..., Installed]


@pytest.fixture
def install(tmp_path: Path) -> Install:
    """Run the script with nothing on PATH but what it needs, and the kubectl above."""
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "kubectl").write_text(KUBECTL)
    (programs / "git").write_text("#!/bin/sh\n")
    for path in programs.iterdir():
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    for name in ("bash", "env", "sed"):
        (programs / name).symlink_to(Path("/usr/bin") / name)
    assert {path.name for path in programs.iterdir()} == set(PROGRAMS)

    def run(*arguments: str, without: str = "", **environ: str) -> Installed:
        if without:
            (programs / without).unlink()
        notes = tmp_path / "asked"
        given: Mapping[str, str] = {"PATH": str(programs), "NOTES": str(notes), **environ}
        done = subprocess.run(
            ["/usr/bin/bash", str(SCRIPT), *arguments],
            env=given,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        asked = [shlex.split(line) for line in notes.read_text().splitlines()] if notes.exists() else []
        return Installed(done.returncode, done.stdout, done.stderr, asked)

    return run


@pytest.mark.parametrize(
    ("operator", "flag", "source", "waited"),
    [
        (
            "trainer",
            "-k",
            "https://github.com/kubeflow/trainer.git/manifests/overlays/manager?ref=v2.3.0",
            ["jobset-controller-manager", "kubeflow-trainer-controller-manager"],
        ),
        (
            "training-operator",
            "-k",
            "https://github.com/kubeflow/training-operator.git/manifests/overlays/standalone?ref=v1.9.3",
            ["training-operator"],
        ),
        (
            "mpi-operator",
            "-f",
            "https://raw.githubusercontent.com/kubeflow/mpi-operator/v0.8.2/deploy/v2beta1/mpi-operator.yaml",
            ["mpi-operator"],
        ),
    ],
)
def test_an_operator_is_applied_at_its_version_and_waited_for(
    install: Install, operator: str, flag: str, source: str, waited: list[str]
) -> None:
    found = install(operator)
    assert found.code == 0, found.err
    assert found.changes == [["apply", "--server-side", flag, source]]
    waits = [words for words in found.asked if words[0] in ("wait", "rollout")]
    assert [words[0] for words in waits] == ["wait", *["rollout"] * len(waited)]
    assert [words[2] for words in waits[1:]] == [f"deployment/{name}" for name in waited]
    assert all("--timeout=300s" in words for words in waits)
    assert found.asked.index(found.changes[0]) < found.asked.index(waits[0])


def test_the_versions_are_pinned_and_can_be_others(install: Install) -> None:
    assert not re.search(r"(ref=|mpi-operator/)(master|main|latest)", SCRIPT.read_text())
    assert "?ref=v2.4.0" in install("trainer", TRAINER_VERSION="v2.4.0").changes[0][-1]


def test_a_dry_run_only_reads(install: Install) -> None:
    found = install("--dry-run", "trainer", "mpi-operator")
    assert found.code == 0, found.err
    assert found.changes == []
    assert {words[0] for words in found.asked} == {"version", "get"}
    shown = [shlex.split(line) for line in found.out.splitlines()]
    assert [words[:3] for words in shown if words[1] == "apply"] == [["kubectl", "apply", "--server-side"]] * 2
    assert "nothing was changed" in found.err


def test_twice_is_the_same_as_once(install: Install) -> None:
    first = install("mpi-operator")
    again = install("mpi-operator", MPIJOB_VERSIONS="v2beta1")
    assert (first.code, again.code) == (0, 0)
    assert again.asked[len(first.asked) :] == first.asked


def test_its_own_time_to_wait(install: Install) -> None:
    found = install("--timeout", "20", "mpi-operator")
    assert [words[-1] for words in found.asked if words[0] in ("wait", "rollout")] == ["--timeout=20s"] * 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "say what to install"),
        (["tf-operator"], "tf-operator: not known"),
        (["--force", "trainer"], "--force: not known"),
        (["--timeout"], "a number of seconds"),
        (["--timeout", "soon", "trainer"], "--timeout soon"),
        (["--timeout", "0", "trainer"], "--timeout 0"),
        (["trainer; reboot"], "not known"),
        (["training-operator", "mpi-operator"], "room for one"),
    ],
)
def test_wrong_usage_changes_nothing(install: Install, arguments: list[str], said: str) -> None:
    found = install(*arguments)
    assert found.code == 2
    assert said in found.err
    assert found.changes == []


@pytest.mark.parametrize("program", ["kubectl", "git"])
def test_a_missing_program_is_named(install: Install, program: str) -> None:
    found = install("trainer", without=program)
    assert found.code == 2
    assert f"{program} is not on PATH" in found.err
    assert found.changes == []


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({"VERSION_CODE": "1"}, "no cluster answers"),
        ({"CRD_ERROR": "1"}, "kubectl cannot read mpijobs.kubeflow.org"),
    ],
)
def test_a_cluster_that_does_not_answer_is_told(install: Install, environ: dict[str, str], said: str) -> None:
    found = install("trainer", **environ)
    assert found.code == 2
    assert said in found.err
    assert found.changes == []


@pytest.mark.parametrize(
    ("operator", "there", "code"),
    [
        ("mpi-operator", "v1", 2),
        ("mpi-operator", "v2beta1", 0),
        ("mpi-operator", "v1 v2beta1", 0),
        ("training-operator", "v2beta1", 2),
        ("training-operator", "v1", 0),
        ("trainer", "v1", 0),
    ],
)
def test_two_definitions_of_mpijob_exclude_each_other(install: Install, operator: str, there: str, code: int) -> None:
    found = install(operator, MPIJOB_VERSIONS=there)
    assert found.code == code, found.err
    assert bool(found.changes) == (code == 0)
    if code:
        assert "What to do" in found.err


@pytest.mark.parametrize(
    ("environ", "last"),
    [
        ({"APPLY_CODE": "1"}, "apply"),
        ({"WAIT_CODE": "1"}, "wait"),
        ({"NEVER_READY": "deployment/jobset-controller-manager"}, "rollout"),
    ],
)
def test_what_fails_is_the_end_of_it(install: Install, environ: dict[str, str], last: str) -> None:
    found = install("trainer", "mpi-operator", **environ)
    assert found.code == 1
    assert found.asked[-1][0] == last
    assert "trainer is not ready" in found.err
    assert not any("mpi-operator" in word for words in found.changes for word in words)


def test_help_needs_no_cluster(install: Install) -> None:
    found = install("--help", VERSION_CODE="1")
    assert found.code == 0
    assert found.asked == []
    assert "Exit codes" in found.out
    assert "set -euo" not in found.out


def test_it_can_be_started() -> None:
    assert os.access(SCRIPT, os.X_OK)
