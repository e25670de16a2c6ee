"""How far a long step of a test is, on the terminal of rank 0 only: a live line, or else a plain line now and then.

The last step is a line that stays everywhere. It goes past pytest's capture, so no report holds it. Of local workers
the first one shows plain lines on standard error.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol, TextIO

import pytest
from _pytest.terminal import TerminalReporter  # pytest 8.2 does not have it under its own name

from pytest_gpucluster.text import duration, one_line, printable, shortened

if TYPE_CHECKING:
    from pytest_gpucluster.session.run import Run

PLAIN_SECONDS = 10.0
"""From one plain line to the next, at least."""
LIVE_SECONDS = 1.0
"""The same of the live line, for a figure may have to be read from a GPU."""
FIRST_WORKER = "gw0"
"""What pytest-xdist calls its first worker, which is rank 0."""
Figure = float | Callable[[], float]
"""A number, or what returns it. It is called only where it is shown: reading a loss from a GPU waits for the GPU."""


class ReportProgress(Protocol):
    """Say how far it is. A benchmark takes one of these, or None."""

    def __call__(self, step: int, of: int, **figures: Figure) -> None: ...


def describe(step: int, of: int, figures: dict[str, float], left_seconds: float | None) -> str:
    """Put it in words. A figure whose name ends in ``_per_second`` is a rate, any other has its name before it.

    >>> describe(3, 100, {"loss": 1.23456, "tokens_per_second": 8573.4}, 754.0)
    'step 3 of 100, loss 1.235, 8,573 tokens/s, 12:34 left'
    """
    parts = [f"step {step} of {of}"]
    for name, value in figures.items():
        what = name.removesuffix("_per_second")
        shown = f"{value:,.0f}" if abs(value) >= 1000 and math.isfinite(value) else f"{value:.4g}"
        words = what.replace("_", " ")
        parts.append(f"{words} {shown}" if what == name else f"{shown} {words}/s")
    if left_seconds is not None:
        parts.append(f"{duration(left_seconds)} left")
    return ", ".join(parts)


class Progress:
    """Shows the steps of one test, as often as can be read.

    Args:
        write_line: prints a line that stays.
        what: the test.
        live: the live line, where there is one.
        now: seconds that only grow.
    """

    def __init__(
        self,
        write_line: Callable[[str], None],
        what: str,
        *,
        live: StatusLine | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._write_line, self._what, self._live, self._now = write_line, printable(what), live, now
        self._of = 0
        self._first_step, self._last_step = 0, 0
        self._began = self._shown_at = 0.0

    def __call__(self, step: int, of: int, **figures: Figure) -> None:
        """Say that a step has been taken. The total may change; after the last step, and with a lower one, it
        begins anew."""
        now = self._now()
        if step <= self._last_step or self._last_step >= self._of:
            self._first_step, self._began = step, now
            # A plain line has something to show after a while only; a live one shows at once that it goes on.
            self._shown_at = -math.inf if self._live else now
        self._last_step, self._of = step, of
        if step < of and now - self._shown_at < (LIVE_SECONDS if self._live else PLAIN_SECONDS):
            return
        self._shown_at = now
        numbers = {name: float(figure() if callable(figure) else figure) for name, figure in figures.items()}
        text = describe(step, of, numbers, self._left_seconds(step, now))
        if self._live is not None:
            self._live.step = "" if step >= of else text
        if self._live is None or step >= of:
            self._write_line(f"{self._what}: {text}")

    def _left_seconds(self, step: int, now: float) -> float | None:
        taken = step - self._first_step
        return (now - self._began) / taken * (self._of - step) if taken > 0 and self._of > step else None


def silent(step: int, of: int, **figures: Figure) -> None:
    """Show nothing."""


def progress_of(config: pytest.Config, what: str, *, rank: int) -> ReportProgress:
    """Return what shows the steps of a test in this process: nothing above rank 0, under ``-q``, or in a worker but the
    first one."""
    worker = getattr(config, "workerinput", None)
    reporter: Any = config.pluginmanager.get_plugin("terminalreporter")
    if worker is not None:
        is_shown = worker["workerid"] == FIRST_WORKER and config.get_verbosity() >= 0
    else:
        is_shown = rank == 0 and reporter is not None and reporter.verbosity >= 0
    if not is_shown:
        return silent
    capture = config.pluginmanager.get_plugin("capturemanager")

    def write_line(text: str) -> None:
        with capture.global_and_fixture_disabled() if capture is not None else contextlib.nullcontext():
            if worker is not None:  # the controller has begun a line with the outcomes of the tests so far
                print(f"\n{text}", file=sys.stderr, flush=True)
            else:  # pytest has begun a line with the name of the file
                reporter.ensure_newline()
                reporter.write_line(text)
                reporter.flush()

    return Progress(write_line, what, live=config.stash.get(LIVE, None) if worker is None else None)


INDEX, SAVE, RESTORE, ERASE_BELOW = "\x1bD", "\x1b7", "\x1b8", "\x1b[J"
_NO_WRAP, _WRAP, _DIM, _PLAIN, _ERASE_LINE = "\x1b[?7l", "\x1b[?7h", "\x1b[2m", "\x1b[m", "\x1b[2K"
_LEAST_COLUMNS, _LEAST_ROWS = 20, 5
"""In a smaller window nothing is shown: what pytest writes needs the room."""
_TICK_SECONDS = 1.0
_SOON_SECONDS = 0.2
"""After something was written, so that a line which follows at once does not flicker."""
_LAST_WORDS_SECONDS = 1.0
_NAME_CHARACTERS = 40
"""A longer name would leave no room for the state of the test."""


class StatusLine:
    """A line below pytest's output: the test that runs, its step and its time. It leaves nothing on the terminal.

    The cursor stays where the output has left it. To show the line, room is made below it (IND, which scrolls only
    where it must), the place is kept (DECSC), the line is written, and the place is restored (DECRC). To take it away
    it is enough to erase from the cursor on (ED). Source: XTerm Control Sequences,
    https://invisible-island.net/xterm/ctlseqs/ctlseqs.html; all of them are of the VT100.

    It stands in place of the file of pytest's terminal writer, and erases the line before anything is written. A thread
    draws it. It is also a plugin, which learns of the tests.

    Args:
        writer: pytest's, on a terminal.
        size: returns the columns and rows of a descriptor's terminal.
        now: seconds that only grow.

    Raises:
        OSError: there are no more descriptors.
    """

    def __init__(
        self,
        writer: Any,
        *,
        size: Callable[[int], os.terminal_size] = os.get_terminal_size,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.step = ""
        """How far the test is; "" where it has not reported any step."""
        self._writer, self._size, self._now = writer, size, now
        self._file: TextIO = writer._file
        # While a test runs, pytest's capture has another file in place of the terminal's descriptor.
        self._descriptor = os.dup(self._file.fileno())
        self._lock = threading.RLock()
        self._test, self._began = "", 0.0
        self._is_shown = False
        self._stop = threading.Event()
        writer._file = self
        self._thread = threading.Thread(target=self._draw, name="gpucluster-live", daemon=True)

    def write(self, text: str) -> int:
        """Take the line away, and write."""
        with self._lock:
            self._erase()
            written = self._file.write(text)
            # At once: what waits in a buffer would be written somewhere else when the line has been shown again.
            self._file.flush()
            return written

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def start(self) -> None:
        """Draw from now on."""
        with contextlib.suppress(RuntimeError):  # no more threads here: the run goes on without the line
            self._thread.start()

    def close(self) -> None:
        """Take the line away for good, from whatever thread; do not wait for a terminal that accepts nothing."""
        self._stop.set()
        self._writer._file = self._file
        if self._lock.acquire(timeout=_LAST_WORDS_SECONDS):
            try:
                self._erase()
                if self._descriptor >= 0:
                    os.close(self._descriptor)
                    self._descriptor = -1
            finally:
                self._lock.release()

    def text(self) -> str:
        """Return what is to be shown now; "" between two tests."""
        test, step = self._test, self.step
        taken = f"{duration(self._now() - self._began)} so far"
        return f"{one_line(test, _NAME_CHARACTERS)}: {f'{step} ({taken})' if step else taken}" if test else ""

    def show(self) -> None:
        """Draw the line, if there is room for it."""
        with self._lock:
            columns, rows = self._size(self._descriptor)
            # After a full line the cursor waits at its end, which DECSC need not remember.
            written = self._writer.width_of_current_line
            is_full = written > 0 and written % max(1, columns) == 0
            self._erase()
            text = self.text()
            if text and not is_full and not self._stop.is_set() and columns >= _LEAST_COLUMNS and rows >= _LEAST_ROWS:
                line = f"{INDEX}\r{_ERASE_LINE}{_DIM}{shortened(text, columns - 1)}{_PLAIN}"
                self._put(f"{INDEX}\x1b[1A{SAVE}{_NO_WRAP}{line}{_WRAP}{RESTORE}")
                self._is_shown = True

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Show the test."""
        self.step, self._began = "", self._now()
        self._test = printable(nodeid.rpartition("::")[2])

    def pytest_runtest_logfinish(self) -> None:
        """Show none."""
        self._test = ""
        with self._lock:
            self._erase()

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self) -> None:
        """Nothing is shown while the verdict is found and printed."""
        self.close()

    def pytest_unconfigure(self) -> None:
        """Also where the session has not come to its end."""
        self.close()

    def _erase(self) -> None:
        if self._is_shown:
            self._put(ERASE_BELOW)
            self._is_shown = False

    def _put(self, text: str) -> None:
        with contextlib.suppress(OSError):  # the terminal is gone: pytest's next line gets the error
            os.write(self._descriptor, text.encode("utf-8", "replace"))

    def _draw(self) -> None:
        while not self._stop.wait(_TICK_SECONDS if self._is_shown else _SOON_SECONDS):
            try:
                self.show()
            except OSError:  # the terminal is gone
                return


LIVE = pytest.StashKey[StatusLine]()


def begin_live(config: pytest.Config, run: Run) -> None:
    """Show the live line, if this process is rank 0 and its terminal is fit for it.

    Uncaptured output of tests would be written over it, as would a debugger's.
    """
    reporter: Any = config.pluginmanager.get_plugin("terminalreporter")
    option, environ = config.option, run.environ
    is_fit = (
        run.rank == 0
        and run.has_joined
        and type(reporter) is TerminalReporter
        and reporter.isatty
        and reporter.verbosity >= 0
        and environ.get("TERM", "dumb") not in ("", "dumb")
        and environ.get("CI", "").lower() in ("", "0", "false")
        and getattr(option, "capture", "no") == "fd"
        and not (getattr(option, "usepdb", False) or getattr(option, "trace", False))
    )
    if not is_fit:
        return
    with contextlib.suppress(OSError):  # the run goes on without the line
        live = config.stash[LIVE] = StatusLine(reporter._tw)
        run.clear_terminal = live.close
        config.pluginmanager.register(live, "gpucluster-live")
        live.start()
