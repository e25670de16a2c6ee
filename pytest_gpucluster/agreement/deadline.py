"""The phase that the main thread is in, and how rank 0 enforces its deadline on all ranks.

After a missed deadline rank 0 asks where each rank is, names the culprits, releases the ranks, and at last gives up.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from pytest_gpucluster.agreement import exchange, hang_diagnosis
from pytest_gpucluster.agreement.exchange import AbortReason, post_event
from pytest_gpucluster.agreement.hang_diagnosis import Culprit
from pytest_gpucluster.agreement.liveness import Liveness
from pytest_gpucluster.agreement.store import Store


@dataclass(kw_only=True)
class WatchedPhase:
    """One phase, from the main thread's entering it until it enters the next. Times are of the monotonic clock."""

    number: int
    label: str
    deadline_seconds: float
    started: float = field(default_factory=time.monotonic)
    started_ns: int = field(default_factory=time.time_ns)
    """By the wall clock, as the flight recorder stamps its entries."""
    in_body: bool = True
    """The main thread may be released. Afterwards it waits in the exchange, or is between two phases."""
    peer_failed: float | None = None
    peer_message: str = ""
    release_reason: str = ""
    overdue_since: float | None = None
    released_since: float | None = None
    culprits: dict[int, Culprit] = field(default_factory=dict)
    too_slow: str = ""
    """Why it is only slow, in a rehearsal, so that there is no culprit. Known on rank 0."""
    late: str = ""
    """Which deadline it has missed, in words. Rank 0 knows."""
    stuck: bool = False
    """A rank could not be released from it."""

    @property
    def overdue(self) -> float:
        """How many seconds the phase is past its deadline; negative before."""
        return time.monotonic() - self.started - self.deadline_seconds


ANSWER_SECONDS = 1.0
"""How long ranks have to say where they are, once a deadline has passed."""
_REHEARSED_ANSWER_SECONDS = 3.0
"""The same in a rehearsal on cpu, in which each also looks whether it computes, and may have to wait for a CPU."""


class Deadline:
    """The steps after a missed deadline, one at each look of rank 0's watcher; none of them blocks.

    In a rehearsal on cpu, ranks that hang are distinguished from ranks that are only too slow.
    """

    def __init__(
        self,
        *,
        store: Store,
        liveness: Liveness,
        names: Mapping[int, str],
        stuck_seconds: float,
        end_at_once: Callable[[AbortReason], None],
        rehearsal: bool = False,
    ) -> None:
        self._store = store
        self._liveness = liveness
        self._who = liveness.who
        self._names = names
        self._stuck_seconds = stuck_seconds
        self._end_at_once = end_at_once
        self._rehearsal = rehearsal

    def hold(self, phase: WatchedPhase) -> None:
        """Past the deadline find out where everyone is, name the culprits, release, and give up at last."""
        if phase.overdue <= 0:
            return
        now = time.monotonic()
        if phase.overdue_since is None:
            if self._missing(phase):
                phase.overdue_since = now
                post_event(self._store, "overdue", number=phase.number)
            return
        if phase.released_since is None:
            ranks = list(self._who)
            answered = [r for r in ranks if self._store.check([f"where/{phase.number}/{r}"])]
            patience = _REHEARSED_ANSWER_SECONDS if self._rehearsal else ANSWER_SECONDS
            if len(answered) < len(ranks) and now - phase.overdue_since < patience:
                return
            self._blame(phase, answered)
            return
        missing = self._missing(phase)
        if missing and not phase.stuck and now - phase.released_since > self._stuck_seconds:
            self._give_up(phase, missing)

    def _missing(self, phase: WatchedPhase) -> list[int]:
        return [
            rank
            for rank in self._who
            if (phase.in_body if rank == 0 else not exchange.arrived(self._store, phase.number, rank))
        ]

    def _blame(self, phase: WatchedPhase, answered: Sequence[int]) -> None:
        missing = self._missing(phase)
        if not missing:
            return
        wheres = {
            rank: hang_diagnosis.Where.from_json(rank, json.loads(self._store.get(f"where/{phase.number}/{rank}")))
            for rank in answered
        }
        silent = {rank: self._liveness.describe_silence(rank) for rank in missing if rank not in answered}
        found: dict[int, hang_diagnosis.Culprit] = {}
        if self._rehearsal:
            phase.too_slow = hang_diagnosis.too_slow(
                wheres, silent, missing=missing, deadline_seconds=phase.deadline_seconds
            )
        if not phase.too_slow:
            found = hang_diagnosis.culprits(wheres, silent, missing=missing)
        # Here at once: the ranks may answer before this rank has read its own event.
        phase.culprits = found
        if phase.deadline_seconds:  # 0 where a rank was silent before it
            phase.late = f"not finished within {phase.deadline_seconds:g} s"
        who = "; ".join(f"{self._names[rank]} {c.message}" for rank, c in list(found.items())[:3])
        reason = phase.too_slow or who or phase.late or "not finished"
        post_event(
            self._store,
            "release",
            number=phase.number,
            reason=reason,
            culprits={rank: {"message": c.message, "text": c.text} for rank, c in found.items()},
        )
        phase.released_since = now = time.monotonic()
        phase.overdue_since = phase.overdue_since or now

    def _give_up(self, phase: WatchedPhase, missing: Sequence[int]) -> None:
        phase.stuck = True
        for rank in missing:
            if rank != 0 and not self._store.check([f"where/{phase.number}/{rank}"]):
                state = self._liveness.describe_silence(rank)  # by now more may be known of it
                phase.culprits[rank] = hang_diagnosis.silent_culprit(state)
        names = ", ".join(self._names[rank] for rank in missing)
        causes = "; ".join(c.message for rank, c in phase.culprits.items() if rank in missing)
        message = f"{names} cannot be released from {phase.label}" + (f": {causes}" if causes else "")
        abort = AbortReason(name="rank stuck", message=message, exit=11, culprits=list(missing))
        if 0 in missing:
            self._end_at_once(abort)
            return
        post_event(self._store, "end", **abort.to_json())
        for rank in missing:
            culprit = phase.culprits.get(rank)
            body = {
                "o": "hung",
                "msg": culprit.message if culprit else "cannot be released",
                "text": culprit.text if culprit else "The rank could not be released.",
            }
            exchange.answer_for(self._store, phase.number, rank, body)
