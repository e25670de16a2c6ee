"""Where faulthandler writes the last stacks of a process, so that others on its host can read them once it is dead."""

from __future__ import annotations

import faulthandler
import os
import secrets
import tempfile
from pathlib import Path
from typing import IO


class FaultFile:
    """The file of this process. It is removed at an orderly end."""

    def __init__(self) -> None:
        # Numbers of processes come again, also for other users: a file that somebody left must not be in the way.
        name = f"gpucluster-fault-{os.getpid()}-{secrets.token_hex(4)}.txt"
        self.path = Path(tempfile.gettempdir()) / name
        self._file: IO[str] | None = None

    def open(self) -> IO[str]:
        """Let faulthandler write here, and return the open file."""
        if self._file is None:
            self._file = open(self.path, "x", encoding="utf-8")  # noqa: SIM115  # faulthandler writes until the end
            faulthandler.enable(self._file)
        return self._file

    def close(self) -> None:
        """Stop faulthandler and remove the file."""
        if self._file is not None:
            faulthandler.disable()
            self._file.close()
            self._file = None
            self.path.unlink(missing_ok=True)
