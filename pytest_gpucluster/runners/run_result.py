"""The result of one run as its journal states it, and the exit code and last line that every runner prints.

A journal is reduced to a few plain values, short enough for a container's termination message.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pytest_gpucluster.errors import JournalError
from pytest_gpucluster.journal.journal import JOURNAL_FILE, Journal, read
from pytest_gpucluster.journal.verdict import marked
from pytest_gpucluster.metrics import codec
from pytest_gpucluster.text import one_line

SCHEMA_VERSION = 1
MOST_BYTES = 4096
"""Of a termination message. Source:
https://kubernetes.io/docs/tasks/debug/debug-application/determine-reason-pod-failure/."""
_REASON_CHARACTERS = 600
_LINE_CHARACTERS = 2000


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """The verdict of one run, and its first failure.

    ``ended`` is False if the journal was never closed: then ``verdict`` and ``exit`` are derived from that.
    """

    verdict: str
    exit: int
    reason: str
    failure: str = ""
    """The first failed criterion, or else the first problem outside of tests, with its one-line message."""
    ended: bool
    kind: str
    """Of the run (``KINDS``)."""
    nnodes: int
    world_size: int
    run_id: str = ""
    journal: str = ""
    """Path of the journal on the machine that has read it."""

    @classmethod
    def of(cls, journal: Journal, path: str) -> RunResult:
        """Return the result of a journal."""
        return cls(
            verdict=journal.verdict,
            exit=journal.exit,
            reason=one_line(journal.reason, _REASON_CHARACTERS),
            failure=one_line(_first_failure(journal), _REASON_CHARACTERS),
            ended=journal.end is not None,
            kind=journal.run.kind,
            nnodes=journal.run.nnodes,
            world_size=journal.run.world_size,
            run_id=one_line(journal.run.run_id, _REASON_CHARACTERS),
            journal=path,
        )

    def to_json(self) -> str:
        """Return one line of JSON of at most ``MOST_BYTES`` bytes; long texts are shortened to fit."""
        plain: dict[str, Any] = {"schema_version": SCHEMA_VERSION, **asdict(self)}
        for divisor in (1, 2, 4, 16):  # JSON escapes take up to twelve bytes for a character
            most = _REASON_CHARACTERS // divisor
            short = {name: one_line(value, most) if isinstance(value, str) else value for name, value in plain.items()}
            text = json.dumps(short)
            if len(text) <= MOST_BYTES:
                break
        return text

    @classmethod
    def from_json(cls, text: str) -> RunResult:
        """Read the output of :meth:`to_json`.

        Raises:
            JournalError: something else, or of a newer version.
        """
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict) or found.get("schema_version") != SCHEMA_VERSION:
            raise JournalError(f"not the output of this version's `gpucluster verdict`: {one_line(text, 80)!r}")
        return codec.read(cls, found, "output of `gpucluster verdict`")


def read_result(report_dir: Path) -> tuple[RunResult | None, str]:
    """Return the result of the one run in a report directory; or None, and why."""
    journals = sorted(path for path in report_dir.glob(f"*/{JOURNAL_FILE}") if path.parent.name != "latest")
    if len(journals) != 1:
        return None, f"{len(journals)} runs in {report_dir}, where one was started" if journals else ""
    try:
        return RunResult.of(read(journals[0], keep_samples=False), str(journals[0])), ""
    except JournalError as error:
        return None, str(error)


def _first_failure(journal: Journal) -> str:
    """Return the first failure, before any error: a failure is what rejects hardware."""
    for outcome in ("failed", "error"):
        for result in journal.results:
            if result.outcome == outcome:
                return f"{result.criterion or result.nodeid}: {result.message}"
        for problem in journal.problems:
            if problem.outcome == outcome:
                return f"{problem.name}: {problem.message}"
    return "" if journal.exit == 0 or journal.is_live else journal.reason


@dataclass(frozen=True, kw_only=True)
class Conclusion:
    """The exit code of a command that runs tests, and its last line."""

    exit: int
    line: str


def conclusion(word: str, code: int, reason: str, *, kind: str = "", reports: str = "") -> Conclusion:
    """Return exit code and last line from a verdict.

    >>> conclusion("REHEARSED", 0, "40 passed", kind="REHEARSAL", reports="gpucluster-report/1").line
    'REHEARSAL, REHEARSED, exit code 0: 40 passed (reports: gpucluster-report/1)'
    """
    line = f"{marked(word, kind)}, exit code {code}{f': {reason}' if reason else ''}"
    line += f" (reports: {reports})" if reports else ""
    return Conclusion(exit=code, line=one_line(line, _LINE_CHARACTERS))
