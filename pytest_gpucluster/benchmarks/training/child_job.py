"""A job that is started from inside of another one: in an environment of its own, and with a sure end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

_MARK = "GPUCLUSTER_CHILD_JOB"
"""In the environment of each process of the job: ranks have sessions of their own, so no process group holds them."""

_POLL_SECONDS = 0.02
_ENDING_SECONDS = 10.0
"""How long a process that was killed may take to be gone: it gives back its memory first, on a GPU too."""

_TAIL_BYTES = 4000

_OF_A_LAUNCHER = (
    # What torchrun sets, and the options that it reads.
    *("TORCHELASTIC_", "PET_", "MASTER_", "ROLE_", "GROUP_"),
    # What this suite sets for its own ranks: how they wait, and what NCCL logs.
    *("TORCH_NCCL_", "TORCH_FR_", "NCCL_DEBUG"),
)
_OF_A_RANK = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "NCCL_COMM_ID"}


def environment_of_its_own(environ: Mapping[str, str]) -> dict[str, str]:
    """Return an environment without what makes this process a rank of its job.

    What a site has set for its network, such as NCCL_SOCKET_IFNAME, stays.
    """
    return {
        name: value for name, value in environ.items() if not name.startswith(_OF_A_LAUNCHER) and name not in _OF_A_RANK
    }


class ChildJob:
    """A command and every process that comes of it. To be used as a context manager: at its end nothing is left.

    Args:
        command: what to run.
        environ: its environment; :func:`environment_of_its_own` makes one.
        output: the file that takes all that is printed.
    """

    def __init__(self, command: Sequence[str], environ: Mapping[str, str], output: Path) -> None:
        self._mark = f"{_MARK}={uuid.uuid4().hex}"
        name, _, value = self._mark.partition("=")
        self._output = output
        with output.open("wb") as file:
            self._launcher = subprocess.Popen(
                command,
                env={**environ, name: value},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                # A signal to the group of this process is not meant for the job.
                start_new_session=True,
            )

    def __enter__(self) -> ChildJob:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    @property
    def pid(self) -> int:
        """The process of the command itself."""
        return self._launcher.pid

    @property
    def exit_code(self) -> int | None:
        """Of the command; None while it runs."""
        return self._launcher.poll()

    @property
    def text(self) -> str:
        """All that was printed by now."""
        return self._output.read_text(encoding="utf-8", errors="backslashreplace")

    @property
    def last_words(self) -> str:
        """The last of what was printed by now."""
        return self.text[-_TAIL_BYTES:].strip() or "nothing was printed"

    def wait(self, until: Callable[[], bool], *, seconds: float) -> bool:
        """Wait for something, at most so long; return whether it has come."""
        last = time.monotonic() + seconds
        while not until():
            if time.monotonic() > last:
                return False
            time.sleep(_POLL_SECONDS)
        return True

    def processes(self) -> list[int]:
        """Return the living processes of the job. One that has ended and was not waited for does not count."""
        mark, found = self._mark.encode(), []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit():
                continue
            # Other users' processes cannot be looked at, and some end meanwhile.
            with contextlib.suppress(OSError):
                if mark in (entry / "environ").read_bytes().split(b"\0") and _state(entry) not in "ZX":
                    found.append(int(entry.name))
        return sorted(found)

    def state_of(self, pid: int) -> str:
        """Return the letter of a process's state, such as S or D; "" if there is no such process.

        Source: proc_pid_stat(5), field 3.
        """
        with contextlib.suppress(OSError):
            return _state(Path("/proc") / str(pid))
        return ""

    def end(self) -> None:
        """Kill every process of the job that still lives, and wait a while for its end."""
        last = time.monotonic() + _ENDING_SECONDS
        while living := self.processes():
            for pid in living:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._launcher.poll()
            if time.monotonic() > last:
                break
            time.sleep(_POLL_SECONDS)
        # Also where it has not come as far as to have an environment of its own.
        self._launcher.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._launcher.wait(timeout=_ENDING_SECONDS)


def _state(entry: Path) -> str:
    # The name of the command stands in brackets before it, and may hold anything.
    return (entry / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0]
