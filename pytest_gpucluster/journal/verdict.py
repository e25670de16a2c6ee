"""Verdicts and exit codes in one table, and the notes that carry the agreed exit code past torchrun.

The decision is pure. torchrun exits with 1 for every code but 0, on every node, also those without the reports. So
each rank exits with the agreed code and writes a small file with its verdict to a folder named by the program that
started torchrun, which reads these files once torchrun has exited.
"""

from __future__ import annotations

import atexit
import json
import math
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn, TypeVar

from pytest_gpucluster.errors import JournalError
from pytest_gpucluster.journal.records import REHEARSAL, SIMULATED, TestResult, failed_before
from pytest_gpucluster.metrics.catalogue import declared
from pytest_gpucluster.metrics.codec import read

_Note = TypeVar("_Note")

ACCEPTED = "ACCEPTED"
SELECTION_PASSED = "SELECTION PASSED"
PASSED_WITH_DEVIATIONS = "PASSED WITH DEVIATIONS"
REHEARSED = "REHEARSED"
REJECTED = "REJECTED"
INCOMPLETE = "INCOMPLETE"
BROKEN = "BROKEN"
VERDICTS = (ACCEPTED, SELECTION_PASSED, PASSED_WITH_DEVIATIONS, REHEARSED, SIMULATED, REJECTED, INCOMPLETE, BROKEN)
_PASSES = {REHEARSAL: REHEARSED, SIMULATED: SIMULATED}
"""Kind of run -> its verdict where everything passed."""

RUNNING, RUNNING_EXIT = "RUNNING", 13
"""State of a run that has no verdict yet, and the exit code of ``gpucluster verdict`` then. No run ends with it."""

EXIT_CODES = {
    0: "ACCEPTED, SELECTION PASSED, REHEARSED or SIMULATED: everything that ran passed",
    1: "REJECTED: a limit missed, a wrong result, or a GPU identified as bad",
    2: "BROKEN: interrupted, or collection failed on every rank",
    3: "BROKEN: an internal error",
    4: "BROKEN: a usage error; nothing was measured",
    5: "BROKEN: no test was collected",
    10: "INCOMPLETE: nothing failed, but a required criterion did not run, or no limit judged it",
    11: "BROKEN: a rank lost or hung, different tests collected, or another fault of the environment",
    12: "PASSED WITH DEVIATIONS: passed, but limits were switched off, missed limits rerun, or the workload weakened",
}


REHEARSED_ALWAYS = ("inventory", "gpu.compute")
"""Criteria that a rehearsal needs even where others were too slow. Agreement of the ranks is part of every test that
passes."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The word, its exit code, and the reason in one line; ``places``: of the culprits, where they are known."""

    word: str
    exit: int
    reason: str
    places: str = ""


def marked(word: str, kind: str) -> str:
    """Return a verdict as it is shown: with the kind of run before it, unless it is about hardware.

    >>> marked("REJECTED", "SIMULATED"), marked("SIMULATED", "SIMULATED"), marked("ACCEPTED", "")
    ('SIMULATED, REJECTED', 'SIMULATED', 'ACCEPTED')
    """
    return word if kind in ("", word) else f"{kind}, {word}"


def title(word: str, kind: str) -> str:
    """Return a verdict as a headline: :func:`marked`, and what that means."""
    return f"{marked(word, kind)} (no statement about hardware)" if kind else word


def word_of_kind(word: str, kind: str) -> str:
    """Return the verdict of a run of this kind: one that is not about hardware accepts none, whatever is recorded."""
    return _PASSES[kind] if kind and word in (ACCEPTED, SELECTION_PASSED, PASSED_WITH_DEVIATIONS) else word


def decide(
    results: Sequence[TestResult],
    *,
    pytest_exit: int,
    abort: tuple[int, str] | None = None,
    problems: Sequence[str] = (),
    not_run: Collection[str] = (),
    required: Collection[str] = (),
    kind: str,
    selection: bool,
    manifest: bool,
    deviations: Sequence[str] = (),
    topology: str,
) -> Verdict:
    """Return the verdict of a run. Its certificate uses the same rules.

    Args:
        results: every test that ended, with its merged outcome: passed, failed, error or skipped.
        pytest_exit: pytest's own exit status.
        abort: exit code and reason if the run was ended before its last test.
        problems: faults outside any test.
        not_run: collected tests that were never started.
        required: names of criteria that the operator requires.
        kind: of the run (``KINDS``). On a simulated cluster the rules are those of GPUs, but for the word of a pass.
        manifest: a criteria.txt next to the tests lists what an acceptance needs.
        deviations: where limits or workload demand less than the shipped ones.
        topology: how the number of nodes and GPUs was declared, for the reason's text.
    """
    failed = [r for r in results if r.outcome == "failed"]
    errors = [r for r in results if r.outcome == "error"]
    if abort is not None and abort[0] in (2, 3, 4):
        return Verdict(word=BROKEN, exit=abort[0], reason=abort[1])
    if failed or (abort is not None and abort[0] == 1):
        reason = _first(failed, "failed") if failed else str(abort and abort[1])
        return Verdict(word=REJECTED, exit=1, reason=reason)
    if abort is not None:
        return Verdict(word=BROKEN, exit=11 if abort[0] in (0, 10, 12) else abort[0], reason=abort[1])
    if errors or problems:
        # A fault outside the tests explains errors in them.
        return Verdict(word=BROKEN, exit=11, reason=problems[0] if problems else _first(errors, "broke"))
    if pytest_exit in (2, 3, 4, 5):
        return Verdict(word=BROKEN, exit=pytest_exit, reason=EXIT_CODES[pytest_exit].partition(": ")[2])
    if pytest_exit != 0:
        return Verdict(word=BROKEN, exit=11, reason=f"pytest ended with exit status {pytest_exit}")
    slow = [r for r in results if r.too_slow] if kind == REHEARSAL else []
    gaps = _listed("did not run", _missing(results, not_run, required, excused=slow))
    gaps += _listed("too slow to rehearse here", _not_rehearsed(results, slow))
    criteria = [r for r in results if r.criterion and r.outcome == "passed"]
    gaps += _listed("measured nothing", {str(r.criterion): r.nodeid for r in criteria if not r.measurements})
    gaps += _listed("not judged", {str(r.criterion): r.unjudged for r in results if r.criterion and r.unjudged})
    if (
        criteria
        and not (selection or kind == REHEARSAL or gaps)
        and not any(judged.status == "passed" for r in criteria for judged in r.measurements)
    ):
        gaps.append("no value was compared with a limit")
    if gaps:
        return Verdict(word=INCOMPLETE, exit=10, reason="; ".join(gaps))
    passed = [r for r in results if r.outcome == "passed"]
    reason = f"{len(passed)} passed{f', {len(slow)} too slow to rehearse here' if slow else ''}; {topology}"
    missed_before = [r for r in passed if failed_before(r.properties)]
    again = list(dict.fromkeys(str(r.criterion or r.nodeid) for r in passed if r.attempts > 1))
    if again:
        reason += f"; passed only when run again: {', '.join(again[:5])}"
    if selection:
        reason += "; only a selection ran"
    deviations = [*deviations, *(f"{r.criterion or r.nodeid} failed, and passed when run again" for r in missed_before)]
    if deviations:
        reason = f"{'; '.join(deviations)}; {reason}"
    if kind:
        return Verdict(word=_PASSES[kind], exit=0, reason=reason)
    if deviations:
        return Verdict(word=PASSED_WITH_DEVIATIONS, exit=12, reason=reason)
    if selection:
        return Verdict(word=SELECTION_PASSED, exit=0, reason=reason)
    if not criteria:
        return Verdict(word=SELECTION_PASSED, exit=0, reason=f"{reason}; the suite holds no acceptance criterion")
    if not manifest:
        reason += "; no criteria.txt next to the tests lists what an acceptance needs"
        return Verdict(word=SELECTION_PASSED, exit=0, reason=reason)
    return Verdict(word=ACCEPTED, exit=0, reason=reason)


def _listed(what: str, names: Mapping[str, str]) -> list[str]:
    listed = "; ".join(f"{name} ({why})" for name, why in list(names.items())[:5])
    return [f"{what}: {listed}"] if names else []


def _not_rehearsed(results: Sequence[TestResult], slow: Sequence[TestResult]) -> Mapping[str, str]:
    """Return criterion -> why it was too slow, for those in whose group nothing else was rehearsed."""
    passed = {r.criterion for r in results if r.criterion and r.outcome == "passed"}
    groups = {_group(name) for name in passed}
    missing = {str(r.criterion): r.message for r in slow if r.criterion and _group(r.criterion) not in groups}
    if slow:
        missing.update((name, "has not passed") for name in REHEARSED_ALWAYS if name not in passed)
    return missing


def _group(criterion: str) -> str:
    return next((one.group for one in declared("CRITERIA") if one.name == criterion), criterion)


def _first(results: Sequence[TestResult], what: str) -> str:
    """Return the result that names the fewest ranks: one slow GPU also slows all that it communicates with."""
    narrowest = min(results, key=lambda result: len(result.culprits) or math.inf)
    more = f" (and {len(results) - 1} more)" if len(results) > 1 else ""
    return f"{narrowest.nodeid} {what}: {narrowest.message}{more}"


def _missing(
    results: Sequence[TestResult], not_run: Collection[str], required: Collection[str], *, excused: Sequence[TestResult]
) -> Mapping[str, str]:
    """Return criterion -> why it did not run, for those that are required and not excused."""
    missing = {
        str(r.criterion): r.message or "skipped"
        for r in results
        if r.criterion and r.outcome == "skipped" and r.applicable and r not in excused
    }
    missing.update((nodeid, "never started") for nodeid in not_run)
    ran = {r.criterion for r in results if r.outcome == "passed"}
    skipped = {r.criterion: f"required, and skipped: {r.message or 'no reason given'}" for r in results}
    absent = "required, but not in the suite that ran"
    missing.update((name, skipped.get(name, absent)) for name in required if name not in ran)
    if not missing and not any(r.outcome == "passed" for r in results):
        missing["everything"] = "each test was skipped or does not apply here"
    return missing


VARIABLE = "GPUCLUSTER_EXIT_NOTES"
"""Variable with the folder for exit notes; unset: none are written."""
_BEGUN = "begun.json"
_kept: dict[int, int] = {}
"""Process id -> the exit code to enforce; forks of the process are free."""


@dataclass(frozen=True, kw_only=True)
class ExitNote(Verdict):
    """The end of one rank.

    Attributes:
        rank, local_world_size: this rank, and the number of ranks on its node.
        launcher: process id of its parent. A job inside a test may write to the same folder, and does not count.
        word, exit, reason: the verdict that all ranks agreed on, or what this rank knows of it.
        kind: of the run (``KINDS``).
        host: of rank 0, where the reports are.
        directory: of the run there; "" where this rank does not know it.
    """

    rank: int
    local_world_size: int
    launcher: int
    kind: str
    host: str = ""
    directory: str = ""


@dataclass(frozen=True, kw_only=True)
class BeginNote:
    """Rank 0's note once the journal is open: its directory, and the process id of the recorder."""

    launcher: int
    directory: str
    recorder: int


def guard_exit_code() -> None:
    """Keep atexit handlers from changing the agreed exit code of this process, from :func:`keep_exit_code` on.

    It replaces ``os._exit``, so it must run before a conftest or a test can import that function.
    """
    leave_now = os._exit
    if getattr(leave_now, "kept", None) is _kept:
        return

    def leave_with(status: int) -> NoReturn:
        leave_now(_kept.get(os.getpid(), status))

    leave_with.kept = _kept  # type: ignore[attr-defined]
    os._exit = leave_with


def keep_exit_code(code: int) -> None:
    """Set the exit code that this process keeps when it exits by itself.

    Handlers run in the reverse order: this one, the last one registered, before those of tests and plugins.
    Source: Python, atexit.
    """
    atexit.register(_kept.__setitem__, os.getpid(), code)


def write_note(environ: Mapping[str, str], note: ExitNote | BeginNote) -> str | None:
    """Write a note where a folder is set; return the error message where that fails."""
    folder = environ.get(VARIABLE)
    if not folder:
        return None
    path = Path(folder) / (_BEGUN if isinstance(note, BeginNote) else f"rank-{note.rank}.json")
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(json.dumps(asdict(note)), encoding="ascii")
        temporary.replace(path)
    except OSError as error:
        return f"cannot write {path} ({VARIABLE}): {error.strerror or error}"
    return None


def read_exit_notes(folder: Path, launcher: int) -> tuple[ExitNote, ...]:
    """Return the notes of a launcher's ranks, in the order of ranks. Unreadable notes are ignored."""
    notes = (read_note(path, ExitNote) for path in folder.glob("rank-*.json"))
    own = [note for note in notes if note is not None and note.launcher == launcher]
    return tuple(sorted(own, key=lambda note: note.rank))


def read_begin_note(folder: Path, launcher: int) -> BeginNote | None:
    """Return where the journal is, if rank 0 is on this node and has opened it."""
    note = read_note(folder / _BEGUN, BeginNote)
    return note if note is not None and note.launcher == launcher else None


def read_note(path: Path, kind: type[_Note]) -> _Note | None:
    """Read a dataclass from a file of JSON; None if there is none, or its writer was killed while it wrote."""
    try:
        return read(kind, json.loads(path.read_bytes()), str(path))
    except (OSError, ValueError, JournalError):
        return None
