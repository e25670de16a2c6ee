"""One numbered exchange ends each phase: every rank posts its outcome, rank 0 decides, everybody reads the verdict.

The numbers count exchanges, not tests: a test that is run again is another exchange, on every rank. Each outcome says
at which point of the session its rank is: where ranks are at different points, the exchange ends in an error on all of
them. An exchange never waits for a rank that is known to be gone, because the watcher then posts in its place.
"""

from __future__ import annotations

import contextlib
import json
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any

from pytest_gpucluster.agreement.store import Store, Stores
from pytest_gpucluster.errors import OutOfStep, StoreError
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
    """The exchanges of one rank, in order. Main thread only, but for :attr:`number` and :meth:`take_garbage`."""

    def __init__(self, stores: Stores, rank: int, world_size: int) -> None:
        self._store = stores.main
        self._rank = rank
        self._peers = [peer for peer in range(world_size) if peer != 0]
        self.number = 0
        self._at = ""
        self._garbage: deque[str] = deque()
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
        with _store_trouble():
            self._store.set_timeout(timedelta(seconds=deadline_seconds + _ANSWER_MARGIN_SECONDS))
            if self._rank != 0:
                return self._follow(number, body)
            bodies = self._gather(number, body)
        apart = _out_of_step(bodies)
        try:
            verdict = {_APART: apart} if apart is not None else decide(bodies)
        except BaseException:
            self._publish(number, {"ended": True})  # nobody must wait for a verdict that will not come
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
            self._garbage.append(self._large)
        self._large = key_of(number, self._rank) if len(text) > _WORTH_DELETING_BYTES else None
        return verdict

    def _gather(self, number: int, body: Body) -> dict[int, Body]:
        raw = self._store.multi_get([key_of(number, peer) for peer in self._peers]) if self._peers else []
        return {0: body, **{peer: json.loads(text) for peer, text in zip(self._peers, raw, strict=True)}}

    def _publish(self, number: int, verdict: Body) -> None:
        if self._peers:
            with _store_trouble():
                self._store.set(verdict_key(number), json.dumps(verdict))

    def take_garbage(self) -> list[str]:
        """Return keys that every rank has read. The watcher deletes them, off the critical path."""
        keys = []
        while self._garbage:
            keys.append(self._garbage.popleft())
        return keys


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


@contextlib.contextmanager
def _store_trouble() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # torch's DistError family
        raise StoreError(f"the rendezvous store has stopped answering: {first_line(str(error))}") from error


def answer_for(store: Store, number: int, rank: int, body: Body) -> None:
    """Post in the place of a rank that cannot, unless it has. Watcher of rank 0."""
    store.compare_set(key_of(number, rank), "", json.dumps(body))


def answer_verdict(store: Store, number: int, body: Body) -> None:
    """Post a verdict in the place of rank 0, unless it has: so that this rank's own wait ends. Any watcher."""
    store.compare_set(verdict_key(number), "", json.dumps(body))


def arrived(store: Store, number: int, rank: int) -> bool:
    """Tell whether ``rank`` has posted its outcome of exchange ``number``."""
    return store.check([key_of(number, rank)])
