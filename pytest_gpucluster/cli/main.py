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
"""As a shell says of a program that SIGPIPE has ended. Never 0: `gpucluster runs compare OLD NEW | head` may end before
the answer is known."""

_TAKES_NO_MORE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""What the standard output may say of a file that it was led to. Commands meet the errors of their own files."""

BEFORE = {
    "node": "look at nodes: info, diff, nccl-env, kernel-log, watch",
    "thresholds": "limits: check, explain, calibrate, judge",
    "lora": "data and results of LoRA: prepare, evaluate, reference-curve",
}
DURING = {
    "run": "torchrun over pytest, on this node or over ssh, with pytest's own exit code",
    "sweep": "every node alone, then the survivors together: slurm, kubernetes, ssh",
}
AFTER = {
    "report": "render the reports of a run again from its journal",
    "verdict": "print a run's verdict, and end with its exit code",
    "runs": "journals: compare, merge, fleet, crosscheck",
    "certificate": "certificates of accepted runs: create, verify, diff",
}
COMMANDS = BEFORE | DURING | AFTER
"""Word -> what it does, in the order of the help. The module is ``cli.<word>``."""

PASSING_ON = {"run", "sweep", "runs"}
"""Words whose arguments after the first ``--`` belong to another program."""

FOR_OTHERS = {"run"}
"""Words of which options that they do not know belong to another program, too: they are ``options.for_others``."""

HOSTS = "--hosts"
"""With this option ``run`` is another command: over ssh, with options of its own."""

_EPILOG = "\n".join(
    f"{title}:\n" + "".join(f"  {name:<12} {does}\n" for name, does in group.items())
    for title, group in (("before a run", BEFORE), ("during a run", DURING), ("after a run", AFTER))
)
_EPILOG += """
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
        code = options.run(options)
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
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", help=argparse.SUPPRESS)
    module = _module(_module_name(said, words)) if said in COMMANDS else None
    for name in COMMANDS:
        inner = commands.add_parser(name)
        if module is not None and name == said:
            module.configure(inner)
            inner.set_defaults(run=module.run)
    options, others = parser.parse_known_args(words)
    if said in FOR_OTHERS and not _over_ssh(words):
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


def _over_ssh(words: Sequence[str]) -> bool:
    return any(word == HOSTS or word.startswith(f"{HOSTS}=") for word in words)


def _module_name(said: str, words: Sequence[str]) -> str:
    return "run_hosts" if said == "run" and _over_ssh(words) else said


def _module(name: str) -> Command:
    return cast(Command, importlib.import_module(f"pytest_gpucluster.cli.{name}"))
