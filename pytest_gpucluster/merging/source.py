"""One of the journals to merge: its lines as they stand, what they say, and its digest."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from pytest_gpucluster.errors import JournalError
from pytest_gpucluster.journal import Journal, read
from pytest_gpucluster.journal_lines import MergedFrom

Line = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Source:
    """A journal, read twice: as lines, which are kept word for word, and as what they mean."""

    path: Path
    sha256: str
    written: tuple[tuple[str, str, bytes], ...]
    """Each line: its type, the test that it is about, and as it stands. Parsed, those of a thousand ranks are large."""
    journal: Journal
    """Without its samples."""

    @property
    def told(self) -> str:
        """Return how the run is called where it is told of."""
        return told(self.journal.run.run_id, self.journal.run.started_at)

    @property
    def broke(self) -> bool:
        """Tell whether the run came to no answer of its own."""
        return self.journal.verdict == "BROKEN"

    @property
    def is_merged(self) -> bool:
        """Tell whether this journal was made of others."""
        return bool(self.journal.run.merged_from)

    @property
    def is_whole(self) -> bool:
        """Tell whether this run was to run the whole suite, and has collected all of it."""
        run, problems = self.journal.run, {problem.name for problem in self.journal.problems}
        return not run.selection and self.journal.collected is not None and not problems & {"collection", "usage"}

    @property
    def runs(self) -> tuple[MergedFrom, ...]:
        """Return the runs that are in it: itself, or those that it was made of."""
        run = self.journal.run
        own = MergedFrom(
            journal=str(self.path),
            sha256=self.sha256,
            run_id=run.run_id,
            started_at=run.started_at,
            verdict=self.journal.verdict,
            exit=self.journal.exit,
            series=run.series,
            number=run.number,
        )
        return run.merged_from or (own,)

    def of_type(self, kind: str) -> Line | None:
        """Return the last line of a type."""
        return next((json.loads(raw) for type_, _, raw in reversed(self.written) if type_ == kind), None)

    def all_of_type(self, kind: str) -> Iterator[Line]:
        """Yield the lines of a type."""
        yield from (json.loads(raw) for type_, _, raw in self.written if type_ == kind)

    def results(self, nodeid: str) -> list[Line]:
        """Return the lines that make up a test's result."""
        return [json.loads(raw) for type_, about, raw in self.written if (type_, about) == ("test", nodeid)]


def load(path: Path) -> Source:
    """Read a journal to be merged.

    Raises:
        JournalError: as ``journal.read``; or its run is going on, or the journal does not say when it began.
    """
    journal = read(path, keep_samples=False, live=True)
    if journal.is_live:
        raise JournalError(f"{path}: its run is going on ({journal.progress}); merge it when it has ended")
    try:
        content = path.read_bytes()
    except OSError as error:
        raise JournalError(f"{path}: cannot be read: {error.strerror or error}") from None
    written = []
    for raw in content.split(b"\n"):
        try:
            line = json.loads(raw)
        except (ValueError, RecursionError):  # after `read`, that is the end of the file, cut off or empty
            break
        written.append((str(line.get("type", "")), str(line.get("nodeid", "")), raw))
    for text in (journal.run.started_at, *(each.started_at for each in journal.run.merged_from)):
        _require_time(path, text)
    return Source(path=path, sha256=hashlib.sha256(content).hexdigest(), written=tuple(written), journal=journal)


def told(run_id: str, started_at: str) -> str:
    """Return how a run is called where it is told of."""
    return f"run {run_id or 'without a name'} of {started_at}"


def time_of(text: str) -> datetime | None:
    """Return a time; None where it is none, or nobody knows in which zone."""
    try:
        found = datetime.fromisoformat(text.replace("Z", "+00:00"))
    except ValueError:
        return None
    return found if found.tzinfo is not None else None


def _require_time(path: Path, text: str) -> None:
    if time_of(text) is None:
        raise JournalError(
            f"{path}: its first line says {text!r:.40} for when the run began, which is no time with a zone: nobody "
            "can tell which results are the newest"
        )
