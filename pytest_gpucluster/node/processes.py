"""Processes of a node by pid, and stale processes and files of other users or earlier jobs.

A process is described for an operator who has to find and kill it. Files are those in /dev/shm and /tmp. A scheduler's
prolog or epilog should remove both.
"""

from __future__ import annotations

import os
import pwd
import stat
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from pytest_gpucluster.metrics.finding import Finding, finding, note

PROC = Path("/proc")
_LONGEST_COMMAND = 120


@dataclass(frozen=True, kw_only=True)
class Process:
    """A process as this host shows it; ``known`` is False for one that is not in the process table."""

    pid: int
    user: str = ""
    command: str = ""
    known: bool = True

    def __str__(self) -> str:
        if not self.known:
            return f"pid {self.pid}, which this host or container does not list"
        return f"pid {self.pid} of user {self.user or 'unknown'} ({self.command or 'no command'})"


def find_process(pid: int, proc: Path = PROC) -> Process:
    """Look a process up. Source: proc_pid_status(5), proc_pid_cmdline(5), proc_pid_comm(5)."""
    folder = proc / str(pid)
    try:
        status = (folder / "status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return Process(pid=pid, known=False)
    uid = next((line.split()[1] for line in status.splitlines() if line.startswith("Uid:")), "")
    return Process(pid=pid, user=_user_name(int(uid)) if uid.isdecimal() else "", command=_command(folder))


def _command(folder: Path) -> str:
    try:
        words = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace").strip()
        # A zombie has a name but no command line.
        words = words or (folder / "comm").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
    words = " ".join(words.split())
    return words if len(words) <= _LONGEST_COMMAND else f"{words[:_LONGEST_COMMAND]}..."


SHM, TMP = Path("/dev/shm"), Path("/tmp")
LEAST_BYTES = 2**20
"""Less than this in /dev/shm is only a note."""
_FIRST_USER = 1000
"""Lower uids are the system's. Source: login.defs(5), UID_MIN."""
_OVERFLOW = Path("/proc/sys/kernel/overflowuid")
_NAMED = 5
_MOST_ENTRIES = 100_000


@dataclass(frozen=True, kw_only=True)
class StaleFiles:
    """Entries of a folder that are not this job's: their number by owner, size, and the largest ones."""

    count: int
    bytes: int
    owners: Mapping[str, int]
    largest: tuple[str, ...]

    def __str__(self) -> str:
        of = ", ".join(f"{number} of {owner}" for owner, number in self.owners.items())
        return f"{self.count} entries with {self.bytes / 1e6:.4g} MB ({of}), such as {', '.join(self.largest)}"


def stale_files(folder: Path, *, uid: int, before: float | None) -> StaleFiles | None:
    """Return the entries of a folder, not below, that belong to other users, or to an earlier job of this user.

    Root's and system users' entries are not counted; nor, in a user namespace, those of unmapped users, which may be
    root's. This user's own entries are an earlier job's if they were last changed before this job began; ctime counts
    too, for a copied file may keep an old mtime.

    Args:
        folder: to read.
        uid: of this user.
        before: when this job began, in seconds since the epoch; None if unknown.

    Returns: None where there is nothing.

    Raises: OSError if the folder cannot be read.
    """
    found: list[tuple[int, str, int]] = []
    unmapped = _unmapped_uid()
    with os.scandir(folder) as entries:
        for number, entry in enumerate(entries):
            if number >= _MOST_ENTRIES:
                break
            try:
                status = entry.stat(follow_symlinks=False)
            except FileNotFoundError:  # removed since it was listed
                continue
            others = status.st_uid not in (uid, unmapped) and status.st_uid >= _FIRST_USER
            earlier = status.st_uid == uid and before is not None and max(status.st_mtime, status.st_ctime) < before
            if others or (earlier and not stat.S_ISDIR(status.st_mode)):
                found.append((status.st_blocks * 512, entry.name, status.st_uid))
    if not found:
        return None
    found.sort(reverse=True)
    return StaleFiles(
        count=len(found),
        bytes=sum(size for size, _, _ in found),
        owners=dict(Counter(_user_name(owner) for _, _, owner in found).most_common(_NAMED)),
        largest=tuple(name for _, name, _ in found[:_NAMED]),
    )


def stale_file_findings(
    host: str, *, uid: int, before: float | None, alone: bool, shm: Path | None = None, tmp: Path | None = None
) -> Iterator[Finding]:
    """Yield findings on stale files in /dev/shm and /tmp.

    Files in /dev/shm of a node that is allocated to this job alone are an error; the others are notes.

    Args:
        host: the node.
        uid: of this user.
        before: when this job began.
        alone: the whole node was allocated to this job.
        shm, tmp: the folders; by default ``SHM`` and ``TMP`` of this module.
    """
    shm, tmp = shm or SHM, tmp or TMP
    for folder in (shm, tmp):
        try:
            stale = stale_files(folder, uid=uid, before=before)
        except OSError as error:
            yield note(
                "leftovers.files",
                host,
                f"{folder} cannot be read: {error}",
                allowed="a folder that this job may read",
                remedy=f"compare `ls -la {folder}` on this host",
            )
            continue
        if stale is None:
            continue
        heavy = folder == shm and alone and stale.bytes >= LEAST_BYTES
        yield finding(
            "environment" if heavy else "note",
            "leftovers.files",
            host,
            f"{folder} has {stale}",
            allowed="no files of other users or of earlier jobs" if alone else "files of other running jobs",
            remedy=f"remove them, and let the epilog do so: they use {'memory' if folder == shm else 'space'}",
        )


def stale_process_findings(
    host: str,
    on_gpus: Mapping[int, int | None],
    *,
    own: Collection[int],
    find_process: Callable[[int], Process],
) -> Iterator[Finding]:
    """Yield findings on processes on this node's GPUs that are not this job's.

    Args:
        host: the node.
        on_gpus: pid -> bytes of GPU memory, None where unknown, from NVML.
        own: the pids of this job's ranks.
        find_process: looks a process up.
    """
    for pid, used in on_gpus.items():
        if pid in own:
            continue
        process = find_process(pid)
        size = "an unknown amount" if used is None else f"{used / 1e9:.4g} GB"
        # In a container NVML may report the host's pids, also for this job's own ranks.
        yield finding(
            "environment" if process.known else "note",
            "leftovers.process",
            host,
            f"{process} uses {size} of GPU memory",
            allowed="this job's ranks only",
            remedy="kill it, and let the epilog kill processes of ended jobs",
        )


def _unmapped_uid() -> int | None:
    """Return the uid of users that are unmapped in this user namespace. Source: user_namespaces(7)."""
    try:
        return int(_OVERFLOW.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def _user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"
