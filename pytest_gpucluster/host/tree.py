"""The kernel's files below one root, so that tests can plant their own: what is not there is None, never a guess."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from pytest_gpucluster import files
from pytest_gpucluster.affinity import parse
from pytest_gpucluster.files import Mount

_NUMBER = re.compile(r"-?[0-9]+")


@dataclass(frozen=True, kw_only=True)
class Tree:
    """A tree of files as the kernel shows it below ``/``."""

    root: Path = Path("/")

    def path(self, absolute: str) -> Path:
        """Return where ``/proc/...`` or ``/sys/...`` is below the root."""
        return self.root / absolute.lstrip("/")

    def has(self, absolute: str) -> bool:
        """Tell whether there is such a file or folder; what this process may not look at is as good as not there."""
        # Path.exists raises where a folder above is closed to this user.
        return os.path.exists(self.path(absolute))

    def text(self, absolute: str) -> str | None:
        """Return a file's text without the space around it; None if it cannot be read."""
        try:
            return self.path(absolute).read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            return None

    def number(self, absolute: str) -> int | None:
        """Return the whole number that a file holds; None if there is none."""
        text = self.text(absolute)
        return int(text) if text is not None and _NUMBER.fullmatch(text) else None

    def numbers(self, absolute: str) -> frozenset[int] | None:
        """Return the set of CPUs or nodes that a file lists; None if it does not."""
        text = self.text(absolute)
        try:
            return None if text is None else parse(text)
        except ValueError:
            return None

    def mounts(self) -> tuple[Mount, ...]:
        """Return what this process sees mounted, in the order of mounting; nothing if the kernel does not tell."""
        try:
            return files.read_mounts(self.path(str(files.MOUNTINFO)))
        except OSError:
            return ()
