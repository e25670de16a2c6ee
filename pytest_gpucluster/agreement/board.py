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
from pytest_gpucluster.wording import first_line

_POLL_SECONDS = 0.02


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

    def post(self, name: str, value: Any) -> None:
        """Leave a notice of plain JSON types, once under each name in a phase.

        Raises: StoreError if the store has stopped answering.
        """
        try:
            self._store.set(self._key(name, self._rank), json.dumps(value))
        except RuntimeError as error:  # torch's DistError family
            raise StoreError(f"the rendezvous store has stopped answering: {first_line(str(error))}") from error

    def read(self, name: str, ranks: Sequence[int], *, within_seconds: float) -> dict[int, Any]:
        """Return rank -> notice of those ranks that have left one within the time.

        It looks in small steps instead of waiting in one call, so that what ends the test is heard meanwhile.

        Raises: StoreError if the store has stopped answering.
        """
        until = time.monotonic() + within_seconds
        keys = {rank: self._key(name, rank) for rank in ranks}
        try:
            while not (complete := self._store.check(list(keys.values()))) and time.monotonic() < until:
                time.sleep(_POLL_SECONDS)
            present = [rank for rank in ranks if complete or self._store.check([keys[rank]])]
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
