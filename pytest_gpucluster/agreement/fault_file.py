"""Where faulthandler writes the last stacks of a process, so that others on its host can read them once it is dead.

Beside it lies what else a rank keeps on disk while it lives. Whoever survives it takes both away.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import secrets
import shutil
import tempfile
from pathlib import Path
from typing import IO

_PREFIX = "gpucluster-fault-"


class FaultFile:
    """The file of this process, and a folder beside it. Both are removed at an orderly end.

    Attributes:
        path: of the file.
        cache: of the folder, for pytest's cache of ranks above 0. Whoever writes to it makes it.
    """

    def __init__(self) -> None:
        # Numbers of processes come again, also for other users: a file that somebody left must not be in the way.
        name = f"{_PREFIX}{os.getpid()}-{secrets.token_hex(4)}.txt"
        self.path = Path(tempfile.gettempdir()) / name
        self.cache = cache_beside(self.path)
        self._file: IO[str] | None = None

    def open(self) -> IO[str]:
        """Let faulthandler write here, and return the open file."""
        if self._file is None:
            self._file = open(self.path, "x", encoding="utf-8")  # noqa: SIM115  # faulthandler writes until the end
            faulthandler.enable(self._file)
        return self._file

    def close(self) -> None:
        """Stop faulthandler, and remove file and folder."""
        if self._file is not None:
            faulthandler.disable()
            self._file.close()
            self._file = None
            self.path.unlink(missing_ok=True)
        shutil.rmtree(self.cache, ignore_errors=True)


def cache_beside(path: Path) -> Path:
    """Return the folder of the process whose file this is."""
    return path.with_suffix(".cache")


def remove_left(path: str) -> None:
    """Remove what a process of this host has left that can do so no more. What is not there any more may be so."""
    left = Path(path)
    if left.name.startswith(_PREFIX):
        with contextlib.suppress(OSError):  # of another user, or on a file system that is gone: it does no harm there
            left.unlink(missing_ok=True)
        shutil.rmtree(cache_beside(left), ignore_errors=True)
