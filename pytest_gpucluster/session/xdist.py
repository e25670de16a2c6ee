"""The GPUs of one node without a launcher: ``pytest -n N --dist each``, where worker gwI is rank I on GPU I.

Every worker runs every test on its own GPU, judges nothing, and sends the controller what it measured. The controller
merges the N reports of a test into one, judges it, and lets pytest see that one only: the same testcases as under
torchrun. For tests that Ctrl-C interrupts no report comes from the workers: each leaves its measurements in a file.
"""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from pytest_gpucluster.agreement import rendezvous
from pytest_gpucluster.agreement.exchange import Merged, RankOutcome, merge
from pytest_gpucluster.config.criteria_file import read_manifest
from pytest_gpucluster.config.workload import WorkloadRecord
from pytest_gpucluster.errors import LaunchError, ThresholdsError
from pytest_gpucluster.journal import verdict
from pytest_gpucluster.journal.records import CollectedTest
from pytest_gpucluster.journal.run_directory import ARTIFACTS
from pytest_gpucluster.journal.test_record import TestRecord, unique
from pytest_gpucluster.metrics.codec import read
from pytest_gpucluster.metrics.measurement import Measurement
from pytest_gpucluster.metrics.time_budget import LEDGER
from pytest_gpucluster.reports.criterion_text import summary_text
from pytest_gpucluster.reports.summary import row_of
from pytest_gpucluster.session import shutdown
from pytest_gpucluster.session.failure import MergedRepr, line_of, skip_reason
from pytest_gpucluster.session.phases import Phases
from pytest_gpucluster.session.progress import STEPS
from pytest_gpucluster.session.reporting import BROKE, Console, Status
from pytest_gpucluster.session.run import Run
from pytest_gpucluster.session.selection import criterion_of, is_selection, only_lists
from pytest_gpucluster.session.session import Session, last_error, take_junit
from pytest_gpucluster.session.shutdown import call_verdict_hooks
from pytest_gpucluster.session.startup import Startup
from pytest_gpucluster.session.status_line import begin_for_workers
from pytest_gpucluster.session.verdict import judge_merged
from pytest_gpucluster.text import first_line

NAME = "interrupted.json"
"""In the folder of this worker's artifacts. A worker is interrupted in one test at most."""


@dataclass(frozen=True, kw_only=True)
class InterruptedResult:
    """How far one worker came in the test that it was in. ``properties`` are of pytest's ``record_property``."""

    nodeid: str
    outcome: RankOutcome
    properties: Sequence[tuple[str, Any]] = ()

    def write(self, folder: Path) -> None:
        """Put it there, whole or not at all. Raises: OSError."""
        folder.mkdir(parents=True, exist_ok=True)
        body = {
            "nodeid": self.nodeid,
            "rank": self.outcome.rank,
            "outcome": self.outcome.to_json(),
            # A property may be anything.
            "properties": [[name, str(value)] for name, value in self.properties],
        }
        path = folder / f".{NAME}"
        path.write_text(json.dumps(body), encoding="utf-8")
        os.replace(path, folder / NAME)


def interrupted_results(artifacts: Path) -> list[InterruptedResult]:
    """Return what is below the folder of all workers' artifacts, by rank. A file that cannot be read is not there: then
    nothing is known of that worker, which is no pass."""
    left = []
    for path in artifacts.glob(f"rank-*/{NAME}"):
        try:
            body = json.loads(path.read_text(encoding="utf-8"))
            left.append(
                InterruptedResult(
                    nodeid=body["nodeid"],
                    outcome=RankOutcome.from_json(body["rank"], body["outcome"]),
                    properties=[(name, value) for name, value in body["properties"]],
                )
            )
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return sorted(left, key=lambda one: one.outcome.rank)


SAMPLER = "gpucluster_sampler"
"""The key of ``workerinput`` that names the node's sampler to a worker."""
DIRECTORY = "gpucluster_directory"
"""The key of ``workerinput`` that names the run's folder to a worker."""
PROPERTY = "gpucluster"
"""The one key of ``report.user_properties`` in which a worker's outcome travels, as plain JSON types."""


class Worker(Session):
    """One rank on the GPU of its own number; every other word is the controller's."""

    def __init__(self, config: pytest.Config, run: Run) -> None:
        super().__init__(config, run)
        self._phases = Phases(run, judges=False, keep=self._keep_interrupted)
        self._has_sent_workload = False

    def check_items(self, session: pytest.Session) -> None:
        """Leave it to the controller to say that the tests cannot be run: nothing is left to run here."""
        try:
            super().check_items(session)
        except pytest.UsageError as error:
            session.items[:] = []
            self._config.workeroutput[PROPERTY] = str(error)  # type: ignore[attr-defined]  # by xdist, for its workers

    def collected(self, session: pytest.Session) -> None:
        """Leave the comparison of collections to the controller."""

    def made(self, report: pytest.TestReport, item: pytest.Item) -> None:
        """Put this rank's outcome into the report, which travels to the controller."""
        outcome = self._phases.last_outcome
        run = self._run
        record = run.records.get(item.nodeid)
        workload_record = run.running.workload_record if not self._has_sent_workload else None
        self._has_sent_workload = True
        report.user_properties.append(
            (
                PROPERTY,
                {
                    "workload": None if workload_record is None else workload_record.line(),
                    "who": dict(run.roll.who[0]),
                    "criterion": criterion_of(item),
                    "applicable": record.applicable if record is not None else True,
                    "outcome": outcome.to_json() if outcome is not None else None,
                    "spent": LEDGER.seconds() if report.when == "teardown" else None,
                },
            )
        )

    def _keep_interrupted(self, item: pytest.Item, message: str, measured: Sequence[Measurement]) -> None:
        """Keep what an interrupted body has measured where the controller looks for it: no report is sent any more."""
        place = self._run.place
        if place is None or not place.directory or not measured:
            return
        outcome = RankOutcome(
            rank=place.index,
            outcome="error",
            message=message,
            text=message,
            measurements=[each.to_json() for each in measured],
        )
        left = InterruptedResult(nodeid=item.nodeid, outcome=outcome, properties=list(item.user_properties))
        with suppress(OSError):  # then nothing is known of this worker, which is no pass, and Ctrl-C goes on
            left.write(self._run.artifacts_directory())

    def show(self, report: pytest.TestReport) -> None:
        """Say nothing: the controller does."""
        self._phases.reports.take_subtest(report)

    def finish(self, session: pytest.Session) -> None:
        """Keep pytest's own exit status: the verdict is the controller's."""


_NOT_CALLED = "its call phase did not run"
_BAD = ("failed", "error", "hung", "lost")


def worker_count(config: pytest.Config) -> int:
    """Return how many workers pytest-xdist is going to start, 0 without it.

    Raises:
        LaunchError: xdist would give each test to one worker only, so that most GPUs were never measured.
    """
    specs = [str(spec) for spec in getattr(config.option, "tx", None) or []]
    if not specs or getattr(config.option, "dist", "no") == "no":
        return 0
    if config.option.dist != "each":
        raise LaunchError(
            f"--dist {config.option.dist} gives each test to one worker, so that a criterion would be measured on one "
            "GPU only. Use --dist each: pytest -n <GPUs> --dist each --max-worker-restart=0 -m single_gpu acceptance/"
        )
    return sum(int(spec.partition("*")[0]) if spec.partition("*")[1] else 1 for spec in specs)


@dataclass(kw_only=True)
class _Parts:
    """The reports of one test from the workers, while they come in."""

    record: TestRecord
    phases: dict[int, list[pytest.TestReport]] = field(default_factory=dict)
    outcomes: dict[int, RankOutcome] = field(default_factory=dict)
    ended: set[int] = field(default_factory=set)
    between_attempts: set[int] = field(default_factory=set)
    """Ranks that have failed and try again."""
    expected_failures: dict[int, str] = field(default_factory=dict)
    """Rank -> why its failure was expected (xfail)."""
    merged: bool = False


class Controller:
    """The process that the operator started: it runs no test itself."""

    def __init__(self, config: pytest.Config, run: Run, workers: int) -> None:
        self._config = config
        self._run = run
        self._console = Console(config, run)
        self._workers = workers
        self._tests: dict[str, _Parts] = {}
        self._collections: dict[int, Sequence[str]] = {}
        self._lost: dict[int, str] = {}
        self._who: dict[int, Mapping[str, Any]] = {}
        self._hidden: weakref.WeakSet[pytest.TestReport] = weakref.WeakSet()
        self._errors: weakref.WeakSet[pytest.TestReport] = weakref.WeakSet()
        self._cannot_collect: str | None = None
        self._cannot_run: str | None = None
        self._finished = False
        self._is_interrupted = False
        self._to_finish: pytest.Session | None = None
        self._sampler: Mapping[str, Any] = {}
        """How the workers reach the sampler of this node; nothing on cpu."""
        self._steps: str | None = None
        """Where the first worker says how far it is, if the live line shows it."""
        self._workload_rank = 0
        """The worker that sent its workload first."""
        take_junit(config, run)
        run.names = {rank: f"rank {rank} (gw{rank})" for rank in range(workers)}

    # ---- hooks that both kinds of session have ---------------------------------------------------------------

    def start(self, session: pytest.Session) -> None:
        """Start the record. The workers see to their own GPUs."""
        if only_lists(self._config):
            return
        self._run.selection = is_selection(self._config)
        Startup(self._run).open_for_workers(self._workers)
        if not self._run.rehearsal:
            self._sampler = self._run.monitor.start()
        self._steps = begin_for_workers(self._config, self._run)

    def header(self) -> list[str]:
        """Return the lines under pytest's own header."""
        return self._console.header()

    def collect_report(self, report: pytest.CollectReport) -> None:
        """Record what a worker cannot collect."""
        if report.failed and self._run.recorder is not None:
            message = first_line(f"cannot collect {report.nodeid}: {last_error(report.longreprtext)}")
            self._cannot_collect = self._cannot_collect or message
            self._run.problem("collection", message, report.longreprtext)

    def deselected(self) -> None:
        """Only workers deselect."""

    def check_items(self, session: pytest.Session) -> None:
        """Only workers collect."""

    def after_collection(self) -> list[str]:
        """Only workers collect."""
        return []

    def collected(self, session: pytest.Session) -> None:
        """The controller itself collects nothing."""

    def not_collected(self, session: pytest.Session, error: BaseException) -> None:
        """Let pytest report it."""
        raise error

    def refuses_to_run(self) -> bool:
        """xdist's loop always runs."""
        return False

    def starts(self, item: pytest.Item) -> bool | None:
        """No test runs in this process."""
        return None

    def phase(self, item: pytest.Item, when: str) -> Generator[None, Any, Any]:
        """No test runs in this process."""
        return (yield)

    def made(self, report: pytest.TestReport, item: pytest.Item) -> None:
        """No test runs in this process."""

    def status(self, report: pytest.TestReport, status: Status) -> Status:
        """Hide the parts of a test; show a broken one as an error; begin a criterion's line."""
        if hasattr(report, "context") or report in self._hidden:  # a subtest is reported with its test
            return "", "", ""
        return self._console.status(report, BROKE if report in self._errors else status)

    def shown(self, report: pytest.TestReport) -> None:
        """Print what was measured, below or after what pytest has printed."""
        self._console.print_result(report)

    # ---- what comes from the workers -------------------------------------------------------------------------

    def worker_input(self) -> dict[str, Any]:
        """Return what a worker must know before it starts."""
        values: dict[str, Any] = {SAMPLER: dict(self._sampler)} if self._sampler else {}
        if self._run.directory is not None:
            values[DIRECTORY] = str(self._run.directory.resolve())
        if self._steps is not None:
            values[STEPS] = self._steps
        return values

    def worker_collected(self, worker: str, node_ids: Sequence[str]) -> None:
        """Compare what each worker found with the first one."""
        self._collections[_index(worker)] = list(node_ids)
        if len(self._collections) < self._workers:
            return
        expected = self._collections[min(self._collections)]
        names = [CollectedTest.of(nodeid, (nodeid.partition("::")[0], None, "")) for nodeid in expected]
        try:
            self._run.running = replace(self._run.running, manifest=read_manifest(expected, self._config.rootpath))
        except ThresholdsError as error:
            self._run.problem("usage", str(error), str(error))
        self._run.take_collected(names, left_out={})
        different = rendezvous.collection_difference(expected, self._collections, self._run.names, subset=False)
        if different is not None:
            self._run.problem("collection", *different)

    def worker_lost(self, worker: str, error: object) -> None:
        """Remember a worker that ended before its tests did, and in which test."""
        rank = _index(worker)
        done = {nodeid for nodeid, parts in self._tests.items() if rank in parts.ended}
        current = next((nodeid for nodeid in self._collections.get(rank, ()) if nodeid not in done), None)
        during = f" during {current}" if current else " before its first test"
        # An exception comes as its whole traceback: the last line says what it was.
        why = next((line for line in reversed(str(error).splitlines()) if line.strip()), "no reason given")
        self._lost[rank] = first_line(f"lost{during}: worker {worker} crashed ({why})")
        self._run.problem("rank lost", f"{self._run.names[rank]} is {self._lost[rank]}", str(error))

    def worker_finished(self, worker: str, output: Mapping[str, Any]) -> None:
        """Take a worker's last words: why it could not run the tests, if it could not."""
        if PROPERTY in output and self._cannot_run is None:
            self._cannot_run = str(output[PROPERTY])
            self._run.problem("usage", self._cannot_run, self._cannot_run)

    def started(self, nodeid: str, location: tuple[str, int | None, str]) -> None:
        """Record the first start of a test."""
        if nodeid not in self._tests:
            record = TestRecord(test=CollectedTest.of(nodeid, location))
            self._tests[nodeid] = _Parts(record=record)
            line = {"type": "start", "nodeid": nodeid, "at": record.started_at}
            self._run.send({**line, "deadline_seconds": float(self._run.settings.deadline)})

    def show(self, report: pytest.TestReport) -> None:
        """Hide every part but the last, which becomes the merged report of the test."""
        worker = getattr(report, "node", None)
        if worker is None or hasattr(report, "context"):
            return
        rank = _index(worker.gateway.id)
        self.started(report.nodeid, report.location)
        parts = self._tests[report.nodeid]
        if str(report.when) != "???":  # xdist's own report of a crash, which worker_lost has reported before
            self._take(parts, rank, report)
        if self._complete(parts) and not parts.merged:
            self._merge(parts, report)
        else:
            self._hidden.add(report)
            report.outcome = "passed"

    def _take(self, parts: _Parts, rank: int, report: pytest.TestReport) -> None:
        body: Any = next((value for name, value in report.user_properties if name == PROPERTY), None)
        parts.phases.setdefault(rank, []).append(report)
        if report.when == "setup":
            parts.between_attempts.discard(rank)
        if body is not None:
            self._note(parts, rank, report, body)
        if report.when == "teardown" and rank not in parts.between_attempts:
            parts.ended.add(rank)

    def _note(self, parts: _Parts, rank: int, report: pytest.TestReport, body: Mapping[str, Any]) -> None:
        record = parts.record
        if record.test.criterion is None and body["criterion"] is not None:
            record.test = CollectedTest.of(report.nodeid, report.location, body["criterion"])
        record.applicable = record.applicable and body["applicable"]
        if rank not in self._who:
            self._who[rank] = {**body["who"], "rank": rank, "local_rank": rank}
            self._run.take_worker(rank, self._who[rank])
            if len(self._who) == self._workers:  # before the first test is judged, which names who was at fault
                self._run.send_cluster(self._who)
                self._console.say(self._console.cluster())
        if body.get("workload") is not None:
            self._take_workload(rank, read(WorkloadRecord, body["workload"], f"worker {rank}"))
        if body["spent"] is not None:
            record.spent[rank] = body["spent"]
        outcome = RankOutcome.from_json(rank, body["outcome"]) if body["outcome"] else None
        if str(report.outcome) == "rerun":  # pytest-rerunfailures: this attempt does not count
            self._note_rerun(parts, rank, report)
            return
        known = parts.outcomes.get(rank)
        if report.skipped and hasattr(report, "wasxfail"):
            parts.expected_failures[rank] = report.wasxfail
            outcome = RankOutcome(rank=rank, outcome="passed")
        if report.failed and (outcome is None or outcome.outcome == "passed"):
            outcome = _from_pytest(rank, [report])  # such as a strict xfail that passes: pytest says so afterwards
        if outcome is not None and (known is None or known.outcome == "passed"):
            measured = outcome.measurements or (known.measurements if known else ())
            parts.outcomes[rank] = RankOutcome(
                rank=rank,
                outcome=outcome.outcome,
                message=outcome.message,
                text=outcome.text,
                measurements=measured,
                sections=outcome.sections,
                telemetry=outcome.telemetry or (known.telemetry if known else {}),
            )

    def _take_workload(self, rank: int, workload: WorkloadRecord) -> None:
        known = self._run.running.workload_record
        if known is None:
            self._workload_rank = rank
            self._run.take_workload(workload)
            self._console.say(self._console.workload())
            return
        first = {self._workload_rank: known.compared, rank: workload.compared}
        different = rendezvous.workload_disagreement(first, self._run.names, subset=False)
        if different is not None:
            self._run.problem("collection", *different)

    def _note_rerun(self, parts: _Parts, rank: int, report: pytest.TestReport) -> None:
        attempt = 1 + sum(str(earlier.outcome) == "rerun" for earlier in parts.phases[rank][:-1])
        parts.outcomes.pop(rank, None)
        parts.between_attempts.add(rank)
        parts.record.properties.append((f"attempt {attempt}", f"{self._run.names[rank]}: {line_of(report)}"))
        parts.record.attempts = max(parts.record.attempts, attempt + 1)

    def _complete(self, parts: _Parts) -> bool:
        return all(rank in parts.ended or rank in self._lost for rank in range(self._workers))

    def _merge(self, parts: _Parts, carrier: pytest.TestReport | None) -> None:
        parts.merged = True
        record = parts.record
        merged = self._merged(parts)
        bad = merged.outcome in ("failed", "error")
        outcome = "failed" if bad else merged.outcome
        # Before the carrier, which is one of these reports, is given the time of all.
        seconds = max((sum(r.duration for r in reports) for reports in parts.phases.values()), default=0.0)
        if carrier is not None:
            carrier.when = "call"
            carrier.location = (record.test.file, (record.test.line or 1) - 1, record.test.name)
            carrier.outcome = outcome  # type: ignore[assignment]  # passed, failed or skipped
            carrier.duration = seconds
            if bad:
                carrier.longrepr = MergedRepr(merged, carrier, record)  # type: ignore[assignment]  # asked for toterminal only
                if merged.outcome == "error":
                    self._errors.add(carrier)
            elif parts.expected_failures:
                carrier.wasxfail = merged.message
            elif outcome == "skipped":
                path, line, _ = carrier.location
                carrier.longrepr = (path, line or 0, f"Skipped: {merged.message}")
        text = (str(merged.text) or merged.message) if bad else merged.message
        record.add(
            "call",
            outcome=outcome,
            message=merged.message,
            text=text,
            seconds=seconds,
            merged=merged,
            wasxfail=merged.message if parts.expected_failures and not bad else None,
        )
        for _, reports in sorted(parts.phases.items(), reverse=True):  # as elsewhere, rank 0's output is shown
            own = [(name, value) for name, value in reports[-1].user_properties if name != PROPERTY]
            record.properties = unique([*record.properties, *own])
            record.sections = list(reports[-1].sections)
        self._run.records[record.test.nodeid] = record
        if carrier is not None and bad:
            repr_: Any = carrier.longrepr
            repr_.reprcrash.message = summary_text(row_of(record.result()), self._run.journal_copy.journal())
        self._run.send(record.line())
        record.drop_samples()

    def _merged(self, parts: _Parts) -> Merged:
        outcomes = []
        for rank in range(self._workers):
            known = parts.outcomes.get(rank)
            if rank in self._lost and rank not in parts.ended:
                known = RankOutcome(rank=rank, outcome="lost", message=self._lost[rank], text=self._lost[rank])
            elif known is None:
                known = _from_pytest(rank, parts.phases.get(rank, []))
            called = any(report.when == "call" for report in parts.phases.get(rank, []))
            if known.outcome == "passed" and not called and rank not in parts.expected_failures:
                known = replace(known, outcome="error", message=_NOT_CALLED, text=_NOT_CALLED)
            outcomes.append(known)
        merged = merge(outcomes, self._run.names)
        if merged.outcome == "passed" and parts.expected_failures:
            return Merged(outcome="skipped", message=next(iter(parts.expected_failures.values())))
        if merged.outcome == "skipped" and not merged.too_slow:
            return merged
        return judge_merged(self._run, parts.record, merged, outcomes)

    # ---- the end ---------------------------------------------------------------------------------------------

    def internal_error(self, error: BaseException) -> None:
        """Nothing: no other rank waits for this process."""

    def interrupted(self) -> None:
        """Note that the operator has ended the run."""
        self._is_interrupted = True

    def finish(self, session: pytest.Session) -> None:
        """Close the record, after Ctrl-C only once the workers have ended: until then they leave what they have."""
        self._to_finish = session
        if not self._is_interrupted:
            self._finish()

    def _finish(self) -> None:
        """Close the record: a test that did not come from every worker is an error."""
        session = self._to_finish
        if session is None or self._finished or self._run.recorder is None:
            return
        self._finished = True
        cut_short = self._take_interrupted() if self._is_interrupted else set()
        stopped = int(session.exitstatus) == pytest.ExitCode.INTERRUPTED
        for parts in self._tests.values():
            if parts.merged:
                continue
            if stopped and parts.record.test.nodeid in cut_short:
                self._merge(parts, None)
                continue
            if stopped and not any(outcome.outcome in _BAD for outcome in parts.outcomes.values()):
                self._leave_out(parts)
                continue
            for rank in range(self._workers):
                if rank not in parts.ended:
                    self._lost.setdefault(rank, "no report of this test came from its worker")
            self._merge(parts, None)
        alike = len(self._collections) == self._workers and len(set(map(tuple, self._collections.values()))) == 1
        why = self._cannot_collect if alike and not self._tests else None
        refused = self._cannot_run if not self._tests else None
        session.exitstatus = shutdown.finish_for_workers(
            self._run, int(session.exitstatus), why=why, refused=refused, cut_short=cut_short
        )

    def _take_interrupted(self) -> set[str]:
        """Take what interrupted workers have left of the tests that they were in; return these tests."""
        assert self._run.directory is not None
        cut_short = set()
        for left in interrupted_results(self._run.directory / ARTIFACTS):
            # Ctrl-C may come before the message of any worker that it has begun this test.
            self.started(left.nodeid, (left.nodeid.partition("::")[0], None, left.nodeid.rpartition("::")[2]))
            parts = self._tests[left.nodeid]
            if not parts.merged and left.outcome.rank not in parts.ended:
                parts.outcomes[left.outcome.rank] = left.outcome
                parts.ended.add(left.outcome.rank)
                parts.record.properties = unique([*left.properties, *parts.record.properties])
                cut_short.add(left.nodeid)
        for nodeid in cut_short:
            parts = self._tests[nodeid]
            for rank in set(range(self._workers)) - parts.ended - set(self._lost):
                text = f"interrupted on {self._run.names[rank]}, which has left no measurements"
                parts.outcomes[rank] = RankOutcome(rank=rank, outcome="error", message=text, text=text)
                parts.ended.add(rank)
        return cut_short

    def _leave_out(self, parts: _Parts) -> None:
        """Record that a test did not come to its end on every worker, because the run was stopped."""
        parts.merged = True
        message = "not run to its end on every worker: the run was stopped"
        parts.record.add("call", outcome="skipped", message=message, text=message, seconds=0.0, merged=None)
        self._run.records[parts.record.test.nodeid] = parts.record
        self._run.send(parts.record.line())

    def last_words(self, session: pytest.Session) -> None:
        """Print the verdict under everything else."""
        self._finish()
        if not self._finished:
            return
        if self._run.verdict is not None:
            session.exitstatus = self._run.verdict.exit
            verdict.keep_exit_code(self._run.verdict.exit)
        call_verdict_hooks(self._run)
        reporter = self._config.pluginmanager.get_plugin("terminalreporter")
        if reporter is None:
            return
        if self._cannot_run is not None and "\n" in self._cannot_run:  # the verdict has the first line only
            for line in self._cannot_run.splitlines():
                reporter.write_line(line, red=True)
        self._console.close()

    def close(self) -> None:
        """End what was started for the workers."""
        self._finish()  # Ctrl-C again, while the workers were ending
        self._run.monitor.close()
        self._run.close()


def _index(worker: str) -> int:
    return int(worker.removeprefix("gw"))


def _from_pytest(rank: int, reports: Sequence[pytest.TestReport]) -> RankOutcome:
    """Read a worker's outcome from plain reports, when it could not send its own."""
    for report in reports:
        if report.failed:
            kind = "failed" if report.when == "call" else "error"
            return RankOutcome(rank=rank, outcome=kind, message=line_of(report), text=report.longreprtext)
        if report.skipped:
            return RankOutcome(rank=rank, outcome="skipped", message=skip_reason(report))
    text = "its worker sent no outcome"
    return RankOutcome(rank=rank, outcome="error", message=text, text=text)
