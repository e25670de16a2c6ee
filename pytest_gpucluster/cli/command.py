"""What all commands share: arguments, exit codes, errors, and how reports are read and written."""

from __future__ import annotations

import argparse
import contextlib
import inspect
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from pytest_gpucluster import files
from pytest_gpucluster.errors import OptionError, UnitError
from pytest_gpucluster.metrics import units
from pytest_gpucluster.text import one_line, paragraph, printable

if TYPE_CHECKING:
    from pytest_gpucluster.journal.journal import Journal
    from pytest_gpucluster.journal.records import TestResult
    from pytest_gpucluster.judge.limits import Thresholds

DONE, NEGATIVE, USAGE, NO_INPUT, NO_OUTPUT, UNDECIDED = 0, 1, 2, 3, 4, 5
"""Exit codes. ``NEGATIVE``: a comparison found a difference, a check a problem."""
BROKEN_EXIT = 11

STDOUT = ("-", "/dev/stdout")
"""Names of the standard output. A file that it is redirected to is never replaced: another program may append to it."""

JOURNAL_HELP = "a journal.jsonl, the folder of a run, or a report directory (its latest run)"
_HELP_COLUMNS = 110
UNREADABLE = {NO_INPUT: "a journal is missing, damaged, of another program, or of a newer version"}
"""Exit code of commands that read journals."""


class CommandError(Exception):
    """Ends a command with an exit code and a message."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


def complain(message: str, code: int) -> int:
    """Print each line of a message on standard error, and return the exit code."""
    for line in message.splitlines():
        print(f"gpucluster: {printable(line)}", file=sys.stderr)
    return code


# ---- commands, their help and arguments


Argument = Callable[[argparse._ActionsContainer], object]
"""Adds itself to a parser."""
_COMMON_CODES = {USAGE: "wrong usage", NO_OUTPUT: "the output cannot be written"}


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command, such as ``gpucluster report`` or ``gpucluster node info``.

    Attributes:
        run: carries it out and returns the exit code. Its docstring is the help.
        help: one line for the list of a group's commands.
        arguments: without heavy imports.
        examples: lines of the help, one command each; by default those of the group.
        codes: exit code -> its meaning, in addition to the common ones and those of the group.
        usage: instead of argparse's own.
    """

    run: Callable[[argparse.Namespace], int]
    help: str = ""
    arguments: Sequence[Argument] = ()
    examples: str = ""
    codes: Mapping[int, str] = field(default_factory=dict)
    usage: str | None = None

    def configure(self, parser: argparse.ArgumentParser, group: Group | None = None) -> None:
        """Set a parser's help, and add the arguments. ``options.refuse`` is the usage error of the command."""
        lines = ["exit codes:"]
        for code, text in sorted({**_COMMON_CODES, **(group.codes if group else {}), **self.codes}.items()):
            lines += textwrap.wrap(text, _HELP_COLUMNS, initial_indent=f"  {code:<4}", subsequent_indent=" " * 6)
        parser.description = inspect.getdoc(self.run)
        examples = textwrap.indent(textwrap.dedent(self.examples or (group.examples if group else "")), "  ")
        parser.epilog = "\n".join([f"examples:\n{examples}", *lines]) + "\n"
        parser.formatter_class = argparse.RawDescriptionHelpFormatter
        parser.usage = self.usage
        for add in self.arguments:
            add(parser)
        parser.set_defaults(run=self.run, refuse=parser.error)


def command(*arguments: Argument, **settings: Any) -> Callable[[Callable[[argparse.Namespace], int]], Command]:
    """Make a function a :class:`Command` with these attributes. Its docstring is the help."""
    return lambda run: Command(run=run, arguments=arguments, **settings)


@dataclass(frozen=True, kw_only=True)
class Group:
    """A group of commands, such as ``gpucluster node``."""

    description: str
    commands: Mapping[str, Command]
    examples: str = ""
    codes: Mapping[int, str] = field(default_factory=dict)

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add the commands to a parser."""
        parser.description = self.description
        inner = parser.add_subparsers(dest="step", metavar="COMMAND", required=True)
        for name, command in self.commands.items():
            command.configure(inner.add_parser(name, help=command.help), self)


def argument(name: str, help: str, **settings: Any) -> Argument:
    """Return a positional argument; its metavar is the name in capitals."""
    return lambda parser: parser.add_argument(name, help=help, **{"metavar": name.upper(), **settings})


def option(spec: str, help: str, **settings: Any) -> Argument:
    """Return an option as its usage states it, such as ``--port PORT``, or a flag such as ``--force``.

    A default is stated in the help. With ``action="append"`` the option is repeatable.
    """
    flag, _, metavar = spec.partition(" ")
    if not metavar:
        return lambda parser: parser.add_argument(flag, action="store_true", help=help, **settings)
    if settings.get("action") == "append":
        settings, help = {"default": [], **settings}, f"{help}; repeatable"
    elif "(default" not in help and settings.get("default") not in (None, ""):
        help += " (default: %(default)s)"
    return lambda parser: parser.add_argument(flag, metavar=metavar, help=help, **settings)


def one_of(*options: Argument, required: bool = False) -> Argument:
    """Return options of which at most one may be given."""

    def add(parser: argparse._ActionsContainer) -> None:
        group = parser.add_mutually_exclusive_group(required=required)
        for each in options:
            each(group)

    return add


JOURNAL = argument("journal", JOURNAL_HELP, type=Path)
JOURNALS = argument("paths", "a journal.jsonl, or a folder with some", metavar="JOURNAL|DIR", type=Path, nargs="+")
JSON = option("--json FILE", "write the result as JSON; - for standard output")
"""For :func:`write_outputs`."""
EXPECTED = option("--nodes HOSTLIST", "the nodes that should have answered: gpu-[001-064]")
HTML = option("--html FILE", "write the result as a page; - for standard output")
THRESHOLDS = option("--thresholds FILE", "limits that override the shipped ones", type=Path, action="append")


def number(least: float = 1, most: float = 10**6, *, of: Callable[[str], float] = int) -> Callable[[str], int | float]:
    """Return an argument type that accepts numbers in a range, by default whole ones."""

    def parse(text: str) -> int | float:
        try:
            value = of(text)
        except ValueError:
            value = float("nan")
        if not least <= value <= most:
            what = "whole number" if of is int else "number"
            raise argparse.ArgumentTypeError(f"{text!r:.40} is not a {what} from {least} to {most}")
        return value

    return parse


port_number = number(1024, 65535)


def quantity(unit: str, least: float, most: float) -> Callable[[str], float]:
    """Return an argument type that accepts quantities, such as ``90 s`` or ``2h``, and returns them in a unit."""

    def parse(text: str) -> float:
        try:
            found = units.parse(text, like=unit).to(unit)
        except UnitError as error:
            raise argparse.ArgumentTypeError(str(error)) from None
        if not least <= found <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is not from {least:g} to {most:g} {unit}")
        return found

    return parse


seconds = quantity("s", 1, 30 * 24 * 3600)


def percentage(text: str) -> float:
    """Read ``3%`` as a ratio.

    Raises:
        argparse.ArgumentTypeError: not a percentage, or out of range.
    """
    from pytest_gpucluster.analysis.compare import allowance

    try:
        return allowance(text)
    except OptionError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def key_value(text: str) -> tuple[str, str]:
    """Read KEY=VALUE.

    Raises:
        argparse.ArgumentTypeError: something else.
    """
    key, separator, value = (part.strip() for part in text.partition("="))
    if not (key and separator and value):
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE")
    return key, value


# ---- input and output


def read_journal(
    path: Path, *, keep_samples: bool = False, slim: Callable[[TestResult], TestResult] | None = None
) -> tuple[Path, Journal]:
    """Return the path of a run's journal and its content, RUNNING while it goes on; a truncated last line is reported.

    Args:
        path: of the run.
        keep_samples: else the samples of each value are left out.
        slim: called with each result; returns what is to be kept of it.

    Raises:
        JournalError: missing, damaged, of another program, or of a newer version.
    """
    from pytest_gpucluster.journal.journal import locate, read

    path = locate(path)
    journal = read(path, keep_samples=keep_samples, slim=slim, live=True)
    if journal.cut:
        complain(f"{path}: its last line is truncated and left out", DONE)
    return path, journal


def load_limits(paths: Sequence[Path]) -> Thresholds:
    """Return the shipped limits, overridden by these files.

    Raises:
        ThresholdsError: a file is malformed.
    """
    from pytest_gpucluster.judge import loader

    return loader.load(loader.shipped_path(), *paths)


def require_distinct(
    outputs: Iterable[tuple[str, str | Path | None]], inputs: Iterable[Path], what: str = "a journal"
) -> None:
    """Refuse outputs that would replace a command's input or each other.

    Args:
        outputs: option, and where to; None where it was not asked for.
        inputs: files that the command reads.
        what: says what an input is.

    Raises:
        CommandError: an output is empty, one of the inputs, or that of another option.
    """
    read, seen = {os.path.realpath(path) for path in inputs}, dict[str, str]()
    for option, out in outputs:
        if out is None:
            continue
        if not str(out):
            raise CommandError(USAGE, f"{option}: the output is an empty text; an empty variable?")
        target = STDOUT[0] if str(out) in STDOUT else os.path.realpath(out)
        if target in read:
            raise CommandError(USAGE, f"{option} {out}: that is {what}; name another file")
        if target in seen:
            raise CommandError(USAGE, f"{option} {out}: {seen[target]} has the same output; name another file")
        seen[target] = option


def require_new_file(out: str, *, force: bool) -> None:
    """Refuse to replace the file of ``--out`` without ``--force``. Raises: CommandError: there is such a file."""
    if out not in STDOUT and os.path.lexists(out) and not force:
        raise CommandError(NO_OUTPUT, f"--out {out}: the file exists; name another one, or use --force")


@contextlib.contextmanager
def file_errors(code: int, where: str) -> Iterator[None]:
    """End the command with this exit code if a file cannot be read or written; ``where`` begins the message."""
    try:
        yield
    except OSError as error:
        if isinstance(error, BrokenPipeError) and error.filename is None:
            raise  # the standard output, which main handles
        file = f"{error.filename}: " if error.filename and str(error.filename) not in where else ""
        raise CommandError(code, f"{where}: {file}{error.strerror or error}") from error


def write_text(out: str, text: str, option: str = "--out") -> None:
    """Write a report to a file atomically, or to standard output, which is ``-``.

    Raises:
        CommandError: it cannot be written; the former content is unchanged.
    """
    if out in STDOUT:  # main handles its errors
        sys.stdout.flush()
        # Bytes: a report is UTF-8 in every locale, and a file name with half a character stops nothing.
        sys.stdout.buffer.write(text.encode("utf-8", "backslashreplace"))
        sys.stdout.flush()
        return
    with file_errors(NO_OUTPUT, f"{option} {out}"):
        files.atomic_write(Path(out), text)


def write_outputs(table: Callable[[], str], *outputs: tuple[str, str | None, Callable[[], str]]) -> None:
    """Write each output that was asked for, and the table to standard output unless an output goes there.

    Args:
        table: for the terminal.
        outputs: option, where to, and content.

    Raises:
        CommandError: one cannot be written.
    """
    for option, out, content in outputs:
        if out is not None:
            write_text(out, content(), option)
    if not any(out in STDOUT for _, out, _ in outputs):
        write_text("-", table())


def columns(least: int = 40) -> int:
    """Return the width of the terminal, or COLUMNS, or 80."""
    return max(least, shutil.get_terminal_size((80, 24)).columns)


def print_paragraph(text: str, first: str = "", stream: TextIO | None = None) -> None:
    """Print text from any source, wrapped to the width of the terminal, after ``first``."""
    rest = " " * (len(first) + 2)
    print("\n".join(paragraph(one_line(text, 2000), columns(), first=first, rest=rest)), file=stream)
