"""The phases of a test on one rank: run the body, send its outcome to the others, and end it as all of them agree.

A phase ends on a rank as passed, failed, skipped, or released because another rank did not come. The verdict of an
exchange is raised here, inside pytest's own hook for the phase. So ``-x``, ``--maxfail``, ``--lf``, reruns and exit
codes act on the same outcome on every rank, by construction.
"""

from __future__ import annotations

import traceback
from collections.abc import Generator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from _pytest.outcomes import Failed, Skipped  # pytest.fail.Exception and pytest.skip.Exception, for type checkers
from _pytest.skipping import xfailed_key

from pytest_gpucluster import errors
from pytest_gpucluster.agreement.exchange import BAD, AbortReason, Merged, RankOutcome, merge
from pytest_gpucluster.agreement.release import Released
from pytest_gpucluster.errors import EnvironmentBroken, HardwareFault, InconclusiveMeasurement, NvlsFailed
from pytest_gpucluster.journal.records import CollectedTest
from pytest_gpucluster.journal.test_record import TestRecord
from pytest_gpucluster.metrics.measurement import Measurement
from pytest_gpucluster.metrics.stats import grouped
from pytest_gpucluster.metrics.time_budget import LEDGER, SET_UP, counted
from pytest_gpucluster.node.health.monitor import TestMonitor
from pytest_gpucluster.session.isolation import Isolator
from pytest_gpucluster.session.judging import judge_merged, keep_interrupted
from pytest_gpucluster.session.reporting import (
    LONGEST_TEXT,
    FailedSubtests,
    TestReports,
    let_go,
    skip_reason,
    summary_of,
    traceback_of,
    where_released,
    with_remedy,
)
from pytest_gpucluster.session.selection import criterion_of, deadline_of, why_not_applicable
from pytest_gpucluster.text import clip, first_line

if TYPE_CHECKING:
    from pytest_gpucluster.session.run import Run

_EXPLAINED_SECONDS = 0.5
"""How long a rank whose connection was cut waits for news of the cause: a few rounds of its watcher."""
ON_TRIAL = pytest.StashKey[bool]()
"""In the stash of a test while its report is made on trial: it is thrown away."""
_MILD = (pytest.skip.Exception, pytest.xfail.Exception)
IN_CALL = pytest.StashKey[bool]()
"""In the stash of a test while its body runs: what is measured at another time would never be judged."""
MEASUREMENTS = pytest.StashKey[list[Measurement]]()
"""What a test has measured so far on this rank, in its stash."""


def own_outcome(run: Run, item: pytest.Item, when: str, number: int, error: BaseException | None) -> RankOutcome:
    """Return how the body of a phase has ended on this rank.

    Args:
        run: what this process holds.
        item: the test.
        when: "setup", "call" or "teardown".
        number: of the phase's exchange, under which the watcher knows the phase.
        error: what the body has raised; None if it came to its end.
    """
    measurements = [m.to_json() for m in item.stash.get(MEASUREMENTS, [])] if when == "call" else []

    def ended(outcome: str, message: str, text: str = "") -> RankOutcome:
        return RankOutcome(
            rank=run.rank,
            outcome=outcome,
            message=first_line(message),
            text=text,
            measurements=measurements,
            about=ranks_at_fault(error, run.rank, run.roll.who),
        )

    if error is None:
        # A body that was released may still come back as if nothing had been: an aborted wait returns without an
        # exception. What it measured or computed since then means nothing.
        why = run.watch.released(number)
        return ended("passed", "") if why is None else ended("released", why, why)
    if isinstance(error, _MILD):
        return replace(ended("skipped", str(error.msg), str(error.msg)), measurements=())
    released = run.watch.released(number)
    cut = released is None and errors.connection_cut(error)
    if cut:
        released = run.watch.explanation(number, _EXPLAINED_SECONDS)
    if isinstance(error, Released) or released is not None:
        return ended("released", str(released or error), where_released(error))
    if run.rehearsal and isinstance(error, InconclusiveMeasurement):
        return ended("slow", str(error))
    text = clip(traceback_of(item, when, error), LONGEST_TEXT)
    kind = "cut" if cut else errors.kind_of(error, when)
    return ended(kind, summary_of(error), text)


def ranks_at_fault(error: BaseException | None, rank: int, who: Mapping[int, Mapping[str, Any]]) -> list[int]:
    """Return the ranks that an error is about, those of whole hosts included; none where it does not say.

    Args:
        error: raised on a rank.
        rank: that one. Where several nodes have the name of its host, its own node is meant; of others none.
        who: rank -> its facts.
    """
    if not isinstance(error, errors.GpuClusterError):
        return []
    nodes = grouped((facts["host"], facts["node_rank"]) for facts in who.values())
    mine = who.get(rank, {})

    def is_meant(facts: Mapping[str, Any]) -> bool:
        if facts["host"] == mine.get("host"):
            return bool(facts["node_rank"] == mine["node_rank"])
        return len({*nodes[facts["host"]]}) == 1

    of_hosts = (each for each, facts in who.items() if facts["host"] in error.hosts and is_meant(facts))
    return sorted({*error.ranks, *of_hosts})


def attached_failure(item: pytest.Item, when: str) -> BaseException | None:
    """Return what pytest will report of a phase whose body has raised nothing; None where it will report a pass.

    ``unittest.TestCase`` and plugins such as pytest-check keep their failures and attach them to the report when it is
    made, on the rank that has them. So the report is made once on trial, while all ranks can still agree on it. While
    that goes on :data:`ON_TRIAL` is in the item's stash.

    Returns:
        The exception that was attached, of several the first that is no skip, with a note of the others; or a failure,
        skip or expected failure with the text of the report.
    """
    call = pytest.CallInfo.from_call(lambda: None, when)  # type: ignore[arg-type]  # it is a Literal
    item.stash[ON_TRIAL] = True
    try:
        report = item.ihook.pytest_runtest_makereport(item=item, call=call)
    finally:
        del item.stash[ON_TRIAL]
    if call.excinfo is not None:
        rest = getattr(item, "_excinfo", None) or []  # of a TestCase: each report takes one
        found: list[BaseException] = [call.excinfo.value, *(one.value for one in rest)]
        rest.clear()
        worst = next((error for error in found if not isinstance(error, _MILD)), found[0])
        others = [f"also: {type(error).__name__}: {error}" for error in found if error is not worst]
        worst.__notes__ = [*getattr(worst, "__notes__", []), *others]  # type: ignore[attr-defined]
        return worst
    expected = item.stash.get(xfailed_key, None) is not None
    if report.skipped and hasattr(report, "wasxfail"):
        return Failed(report.wasxfail, pytrace=False) if expected else pytest.xfail.Exception(report.wasxfail)
    if report.passed or expected:  # a strict xfail that passes does so on all ranks
        return None
    if report.failed:
        return Failed(report.longreprtext or "its report was changed to failed", pytrace=False)
    return Skipped(skip_reason(report))


def escalated(own: RankOutcome, fault: HardwareFault, about: Sequence[int]) -> RankOutcome:
    """Return the outcome of a rank that has counted a fault of the hardware: it has failed, however its body has ended.
    What the body itself has come to stays first."""
    message = "; ".join(part for part in (own.message, first_line(str(fault))) if part)
    text = "\n\n".join(part for part in (own.text, f"{type(fault).__name__}: {fault}") if part)
    of_body = (own.about or [own.rank]) if own.message else []
    about = sorted({*of_body, *(about or [own.rank])})
    return replace(own, outcome="failed", message=first_line(message), text=text, about=about)


def expects_failure(item: pytest.Item, error: BaseException | None) -> bool:
    """Return whether the test has an ``xfail`` marker that allows for this exception."""
    xfailed = item.stash.get(xfailed_key, None)
    if xfailed is None or item.config.option.runxfail:
        return False
    raises: Any = xfailed.raises  # exception types, or since pytest 8.4 a RaisesExc
    return raises is None or (raises.matches(error) if hasattr(raises, "matches") else isinstance(error, raises))


class AgreedFailure(Failed):
    """The ranks' common verdict, raised on a rank whose own body came to another end."""

    def __init__(self, message: str) -> None:
        super().__init__(message, pytrace=False)


class Phases:
    """Carries the tests of one rank through their phases. Main thread only.

    Args:
        run: what this process holds.
        judges: this process holds measurements against limits; a local worker leaves that to its controller.
    """

    def __init__(self, run: Run, *, judges: bool = True) -> None:
        self._run = run
        self._judges = judges
        self.last_outcome: RankOutcome | None = None
        """How the last phase ended on rank 0, which is all there is in a worker."""
        self.last_merged: Merged | None = None
        """The same of all ranks."""
        self._group_invalid = False
        self._holders: list[BaseException] = []
        """Failures whose frames may hold a group that was thrown away."""
        self._monitor: TestMonitor | None = None
        """What has gone along with the body that runs, or has run last."""
        self._is_escalated = False
        """This rank's failure says more than its exception: what the counters have counted as well."""
        self._isolator = Isolator(run)
        self._isolates = False
        """All ranks have agreed to search for the culprit of the failure of the test in progress."""
        self.reports = TestReports(run, self._isolator.report)

    def let_go(self) -> None:
        """Free what the failures hold that have been reported."""
        while self._holders:
            let_go(self._holders.pop())

    # ---- before and around a test ----------------------------------------------------------------------------

    def started(self, item: pytest.Item) -> None:
        """Record that a test begins."""
        run = self._run
        record = run.records[item.nodeid] = TestRecord(test=name_of(item))
        self.reports.failed_subtests = []
        LEDGER.clear()
        why = why_not_applicable(item, run.room())
        if why is not None:
            record.applicable = why_not_applicable(item, run.declared_room()) is None
            # Not pytest.skip() in a wrapper of the setup: teardown expects that other plugins have set up.
            item.add_marker(pytest.mark.skip(reason=why))
        line = {"type": "start", "nodeid": item.nodeid, "at": record.started_at}
        run.send({**line, "deadline_seconds": self._deadline(item)})

    def run_phase(self, item: pytest.Item, when: str) -> Generator[None, Any, Any]:
        """Wrap one of pytest's ``runtest`` hooks: everything inside is the body."""
        self.let_go()  # the phase before has been reported by now
        if when == "setup":
            LEDGER.open()
        try:
            return (yield from self._agreed_phase(item, when))
        finally:
            if when == "teardown":
                self._note_time(item)
                item.stash.get(MEASUREMENTS, []).clear()

    def _note_time(self, item: pytest.Item) -> None:
        LEDGER.close()
        if self._run.rank == 0:
            self._run.records[item.nodeid].spent[0] = LEDGER.seconds()

    def _agreed_phase(self, item: pytest.Item, when: str) -> Generator[None, Any, Any]:
        watch = self._run.watch
        self.last_merged = self.last_outcome = None
        if when == "teardown" and self._isolates:
            self._isolate(item)
        number = watch.enter(label_of(item, when), self._deadline(item))
        error: BaseException | None = None
        self._monitor = None
        try:
            try:
                if when == "call":
                    yield from self._monitored(item)
                elif when == "setup":
                    with counted(SET_UP), self._run.own_process(label_of(item, when)):
                        yield
                else:
                    with self._run.own_process(label_of(item, when)):
                        yield from self._torn_down(number)
                if when == "teardown" and self._group_invalid:
                    # A session fixture may hold what the fault has broken: everything is set up anew.
                    item.session._setupstate.teardown_exact(None)
                    self._group_invalid = False
                error = attached_failure(item, when)
            finally:
                watch.leave()
        except (KeyboardInterrupt, pytest.exit.Exception) as stop:
            watch.leave()
            self._interrupted(stop, when, item)
            raise
        except BaseException as raised:  # pytest's outcomes are no Exceptions; all are raised again
            watch.leave()
            error = errors.translate_nvls(raised)
        own = own_outcome(self._run, item, when, number, error)
        self._is_escalated = False
        if self._monitor is not None:
            own = replace(own, telemetry=self._monitor.telemetry)
            fault = self._monitor.fault
            if fault is not None and error is not fault:
                about = ranks_at_fault(fault, self._run.rank, self._run.roll.who)
                own, self._is_escalated = escalated(own, fault, about), True
        verdict = self._agree(item, when, number, own, error)
        self._end_as_agreed(item, verdict, own, error, number)

    def _torn_down(self, number: int) -> Generator[None, Any, Any]:
        """Run the teardown, and close the groups that the test has made of some of the ranks, also after a failure.

        All ranks have left the test's body by now. Groups that were aborted by then are left to the verdict.
        """
        run, is_stopped = self._run, False
        try:
            yield
        except (KeyboardInterrupt, pytest.exit.Exception):
            is_stopped = True
            raise
        finally:
            if not is_stopped and run.watch.abort_reason is None and run.watch.released(number) is None:
                run.cluster.close_subgroups()

    def _monitored(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """Run the body watched, and with its counters taken; fail it for what they have counted.

        Raises: what the body has raised comes first.
        """
        monitor = self._monitor = self._run.monitor.test_monitor(counters=criterion_of(item) is not None)
        monitor.begin()
        item.stash[IN_CALL] = True
        try:
            with self._run.own_process(label_of(item, "call")):
                yield
            if self.reports.failed_subtests:
                raise FailedSubtests(self.reports.failed_subtests)
            monitor.end()
            monitor.require_healthy()
        except (pytest.skip.Exception, pytest.xfail.Exception):
            monitor.end()
            monitor.require_no_fault()
            raise
        finally:
            item.stash[IN_CALL] = False
            monitor.end()
            measured: list[Measurement] = item.stash.get(MEASUREMENTS, [])
            measured[:] = monitor.annotate(measured)

    def _interrupted(self, stop: BaseException, when: str, item: pytest.Item) -> None:
        self._note_time(item)
        who = self._run.names[self._run.rank]
        how = "Ctrl-C" if isinstance(stop, KeyboardInterrupt) else "pytest.exit"
        why = first_line(str(stop))
        code = getattr(stop, "returncode", None)
        message = f"interrupted ({how}) on {who} during {when} of {item.nodeid}" + (f": {why}" if why else "")
        if when == "call" and self._judges:
            measured = item.stash.get(MEASUREMENTS, [])
            record = self._run.records[item.nodeid]
            keep_interrupted(self._run, record, message=message, measured=measured, properties=item.user_properties)
        # A test's own code is kept, unless it would say that something was accepted, rejected or incomplete.
        code = 2 if code in (None, 0, 1, 10, 12) else int(code)
        self._run.watch.end(AbortReason(name="interrupted", message=message, exit=code))

    # ---- agreement -------------------------------------------------------------------------------------------

    def _agree(
        self, item: pytest.Item, when: str, number: int, own: RankOutcome, error: BaseException | None
    ) -> Mapping[str, Any]:
        run, watch = self._run, self._run.watch
        if own.outcome in ("failed", "error", "cut", "slow", "skipped"):
            how = "skipped" if own.outcome == "skipped" else "failed"
            try:
                watch.report_absence(run.stores.main, number, f"{how}: {own.message}")
            except RuntimeError as lost:  # torch's DistError family
                watch.end(AbortReason(name="store lost", message=first_line(str(lost)), exit=11))
        died = errors.gpu_died(error) if error is not None else None
        body = {**own.to_json(), **({"died": died} if died else {})}
        if error is not None and errors.communication_failed(error):
            body["unreached"] = True
        if isinstance(error, NvlsFailed):
            body["nvls"] = True
        if error is not None and own.outcome in ("failed", "error") and expects_failure(item, error):
            body["expected"] = True
        if when == "teardown":  # nearly all of the test is over: what follows is this exchange
            body["spent"] = LEDGER.seconds()

        decide = partial(self._decide, item, when, number)
        verdict = run.agree(body, decide, deadline_seconds=self._deadline(item) + run.timeouts.stuck)
        if verdict is None:
            return self._ended(item, when, own, decide, body)
        if verdict.get("stop"):
            watch.agreed_to_end(AbortReason(**verdict["stop"]))
        return verdict

    def _ended(
        self, item: pytest.Item, when: str, own: RankOutcome, decide: Any, body: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """The run has ended and no rank waits for another: rank 0 reports what it knows."""
        watch = self._run.watch
        assert watch.abort_reason is not None
        abort = watch.abort_reason
        if self._run.rank != 0:
            return {"outcome": "error", "message": abort.message}
        if own.outcome == "passed":
            if when == "teardown" and self._run.records[item.nodeid].outcome in ("failed", "error"):
                return {"outcome": "passed"}  # reported with the call: one test, one error
            body = {**body, "outcome": "released", "message": "the run had ended"}
        # Of the other ranks nothing is known. That is not a pass.
        unknown = {"outcome": "released", "message": "nothing was heard of it: the run had ended"}
        lost = {"outcome": "lost", "message": abort.message, "text": abort.text}
        bodies: dict[int, Mapping[str, Any]] = {
            rank: lost if rank in abort.culprits else unknown for rank in self._run.names
        }
        bodies[0] = body
        verdict: Mapping[str, Any] = decide(bodies)
        return verdict

    # ---- the decision of rank 0 ------------------------------------------------------------------------------

    def _decide(
        self, item: pytest.Item, when: str, number: int, bodies: Mapping[int, Mapping[str, Any]]
    ) -> Mapping[str, Any]:
        run, found = self._run, self._run.watch.diagnosis(number)
        record = run.records[item.nodeid]
        outcomes = []
        for rank, body in sorted(bodies.items()):
            outcome = RankOutcome.from_json(rank, body)
            if outcome.outcome in ("released", "passed", "cut") and rank in found.culprits:
                culprit = found.culprits[rank]
                outcome = replace(outcome, outcome="hung", message=culprit.message, text=culprit.text)
            elif outcome.outcome == "released" and found.too_slow:
                outcome = replace(outcome, outcome="slow", message=found.too_slow, text="")
            outcomes.append(outcome)
        if when == "teardown":
            record.spent |= {rank: body["spent"] for rank, body in bodies.items() if "spent" in body}
        released = next((o.message for o in outcomes if o.outcome == "released"), "")
        merged = merge(outcomes, run.names, unfinished=released)
        if found.late and any(outcome.outcome == "hung" for outcome in outcomes):  # once, for all pairs of ranks
            merged = replace(merged, text=f"{merged.text}\n\n{found.late}")
        if (merged.outcome in ("passed", "failed", "error") or merged.too_slow) and when == "call" and self._judges:
            merged = with_remedy(judge_merged(run, record, merged, outcomes), item)
        if self._is_escalated:
            merged = replace(merged, judged=True)
        self.last_merged, self.last_outcome = merged, outcomes[0]
        stop = self._stop(bodies, outcomes, merged, unreleasable=found.stuck)
        verdict: dict[str, Any] = {"outcome": merged.outcome}
        if merged.message:
            verdict["message"] = merged.message
        if merged.group_invalid:
            verdict["group_invalid"] = True
        if any(body.get("nvls") for body in bodies.values()):
            verdict |= {"group_invalid": True, "nvls": True}
        # A rank that another one has named did not raise what is expected: that one did.
        raised = [] if merged.judged else [each.rank for each in outcomes if each.outcome in BAD]
        blamed = bodies if merged.shared else raised or merged.culprits
        if blamed and all(bodies[rank].get("expected") for rank in blamed):
            verdict["expected"] = True
        if stop is not None:
            verdict["stop"] = asdict(stop)
        elif when == "call" and not verdict.keys() & {"expected", "nvls"}:
            verdict |= self._search_after(item, merged, bodies, outcomes)
        return verdict

    def _search_after(
        self,
        item: pytest.Item,
        merged: Merged,
        bodies: Mapping[int, Mapping[str, Any]],
        outcomes: Sequence[RankOutcome],
    ) -> Mapping[str, bool]:
        """Decide whether all ranks search for the culprit: after what GPUs, nodes or links may have done."""
        if item.get_closest_marker("isolate") is None or len(self._run.names) < 2 or not self._judges:
            return {}
        unreached = any(body.get("unreached") for body in bodies.values())
        if merged.outcome != "failed" and not unreached and not any(o.outcome in ("hung", "cut") for o in outcomes):
            return {}
        why_not = self._isolator.why_not()
        if why_not is None:
            return {"isolate": True}
        self._run.records[item.nodeid].properties.append(("isolation", f"no search: {why_not}"))
        return {}

    def _stop(
        self,
        bodies: Mapping[int, Mapping[str, Any]],
        outcomes: Sequence[RankOutcome],
        merged: Merged,
        *,
        unreleasable: bool,
    ) -> AbortReason | None:
        dead = {rank: body["died"] for rank, body in bodies.items() if body.get("died")}
        if dead:
            message = first_line(f"the GPU of {self._run.names[min(dead)]} no longer works: {merged.message}")
            code = 1 if "hardware" in dead.values() else 11
            return AbortReason(name="GPU lost", message=message, exit=code, culprits=sorted(dead))
        without = [rank for rank, body in bodies.items() if body.get("nvls")]
        if without and self._run.cluster.nvls_off:
            message = first_line(f"NVLS fails also where it was switched off: {merged.message}")
            return AbortReason(name="NVLS", message=message, exit=11, culprits=without)
        if unreleasable:
            stuck = [o.rank for o in outcomes if o.outcome == "hung"]
            return AbortReason(name="rank stuck", message=merged.message, exit=11, culprits=stuck)
        return None

    # ---- the agreed end --------------------------------------------------------------------------------------

    def _end_as_agreed(
        self,
        item: pytest.Item,
        verdict: Mapping[str, Any],
        own: RankOutcome,
        error: BaseException | None,
        number: int,
    ) -> None:
        run = self._run
        if verdict.get("group_invalid"):
            self._group_invalid = True
            self._discard(number)
            if verdict.get("nvls"):
                run.cluster.switch_nvls_off()
            if error is not None:
                self._holders.append(error)
        if run.abort_reason is not None:
            item.session.shouldstop = run.abort_reason.message
        self._isolates = bool(verdict.get("isolate"))
        outcome = verdict["outcome"]
        if outcome == "passed":
            return
        failed_here = own.outcome in ("failed", "error")
        if verdict.get("expected") and not failed_here:
            pytest.xfail(item.stash[xfailed_key].reason)  # type: ignore[union-attr]  # a peer's marker is ours too
        # A marker may allow for this rank's exception, but not for another rank's.
        only_here = failed_here and not verdict.get("expected") and expects_failure(item, error)
        if error is not None and not only_here and (outcome != "skipped") == (own.outcome != "skipped"):
            raise error
        if outcome == "skipped":
            raise Skipped(verdict.get("message", ""), _use_item_location=True)
        raise AgreedFailure(verdict.get("message", ""))

    def _discard(self, epoch: int) -> bool:
        """Throw the groups away; return whether that was possible. Else the run ends: none can be made any more."""
        run = self._run
        try:
            run.cluster.discard(epoch=epoch)
        except EnvironmentBroken as error:
            message = first_line(f"{run.names[run.rank]}: {error}")
            run.watch.end(AbortReason(name="groups stuck", message=message, exit=11, culprits=[run.rank]))
            return False
        return True

    def _isolate(self, item: pytest.Item) -> None:
        """Search for the culprit of the failure of the test's body. Every rank must call this."""
        run = self._run
        self._isolates = False
        # Session fixtures may hold groups, which make way for those of the search.
        self._group_invalid = True
        if not self._discard(run.exchange.number):
            assert run.watch.abort_reason is not None
            item.session.shouldstop = run.watch.abort_reason.message
            return
        try:
            self._isolator.search(item)
        except (KeyboardInterrupt, pytest.exit.Exception) as stop:
            self._interrupted(stop, "the search after a failure", item)
            # No report of a teardown will come: this is all that there is to report of the test.
            self._isolator.report(run.records[item.nodeid], self.reports.failure)
            run.send(run.records[item.nodeid].line())
            raise
        except Exception as error:  # the ranks are out of step now, so that no further test can be agreed on
            message = f"the search after {item.nodeid} broke on {run.names[run.rank]}: {type(error).__name__}: {error}"
            text = "".join(traceback.format_exception(error))
            broken = isinstance(error, EnvironmentBroken)
            name = "groups stuck" if broken else "internal error"
            run.watch.end(AbortReason(name=name, message=first_line(message), exit=11 if broken else 3, text=text))
        if run.watch.abort_reason is not None:
            item.session.shouldstop = run.watch.abort_reason.message

    def _deadline(self, item: pytest.Item) -> float:
        return deadline_of(item, float(self._run.settings.deadline)) * self._run.slowdown


def label_of(item: pytest.Item, when: str) -> str:
    """Return how a phase is called among the ranks: all must be in the same one."""
    return f"{when} of {item.nodeid}"


def name_of(item: pytest.Item) -> CollectedTest:
    """Return how a test is called in reports."""
    return CollectedTest.of(item.nodeid, item.location, criterion_of(item))
