"""The record of a run: ``journal.jsonl``, one JSON object a line, appended and flushed at each step.

Every report is a pure function of what :func:`read` returns. A run can be killed at any byte, so a reader
meets a last line that is cut off, tests that were started and never finished, and files without a closing
line. All of these are read; what they mean (the run is broken) is decided by :class:`Journal`, in one place for
all reports.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

from pytest_gpucluster.config.workload import WorkloadRecord
from pytest_gpucluster.errors import JournalError
from pytest_gpucluster.journal import records, verdict
from pytest_gpucluster.journal.verdict import Verdict
from pytest_gpucluster.metrics.codec import AnyText, to_json
from pytest_gpucluster.metrics.codec import read as read_record

SCHEMA_VERSION = 1
JOURNAL_FILE = "journal.jsonl"
_BLANK = b"\0\r\n\t "
"""Bytes of a file that was created and never written."""
_LOCK_SECONDS = 1.0
"""How long the first line waits for the lock: a file server that answers needs milliseconds."""
# A failed limit outweighs a broken run: the hardware is rejected even if the run then fell over.
_SEVERITY = {"passed": 0, "skipped": 1, "error": 2, "failed": 3}


@dataclass(frozen=True, kw_only=True)
class Journal:
    """A run as far as its journal reports it.

    Without a closing line the run broke: ``verdict`` is BROKEN, ``exit`` 11, and ``reason`` states how far it
    came. While its recorder is alive it is RUNNING instead (``is_live``).
    """

    run: records.Run
    cluster: records.Cluster | None = None
    limits: records.LimitsInForce | None = None
    environment: records.Environment | None = None
    workload: WorkloadRecord | None = None
    collected: tuple[records.CollectedTest, ...] | None = None
    has_manifest: bool = False
    """A criteria.txt next to the tests listed what an acceptance needs; absent criteria are among the results."""
    results: tuple[records.TestResult, ...] = ()
    """One per test, in the order in which they finished. A later attempt replaces an earlier one."""
    running: records.Started | None = None
    """The test that was started and did not finish."""
    problems: tuple[records.Problem, ...] = ()
    deviations: tuple[str, ...] = ()
    """Where limits or workload demanded less than the shipped ones."""
    properties: tuple[tuple[str, str], ...] = ()
    silence: records.Silence | None = None
    end: records.End | None = None
    cut: bool = False
    """The last line was cut off."""
    recent_problem: records.Problem | None = None
    """The last problem since a test started or finished: why the run ends, if it ends here."""
    is_live: bool = False
    """There is no closing line yet, and its recorder was alive when the journal was read."""

    @property
    def ranks(self) -> tuple[records.RankPlace, ...]:
        """Return every rank that reported."""
        return () if self.cluster is None else self.cluster.ranks

    @property
    def hosts(self) -> tuple[str, ...]:
        """Return the hosts in the order of their first rank."""
        places = sorted(self.ranks, key=lambda place: place.rank)
        return tuple(dict.fromkeys(place.host for place in places if place.host))

    @property
    def sku(self) -> str | None:
        """Return the SKU whose limits were in force; None where it is unknown."""
        return None if self.limits is None else self.limits.sku

    @property
    def gpu_name(self) -> str | None:
        """Return the GPU's name that the limits were chosen by; None where it is unknown."""
        return None if self.limits is None else self.limits.gpu_name

    @property
    def limit_files(self) -> tuple[records.LimitFile, ...]:
        """Return the files of limits in force."""
        return () if self.limits is None else self.limits.files

    @property
    def profile(self) -> str:
        """Return the profile of the workload; "" where it is unknown."""
        return "" if self.workload is None else self.workload.profile

    @property
    def not_run(self) -> tuple[records.CollectedTest, ...]:
        """Return the collected tests that have no result and are not the one that was running."""
        known = {result.nodeid for result in self.results}
        if self.running is not None:
            known.add(self.running.nodeid)
        return tuple(test for test in self.collected or () if test.nodeid not in known)

    @property
    def verdict(self) -> str:
        """Return the verdict. A run without a closing line is BROKEN, or REJECTED if something failed."""
        if self.end is not None:
            return verdict.word_of_kind(self.end.verdict, self.run.kind)
        if self.is_live:
            return verdict.RUNNING
        return "REJECTED" if self.has_failed else "BROKEN"

    @property
    def exit(self) -> int:
        """Return the exit code that goes with the verdict."""
        if self.end is not None:
            return self.end.exit
        if self.is_live:
            return verdict.RUNNING_EXIT
        return 1 if self.has_failed else 11

    @property
    def has_failed(self) -> bool:
        """Return whether a test or a problem is a failure, which rejects the hardware however the run ended."""
        return any(result.outcome == "failed" for result in self.results) or any(
            problem.outcome == "failed" for problem in self.problems
        )

    @property
    def reason(self) -> str:
        """Return one line: why the verdict is what it is."""
        if self.end is not None:
            return self.end.reason
        if self.recent_problem is not None:
            return self.recent_problem.message
        if self.silence is not None:
            return self.silence.message
        return self.progress if self.is_live else f"the run ended {self.where}"

    @property
    def progress(self) -> str:
        """Return the progress of a live run: its test, since when, and the number of results."""
        if self.running is not None:
            now = f"{self.running.nodeid} is running since {self.running.at or 'an unknown time'}"
        else:
            now = f"no test is running; the run began at {self.run.started_at}"
        bad = sum(result.outcome in ("failed", "error") for result in self.results)
        count = f"{len(self.results)}{'' if self.collected is None else f' of {len(self.collected)}'}"
        return f"{now}; {count} tests have ended, {bad} of them failed or broke"

    @property
    def ended_by(self) -> str:
        """Return one line: what ended the run before its last test."""
        return (self.end.ended_by if self.end is not None else "") or self.reason

    @property
    def where(self) -> str:
        """Return how far the run came, to follow "ended": "during X", "before the first test", ..."""
        if self.running is not None:
            return f"during {self.running.nodeid}"
        if not self.results:
            return "before the first test"
        if self.not_run:
            return f"between two tests, after {self.results[-1].nodeid}"
        return f"after the last test, {self.results[-1].nodeid}, before its verdict"

    def recompute_verdict(self, *, topology: str, abort: tuple[int, str] | None = None) -> Verdict:
        """Return the verdict by the journal's lines, independent of its closing line.

        Args:
            topology: for the reason's text.
            abort: exit code and reason if the run was ended before its last test.
        """
        return verdict.decide(
            self.results,
            pytest_exit=0,
            abort=abort,
            problems=[problem.message or problem.name for problem in self.problems],
            not_run=[test.nodeid for test in self.not_run],
            required=self.run.required,
            kind=self.run.kind,
            selection=self.run.selection,
            manifest=self.has_manifest,
            deviations=self.deviations,
            topology=topology,
        )

    def place(self, rank: int) -> records.RankPlace | None:
        """Return where a rank runs, or None if it has not reported."""
        return self._places.get(rank)

    @cached_property
    def _places(self) -> Mapping[int, records.RankPlace]:
        """Rank -> its place. Reports ask for each of a thousand ranks."""
        return {place.rank: place for place in reversed(self.ranks)}


def _combined(earlier: records.TestResult, later: records.TestResult) -> records.TestResult:
    """Join two results of one attempt, as of a body and a teardown: the worse decides, no text is lost."""
    worst = later if _SEVERITY[later.outcome] > _SEVERITY[earlier.outcome] else earlier
    return replace(
        worst,
        text="\n\n".join(text for text in (earlier.text, later.text) if text),
        duration_seconds=max(earlier.duration_seconds, later.duration_seconds),
        call_seconds=max(earlier.call_seconds, later.call_seconds),
        measurements=later.measurements or earlier.measurements,
        sections=later.sections or earlier.sections,
        properties=later.properties or earlier.properties,
    )


@dataclass(frozen=True, kw_only=True)
class _Line:
    """The fields by which a line is recognized."""

    type: str = ""
    schema_version: int | None = None
    plugin_version: AnyText = "of an unknown version"


def _require_readable(first: _Line, where: str) -> None:
    if first.type != "run":
        raise JournalError(f"{where}: not a journal of this project: it must begin with a line of type 'run'")
    if first.schema_version is None or first.schema_version < 1:
        raise JournalError(f"{where}: not a journal of this project: its first line has no schema_version")
    if first.schema_version > SCHEMA_VERSION:
        raise JournalError(
            f"{where}: written with schema_version {first.schema_version} by pytest-gpucluster {first.plugin_version}; "
            f"this version reads up to {SCHEMA_VERSION}: read it with that version or a newer one"
        )


_FIELD_OF = {
    "cluster": records.Cluster,
    "limits": records.LimitsInForce,
    "environment": records.Environment,
    "workload": WorkloadRecord,
    "end": records.End,
}
"""Type of a line -> its record, which is the journal's field of that name."""


class JournalBuilder:
    """Build a :class:`Journal` line by line.

    With ``keep_samples=False`` the samples behind each value are left out, so that a process which only
    renders reports stays small at any number of ranks. ``slim`` maps each result to the one that is kept.
    """

    def __init__(
        self, *, keep_samples: bool = True, slim: Callable[[records.TestResult], records.TestResult] | None = None
    ) -> None:
        self._keep_samples = keep_samples
        self._slim = slim
        self._journal: Journal | None = None
        self._results: dict[str, records.TestResult] = {}

    def add(self, line: object, where: str = "line") -> None:
        """Add one line.

        Raises:
            JournalError: it is not a line that this version writes. The builder is unchanged.
        """
        kind = read_record(_Line, line, where).type
        journal = self._journal
        if journal is None:
            _require_readable(read_record(_Line, line, where), where)
            self._journal = Journal(run=read_record(records.Run, line, where))
            return
        silence: records.Silence | None = None  # any other line ends a silence
        if kind in _FIELD_OF:
            journal = replace(journal, **{kind: read_record(_FIELD_OF[kind], line, where)})
        elif kind == "silence":
            silence = read_record(records.Silence, line, where)
        elif kind == "collected":
            collected = read_record(records.Collected, line, where)
            journal = replace(journal, collected=collected.tests, has_manifest=collected.manifest)
        elif kind == "deviation":
            journal = replace(
                journal, deviations=(*journal.deviations, read_record(records.Deviation, line, where).text)
            )
        elif kind == "start":
            journal = replace(journal, running=read_record(records.Started, line, where), recent_problem=None)
        elif kind == "test":
            journal = replace(journal, running=self._add_result(line, where, journal.running), recent_problem=None)
        elif kind == "problem":
            problem = read_record(records.Problem, line, where)
            journal = replace(journal, problems=(*journal.problems, problem), recent_problem=problem)
        elif kind == "property":
            entry = read_record(records.Property, line, where)
            journal = replace(journal, properties=(*journal.properties, (entry.name, entry.value)))
        # Line types that a later version adds within this schema are ignored.
        self._journal = replace(journal, silence=silence if silence is not None and silence.message else None)

    @property
    def running(self) -> records.Started | None:
        """Return the test that has started and not finished."""
        return self._journal.running if self._journal is not None else None

    def _add_result(self, line: Any, where: str, running: records.Started | None) -> records.Started | None:
        result = records.read_test_result(line, where, keep_samples=self._keep_samples)
        result = result if self._slim is None else self._slim(result)
        earlier = self._results.pop(result.nodeid, None)
        if earlier is not None and earlier.attempts == result.attempts:
            result = _combined(earlier, result)
        self._results[result.nodeid] = result
        return None if running is not None and running.nodeid == result.nodeid else running

    def journal(self, *, cut: bool = False) -> Journal:
        """Return the journal so far.

        Raises:
            JournalError: there is no first line yet.
        """
        if self._journal is None:
            raise JournalError("the journal has no first line: the run ended before it was recorded")
        return replace(self._journal, results=tuple(self._results.values()), cut=cut)


def read(
    path: Path,
    *,
    keep_samples: bool = True,
    slim: Callable[[records.TestResult], records.TestResult] | None = None,
    live: bool = False,
) -> Journal:
    """Read a journal, also one whose writer was killed.

    A last line that is cut off is left out and noted in ``Journal.cut``. Any other damage is an error: a report made
    from half of the evidence must not look like one made from all of it.

    Args:
        path: of the journal.
        keep_samples: as of ``JournalBuilder``.
        slim: as of ``JournalBuilder``.
        live: the run may still be going on: a journal without a closing line whose recorder is alive is RUNNING. For
            readers that cannot know that the run is over.

    Raises:
        JournalError: no such file, not a journal, or written by a newer version.
    """
    builder = JournalBuilder(keep_samples=keep_samples, slim=slim)
    # Checked before the lines are read: a recorder that exits in between has written its closing line by then.
    is_live = live and _is_being_written(path)
    try:
        with path.open("rb") as file:
            cut = _read_lines(file, builder, path)
    except FileNotFoundError:
        raise JournalError(f"{path}: no such journal; name a {JOURNAL_FILE}, or the folder of a run") from None
    except OSError as error:
        raise JournalError(f"{path}: cannot be read: {error.strerror or error}") from None
    journal = builder.journal(cut=cut)
    if is_live and journal.end is None:
        return replace(journal, is_live=True, cut=False)  # the rest of the line is being written
    return journal


def _is_being_written(path: Path) -> bool:
    """Return whether a process has the lock of ``JournalWriter``; False also on a file system without locks."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _read_lines(file: BinaryIO, builder: JournalBuilder, path: Path) -> bool:
    """Add all lines, one by one: a journal of a thousand ranks is large. Return whether the last one was cut off."""
    number = 0
    for number, raw in enumerate(file, start=1):
        where = f"{path}:{number}"
        try:
            value = json.loads(raw.decode("utf-8"))
        except (ValueError, RecursionError) as error:
            if number == 1:
                if not (raw + file.read()).strip(_BLANK):
                    break
                raise JournalError(f"{where}: not a journal of this project, or cut off in its first line") from None
            if file.read(1):
                raise JournalError(f"{where}: damaged: not a line of JSON ({error})") from None
            return True
        builder.add(value, where)
    else:
        if number:
            return False
    raise JournalError(f"{path}: empty: the run ended before it was recorded")


def locate(place: Path) -> Path:
    """Return the journal that a path means: itself, that of a run's folder, or the latest below a folder."""
    if place.is_dir():
        for inside in (Path(JOURNAL_FILE), Path("latest", JOURNAL_FILE)):
            if (place / inside).is_file():
                return place / inside
        raise JournalError(f"{place}: neither a {JOURNAL_FILE} nor a latest/{JOURNAL_FILE} in this folder")
    return place


def encode(line: Mapping[str, object]) -> bytes:
    """Return a line as UTF-8 JSON and a newline. Values that JSON lacks (NaN, bytes, objects) become text."""
    try:
        text = json.dumps(line, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (ValueError, TypeError):
        text = json.dumps(to_json(line), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    try:
        return text.encode("utf-8") + b"\n"
    except UnicodeEncodeError:
        # A lone surrogate has no UTF-8 form; JSON's escape keeps it.
        return json.dumps(json.loads(text), allow_nan=False, separators=(",", ":")).encode("ascii") + b"\n"


class JournalWriter:
    """Append lines to a journal. What the disk does not accept is kept and retried with the next line.

    While it is open it holds an exclusive lock (flock) on the file, which the kernel releases when the process exits or
    is killed. A reader, on NFS also on another host, sees by it that the run is going on. On a file system without
    locks no run is ever RUNNING.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.waiting = bytearray()
        """Bytes that are not on disk yet."""
        self._descriptor = -1

    def append(self, line: bytes) -> None:
        """Append one encoded line.

        Raises:
            OSError: the disk did not accept all of it. Nothing is lost: call :meth:`flush` later.
        """
        self.waiting += line
        self.flush()

    def flush(self) -> None:
        """Write what is waiting; the first call creates the file.

        Raises:
            OSError: the disk did not accept all of it, the file exists (another run's), or the file was removed
                since.
        """
        if self._descriptor < 0:
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
            self._descriptor = os.open(self.path, flags, 0o644)
            # In a thread: a file server that does not answer the lock must not keep the journal from being written.
            locking = threading.Thread(target=_lock, args=(self._descriptor,), daemon=True)
            locking.start()
            locking.join(_LOCK_SECONDS)
        while self.waiting:
            # A full disk accepts a part of a line; the rest follows as soon as there is room.
            written = os.write(self._descriptor, self.waiting)
            del self.waiting[:written]
        self._require_in_place()

    def content(self) -> bytes:
        """Return all lines, also those not on disk yet, and those of a file that was removed.

        Raises:
            OSError: the file cannot be read.
        """
        if self._descriptor < 0:
            return bytes(self.waiting)
        with os.fdopen(os.dup(self._descriptor), "rb") as file:
            file.seek(0)
            return file.read() + self.waiting

    def _require_in_place(self) -> None:
        try:
            is_in_place = os.path.samestat(os.fstat(self._descriptor), self.path.stat())
        except FileNotFoundError:
            is_in_place = False
        if not is_in_place:  # no reader will find what is written now
            what = "it was removed or replaced during the run"
            raise FileNotFoundError(errno.ENOENT, what, str(self.path))

    def sync(self) -> None:
        """Write what is waiting and flush it to the disk (fsync).

        Raises:
            OSError: the disk did not accept all of it, or the file was removed or replaced.
        """
        self.flush()
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Close the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _lock(descriptor: int) -> None:
    with contextlib.suppress(OSError):  # a file system without locks: the run is never RUNNING
        fcntl.flock(descriptor, fcntl.LOCK_EX)
