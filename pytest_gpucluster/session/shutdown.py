"""The end of a run: the verdict of all ranks, the end of the record, the site's hooks, the report to the launcher.

Once the verdict is on disk, rank 0 names the reports that are missing and calls the hook ``pytest_gpucluster_verdict``.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from pytest_gpucluster.agreement.exchange import AbortReason
from pytest_gpucluster.agreement.hang_diagnosis import remove_left
from pytest_gpucluster.agreement.liveness import start_time
from pytest_gpucluster.errors import JournalError
from pytest_gpucluster.journal import verdict
from pytest_gpucluster.journal.records import TestResult
from pytest_gpucluster.journal.run_directory import VerdictRecord
from pytest_gpucluster.journal.test_record import now
from pytest_gpucluster.journal.verdict import ExitNote, write_note
from pytest_gpucluster.launch import detached_process
from pytest_gpucluster.reports.failures import places_text
from pytest_gpucluster.reports.recorder.client import reports_seconds, wait_for_end
from pytest_gpucluster.reports.summary import outline
from pytest_gpucluster.session.run import Run
from pytest_gpucluster.text import first_line, one_line, plural, visible

HOOK = "pytest_gpucluster_verdict"
_SHOWN_CHARACTERS = 1000


def call_verdict_hooks(run: Run) -> None:
    """Say what is missing of the reports, and call every ``pytest_gpucluster_verdict``. Rank 0, once, at the end.

    A hook that raises does not keep the others from being called. Its traceback is shown. The verdict and the exit
    code stay: they are recorded, and all ranks have agreed on them.
    """
    if run.recorder is None or run.directory is None or run.verdict is None:
        return
    if run.recorder.missing:
        _say(run, f"reports are missing: {run.recorder.missing}")
    plugins = [one.plugin for one in reversed(run.config.hook.pytest_gpucluster_verdict.get_hookimpls())]
    journal = run.journal_copy.journal()
    if plugins and journal is None:
        _say(run, "pytest_gpucluster_verdict is not called: there is no journal to read")
    if not plugins or journal is None:
        return
    decided = run.verdict
    # A ticket or a drained node is read elsewhere, where a path from here says nothing.
    place = run.directory.absolute()
    record = VerdictRecord.of(journal, place, verdict=decided.word, exit=decided.exit, reason=decided.reason)
    for problem in record.problems:
        _say(run, problem)
    for plugin in plugins:
        others = [other for other in plugins if other is not plugin]
        try:
            run.config.pluginmanager.subset_hook_caller(HOOK, remove_plugins=others)(record=record)
        except BaseException as error:  # also SystemExit and Ctrl-C: no hook ends this run with another exit code
            where = run.config.pluginmanager.get_name(plugin) or repr(plugin)
            text = f"{HOOK} of {where} has failed: {type(error).__name__}: {error}; the verdict stays as it is"
            _say(run, text, "".join(traceback.format_exception(error)))


def _say(run: Run, text: str, details: str = "") -> None:
    lines = [f"gpucluster: {one_line(text, _SHOWN_CHARACTERS)}", *visible(details).splitlines()]
    run.write_lines((line[:_SHOWN_CHARACTERS] for line in lines), red=True)


_MORE_SECONDS = 3.0
_FINISH_DEADLINE_SECONDS = 60.0
_TRY_AGAIN_SECONDS = 2.0
"""How long the recorder may take to write once more what the disk had refused."""


def decide(run: Run, *, pytest_exit: int, abort: AbortReason | None) -> verdict.Verdict:
    """Return the verdict on what is recorded. Rank 0 has everything; other ranks know only the reason of an abort."""
    results, problems = [], list(run.problems)
    for record in run.records.values():
        try:
            results.append(record.result())
        except JournalError as error:  # none is expected, and the process must end with a verdict
            results.append(TestResult(nodeid=record.test.nodeid, outcome=record.outcome))
            problems.append(f"{record.test.nodeid} is recorded in part only: {error}")
    return verdict.decide(
        results,
        pytest_exit=pytest_exit,
        abort=None if abort is None else (abort.exit, abort.message),
        problems=problems if abort is None else (),
        not_run=run.not_run() if pytest_exit == 0 else (),
        required=run.settings.require,
        kind=run.kind,
        selection=run.selection,
        manifest=run.manifest is not None,
        deviations=run.deviations,
        topology="; ".join([_topology(run), *_remarks(run)]),
    )


def _with_places(run: Run, decided: verdict.Verdict) -> verdict.Verdict:
    """Add the places of the culprits to the verdict. Main thread only."""
    try:
        journal = run.journal_copy.journal() if decided.exit == 1 else None
        return replace(decided, places=places_text(journal, outline(journal), decided.reason)) if journal else decided
    except Exception as error:  # none is expected, and the process must end with a verdict
        _say(run, f"the places of the culprits are unknown: {error!r}")
        return decided


def _topology(run: Run) -> str:
    shape = f"{plural(run.facts.nnodes, 'node')}, {plural(run.facts.world_size, 'rank')}"
    if run.settings.expect is not None:
        return f"{shape}, as expected ({run.settings.expect})"
    if run.facts.scheduler.nnodes is not None:
        return f"{shape}, as allocated by {run.facts.scheduler.name}"
    return f"{shape}, as launched (nothing was declared by --gpucluster-expect)"


def _remarks(run: Run) -> list[str]:
    """Return in what this run was less, or other, than the whole suite with the shipped limits."""
    remarks = list(run.workload_record.remarks) if run.workload_record is not None else []
    requeued = run.environ.get("SLURM_RESTART_COUNT", "")
    if requeued.isascii() and requeued.isdigit() and int(requeued) > 0:
        remarks.append(
            f"attempt {int(requeued) + 1} of Slurm job {run.environ.get('SLURM_JOB_ID')}, which was requeued"
        )
    if run.settings.sku is not None:
        remarks.append(f"judged as {run.settings.sku} (--gpucluster-sku)")
    if run.settings.thresholds is not None:
        remarks.append(f"limits overlaid by {run.settings.thresholds}")
    if run.baseline is not None:
        remarks.append(run.baseline.remark(record.measurements for record in run.records.values()))
    return remarks


def finish_for_workers(run: Run, pytest_exit: int, *, why: str | None = None, refused: str | None = None) -> int:
    """Close the record of a run whose ranks are local workers; returns the exit code.

    ``why`` no test has run, if what was to be collected could not be collected by any worker; ``refused`` if they
    were, and could not be run.
    """
    who = run.roll.who
    if len(who) < run.facts.world_size:  # else it was recorded with the last report
        run.send_cluster(who)
    abort = None
    if refused is not None:
        abort = AbortReason(name="usage", message=first_line(refused), exit=4, text=refused)
    elif why is not None:
        abort = AbortReason(name="collection", message=first_line(why), exit=2)
    elif pytest_exit == pytest.ExitCode.INTERRUPTED and not (
        run.problems or any(record.outcome in ("failed", "error") for record in run.records.values())
    ):  # else that explains why pytest has stopped
        abort = AbortReason(name="interrupted", message="interrupted before every worker had run every test", exit=2)
        run.record_abort(abort)
    run.verdict = _with_places(run, decide(run, pytest_exit=pytest_exit, abort=abort))
    write_end(run)
    return run.verdict.exit


def finish(run: Run, pytest_exit: int, *, why: str | None = None) -> int:
    """Agree on the verdict and close the record. Every rank must call this; returns the exit code.

    ``why`` pytest has interrupted itself, if it has and that is known.
    """
    if not run.has_joined:
        return pytest_exit
    watch = run.watch
    if watch.abort_reason is None and pytest_exit in (2, 3):
        name = {2: "interrupted", 3: "internal error"}[pytest_exit]
        message = first_line(why or f"{name} on {run.names[run.rank]}")
        watch.end(AbortReason(name=name, message=message, exit=pytest_exit))
    agreed = _agree_on_finish(run, pytest_exit) if watch.abort_reason is None else {}
    if run.verdict is None and agreed:
        run.verdict = verdict.Verdict(**agreed)
    run.verdict = run.verdict or decide(run, pytest_exit=pytest_exit, abort=watch.abort_reason)
    write_end(run)
    return run.verdict.exit


def _agree_on_finish(run: Run, pytest_exit: int) -> Mapping[str, Any]:
    def settle(bodies: dict[int, Mapping[str, Any]]) -> Mapping[str, Any]:
        failure = run.recorder.failure_now(_TRY_AGAIN_SECONDS) if run.recorder is not None else None
        if failure is not None:
            run.problems.append(failure)  # now, so that every rank ends with the same exit code
        worst = max((body.get("exit", 11) for body in bodies.values()), default=pytest_exit)
        run.verdict = _with_places(run, decide(run, pytest_exit=worst, abort=run.abort_reason))
        return asdict(run.verdict)

    run.watch.enter("the end of the session", _FINISH_DEADLINE_SECONDS)
    run.watch.leave()
    return run.agree({"exit": pytest_exit}, settle, deadline_seconds=_FINISH_DEADLINE_SECONDS) or {}


def write_end(run: Run) -> None:
    """Record the end, and wait for the reports: without them nothing is accepted. Rank 0 only."""
    if run.recorder is None or run.verdict is None:
        return
    outcomes = [record.outcome for record in run.records.values()]
    end = {
        "type": "end",
        "at": now(),
        "verdict": run.verdict.word,
        "exit": run.verdict.exit,
        "reason": run.verdict.reason,
        "counts": {kind: outcomes.count(kind) for kind in ("passed", "failed", "error", "skipped")},
        "not_run": run.not_run(),
        "ended_by": first_line(run.stopped if run.abort_reason is None else run.abort_reason.message),
        "by": "rank 0",
    }
    error = run.recorder.finish(end, timeout=_MORE_SECONDS + reports_seconds(run.directory or Path()))
    if error is not None:
        run.problems.append(error)
        if run.verdict.exit in (0, 10, 12):
            run.verdict = verdict.Verdict(word=verdict.BROKEN, exit=11, reason=f"no complete report: {error}")
        run.journal_copy.add({"type": "problem", "name": "report", "outcome": "error", "message": error})
    run.journal_copy.add({**end, "verdict": run.verdict.word, "exit": run.verdict.exit, "reason": run.verdict.reason})


def overtime(run: Run, abort: AbortReason) -> None:
    """The main thread did not come back in time: the watcher ends the process with the reports written."""
    if run.verdict is None:
        run.verdict = decide(run, pytest_exit=abort.exit, abort=abort)
        write_end(run)
    text = f"\n{verdict.title(run.verdict.word, run.kind)}: {run.verdict.reason}\n"
    if run.rank == 0:
        run.cry(text)
    _leave_note(run, run.verdict)
    _wait_for_reports(run)
    if run.has_joined:
        run.watch.remove_left()
    detached_process.end_stale_processes([str(run.fault_file.path)])
    remove_left(str(run.fault_file.path))
    os._exit(run.verdict.exit)


def close(run: Run) -> None:
    """Leave: no rank is called lost after this."""
    run.monitor.close()
    if not run.has_joined:
        return
    watch = run.watch
    watch.goodbye("finished")
    abort = watch.abort_reason
    if abort is not None and abort.name in ("rank stuck", "rank lost") and run.rank not in abort.culprits:
        watch.kill_stuck([rank for rank in abort.culprits if rank != run.rank])
    # After that: the recorder lives as long as rank 0, which may be the one that is stuck.
    _wait_for_reports(run)
    watch.remove_left()
    watch.close()
    if abort is None:
        run.cluster.close()
    report_to_launcher(run)


def _wait_for_reports(run: Run) -> None:
    """Keep the launcher's agent alive until the recorder has ended: its end takes every process with it."""
    if run.rank == 0 or run.roll.first_host != run.facts.hostname:
        return
    pid = run.roll.shared.get("recorder_pid")
    # The same host name may hide another pid namespace, where that number is somebody else's.
    if pid is not None and start_time(int(pid)) == run.roll.shared["recorder_started"]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGCONT)  # somebody may have stopped it
        wait_for_end(int(pid), _MORE_SECONDS + reports_seconds(Path(str(run.roll.shared.get("directory")))))


def report_to_launcher(run: Run) -> None:
    """Put one readable line into torchrun's summary of failures, and leave the exit code where it is asked for."""
    path, result = run.environ.get("TORCHELASTIC_ERROR_FILE"), run.verdict
    if result is not None:
        _leave_note(run, result)
    if path is None or result is None or result.exit == 0:
        return
    text = f"{verdict.marked(result.word, run.kind)} (exit code {result.exit}): {result.reason}"
    body = {"message": {"message": text, "extraInfo": {"timestamp": str(int(time.time()))}}}
    try:
        Path(path).write_text(json.dumps(body), encoding="utf-8")
    except OSError as error:
        print(f"cannot write {path}: {error}", file=sys.stderr)


def _leave_note(run: Run, result: verdict.Verdict) -> None:
    shared = run.roll.shared.get("directory")
    directory = shared or (run.directory.resolve() if run.directory else "")
    wrong = write_note(
        run.environ,
        ExitNote(
            rank=run.rank,
            local_world_size=run.facts.local_world_size,
            launcher=run.launcher,
            word=result.word,
            exit=result.exit,
            reason=": ".join(filter(None, (result.places, result.reason))),  # a terminal may cut it
            kind=run.kind,
            host=run.roll.first_host,
            directory=str(directory),
        ),
    )
    if wrong is not None:
        print(wrong, file=sys.stderr)
