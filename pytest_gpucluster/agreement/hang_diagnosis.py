"""Diagnosis of hangs and crashes: where each rank is, which rank holds up the others, and faulthandler's stacks.

:func:`culprits` names the ranks at fault from the Python stacks and the collectives of all ranks. faulthandler writes
the last stacks of a process to its :class:`FaultFile`, so that other processes on the host can read them once it is
dead. A surviving process removes it.
:func:`fatal_error` and :func:`stack_location` shorten the text of a process that died or holds the GIL. Both are pure.
"""

from __future__ import annotations

import contextlib
import faulthandler
import itertools
import os
import re
import secrets
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from pytest_gpucluster.device.process_group import flight_records
from pytest_gpucluster.metrics.stats import grouped
from pytest_gpucluster.text import rank_ranges

_UNRECORDED = "unrecorded"
_SHOWN_OPERATIONS = 5
_SHOWN_OTHERS = 3
_OWN_FILES = ("/pytest_gpucluster/session/run.py", "/pytest_gpucluster/session/shutdown.py", "/_pytest/", "/pluggy/")


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One collective as the flight recorder saw it. ``sequence`` counts the collectives of its group."""

    group: str
    sequence: int
    name: str
    pending: bool
    since_ns: int | None = field(default=None, compare=False)
    """When its rank has entered it, in ns by that host's wall clock; None where no recorder has it."""


@dataclass(frozen=True, kw_only=True)
class Where:
    """Where a rank is: its main thread's Python stack and its last collectives.

    ``waits_seconds`` is how long it has been in the oldest collective that it has not left, None where it waits in none
    or the flight recorder does not have it. ``computes`` is known in a rehearsal on cpu only.
    """

    stack: str
    operations: tuple[Operation, ...] = ()
    computes: bool = False
    waits_seconds: float | None = None

    @property
    def pending(self) -> list[Operation]:
        """The collectives that it has entered and not left."""
        return [operation for operation in self.operations if operation.pending]

    def entered(self, group: str) -> int:
        """Return the number of the last collective that it entered in ``group``."""
        return max((o.sequence for o in self.operations if o.group == group), default=0)

    def describe(self) -> str:
        """Return the collectives and the stack as text for a report."""
        lines = [
            f"  {o.name} #{o.sequence} in group {o.group}: {'entered, not finished' if o.pending else 'finished'}"
            for o in self.operations[-_SHOWN_OPERATIONS:]
        ]
        collectives = "last collectives:\n" + "\n".join(lines) if lines else "no collective was entered"
        return f"{collectives}\nstack of the main thread:\n{self.stack}"


def main_thread_stack() -> str:
    """Return the Python stack of the main thread, from the test downwards, callable from any thread."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None:
        return "  (no Python frame)"
    frames = traceback.extract_stack(frame)
    start = max(
        (i + 1 for i, entry in enumerate(frames) if any(part in entry.filename for part in _OWN_FILES)),
        default=0,
    )
    return "".join(traceback.format_list(frames[start:] or frames)).rstrip()


MAKING_GROUP = Operation(group="in the making", sequence=1, name="the making of a process group", pending=True)
"""The making of a process group as an operation: all ranks must enter it, like a collective."""


def recorded_operations(since_ns: int) -> list[Operation]:
    """Return this process's collectives since a wall-clock time, from torch's flight recorders.

    Older entries are left out: one that was released in an earlier test stays unfinished in the recorder for ever.
    """
    return [
        Operation(
            group=_group_of(entry),
            sequence=int(entry["collective_seq_id"] or entry.get("p2p_seq_id") or 0),
            name=entry["profiling_name"].partition(":")[2] or entry["profiling_name"],
            pending=not entry["retired"] and entry["state"] != "completed",
            since_ns=entry["time_created_ns"],
        )
        for entry in flight_records()
        if entry["time_created_ns"] >= since_ns
    ]


def _group_of(entry: Mapping[str, Any]) -> str:
    """Return a group's description; its name where it has none, for then all such groups are described alike.

    Source: torch/distributed/distributed_c10d.py, _new_process_group_helper: it is "undefined" where none was given.
    """
    words: list[str] = [word for word in entry["process_group"] or () if word]
    described = [word for word in words[1:] if word != "undefined"]
    return (described or words or ["?"])[0]


def waits_seconds(operations: Sequence[Operation], now_ns: int) -> float | None:
    """Return how long a rank has been in the oldest collective that it has not left; None if in none, or not known.

    Between two collectives a rank is for a moment in one that the recorder does not have yet: then it counts since the
    newest that the recorder has.
    """
    pending = [o for o in operations if o.pending]
    recorded = [o.since_ns for o in operations if o.since_ns is not None]
    since = [o.since_ns for o in pending if o.since_ns is not None] or (recorded[-1:] if pending else [])
    return (now_ns - min(since)) / 1e9 if since else None


def unrecorded_operations() -> list[Operation]:
    """Return what the main thread waits in by its stack, where no recorder knows of it: gloo's point-to-point, say, or
    the exchange of simulated ranks."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    names = [
        entry.name
        for entry in traceback.extract_stack(frame)[-8:]
        if "/torch/distributed/" in entry.filename or (entry.name == "rows" and "/simulation/" in entry.filename)
        if not entry.name.startswith(("wrapper", "_"))
    ]
    return [Operation(group=_UNRECORDED, sequence=1, name=names[-1], pending=True)] if names else []


def too_slow(
    wheres: Mapping[int, Where], silent: Mapping[int, str], *, missing: Sequence[int], deadline_seconds: float
) -> str:
    """Return why a phase that did not end in time is only slow, or nothing where it hangs, or may hang.

    It is slow if each rank that has not finished answers, and computes, or waits in a collective that was entered
    within the last quarter of the time; and one of them computes. A rank that waits in a collective for longer, in what
    no recorder knows, in another collective than its peers, or in one that a rank has finished without, means a hang,
    whatever the others do.

    Args:
        wheres: every rank that answered.
        silent: rank -> state of its process, for those that did not answer.
        missing: the ranks that have not finished the phase.
        deadline_seconds: how long the phase may have taken.
    """
    if silent or not missing or not all(rank in wheres for rank in missing):
        return ""
    for where in (wheres[rank] for rank in missing):
        if where.pending and (where.waits_seconds is None or where.waits_seconds > deadline_seconds / 4):
            return ""
        if not where.pending and not where.computes:
            return ""
    pending = [operation for rank in missing for operation in wheres[rank].pending]
    finished = [where for rank, where in wheres.items() if rank not in missing]
    if not any(wheres[rank].computes for rank in missing) or _contradict(pending, finished):
        return ""
    entered = max((operation.sequence for rank in missing for operation in wheres[rank].operations), default=0)
    going = f" and its collectives go on ({entered} entered)" if entered else ""
    return f"not finished within {deadline_seconds:g} s, while it computes{going}"


def _contradict(pending: Sequence[Operation], finished: Sequence[Where]) -> bool:
    """Return whether waiting is in vain: two of one number in a group differ, or a member finished without one."""
    names: dict[tuple[str, int], str] = {}
    recorded = [o for o in pending if o.group != _UNRECORDED]
    if any(names.setdefault((o.group, o.sequence), o.name) != o.name for o in recorded):
        return True
    return any(0 < where.entered(o.group) < o.sequence for where in finished for o in recorded)


@dataclass(frozen=True, kw_only=True)
class Culprit:
    """A rank that holds the others up, and why we say so."""

    message: str
    text: str


def silent_culprit(state: str) -> Culprit:
    """Describe a rank that does not answer; ``state`` is that of its process, as seen from outside."""
    return Culprit(message=f"does not answer ({state})", text=f"The process does not answer: {state}.")


def culprits(wheres: Mapping[int, Where], silent: Mapping[int, str], *, missing: Sequence[int]) -> dict[int, Culprit]:
    """Return the culprits of a phase that did not end in time.

    Args:
        wheres: every rank that answered, also those that have long finished the phase.
        silent: rank -> state of its process, for those that did not answer.
        missing: the ranks that have not finished the phase.

    A rank that does not even answer is the culprit; else one that is stuck outside of any collective; else one that
    finished without, or entered another collective than, what most others of its group wait in, or of as many the one
    that is behind; else, across groups, one that waits elsewhere than most. Where it cannot be decided which rank is
    right, as of two ranks in two collectives, the ranks of both are named.
    """
    found = {rank: silent_culprit(state) for rank, state in silent.items() if rank in missing}
    stuck = {rank: where for rank, where in wheres.items() if rank in missing}
    for rank, where in stuck.items():
        if not where.pending:
            found[rank] = Culprit(message=f"hangs {_place(where.stack)}", text=where.describe())
    if found or not stuck:
        return found
    return _left_behind(wheres, stuck)


def _left_behind(wheres: Mapping[int, Where], stuck: Mapping[int, Where]) -> dict[int, Culprit]:
    """Blame first who is wrong by the count of its own group: who waits in another group may only wait for that one."""
    waits = grouped((where.pending[-1], rank) for rank, where in stuck.items())
    right: dict[str, list[Operation]] = {}
    for group, operations in grouped((operation.group, operation) for operation in waits).items():
        most = _most_waited(operations, waits)
        furthest = max(o.sequence for o in most)  # no rank is ahead of it
        right[group] = [o for o in most if o.sequence == furthest]
    messages: dict[int, str] = {}
    for operation, ranks in waits.items():
        others = _others(operation, right[operation.group], waits)
        if others:
            messages |= dict.fromkeys(ranks, f"waits in {operation.name} #{operation.sequence}, while {others}")
    everywhere = [operation for operations in right.values() for operation in operations]
    for rank in wheres.keys() - stuck.keys():
        # It is a member of the groups that it has entered before; if it has entered none, it may be one of each.
        lacks = [o for o in everywhere if wheres[rank].entered(o.group) < o.sequence]
        lacks = [o for o in lacks if wheres[rank].entered(o.group)] or lacks
        if lacks:
            missing = [f"{_describe(o)}, where {_waiters(o, waits)}" for o in lacks[:_SHOWN_OTHERS]]
            messages[rank] = f"finished without entering {_join(missing, of=len(lacks))}"
    if not messages:
        most = _most_waited(everywhere, waits)
        for operation, ranks in waits.items():
            others = _others(operation, most, waits)
            if others:
                messages |= dict.fromkeys(ranks, f"waits in {_describe(operation)}, while {others}")
    return {rank: Culprit(message=messages[rank], text=wheres[rank].describe()) for rank in sorted(messages)}


def _others(operation: Operation, right: Sequence[Operation], waits: Mapping[Operation, Sequence[int]]) -> str:
    """Describe the ranks that wait in what should have been entered in place of this; empty if none does."""
    others = list(itertools.islice((o for o in right if o != operation), _SHOWN_OTHERS))
    waiting = [f"{_waiters(o, waits)} in {_describe(o)}" for o in others]
    return _join(waiting, of=len(right) - (operation in right)) if waiting else ""


def _most_waited(operations: Sequence[Operation], waits: Mapping[Operation, Sequence[int]]) -> list[Operation]:
    """Return where most ranks wait, and all should: several, where as many ranks wait in each."""
    most = max(len(waits[o]) for o in operations)
    return [o for o in operations if len(waits[o]) == most]


def _join(parts: Sequence[str], *, of: int) -> str:
    return " and ".join([*parts, *([f"{of - len(parts)} more"] if of > len(parts) else [])])


def _waiters(operation: Operation, waits: Mapping[Operation, Sequence[int]]) -> str:
    ranks = waits[operation]
    return f"{rank_ranges(ranks)} {'waits' if len(ranks) == 1 else 'wait'}"


def _describe(operation: Operation) -> str:
    return f"{operation.name} #{operation.sequence} of group {operation.group}"


def _frames(stack: str) -> list[tuple[str, str]]:
    """Return path, and "file:line in function", of each frame that Python's traceback or faulthandler has written."""
    found = re.findall(r'File "([^"]*)", line (\d+),? in (.*)', stack)
    return [(path, f"{path.rpartition('/')[2]}:{number} in {function}") for path, number, function in found]


def _place(stack: str) -> str:
    """Return "at file:line in function" of the innermost frame, of those outside installed packages if there is one."""
    frames = _frames(stack)
    own = [place for path, place in frames if "/site-packages/" not in path and "/lib/python" not in path]
    return f"at {(own or [place for _, place in frames])[-1]}" if frames else "outside of any collective"


_PREFIX = "gpucluster-fault-"


class FaultFile:
    """The file of this process, at ``path``. It is removed at an orderly end."""

    def __init__(self) -> None:
        # Numbers of processes come again, also for other users: a file that somebody left must not be in the way.
        name = f"{_PREFIX}{os.getpid()}-{secrets.token_hex(4)}.txt"
        self.path = Path(tempfile.gettempdir()) / name
        self._file: IO[str] | None = None

    def open(self) -> IO[str]:
        """Let faulthandler write here, and return the open file."""
        if self._file is None:
            self._file = open(self.path, "x", encoding="utf-8")  # noqa: SIM115  # faulthandler writes until the end
            faulthandler.enable(self._file)
        return self._file

    def close(self) -> None:
        """Stop faulthandler, and remove the file."""
        if self._file is not None:
            faulthandler.disable()
            self._file.close()
            self._file = None
            self.path.unlink(missing_ok=True)


def remove_left(path: str) -> None:
    """Remove the file of a process of this host that can do so no more. It may be gone already."""
    left = Path(path)
    if left.name.startswith(_PREFIX):
        with contextlib.suppress(OSError):  # of another user, or on a file system that is gone: it does no harm there
            left.unlink(missing_ok=True)


def fatal_error(text: str) -> str:
    """Return the line that names the signal, such as "Fatal Python error: Segmentation fault", or ""."""
    found = re.findall(r"^Fatal Python error: .*", text, re.MULTILINE)
    return found[-1].strip() if found else ""


def stack_location(text: str) -> str:
    """Return "file:line in function" of the main thread in the last dump of stacks, or "".

    faulthandler lists the main thread last, and each thread with its innermost frame first.
    """
    frames = _frames(text.rpartition("most recent call first):")[2])
    return frames[0][1] if frames else ""
