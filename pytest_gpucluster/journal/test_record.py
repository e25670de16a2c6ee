"""One test's line in the journal, made from its merged phases, and rank 0's copy in memory of all lines so far.

Pure but for the clock that it is given. The copy holds what a reader of the journal will find, without the samples; it
is complete also where the disk is full.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

from pytest_gpucluster.agreement.exchange import Merged
from pytest_gpucluster.errors import JournalError
from pytest_gpucluster.journal.fields import Fields
from pytest_gpucluster.journal.journal import Journal, JournalBuilder, encode
from pytest_gpucluster.journal.records import TestResult, read_test_result
from pytest_gpucluster.metrics.time_budget import summarize
from pytest_gpucluster.text import first_line

_UNDECIDED = "the ranks have not agreed that its call phase passed"
_PARAMETERS = re.compile(r"\[.*$", re.DOTALL)


def now() -> str:
    """Return the present time as ISO 8601 in UTC."""
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds")


@dataclass(frozen=True, kw_only=True)
class TestName:
    """How a test is called in a report: the same at every world size."""

    __test__ = False

    nodeid: str
    classname: str
    name: str
    file: str
    line: int
    criterion: str | None = None

    @classmethod
    def of(cls, nodeid: str, location: tuple[str, int | None, str], criterion: str | None = None) -> TestName:
        """Make the dotted class name and the function's name as pytest's own JUnit does."""
        path, _, rest = nodeid.partition("::")
        parameters = "".join(_PARAMETERS.findall(rest)[:1])
        *classes, function = _PARAMETERS.sub("", rest).split("::")
        module = re.sub(r"\.py$", "", path).replace("/", ".")
        return cls(
            nodeid=nodeid,
            classname=".".join([module, *classes]),
            name=f"{function}{parameters}" if function else module,
            file=location[0],
            line=(location[1] or 0) + 1,
            criterion=criterion,
        )

    def to_json(self) -> dict[str, Any]:
        """Return the fields as the journal names them."""
        return {
            "nodeid": self.nodeid,
            "classname": self.classname,
            "name": self.name,
            "file": self.file,
            "line": self.line,
            "criterion": self.criterion,
        }


@dataclass(kw_only=True)
class TestRecord:
    """One test while its phases come in; :meth:`line` closes it.

    A test has passed once all ranks have agreed that its call phase has; before, and without that, it is an error. The
    first phase that is not passed decides; what goes wrong later is added to the text.
    """

    __test__ = False

    test: TestName
    started_at: str = field(default_factory=now)
    outcome: str = "error"
    phase: str = "call"
    message: str = _UNDECIDED
    text: str = _UNDECIDED
    decided: bool = False
    """A phase has decided the outcome of this attempt."""
    wasxfail: str | None = None
    seconds: float = 0.0
    call_seconds: float = 0.0
    measurements: list[Mapping[str, Any]] = field(default_factory=list)
    telemetry: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    """Rank -> what its GPU did during the body; nothing of ranks without a GPU."""
    spent: dict[int, Sequence[float]] = field(default_factory=dict)
    """Rank -> where its time has gone (``time_spent``), all attempts together. Of the first rank all of it, of the
    others up to when they had torn down."""
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
    """What the search for who is to blame has found, where there was one."""
    between_attempts: bool = False
    """The attempt is over, and another one follows: nothing is known of the test yet."""

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
        """Take the merged report of a phase: pytest's outcome, refined by what the ranks agreed on."""
        self.seconds += seconds
        if when == "call":
            self.call_seconds += seconds
        if merged is not None:
            told = {row["rank"] for row in self.ranks}
            self.ranks += [row for row in merged.ranks if row["rank"] not in told]  # the first phase tells most
            self.culprits |= set(merged.culprits)
            self.released |= set(merged.released)
            self.too_slow = self.too_slow or merged.too_slow
        if outcome == "failed":
            outcome = self._refine(when, merged)
            self._worsen(when, outcome, message, text)
        elif outcome == "skipped" and (not self.decided or self.outcome == "passed"):
            self._decide("skipped", when, message, text)
            self.wasxfail = wasxfail
        elif when == "call" and not self.decided and merged is not None and merged.outcome == "passed":
            self._decide("passed", "call", "", "")
            self.wasxfail = wasxfail
        elif wasxfail is not None:
            self.wasxfail = wasxfail

    def start_again(self, message: str) -> None:
        """Begin another attempt of the same test; what the earlier one said stays on record."""
        self.properties.append((f"attempt {self.attempts}", first_line(f"{self.outcome}: {self.message or message}")))
        self.attempts += 1
        self._decide("error", "call", _UNDECIDED, _UNDECIDED)
        self.decided, self.too_slow, self.wasxfail = False, False, None
        self.measurements, self.sections, self.telemetry = [], [], {}
        self.between_attempts = True

    def let_go(self) -> None:
        """Forget the samples behind the values, once the line is sent: all ranks' of all tests would be much. The list
        stays the same one, for the report of the test holds it too."""
        self.measurements[:] = [{**measured, "samples": {}} for measured in self.measurements]

    def line(self) -> dict[str, Any]:
        """Return the journal's line."""
        body: dict[str, Any] = {
            "type": "test",
            **self.test.to_json(),
            "outcome": self.outcome,
            "phase": self.phase,
            "message": self.message,
            "text": self.text,
            "started_at": self.started_at,
            "duration_seconds": self.seconds,
            "call_seconds": self.call_seconds,
            "measurements": self.measurements,
            "ranks": self.ranks,
            "culprits": sorted(self.culprits),
            "released": sorted(self.released),
            "sections": [list(section) for section in self.sections],
            "properties": [list(pair) for pair in self.properties],
            "attempts": self.attempts,
        }
        if self.wasxfail is not None:
            body["wasxfail"] = self.wasxfail
        if self.telemetry:
            body["telemetry"] = {str(rank): dict(told) for rank, told in sorted(self.telemetry.items())}
        spent = summarize(self.spent)
        if spent:
            body["spent"] = spent
        if self.isolation is not None:
            body["isolation"] = dict(self.isolation)
        if not self.applicable:
            body["applicable"] = False
        if self.unjudged:
            body["unjudged"] = self.unjudged
        if self.too_slow and self.outcome == "skipped":
            body["too_slow"] = True
        return body

    def result(self) -> TestResult:
        """Return the test as a reader of the journal finds it so far, without the samples behind the values.

        Raises: JournalError if it cannot be read.
        """
        measurements = [{**measured, "samples": {}} for measured in self.measurements]
        return read_test_result(Fields({**self.line(), "measurements": measurements}, self.test.nodeid), False)

    def _decide(self, outcome: str, phase: str, message: str, text: str) -> None:
        self.outcome, self.phase, self.message, self.text = outcome, phase, first_line(message), text
        self.decided = True

    def _refine(self, when: str, merged: Merged | None) -> str:
        if merged is not None and merged.outcome in ("failed", "error"):
            return merged.outcome
        return "failed" if when == "call" else "error"

    def _worsen(self, when: str, outcome: str, message: str, text: str) -> None:
        first = not self.decided or self.outcome in ("passed", "skipped")
        if first:
            self._decide(outcome, when, message, text)
        else:
            self.text = f"{self.text}\n\n{when}: {text}"
        if outcome == "failed":  # a verdict about the hardware outweighs a broken environment
            self.outcome = outcome


def unique(properties: Sequence[tuple[str, object]]) -> list[tuple[str, str]]:
    """Return user properties as text, without repeats: setup, call and teardown reports all carry them."""
    return list(dict.fromkeys((str(name), str(value)) for name, value in properties))


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
