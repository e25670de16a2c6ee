"""One at a time on a node: processes that know nothing of each other take turns by a lock on a file.

So a link is measured alone under torchrun, where all ranks run the same test at once, and without a launcher, where no
rank can be told of another. The kernel takes the lock from a process that ends.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from pytest_gpucluster.errors import EnvironmentBroken

WAIT_SECONDS = 60.0
"""A turn takes less than a second: so long only one waits behind a process that hangs."""

_POLL_SECONDS = 0.0005


def shared_path() -> Path:
    """Return the file that all processes of this user on this node agree on.

    With the node's own name in it, for a lock in a folder on a network would keep other nodes waiting, too.
    """
    return Path(tempfile.gettempdir()) / f"gpucluster-host-link-{os.uname().nodename}-{os.getuid()}.lock"


class Turn:
    """A process's part in taking turns, as a context manager: in it, any number of turns.

    Source: flock(2): a lock belongs to the opened file, and ends with it.
    """

    def __init__(
        self,
        path: Path | None = None,
        *,
        wait_seconds: float = WAIT_SECONDS,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._path, self._wait_seconds, self._now, self._sleep = path or shared_path(), wait_seconds, now, sleep
        self._file: int | None = None

    def __enter__(self) -> Turn:
        """Open the file.

        Raises: EnvironmentBroken if that cannot be done: then nobody can say that a link is measured alone.
        """
        try:
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise EnvironmentBroken(
                f"ranks cannot take turns by {self._path}: {error.strerror}; give them a folder of this node that all "
                "of them may write to: TMPDIR"
            ) from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if self._file is not None:
            os.close(self._file)
        self._file = None

    def begin(self) -> None:
        """Wait until it is this process's turn.

        Raises: EnvironmentBroken if the others have not let it come to that.
        """
        assert self._file is not None
        until = self._now() + self._wait_seconds
        while True:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if self._now() >= until:
                    raise EnvironmentBroken(
                        f"no turn to measure a host link alone within {self._wait_seconds:g} s: another process holds "
                        f"{self._path} (`lslocks`); is one of the ranks hanging, or another run on this node?"
                    ) from None
                self._sleep(_POLL_SECONDS)

    def end(self) -> None:
        """Let the others have their turn. Without one of its own nothing happens."""
        if self._file is not None:
            fcntl.flock(self._file, fcntl.LOCK_UN)
