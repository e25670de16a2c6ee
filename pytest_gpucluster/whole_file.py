"""Files that are there whole or not at all: whoever reads one sees the former content or the new one, never a part."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def write(path: Path, text: str) -> None:
    """Replace a file atomically, as UTF-8. Folders that it lacks are made.

    A path that is no plain file (a pipe, ``/dev/null``) is written to as it is, and never replaced.

    Raises:
        OSError: it could not be written. What was there is intact.
    """
    content = text.encode("utf-8", "backslashreplace")
    try:
        # Asked before the path is resolved: what /proc calls a pipe is the name of nothing.
        is_plain = stat.S_ISREG(path.stat().st_mode)
    except FileNotFoundError:
        is_plain = True
    if not is_plain:
        path.write_bytes(content)
        return
    # A link is followed, as pytest does, so that it still points there.
    path = Path(os.path.realpath(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = draft_of(path, os.getpid())
    try:
        draft.write_bytes(content)
        draft.replace(path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise


def draft_of(path: Path, pid: int) -> Path:
    """Return where a process writes a file before it takes its place.

    It does not end as the file does: what a killed writer leaves must not be taken for a report.
    """
    return path.with_name(f".{path.name[:200]}.{pid}.tmp")
