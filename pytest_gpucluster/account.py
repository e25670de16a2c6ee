"""What rank 0 has put on record so far, as whoever reads the journal will find it: also where the disk is full."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping
from typing import Any

from pytest_gpucluster.errors import JournalError
from pytest_gpucluster.journal import Journal, JournalBuilder, encode


class Account:
    """Takes every line that goes to the recorder. The samples behind the values are left out."""

    def __init__(self) -> None:
        self._builder = JournalBuilder(keep_samples=False)
        # Any thread may send a line, as the watcher does. They are read where the journal is asked for.
        self._waiting: deque[Mapping[str, Any]] = deque()
        self.unread: list[str] = []
        """Why lines could not be read; none is expected."""

    def take(self, line: Mapping[str, Any]) -> None:
        """Take a line. May be called from any thread."""
        self._waiting.append(_without_samples(line))

    def journal(self) -> Journal | None:
        """Return what is on record so far, or None before the first line. Main thread only."""
        while self._waiting:
            line = self._waiting.popleft()
            try:
                # By way of its bytes, so that a number which JSON lacks is what a reader finds in its place.
                self._builder.add(json.loads(encode(line)))
            except JournalError as error:
                self.unread.append(str(error))
        try:
            return self._builder.journal()
        except JournalError:
            return None


def _without_samples(line: Mapping[str, Any]) -> Mapping[str, Any]:
    if line.get("type") != "test":
        return dict(line)
    measurements = [{**measured, "samples": {}} for measured in line.get("measurements", ())]
    return {**line, "measurements": measurements}
