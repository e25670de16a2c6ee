"""What all commands have in common: how a journal is named and read, how a complaint looks, what exit codes mean."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from pytest_gpucluster.errors import JournalError
from pytest_gpucluster.journal import Journal, locate, read
from pytest_gpucluster.wording import printable

DONE, REGRESSED, USAGE, NO_JOURNAL, NO_OUTPUT = 0, 1, 2, 3, 4
"""Exit codes. ``REGRESSED`` is a comparison's answer no; what else ends with 1 says so in its own help."""

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


def add_journal(parser: argparse.ArgumentParser, name: str = "journal", help: str = JOURNAL_HELP) -> None:
    """Add the argument that names a run."""
    parser.add_argument(name, metavar=name.upper(), type=Path, help=help)


def read_journal(place: Path, *, keep_samples: bool = False) -> tuple[Path, Journal]:
    """Return where the journal of a run is, and what is in it; a last line that is cut off is told.

    Raises:
        JournalError: missing, damaged, no journal of this project, or of a newer version.
    """
    path = locate(place)
    journal = read(path, keep_samples=keep_samples)
    if journal.cut:
        print(f"gpucluster: {path}: its last line is cut off and left out", file=sys.stderr)
    return path, journal


def write_text(out: str, text: str) -> None:
    """Write a report to a file, whole or not at all, or to the standard output, which is named ``-``.

    Raises:
        OSError: it cannot be written; what was there is unchanged.
    """
    if out == "-":
        sys.stdout.write(text)
        sys.stdout.flush()
        return
    path = Path(out)
    beside = path.with_name(f".{path.name}.new")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    except OSError:
        beside.unlink(missing_ok=True)
        raise


def complain(message: str, code: int) -> int:
    """Say what is wrong on the standard error, and return the exit code."""
    print(f"gpucluster: {printable(message)}", file=sys.stderr)
    return code


__all__ = [
    "DONE",
    "EXIT_CODES",
    "JOURNAL_HELP",
    "NO_JOURNAL",
    "NO_OUTPUT",
    "REGRESSED",
    "USAGE",
    "JournalError",
    "add_journal",
    "complain",
    "explain",
    "read_journal",
    "write_text",
]
