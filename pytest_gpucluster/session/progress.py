"""How far a long step of a test is: a line now and then, and one for the last step, on the terminal of rank 0 only.

It goes past pytest's capture, so no report holds it.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from typing import Any, Protocol

import pytest

from pytest_gpucluster.text import duration, printable

PLAIN_SECONDS = 10.0
"""From one line to the next, at least."""
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
        now: seconds that only grow.
    """

    def __init__(
        self, write_line: Callable[[str], None], what: str, *, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._write_line, self._what, self._now = write_line, printable(what), now
        self._of = 0
        self._first_step, self._last_step = 0, 0
        self._began = self._shown_at = 0.0

    def __call__(self, step: int, of: int, **figures: Figure) -> None:
        """Say that a step has been taken. The total may change; after the last step, and with a lower one, it
        begins anew."""
        now = self._now()
        if step <= self._last_step or self._last_step >= self._of:
            self._first_step, self._began, self._shown_at = step, now, now
        self._last_step, self._of = step, of
        if step < of and now - self._shown_at < PLAIN_SECONDS:
            return
        self._shown_at = now
        numbers = {name: float(figure() if callable(figure) else figure) for name, figure in figures.items()}
        taken = step - self._first_step
        left_seconds = (now - self._began) / taken * (of - step) if taken > 0 and of > step else None
        self._write_line(f"{self._what}: {describe(step, of, numbers, left_seconds)}")


def progress_of(config: pytest.Config, what: str, *, rank: int) -> ReportProgress:
    """Return what shows the steps of a test in this process: nothing above rank 0, under ``-q``, or in a local
    worker."""
    reporter: Any = config.pluginmanager.get_plugin("terminalreporter")
    if rank != 0 or reporter is None or reporter.verbosity < 0:
        return lambda step, of, **figures: None
    capture = config.pluginmanager.get_plugin("capturemanager")

    def write_line(text: str) -> None:
        with capture.global_and_fixture_disabled() if capture is not None else contextlib.nullcontext():
            reporter.ensure_newline()  # pytest has begun a line with the name of the file
            reporter.write_line(text)
            reporter.flush()

    return Progress(write_line, what)
