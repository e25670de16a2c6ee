"""What is on disk of a run: the journal, and the JUnit file that is made anew from it.

The JUnit file is replaced with every line that changes it and is pessimistic: at every moment it says what
would be true if nothing came after it.
"""

from __future__ import annotations

import json
import math
import os
import re
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from pytest_gpucluster.errors import JournalError
from pytest_gpucluster.files import atomic_write
from pytest_gpucluster.journal import FILE_NAME, Journal, JournalBuilder, JournalWriter, encode
from pytest_gpucluster.report_process import render_apart
from pytest_gpucluster.reports import junit
from pytest_gpucluster.reports.folder import FILES_OF_A_RUN

OWN_PROBLEM = "recorder"
"""The name of the problem that stands for a line which no reader would accept."""

# The recorder shares its cores with the ranks: of its time, so much may go into rendering ...
_RENDER_SHARE = 0.1
# ... but no change waits longer than this.
_LATEST_SECONDS = 0.5


class Record:
    """Journal and JUnit of one run on disk. No disk error is raised: :attr:`failure` tells it."""

    def __init__(self, run_dir: Path, junit_path: Path | None) -> None:
        self.builder = JournalBuilder(keep_samples=False)
        self.refused: str | None = None
        self._junit_path = junit_path
        self._writer = JournalWriter(run_dir / FILE_NAME)
        self._journal_error: str | None = None
        self._junit_error: str | None = None
        self._changed_at: float | None = None
        self._rendered_at = -math.inf
        self._render_seconds = 0.0

    @property
    def failure(self) -> str | None:
        """Return what is not as it should be on disk, or None."""
        return "; ".join(filter(None, (self._journal_error, self._junit_error, self.refused))) or None

    def journal(self) -> Journal | None:
        """Return what is known of the run; None before its first line."""
        try:
            return self.builder.journal()
        except JournalError:
            return None

    def add(self, line: Mapping[str, object]) -> None:
        """Record a line of the recorder's own."""
        self.add_encoded(encode(line))

    def add_encoded(self, raw: bytes) -> None:
        """Record a line. One that no reader would accept is recorded as a problem that quotes it."""
        try:
            self.builder.add(json.loads(raw), "rank 0's line")
        except (ValueError, RecursionError, JournalError) as error:
            self.refused = f"a line was refused: {error}"
            if self.journal() is not None:
                self.add(
                    {
                        "type": "problem",
                        "name": OWN_PROBLEM,
                        "outcome": "error",
                        "message": self.refused,
                        "text": raw[:10_000].decode("utf-8", "backslashreplace"),
                    }
                )
            return
        try:
            self._writer.append(raw)
            self._journal_error = None
        except OSError as error:
            self._journal_error = _told(self._writer.path, error)
        if self._changed_at is None:
            self._changed_at = time.monotonic()

    def try_again(self) -> None:
        """Write what the disk has not taken so far, and the JUnit file if it is not as it should be."""
        try:
            self._writer.flush()
            self._journal_error = None
        except OSError as error:
            self._journal_error = _told(self._writer.path, error)
        if self._junit_error:
            self.render()

    def due_at(self) -> float:
        """Return when to render the JUnit file, on the monotonic clock; infinity if nothing changed."""
        if self._changed_at is None:
            return math.inf
        pause = self._render_seconds * (1 / _RENDER_SHARE - 1)
        return min(self._rendered_at + pause, self._changed_at + _LATEST_SECONDS)

    def render(self, *, is_last: bool = False) -> None:
        """Replace the JUnit file. A pipe or a terminal cannot be replaced: it gets only the last one."""
        self._changed_at = None
        journal = self.journal()
        if self._junit_path is None or journal is None or (not is_last and _is_stream(self._junit_path)):
            return
        begin = time.monotonic()
        try:
            atomic_write(self._junit_path, junit.render(journal))
            self._junit_error = None
        except OSError as error:
            self._junit_error = _told(self._junit_path, error)
        except Exception as error:  # whatever a report trips over, the journal goes on
            self._junit_error = f"{self._junit_path}: cannot be rendered: {type(error).__name__}: {error}"
        self._rendered_at = time.monotonic()
        self._render_seconds = self._rendered_at - begin

    def close(self) -> str | None:
        """Put everything on disk, if need be elsewhere. Return what went wrong and where it is, or None."""
        if self.journal() is None and self.refused is None:
            return None  # rank 0 ended before its first line: there is nothing to tell of
        try:
            self._writer.sync()
            self._journal_error = None
        except OSError as error:
            self._journal_error = _told(self._writer.path, error)
        self.render(is_last=True)
        failure = self.failure
        if self._journal_error or self._junit_error:
            failure = f"{failure}; {self._rescue()}"
        self._writer.close()
        return failure

    def render_reports(self, seconds: float) -> str | None:
        """Write the other reports beside the journal. Return what is missing of them, or None.

        That is no failure of the record, of which they can be made at any time.
        """
        journal = self.journal()
        if journal is None:
            return None
        if self._journal_error:
            # It may be another run's folder, or a full disk: nothing is put beside a journal that is not this one.
            return f"{', '.join(FILES_OF_A_RUN)}: not written beside a journal that is not whole; make them of its copy"
        return render_apart(journal, self._writer.path.parent, seconds)

    def _rescue(self) -> str:
        """Write both files to the directory for temporary files and say where."""
        journal = self.journal()
        try:
            name = re.sub(r"[^A-Za-z0-9._-]", "_", journal.run.run_id if journal else "")[:100] or str(os.getpid())
            directory = Path(tempfile.gettempdir(), f"gpucluster-{name}")
            if directory.exists():
                directory = Path(tempfile.mkdtemp(prefix=f"gpucluster-{name}-"))
            directory.mkdir(mode=0o700, exist_ok=True)
            (directory / FILE_NAME).write_bytes(self._writer.content())
            if self._junit_path is not None and journal is not None:
                atomic_write(directory / "report.xml", junit.render(journal))
        except Exception as error:  # the last resort: nothing is left but to say so
            return f"nor could they be written to the directory for temporary files: {error}"
        return f"complete copies are in {directory}"


def _is_stream(path: Path) -> bool:
    return path.is_fifo() or path.is_char_device() or path.is_socket()


def _told(path: Path, error: OSError) -> str:
    return f"{path}: not written: {error.strerror or error}"
