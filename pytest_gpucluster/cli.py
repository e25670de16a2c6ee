"""The command ``gpucluster``: one word for each thing it does. Only what that word needs is imported."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Protocol, cast

from pytest_gpucluster import __version__

USAGE = 2

COMMANDS = {
    "report": "render the reports of a run again from its journal",
    "verdict": "print a run's verdict, and end with its exit code",
    "sweep": "run the suite on every node alone, then on the survivors together",
    "golden": "make a golden loss curve of one or more runs",
    "data": "prepare rows for LoRA, or ask a saved adapter for function calls",
}
"""Word -> what it does, in the order of the help. The module is ``commands.<word>``."""

PASSING_ON = {"sweep"}
"""Words whose arguments after the first ``--`` belong to somebody else."""

_EPILOG = """\
`gpucluster COMMAND --help` has the examples and the exit codes of a command. 2 is wrong usage everywhere.
"""


class Command(Protocol):
    """A module of ``commands``."""

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add description, arguments and examples. Nothing heavy is imported for that."""

    def run(self, options: argparse.Namespace) -> int:
        """Do it, and return the exit code. ``options.passed_on`` is what stood after ``--``."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    options = parse(sys.argv[1:] if arguments is None else arguments)
    try:
        code = _module(options.command).run(options)
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever read this has had enough, as `head` has. Python would complain once more when it closes the stream.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return code


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return what was said: the ``command``, its own options, and ``passed_on``, what stood after ``--``.

    Raises:
        SystemExit: wrong usage, or only help was asked for.
    """
    words, passed_on = list(arguments), []
    said = words[0] if words else ""
    if said in PASSING_ON and "--" in words:
        at = words.index("--")
        words, passed_on = words[:at], words[at + 1 :]
    parser = argparse.ArgumentParser(
        prog="gpucluster",
        description="Work with runs of pytest-gpucluster, look at nodes, and start runs.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"pytest-gpucluster {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name, does in COMMANDS.items():
        inner = commands.add_parser(name, help=does)
        if name == said:
            _module(name).configure(inner)
    options = parser.parse_args(words)
    if options.command is None:
        parser.print_help(sys.stderr)
        raise SystemExit(USAGE)
    options.passed_on = passed_on
    return options


def _module(name: str) -> Command:
    return cast(Command, importlib.import_module(f"pytest_gpucluster.commands.{name}"))
