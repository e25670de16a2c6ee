"""``gpucluster verdict``: a run's verdict, as one line and as this command's exit code."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from pytest_gpucluster.cli import command as cli
from pytest_gpucluster.cli.run import run_exit_codes
from pytest_gpucluster.errors import JournalError
from pytest_gpucluster.journal.journal import locate, read
from pytest_gpucluster.journal.verdict import BROKEN, RUNNING, RUNNING_EXIT
from pytest_gpucluster.runners.run_result import RunResult, conclusion
from pytest_gpucluster.text import printable

_PYTEST_CODES = range(2, 6)
"""pytest's own codes for a run that never began, kept if there is no journal. Its 1 may as well be srun's."""


@cli.command(
    cli.JOURNAL,
    cli.option("--json FILE", "write verdict and first failure, in at most 4096 bytes", type=Path),
    cli.option(
        "--launcher-exit CODE",
        "exit code of the run's launcher, such as srun: the run has ended, and passes only with "
        "0; without a journal 2 to 5 are kept",
        type=int,
    ),
    examples="""\
        gpucluster verdict gpucluster-report/latest
        gpucluster verdict gpucluster-report/latest --launcher-exit 137
        """,
    codes=run_exit_codes(
        {
            2: "also wrong usage",
            11: "also: the journal cannot be read, or --json cannot be written",
            RUNNING_EXIT: f"{RUNNING}: no verdict yet, and the run's recorder is alive; never with --launcher-exit",
        }
    ),
)
def _verdict(options: argparse.Namespace) -> int:
    """Print the verdict of a run and exit with the run's own code, even if its journal was truncated.

    torchrun itself ends with 1 for every code but 0, and srun with the highest code of all nodes. A run that is going
    on has no verdict yet: it is RUNNING, with its current test and the time of its start.
    """
    launcher_exit: int | None = options.launcher_exit
    try:
        path = locate(options.journal)
        result = RunResult.of(read(path, keep_samples=False, live=launcher_exit is None), str(path))
    except JournalError as error:
        cli.complain(f"no verdict: {error}", cli.BROKEN_EXIT)
        return launcher_exit if launcher_exit is not None and launcher_exit in _PYTEST_CODES else cli.BROKEN_EXIT
    if result.exit == 0 and launcher_exit:
        reason = f"its journal states {result.verdict}, but its launcher ended with exit code {launcher_exit}"
        result = replace(result, verdict=BROKEN, exit=cli.BROKEN_EXIT, reason=reason, failure=result.failure or reason)
    end = conclusion(result.verdict, result.exit, result.reason, kind=result.kind)
    print(f"gpucluster: {printable(end.line)}")
    if options.json is not None:
        with cli.file_errors(cli.BROKEN_EXIT, f"--json {options.json}"):
            # In place: a termination message is a mounted file.
            options.json.write_text(result.to_json(), encoding="utf-8")
    return result.exit


COMMAND = _verdict
