"""What a shell would run of the lines of a block, as words: enough of its grammar for what pages show.

Pipes, lists, ``$(...)``, loops, redirections, here-documents and variables that the block sets itself are understood.
Nothing is executed.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

KNOWN_VARIABLES = {
    "NODE_RANK": "1",
    "HEAD": "gpu-001",
    "JOB_COMPLETION_INDEX": "1",
    "SLURM_JOB_ID": "4711",
    "SLURM_NODEID": "1",
    "SLURM_NNODES": "2",
    "NNODES": "2",
    "GPUS": "8",
    "PORT": "29500",
    "MASTER_PORT": "29500",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "HOME": "/home/operator",
    "USER": "operator",
    "EDITOR": "vi",
    "PWD": "/opt/pytest-gpucluster",
}
"""Variables that a reader has, and a value with which the command can be parsed; any other one stands for a text."""

_OPERATORS = ("&&", "||", "|&", "|", ";;", ";", "&", "(", ")")
_REDIRECTION = re.compile(r"^\d*(?:>>|>&|>\||<<<|<<-|<<|<>|<&|&>>|&>|>|<)$")
_BEFORE_A_COMMAND = ("do", "then", "else", "elif", "if", "while", "until", "!", "time", "{")
_NO_COMMAND = ("done", "fi", "}", "esac")
_ASSIGNMENT = re.compile(r"^([A-Za-z_]\w*)=(.*)$", re.DOTALL)
_MARK = "\x00"
"""Stands for a ``$(...)`` whose commands are read apart."""


class BadShell(Exception):
    """Lines that no shell, or not this reader, understands."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """One program with its arguments.

    Attributes:
        line: of the block, counted from 0.
        words: program and arguments; variables and ``$(...)`` are replaced by what they may be.
        environment: what stands before the program, or was exported before.
        writes: the files that the output is led to.
    """

    line: int
    words: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    writes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return shlex.join(self.words)


def check_syntax(text: str) -> None:
    """Let bash read the lines, without running any.

    Raises:
        BadShell: bash does not understand them.
    """
    done = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, timeout=30, check=False)
    if done.returncode or done.stderr:
        raise BadShell(" ".join(done.stderr.split()))


def commands(text: str) -> list[Command]:
    """Return every command of these lines, those in ``$(...)`` before the one that takes their output.

    Raises:
        BadShell: a quote or bracket is not closed.
    """
    found: list[Command] = []
    variables: dict[str, str] = {}
    for number, line in _logical_lines(text):
        found += _of_line(line, number, variables)
    return found


def _logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Join what a backslash or an open quote continues; leave out comments and the bodies of here-documents."""
    lines = text.splitlines()
    at = 0
    while at < len(lines):
        start, line = at, _without_comment(lines[at])
        at += 1
        while (line.endswith("\\") or _is_open(line)) and at < len(lines):
            line = f"{line[:-1]} {lines[at]}" if line.endswith("\\") else f"{line}\n{lines[at]}"
            line = _without_comment(line)
            at += 1
        for delimiter in re.findall(r"<<-?\s*[\"']?(\w+)[\"']?", line):
            while at < len(lines) and lines[at].strip() != delimiter:
                at += 1
            if at == len(lines):
                raise BadShell(f"line {start + 1}: the here-document {delimiter} has no end")
            at += 1
        if line.strip():
            yield start, line


def _is_open(line: str) -> bool:
    try:
        shlex.split(line)
    except ValueError:
        return True
    return False


def _of_line(line: str, number: int, variables: dict[str, str]) -> list[Command]:
    line, inner = _without_substitutions(line)
    line = re.sub(r"(?<=\s)\d(?=[<>])", "", line)  # the number of a descriptor, which the lexer would take for a word
    found = [command for text in inner for command in _of_line(text, number, dict(variables))]
    try:
        lexer = shlex.shlex(line, posix=True, punctuation_chars=";|&()<>")
        lexer.whitespace_split = True
        lexer.commenters = ""
        tokens = list(lexer)
    except ValueError as error:
        raise BadShell(f"line {number + 1}: {error}") from None
    words: list[str] = []
    for token in [*tokens, ";"]:
        if token in _OPERATORS or (token and set(token) <= set(";|&()")):
            command = _command(words, number, variables)
            if command is not None:
                found.append(command)
            words = []
        else:
            words.append(token)
    return found


def _without_comment(line: str) -> str:
    """Leave out a comment. shlex would also take the # inside of a word for the beginning of one."""
    quoted = ""
    for at, character in enumerate(line):
        if quoted:
            quoted = "" if character == quoted else quoted
        elif character in "'\"":
            quoted = character
        elif character == "#" and (at == 0 or line[at - 1].isspace()):
            return line[:at].rstrip(" ")
    return line


def _without_substitutions(line: str) -> tuple[str, list[str]]:
    """Cut out each ``$(...)`` that is not in single quotes; return the rest, and what was in them."""
    kept, inner, at, single, double = "", [], 0, False, False
    while at < len(line):
        character = line[at]
        if character == "'" and not double:
            single = not single
        elif character == '"' and not single:
            double = not double
        if not single and line.startswith(("$((", "$("), at):
            end = _closing(line, at + 1)
            if not line.startswith("$((", at):
                inner.append(line[at + 2 : end])
            kept += _MARK
            at = end + 1
            continue
        kept += character
        at += 1
    return kept, inner


def _closing(line: str, at: int) -> int:
    depth = 0
    for place in range(at, len(line)):
        depth += {"(": 1, ")": -1}.get(line[place], 0)
        if depth == 0:
            return place
    raise BadShell(f"a $( that is never closed: {line[at - 1 :]}")


def _command(words: list[str], number: int, variables: dict[str, str]) -> Command | None:
    words = list(words)
    while words and words[0] in _BEFORE_A_COMMAND:
        del words[0]
    if not words or words[0] in _NO_COMMAND:
        return None
    if words[0] == "for":
        if len(words) > 1:
            variables[words[1]] = words[3] if len(words) > 3 else "word"
        return None
    words, writes = _without_redirections(words)
    environment: dict[str, str] = {}
    while words and (match := _ASSIGNMENT.match(words[0])):
        environment[match[1]] = _expanded(match[2], variables)
        del words[0]
    if words and words[0] == "export":
        for match in filter(None, map(_ASSIGNMENT.match, words[1:])):
            variables[match[1]] = _expanded(match[2], variables)
    if not words:
        variables.update(environment)
        return None
    exported = {name: value for name, value in variables.items() if name.isupper()}
    told = tuple(_expanded(word, variables) for word in words)
    return Command(
        line=number,
        words=told,
        environment={**exported, **environment},
        writes=tuple(_expanded(name, variables) for name in writes),
    )


def _without_redirections(words: list[str]) -> tuple[list[str], list[str]]:
    kept, writes, at = [], [], 0
    while at < len(words):
        word = words[at]
        if _REDIRECTION.match(word):
            if ">" in word and at + 1 < len(words) and not word.endswith("&"):
                writes.append(words[at + 1])
            at += 2
            continue
        kept.append(word)
        at += 1
    return kept, writes


def _expanded(word: str, variables: Mapping[str, str]) -> str:
    def value(match: re.Match[str]) -> str:
        name = match[1] or match[2]
        return variables.get(name) or KNOWN_VARIABLES.get(name) or name.lower()

    return re.sub(r"\$(?:\{(\w+)[^}]*\}|(\w+))", value, word).replace(_MARK, "output")
