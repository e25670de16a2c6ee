"""The command ``gpucluster``. Only the modules of the chosen subcommand are imported."""

from __future__ import annotations

import argparse
import errno
import importlib
import io
import os
import sys
from collections.abc import Sequence

from pytest_gpucluster import __version__
from pytest_gpucluster.cli import command as cli
from pytest_gpucluster.errors import CertificateError, EnvironmentBroken, JournalError, ThresholdsError, UsageProblem

READER_GONE = 141
"""What a shell reports for SIGPIPE. Never 0: `gpucluster runs compare OLD NEW | head` may end before the result."""

_STDOUT_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""Errors of a standard output that is redirected to a file."""

BEFORE = {
    "init": "write a site's files: limits, batch scripts, manifests, a CI job",
    "demo": "the acceptance suite on a simulated cluster with planted faults, on this machine",
    "doctor": "what would be skipped or fail in a run, before it is started",
    "node": "try and inspect nodes: selftest, info, diff, nccl-env, kernel-log",
    "thresholds": "limits: check, explain, calibrate, judge",
    "lora": "LoRA data and results: prepare, evaluate, reference-curve",
}
DURING = {
    "run": "torchrun with pytest, on this node or over ssh, with pytest's own exit code",
    "sweep": "every node alone, then the survivors together: slurm, kubernetes, ssh",
}
AFTER = {
    "report": "re-render the reports of a run from its journal",
    "verdict": "print a run's verdict and exit with its code",
    "runs": "work with journals: compare, merge, fleet, crosscheck",
    "certificate": "certificates of accepted runs: create, verify, diff",
}
COMMANDS = BEFORE | DURING | AFTER
"""Command -> help, in this order. ``COMMAND`` of the module ``cli.<command>`` carries it out."""

FORWARDING = {"run", "sweep", "doctor", "demo"}
"""Commands whose arguments after the first ``--`` belong to another program."""

HOSTS = "--hosts"
"""With this option ``run`` works over ssh and has its own options. Without it unknown options belong to torchrun."""

_EPILOG = "\n".join(
    f"{title}:\n" + "".join(f"  {name:<12} {does}\n" for name, does in group.items())
    for title, group in (("before a run", BEFORE), ("during a run", DURING), ("after a run", AFTER))
)
_EPILOG += """
`gpucluster COMMAND --help` has the examples and exit codes of a command. Everywhere 2 is wrong usage,
and 141 means that the reader of the output has closed it.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    try:
        options = parse(sys.argv[1:] if arguments is None else arguments)
    except BrokenPipeError:  # up to Python 3.11 argparse lets it through
        _discard_stdout()
        return READER_GONE
    if sys.stdout is None:  # closed by the parent process: the output would be lost, and the exit code good
        return cli.complain("the standard output is closed", cli.USAGE)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Characters that the locale lacks are printed as escapes, as on standard error.
        sys.stdout.reconfigure(errors="backslashreplace")
    code = READER_GONE
    try:
        code = _run(options)
        sys.stdout.flush()
    except BrokenPipeError:  # closed by its reader, such as `head`
        _discard_stdout()
    except OSError as error:
        if error.filename is not None or error.errno not in _STDOUT_FULL:
            raise
        cli.complain(f"the standard output cannot be written to: {error.strerror}", cli.NO_OUTPUT)
        _discard_stdout()
        return cli.NO_OUTPUT if code in (cli.DONE, READER_GONE) else code
    return code


def _run(options: argparse.Namespace) -> int:
    try:
        code: int = options.run(options)
    except cli.CommandError as error:
        return cli.complain(str(error), error.code)
    except (JournalError, CertificateError, ThresholdsError) as error:
        return cli.complain(str(error), cli.NO_INPUT)
    except (UsageProblem, EnvironmentBroken) as error:
        return cli.complain(str(error), cli.USAGE if isinstance(error, UsageProblem) else cli.BROKEN_EXIT)
    return code


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the ``command``, its own options, and ``forwarded``, the arguments after ``--``.

    Raises:
        SystemExit: wrong usage, or only help was requested.
    """
    words, forwarded = list(arguments), []
    command = words[0] if words else ""
    if command in FORWARDING and "--" in words:
        at = words.index("--")
        words, forwarded = words[:at], words[at + 1 :]
    parser = argparse.ArgumentParser(
        prog="gpucluster",
        description="Start runs of pytest-gpucluster, work with their results, and inspect nodes.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"pytest-gpucluster {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", help=argparse.SUPPRESS)
    over_ssh = any(word == HOSTS or word.startswith(f"{HOSTS}=") for word in words)
    module = "run_hosts" if command == "run" and over_ssh else command
    for name in COMMANDS:
        inner = commands.add_parser(name, allow_abbrev=False)
        if name == command:
            load(module).configure(inner)
    options, unknown = parser.parse_known_args(words)
    if module in ("run", "doctor"):
        options.for_torchrun = unknown
    elif unknown:
        after = "; pytest's are written after --" if command in FORWARDING else ""
        hint = f"`--help` lists this command's options{after}"
        getattr(options, "refuse", parser.error)(f"unrecognized arguments: {' '.join(unknown)}. {hint}")
    if options.command is None:
        parser.print_help(sys.stderr)
        raise SystemExit(cli.USAGE)
    options.forwarded = forwarded
    return options


def _discard_stdout() -> None:
    """Redirect standard output to /dev/null: Python would report the error again when it closes the stream."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def load(module: str) -> cli.Command | cli.Group:
    """Return the command or group of a module of ``cli``."""
    found: cli.Command | cli.Group = importlib.import_module(f"pytest_gpucluster.cli.{module}").COMMAND
    return found
