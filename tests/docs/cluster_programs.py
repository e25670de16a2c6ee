"""How commands of schedulers, of containers and of ssh are held against what they take, and what they run in turn."""

from __future__ import annotations

import functools
import shlex
import shutil
import subprocess
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import program_help
from doc_pages import ROOT
from known_programs import (
    BEFORE_PYTEST_S_ARGUMENTS,
    DOCKER_VERBS,
    OF_DOCKER_BUILD,
    OF_DOCKER_RUN,
    OF_MPIRUN,
    OF_PYXIS,
    OF_SSH,
)
from pytest_words import Wrong, check_pytest, find

if TYPE_CHECKING:
    from shown_programs import Reader


def _split(words: Sequence[str], known: Mapping[str, bool | None], program: str) -> tuple[dict[str, str], list[str]]:
    """Split options from what follows them: the first word that is none, as getopt does it with POSIXLY_CORRECT.

    Raises:
        Wrong: an option that the program does not have.
    """
    given: dict[str, str] = {}
    rest = list(words)
    while rest and rest[0].startswith("-") and rest[0] != "-":
        word = rest.pop(0)
        if word == "--":
            break
        name, equals, value = word.partition("=")
        if name not in known and not word.startswith("--") and word[:2] in known:
            name, value = word[:2], word[2:]
            if known[name] is False:
                if any(known.get(f"-{letter}") is not False for letter in value):
                    raise Wrong(f"{program} {word}: these are no options that can stand together")
                given[name] = ""
                continue
            equals = "="
        if name not in known:
            raise Wrong(f"{program} {name}: no option of {program}")
        if known[name] is False and equals:
            raise Wrong(f"{program} {word}: {name} takes no value")
        if known[name] and not equals:
            if not rest:
                raise Wrong(f"{program} {word}: its value is missing")
            value = rest.pop(0)
        given[name] = value
    return given, rest


def slurm(program: str) -> Callable[[Reader, Sequence[str]], None]:
    def check(reader: Reader, words: Sequence[str]) -> None:
        own = program_help.slurm_options(program)
        if own is None:  # a test of its own says so
            return
        given, rest = _split(words, {**own, **OF_PYXIS, "--wrap": True} if own else own, program)
        if "--wrap" in given:
            reader.check_line(given["--wrap"])
        if program == "sbatch" and rest:
            script = find(rest[0], reader.made)
            own_arguments = BEFORE_PYTEST_S_ARGUMENTS.get(rest[0])
            if own_arguments is not None:
                if len(rest) <= own_arguments:
                    raise Wrong(f"sbatch {rest[0]}: an argument of its own is missing")
                check_pytest(rest[1 + own_arguments :], reader.config, reader.items, reader.made)
            assert script.suffix or script.is_file()
        elif program == "sbatch" and "--wrap" not in given:
            raise Wrong("sbatch: the script is missing")
        elif rest:
            reader.check(rest)
        elif program == "srun":
            raise Wrong("srun: the program is missing")

    return check


def slurm_looks(program: str) -> Callable[[Reader, Sequence[str]], None]:
    """squeue, sinfo, scancel, scontrol: their options, which may also stand behind their words."""

    def check(reader: Reader, words: Sequence[str]) -> None:
        own = program_help.slurm_options(program)
        rest = list(words)
        while own is not None and rest:
            while rest and not (rest[0].startswith("-") and len(rest[0]) > 1):
                del rest[0]
            _, rest = _split(rest, own, program)

    return check


def mpirun(reader: Reader, words: Sequence[str]) -> None:
    rest, kept = list(words), []
    while rest:
        if rest[0] in ("--mca", "-mca"):
            if len(rest) < 3:
                raise Wrong("mpirun --mca takes a name and a value")
            del rest[:3]
            continue
        name, equals, _ = rest[0].partition("=")
        if not rest[0].startswith("-"):
            break
        if name not in OF_MPIRUN:
            raise Wrong(f"mpirun {name}: no option that is known here")
        kept.append(rest.pop(0))
        if OF_MPIRUN[name] and not equals:
            rest[:1] = []
    if not rest:
        raise Wrong("mpirun: the program is missing")
    reader.check(rest)


def ssh(reader: Reader, words: Sequence[str]) -> None:
    _, rest = _split(words, OF_SSH, "ssh")
    if not rest:
        raise Wrong("ssh: the host is missing")
    if rest[1:]:
        reader.check_line(rest[1] if len(rest) == 2 else shlex.join(rest[1:]))


def docker(reader: Reader, words: Sequence[str]) -> None:
    if list(words[:1]) == ["buildx"]:
        words = words[1:]
    if not words:
        raise Wrong("docker: the command is missing")
    verb, *rest = words
    if verb == "build":
        given: dict[str, str] = {}
        context: list[str] = []
        while rest:
            more, rest = _split(rest, OF_DOCKER_BUILD, "docker build")
            given |= more
            context += rest[:1]
            rest = rest[1:]
        if len(context) != 1:
            raise Wrong("docker build takes one folder that it builds in")
        find(context[0])
        find(given.get("-f") or given.get("--file") or "Dockerfile")
    elif verb == "run":
        _, rest = _split(rest, OF_DOCKER_RUN, "docker run")
        if not rest:
            raise Wrong("docker run: the image is missing")
        if rest[1:]:
            reader.check(rest[1:])
    elif verb not in DOCKER_VERBS:
        raise Wrong(f"docker {verb}: no command that is known here")


@functools.cache
def _kustomization(path: str) -> str:
    """Render a kustomization; return what kubectl complains of."""
    done = subprocess.run(
        ["kubectl", "kustomize", path], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    return done.stderr if done.returncode else ""


def kubectl(reader: Reader, words: Sequence[str]) -> None:
    if shutil.which("kubectl") is None:  # a test of its own says so
        return
    words, own = list(words), program_help.kubectl_options() or {}
    _, rest = _split(words, {**own, "-n": True, "--namespace": True, "--context": True}, "kubectl")
    if not rest:
        raise Wrong("kubectl: the command is missing")
    command = [rest.pop(0)]
    if command[0] not in program_help.kubectl_commands():
        raise Wrong(f"kubectl {command[0]}: no command of kubectl")
    while rest and not rest[0].startswith("-") and (below := program_help.kubectl_commands(*command)):
        if rest[0] not in below:
            raise Wrong(f"kubectl {' '.join(command)} {rest[0]}: no command of kubectl")
        command.append(rest.pop(0))
    if command == ["kustomize"]:
        return _check_kustomization(rest[0] if rest else ".", reader)
    known = program_help.kubectl_options(*command)
    assert known, command
    inner = rest[rest.index("--") + 1 :] if "--" in rest else []
    rest = rest[: rest.index("--")] if "--" in rest else rest
    while rest:
        given, rest = _split(rest, known, f"kubectl {' '.join(command)}")
        rest = rest[1:]
        for name in ("-k", "--kustomize"):
            if name in given:
                _check_kustomization(given[name], reader)
        for name in ("-f", "--filename"):
            if name in given and command[0] != "logs" and given[name] != "-" and not _is_address(given[name]):
                find(given[name], reader.made)
    if inner:
        reader.check(inner)


def _check_kustomization(path: str, reader: Reader) -> None:
    if _is_address(path) or "?ref=" in path:
        return
    if path.rstrip("/") in reader.made:
        return
    folder = find(path, reader.made)
    if not any((folder / name).is_file() for name in ("kustomization.yaml", "kustomization.yml")):
        raise Wrong(f"{path}: there is no kustomization.yaml in it")
    complaint = _kustomization(path)
    if complaint:
        raise Wrong(f"{path}: it cannot be rendered: {complaint.strip()}")


def _is_address(text: str) -> bool:
    return urllib.parse.urlsplit(text).scheme in ("http", "https")
