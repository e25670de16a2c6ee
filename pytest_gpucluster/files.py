"""Atomic writing of files, and the mounts of this host as the kernel lists them.

A reader sees the former content or the new one, never a part.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


def atomic_write(path: Path, text: str) -> None:
    """Replace a file atomically, as UTF-8. Missing folders are created.

    A path that is no regular file (a pipe, ``/dev/null``) is written to directly and never replaced.

    Raises:
        OSError: it could not be written. The former content is intact.
    """
    content = text.encode("utf-8", "backslashreplace")
    try:
        # Before the path is resolved: the name that /proc gives a pipe does not exist.
        is_regular = stat.S_ISREG(path.stat().st_mode)
    except FileNotFoundError:
        is_regular = True
    if not is_regular:
        path.write_bytes(content)
        return
    # As in pytest, a link is followed and stays a link.
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
    """Return the temporary path to which a process writes a file before it replaces it.

    Its suffix differs: what a killed writer leaves must not be taken for a report.
    """
    return path.with_name(f".{path.name[:200]}.{pid}.tmp")


MOUNTINFO = Path("/proc/self/mountinfo")
"""Source: proc_pid_mountinfo(5)."""

NETWORK = frozenset(
    ("nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "wekafs", "cifs", "smb3", "pvfs2", "glusterfs", "afs", "panfs")
)
"""Types of network file systems in mountinfo; through FUSE they are called fuse.x."""


@dataclass(frozen=True, kw_only=True)
class Mount:
    """A mounted file system.

    Attributes:
        point: where it is mounted.
        kind: its type, such as "nfs4" or "tmpfs".
        source: what is mounted, such as "server:/export".
        root: which folder of the source.
        options: of the mount and of its file system, in the kernel's order.
    """

    point: str
    kind: str
    source: str
    root: str
    options: tuple[str, ...]

    @property
    def is_network(self) -> bool:
        """Whether its type is that of a network file system."""
        return self.kind in NETWORK or self.kind.startswith("fuse.")

    @property
    def read_only(self) -> bool:
        """Whether it is mounted read-only."""
        return "ro" in self.options

    def option(self, name: str) -> str | None:
        """Return the value of an option such as ``size=64k``, or None where it is not set."""
        return next((word.partition("=")[2] for word in self.options if word.startswith(f"{name}=")), None)

    def __str__(self) -> str:
        return f"{self.kind} {self.source}{'' if self.root == '/' else f' ({self.root})'} on {self.point}"


def read_mounts(path: Path = MOUNTINFO) -> tuple[Mount, ...]:
    """Return everything that is mounted, in the order of mounting.

    Raises: OSError if the kernel's list cannot be read.
    """
    text = path.read_text(encoding="utf-8", errors="replace")
    return tuple(mount for mount in map(_mount, text.splitlines()) if mount is not None)


def mount_of(folder: Path, mounts: Iterable[Mount]) -> Mount | None:
    """Return the mount that a folder is on, or None.

    The folder's symbolic links must have been resolved already: doing it here could wait for a dead server.
    """
    found, longest = None, -1
    for mount in mounts:
        point = Path(mount.point)
        # Of two mounts at the same point the later one is in effect.
        if folder.is_relative_to(point) and len(point.parts) >= longest:
            found, longest = mount, len(point.parts)
    return found


def _mount(line: str) -> Mount | None:
    before, dash, after = line.partition(" - ")
    fields, more = before.split(" "), after.split(" ")
    if not dash or len(fields) < 6 or len(more) < 3:
        return None
    options = dict.fromkeys(part for words in (fields[5], more[2]) for part in words.split(","))
    return Mount(
        point=_unescape(fields[4]),
        kind=more[0],
        source=_unescape(more[1]),
        root=_unescape(fields[3]),
        options=tuple(options),
    )


def _unescape(text: str) -> str:
    """Undo the kernel's octal escapes, such as ``\\040`` for a space."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)
