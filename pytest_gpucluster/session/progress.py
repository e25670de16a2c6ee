"""How far a long step of a test is: step, loss, tokens/s and remaining time, on the terminal of rank 0 only.

Where there is a live line (:mod:`pytest_gpucluster.session.status_line`), that shows it. Elsewhere, as in the log of a
batch job, it is a plain line now and then. The last step is a line that stays everywhere. It goes past pytest's
capture, so no report holds it. Of local workers the first one shows it: in the live line of their controller, else as
plain lines on standard error.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from pytest_gpucluster.session.status_line import LIVE, Live, StepFile
from pytest_gpucluster.text import duration, printable

if TYPE_CHECKING:
    import pytest

PLAIN_SECONDS = 10.0
"""At most so often a plain line."""

LIVE_SECONDS = 1.0
"""At most so often the live line: a figure may have to be read from a GPU."""

FIRST_WORKER = "gw0"
"""What pytest-xdist calls its first worker, which is rank 0."""

STEPS = "gpucluster_steps"
"""The key of ``workerinput`` that states where a worker writes how far it is."""

Figure = float | Callable[[], float]
"""A number, or what returns it. It is called only where it is shown: reading a loss from a GPU waits for the GPU."""


class ReportProgress(Protocol):
    """Say how far it is. A benchmark takes one of these, or None."""

    def __call__(self, step: int, of: int, **figures: Figure) -> None: ...


class Screen(Protocol):
    """Where lines appear."""

    @property
    def live(self) -> bool:
        """Whether a line can be written over."""

    def rewrite(self, text: str, *, ends: bool) -> None:
        """Write over the live line; what ends it stays."""

    def line(self, text: str) -> None:
        """Write a line that stays."""


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
        screen: where.
        what: the test.
        now: seconds that only grow.
    """

    def __init__(self, screen: Screen, what: str, *, now: Callable[[], float] = time.monotonic) -> None:
        self._screen, self._what, self._now = screen, printable(what), now
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
            self._shown_at = -math.inf if self._screen.live else now
        self._last_step, self._of = step, of
        every = LIVE_SECONDS if self._screen.live else PLAIN_SECONDS
        if step < of and now - self._shown_at < every:
            return
        self._shown_at = now
        numbers = {name: float(figure() if callable(figure) else figure) for name, figure in figures.items()}
        text = f"{self._what}: {describe(step, of, numbers, self._left_seconds(step, now))}"
        if self._screen.live:
            self._screen.rewrite(text, ends=step >= of)
        else:
            self._screen.line(text)

    def _left_seconds(self, step: int, now: float) -> float | None:
        taken = step - self._first_step
        return (now - self._began) / taken * (self._of - step) if taken > 0 and self._of > step else None


class Terminal:
    """pytest's terminal, past its capture: plain lines."""

    live = False

    def __init__(self, reporter: pytest.TerminalReporter, config: pytest.Config) -> None:
        self._reporter = reporter
        self._capture = config.pluginmanager.get_plugin("capturemanager")

    def rewrite(self, text: str, *, ends: bool) -> None:
        """Never called: nothing here is live."""
        self.line(text)

    def line(self, text: str) -> None:
        """Write a line that stays."""
        with self._capture.global_and_fixture_disabled() if self._capture is not None else nullcontext():
            # pytest has begun a line with the name of the file.
            self._reporter.ensure_newline()
            self._reporter.write_line(text)
            self._reporter.flush()


class LiveTerminal:
    """The live line on pytest's terminal. What ends a test's steps stays, as it does without a live line."""

    live = True

    def __init__(self, live: Live, terminal: Terminal) -> None:
        self._live, self._terminal = live, terminal

    def rewrite(self, text: str, *, ends: bool) -> None:
        """Write over the live line."""
        self._live.rewrite(text, ends=ends)
        if ends:
            self._terminal.line(text)

    def line(self, text: str) -> None:
        """Write a line that stays."""
        self._terminal.line(text)


class StandardError:
    """The standard error of a local worker, past pytest's capture."""

    live = False

    def __init__(self, config: pytest.Config) -> None:
        self._capture = config.pluginmanager.get_plugin("capturemanager")
        self._has_begun = False

    def rewrite(self, text: str, *, ends: bool) -> None:
        """Never called: nothing here is live."""
        self.line(text)

    def line(self, text: str) -> None:
        """Write a line that stays."""
        with self._capture.global_and_fixture_disabled() if self._capture is not None else nullcontext():
            # The controller has begun a line with the outcomes of the tests so far.
            sys.stderr.write(f"{text}\n" if self._has_begun else f"\n{text}\n")
            sys.stderr.flush()
        self._has_begun = True


def silent(step: int, of: int, **figures: Figure) -> None:
    """Show nothing."""


def progress_of(config: pytest.Config, what: str, *, rank: int) -> ReportProgress:
    """Return what shows the steps of a test in this process: nothing above rank 0, under ``-q``, or in a worker but the
    first one."""
    worker = getattr(config, "workerinput", None)
    if worker is not None:
        if worker["workerid"] != FIRST_WORKER or config.get_verbosity() < 0:
            return silent
        return Progress(StepFile(Path(worker[STEPS])) if STEPS in worker else StandardError(config), what)
    reporter = config.pluginmanager.get_plugin("terminalreporter")
    if rank != 0 or reporter is None or reporter.verbosity < 0:
        return silent
    terminal, live = Terminal(reporter, config), config.stash.get(LIVE, None)
    return Progress(terminal if live is None else LiveTerminal(live, terminal), what)
