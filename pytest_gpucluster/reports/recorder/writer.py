"""The files of a run on disk: journal, JUnit file, and the reports that a separate process renders at the end.

The JUnit file is replaced when it changes and is pessimistic: it always states what is true if nothing follows.

The other reports are rendered after journal and JUnit file are on disk. A report that takes too long, runs out of
memory, or fails, affects nothing else: it is reported as missing, and can be rendered from the journal at any time.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import select
import signal
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from pytest_gpucluster.errors import JournalError
from pytest_gpucluster.files import atomic_write, draft_of
from pytest_gpucluster.journal.journal import JOURNAL_FILE, Journal, JournalBuilder, JournalWriter, encode
from pytest_gpucluster.reports import junit
from pytest_gpucluster.reports import registry as reports
from pytest_gpucluster.reports.registry import FILES_OF_A_RUN
from pytest_gpucluster.text import first_line

_CHUNK_BYTES = 64 * 1024
_SPARE_SECONDS = 1.0

Write = Callable[[Journal, Path, tuple[str, ...]], Mapping[str, str]]


def render_in_child(journal: Journal, folder: Path, seconds: float, *, write: Write = reports.write) -> str | None:
    """Write the reports of a run into its folder; return which are missing and why, in one line, or None.

    After ``seconds`` the rendering process is killed.

    Args:
        journal: of the run.
        folder: of the run.
        seconds: limit for all of them together.
        write: renders and writes kinds of reports; returns file name -> why it is missing.
    """
    deadline = time.monotonic() + seconds
    reader, writer = os.pipe()
    try:
        pid = os.fork()
    except OSError as error:
        os.close(reader)
        os.close(writer)
        why = f"no process can be started: {error.strerror or error}"
        return _missing_text(dict.fromkeys(FILES_OF_A_RUN, why), folder)
    if pid == 0:
        # Whatever happens, the child must not continue as a second recorder.
        try:
            os.close(reader)
            _write_all(journal, folder, seconds, write, writer)
        finally:
            os._exit(0)
    os.close(writer)
    answers, in_time = _read(reader, deadline)
    why = "the rendering process died" if in_time else f"not rendered within {seconds:.3g} s"
    if not in_time:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        for name in FILES_OF_A_RUN:
            with contextlib.suppress(OSError):  # it does not exist, or the disk hangs
                draft_of(folder / name, pid).unlink()
    missing = dict.fromkeys(FILES_OF_A_RUN, why)
    for line in answers.splitlines():
        with contextlib.suppress(ValueError):  # cut off
            name, missing[name] = json.loads(line)
    # A killed process that hangs in a dead file system cannot be waited for: init reaps it later.
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0 if in_time else os.WNOHANG)
    return _missing_text({name: problem for name, problem in missing.items() if problem}, folder)


def _write_all(journal: Journal, folder: Path, seconds: float, write: Write, answers: int) -> None:
    """Write each report, and a line for each. This process ends after a while, also if its parent is dead."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGALRM])  # blocked since its start
    signal.setitimer(signal.ITIMER_REAL, seconds + _SPARE_SECONDS)
    for kind in reports.OF_A_RUN:
        missing = write(journal, folder, (kind,))
        name = reports.FILES[kind]
        os.write(answers, json.dumps([name, first_line(missing.get(name, ""))]).encode() + b"\n")


def _read(reader: int, deadline: float) -> tuple[bytes, bool]:
    answers = b""
    poller = select.poll()
    poller.register(reader, select.POLLIN)
    try:
        while True:
            left = deadline - time.monotonic()
            if left <= 0 or not poller.poll(left * 1000):
                return answers, False
            chunk = os.read(reader, _CHUNK_BYTES)
            if not chunk:
                return answers, True
            answers += chunk
    finally:
        os.close(reader)


def _missing_text(missing: Mapping[str, str], folder: Path) -> str | None:
    each = "; ".join(f"{name}: {why}" for name, why in missing.items())
    return f"{each}; {reports.RENDER_HINT.format(folder)}" if each else None


OWN_PROBLEM = "recorder"
"""The name of the problem that replaces an invalid line."""

# The recorder shares its cores with the ranks: the share of its time for rendering.
_RENDER_SHARE = 0.1
# No change waits longer than this.
_LATEST_SECONDS = 0.5


class RunWriter:
    """Journal and JUnit file of one run on disk. No disk error is raised: see :attr:`failure`."""

    def __init__(self, run_dir: Path, junit_path: Path | None) -> None:
        self.run_dir = run_dir
        self.builder = JournalBuilder(keep_samples=False)
        self.rejected: str | None = None
        self._junit_path = junit_path
        self._writer = JournalWriter(run_dir / JOURNAL_FILE)
        self._journal_error: str | None = None
        self._junit_error: str | None = None
        self._changed_at: float | None = None
        self._rendered_at = -math.inf
        self._render_seconds = 0.0

    @property
    def failure(self) -> str | None:
        """Return what is wrong on disk, or None."""
        return "; ".join(filter(None, (self._journal_error, self._junit_error, self.rejected))) or None

    def journal(self) -> Journal | None:
        """Return the journal so far; None before its first line."""
        try:
            return self.builder.journal()
        except JournalError:
            return None

    def add(self, line: Mapping[str, object]) -> None:
        """Record a line of the recorder itself."""
        self.add_encoded(encode(line))

    def add_encoded(self, raw: bytes) -> None:
        """Record a line. An invalid one is recorded as a problem that quotes it."""
        try:
            self.builder.add(json.loads(raw), "rank 0's line")
        except (ValueError, RecursionError, JournalError) as error:
            self.rejected = f"a line was rejected: {error}"
            if self.journal() is not None:
                self.add(
                    {
                        "type": "problem",
                        "name": OWN_PROBLEM,
                        "outcome": "error",
                        "message": self.rejected,
                        "text": raw[:10_000].decode("utf-8", "backslashreplace"),
                    }
                )
            return
        self._attempt(lambda: self._writer.append(raw))
        if self._changed_at is None:
            self._changed_at = time.monotonic()

    def retry(self) -> None:
        """Write what could not be written so far."""
        self._attempt(self._writer.flush)
        if self._junit_error:
            self.render()

    def _attempt(self, write: Callable[[], None]) -> None:
        try:
            write()
            self._journal_error = None
        except OSError as error:
            self._journal_error = _write_failure(self._writer.path, error)

    def due_at(self) -> float:
        """Return when to render the JUnit file, on the monotonic clock; infinity if nothing changed."""
        if self._changed_at is None:
            return math.inf
        pause = self._render_seconds * (1 / _RENDER_SHARE - 1)
        return min(self._rendered_at + pause, self._changed_at + _LATEST_SECONDS)

    def render(self, *, is_last: bool = False) -> None:
        """Replace the JUnit file. A pipe or a terminal gets only the last version."""
        self._changed_at = None
        journal = self.journal()
        path = self._junit_path
        if path is None or journal is None:
            return
        if not is_last and (path.is_fifo() or path.is_char_device() or path.is_socket()):
            return
        begin = time.monotonic()
        try:
            atomic_write(path, junit.render(journal))
            self._junit_error = None
        except OSError as error:
            self._junit_error = _write_failure(path, error)
        except Exception as error:  # a failure of a report must not stop the journal
            self._junit_error = f"{path}: cannot be rendered: {type(error).__name__}: {error}"
        self._rendered_at = time.monotonic()
        self._render_seconds = self._rendered_at - begin

    def close(self) -> str | None:
        """Write everything to disk, elsewhere if necessary. Return the failure and the other place, or None."""
        if self.journal() is None and self.rejected is None:
            return None  # rank 0 ended before its first line
        self._attempt(self._writer.sync)
        self.render(is_last=True)
        failure = self.failure
        if self._journal_error or self._junit_error:
            failure = f"{failure}; {self._rescue()}"
        self._writer.close()
        return failure

    def render_reports(self, seconds: float) -> str | None:
        """Write the other reports next to the journal. Return which are missing, or None.

        They can be rendered from the journal at any time, so this is no failure of the recording.
        """
        journal = self.journal()
        if journal is None:
            return None
        if self._journal_error:
            # It may be another run's folder, or a full disk: nothing is written next to a journal that is not complete.
            names = ", ".join(FILES_OF_A_RUN)
            return f"{names}: not written, because the journal here is not complete; render them from its copy"
        return render_in_child(journal, self.run_dir, seconds)

    def _rescue(self) -> str:
        journal = self.journal()
        try:
            name = re.sub(r"[^A-Za-z0-9._-]", "_", journal.run.run_id if journal else "")[:100] or str(os.getpid())
            directory = Path(tempfile.gettempdir(), f"gpucluster-{name}")
            if directory.exists():
                directory = Path(tempfile.mkdtemp(prefix=f"gpucluster-{name}-"))
            directory.mkdir(mode=0o700, exist_ok=True)
            (directory / JOURNAL_FILE).write_bytes(self._writer.content())
            if self._junit_path is not None and journal is not None:
                atomic_write(directory / "report.xml", junit.render(journal))
        except Exception as error:  # the last resort has failed, too
            return f"nor could they be written to the directory for temporary files: {error}"
        return f"complete copies are in {directory}"


def _write_failure(path: Path, error: OSError) -> str:
    return f"{path}: not written: {error.strerror or error}"
