"""A board on which ranks leave notices for each other, over the run's store: it needs no process group.

So ranks can tell each other something before any group is made, and also where none can be made.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import Any

from pytest_gpucluster.agreement.store import Store
from pytest_gpucluster.errors import StoreError
from pytest_gpucluster.text import first_line

_POLL_SECONDS = 0.02
_LONGEST_POLL_SECONDS = 0.25
"""From hundreds of ranks that wait for long, the store must not be asked more than it can answer."""


class Board:
    """The board of one run.

    Args:
        store: of the main thread.
        rank: of this process.
        number: of the phase in progress, the same on all ranks: no notice is read in a later phase, or by a later
            attempt at the same test.
    """

    def __init__(self, store: Store, rank: int, number: Callable[[], int]) -> None:
        self._store, self._rank, self._number = store, rank, number
        self._posted: list[str] = []
        self._posted_in = number()

    def post(self, name: str, value: Any) -> None:
        """Leave a notice of plain JSON types, once under each name in a phase.

        This rank's notices of earlier phases are removed: every rank has left those phases.

        Raises: StoreError if the store has stopped answering.
        """
        key = self._key(name, self._rank)
        try:
            if self._number() != self._posted_in:
                while self._posted:
                    self._store.delete_key(self._posted.pop())
                self._posted_in = self._number()
            self._posted.append(key)
            self._store.set(key, json.dumps(value))
        except RuntimeError as error:  # torch's DistError family
            raise StoreError(f"the rendezvous store has stopped answering: {first_line(str(error))}") from error

    def read(self, name: str, ranks: Sequence[int], *, within_seconds: float) -> dict[int, Any]:
        """Return rank -> notice of those ranks that have left one within the time.

        It looks in small steps instead of waiting in one call, so that what ends the test is heard meanwhile.

        Raises: StoreError if the store has stopped answering.
        """
        until = time.monotonic() + within_seconds
        keys = {rank: self._key(name, rank) for rank in ranks}
        pause = _POLL_SECONDS
        waiting = list(ranks)
        try:
            while waiting:
                # One key is asked for, and the others only once it is there: a thousand ranks that each ask for a
                # thousand keys, many times a second, would keep the store from answering anybody.
                if self._store.check([keys[waiting[0]]]):
                    waiting = waiting[_present(lambda few: self._store.check([keys[rank] for rank in few]), waiting) :]
                    pause = _POLL_SECONDS
                elif time.monotonic() >= until:
                    break
                else:
                    time.sleep(min(pause, max(0.0, until - time.monotonic())))
                    pause = min(2 * pause, _LONGEST_POLL_SECONDS)
            missing = {rank for rank in waiting if not self._store.check([keys[rank]])}
            present = [rank for rank in ranks if rank not in missing]
            texts = self._store.multi_get([keys[rank] for rank in present]) if present else []
        except RuntimeError as error:
            raise StoreError(f"the rendezvous store has stopped answering: {first_line(str(error))}") from error
        return {rank: json.loads(text) for rank, text in zip(present, texts, strict=True)}

    def gather(self, name: str, value: Any, ranks: Sequence[int], *, within_seconds: float) -> dict[int, Any]:
        """Leave a notice and return those of these ranks, as :meth:`read`. All of these ranks must call this."""
        self.post(name, value)
        return self.read(name, ranks, within_seconds=within_seconds)

    def round_trip_seconds(self) -> float:
        """Return how long the store takes to answer, from this rank.

        Raises: StoreError if it does not.
        """
        begin = time.perf_counter()
        self.post("round-trip", 0)
        self.read("round-trip", [self._rank], within_seconds=0.0)
        # Each of the three calls (set, check, get) is one round trip.
        return (time.perf_counter() - begin) / 3

    def _key(self, name: str, rank: int) -> str:
        return f"board/{self._number()}/{name}/{rank}"


def _present(check: Callable[[Sequence[int]], bool], ranks: Sequence[int]) -> int:
    """Return how many of these ranks, from the first one on, are there; the first one is. Asks a few times only.

    >>> there, asked = {4, 5, 6, 9}, []
    >>> _present(lambda few: asked.append(few) or there.issuperset(few), [4, 5, 6, 7, 8, 9])
    3
    """
    known, unknown = 1, len(ranks)
    if check(ranks):
        return unknown
    while unknown - known > 1:
        middle = (known + unknown) // 2
        if check(ranks[known:middle]):
            known = middle
        else:
            unknown = middle
    return known
