"""What rank 0 does when the verdict is on disk: it says which reports are missing, and tells the site's hooks."""

from __future__ import annotations

import sys
import traceback
from typing import TYPE_CHECKING

from pytest_gpucluster.journal.verdict_record import VerdictRecord
from pytest_gpucluster.text import one_line

if TYPE_CHECKING:
    from pytest_gpucluster.run import Run

HOOK = "pytest_gpucluster_verdict"
ERRORS = "hook-errors.txt"
"""In the run's folder: the tracebacks of hooks that failed."""
_SHOWN_CHARACTERS = 1000


def announce(run: Run) -> None:
    """Say what is missing of the reports, and call every ``pytest_gpucluster_verdict``. Rank 0, once, at the end.

    A hook that raises does not keep the others from being called. It is shown, and its traceback is kept in
    ``hook-errors.txt``. The verdict and the exit code stay: they are on record, and all ranks have agreed on them.
    """
    if run.recorder is None or run.directory is None or run.verdict is None:
        return
    if run.recorder.missing:
        _say(run, f"reports are missing: {run.recorder.missing}")
    if not _implementations(run):
        return
    journal = run.account.journal()
    if journal is None:
        _say(run, f"{HOOK} is not called: nothing is on record")
        return
    decided = run.verdict
    # A ticket or a drained node is read elsewhere, where a path from here says nothing.
    place = run.directory.absolute()
    record = VerdictRecord.of(journal, place, verdict=decided.word, exit=decided.exit, reason=decided.reason)
    for problem in record.problems:
        _say(run, problem)
    _call(run, record)


def _implementations(run: Run) -> list[object]:
    return [one.plugin for one in reversed(run.config.hook.pytest_gpucluster_verdict.get_hookimpls())]


def _call(run: Run, record: VerdictRecord) -> None:
    plugins = _implementations(run)
    failures = []
    for plugin in plugins:
        others = [other for other in plugins if other is not plugin]
        caller = run.config.pluginmanager.subset_hook_caller(HOOK, remove_plugins=others)
        try:
            caller(record=record)
        except BaseException as error:  # also SystemExit and Ctrl-C: no hook ends this run with another exit code
            where = run.config.pluginmanager.get_name(plugin) or repr(plugin)
            _say(run, f"{HOOK} of {where} has failed: {type(error).__name__}: {error}; the verdict stays as it is")
            failures.append(f"{HOOK} of {where}:\n{''.join(traceback.format_exception(error))}")
    if not failures:
        return
    path = record.directory / ERRORS
    try:
        path.write_text("\n".join(failures), encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        _say(run, f"{path}: not written: {error.strerror or error}")


def _say(run: Run, text: str) -> None:
    line = f"gpucluster: {one_line(text, _SHOWN_CHARACTERS)}"
    reporter = run.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None:
        print(line, file=sys.stderr)
        return
    reporter.ensure_newline()
    reporter.write_line(line, red=True)
