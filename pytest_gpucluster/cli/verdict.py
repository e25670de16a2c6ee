"""``gpucluster verdict``: a run's verdict again, as one line and as this command's exit code."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from pytest_gpucluster.cli.command import add_journal, explain
from pytest_gpucluster.errors import JournalError
from pytest_gpucluster.journal.journal import locate, read
from pytest_gpucluster.journal.verdict import BROKEN, EXIT_CODES, RUNNING, RUNNING_EXIT
from pytest_gpucluster.runners.sweep_result import Answer
from pytest_gpucluster.text import printable, visible

NO_VERDICT = 11
_OF_PYTEST = range(2, 6)
"""What a launcher may end with before there is a journal, and mean it: pytest's own codes for a run that never began.
Its 1 may as well be srun's, which could not start anything."""

_EXAMPLES = """\
  gpucluster verdict gpucluster-report/latest
  gpucluster verdict gpucluster-report/latest --launcher-exit 137
"""

_VERDICT = """\
Print the verdict of a run, and end with the run's own exit code, also where its journal was cut off. torchrun itself
ends with 1 for every code but 0, and srun with the highest code of all nodes. A run that is going on has no verdict
yet: it is RUNNING, with its test and since when.
"""

RUN_EXIT_CODES = (
    "exit codes, those of the run:\n"
    + "".join(f"  {code:<2} {what}\n" for code, what in EXIT_CODES.items())
    + f"  {RUNNING_EXIT} {RUNNING}: no verdict yet, and the run's recorder is alive; never with --launcher-exit\n"
    + "     11 also where the journal cannot be read or the answer cannot be written, 2 also for wrong usage\n"
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``verdict``."""
    explain(parser, _VERDICT, _EXAMPLES, RUN_EXIT_CODES)
    add_journal(parser)
    parser.add_argument(
        "--json", metavar="FILE", type=Path, help="write the verdict and the first failure here, in at most 4096 bytes"
    )
    parser.add_argument(
        "--launcher-exit",
        metavar="CODE",
        type=int,
        help="what the run's launcher ended with, such as srun: the run is over, and if that is not 0, never a pass; "
        "where there is no journal, 2 to 5 are kept",
    )


def run(options: argparse.Namespace) -> int:
    """Tell a run's verdict and return its exit code."""
    launcher_exit: int | None = options.launcher_exit
    try:
        path = locate(options.journal)
        answer = Answer.of(read(path, keep_samples=False, live=launcher_exit is None), str(path))
    except JournalError as error:
        print(f"gpucluster: no verdict: {printable(str(error))}", file=sys.stderr)
        return launcher_exit if launcher_exit is not None and launcher_exit in _OF_PYTEST else NO_VERDICT
    if answer.exit == 0 and launcher_exit:
        reason = f"its journal says {answer.verdict}, but its launcher ended with exit code {launcher_exit}"
        answer = replace(answer, verdict=BROKEN, exit=NO_VERDICT, reason=reason, failure=answer.failure or reason)
    rehearsal = "REHEARSAL, " if answer.rehearsal else ""
    reason = f": {answer.reason}" if answer.reason else ""
    told = f"gpucluster: {rehearsal}{answer.verdict}, exit code {answer.exit}{reason}"
    print(printable(" ".join(visible(told).split())))
    if options.json is not None:
        try:
            # In place, not beside it: a termination message is a file that is mounted.
            options.json.write_text(answer.to_json(), encoding="utf-8")
        except OSError as error:
            print(f"gpucluster: --json {options.json}: {error.strerror or error}", file=sys.stderr)
            return NO_VERDICT
    return answer.exit
