"""One test's line in the journal, made from its merged phases, and rank 0's copy in memory of all lines so far.

The copy holds what a reader of the journal will find, without the samples; it is complete also where the disk is full.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from typing import Any

from pytest_gpucluster.agreement.exchange import Merged
from pytest_gpucluster.errors import JournalError
from pytest_gpucluster.journal.journal import Journal, JournalBuilder, encode
from pytest_gpucluster.journal.records import CollectedTest, TestResult, read_test_result, without_samples
from pytest_gpucluster.metrics.time_budget import summarize
from pytest_gpucluster.text import first_line

_WRITTEN = ("outcome", "phase", "message", "text", "started_at", "call_seconds", "measurements", "ranks", "attempts")
_NOT_AGREED = "the ranks have not agreed that its call phase passed"


def now() -> str:
    """Return the present time as ISO 8601 in UTC."""
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")


@dataclass(kw_only=True)
class TestRecord:
    """One test while its phases come in; :meth:`line` closes it.

    A test has passed once all ranks have agreed that its call phase passed; until then it is an error. The first phase
    that did not pass decides the outcome; later faults are added to the text.
    """

    __test__ = False

    test: CollectedTest
    started_at: str = field(default_factory=now)
    outcome: str = "error"
    phase: str = "call"
    message: str = _NOT_AGREED
    text: str = _NOT_AGREED
    decided: bool = False
    """A phase has decided the outcome of this attempt."""
    wasxfail: str | None = None
    seconds: float = 0.0
    call_seconds: float = 0.0
    measurements: list[Mapping[str, Any]] = field(default_factory=list)
    telemetry: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    """Rank -> its GPU's telemetry during the call phase; nothing of ranks without a GPU."""
    spent: dict[int, Sequence[float]] = field(default_factory=dict)
    """Rank -> seconds by part (``metrics.time_budget``), all attempts together. The first rank's cover the whole test,
    those of the others end with their teardown."""
    ranks: list[Mapping[str, Any]] = field(default_factory=list)
    culprits: set[int] = field(default_factory=set)
    released: set[int] = field(default_factory=set)
    sections: list[tuple[str, str]] = field(default_factory=list)
    properties: list[tuple[str, str]] = field(default_factory=list)
    attempts: int = 1
    applicable: bool = True
    unjudged: str = ""
    too_slow: bool = False
    """It was skipped in a rehearsal because this machine is too slow for it."""
    isolation: Mapping[str, Any] | None = None
    """The result of the search for the culprit, where there was one."""
    between_attempts: bool = False
    """The attempt is over and another one follows: the test has no outcome yet."""

    def add(
        self,
        when: str,
        *,
        outcome: str,
        message: str,
        text: str,
        seconds: float,
        merged: Merged | None,
        wasxfail: str | None = None,
    ) -> None:
        """Add the merged report of a phase: pytest's outcome, refined by the agreed one."""
        self.seconds += seconds
        if when == "call":
            self.call_seconds += seconds
        if merged is not None:
            known = {row["rank"] for row in self.ranks}
            self.ranks += [row for row in merged.ranks if row["rank"] not in known]  # the first phase has the cause
            self.culprits |= set(merged.culprits)
            self.released |= set(merged.released)
            self.too_slow = self.too_slow or merged.too_slow
        if outcome == "failed":
            outcome = "failed" if when == "call" else "error"
            if merged is not None and merged.outcome in ("failed", "error"):
                outcome = merged.outcome
            self._add_failure(when, outcome, message, text)
        elif outcome == "skipped" and (not self.decided or self.outcome == "passed"):
            self._decide("skipped", when, message, text)
            self.wasxfail = wasxfail
        elif when == "call" and not self.decided and merged is not None and merged.outcome == "passed":
            self._decide("passed", "call", "", "")
            self.wasxfail = wasxfail
        elif wasxfail is not None:
            self.wasxfail = wasxfail

    def start_attempt(self, message: str) -> None:
        """Begin another attempt of the same test; the earlier one's message stays in the properties."""
        self.properties.append((f"attempt {self.attempts}", first_line(f"{self.outcome}: {self.message or message}")))
        self.attempts += 1
        self._decide("error", "call", _NOT_AGREED, _NOT_AGREED)
        self.decided, self.too_slow, self.wasxfail = False, False, None
        self.measurements, self.sections, self.telemetry = [], [], {}
        self.between_attempts = True

    def drop_samples(self) -> None:
        """Drop the samples once the line is sent, to bound memory. The list object stays, since the report of the test
        refers to it."""
        self.measurements[:] = [{**measured, "samples": {}} for measured in self.measurements]

    def line(self) -> dict[str, Any]:
        """Return the journal's line."""
        body: dict[str, Any] = {
            "type": "test",
            **asdict(self.test),
            **{name: getattr(self, name) for name in _WRITTEN},
            "duration_seconds": self.seconds,
            "culprits": sorted(self.culprits),
            "released": sorted(self.released),
            "sections": [list(section) for section in self.sections],
            "properties": [list(pair) for pair in self.properties],
        }
        optional: dict[str, Any] = {
            "wasxfail": self.wasxfail,
            "telemetry": {str(rank): dict(values) for rank, values in sorted(self.telemetry.items())} or None,
            "spent": summarize(self.spent) or None,
            "isolation": None if self.isolation is None else dict(self.isolation),
            "applicable": None if self.applicable else False,
            "unjudged": self.unjudged or None,
            "too_slow": (self.too_slow and self.outcome == "skipped") or None,
        }
        return body | {key: value for key, value in optional.items() if value is not None}

    def result(self) -> TestResult:
        """Return the test so far as a reader of the journal sees it, without samples.

        Raises: JournalError if it cannot be read.
        """
        return read_test_result(self.line(), self.test.nodeid, keep_samples=False)

    def _decide(self, outcome: str, phase: str, message: str, text: str) -> None:
        self.outcome, self.phase, self.message, self.text = outcome, phase, first_line(message), text
        self.decided = True

    def _add_failure(self, when: str, outcome: str, message: str, text: str) -> None:
        is_first = not self.decided or self.outcome in ("passed", "skipped")
        if is_first:
            self._decide(outcome, when, message, text)
        else:
            self.text = f"{self.text}\n\n{when}: {text}"
        if outcome == "failed":  # a verdict about the hardware outweighs a broken environment
            self.outcome = outcome


def unique(properties: Sequence[tuple[str, object]]) -> list[tuple[str, str]]:
    """Return user properties as text, without repeats: setup, call and teardown reports all carry them."""
    return list(dict.fromkeys((str(name), str(value)) for name, value in properties))


class JournalCopy:
    """Rank 0's copy in memory of all lines sent to the recorder, without the samples."""

    def __init__(self) -> None:
        self._builder = JournalBuilder(keep_samples=False)
        # Any thread may send a line, as the watchdog does. Lines are parsed when the journal is requested.
        self._waiting: deque[Mapping[str, Any]] = deque()
        self.errors: list[str] = []
        """Why lines could not be parsed; none is expected."""

    def add(self, line: Mapping[str, Any]) -> None:
        """Add a line. May be called from any thread."""
        self._waiting.append(without_samples(line))

    def journal(self) -> Journal | None:
        """Return the journal so far, or None before the first line. Main thread only."""
        while self._waiting:
            line = self._waiting.popleft()
            try:
                # Encoded and decoded, so that values which JSON lacks (NaN) become what a reader finds.
                self._builder.add(json.loads(encode(line)))
            except JournalError as error:
                self.errors.append(str(error))
        try:
            return self._builder.journal()
        except JournalError:
            return None
