"""What a run's journal answers, in a few plain values: short enough for a container's termination message."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pytest_gpucluster.errors import JournalError
from pytest_gpucluster.journal.journal import JOURNAL_FILE, Journal, read
from pytest_gpucluster.text import one_line

SCHEMA_VERSION = 1
MOST_BYTES = 4096
"""Of a termination message. Source:
https://kubernetes.io/docs/tasks/debug/debug-application/determine-reason-pod-failure/."""
_CHARACTERS = 600


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The verdict of one run, and what failed first.

    ``ended`` is False where nobody closed the journal: then ``verdict`` and ``exit`` are what that means.
    """

    verdict: str
    exit: int
    reason: str
    failure: str = ""
    """What failed first: a criterion, or else what went wrong outside of tests, with its one-line message."""
    ended: bool
    rehearsal: bool
    nnodes: int
    world_size: int
    run_id: str = ""
    journal: str = ""
    """Where the journal lies, on the machine that has read it."""

    @classmethod
    def of(cls, journal: Journal, where: str) -> Answer:
        """Return what a journal says."""
        return cls(
            verdict=journal.verdict,
            exit=journal.exit,
            reason=one_line(journal.reason, _CHARACTERS),
            failure=one_line(_first_failure(journal), _CHARACTERS),
            ended=journal.end is not None,
            rehearsal=journal.run.rehearsal,
            nnodes=journal.run.nnodes,
            world_size=journal.run.world_size,
            run_id=one_line(journal.run.run_id, _CHARACTERS),
            journal=where,
        )

    def to_json(self) -> str:
        """Return one line of JSON of at most ``MOST_BYTES`` bytes; texts are cut where it would be more."""
        plain: dict[str, Any] = {"schema_version": SCHEMA_VERSION, **asdict(self)}
        for characters in (_CHARACTERS, _CHARACTERS // 2, _CHARACTERS // 4, _CHARACTERS // 16):
            # Escapes of JSON are up to twelve bytes for a character.
            text = json.dumps({name: _cut(value, characters) for name, value in plain.items()})
            if len(text) <= MOST_BYTES:
                break
        return text

    @classmethod
    def from_json(cls, text: str) -> Answer:
        """Read what :meth:`to_json` has written.

        Raises:
            JournalError: it is something else, or of a newer version.
        """
        try:
            read = json.loads(text)
        except (ValueError, RecursionError):
            raise JournalError(f"no answer of `gpucluster verdict`: {one_line(text, 80)!r}") from None
        if not isinstance(read, dict) or read.pop("schema_version", None) != SCHEMA_VERSION:
            raise JournalError(f"no answer of this version's `gpucluster verdict`: {one_line(text, 80)!r}")
        wrong = sorted(name for name, kind in _KINDS.items() if type(read.get(name)) is not kind)
        if wrong:
            raise JournalError(f"an answer of `gpucluster verdict` with no or a wrong {', '.join(wrong)}")
        return cls(**{name: read[name] for name in _KINDS})


_KINDS: Mapping[str, type[Any]] = {
    "verdict": str,
    "exit": int,
    "reason": str,
    "failure": str,
    "ended": bool,
    "rehearsal": bool,
    "nnodes": int,
    "world_size": int,
    "run_id": str,
    "journal": str,
}


def answer_in(folder: Path) -> tuple[Answer | None, str]:
    """Return what the journal of the one run in a report directory answers; or None, and why."""
    journals = sorted(path for path in folder.glob(f"*/{JOURNAL_FILE}") if path.parent.name != "latest")
    if len(journals) != 1:
        runs = f"{len(journals)} runs in {folder}, where one was started" if journals else ""
        return None, runs
    try:
        return Answer.of(read(journals[0], keep_samples=False), str(journals[0])), ""
    except JournalError as error:
        return None, str(error)


def _cut(value: Any, characters: int) -> Any:
    return one_line(value, characters) if isinstance(value, str) else value


def _first_failure(journal: Journal) -> str:
    """Return what failed first: a failure before an error, for it is what rejects the hardware."""
    for outcome in ("failed", "error"):
        for result in journal.results:
            if result.outcome == outcome:
                return f"{result.criterion or result.nodeid}: {result.message}"
        for problem in journal.problems:
            if problem.outcome == outcome:
                return f"{problem.name}: {problem.message}"
    return "" if journal.exit == 0 or journal.is_live else journal.reason
