"""How far a test of a local worker is, in a file: its controller has the terminal."""

from __future__ import annotations

import tempfile
from contextlib import suppress
from pathlib import Path


class StepFile:
    """What the first worker writes and the controller reads. As a screen of ``progress`` it takes lines to be written
    over."""

    live = True

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def new(cls) -> StepFile | None:
        """Return one in a folder of its own on this node; None where none can be made.

        The run's folder may be on a network file system, which a rank would wait for while it measures.
        """
        try:
            return cls(Path(tempfile.mkdtemp(prefix="gpucluster-live-")) / "step")
        except OSError:
            return None

    def rewrite(self, text: str, *, ends: bool) -> None:
        """Say how far it is; after the last step nothing is to be said."""
        beside = self.path.with_suffix(".new")
        with suppress(OSError):  # the controller has ended, and the folder with it
            beside.write_text("" if ends else text, encoding="utf-8")
            beside.replace(self.path)

    def line(self, text: str) -> None:
        """Never called: everything here is live."""

    def read(self) -> str:
        """Return what was said last."""
        try:
            return self.path.read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""

    def remove(self) -> None:
        """Leave nothing of it, nor its folder."""
        for path in (self.path, self.path.with_suffix(".new")):
            with suppress(OSError):
                path.unlink(missing_ok=True)
        with suppress(OSError):  # there is something else in it
            self.path.parent.rmdir()
