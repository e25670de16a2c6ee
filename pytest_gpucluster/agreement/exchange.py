"""The numbered exchange that ends each phase, and the merge of all ranks' outcomes.

Every rank posts its outcome, rank 0 merges them into one verdict (:func:`merge`, pure), and all ranks read it. The
numbers count exchanges, not tests: a test that is run again is another exchange, on every rank. Each outcome names the
point of the session at which its rank is: where ranks are at different points, the exchange ends in an error on all of
them. An exchange never waits for a rank that is known to be gone, because the watcher then posts in its place.

:class:`AbortReason` is why a run ends early.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import timedelta
from typing import Any

from pytest_gpucluster.agreement.store import Store, Stores, store_errors
from pytest_gpucluster.errors import OutOfStep
from pytest_gpucluster.metrics.stats import grouped
from pytest_gpucluster.metrics.time_budget import AGREEING, counted
from pytest_gpucluster.text import first_line, rank_ranges

Body = Mapping[str, Any]
_AT = "at"
_APART = "out_of_step"
_WORTH_DELETING_BYTES = 512
_ANSWER_MARGIN_SECONDS = 60.0
"""How much later than the watcher's own deadlines a blocked exchange gives up by itself."""


def key_of(number: int, rank: int) -> str:
    """Return where ``rank`` posts its outcome of exchange ``number``."""
    return f"ag/{number}/{rank}"


def verdict_key(number: int) -> str:
    """Return where rank 0 posts the verdict of exchange ``number``."""
    return f"v/{number}"


class Exchange:
    """The exchanges of one rank, in order. Main thread only, but for :attr:`number`."""

    def __init__(self, stores: Stores, rank: int, world_size: int) -> None:
        self._store = stores.main
        self._rank = rank
        self._peers = [peer for peer in range(world_size) if peer != 0]
        self.number = 0
        self._at = ""
        self._large: str | None = None

    def begin(self, at: str = "") -> int:
        """Open the next exchange, at the start of a phase, and return its number.

        Args:
            at: the point of the session, which must be the same on all ranks.
        """
        self.number += 1
        self._at = at
        return self.number

    def run(self, body: Body, decide: Callable[[dict[int, Body]], Body], *, deadline_seconds: float) -> Body:
        """Post this rank's outcome and return the verdict.

        Every rank must call this. ``decide`` runs on rank 0 only, with the bodies of all ranks.

        Raises:
            OutOfStep: ranks are at different points of the session; raised on all of them.
            StoreError: the store has gone, or gave no answer long after the deadline.
        """
        with counted(AGREEING):
            verdict = self._run({**body, _AT: self._at}, decide, deadline_seconds)
        if _APART in verdict:
            raise OutOfStep(*verdict[_APART])
        return verdict

    def _run(self, body: Body, decide: Callable[[dict[int, Body]], Body], deadline_seconds: float) -> Body:
        number = self.number
        with store_errors():
            self._store.set_timeout(timedelta(seconds=deadline_seconds + _ANSWER_MARGIN_SECONDS))
            if self._rank != 0:
                return self._follow(number, body)
            bodies = self._gather(number, body)
        apart = _out_of_step(bodies)
        try:
            verdict = {_APART: apart} if apart is not None else decide(bodies)
        except BaseException:
            self._publish(number, {"ended": True})  # no rank must wait for a verdict that will not come
            raise
        self._publish(number, verdict)
        return verdict

    def _follow(self, number: int, body: Body) -> Body:
        text = json.dumps(body)
        self._store.set(key_of(number, self._rank), text)
        verdict: Body = json.loads(self._store.get(verdict_key(number)))
        # This verdict says that rank 0 is done with the phase before. What is small may stay: to take it back would
        # cost as much as to post it.
        if self._large is not None:
            self._store.delete_key(self._large)
        self._large = key_of(number, self._rank) if len(text) > _WORTH_DELETING_BYTES else None
        return verdict

    def _gather(self, number: int, body: Body) -> dict[int, Body]:
        raw = self._store.multi_get([key_of(number, peer) for peer in self._peers]) if self._peers else []
        return {0: body, **{peer: json.loads(text) for peer, text in zip(self._peers, raw, strict=True)}}

    def _publish(self, number: int, verdict: Body) -> None:
        if self._peers:
            with store_errors():
                self._store.set(verdict_key(number), json.dumps(verdict))


def _out_of_step(bodies: Mapping[int, Body]) -> tuple[str, list[int]] | None:
    """Return who is where, and the ranks that are not where most are; None where all are at the same point.

    An answer in the place of a rank says no point, for that rank is gone.
    """
    points = {rank: str(body[_AT]) for rank, body in sorted(bodies.items()) if _AT in body}
    ranks_at = Counter(points.values())
    if len(ranks_at) == 1:
        return None
    most = ranks_at.most_common(1)[0][0]  # of equally many that of the lowest rank
    astray = [rank for rank, point in points.items() if point != most]
    where = [f"{rank_ranges([r for r in astray if points[r] == at])} at {at}" for at in ranks_at if at != most]
    return f"the ranks are out of step: {', '.join(where)}, the others at {most}", astray


def answer_for(store: Store, number: int, rank: int, body: Body) -> None:
    """Post in the place of a rank that cannot, unless it has. Watcher of rank 0."""
    store.compare_set(key_of(number, rank), "", json.dumps(body))


def answer_verdict(store: Store, number: int, body: Body) -> None:
    """Post a verdict in the place of rank 0, unless it has: so that this rank's own wait ends. Any watcher."""
    store.compare_set(verdict_key(number), "", json.dumps(body))


def arrived(store: Store, number: int, rank: int) -> bool:
    """Return whether ``rank`` has posted its outcome of exchange ``number``."""
    return store.check([key_of(number, rank)])


BAD = ("lost", "hung", "failed", "error")
"""Outcomes of a rank that is no victim. A lost rank explains what follows from it; then what is a verdict about
hardware; then the rest."""
_ADDRESS = re.compile(r"\b0x[0-9a-f]{6,}\b")


@dataclass(frozen=True, kw_only=True)
class RankOutcome:
    """How a phase ended on one rank.

    ``outcome`` is passed, failed (a verdict about the hardware), error (the run or its environment broke), skipped,
    released (ended by us because of a peer), slow (ended by us, in a rehearsal on cpu, for it takes too long), cut (a
    peer was gone from a collective), hung or lost. ``message`` is one line, ``text`` the whole failure.
    """

    rank: int
    outcome: str
    message: str = ""
    text: str = ""
    about: Sequence[int] = ()
    """The ranks whose GPUs it is about; none: its own."""
    measurements: Sequence[Mapping[str, Any]] = ()
    telemetry: Mapping[str, Any] = field(default_factory=dict)
    """What this rank's GPU did during the body, and what its counters have counted."""

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON types; a bare pass is small."""
        return {name: value for name, value in vars(self).items() if value and name != "rank"}

    @classmethod
    def from_json(cls, rank: int, body: Mapping[str, Any]) -> RankOutcome:
        """Read what :meth:`to_json` wrote; other keys are left alone."""
        return cls(**{each.name: body[each.name] for each in fields(cls) if each.name in body}, rank=rank)


@dataclass(frozen=True, kw_only=True)
class Merged:
    """The one outcome of a phase: passed, failed, error or skipped, who caused it and who only suffered."""

    outcome: str
    message: str = ""
    text: str = ""
    culprits: Sequence[int] = ()
    released: Sequence[int] = ()
    ranks: Sequence[Mapping[str, Any]] = field(default=())
    group_invalid: bool = False
    """Ranks may have been left in different places: the process group must be made anew."""
    shared: bool = False
    """All ranks broke in the same way: the cause is outside of each of them."""
    too_slow: bool = False
    """It is skipped because this machine is too slow for a rehearsal."""
    judged: bool = False
    """The text has what pytest's own traceback lacks: the judgement on the measurements, or a fault that was counted
    in addition to the failure."""


def merge(outcomes: Sequence[RankOutcome], names: Mapping[int, str], *, unfinished: str = "") -> Merged:
    """Merge the outcomes of all ranks.

    Args:
        outcomes: one for each rank of the world; a rank that never answered has an outcome of "lost" or "hung".
        names: rank -> how to call it, with host and GPU.
        unfinished: why ranks were released when none of them is the culprit, such as a deadline.
    """
    # A rank whose connection was cut suffers from what happened to its peer. If that is unknown, the cut is.
    explained = any(o.outcome in ("failed", "error", "hung", "lost", "skipped", "slow") for o in outcomes)
    cut = "released" if explained else "error"
    outcomes = [replace(o, outcome=cut) if o.outcome == "cut" else o for o in outcomes]
    released = [o.rank for o in outcomes if o.outcome == "released"]
    raised = [o for o in outcomes if o.outcome in BAD]
    bad = [replace(o, rank=rank) for o in raised for rank in o.about or [o.rank]]
    skipped = [o for o in outcomes if o.outcome == "skipped"]
    ranks = [{"rank": o.rank, "outcome": o.outcome, "message": o.message} for o in outcomes if o.outcome != "passed"]
    if not bad and skipped and len(skipped) < len(outcomes):
        return _disagreeing_skip(skipped, outcomes, names, ranks)
    slow = [o for o in outcomes if o.outcome == "slow"]
    if not bad and slow:
        return rehearsed_too_slowly(slow[0].message, released=sorted([o.rank for o in slow] + released), ranks=ranks)
    if not bad and not released:
        if not skipped:
            return Merged(outcome="passed")
        return Merged(outcome="skipped", message=skipped[0].message, text=skipped[0].text, ranks=ranks)
    if not bad:
        message = f"{unfinished or 'released'}: {rank_ranges(released)} did not finish"
        return Merged(
            outcome="error",
            message=first_line(message),
            text="\n\n".join(_folded([o for o in outcomes if o.outcome == "released"], names)) or message,
            released=released,
            ranks=ranks,
            group_invalid=True,
        )
    bad.sort(key=lambda o: (BAD.index(o.outcome), o.rank))
    first = bad[0]
    same = sorted({o.rank for o in bad if (o.outcome, o.message) == (first.outcome, first.message)})
    others = {o.rank for o in bad} - set(same)
    shared = len(same) == len(raised) == len(outcomes) > 1 and first.outcome == "error"
    who = names[first.rank] if len(same) == 1 else f"all {len(same)} ranks" if shared else rank_ranges(same)
    # What says of a rank that it is lost begins with its name already.
    message = first.message if first.message.startswith(who) else f"{who}: {first.message}"
    message += f" (and {rank_ranges(others)} failing)" if others else ""
    parts = _folded(bad, names)
    if released:
        parts.append(f"Released because of this, not culprits: {rank_ranges(released)}.")
    return Merged(
        outcome="failed" if any(o.outcome == "failed" for o in bad) else "error",
        message=first_line(message),
        text="\n\n".join(parts),
        # What breaks all of them alike, such as a missing library, is no rank's own.
        culprits=[] if shared else sorted({o.rank for o in bad}),
        released=released,
        ranks=ranks,
        group_invalid=True,
        shared=shared,
    )


def rehearsed_too_slowly(why: str, *, released: Sequence[int] = (), ranks: Sequence[Mapping[str, Any]] = ()) -> Merged:
    """Return the outcome of a test that this machine is too slow for, in a rehearsal on cpu: skipped, and counted.

    Args:
        why: what has not come to its end, in one line.
        released: the ranks that were ended before they had finished.
        ranks: how each rank has ended that has not passed.
    """
    message = f"too slow to rehearse here: {why}"
    return Merged(
        outcome="skipped",
        message=first_line(message),
        text=message,
        released=released,
        ranks=ranks,
        group_invalid=bool(released),
        too_slow=True,
    )


def _disagreeing_skip(
    skipped: Sequence[RankOutcome],
    outcomes: Sequence[RankOutcome],
    names: Mapping[int, str],
    ranks: Sequence[Mapping[str, Any]],
) -> Merged:
    quiet = [o.rank for o in skipped]
    rest = [o.rank for o in outcomes if o.outcome != "skipped"]
    reason = skipped[0].message or "no reason given"
    message = f"ranks disagree: {rank_ranges(quiet)} skipped ({reason}), {rank_ranges(rest)} did not"
    table = "\n".join(f"{names[o.rank]}: {o.outcome} {o.message}".rstrip() for o in outcomes)
    return Merged(
        outcome="error",
        message=first_line(message),
        text=f"{message}\n\n{table}",
        culprits=quiet,
        released=[o.rank for o in outcomes if o.outcome == "released"],
        ranks=ranks,
        group_invalid=True,
    )


def _folded(bad: Sequence[RankOutcome], names: Mapping[int, str]) -> list[str]:
    """Return one section for each different failure: a thousand equal tracebacks are one."""
    # The addresses of objects differ in each process.
    groups = grouped(((one.outcome, _ADDRESS.sub("0x…", one.text or one.message)), one) for one in bad)
    sections = []
    for (kind, _), members in groups.items():
        text = members[0].text or members[0].message
        if len(members) == 1:
            title = names[members[0].rank]
        else:
            title = f"{rank_ranges([m.rank for m in members])} (first: {names[members[0].rank]})"
        sections.append(f"{title}: {kind}\n{text}")
    return sections


@dataclass(frozen=True, kw_only=True)
class AbortReason:
    """Why the run ends before its last test, and with which exit code."""

    name: str
    message: str
    exit: int
    culprits: Sequence[int] = ()
    text: str = ""

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> AbortReason:
        """Read it from plain JSON types; other keys are left alone."""
        return cls(**{each.name: body[each.name] for each in fields(cls) if each.name in body})
