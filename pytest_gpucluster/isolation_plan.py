"""Rank 0's side of a search for who is to blame: from what the ranks saw of a round to the next round."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pytest_gpucluster.isolation.finding import Isolated, Outcome
from pytest_gpucluster.isolation.planner import Planner
from pytest_gpucluster.text import first_line

if TYPE_CHECKING:
    from pytest_gpucluster.run import Run

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
        self._until = time.monotonic() + seconds
        node_of = run.node_of()
        self.by_nodes = len(set(node_of.values())) > 1
        self.ranks: dict[int, list[int]] = {}
        """Unit -> its ranks."""
        for rank in sorted(node_of):
            self.ranks.setdefault(node_of[rank] if self.by_nodes else rank, []).append(rank)
        assert run.workload is not None
        self._planner = Planner(
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
        self.cut_short = self._why_not_taken(bodies)
        if not self.cut_short and self._round:
            self._planner.take([self._outcome(members, bodies) for members in self._round])
        self._round = () if self.cut_short else self._planner.next_round() or ()
        if self._round and time.monotonic() >= self._until:
            self._round, self.cut_short = (), "the time for it is up (isolation.budget)"
        return {"groups": [self._ranks_of(members) for members in self._round]}

    def _why_not_taken(self, bodies: Mapping[int, Mapping[str, Any]]) -> str:
        """Return why nothing follows from a round for anybody's guilt, and no further round can be probed."""
        assert self._run.watch is not None
        if self._run.watch.ending is not None:  # it has cut off whoever was in a probe
            return first_line(self._run.watch.ending.message)
        # Told by the watcher in its place, as after any phase: it is gone, or cannot be released.
        gone = next((f"{self._run.names[rank]}: {body.get('msg')}" for rank, body in bodies.items() if "o" in body), "")
        return gone or next((str(body["unfit"]) for body in bodies.values() if "unfit" in body), "")

    @property
    def hosts(self) -> dict[int, str]:
        """The host of each unit."""
        assert self._run.joined is not None
        who = self._run.joined.who
        return {unit: str(who[ranks[0]]["host"]) for unit, ranks in self.ranks.items()}

    @property
    def names(self) -> dict[int, str]:
        """How each unit is called: a node by its host, a GPU as its rank is called everywhere."""
        if not self.by_nodes:
            return {unit: self._run.names[unit] for unit in self.ranks}
        hosts = self.hosts
        twice = len(set(hosts.values())) < len(hosts)
        return {unit: f"{host} (node {unit})" if twice else host for unit, host in hosts.items()}

    def isolated(self) -> Isolated:
        """Return what is known by now."""
        return self._planner.finding()

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
        assert run.workload is not None
        sku = run.sku(run.gpu_name())
        if sku is None:
            return None
        ranks = units * len(next(iter(self.ranks.values())))  # all have as many
        labels = {"size": run.workload.isolation.size, "dtype": DTYPE, "world_size": str(ranks)}
        labels["nnodes"] = str(units if self.by_nodes else 1)
        limit = run.limits.limit(METRIC, sku=sku, world_size=ranks, nnodes=int(labels["nnodes"]), labels=labels)
        return None if limit is None else limit.min
