"""Where the time of a test goes: to set-up, warm-up, measuring, verifying, agreeing with the other ranks, and the rest.

A benchmark states which part it is in:

    with counted("verifying"):
        require_right(found)

Of nested parts the innermost one counts. So every second counts once, and the parts add up to the test: a warm-up that
verifies as it goes is both, each for its own time. What is in no part is ``other``. Between tests nothing is counted,
nor in any thread but the test's own.

Entering and leaving a part reads a clock twice, and queries no device.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

SET_UP, WARM_UP, MEASURING, VERIFYING, AGREEING = "set_up", "warm_up", "measuring", "verifying", "agreeing"
OTHER = "other"
PARTS = (SET_UP, WARM_UP, MEASURING, VERIFYING, AGREEING, OTHER)
"""In the order in which ranks exchange them and reports list them."""


class Ledger:
    """The seconds of one test, by part.

    Args:
        now: a clock in seconds, which only goes forward.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._thread: int | None = None
        """The one that counts; None while no test is open."""
        self._entered: list[str] = []
        """From the outermost to the innermost part."""
        self._since = 0.0
        self._seconds = dict.fromkeys(PARTS, 0.0)

    def clear(self) -> None:
        """Forget the last test."""
        self.close()
        self._seconds = dict.fromkeys(PARTS, 0.0)

    def open(self) -> None:
        """Count from now on, in this thread; another attempt at a test adds to what is there."""
        self._thread, self._entered, self._since = threading.get_ident(), [OTHER], self._now()

    def close(self) -> None:
        """Stop counting. The seconds can still be read."""
        self._take()
        self._thread, self._entered = None, []

    @contextmanager
    def part(self, part: str) -> Iterator[None]:
        """Count the time inside as that of a part, and end what was begun within it; elsewhere count nothing."""
        if self._thread != threading.get_ident():
            yield
            return
        self._take()
        self._entered.append(part)
        depth = len(self._entered)
        try:
            yield
        finally:
            if self._thread == threading.get_ident() and len(self._entered) >= depth:
                self._take()
                del self._entered[depth - 1 :]

    def move(self, part: str, seconds: float) -> None:
        """Move ``seconds`` of the time just counted from the open part to ``part``."""
        if self._thread != threading.get_ident():
            return
        self._take()
        moved = max(0.0, min(seconds, self._seconds[self._entered[-1]]))
        self._seconds[self._entered[-1]] -= moved
        self._seconds[part] += moved

    def seconds(self) -> list[float]:
        """Return the seconds of each part, in the order of ``PARTS``, as ranks exchange them."""
        self._take()
        return [round(seconds, 4) for seconds in self._seconds.values()]

    def _take(self) -> None:
        if self._thread == threading.get_ident():
            now = self._now()
            self._seconds[self._entered[-1]] += now - self._since
            self._since = now


LEDGER = Ledger()
"""Of the test that this process runs."""


def counted(part: str) -> AbstractContextManager[None]:
    """Return a context manager whose time is that of ``part`` in the present test: "set_up", "warm_up", "measuring",
    "verifying" or "agreeing".

    It is for one use. Parts may be within each other: the innermost one counts. Where no test runs, such as in a
    benchmark that is called by itself, and in other threads, nothing is counted.

    Raises: ValueError if there is no such part.
    """
    if part not in PARTS:
        raise ValueError(f"a part of a test is one of {', '.join(PARTS)}, not {part!r}")
    return LEDGER.part(part)


def verified(seconds: float, *, still_busy: float) -> None:
    """Count a verification that has just ended, and that had to wait for the work that it verifies.

    For asynchronous work of a device: the host starts to verify when the work may only have begun, and that wait is
    part of the work. So the rest counts as verification, and the wait stays in the open part.

    Args:
        seconds: what the verification took by the host's clock.
        still_busy: how long the device was still busy when it began: the seconds of the work by the device's own clock,
            less those that the host took to enqueue it.
    """
    LEDGER.move(VERIFYING, seconds - max(0.0, still_busy))


def summarize(by_rank: Mapping[int, Sequence[float]]) -> dict[str, Any]:
    """Return for each part the first rank's seconds, and the most of any rank, with its rank. Plain JSON types.

    Args:
        by_rank: rank -> seconds in the order of ``PARTS``. Without the first rank's the result is empty.

    >>> summarize({0: [0, 0, 2.0, 0, 0.5, 0], 1: [0, 0, 2.5, 0, 0, 0]})["measuring"]
    {'seconds': 2.0, 'most_seconds': 2.5, 'most_rank': 1}
    """
    if 0 not in by_rank:
        return {}
    found = {}
    for index, part in enumerate(PARTS):
        most = max(sorted(by_rank), key=lambda rank: by_rank[rank][index])  # the first of equal ones
        found[part] = {"seconds": by_rank[0][index], "most_seconds": by_rank[most][index], "most_rank": most}
    return found
