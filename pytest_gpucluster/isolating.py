"""After a collective has failed: find who is to blame, in the same session.

Rank 0 plans, round by round, which groups are probed at once (``isolation.planner``). Every rank then takes part in the
probe of its own group, an all-reduce in a process group of those ranks alone, and tells rank 0 what came of it in one
exchange, whose verdict is the next round. A probe that does not end is released at its deadline, as any phase of a
test. Units are nodes, or the GPUs of a single node.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpucluster import isolation_told
from pytest_gpucluster.agreement.release import Released
from pytest_gpucluster.errors import (
    LaunchError,
    WrongResult,
    communication_failed,
    connection_cut,
    gpu_died,
    kind_of,
    text_of,
)
from pytest_gpucluster.isolation_plan import DTYPE, Plan
from pytest_gpucluster.metrics.units import parse
from pytest_gpucluster.text import first_line

if TYPE_CHECKING:
    from pytest_gpucluster.cluster import Cluster
    from pytest_gpucluster.failure import MergedRepr
    from pytest_gpucluster.isolation.finding import Isolated
    from pytest_gpucluster.journal.test_record import TestRecord
    from pytest_gpucluster.run import Run

_OUT_OF_MEMORY = re.compile("out of memory", re.IGNORECASE)
"""Of CUDA, and of NCCL, which has no exception of its own for it. Source: cudaGetErrorString of
cudaErrorMemoryAllocation."""
Groups = Sequence[Sequence[int]]
"""Ranks of each group that is probed in a round; no rank is in two of them."""


class Isolator:
    """Searches for who is to blame after failures. Every rank has one, and every rank must call :meth:`search`."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._spent_seconds = 0.0
        self._found: Isolated | None = None
        """What the last search has found, on rank 0; and after which test that was."""
        self._after = ""
        self._untold: _Search | None = None
        """The search that no test's record has yet. Rank 0."""
        self._probed: Cluster | None = None
        """Whose group is still there, because others may not have left it."""

    def why_not(self) -> str | None:
        """Return why there is no search after a failure, or None if there is one. Rank 0 decides."""
        run = self._run
        if run.workload is None:
            return "the suite has no workloads.yaml, which says how long to search"
        if len(set(Counter(run.node_of().values()).values())) > 1:
            return "the nodes have different numbers of ranks, so that groups of them cannot be held beside each other"
        if self._found is not None and self._found.culprits:
            return f"it was done after {self._after}, with a result"
        if self._spent_seconds >= run.workload.isolation.budget_seconds:
            return f"the time for it is spent (isolation.budget, {run.workload.isolation.budget_seconds:g} s)"
        return None

    def search(self, item: pytest.Item) -> None:
        """Probe groups until it is known who is to blame, or the time is up.

        Collective: every rank must call this, after the groups of all ranks were thrown away.

        Args:
            item: the test that has failed.
        """
        run = self._run
        assert run.workload is not None
        begin = time.monotonic()
        self._say(f"searching for who is to blame, for {run.workload.isolation.budget_seconds:g} s at most")
        plan = None
        if run.rank == 0:
            plan = Plan(run, seconds=run.workload.isolation.budget_seconds - self._spent_seconds)
        interrupted = ""
        try:
            self._probe_all(item, plan)
        except KeyboardInterrupt:
            # It strikes at once, and the watcher may not have heard of the signal yet.
            who = run.names[run.rank]
            interrupted = f"interrupted (Ctrl-C) on {who} during the search after a failure of {item.nodeid}"
            raise
        finally:  # what an interruption ends has found something, too
            seconds = time.monotonic() - begin
            self._spent_seconds += seconds
            if plan is not None:
                if run.watch is not None and run.watch.ending is not None:
                    plan.cut_short = first_line(run.watch.ending.message)
                elif interrupted:
                    plan.cut_short = interrupted
                self._found, self._after = plan.isolated(), item.nodeid
                excluded = self._exclude(plan)
                self._untold = _Search(plan=plan, seconds=seconds, excluded=excluded)
                self._say(self._headline(plan) + (f"; leave out of the next jobs: {excluded}" if excluded else ""))

    def _probe_all(self, item: pytest.Item, plan: Plan | None) -> None:
        groups: Groups = ()
        number = 0
        while True:
            try:
                body = self._probe(item, number, groups)
                verdict = self._exchange(body, plan)
            finally:
                self._let_go()
            if verdict is None:
                return
            groups = verdict["groups"]
            if not groups:
                return
            number += 1

    def tell(self, record: TestRecord, shown: MergedRepr | None) -> None:
        """Put what the last search has found on the record of the test that it followed, once. Rank 0.

        Args:
            record: of that test, which knows by now how it has ended.
            shown: what the terminal shows of the failure.
        """
        if self._untold is None:
            return
        search, self._untold = self._untold, None
        assert self._found is not None
        found, plan, seconds = self._found, search.plan, search.seconds
        names = plan.names
        headline = self._headline(plan)
        record.isolation = isolation_told.to_json(found, names, seconds=seconds, cut_short=plan.cut_short)
        if search.excluded:
            record.properties.append(("exclude", search.excluded))
        if record.between_attempts:  # it is run again: what was found is told of the attempt before
            record.properties.append(("isolation", headline))
            return
        text = isolation_told.text(found, names.__getitem__, seconds=seconds, cut_short=plan.cut_short)
        # Where nobody was found, the failure itself tells more.
        parts = (headline, record.message) if found.culprits else (record.message, headline)
        record.message = first_line("; ".join(part for part in parts if part))
        record.text = f"{record.text}\n\n{text}"
        for culprit in found.culprits:
            record.culprits |= {rank for unit in culprit.units for rank in plan.ranks[unit]}
        if found.culprits and record.outcome == "error":
            # What could not be carried through is no mere breakdown any more: the hardware to blame is known.
            record.outcome = "failed"
            self._show_as_failure(record.test.nodeid)
        if shown is not None:
            shown.explain(record.message, text)

    def _headline(self, plan: Plan) -> str:
        assert self._found is not None
        return isolation_told.headline(self._found, plan.names.__getitem__, cut_short=plan.cut_short)

    def _exclude(self, plan: Plan) -> str:
        """Write exclude.txt beside the journal, if there are culprits; return where it is, or why it is not there."""
        from pytest_gpucluster.isolation.finding import EXCLUDE_FILE as EXCLUDE
        from pytest_gpucluster.isolation.finding import exclude_text

        assert self._found is not None
        if not self._found.culprits or self._run.directory is None:
            return ""
        path = self._run.directory / EXCLUDE
        try:
            path.write_text(
                exclude_text(self._found, host=plan.hosts.__getitem__, name=plan.names.__getitem__), encoding="utf-8"
            )
        except (OSError, LaunchError) as error:
            return f"{EXCLUDE} could not be written: {error}"
        return str(path)

    def _show_as_failure(self, nodeid: str) -> None:
        """Let the terminal's summary count the test among the failures, and not among the errors."""
        reporter = self._run.config.pluginmanager.get_plugin("terminalreporter")
        if reporter is None:
            return
        errors = reporter.stats.get("error", [])
        for report in [one for one in errors if one.nodeid == nodeid and one.when == "call"]:
            errors.remove(report)
            reporter.stats.setdefault("failed", []).append(report)

    def _say(self, text: str) -> None:
        reporter = self._run.config.pluginmanager.get_plugin("terminalreporter")
        if self._run.rank == 0 and reporter is not None and self._run.config.option.verbose >= 0:
            reporter.ensure_newline()
            reporter.write_line(f"gpucluster: {text}")

    def _probe(self, item: pytest.Item, number: int, groups: Groups) -> Mapping[str, Any]:
        """Take part in the probe of this rank's group, and return what this rank saw of it."""
        run = self._run
        assert run.watch is not None
        assert run.cluster is not None
        assert run.workload is not None
        seconds = run.workload.isolation.probe_seconds
        label = f"round {number} of the search after {item.nodeid}" if number else f"the search after {item.nodeid}"
        mine = next((group for group in groups if run.rank in group), None)
        phase = run.watch.enter(label, seconds)
        seen: Mapping[str, Any] = {}
        try:
            try:
                if mine is not None:
                    self._probed = run.cluster.among(
                        mine, name=f"isolation/{phase}/{mine[0]}", deadline_seconds=seconds
                    )
                    seen = self._measured(self._probed)
            finally:
                run.watch.leave()
        except (KeyboardInterrupt, pytest.exit.Exception):
            raise
        except (Exception, Released) as error:  # whatever a broken fabric raises is what is looked for
            run.watch.leave()  # a release may have struck in the middle of leaving
            text = _in_the_world(text_of(error), mine or ())
            seen = {_kind(error): first_line(f"{run.names.get(run.rank, run.rank)}: {text}")}
        released = run.watch.released(phase)
        if released is not None and not seen.keys() & {"wrong", "unfit"}:
            seen = {"failure": first_line(released)}
        if not seen.keys() & {"busbw", "wrong"}:
            self._let_go()  # whoever waits for this rank in its group need not wait any longer
        return seen

    def _let_go(self) -> None:
        """Throw the group of the last probe away. With NCCL that aborts it, which would cut off whoever is still in it:
        so where nothing has gone wrong, all ranks must have left it. And no release may strike in the middle of it."""
        probed, self._probed = self._probed, None
        if probed is not None:
            probed.discard(epoch=0)

    def _measured(self, cluster: Cluster) -> Mapping[str, Any]:
        from pytest_gpucluster.benchmarks.collectives import all_reduce

        assert self._run.workload is not None
        asked = self._run.workload.isolation
        result = all_reduce(
            cluster.group,
            cluster.device,
            payload_bytes=int(parse(asked.size).to("B")),
            dtype=DTYPE,
            sampling=asked.sampling,
        )
        busbw = result.slowest_busbw
        return {"busbw": None if busbw is None else busbw.median / 1e9}

    def _exchange(self, body: Mapping[str, Any], plan: Plan | None) -> Mapping[str, Any] | None:
        """Tell rank 0 and learn the next round; None once the run has ended."""
        run = self._run

        def decide(bodies: dict[int, Mapping[str, Any]]) -> Mapping[str, Any]:
            assert plan is not None  # called on rank 0 only
            return plan.decide(bodies)

        assert run.workload is not None
        seconds = run.workload.isolation.probe_seconds + run.timeouts.stuck
        return run.agree(body, decide, deadline_seconds=seconds)


def _in_the_world(text: str, ranks: Sequence[int]) -> str:
    """Call the ranks of a group, which in it are numbered from 0, as all the run calls them."""

    def known(match: re.Match[str]) -> str:
        number = int(match[1])
        return f"rank {ranks[number]}" if number < len(ranks) else match[0]

    return re.sub(r"\brank (\d+)\b", known, text)


def _kind(error: BaseException) -> str:
    """Return what an exception in a probe says: "wrong" data; a "failure" of the fabric; a connection that was "cut",
    because a peer has ended; or that this rank is "unfit" for a probe, which is no fault of GPUs, nodes or links."""
    if isinstance(error, WrongResult):
        return "wrong"
    if _OUT_OF_MEMORY.search(text_of(error)):
        return "unfit"
    if communication_failed(error):
        return "cut" if connection_cut(error) else "failure"
    return "unfit" if kind_of(error, "call") == "error" and not gpu_died(error) else "failure"


@dataclass(frozen=True, kw_only=True)
class _Search:
    """A search that is over. ``excluded``: where exclude.txt is, or why it is not."""

    plan: Plan
    seconds: float
    excluded: str
