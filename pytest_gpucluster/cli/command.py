"""What all commands have in common: how a journal is named and read, how a complaint looks, what exit codes mean."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pytest_gpucluster import files
from pytest_gpucluster.text import printable

if TYPE_CHECKING:
    from pytest_gpucluster.journal.journal import Journal
    from pytest_gpucluster.journal.records import TestResult

DONE, REGRESSED, USAGE, NO_JOURNAL, NO_OUTPUT = 0, 1, 2, 3, 4
"""Exit codes. ``REGRESSED`` is a comparison's answer no; what else ends with 1 says so in its own help."""

STDOUT = ("-", "/dev/stdout")
"""The names of the standard output. A file that it is redirected to is never replaced: somebody may be appending."""

JOURNAL_HELP = "a journal.jsonl, the folder of a run, or a report directory (its latest run)"

EXIT_CODES = """\
exit codes:
  0  done (whatever the verdict of the run)
  2  wrong usage
  3  the journal is missing, damaged, no journal, or of a newer version
  4  the output cannot be written
"""


def explain(parser: argparse.ArgumentParser, description: str, examples: str, exit_codes: str = EXIT_CODES) -> None:
    """Give a command its description, examples and exit codes, as they are written."""
    parser.description = description
    parser.epilog = f"examples:\n{examples}\n{exit_codes}"
    parser.formatter_class = argparse.RawDescriptionHelpFormatter


@dataclass(frozen=True, kw_only=True)
class Step:
    """A command of a group, such as ``info`` of ``gpucluster node``."""

    help: str
    configure: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def add_steps(parser: argparse.ArgumentParser, description: str, steps: Mapping[str, Step]) -> None:
    """Add the commands of a group. ``options.run_step`` runs the chosen one, ``options.refuse`` is its usage error."""
    parser.description = description
    inner = parser.add_subparsers(dest="step", metavar="COMMAND", required=True)
    for name, step in steps.items():
        each = inner.add_parser(name, help=step.help)
        step.configure(each)
        each.set_defaults(run_step=step.run, refuse=each.error)


def run_step(options: argparse.Namespace) -> int:
    """Run the command that was chosen of a group, and return the exit code."""
    code: int = options.run_step(options)
    return code


def add_journal(parser: argparse.ArgumentParser, name: str = "journal", help: str = JOURNAL_HELP) -> None:
    """Add the argument that names a run."""
    parser.add_argument(name, metavar=name.upper(), type=Path, help=help)


def read_journal(
    place: Path, *, keep_samples: bool = False, slim: Callable[[TestResult], TestResult] | None = None
) -> tuple[Path, Journal]:
    """Return where the journal of a run is, and what is in it, RUNNING while it goes on; a cut last line is reported.

    Args:
        place: of the run.
        keep_samples: else the samples behind each value are left out.
        slim: takes each result, and returns what is to be kept of it.

    Raises:
        JournalError: missing, damaged, no journal of this project, or of a newer version.
    """
    # Imported here, so that --help answers at once.
    from pytest_gpucluster.journal.journal import locate, read

    path = locate(place)
    journal = read(path, keep_samples=keep_samples, slim=slim, live=True)
    if journal.cut:
        print(f"gpucluster: {path}: its last line is cut off and left out", file=sys.stderr)
    return path, journal


def write_text(out: str, text: str) -> None:
    """Write a report to a file, whole or not at all, or to the standard output, which is ``-``.

    Raises:
        OSError: it cannot be written; what was there is unchanged.
    """
    if out in STDOUT:
        sys.stdout.flush()
        # As bytes: a report is UTF-8 whatever the locale is, and half of a character from a file name stops nothing.
        sys.stdout.buffer.write(text.encode("utf-8", "backslashreplace"))
        sys.stdout.flush()
        return
    files.atomic_write(Path(out), text)


def complain(message: str, code: int) -> int:
    """Say what is wrong on the standard error, and return the exit code."""
    print(f"gpucluster: {printable(message)}", file=sys.stderr)
    return code
