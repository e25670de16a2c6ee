"""Each program that a page may show, and how its arguments are held against the program itself.

A program that is neither here nor in known_programs.py fails the tests.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from cluster_programs import docker, kubectl, mpirun, slurm, slurm_looks, ssh
from doc_pages import ROOT, Block
from known_programs import (
    DIAGNOSTIC,
    GIT_VERBS,
    OF_NCCL_TESTS,
    PIP_VERBS,
    PLAIN,
)
from pytest_words import Wrong, check_pytest, find
from shell_words import BadShell, Command, check_syntax, commands
from suite_names import Item

from pytest_gpucluster import cli
from pytest_gpucluster.crosscheck.plan import require_others
from pytest_gpucluster.errors import GpuClusterError
from pytest_gpucluster.torchrun.command_line import command_line


@dataclass(frozen=True, kw_only=True)
class Reader:
    """What commands are held against.

    Attributes:
        config: of a session in which the plugin is installed.
        items: of the acceptance suite.
        made: files that the page itself shows or makes.
    """

    config: pytest.Config
    items: Sequence[Item]
    made: Collection[str] = field(default_factory=tuple)

    def check(self, words: Sequence[str]) -> None:
        """Hold one command against its program.

        Raises:
            Wrong: with what is wrong.
        """
        program = Path(words[0]).name if re.search(r"(^|/)bin/", words[0]) else words[0]
        program = program.removeprefix("./") if "/" in program[2:] else program
        for word in words:
            if "..." in word or "\N{HORIZONTAL ELLIPSIS}" in word:
                raise Wrong(f"{word}: a command is shown whole; write what a reader is to put there as $NAME")
        if program in _CHECKS:
            _CHECKS[program](self, words[1:])
        elif program in PLAIN or program in DIAGNOSTIC:
            self._files(words[1:])
        elif "/" in program and not program.startswith(("/", "$", "~")):
            _script(program, words[1:], self.made)
        else:
            raise Wrong(f"{program}: no program that is known here; tests/docs/known_programs.py has the list")

    def check_line(self, line: str) -> None:
        """Hold a line that another program is to run against the programs in it."""
        try:
            for command in commands(line):
                self.check(command.words)
        except BadShell as error:
            raise Wrong(f"{line}: {error}") from None

    def _files(self, words: Sequence[str]) -> None:
        """What looks like a part of this repository must be one."""
        for word in words:
            if re.match(r"(deploy|docs|acceptance|tests|perf|pytest_gpucluster)/\w", word):
                find(word, self.made)


def complaints(block: Block, reader: Reader) -> list[str]:
    """Return what is wrong with the commands of a block, each with its place."""
    wrong = []
    try:
        check_syntax(block.text)
        shown = commands(block.text)
    except BadShell as error:
        return [f"{block.where}: {error}"]
    for number, line in enumerate(block.text.splitlines()):
        if re.match(r"\s*[$#>] \S", line) and not line.lstrip().startswith("# "):
            wrong.append(f"{block.page}:{block.line + number}: no prompts; what is printed stands in a text block")
    for command in shown:
        try:
            _check_environment(command)
            reader.check(command.words)
        except Wrong as error:
            wrong.append(f"{block.page}:{block.line + command.line}: {error}")
    return wrong


def made_by(blocks: Sequence[Block]) -> set[str]:
    """The files that a page shows under their name, and those that its commands write, fetch or unpack."""
    made = {block.file for block in blocks if block.file}
    for block in blocks:
        if block.language not in ("console", "bash"):
            continue
        with contextlib.suppress(BadShell):  # told where the commands are checked
            for command in commands(block.text):
                made |= set(command.writes)
                if command.words[0] in ("mkdir", "touch", "tee", "cp", "mv"):
                    made |= {word.rstrip("/") for word in command.words[1:] if not word.startswith("-")}
    return {name for name in made if name not in ("", "-") and not name.startswith("/dev/")}


def _check_environment(command: Command) -> None:
    known = {option.variable for option in _options()} | {"GPUCLUSTER_HOSTNAME", "GPUCLUSTER_EXIT_NOTES"}
    for name in command.environment:
        if name.startswith("GPUCLUSTER_") and name not in known:
            raise Wrong(f"{name}: no variable that is read; there are {', '.join(sorted(known))}")


def _options():
    from pytest_gpucluster import options

    return options.OPTIONS


def _gpucluster(reader: Reader, words: Sequence[str]) -> None:
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            options = cli.parse(list(words))
    except SystemExit as error:
        if error.code:
            raise Wrong(f"gpucluster: {' '.join(said.getvalue().split())[-300:]}") from None
        return
    if "for_others" in options:
        try:
            line = command_line(options.for_others, options.passed_on, {})
        except GpuClusterError as error:
            raise Wrong(f"gpucluster {options.command}: {error}") from None
        _torchrun(reader, line.arguments)
    elif options.command == "crosscheck":
        try:
            require_others(options.passed_on)
        except GpuClusterError as error:
            raise Wrong(f"gpucluster crosscheck: {error}") from None
        for word in options.passed_on:
            if word.startswith("-") and word.partition("=")[0] not in OF_NCCL_TESTS:
                raise Wrong(f"nccl-tests {word}: no option that is known here")
    elif options.passed_on and options.passed_on[0] in (*_CHECKS, *PLAIN, *DIAGNOSTIC):
        reader.check(options.passed_on)
    elif options.passed_on:
        check_pytest(options.passed_on, reader.config, reader.items, reader.made)


@functools.cache
def _torchrun_parser() -> argparse.ArgumentParser:
    parser = pytest.importorskip("torch.distributed.run").get_args_parser()
    assert isinstance(parser, argparse.ArgumentParser)
    return parser


def _torchrun(reader: Reader, words: Sequence[str]) -> None:
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
            told = _torchrun_parser().parse_args(list(words))
    except SystemExit:
        raise Wrong(f"torchrun: {' '.join(said.getvalue().split())[-300:]}") from None
    if told.module:
        _module(reader, told.training_script, told.training_script_args)
    else:
        find(told.training_script, reader.made)


def _python(reader: Reader, words: Sequence[str]) -> None:
    rest = list(words)
    while rest and rest[0] in ("-u", "-I", "-B", "-q"):
        del rest[0]
    if not rest:
        return
    first, *arguments = rest
    if first == "-c":
        if not arguments:
            raise Wrong("python -c: what is to be run is missing")
        try:
            compile(arguments[0], "-c", "exec")
        except SyntaxError as error:
            raise Wrong(f"python -c: {error}") from None
    elif first == "-m":
        if not arguments:
            raise Wrong("python -m: the module is missing")
        _module(reader, arguments[0], arguments[1:])
    elif first in ("--version", "-V"):
        return
    elif first.startswith("-"):
        raise Wrong(f"python {first}: not known here")
    else:
        _script(first, arguments, reader.made)


def _script(path: str, arguments: Sequence[str], made: Collection[str]) -> None:
    """Hold the options of a script of this repository against its text: none of them takes anything else's."""
    script = find(path, made)
    if not script.is_file():
        return  # the page itself shows it
    source = script.read_text(encoding="utf-8")
    for word in arguments:
        option = word.partition("=")[0]
        if option.startswith("--") and not re.search(rf"(?<![\w-]){re.escape(option)}(?![\w-])", source):
            raise Wrong(f"{path}: it has no option {option}")


def _module(reader: Reader, module: str, arguments: Sequence[str]) -> None:
    known: dict[str, Callable[[Reader, Sequence[str]], None]] = {
        "pytest": _pytest,
        "pip": _pip,
        "pytest_gpucluster": _gpucluster,
        "torch.distributed.run": _torchrun,
        "venv": _any,
        "ruff": _any,
        "mypy": _any,
        "build": _any,
        "json.tool": _any,
        "http.server": _any,
        "torch.utils.collect_env": _any,
    }
    if module not in known:
        raise Wrong(f"python -m {module}: no module that is known here")
    known[module](reader, arguments)


def _any(reader: Reader, words: Sequence[str]) -> None:
    reader._files(words)


def _pytest(reader: Reader, words: Sequence[str]) -> None:
    check_pytest(words, reader.config, reader.items, reader.made)


def _pip(reader: Reader, words: Sequence[str]) -> None:
    if not words or words[0] not in PIP_VERBS:
        raise Wrong(f"pip {' '.join(words[:1])}: no command of pip")
    rest = list(words[1:])
    while rest:
        word = rest.pop(0)
        if word in ("-c", "-r", "--constraint", "--requirement", "-e", "--editable"):
            if not rest:
                raise Wrong(f"pip {word}: its value is missing")
            value = rest.pop(0)
            _requirement(value) if word in ("-e", "--editable") else find(value, reader.made)
        elif word in ("--index-url", "--extra-index-url", "-i", "--target", "-t", "--prefix", "--timeout"):
            rest[:1] = []
        elif not word.startswith("-"):
            _requirement(word)


def _requirement(text: str) -> None:
    """Hold the extras of a requirement on this project against its pyproject.toml."""
    match = re.match(r"^(?P<name>[^\[\]@=<>~! ]+)(?:\[(?P<extras>[\w,-]+)\])?", text)
    if match is None:
        raise Wrong(f"pip: {text!r} is no requirement")
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    extras = set(
        re.findall(r"^(\w+) = \[", project.partition("[project.optional-dependencies]")[2].partition("\n[")[0], re.M)
    )
    if match["name"] in (".", "pytest-gpucluster", "./") or "pytest-gpucluster" in match["name"]:
        for extra in filter(None, (match["extras"] or "").split(",")):
            if extra not in extras:
                raise Wrong(f"pip: {text}: there is no extra {extra}; there are {', '.join(sorted(extras))}")


def _make(reader: Reader, words: Sequence[str]) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([\w-]+):(?!=)", makefile, re.MULTILINE))
    for word in words:
        if word not in targets and not re.match(r"^\w+=|^-[jBknsC]", word):
            raise Wrong(f"make {word}: no target; there are {', '.join(sorted(targets))}")


def _bash(reader: Reader, words: Sequence[str]) -> None:
    if words and words[0] in ("-c", "-lc"):
        reader.check_line(words[1])
    elif words and not words[0].startswith("-"):
        find(words[0], reader.made)


def _git(reader: Reader, words: Sequence[str]) -> None:
    if not words or words[0] not in GIT_VERBS:
        raise Wrong(f"git {' '.join(words[:1])}: no command that is known here")


def _sudo(reader: Reader, words: Sequence[str]) -> None:
    reader.check(words)


def _eval(reader: Reader, words: Sequence[str]) -> None:
    """Hold nothing: the commands whose output it takes have been checked before it."""


_CHECKS: dict[str, Callable[[Reader, Sequence[str]], None]] = {
    "gpucluster": _gpucluster,
    "pytest": _pytest,
    "torchrun": _torchrun,
    "python": _python,
    "python3": _python,
    "pip": _pip,
    "make": _make,
    "sbatch": slurm("sbatch"),
    "srun": slurm("srun"),
    "salloc": slurm("salloc"),
    "squeue": slurm_looks("squeue"),
    "sinfo": slurm_looks("sinfo"),
    "scancel": slurm_looks("scancel"),
    "scontrol": slurm_looks("scontrol"),
    "mpirun": mpirun,
    "ssh": ssh,
    "docker": docker,
    "podman": docker,
    "kubectl": kubectl,
    "bash": _bash,
    "sh": _bash,
    "git": _git,
    "sudo": _sudo,
    "eval": _eval,
}
