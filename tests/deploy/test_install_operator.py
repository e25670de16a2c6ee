"""deploy/kubernetes/install-operator.sh, with a kubectl that takes notes."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from shell import finished

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


@pytest.fixture
def install(tmp_path: Path) -> Callable[..., Installed]:
    """Run the script with nothing on PATH but what it needs, and the kubectl above."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("bash", "env", "sed"):
        (programs / name).symlink_to(Path("/usr/bin") / name)

    def run(*arguments: str, without: str = "", **environ: str) -> Installed:
        for name, text in (("kubectl", KUBECTL), ("git", "#!/bin/sh\n")):
            (programs / name).write_text(text)
            (programs / name).chmod(0o755)
        if without:
            (programs / without).unlink()
        notes = tmp_path / "asked"
        notes.write_text("")
        given = {"PATH": str(programs), "NOTES": str(notes), **environ}
        done = finished(["/usr/bin/bash", str(SCRIPT), *arguments], env=given)
        asked = [shlex.split(line) for line in notes.read_text().splitlines()]
        return Installed(done.returncode, done.stdout, done.stderr, asked)

    return run


KUBEFLOW = "https://github.com/kubeflow"
MPI = "https://raw.githubusercontent.com/kubeflow/mpi-operator/v0.8.2/deploy/v2beta1/mpi-operator.yaml"


def test_an_operator_is_applied_at_its_version_and_waited_for(install: Callable[..., Installed]) -> None:
    manifests = "{}/manifests/overlays/{}?ref={}".format
    for operator, flag, source, waited in (
        (
            *("trainer", "-k", manifests(f"{KUBEFLOW}/trainer.git", "manager", "v2.3.0")),
            ["jobset-controller-manager", "kubeflow-trainer-controller-manager"],
        ),
        (
            *("training-operator", "-k", manifests(f"{KUBEFLOW}/training-operator.git", "standalone", "v1.9.3")),
            ["training-operator"],
        ),
        ("mpi-operator", "-f", MPI, ["mpi-operator"]),
    ):
        found = install(operator)
        assert found.code == 0, found.err
        assert found.changes == [["apply", "--server-side", flag, source]]
        waits = [words for words in found.asked if words[0] in ("wait", "rollout")]
        assert [words[0] for words in waits] == ["wait", *["rollout"] * len(waited)]
        assert [words[2] for words in waits[1:]] == [f"deployment/{name}" for name in waited]
        assert all("--timeout=300s" in words for words in waits)
        assert found.asked.index(found.changes[0]) < found.asked.index(waits[0])
    assert "?ref=v2.4.0" in install("trainer", TRAINER_VERSION="v2.4.0").changes[-1][-1]
    # Twice is the same as once, and the time to wait its own.
    first = install("--timeout", "20", "mpi-operator")
    again = install("--timeout", "20", "mpi-operator", MPIJOB_VERSIONS="v2beta1")
    assert (first.code, again.code, again.asked) == (0, 0, first.asked)
    assert [words[-1] for words in first.asked if words[0] in ("wait", "rollout")] == ["--timeout=20s"] * 2


def test_what_cannot_be_done_is_told_before_anything_is_changed(install: Callable[..., Installed]) -> None:
    for arguments, how, said in (
        ([], {}, "--help"),
        (["tf-operator"], {}, "tf-operator: "),
        (["--force", "trainer"], {}, "--force: "),
        (["--timeout"], {}, "--timeout"),
        (["--timeout", "soon", "trainer"], {}, "--timeout soon"),
        (["--timeout", "0", "trainer"], {}, "--timeout 0"),
        (["trainer; reboot"], {}, "trainer; reboot: "),
        (["training-operator", "mpi-operator"], {}, "mpijobs.kubeflow.org"),
        (["trainer"], {"without": "kubectl"}, "kubectl "),
        (["trainer"], {"without": "git"}, "git "),
        (["trainer"], {"VERSION_CODE": "1"}, "no cluster answers"),
        (["trainer"], {"CRD_ERROR": "1"}, "mpijobs.kubeflow.org"),
        # Two definitions of MPIJob exclude each other.
        (["mpi-operator"], {"MPIJOB_VERSIONS": "v1"}, "What to do"),
        (["training-operator"], {"MPIJOB_VERSIONS": "v2beta1"}, "What to do"),
    ):
        found = install(*arguments, **how)
        assert (found.code, said in found.err, found.changes) == (2, True, []), found.err
    for operator, there in (("mpi-operator", "v1 v2beta1"), ("training-operator", "v1"), ("trainer", "v1")):
        found = install(operator, MPIJOB_VERSIONS=there)
        assert (found.code, len(found.changes)) == (0, 1), found.err


def test_what_fails_is_the_end_of_it(install: Callable[..., Installed]) -> None:
    for variable, value, last in (
        ("APPLY_CODE", "1", "apply"),
        ("WAIT_CODE", "1", "wait"),
        ("NEVER_READY", "deployment/jobset-controller-manager", "rollout"),
    ):
        found = install("trainer", "mpi-operator", **{variable: value})
        assert (found.code, found.asked[-1][0]) == (1, last)
        assert "trainer " in found.err
        assert not any("mpi-operator" in word for words in found.changes for word in words)
