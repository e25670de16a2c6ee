"""Search for the culprit after a failed collective, in the same session, and the reporting of its result.

Rank 0 plans, round by round, which groups are probed at once (``isolation.planner``). Every rank then takes part in the
probe of its own group, an all-reduce in a process group of those ranks alone, and sends rank 0 its result in one
exchange, whose verdict is the next round. A probe that does not end is released at its deadline, as any phase of a
test. Units are nodes, or the GPUs of a single node. The result goes into the test's record, onto the terminal and into
exclude.txt, which also lists the hosts at which other tests failed.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

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
from pytest_gpucluster.isolation.finding import EXCLUDE_FILE, IsolationResult, Outcome, exclude_text
from pytest_gpucluster.isolation.planner import Planner
from pytest_gpucluster.metrics.codec import to_json
from pytest_gpucluster.metrics.finding import has_findings
from pytest_gpucluster.metrics.units import parse
from pytest_gpucluster.text import MESSAGE_CHARACTERS, first_line, one_line, plural

if TYPE_CHECKING:
    from pytest_gpucluster.isolation.finding import Culprit
    from pytest_gpucluster.journal.test_record import TestRecord
    from pytest_gpucluster.session.cluster import Cluster
    from pytest_gpucluster.session.reporting import MergedRepr
    from pytest_gpucluster.session.run import Run

METRIC = "nccl.all_reduce.busbw"
"""What is probed, and whose limits are the floor of a group."""

DTYPE = "fp32"


class Plan:
    """Units and their ranks, what was probed, what is next.

    Args:
        run: what rank 0 holds.
        seconds: how long the search may last.
    """

    def __init__(self, run: Run, *, seconds: float) -> None:
        self._run = run
        begin = time.monotonic()
        self._until, self._repeat_until = begin + seconds, begin + seconds / 2
        node_of = run.node_of()
        self.by_nodes = len(set(node_of.values())) > 1
        self.ranks: dict[int, list[int]] = {}
        """Unit -> its ranks."""
        for rank in sorted(node_of):
            self.ranks.setdefault(node_of[rank] if self.by_nodes else rank, []).append(rank)
        self.planner = Planner(
            sorted(self.ranks),
            floor=self._floor,
            min_ratio=run.workload.isolation.min_ratio,
            name=self.names.__getitem__,
            # One GPU by itself has no link, and its rate is that of nothing.
            alone=all(len(ranks) > 1 for ranks in self.ranks.values()),
        )
        self._round: tuple[tuple[int, ...], ...] = ()
        self.cut_short = ""
        """Why the search ends before the planner is through; nothing if it does not."""

    def decide(self, bodies: dict[int, Mapping[str, Any]]) -> Mapping[str, Any]:
        """Take what the ranks saw in the last round, and say which groups of ranks are next; none: it is over."""
        # Nothing follows from a round for anybody's guilt where the run's end has cut off the ranks in a probe, or
        # where the watchdog reports in place of a rank, as after any phase, that it is lost or cannot be released.
        if self._run.abort_reason is not None:
            self.cut_short = first_line(self._run.abort_reason.message)
        else:
            gone = [f"{self._run.names[rank]}: {body['message']}" for rank, body in bodies.items() if "outcome" in body]
            unfit = [str(body["unfit"]) for body in bodies.values() if "unfit" in body]
            self.cut_short = next(iter(gone + unfit), "")
        if not self.cut_short and self._round:
            self.planner.take([self._outcome(members, bodies) for members in self._round])
        self._round = () if self.cut_short else self.planner.next_round() or ()
        now = time.monotonic()
        if self._round and now >= self._until:
            self._round, self.cut_short = (), "the time for it is up (isolation.budget)"
        elif self.planner.repeats and now >= self._repeat_until:
            self._round = ()  # the rest is for a later search
        return {"groups": [self._ranks_of(members) for members in self._round]}

    @property
    def hosts(self) -> dict[int, str]:
        """The host of each unit."""
        who = self._run.roll.who
        return {unit: str(who[ranks[0]]["host"]) for unit, ranks in self.ranks.items()}

    @property
    def names(self) -> dict[int, str]:
        """How each unit is called: a node by its host, a GPU as its rank is called everywhere."""
        if not self.by_nodes:
            return {unit: self._run.names[unit] for unit in self.ranks}
        hosts = self.hosts
        twice = len(set(hosts.values())) < len(hosts)
        return {unit: f"{host} (node {unit})" if twice else host for unit, host in hosts.items()}

    def _ranks_of(self, members: Sequence[int]) -> list[int]:
        return sorted(rank for unit in members for rank in self.ranks[unit])

    def _outcome(self, members: tuple[int, ...], bodies: Mapping[int, Mapping[str, Any]]) -> Outcome:
        seen = [bodies[rank] for rank in self._ranks_of(members)]

        def first(kind: str) -> str:
            return next((str(one[kind]) for one in seen if one.get(kind)), "")

        rates = [one.get("busbw") for one in seen]
        known = [rate for rate in rates if rate is not None]
        failure = first("failure") or first("cut")  # whose peer was gone knows least of why
        if not failure and not first("wrong") and len(known) < len(seen):
            failure = "some of its ranks have no value" if len(seen) > 1 else "one rank alone has no link to measure"
        return Outcome(
            members=members,
            busbw=min(known) if len(known) == len(seen) else None,
            wrong=first("wrong"),
            failure=failure,
        )

    def _floor(self, units: int) -> float | None:
        run = self._run
        sku = run.sku(run.gpu_name())
        if sku is None:
            return None
        ranks = units * len(next(iter(self.ranks.values())))  # all have as many
        labels = {"size": run.workload.isolation.size, "dtype": DTYPE, "world_size": str(ranks)}
        labels["nnodes"] = str(units if self.by_nodes else 1)
        limit = run.limits.limit(METRIC, sku=sku, world_size=ranks, nnodes=int(labels["nnodes"]), labels=labels)
        return None if limit is None else limit.min


_PROBES_SHOWN = 64


@dataclass(frozen=True, kw_only=True)
class Search:
    """A search that is over. ``excluded``: where exclude.txt is, or why it is not."""

    plan: Plan
    found: IsolationResult
    seconds: float
    nodeid: str = ""
    excluded: str = ""

    @property
    def headline(self) -> str:
        """The culprits in a few words, or why they are not known."""
        found, cut_short = self.found, self.plan.cut_short
        if found.culprits:
            return "isolated: " + ", ".join(map(self._named, found.culprits))
        if found.rounds and not found.reproduced:
            text = f"not isolated, not reproduced in {plural(found.probes, 'probe')}"
            text += f", {found.unjudged} of them not judged" if found.unjudged else ""
            return f"{text}: {cut_short}" if cut_short else text
        return f"not isolated: {cut_short or found.why_undecided}"

    def text(self) -> str:
        """Return what was found and what was tried, as lines for a report."""
        name, cut_short = self.plan.names.__getitem__, self.plan.cut_short
        ended = [f"it has ended before it was through: {cut_short}"] if cut_short else []
        lines = [f"Search for the culprit, {self.seconds:.1f} s:", *self.found.summary(name), *ended, "Probes:"]
        probed = [(number, one) for number, outcomes in enumerate(self.found.rounds, start=1) for one in outcomes]
        for number, one in probed[:_PROBES_SHOWN]:
            seen = one.wrong or one.failure or ("no value" if one.busbw is None else f"{one.busbw:.4g} GB/s")
            lines.append(f"  round {number}: {', '.join(map(name, one.members))}: {first_line(seen)}")
        if len(probed) > _PROBES_SHOWN:
            lines.append(f"  and {len(probed) - _PROBES_SHOWN} more, which the journal has")
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """Return the same in plain JSON types, for the journal."""
        names = {str(unit): name for unit, name in self.plan.names.items()}
        return {**to_json(self.found), "names": names, "seconds": self.seconds, "cut_short": self.plan.cut_short}

    def _named(self, culprit: Culprit) -> str:
        who = " and ".join(map(self.plan.names.__getitem__, culprit.units))
        who = f"the link between {who}" if culprit.kind == "link" else who
        return f"{who} (intermittent: {culprit.failed} of {culprit.probes} probes)" if culprit.intermittent else who


_OUT_OF_MEMORY = re.compile("out of memory", re.IGNORECASE)
"""Of CUDA, and of NCCL, which has no exception of its own for it. Source: cudaGetErrorString of
cudaErrorMemoryAllocation."""
Groups = Sequence[Sequence[int]]
"""Ranks of each group that is probed in a round; no rank is in two of them."""


class Isolator:
    """Searches for the culprits of failures. Every rank has one, and every rank must call :meth:`search`."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._spent_seconds = 0.0
        self._last: Search | None = None
        self._unreported: Search | None = None
        """The last search, and the one that no test's record has yet. Rank 0."""
        self._failed: dict[str, str] = {}
        """Host -> the test that names its ranks. Rank 0."""
        self._probed: Cluster | None = None
        """Whose group is still there, because others may not have left it."""

    def why_not(self) -> str | None:
        """Return why there is no search after a failure, or None if there is one. Rank 0 decides."""
        run = self._run
        if run.loaded_workload is None:
            return "the suite has no workloads.yaml, which says how long to search"
        if len(set(Counter(run.node_of().values()).values())) > 1:
            return "the nodes have different numbers of ranks, so that groups of them cannot be compared"
        if self._last is not None and self._last.found.culprits:
            return f"it was done after {self._last.nodeid}, with a result"
        if self._spent_seconds >= run.workload.isolation.budget_seconds:
            return f"the time for it is spent (isolation.budget, {run.workload.isolation.budget_seconds:g} s)"
        return None

    def search(self, item: pytest.Item) -> None:
        """Probe groups until the culprits are known, or the time is up.

        Collective: every rank must call this, after the groups of all ranks were thrown away.

        Args:
            item: the test that has failed.
        """
        run = self._run
        begin = time.monotonic()
        left = run.workload.isolation.budget_seconds - self._spent_seconds
        self._say(f"searching for the culprit, for {left:.0f} s at most")
        plan = Plan(run, seconds=left) if run.rank == 0 else None
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
                if run.abort_reason is not None:
                    plan.cut_short = first_line(run.abort_reason.message)
                elif interrupted:
                    plan.cut_short = interrupted
                found = plan.planner.finding()
                search = self._last = self._unreported = Search(
                    plan=plan, found=found, nodeid=item.nodeid, seconds=seconds, excluded=self._exclude(plan, found)
                )
                leave_out = f"; leave out of the next jobs: {search.excluded}" if search.excluded else ""
                self._say(search.headline + leave_out)

    def _probe_all(self, item: pytest.Item, plan: Plan | None) -> None:
        def decide(bodies: dict[int, Mapping[str, Any]]) -> Mapping[str, Any]:
            assert plan is not None  # called on rank 0 only
            return plan.decide(bodies)

        seconds = self._run.workload.isolation.probe_seconds + self._run.timeouts.stuck
        groups: Groups = ()
        number = 0
        while True:
            try:
                body = self._probe(item, number, groups)
                verdict = self._run.agree(body, decide, deadline_seconds=seconds)
            finally:
                self._let_go()
            groups = verdict["groups"] if verdict is not None else ()
            if not groups:
                return
            number += 1

    def report(self, record: TestRecord, failure: MergedRepr | None) -> None:
        """Put what the last search has found on the record of the test that it followed, once. Rank 0.

        Args:
            record: of that test, which knows by now how it has ended.
            shown: what the terminal shows of the failure.
        """
        if self._unreported is None:
            self._exclude_culprits(record)
            return
        search, self._unreported = self._unreported, None
        found, headline = search.found, search.headline
        record.isolation = search.to_json()
        if search.excluded:
            record.properties.append(("exclude", search.excluded))
        if record.between_attempts:  # it is run again: what was found belongs to the attempt before
            record.properties.append(("isolation", headline))
            return
        text = search.text()
        # Where no culprit was found, the failure itself shows more.
        parts = (headline, record.message) if found.culprits else (record.message, headline)
        record.message = first_line("; ".join(part for part in parts if part))
        record.text = f"{record.text}\n\n{text}"
        for culprit in found.culprits:
            record.culprits |= {rank for unit in culprit.units for rank in search.plan.ranks[unit]}
        if found.culprits and record.outcome == "error":
            # What could not be carried through is no mere breakdown any more: the faulty hardware is known. The
            # terminal's summary counts the test among the failures, too, and not among the errors.
            record.outcome = "failed"
            reporter: Any = self._run.config.pluginmanager.get_plugin("terminalreporter")
            errors = [] if reporter is None else reporter.stats.get("error", [])
            for report in [one for one in errors if one.nodeid == record.test.nodeid and one.when == "call"]:
                errors.remove(report)
                reporter.stats.setdefault("failed", []).append(report)
        if failure is not None:
            failure.explain(record.message, text)

    def _exclude_culprits(self, record: TestRecord) -> None:
        """List the hosts of the ranks at which a test has failed, without a search: what most hosts have in common, or
        of findings most ranks, is none of theirs."""
        host_of = {rank: str(who["host"]) for rank, who in self._run.roll.who.items()}
        alone = len(set(host_of.values())) == 1 or has_findings(record.text)
        part_of = {rank: str(rank) for rank in host_of} if alone else host_of
        named = {part_of[rank] for rank in record.culprits}
        searched = record.isolation is not None or any(name == "isolation" for name, _ in record.properties)
        if record.outcome != "failed" or record.between_attempts or searched:
            return
        if 0 < 2 * len(named) <= len(set(part_of.values())):
            own = {row["rank"]: row["message"] for row in record.ranks}
            for rank in sorted(record.culprits):
                why = record.message if host_of[rank] in record.message else own.get(rank, record.message)
                text = one_line(f"failed {record.test.nodeid}: {why}", 2 * MESSAGE_CHARACTERS)
                self._failed.setdefault(host_of[rank], text)
            self._exclude(*((None, None) if self._last is None else (self._last.plan, self._last.found)))

    def _exclude(self, plan: Plan | None, found: IsolationResult | None) -> str:
        """Write exclude.txt next to the journal, if there are culprits; return where it is, or why it is not there."""
        if not ((found and found.culprits) or self._failed) or self._run.directory is None:
            return ""
        path = self._run.directory / EXCLUDE_FILE
        hosts, names = (plan.hosts, plan.names) if plan is not None else ({}, {})
        try:
            text = exclude_text(found, host=hosts.__getitem__, name=names.__getitem__, failed=self._failed)
            path.write_text(text, encoding="utf-8")
        except (OSError, LaunchError) as error:
            return f"{EXCLUDE_FILE} could not be written: {error}"
        return str(path)

    def _say(self, text: str) -> None:
        if self._run.rank == 0 and self._run.config.option.verbose >= 0:
            self._run.write_lines([f"gpucluster: {text}"])

    def _probe(self, item: pytest.Item, number: int, groups: Groups) -> Mapping[str, Any]:
        """Take part in the probe of this rank's group, and return what this rank saw of it."""
        run = self._run
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
            self._let_go()  # ranks that wait for this one in its group need not wait any longer
        return seen

    def _let_go(self) -> None:
        """Throw the group of the last probe away. With NCCL that aborts it, which would cut off the ranks still in it:
        so where nothing has gone wrong, all ranks must have left it. And no release may strike in the middle of it."""
        probed, self._probed = self._probed, None
        if probed is not None:
            probed.discard(epoch=0)

    def _measured(self, cluster: Cluster) -> Mapping[str, Any]:
        from pytest_gpucluster.benchmarks.collectives import measure_collective

        asked = self._run.workload.isolation
        result = measure_collective(
            "all_reduce",
            cluster.group,
            cluster.device,
            payload_bytes=int(parse(asked.size).to("B")),
            dtype=DTYPE,
            sampling=asked.sampling,
        )
        busbw = result.slowest_busbw
        return {"busbw": None if busbw is None else busbw.median / 1e9}


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
