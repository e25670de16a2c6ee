"""The command ``gpucluster``: one word for each thing it does. Only what that word needs is imported."""

from __future__ import annotations

import argparse
import errno
import importlib
import io
import os
import sys
from collections.abc import Sequence
from typing import Protocol, cast

from pytest_gpucluster import __version__
from pytest_gpucluster.cli.command import DONE, NO_OUTPUT, USAGE

READER_GONE = 141
"""As a shell says of a program that SIGPIPE has ended. Never 0: `gpucluster compare OLD NEW | head` may end before the
answer is known."""

_TAKES_NO_MORE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""What the standard output may say of a file that it was led to. Commands meet the errors of their own files."""

COMMANDS = {
    "info": "tell what this node is: CPUs, GPUs, topology, ports, driver stack",
    "nccl-env": "say which of NCCL's variables this node needs, and which hurt it",
    "node": "judge a node by its kernel log: errors of GPUs and NVSwitches, and what to do",
    "nodes": "tell in what many nodes differ, by what info told of each",
    "run": "run torchrun over pytest, and end with pytest's own exit code",
    "watch": "show what this node is doing: GPUs, links, ports, processes",
    "report": "render the reports of a run again from its journal",
    "merge": "make one journal, with one verdict, of several runs of one cluster",
    "fleet": "show the runs of many nodes as one matrix, with outliers and whom to drain",
    "compare": "tell what has become better or worse from one run to another",
    "crosscheck": "hold a run's collectives beside those of nccl-tests",
    "accept": "write, verify and compare acceptance records",
    "thresholds": "check and explain limits, and propose floors from accepted runs",
    "verdict": "print a run's verdict, and end with its exit code",
    "ssh": "run the suite over the nodes of a hosts file, started over ssh",
    "sweep": "run the suite on every node alone, then on the survivors together",
    "golden": "make a golden loss curve of one or more runs",
    "data": "prepare rows for LoRA, or ask a saved adapter for function calls",
}
"""Word -> what it does, in the order of the help. The module is ``commands.<word>``, with ``_`` for ``-``."""

PASSING_ON = {"run", "ssh", "sweep", "crosscheck"}
"""Words whose arguments after the first ``--`` belong to somebody else."""

FOR_OTHERS = {"run"}
"""Words of which options that they do not know belong to somebody else, too: they are ``options.for_others``."""

_EPILOG = """\
`gpucluster COMMAND --help` has the examples and the exit codes of a command. 2 is wrong usage everywhere,
141 says that whoever read the output has closed it.
"""


class Command(Protocol):
    """A module of ``commands``."""

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add description, arguments and examples. Nothing heavy is imported for that."""

    def run(self, options: argparse.Namespace) -> int:
        """Do it, and return the exit code. ``options.passed_on`` is what stood after ``--``."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    try:
        options = parse(sys.argv[1:] if arguments is None else arguments)
    except BrokenPipeError:  # up to Python 3.11 argparse lets it through
        _let_go()
        return READER_GONE
    if sys.stdout is None:  # closed by whoever started this: all that is said would be lost, and the end a good one
        print("gpucluster: the standard output is closed", file=sys.stderr)
        return USAGE
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Where the locale has no character for it, a name or an ellipsis is shown by its number, as on standard error.
        sys.stdout.reconfigure(errors="backslashreplace")
    code = READER_GONE
    try:
        code = _module(options.command).run(options)
        sys.stdout.flush()
    except BrokenPipeError:  # whoever read this has had enough, as `head` has
        _let_go()
    except OSError as error:
        if error.filename is not None or error.errno not in _TAKES_NO_MORE:
            raise
        print(f"gpucluster: the standard output cannot be written to: {error.strerror}", file=sys.stderr)
        _let_go()
        return NO_OUTPUT if code in (DONE, READER_GONE) else code
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
    options, others = parser.parse_known_args(words)
    if said in FOR_OTHERS:
        options.for_others = others
    elif others:
        getattr(options, "refuse", parser.error)(f"unrecognized arguments: {' '.join(others)}")
    if options.command is None:
        parser.print_help(sys.stderr)
        raise SystemExit(USAGE)
    options.passed_on = passed_on
    return options


def _let_go() -> None:
    """Lead the standard output to nowhere: Python would complain once more when it closes the stream."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _module(name: str) -> Command:
    return cast(Command, importlib.import_module(f"pytest_gpucluster.cli.{name.replace('-', '_')}"))
