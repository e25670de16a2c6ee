"""One srun that is under way: its output, its deadline, its end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from pytest_gpucluster.errors import EnvironmentBroken
from pytest_gpucluster.sweep.outcome import Ended

_TAIL_BYTES = 4096


class Step:
    """A process of srun. It has a session of its own, so that Ctrl-C on the terminal reaches the sweep only."""

    def __init__(
        self, command: Sequence[str], *, environ: Mapping[str, str], log: Path, within_seconds: float, grace: float
    ) -> None:
        """Start it.

        Raises:
            EnvironmentBroken: that is impossible.
        """
        self.log = log
        self.stopped = ""
        self._within, self._grace = within_seconds, grace
        self._started = time.monotonic()
        self._told_to_end: float | None = None
        try:
            with log.open("wb") as output:
                self._process = subprocess.Popen(
                    list(command),
                    env=dict(environ),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
        except OSError as error:
            raise EnvironmentBroken(f"{command[0]} cannot be started: {error.strerror or error}") from None

    def look(self) -> Ended | None:
        """Return how it ended, or None while it runs. At its deadline it is told to end, and after a while made to."""
        code = self._process.poll()
        if code is not None:
            return self._ended(code)
        now = time.monotonic()
        if self._told_to_end is None:
            if now - self._started > self._within:
                self.tell_to_end(f"no answer within {self._within:g} s")
        elif now - self._told_to_end > self._grace:
            self.kill()
            return self._ended(None)
        return None

    def tell_to_end(self, why: str) -> None:
        """Ask srun to end the step: on SIGTERM it ends all tasks.

        Source: https://slurm.schedmd.com/srun.html ("Signals and escape sequences").
        """
        if self._told_to_end is None:
            self.stopped, self._told_to_end = why, time.monotonic()
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.killpg(self._process.pid, signal.SIGTERM)

    def kill(self) -> None:
        """End srun itself, at once. Its tasks may stay: they are the scheduler's to end."""
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _ended(self, code: int | None) -> Ended:
        return Ended(
            exit=code,
            seconds=round(time.monotonic() - self._started, 3),
            stopped=self.stopped,
            log=str(self.log),
            hint=_last_words(self.log),
        )


def _last_words(log: Path) -> str:
    """Return the line of an output that most likely says what went wrong, else its last one.

    torchrun ends with a long table of its own, so an error in front of it tells more.
    """
    try:
        with log.open("rb") as read:
            size = read.seek(0, os.SEEK_END)
            read.seek(max(0, size - 16 * _TAIL_BYTES))
            lines = [line.strip() for line in read.read().decode("utf-8", "backslashreplace").splitlines()]
    except OSError as error:
        return f"its output cannot be read: {error.strerror or error}"
    lines = [line for line in lines if line.strip("=- ")]
    telling = [line for line in lines if line.startswith(("ERROR:", "srun: error:", "slurmstepd: error:", "BROKEN"))]
    return (telling or lines or ["it has printed nothing"])[0 if telling else -1]
