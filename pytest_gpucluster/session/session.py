"""A pytest session in which this process is one rank: the plugin with its hooks."""

from __future__ import annotations

import gc
import os
import traceback
from collections.abc import Generator, Mapping
from typing import TYPE_CHECKING, Any, Literal

import pytest

from pytest_gpucluster.agreement import rendezvous
from pytest_gpucluster.agreement.exchange import AbortReason
from pytest_gpucluster.config.criteria_file import read_manifest
from pytest_gpucluster.errors import UsageProblem
from pytest_gpucluster.journal import verdict
from pytest_gpucluster.session import reporting, shutdown
from pytest_gpucluster.session.phases import ON_TRIAL, Phases, name_of
from pytest_gpucluster.session.rejected_run import asked_path
from pytest_gpucluster.session.reporting import BROKE, Console, Status, skip_reason
from pytest_gpucluster.session.run import Run, measure_slowdown
from pytest_gpucluster.session.selection import (
    criterion_of,
    deadline_of,
    is_selection,
    only_lists,
    read_workload,
    require_usable,
    root_of,
    turn_of,
    why_not_applicable,
)
from pytest_gpucluster.session.shutdown import call_verdict_hooks
from pytest_gpucluster.session.startup import Startup
from pytest_gpucluster.text import first_line, rank_ranges

if TYPE_CHECKING:
    from pathlib import Path

    from _pytest._io import TerminalWriter

_OF_THE_CACHE = ("lf", "failedfirst", "newfirst", "stepwise", "stepwise_skip", "stepwise_reset", "cacheclear")
"""Options that choose or order tests by what an earlier run left in this rank's cache: rank 0's cache decides."""

_REPORTS = ("allure_report_dir", "htmlpath", "report_log", "json_report")
"""Options of allure-pytest, pytest-html, pytest-reportlog and pytest-json-report that ask for a report: rank 0, whose
outcomes are those that all ranks agreed on, writes the only one."""

_ALL = ""
"""In place of the name of what cannot be collected: everything was, and it cannot be run."""


def take_junit(config: pytest.Config, run: Run) -> None:
    """Write the JUnit file in pytest's place: two ranks that write one file leave a lie."""
    path = getattr(config.option, "xmlpath", None)
    if not path:
        return
    run.junit_path = asked_path(path)
    config.option.xmlpath = None
    reporting.register_suite_properties(config, run.send)


class Session:
    """One rank's session, as a plugin."""

    def __init__(self, config: pytest.Config, run: Run) -> None:
        self._config = config
        self._run = run
        self._root = root_of(config)
        self._phases = Phases(run)
        self._console = Console(config, run)
        self._to_run: list[tuple[str, str | None]] = []
        """Name and criterion of the tests that there is room for."""
        self._collection_errors: list[tuple[str, str]] = []
        self._left_out: dict[str, str] = {}
        """File -> why none of its tests was collected."""
        self._node_ids: list[str] = []
        self._subset = any(getattr(config.option, name, False) for name in _OF_THE_CACHE[:5])
        self._unusable = False
        """The tests were collected, and cannot be run as they are."""
        self._finished = False
        if run.rank != 0:  # rank 0's cache alone chooses and orders tests, and no other rank clears it
            for name in (*_OF_THE_CACHE, *_REPORTS):
                if getattr(config.option, name, False):
                    setattr(config.option, name, None if name in _REPORTS else False)

    # ---- before the first test -------------------------------------------------------------------------------

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionstart(self, session: pytest.Session) -> None:
        """Open the run on every rank, or end the session here; ranks above 0 fall silent."""
        if self._run.rank != 0:
            self._silence()
        if only_lists(self._config):
            return
        self._run.selection = is_selection(self._config)
        _free_what_an_earlier_session_left()
        Startup(self._run).open()
        _freeze_loaded_objects()

    def _silence(self) -> None:
        reporter = self._config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None:
            writer: TerminalWriter = reporter._tw
            writer._file = open(os.devnull, "w")  # noqa: SIM115  # until the process ends
        cache = getattr(self._config, "cache", None)
        if cache is not None:  # never written by this rank, which has only its own half of the results
            cache.set = lambda key, value: None

    @pytest.hookimpl(tryfirst=True)
    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Keep the errors of collection, to be shown by rank 0, and why a module was skipped."""
        if report.failed:
            self._collection_errors.append((report.nodeid, report.longreprtext))
        elif report.skipped:
            self._left_out[report.nodeid] = f"skipped: {skip_reason(report)}"

    def pytest_pycollect_makemodule(self, module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
        """Name the files of a suite outside of pytest's root, and so its tests, as in a checkout."""
        if self._root == self._config.rootpath or not module_path.is_relative_to(self._root):
            return None
        name = module_path.relative_to(self._root).as_posix()
        module: pytest.Module = pytest.Module.from_parent(parent, path=module_path, nodeid=name)
        return module

    def pytest_deselected(self) -> None:
        self._run.selection = True

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items.sort(key=turn_of)

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Refuse what the collected tests cannot run with, before the first one: markers, and their workload.

        Raises:
            pytest.UsageError: names the test, the marker and what it needs; or lists what is wrong with the workload.
        """
        run = self._run
        try:
            require_usable(session.items)
            manifest = read_manifest([item.nodeid for item in session.items], self._root)
            if not run.has_joined:  # tests are listed only
                return
            room = run.room()
            self._to_run = [
                (item.name, criterion_of(item)) for item in session.items if why_not_applicable(item, room) is None
            ]
            loaded = read_workload(
                session.items,
                root=self._root,
                profile=run.profile,
                overrides=run.settings.workload,
                small_training=run.simulated,
            )
        except (pytest.UsageError, UsageProblem) as error:
            self._unusable = True
            raise pytest.UsageError(str(error)) from None
        run.manifest = manifest
        if loaded is not None:
            run.loaded_workload = loaded.workload
            run.take_workload(loaded.record)
        _freeze_loaded_objects()

    def pytest_report_collectionfinish(self) -> list[str]:
        return self._console.workload(self._to_run)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection(self, session: pytest.Session) -> Generator[None, Any, Any]:
        """Agree on the tests to run, in rank 0's order."""
        try:
            result = yield
        except (pytest.UsageError, pytest.exit.Exception) as error:
            self._not_collected(session, error)
            return True
        if self._run.has_joined:
            self._collected(session)
        return result

    def _collected(self, session: pytest.Session) -> None:
        self._node_ids = [item.nodeid for item in session.items]
        if self._run.rehearsal and self._run.workload_record is not None:  # benchmarks are going to run
            self._run.slowdown = measure_slowdown()
        if self._run.facts.world_size > 1:
            self._agree_on_collection(session)
        default = float(self._run.settings.deadline)
        longest = max((deadline_of(item, default) for item in session.items), default=default)
        self._run.cluster.allow(longest * self._run.slowdown)
        self._run.take_collected([name_of(item) for item in session.items], left_out=self._left_out)
        if self._run.abort_reason is not None:
            session.items[:] = []
        elif self._collection_errors and self._run.rank == 0:
            self._run.problem("collection", *self._why_not_collected())

    def _not_collected(self, session: pytest.Session, error: BaseException) -> None:
        """Report to all ranks that this one cannot collect anything; raise the error again if none of them can."""
        run = self._run
        if not run.has_joined:
            raise error
        if run.facts.world_size > 1:
            what = _ALL if self._unusable else " ".join(map(str, self._config.args))
            text = str(error) if self._unusable else f"E {type(error).__name__}: {error}"
            self._collection_errors.append((what, text))
            session.items = []
            self._agree_on_collection(session)
            if run.watch.abort_reason is not None:
                return
        if isinstance(error, pytest.UsageError):
            text = str(error)
            if run.rank == 0:
                run.problem("usage", text, text)
            run.watch.agreed_to_end(AbortReason(name="usage", message=first_line(text), exit=4, text=text))
        if run.rank != 0 and isinstance(error, pytest.UsageError):
            raise pytest.UsageError  # rank 0 says it for all
        raise error

    def _why_not_collected(self) -> tuple[str, str]:
        nodeid, text = self._collection_errors[0]
        return f"cannot collect {nodeid}: {last_error(text)}", "\n\n".join(text for _, text in self._collection_errors)

    def _agree_on_collection(self, session: pytest.Session) -> None:
        run = self._run
        errors = [[nodeid, text[-8000:]] for nodeid, text in self._collection_errors]
        workload = run.workload_record.compared if run.workload_record is not None else []
        body = {"ids": self._node_ids, "workload": workload, "errors": errors, "slowdown": run.slowdown}
        run.watch.enter("collection", run.timeouts.join)
        run.watch.leave()
        first = run.agree(body, self._compare, deadline_seconds=run.timeouts.join) or {}
        run.slowdown = float(first.get("slowdown", 1.0))
        if "ids" in first and run.rank != 0:
            by_id: dict[str, list[pytest.Item]] = {}
            for item in session.items:
                by_id.setdefault(item.nodeid, []).append(item)
            session.items[:] = [by_id[nodeid].pop(0) for nodeid in first["ids"]]
        if "disagreement" in first:
            message, text = first["disagreement"]
            if run.rank == 0:
                run.problem("collection", message, text)
                run.write_lines(text.splitlines(), red=True)
            run.watch.agreed_to_end(AbortReason(name="collection", message=message, exit=11, text=text))

    def _compare(self, bodies: dict[int, Mapping[str, Any]]) -> Mapping[str, Any]:
        bodies = {rank: body for rank, body in bodies.items() if "ids" in body}
        names = self._run.names
        with_errors = [rank for rank, body in bodies.items() if body["errors"]]
        if with_errors and len(with_errors) < len(bodies):
            nodeid, text = bodies[with_errors[0]]["errors"][0]
            who = names[with_errors[0]] if len(with_errors) == 1 else rank_ranges(with_errors)
            message = f"different tests collected: {who} cannot collect {nodeid}: {last_error(text)}"
            if nodeid == _ALL:
                message = f"not every rank can run these tests: {who} cannot: {text}"
            message = first_line(message)
            return {"disagreement": [message, f"{message}\n\n{text}"]}
        kinds: tuple[tuple[str, Literal["test", "value"]], ...] = (("ids", "test"), ("workload", "value"))
        for key, kind in kinds:
            found = {rank: body[key] for rank, body in bodies.items()}
            different = rendezvous.collection_difference(found[0], found, names, subset=self._subset, kind=kind)
            if different is not None:
                return {"disagreement": list(different)}
        slowdown = max(body["slowdown"] for body in bodies.values())
        if slowdown > 1.0:
            self._run.write_lines([f"{slowdown:.1f} times slower than an ordinary CPU: limits and deadlines follow"])
        return {"ids": bodies[0]["ids"], "slowdown": slowdown}

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self) -> bool | None:
        """Run nothing when the ranks have not agreed on what to run."""
        return self._run.abort_reason is not None or None

    # ---- the tests -------------------------------------------------------------------------------------------

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool | None:
        """Record the start of a test, or return True to leave it out because the run has ended."""
        if self._run.abort_reason is not None:
            item.session.shouldstop = self._run.abort_reason.message
            return True
        self._phases.started(item)
        return None

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, Any, Any]:
        return (yield from self._phases.run_phase(item, "setup"))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, Any, Any]:
        return (yield from self._phases.run_phase(item, "call"))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None, Any, Any]:
        return (yield from self._phases.run_phase(item, "teardown"))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if ON_TRIAL not in item.stash:
            self._made(report, item)
        return report

    def _made(self, report: pytest.TestReport, item: pytest.Item) -> None:
        if self._phases.last_merged is not None:
            self._phases.reports.merged[report] = self._phases.last_merged

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> Generator[None, None, None]:
        """Let rank 0's report say what all ranks agreed on, before anything reads it."""
        self._phases.reports.show(report)
        yield

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_report_teststatus(self, report: pytest.TestReport) -> Generator[None, Status, Status]:
        """Show what broke the run as an error, not as a failure of the hardware; begin a criterion's line."""
        status = yield
        if any(report is kept for kept in self._phases.reports.failed_subtests):  # shown with its test, and not alone
            return "", "", ""
        return self._console.status(report, BROKE if self._phases.reports.is_error(report) else status)

    def pytest_internalerror(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        """End the run on every rank: pytest itself, or a plugin, has failed on this one."""
        if self._run.has_joined:
            error = excinfo.value
            message = f"internal error on {self._run.names[self._run.rank]}: {type(error).__name__}: {error}"
            text = "".join(traceback.format_exception(error))
            self._run.watch.end(AbortReason(name="internal error", message=first_line(message), exit=3, text=text))

    # ---- the end ---------------------------------------------------------------------------------------------

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Generator[None, None, None]:
        """Agree on the verdict and the exit code; say it in the last line. Every rank must call this."""
        self._finish(session)
        yield
        self._last_words(session)

    def _finish(self, session: pytest.Session) -> None:
        if not self._run.has_joined or self._finished:
            return
        self._finished = True
        self._phases.let_go()
        self._run.stopped = str(session.shouldfail or session.shouldstop or "")
        why = self._why_not_collected()[0] if self._collection_errors else None
        if why is None and session.shouldstop:
            why = f"interrupted on {self._run.names[self._run.rank]}: {session.shouldstop}"
        session.exitstatus = shutdown.finish(self._run, int(session.exitstatus), why=why)

    def _last_words(self, session: pytest.Session) -> None:
        """Print the verdict under everything else, and let no plugin change its exit code."""
        if self._finished and self._run.verdict is not None:
            session.exitstatus = self._run.verdict.exit
        ended = self._run.abort_reason is not None
        if self._run.facts.agent_store and self._run.facts.local_rank != 0 and not ended:
            # The agent waits for every rank; one exit code a node is enough, and gives one block in its summary. But
            # when the run has broken, the first rank of the node may not be there any more to give it.
            session.exitstatus = 0
        if self._run.rank == 0 and self._finished:
            call_verdict_hooks(self._run)
            self._console.close()
        if self._finished:
            verdict.keep_exit_code(int(session.exitstatus))

    def pytest_unconfigure(self) -> None:
        shutdown.close(self._run)
        self._run.fault_file.close()
        self._run.close()


def last_error(text: str) -> str:
    """Return the last line that pytest marks as the error in a traceback."""
    last = next((line for line in reversed(text.splitlines()) if line.startswith("E ")), text)
    return first_line(last.removeprefix("E"))


def _freeze_loaded_objects() -> None:
    """Keep the garbage collector from looking through torch again and again.

    Some 250,000 objects live until the end of the process. To look through them takes 0.13 s, whenever enough others
    were made since: while tests are collected, and, worse, in the middle of a measurement.
    """
    global _has_frozen
    _has_frozen = True
    gc.freeze()


_has_frozen = False


def _free_what_an_earlier_session_left() -> None:
    """Free what an earlier session in this process has left, which the garbage collector was kept from.

    At the end of that session it would make the process end 1 s later: Python then looks through everything. What the
    server has frozen of which this process is a fork stays: the pages of a look at it would be copied.
    """
    if _has_frozen:
        gc.unfreeze()
        gc.collect()
