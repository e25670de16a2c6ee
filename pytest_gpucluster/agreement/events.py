"""One ordered log of what went wrong, in the store, for all ranks to read.

Events are level-triggered: they stay, so a rank that looks late still sees them. Nothing is posted while all is well.
"""

from __future__ import annotations

import json
import time
from typing import Any

from pytest_gpucluster.agreement.store import Store

_COUNT = "ev/count"
_ABANDONED_AFTER_SECONDS = 2.0
"""A ticket whose text has not come by then belongs to a rank that died between the two."""


def post(store: Store, kind: str, **body: Any) -> None:
    """Append an event. Any rank may call this, from any connection."""
    ticket = store.add(_COUNT, 1)
    store.set(f"ev/{ticket}", json.dumps({"kind": kind, **body}))


class EventLog:
    """A reader's place in the log."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._seen = 0
        self._stalled_since: float | None = None

    def unread(self) -> list[dict[str, Any]]:
        """Return the events that came since the last call, in the order of the log, without ever blocking."""
        events: list[dict[str, Any]] = []
        total = self._store.add(_COUNT, 0)
        while self._seen < total:
            key = f"ev/{self._seen + 1}"
            if not self._store.check([key]):
                now = time.monotonic()
                self._stalled_since = self._stalled_since or now
                if now - self._stalled_since < _ABANDONED_AFTER_SECONDS:
                    break
            else:
                events.append(json.loads(self._store.get(key)))
            self._seen += 1
            self._stalled_since = None
        return events
