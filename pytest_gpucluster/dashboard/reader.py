"""The reader process (:mod:`reader_process`), for the one that has started it: what it has said, never waited for.

Asking NVML in a process of its own has two reasons: a driver that hangs hangs there, and a measuring process never
shares an interpreter with the questions.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

from pytest_gpucluster.launch import detached_process

COMMAND: tuple[str, ...] = (sys.executable, "-m", "pytest_gpucluster.dashboard.reader_process")
"""What is started. A test puts its own in the place, with GPUs that are not there."""

_END_SECONDS = 1.0


class NodeReader:
    """Starts the process, and hands over each thing that it tells, in a thread of its own.

    Args:
        take: called with each line, and with ``{"ended": exit code}`` when the process has ended on its own.
        interval_seconds: from one look to the next.
        few: only the figures of GPUs that a glance beside a measurement needs.

    Raises:
        OSError: no process, or no thread, can be started.
    """

    def __init__(
        self, take: Callable[[Mapping[str, Any]], None], interval_seconds: float, *, few: bool = False
    ) -> None:
        self._take = take
        self._is_closing = False
        command = [*COMMAND, "--interval", str(interval_seconds), "--parent", str(os.getpid()), *["--few"] * few]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env=detached_process.child_environment(),
        )
        try:
            threading.Thread(target=self._listen, name="gpucluster-reader", daemon=True).start()
        except RuntimeError as error:
            self.close()
            raise OSError(f"{error}") from error

    def close(self) -> None:
        """End it. It writes nothing but what it tells, so it can be ended at any moment."""
        self._is_closing = True
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # stuck in the driver: it is gone when that answers
            self._process.wait(timeout=_END_SECONDS)
        self._process.returncode = self._process.returncode or 0  # no warning about it, either

    def _listen(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                try:
                    told = json.loads(line)
                except ValueError:
                    continue  # the last line of a process that was killed
                if isinstance(told, dict):  # a driver's library may print what it likes
                    self._take(told)
        if not self._is_closing:
            self._take({"ended": self._process.wait()})
