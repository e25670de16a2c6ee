"""What the watcher knows of the phase that its main thread is in."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from pytest_gpucluster.agreement.diagnosis import Culprit


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
    """Why it is only slow, in a rehearsal: nobody is to blame. Rank 0 knows."""
    late: str = ""
    """Which deadline it has missed, in words. Rank 0 knows."""
    stuck: bool = False
    """A rank could not be released from it."""

    @property
    def overdue(self) -> float:
        """How many seconds the phase is past its deadline; negative before."""
        return time.monotonic() - self.started - self.deadline_seconds
