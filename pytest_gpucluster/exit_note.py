"""How a rank ends: with the agreed exit code, and with a note of its verdict, which torchrun does not pass on.

torchrun ends with 1 for every code but 0, and does so on every node, also where the reports are not. So each rank
leaves a small file in a folder that the starter has named, and the starter reads them when the launcher has ended.
"""

from __future__ import annotations

import atexit
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

VARIABLE = "GPUCLUSTER_EXIT_NOTES"
"""Names the folder. Not set: nobody wants notes."""
_BEGUN = "begun.json"
_kept: dict[int, int] = {}
"""The code that a process is to end with, by its number: a fork of it ends as it likes."""


@dataclass(frozen=True, kw_only=True)
class ExitNote:
    """The end of one rank.

    Attributes:
        rank, local_world_size: this one, and how many there are on its node.
        launcher: process number of its parent. A job inside of a test may write to the same folder, and does not count.
        word, exit, reason: the verdict that all ranks agreed on, or what this one knows of it.
        rehearsal: it says nothing about hardware.
        host: of rank 0, where the reports are.
        directory: of the run there; "" where this rank was not told.
    """

    rank: int
    local_world_size: int
    launcher: int
    word: str
    exit: int
    reason: str
    rehearsal: bool
    host: str = ""
    directory: str = ""


@dataclass(frozen=True, kw_only=True)
class BeginNote:
    """What rank 0 says when the record is open: where it is, and which process keeps it."""

    launcher: int
    directory: str
    recorder: int


def guard() -> None:
    """Let no atexit handler end this process with another code than the agreed one, from :func:`keep_exit_code` on.

    A function takes the place of ``os._exit``, so it must be there before a conftest or a test can take hold of that.
    """
    leave_now = os._exit
    if getattr(leave_now, "kept", None) is _kept:
        return

    def leave_with(status: int) -> NoReturn:
        leave_now(_kept.get(os.getpid(), status))

    leave_with.kept = _kept  # type: ignore[attr-defined]
    os._exit = leave_with


def keep_exit_code(code: int) -> None:
    """Keep the exit code of this process, once it ends by itself.

    Handlers run in the reverse order: this one, the last one registered, before those of tests and plugins.
    Source: Python, atexit.
    """
    atexit.register(_kept.__setitem__, os.getpid(), code)


def leave(environ: Mapping[str, str], note: ExitNote) -> str | None:
    """Leave the note of a rank, if somebody wants it; return what is wrong if that fails."""
    return _write(environ, f"rank-{note.rank}.json", asdict(note))


def begin(environ: Mapping[str, str], note: BeginNote) -> str | None:
    """Say where the record is, if somebody wants to know; return what is wrong if that fails."""
    return _write(environ, _BEGUN, asdict(note))


def _write(environ: Mapping[str, str], name: str, note: Mapping[str, Any]) -> str | None:
    folder = environ.get(VARIABLE)
    if not folder:
        return None
    path = Path(folder) / name
    beside = path.with_name(f".{name}.{os.getpid()}")
    try:
        beside.write_text(json.dumps(note), encoding="ascii")
        beside.replace(path)
    except OSError as error:
        return f"cannot write {path} ({VARIABLE}): {error.strerror or error}"
    return None


def read(folder: Path, launcher: int) -> tuple[ExitNote, ...]:
    """Return the notes of a launcher's ranks, in the order of ranks. What is no such note is as good as none."""
    found = []
    for path in folder.glob("rank-*.json"):
        told = _read(path, ExitNote)
        if told is not None and told.launcher == launcher:
            found.append(told)
    return tuple(sorted(found, key=lambda note: note.rank))


def read_begin(folder: Path, launcher: int) -> BeginNote | None:
    """Return where the record is, if rank 0 is on this node and has come that far."""
    told = _read(folder / _BEGUN, BeginNote)
    return told if told is not None and told.launcher == launcher else None


def _read(path: Path, kind: type[Any]) -> Any:
    try:
        told = json.loads(path.read_bytes())
        fields = {name: told[name] for name in kind.__dataclass_fields__}
    except (OSError, ValueError, KeyError, TypeError):
        return None  # a rank that was killed while it wrote, or no rank at all: it has left nothing
    wanted = {name: type_.type for name, type_ in kind.__dataclass_fields__.items()}
    is_right = all(type(value).__name__ == wanted[name] for name, value in fields.items())
    return kind(**fields) if is_right else None
