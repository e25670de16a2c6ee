"""One numbered exchange ends each phase: every rank posts its outcome, rank 0 decides, everybody reads the verdict.

The numbers count exchanges, not tests: a test that is run again is another exchange, on every rank. An exchange never
waits for a rank that is known to be gone, because the watcher then posts in its place.
"""

from __future__ import annotations

import contextlib
import json
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import Any

from pytest_gpucluster.agreement.store import Store, Stores
from pytest_gpucluster.errors import StoreError
from pytest_gpucluster.time_spent import AGREEING, counted
from pytest_gpucluster.wording import first_line

Body = Mapping[str, Any]
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
        self._garbage: deque[str] = deque()
        self._large: str | None = None

    def begin(self) -> int:
        """Open the next exchange, at the start of a phase, and return its number."""
        self.number += 1
        return self.number

    def run(self, body: Body, decide: Callable[[dict[int, Body]], Body], *, deadline_seconds: float) -> Body:
        """Post this rank's outcome and return the verdict.

        Every rank must call this. ``decide`` runs on rank 0 only, with the bodies of all ranks.

        Raises:
            StoreError: the store has gone, or gave no answer long after the deadline.
        """
        with counted(AGREEING):
            return self._run(body, decide, deadline_seconds)

    def _run(self, body: Body, decide: Callable[[dict[int, Body]], Body], deadline_seconds: float) -> Body:
        number = self.number
        with _store_trouble():
            self._store.set_timeout(timedelta(seconds=deadline_seconds + _ANSWER_MARGIN_SECONDS))
            if self._rank != 0:
                return self._follow(number, body)
            bodies = self._gather(number, body)
        try:
            verdict = decide(bodies)
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
