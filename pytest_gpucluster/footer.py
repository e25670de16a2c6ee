"""Lines below whatever is being written to a terminal, that are gone when more is written.

The cursor stays where the output has left it. To show the lines, room is made below it (IND, which scrolls only where
it must), the place is kept (DECSC), the lines are written, and the place is restored (DECRC). To take them away it is
enough to erase from the cursor on (ED): so nothing must be known of where the cursor is, and neither lines that scroll
nor a window that changes its size can leave remains, or take anything that was written. Source: DEC STD 070 and
XTerm Control Sequences, https://invisible-island.net/xterm/ctlseqs/ctlseqs.html; all of them are of the VT100.

A terminal may take nothing for a while: Ctrl-S has stopped it, or the connection behind it is stuck. Nothing here waits
for it; only what pytest itself writes does, as it does without these lines.
"""

from __future__ import annotations

import os
import re
import select
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

# Here, so that it is not loaded beside a measurement.
from rich.cells import cell_len, set_cell_size

IND, SAVE, RESTORE, ERASE_BELOW = "\x1bD", "\x1b7", "\x1b8", "\x1b[J"
_NO_WRAP, _WRAP, _DIM, _PLAIN, _ERASE_LINE = "\x1b[?7l", "\x1b[?7h", "\x1b[2m", "\x1b[m", "\x1b[2K"
LEAST_COLUMNS, SPARE_ROWS = 20, 4
"""In a smaller window nothing is shown: what pytest writes needs the room."""

_USUAL_SIZE = 80, 24
_LAST_WORDS_SECONDS = 1.0

_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Footer:
    """The lines. Every method may be called from any thread.

    Args:
        descriptor: of the terminal.
        size: returns its columns and rows. Raises OSError when the terminal is gone.
        styled: the lines are dim.
    """

    def __init__(
        self, descriptor: int, *, size: Callable[[int], os.terminal_size] = os.get_terminal_size, styled: bool = True
    ) -> None:
        self.lock = threading.RLock()
        self.is_shown = False
        self._descriptor, self._size, self._styled = descriptor, size, styled
        self._holds = 0
        self._line = ""

    def show(self, lines: Sequence[str]) -> None:
        """Show these lines in place of those that are shown, as much of them as there is room for."""
        with self.lock:
            if self._holds:
                return
            drawn = self._drawn(lines)
            if (drawn or self.is_shown) and self._write(ERASE_BELOW * self.is_shown + drawn):
                self.is_shown = bool(drawn)

    def erase(self) -> None:
        """Take the lines away, if the terminal takes anything now."""
        with self.lock:
            if self.is_shown and self._write(ERASE_BELOW):
                self.is_shown = False

    def hold(self) -> None:
        """Take the lines away, and show none until :meth:`release`: somebody else writes to the terminal."""
        with self.lock:
            self.erase()
            self._holds += 1

    def release(self) -> None:
        """Let lines be shown again."""
        with self.lock:
            self._holds = max(0, self._holds - 1)

    def give_up(self) -> None:
        """Take the lines away for last words, from whatever thread."""
        with self._lock_soon() as is_ours:
            if is_ours:
                self.hold()

    def close(self) -> None:
        """Take the lines away for good, and let go of the terminal."""
        with self._lock_soon() as is_ours:
            if is_ours:
                self.hold()
                if self._descriptor >= 0:
                    os.close(self._descriptor)
                    self._descriptor = -1

    def above(self, file: TextIO) -> Above:
        """Return a file to be written to in place of this one, whose output stays above the lines."""
        return Above(file, self)

    def wrote(self, text: str) -> None:
        """Note what has been written to the terminal, with the lock held."""
        self._line = f"{self._line}{text}".rpartition("\n")[2].rpartition("\r")[2][-4096:]

    @contextmanager
    def _lock_soon(self) -> Iterator[bool]:
        """Take the lock, unless somebody who writes does not come to an end; tell whether it was taken."""
        is_ours = self.lock.acquire(timeout=_LAST_WORDS_SECONDS)
        try:
            yield is_ours
        finally:
            if is_ours:
                self.lock.release()

    def _drawn(self, lines: Sequence[str]) -> str:
        try:
            columns, rows = self._size(self._descriptor)
        except OSError:
            return ""
        if not columns or not rows:  # a terminal that nobody has told its size
            columns, rows = _USUAL_SIZE
        lines = lines[: max(0, rows - SPARE_ROWS)]
        # At the end of a line that is full the next character is on the next line, which DECSC need not remember.
        written = cell_len(_CONTROL.sub("", self._line))
        if not lines or columns < LEAST_COLUMNS or not self._is_ours() or (written and written % columns == 0):
            return ""
        style, plain = (_DIM, _PLAIN) if self._styled else ("", "")
        body = "".join(f"{IND}\r{_ERASE_LINE}{style}{fitted(line, columns - 1)}{plain}" for line in lines)
        return f"{IND * len(lines)}\x1b[{len(lines)}A{SAVE}{_NO_WRAP}{body}{_WRAP}{RESTORE}"

    def _is_ours(self) -> bool:
        """Tell whether this process may write: not while it runs in the background of the terminal's shell."""
        try:
            return os.tcgetpgrp(self._descriptor) == os.getpgrp()
        except OSError:  # not our controlling terminal, as for a rank that a launcher gave a session of its own
            return True

    def _write(self, text: str) -> bool:
        """Write, if the terminal takes anything now; tell whether it did."""
        data = text.encode("utf-8", "replace")
        try:
            if not self._takes():
                return False
            while data:
                data = data[os.write(self._descriptor, data) :]
        except OSError:
            # The terminal is gone: whoever writes to it next is told, and there is nothing to take away.
            self._holds += 1
            self.is_shown = False
            return False
        return True

    def _takes(self) -> bool:
        if self._descriptor < 0:
            return False
        poll = select.poll()
        poll.register(self._descriptor, select.POLLOUT)
        return bool(poll.poll(0))  # also where it is gone, which writing then says


class Above:
    """A file whose output stays above the lines of a footer."""

    def __init__(self, file: TextIO, footer: Footer) -> None:
        self._file, self._footer = file, footer

    def write(self, text: str) -> int:
        """Take the lines away, and write."""
        with self._footer.lock:
            self._footer.erase()
            if self._footer.is_shown:  # it takes nothing now: both wait until it does
                self._file.write(ERASE_BELOW)
                self._footer.is_shown = False
            written = self._file.write(text)
            # At once: what waits in a buffer would be written somewhere else when the lines have been shown again.
            self._file.flush()
            self._footer.wrote(text)
            return written

    def flush(self) -> None:
        """Flush the file itself."""
        self._file.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def fitted(text: str, columns: int) -> str:
    """Return a text cut to so many columns of a terminal, with an ellipsis.

    >>> fitted("step 3 of 100", 8)
    'step 3 …'
    """
    return text if cell_len(text) <= columns else f"{set_cell_size(text, columns - 1)}\N{HORIZONTAL ELLIPSIS}"
