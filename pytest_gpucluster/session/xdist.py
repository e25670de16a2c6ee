"""The GPUs of one node without a launcher: ``pytest -n N --dist each``, where worker gwI is rank I on GPU I.

Every worker runs every test on its own GPU, judges nothing, and sends the controller what it measured. The controller
merges the N reports of a test into one, judges it, and lets pytest see that one only: the same testcases as under
torchrun.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from pytest_gpucluster.agreement import rendezvous
from pytest_gpucluster.agreement.exchange import AbortReason, Merged, RankOutcome, merge
from pytest_gpucluster.config.criteria_file import read_manifest
from pytest_gpucluster.config.workload import WorkloadRecord
from pytest_gpucluster.device import environment
from pytest_gpucluster.errors import LaunchError, ThresholdsError, UsageProblem
from pytest_gpucluster.journal import verdict
from pytest_gpucluster.journal.records import CollectedTest
from pytest_gpucluster.journal.test_record import TestRecord, unique
from pytest_gpucluster.metrics.codec import read
from pytest_gpucluster.metrics.time_budget import LEDGER
from pytest_gpucluster.reports.failures import failure_text
from pytest_gpucluster.reports.summary import row_of
from pytest_gpucluster.session import rejected_run, shutdown
from pytest_gpucluster.session.judging import judge_merged
from pytest_gpucluster.session.phases import Phases
from pytest_gpucluster.session.reporting import BROKE, Console, MergedRepr, Status, line_of, skip_reason
from pytest_gpucluster.session.run import RUN, Run, WorkerPlace, name_of_rank
from pytest_gpucluster.session.selection import criterion_of, is_selection, only_lists, root_of
from pytest_gpucluster.session.session import Session, last_error, take_junit
from pytest_gpucluster.session.shutdown import call_verdict_hooks
from pytest_gpucluster.session.startup import Startup
from pytest_gpucluster.text import first_line

PROPERTY = "gpucluster"
"""The one key of ``report.user_properties`` in which a worker's outcome travels, as plain JSON types; of
``workerinput``, with the run's folder and the node's sampler; of ``workeroutput``, with why no test can be run."""


class Worker(Session):
    """One rank on the GPU of its own number; every other word is the controller's."""

    def __init__(self, config: pytest.Config, run: Run) -> None:
        super().__init__(config, run)
        self._phases = Phases(run, judges=False)
        self._has_sent_workload = False

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Leave it to the controller to say that the tests cannot be run: nothing is left to run here."""
        try:
            super().pytest_collection_finish(session)
        except pytest.UsageError as error:
            session.items[:] = []
            self._config.workeroutput[PROPERTY] = str(error)  # type: ignore[attr-defined]  # by xdist, for its workers

    def _collected(self, session: pytest.Session) -> None:
        """Leave the comparison of collections to the controller."""

    def _made(self, report: pytest.TestReport, item: pytest.Item) -> None:
        outcome = self._phases.last_outcome
        run = self._run
        record = run.records.get(item.nodeid)
        workload_record = run.workload_record if not self._has_sent_workload else None
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

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> Generator[None, None, None]:
        """Report nothing: the controller does."""
        self._phases.reports.take_subtest(report)
        yield

    def _finish(self, session: pytest.Session) -> None:
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
        self._hidden: weakref.WeakSet[pytest.TestReport] = weakref.WeakSet()
        self._errors: weakref.WeakSet[pytest.TestReport] = weakref.WeakSet()
        self._cannot_collect: str | None = None
        self._cannot_run: str | None = None
        self._finished = False
        self._sampler: Mapping[str, Any] = {}
        """How the workers reach the sampler of this node; nothing on cpu."""
        self._workload_rank = 0
        """The worker that sent its workload first."""
        run.names = {rank: f"rank {rank} (gw{rank})" for rank in range(workers)}

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self, session: pytest.Session) -> None:
        """Start the record. The workers see to their own GPUs."""
        if only_lists(self._config):
            return
        self._run.selection = is_selection(self._config)
        Startup(self._run).open_for_workers(self._workers)
        if not self._run.rehearsal:
            self._sampler = self._run.monitor.start()

    @pytest.hookimpl(tryfirst=True)
    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed and self._run.recorder is not None:
            message = first_line(f"cannot collect {report.nodeid}: {last_error(report.longreprtext)}")
            self._cannot_collect = self._cannot_collect or message
            self._run.problem("collection", message, report.longreprtext)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_report_teststatus(self, report: pytest.TestReport) -> Generator[None, Status, Status]:
        """Hide the parts of a test; show a broken one as an error; begin a criterion's line."""
        status = yield
        if hasattr(report, "context") or report in self._hidden:  # a subtest is reported with its test
            return "", "", ""
        return self._console.status(report, BROKE if report in self._errors else status)

    # ---- what comes from the workers -------------------------------------------------------------------------

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Pass to a worker, before it is started, what the controller has started for all of them."""
        directory = str(self._run.directory.resolve()) if self._run.directory is not None else ""
        node.workerinput[PROPERTY] = {"directory": directory, "sampler": dict(self._sampler)}

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any, ids: list[str]) -> None:
        """Compare what each worker found with the first one."""
        self._collections[_index(node.gateway.id)] = list(ids)
        if len(self._collections) < self._workers:
            return
        expected = self._collections[min(self._collections)]
        names = [CollectedTest.of(nodeid, (nodeid.partition("::")[0], None, "")) for nodeid in expected]
        try:
            self._run.manifest = read_manifest(expected, root_of(self._config))
        except ThresholdsError as error:
            self._run.problem("usage", str(error), str(error))
        self._run.take_collected(names, left_out={})
        different = rendezvous.collection_difference(expected, self._collections, self._run.names, subset=False)
        if different is not None:
            self._run.problem("collection", *different)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object | None) -> None:
        if error:
            rank = _index(node.gateway.id)
            done = {nodeid for nodeid, parts in self._tests.items() if rank in parts.ended}
            current = next((nodeid for nodeid in self._collections.get(rank, ()) if nodeid not in done), None)
            during = f" during {current}" if current else " before its first test"
            # An exception comes as its whole traceback: the last line says what it was.
            why = next((line for line in reversed(str(error).splitlines()) if line.strip()), "no reason given")
            self._lost[rank] = first_line(f"lost{during}: worker {node.gateway.id} crashed ({why})")
            self._run.problem("rank lost", f"{self._run.names[rank]} is {self._lost[rank]}", str(error))
            return
        output = getattr(node, "workeroutput", None) or {}
        if PROPERTY in output and self._cannot_run is None:
            self._cannot_run = str(output[PROPERTY])
            self._run.problem("usage", self._cannot_run, self._cannot_run)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logstart(self, nodeid: str, location: tuple[str, int | None, str]) -> None:
        if nodeid not in self._tests:
            record = TestRecord(test=CollectedTest.of(nodeid, location))
            self._tests[nodeid] = _Parts(record=record)
            line = {"type": "start", "nodeid": nodeid, "at": record.started_at}
            self._run.send({**line, "deadline_seconds": float(self._run.settings.deadline)})

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> Generator[None, None, None]:
        """Hide every part but the last, which becomes the merged report of the test."""
        self._show(report)
        yield

    def _show(self, report: pytest.TestReport) -> None:
        worker = getattr(report, "node", None)
        if worker is None or hasattr(report, "context"):
            return
        rank = _index(worker.gateway.id)
        self.pytest_runtest_logstart(report.nodeid, report.location)
        parts = self._tests[report.nodeid]
        if str(report.when) != "???":  # xdist's own report of a crash, which was reported before
            parts.phases.setdefault(rank, []).append(report)
            for body in (value for name, value in report.user_properties if name == PROPERTY):
                self._note(parts, rank, report, body)
            if report.when == "teardown":
                parts.ended.add(rank)
        complete = all(each in parts.ended or each in self._lost for each in range(self._workers))
        if complete and not parts.merged:
            self._merge(parts, report)
        else:
            self._hidden.add(report)
            report.outcome = "passed"

    def _note(self, parts: _Parts, rank: int, report: pytest.TestReport, body: Any) -> None:
        record = parts.record
        if record.test.criterion is None and body["criterion"] is not None:
            record.test = CollectedTest.of(report.nodeid, report.location, body["criterion"])
        record.applicable = record.applicable and body["applicable"]
        if rank not in self._run.roll.who:
            who = {**body["who"], "rank": rank, "local_rank": rank}
            self._run.roll = replace(self._run.roll, who={**self._run.roll.who, rank: who})
            self._run.names[rank] = name_of_rank(who)
            if len(self._run.roll.who) == self._workers:  # before a test is judged, which names who is at fault
                self._run.send_cluster(self._run.roll.who)
                self._console.say(self._console.cluster())
        if body.get("workload") is not None:
            self._take_workload(rank, read(WorkloadRecord, body["workload"], f"worker {rank}"))
        if body["spent"] is not None:
            record.spent[rank] = body["spent"]
        # A worker takes itself for the only rank, so what it says is about itself.
        outcome = replace(RankOutcome.from_json(rank, body["outcome"]), about=()) if body["outcome"] else None
        known = parts.outcomes.get(rank)
        if report.skipped and hasattr(report, "wasxfail"):
            parts.expected_failures[rank] = report.wasxfail
            outcome = RankOutcome(rank=rank, outcome="passed")
        if report.failed and (outcome is None or outcome.outcome == "passed"):
            outcome = _from_pytest(rank, [report])  # such as a strict xfail that passes: pytest says so afterwards
        if outcome is not None and (known is None or known.outcome == "passed"):
            if known is not None:
                measured, telemetry = outcome.measurements or known.measurements, outcome.telemetry or known.telemetry
                outcome = replace(outcome, measurements=measured, telemetry=telemetry)
            parts.outcomes[rank] = outcome

    def _take_workload(self, rank: int, workload: WorkloadRecord) -> None:
        known = self._run.workload_record
        if known is None:
            self._workload_rank = rank
            self._run.take_workload(workload)
            self._console.say(self._console.workload())
            return
        different = rendezvous.collection_difference(
            known.compared,
            {rank: workload.compared},
            self._run.names,
            subset=False,
            kind="value",
            first=self._workload_rank,
        )
        if different is not None:
            self._run.problem("collection", *different)

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
            repr_.reprcrash.message = failure_text(row_of(record.result()), self._run.journal_copy.journal())
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

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Generator[None, None, None]:
        self._finish(session)
        yield
        if not self._finished:
            return
        if self._run.verdict is not None:
            session.exitstatus = self._run.verdict.exit
            verdict.keep_exit_code(self._run.verdict.exit)
        call_verdict_hooks(self._run)
        if self._cannot_run is not None and "\n" in self._cannot_run:  # the verdict has the first line only
            self._run.write_lines(self._cannot_run.splitlines(), red=True)
        self._console.close()

    def _finish(self, session: pytest.Session) -> None:
        if self._finished or self._run.recorder is None:
            return
        self._finished = True
        stopped = int(session.exitstatus) == pytest.ExitCode.INTERRUPTED
        for parts in self._tests.values():
            if parts.merged:
                continue
            if stopped and not any(outcome.outcome in _BAD for outcome in parts.outcomes.values()):
                message = "not run to its end on every worker: the run was stopped"
                parts.record.add("call", outcome="skipped", message=message, text=message, seconds=0.0, merged=None)
                self._run.records[parts.record.test.nodeid] = parts.record
                self._run.send(parts.record.line())
                continue
            for rank in range(self._workers):
                if rank not in parts.ended:
                    self._lost.setdefault(rank, "no report of this test came from its worker")
            self._merge(parts, None)
        alike = len(self._collections) == self._workers and len(set(map(tuple, self._collections.values()))) == 1
        why = self._cannot_collect if alike and not self._tests else None
        refused = self._cannot_run if not self._tests else None
        session.exitstatus = shutdown.finish_for_workers(self._run, int(session.exitstatus), why=why, refused=refused)

    def pytest_unconfigure(self) -> None:
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


def make_session(config: pytest.Config) -> Session | Controller:
    """Make the session of this process, before other plugins are configured.

    Raises:
        pytest.UsageError: the launcher's variables contradict each other, or xdist would not use every GPU.
    """
    environment.prepare(os.environ)
    worker = getattr(config, "workerinput", None)
    session: Session | Controller
    try:
        if worker is not None:
            index, count, given = _index(worker["workerid"]), int(worker["workercount"]), worker.get(PROPERTY, {})
            run = Run(config, place=WorkerPlace(index=index, count=count, directory=given.get("directory", "")))
            run.monitor.use_sampler(given.get("sampler") or None)
            session = Worker(config, run)
        else:
            run = Run(config)
            workers = worker_count(config) if run.facts.launcher == "single" else 0
            take_junit(config, run)
            session = Controller(config, run, workers) if workers else Session(config, run)
    except UsageProblem as error:
        if worker is None:  # which rank this is may be unknown: any rank says so
            reason = AbortReason(name=rejected_run.NAMES[4], message=first_line(str(error)), exit=4, text=str(error))
            rejected_run.replace_report(config.option, reason, only_earlier=False)
        raise pytest.UsageError(str(error)) from None
    config.stash[RUN] = run
    return session
