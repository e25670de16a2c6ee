"""Processes of a node by pid, and what other users or earlier jobs have left on it: processes on GPUs, files.

A process is described for an operator who has to find and kill it. Files are those in /dev/shm and /tmp. A scheduler's
prolog and epilog should have removed both.
"""

from __future__ import annotations

import os
import pwd
import stat
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from pytest_gpucluster.metrics.finding import Finding, notice

PROC = Path("/proc")
_LONGEST_COMMAND = 120


@dataclass(frozen=True, kw_only=True)
class Who:
    """A process as far as this host shows it; ``known`` is False for one that this process table does not have."""

    pid: int
    user: str = ""
    command: str = ""
    known: bool = True

    def __str__(self) -> str:
        if not self.known:
            return f"pid {self.pid}, which this host or container does not show"
        return f"pid {self.pid} of user {self.user or 'unknown'} ({self.command or 'no command'})"


def who_is(pid: int, proc: Path = PROC) -> Who:
    """Look a process up. Source: proc_pid_status(5), proc_pid_cmdline(5), proc_pid_comm(5)."""
    folder = proc / str(pid)
    try:
        status = (folder / "status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return Who(pid=pid, known=False)
    uid = next((line.split()[1] for line in status.splitlines() if line.startswith("Uid:")), "")
    return Who(pid=pid, user=_user(uid), command=_command(folder))


def _user(uid: str) -> str:
    try:
        return pwd.getpwuid(int(uid)).pw_name
    except (KeyError, ValueError):
        return f"uid {uid}" if uid else ""


def _command(folder: Path) -> str:
    try:
        words = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace").strip()
        # A zombie has no command line any more; its name stays.
        words = words or (folder / "comm").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
    words = " ".join(words.split())
    return words if len(words) <= _LONGEST_COMMAND else f"{words[:_LONGEST_COMMAND]}..."


SHM, TMP = Path("/dev/shm"), Path("/tmp")
LEAST_BYTES = 2**20
"""Less than this in /dev/shm is noted only: it takes no memory worth the name."""
_FIRST_USER = 1000
"""Numbers below are the system's own. Source: login.defs(5), UID_MIN."""
_OVERFLOW = Path("/proc/sys/kernel/overflowuid")
_NAMED = 5
_MOST_ENTRIES = 100_000


@dataclass(frozen=True, kw_only=True)
class Left:
    """Entries of a folder that are not this job's: how many of whom, their size, the largest ones."""

    count: int
    bytes: int
    owners: Mapping[str, int]
    largest: tuple[str, ...]

    def __str__(self) -> str:
        of = ", ".join(f"{number} of {owner}" for owner, number in self.owners.items())
        return f"{self.count} entries with {self.bytes / 1e6:.4g} MB ({of}), such as {', '.join(self.largest)}"


def stale_files(folder: Path, *, uid: int, before: float | None) -> Left | None:
    """Return what lies in a folder, not below, and belongs to another user, or to an earlier job of this one.

    What is root's or a system user's is taken for the system's; in a container with users of its own, so is what
    belongs to anybody outside, for root's cannot be told from others' there. Of this user's own entries those are an
    earlier job's that were last touched before this one began; what this job copies there may keep an old time of
    change, and so the time counts at which the entry itself came or changed (ctime).

    Args:
        folder: to look into.
        uid: of this user.
        before: when this job began, in seconds since the epoch; None if that is not known.

    Returns: None where there is nothing.

    Raises: OSError if the folder cannot be looked into.
    """
    found: list[tuple[int, str, int]] = []
    nobody = _nobody()
    with os.scandir(folder) as entries:
        for number, entry in enumerate(entries):
            if number >= _MOST_ENTRIES:
                break
            try:
                told = entry.stat(follow_symlinks=False)
            except FileNotFoundError:  # it has been removed meanwhile
                continue
            others = told.st_uid not in (uid, nobody) and told.st_uid >= _FIRST_USER
            earlier = told.st_uid == uid and before is not None and max(told.st_mtime, told.st_ctime) < before
            if others or (earlier and not stat.S_ISDIR(told.st_mode)):
                found.append((told.st_blocks * 512, entry.name, told.st_uid))
    if not found:
        return None
    found.sort(reverse=True)
    return Left(
        count=len(found),
        bytes=sum(size for size, _, _ in found),
        owners=dict(Counter(_name(owner) for _, _, owner in found).most_common(_NAMED)),
        largest=tuple(name for _, name, _ in found[:_NAMED]),
    )


def of_files(
    host: str, *, uid: int, before: float | None, alone: bool, shm: Path | None = None, tmp: Path | None = None
) -> Iterator[Finding]:
    """Yield what is left in /dev/shm and /tmp.

    What takes memory in /dev/shm of a node that belongs to this job alone is an error; everything else is noted.

    Args:
        host: the node.
        uid: of this user.
        before: when this job began.
        alone: the whole node was allocated to this job.
        shm, tmp: where to look; by default ``SHM`` and ``TMP`` of this module.
    """
    shm, tmp = shm or SHM, tmp or TMP
    for folder in (shm, tmp):
        try:
            left = stale_files(folder, uid=uid, before=before)
        except OSError as error:
            yield notice(
                "leftovers.files",
                "note",
                host,
                f"{folder} cannot be looked into: {error}",
                allowed="a folder that this job may read",
                remedy=f"compare `ls -la {folder}` on this host",
            )
            continue
        if left is None:
            continue
        heavy = folder == shm and alone and left.bytes >= LEAST_BYTES
        yield notice(
            "leftovers.files",
            "environment" if heavy else "note",
            host,
            f"{folder} holds {left}",
            allowed="no files of other users or of earlier jobs" if alone else "files of jobs that run beside this one",
            remedy=f"remove them, and let the epilog do so: they take {'memory' if folder == shm else 'space'}",
        )


def of_processes(
    host: str,
    on_gpus: Mapping[int, int | None],
    *,
    own: Collection[int],
    who_is: Callable[[int], Who],
) -> Iterator[Finding]:
    """Yield the processes on this node's GPUs that are not this job's.

    Args:
        host: the node.
        on_gpus: pid -> bytes of GPU memory, None where that is not known, as NVML tells.
        own: the pids of this job's ranks.
        who_is: looks a process up.
    """
    for pid, used in on_gpus.items():
        if pid in own:
            continue
        who = who_is(pid)
        size = "an unknown amount" if used is None else f"{used / 1e9:.4g} GB"
        # In a container NVML may tell numbers of the host, also for this job's own ranks.
        yield notice(
            "leftovers.process",
            "environment" if who.known else "note",
            host,
            f"{who} holds {size} of GPU memory",
            allowed="this job's ranks only",
            remedy="end it, and let the epilog end what a job has left",
        )


def _nobody() -> int | None:
    """Return the number under which a container sees users that it does not know. Source: user_namespaces(7)."""
    try:
        return int(_OVERFLOW.read_text(encoding="ascii"))
    except (OSError, ValueError):
        return None


def _name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"
