"""N ranks' outcomes of one phase become one outcome. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pytest_gpucluster.text import first_line, rank_ranges

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
    measurements: Sequence[Mapping[str, Any]] = ()
    sections: Sequence[tuple[str, str]] = ()
    telemetry: Mapping[str, Any] = field(default_factory=dict)
    """What this rank's GPU did during the body, and what its counters have counted."""

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON types; a bare pass is small."""
        body: dict[str, Any] = {"o": self.outcome}
        if self.message:
            body["msg"] = self.message
        if self.text:
            body["text"] = self.text
        if self.measurements:
            body["m"] = list(self.measurements)
        if self.sections:
            body["s"] = [list(section) for section in self.sections]
        if self.telemetry:
            body["t"] = dict(self.telemetry)
        return body

    @classmethod
    def from_json(cls, rank: int, body: Mapping[str, Any]) -> RankOutcome:
        """Read what :meth:`to_json` wrote."""
        return cls(
            rank=rank,
            outcome=body["o"],
            message=body.get("msg", ""),
            text=body.get("text", ""),
            measurements=body.get("m", ()),
            sections=[(title, content) for title, content in body.get("s", ())],
            telemetry=body.get("t", {}),
        )


@dataclass(frozen=True, kw_only=True)
class Merged:
    """The one outcome of a phase: passed, failed, error or skipped, who caused it and who only suffered."""

    outcome: str
    message: str = ""
    text: str = ""
    culprits: Sequence[int] = ()
    released: Sequence[int] = ()
    ranks: Sequence[Mapping[str, Any]] = field(default=())
    dirty: bool = False
    """Ranks may have been left in different places: the process group must be made anew."""
    table: str = ""
    """What was measured, for the terminal; reports make their own from the journal."""
    shared: bool = False
    """All ranks broke in the same way: the cause is outside of each of them."""
    too_slow: bool = False
    """It is skipped because this machine is too slow for a rehearsal."""
    judged: bool = False
    """The text has what pytest's own traceback lacks: the judgement on the measurements, or a fault that was counted
    beside the failure."""


def merge(outcomes: Sequence[RankOutcome], names: Mapping[int, str], *, unfinished: str = "") -> Merged:
    """Merge the outcomes of all ranks.

    Args:
        outcomes: one for each rank of the world; a rank that never answered has an outcome of "lost" or "hung".
        names: rank -> how to call it, with host and GPU.
        unfinished: why ranks were released when none of them is to blame, such as a deadline.
    """
    outcomes = _cut_explained(outcomes)
    released = _ranks_of(outcomes, "released")
    bad = [o for o in outcomes if o.outcome in ("failed", "error", "hung", "lost")]
    skipped = [o for o in outcomes if o.outcome == "skipped"]
    ranks = [{"rank": o.rank, "outcome": o.outcome, "message": o.message} for o in outcomes if o.outcome != "passed"]
    if not bad and skipped and len(skipped) < len(outcomes):
        return _disagreeing_skip(skipped, outcomes, names, ranks)
    slow = _of(outcomes, "slow")
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
            text="\n\n".join(_folded(_of(outcomes, "released"), names)) or message,
            released=released,
            ranks=ranks,
            dirty=True,
        )
    # A lost rank explains what follows from it; then what is a verdict about hardware; then the rest.
    order = {"lost": 0, "hung": 1, "failed": 2, "error": 3}
    bad.sort(key=lambda o: (order[o.outcome], o.rank))
    first = bad[0]
    same = [o.rank for o in bad if (o.outcome, o.message) == (first.outcome, first.message)]
    others = len(bad) - len(same)
    shared = len(same) == len(outcomes) > 1 and first.outcome == "error"
    who = names[first.rank] if len(same) == 1 else f"all {len(same)} ranks" if shared else rank_ranges(same)
    # What says of a rank that it is lost begins with its name already.
    message = first.message if first.message.startswith(who) else f"{who}: {first.message}"
    message += f" (and {others} more failing)" if others else ""
    parts = _folded(bad, names)
    if released:
        parts.append(f"Released because of this, not to blame: {rank_ranges(released)}.")
    return Merged(
        outcome="failed" if any(o.outcome == "failed" for o in bad) else "error",
        message=first_line(message),
        text="\n\n".join(parts),
        # What breaks all of them alike, such as a missing library, is no rank's own.
        culprits=[] if shared else sorted(o.rank for o in bad),
        released=released,
        ranks=ranks,
        dirty=True,
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
        dirty=bool(released),
        too_slow=True,
    )


def _cut_explained(outcomes: Sequence[RankOutcome]) -> Sequence[RankOutcome]:
    """A rank whose peer was gone suffers from what happened to that peer. If nobody knows of that, it is the error."""
    explained = any(o.outcome in ("failed", "error", "hung", "lost", "skipped", "slow") for o in outcomes)
    outcome = "released" if explained else "error"
    return [replace(o, outcome=outcome) if o.outcome == "cut" else o for o in outcomes]


def _of(outcomes: Sequence[RankOutcome], outcome: str) -> list[RankOutcome]:
    return [o for o in outcomes if o.outcome == outcome]


def _ranks_of(outcomes: Sequence[RankOutcome], outcome: str) -> list[int]:
    return [o.rank for o in _of(outcomes, outcome)]


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
        released=_ranks_of(outcomes, "released"),
        ranks=ranks,
        dirty=True,
    )


def _folded(bad: Sequence[RankOutcome], names: Mapping[int, str]) -> list[str]:
    """Return one section for each different failure: a thousand equal tracebacks are one."""
    groups: dict[tuple[str, str], list[RankOutcome]] = {}
    for outcome in bad:
        # The addresses of objects differ in each process and tell nothing.
        text = _ADDRESS.sub("0x…", outcome.text or outcome.message)
        groups.setdefault((outcome.outcome, text), []).append(outcome)
    sections = []
    for (kind, _), members in groups.items():
        text = members[0].text or members[0].message
        if len(members) == 1:
            title = names[members[0].rank]
        else:
            title = f"{rank_ranges([m.rank for m in members])} (first: {names[members[0].rank]})"
        sections.append(f"{title}: {kind}\n{text}")
    return sections
