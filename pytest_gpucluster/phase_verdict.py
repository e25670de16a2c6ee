"""What all ranks agree on at the end of a phase, as rank 0 decides it: merged, judged, whether the run can go on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import pytest

from pytest_gpucluster.agreement.exchange import Ending, Merged, RankOutcome, merge
from pytest_gpucluster.isolating import Isolator
from pytest_gpucluster.judging import judge_merged
from pytest_gpucluster.text import first_line

if TYPE_CHECKING:
    from pytest_gpucluster.run import Run


def label_of(item: pytest.Item, when: str) -> str:
    """Return how a phase is called among the ranks: all must be in the same one."""
    return f"{when} of {item.nodeid}"


@dataclass(frozen=True, kw_only=True)
class Decided:
    """What rank 0 has decided.

    Attributes:
        verdict: what it tells all ranks.
        merged: the outcome of all ranks together.
        first: rank 0's own outcome, with what is known of it by now.
    """

    verdict: Mapping[str, Any]
    merged: Merged
    first: RankOutcome


class PhaseVerdict:
    """Decides on rank 0. Main thread only.

    Args:
        run: what this process holds.
        judges: this process holds measurements against limits.
        isolator: searches for who is to blame, if that is allowed.
    """

    def __init__(self, run: Run, *, judges: bool, isolator: Isolator) -> None:
        self._run = run
        self._judges = judges
        self._isolator = isolator

    def of(
        self,
        item: pytest.Item,
        when: str,
        number: int,
        bodies: Mapping[int, Mapping[str, Any]],
        *,
        has_worsened: bool,
    ) -> Decided:
        """Merge what all ranks have posted, judge it, and say whether the run can go on.

        Args:
            item: the test.
            when: "setup", "call" or "teardown".
            number: of the exchange.
            bodies: rank -> what it has posted: its outcome, and what ``Phases`` has added.
            has_worsened: rank 0's failure says more than its exception.
        """
        run, watch = self._run, self._run.watch
        assert watch is not None
        culprits = watch.culprits(number)
        too_slow = watch.too_slow(number)
        outcomes = []
        for rank, body in sorted(bodies.items()):
            outcome = RankOutcome.from_json(rank, body)
            if outcome.outcome in ("released", "passed", "cut") and rank in culprits:
                found = culprits[rank]
                outcome = RankOutcome(
                    rank=rank,
                    outcome="hung",
                    message=found.message,
                    text=found.text,
                    measurements=outcome.measurements,
                )
            elif outcome.outcome == "released" and too_slow:
                outcome = RankOutcome(rank=rank, outcome="slow", message=too_slow, measurements=outcome.measurements)
            outcomes.append(outcome)
        if when == "teardown":
            run.records[item.nodeid].spent |= {rank: body["spent"] for rank, body in bodies.items() if "spent" in body}
        released = next((o.message for o in outcomes if o.outcome == "released"), "")
        merged = merge(outcomes, run.names, unfinished=released)
        late = watch.late(number)
        if late and any(outcome.outcome == "hung" for outcome in outcomes):  # once, whoever waited for whom
            merged = replace(merged, text=f"{merged.text}\n\n{late}")
        if (merged.outcome in ("passed", "failed", "error") or merged.too_slow) and when == "call" and self._judges:
            merged = judge_merged(run, run.records[item.nodeid], merged, outcomes)
        if has_worsened:
            merged = replace(merged, judged=True)
        stop = self._stop(bodies, outcomes, merged, watch.unreleasable(number))
        verdict: dict[str, Any] = {"o": merged.outcome}
        if merged.message:
            verdict["msg"] = merged.message
        if merged.dirty:
            verdict["dirty"] = True
        if any(body.get("nvls") for body in bodies.values()):
            verdict |= {"dirty": True, "nvls": True}
        blamed = bodies if merged.shared else merged.culprits
        if blamed and all(bodies[rank].get("expected") for rank in blamed):
            verdict["expected"] = True
        if when == "call" and not verdict.keys() & {"expected", "nvls"} and stop is None:
            verdict |= self._searched_after(item, merged, bodies, outcomes)
        if stop is not None:
            verdict["stop"] = {
                "name": stop.name,
                "message": stop.message,
                "exit": stop.exit,
                "culprits": list(stop.culprits),
            }
        return Decided(verdict=verdict, merged=merged, first=outcomes[0])

    def _searched_after(
        self,
        item: pytest.Item,
        merged: Merged,
        bodies: Mapping[int, Mapping[str, Any]],
        outcomes: Sequence[RankOutcome],
    ) -> Mapping[str, bool]:
        """Say whether all ranks search for who is to blame: after what GPUs, nodes or links may have done."""
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
        unreleasable: bool,
    ) -> Ending | None:
        dead = {rank: body["died"] for rank, body in bodies.items() if body.get("died")}
        if dead:
            rank = min(dead)
            return Ending(
                name="GPU lost",
                message=first_line(f"the GPU of {self._run.names[rank]} works no more: {merged.message}"),
                exit=1 if "hardware" in dead.values() else 11,
                culprits=sorted(dead),
            )
        without = [rank for rank, body in bodies.items() if body.get("nvls")]
        if without and self._run.cluster is not None and self._run.cluster.nvls_off:
            message = first_line(f"NVLS fails also where it was switched off: {merged.message}")
            return Ending(name="NVLS", message=message, exit=11, culprits=without)
        if unreleasable:
            stuck = [o.rank for o in outcomes if o.outcome == "hung"]
            return Ending(name="rank stuck", message=merged.message, exit=11, culprits=stuck)
        return None
