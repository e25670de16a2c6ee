"""Which rank failed before the roll call: a note of each rank of a node, which rank 0 reads when the start breaks.

Until the roll call no rank knows another one, and torchrun answers the first failure with SIGTERM to all other ranks.
So each rank keeps a note next to its error file, in a folder that torchrun makes for each rank of a node. A rank that
has exited and had noted neither SIGTERM nor the loss of rank 0 before is a culprit. Without torchrun's folder there are
no notes.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from pytest_gpucluster.agreement.liveness import start_time
from pytest_gpucluster.files import atomic_write
from pytest_gpucluster.text import first_line

if TYPE_CHECKING:
    import pytest

START = "gpucluster-start"
"""The name by which pytest's plugin manager knows the :class:`Start` of this process."""
_FILE_NAME = "gpucluster-start.json"
_RANK_0_SECONDS = 5.0
_LOOK_SECONDS = 0.02
Report = Callable[[str, str], None]
"""Records the failure of a start: its message in one line, and the whole text. One rank only."""
LOST = "rank lost"
"""The name of the problem in reports."""
JOINING = "joining the run"
"""The phase from which on rank 0 has a recorder, which outlives it."""


@dataclass(frozen=True, kw_only=True)
class StartNote:
    """A rank before the roll call.

    Attributes:
        rank, host, pid: this process.
        started: when it started, in clock ticks since boot: another process with its number has another time.
        phase: what it does.
        error, text: why it failed, in one line and with the traceback; "" if it has not.
        secondary: it ends because of another rank: it was sent SIGTERM, or found rank 0 lost.
    """

    rank: int
    host: str
    pid: int
    started: int | None
    phase: str = "loading conftest files"
    error: str = ""
    text: str = ""
    secondary: bool = False

    def failure(self) -> str:
        """Return in one line how this rank failed; "" if it has not, as far as is known."""
        if self.error:
            return f"rank {self.rank} ({self.host}) failed while {self.phase}: {self.error}"
        if self.secondary or start_time(self.pid) == self.started:
            return ""
        return (
            f"rank {self.rank} ({self.host}, pid {self.pid}) ended without a message (killed, or ended by os._exit) "
            f"while {self.phase}"
        )


class Start:
    """This rank until the roll call. pytest's main thread only; also a plugin, which hears of internal errors.

    Args:
        file: where the note is kept.
        note: of this rank.
        report: for rank 0, until the run itself can record a failure.
    """

    def __init__(self, file: Path, note: StartNote, report: Report) -> None:
        self.report = report
        self._file = file
        self._note = note
        self.is_over = False
        """The run itself watches from now on: SIGTERM is what it was before."""
        self.update()
        signal.signal(signal.SIGTERM, self._terminated)

    def failed(self, error: BaseException) -> None:
        """Note why this rank fails. Rank 0 reports it; where that has ended, the first rank of its node that lives."""
        if self.is_over or self._note.error or self._note.secondary:
            return
        kind = type(error).__name__
        message = first_line(str(error)) or kind
        message = message if ": " in message else f"{kind}: {message}"  # pytest's own exceptions name the cause already
        self.update(error=message, text="".join(traceback.format_exception(error)))
        # Rank 0, if it is on this node, must have come as far as to handle SIGTERM: else there would be no report.
        until = time.monotonic() + _RANK_0_SECONDS
        is_here = self._file.parent.name == str(self._note.rank)  # local rank and rank are the same on its node
        while is_here and time.monotonic() < until and not (self._file.parent.parent / "0" / _FILE_NAME).exists():
            time.sleep(_LOOK_SECONDS)
        self._report()

    def pytest_internalerror(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        self.failed(excinfo.value)

    pytest_keyboard_interrupt = pytest_internalerror

    def failures(self) -> tuple[str, str]:
        """Return which ranks of this node have failed by now: in one line, and with tracebacks; "" if none has.

        Where a rank has an error to show, those that ended without one are left out: a library may have taken SIGTERM
        from their notes.
        """
        notes = self._notes()
        failed = [note for note in notes if note.error] or [note for note in notes if note.failure()]
        lines = [note.failure() for note in failed]
        return first_line("; ".join(lines)), "\n\n".join([*lines, *(note.text for note in failed if note.text)])

    def rank_0_is_lost(self) -> bool:
        """Return whether rank 0, on this node, has ended before it had a recorder, and without an error of its own.

        The first rank of the node that lives reports it then. What this rank fails with afterwards is a consequence.
        """
        notes = self._notes()
        lost = bool(notes) and notes[0].rank == 0 and notes[0].phase != JOINING and not notes[0].error
        if not lost or not notes[0].failure():
            return False
        first = next((note.rank for note in notes if not note.failure()), None)
        if not self._note.error:
            self.update(secondary=True)
        if first == self._note.rank:
            self._report_failures()
        return True

    def _notes(self) -> list[StartNote]:
        notes = filter(None, map(_read, self._file.parent.parent.glob(f"*/{_FILE_NAME}")))
        return sorted(notes, key=lambda note: note.rank)

    def _report(self) -> None:
        if self._note.rank == 0:
            self._report_failures()
        else:
            self.rank_0_is_lost()

    def _report_failures(self) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # until the report is written
        message, text = self.failures()
        message = message or f"ended by SIGTERM on {self._note.host} while {self._note.phase}"
        self.report(message, text or message)

    def _terminated(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() == self._note.pid and not self.is_over:
            self.update(secondary=True)
            self._report()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)

    def update(self, **changes: Any) -> None:
        """Change the note: what this rank does now, or how it fails."""
        self._note = replace(self._note, **changes)
        try:
            atomic_write(self._file, json.dumps(asdict(self._note)))
        except OSError:
            self.is_over = True  # a full disk: this rank goes on without a note, as where there is no torchrun


@contextlib.contextmanager
def begun(config: pytest.Config) -> Iterator[None]:
    """Begin a :class:`Start` before conftest files are loaded, which happens inside.

    Only where torchrun has started this process as a rank, and for the first time.
    """
    file = _file_of_this_rank()
    if file is None:
        yield
        return
    host = os.environ.get("GPUCLUSTER_HOSTNAME") or socket.gethostname()
    rank, pid = int(os.environ["RANK"]), os.getpid()

    def report(message: str, text: str) -> None:
        from pytest_gpucluster.agreement.exchange import AbortReason
        from pytest_gpucluster.journal import verdict
        from pytest_gpucluster.journal.verdict import ExitNote, write_note
        from pytest_gpucluster.session import rejected_run

        reason = AbortReason(name=LOST, message=message, text=text, exit=11)
        rejected_run.replace_report(config.known_args_namespace, reason, only_earlier=False)
        last = ExitNote(
            rank=rank,
            local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
            launcher=os.getppid(),
            word=verdict.BROKEN,
            exit=11,
            reason=message,
            kind="",
            host=host,
        )
        if wrong := write_note(os.environ, last):
            print(f"ERROR: {wrong}", file=sys.stderr)

    start = Start(file, StartNote(rank=rank, host=host, pid=pid, started=start_time(pid)), report)
    config.pluginmanager.register(start, START)
    try:
        yield
    except BaseException as error:
        start.failed(error)
        raise
    start.update(phase="configuring pytest")


def _file_of_this_rank() -> Path | None:
    error_file, rank = os.environ.get("TORCHELASTIC_ERROR_FILE"), os.environ.get("RANK", "")
    if not error_file or not rank.isdecimal() or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0":
        return None
    file = Path(error_file).with_name(_FILE_NAME)
    # Where there is one, this is another process of the rank, such as a pytest that a test has started.
    return file if file.parent.is_dir() and not file.exists() else None


def _read(file: Path) -> StartNote | None:
    try:
        fields: dict[str, Any] = json.loads(file.read_bytes())
        return StartNote(**fields)
    except (OSError, ValueError, TypeError):
        return None  # not written by this version
