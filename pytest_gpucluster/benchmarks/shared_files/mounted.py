"""What a folder is mounted from on this host, and whether the host's network file systems answer at all."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from pytest_gpucluster import files
from pytest_gpucluster.errors import EnvironmentBroken
from pytest_gpucluster.files import Mount

ANSWER_SECONDS = 10.0
"""So long a file system may take to tell its size."""
_GONE = {errno.ESTALE: "stale file handle", errno.EIO: "input/output error", errno.ENOTCONN: "not connected"}
"""What the kernel says of a network file system that is mounted and gone; other errors are about rights."""
T = TypeVar("T")


def make(folder: Path) -> None:
    """Make a folder where it is missing. Raises: OSError."""
    folder.mkdir(parents=True, exist_ok=True)


@dataclass(frozen=True, kw_only=True)
class Pieces:
    """What is asked of the host. A test puts one that is broken in the place of another."""

    mounts: Callable[[], tuple[Mount, ...]] = files.read_mounts
    statvfs: Callable[[str], os.statvfs_result] = os.statvfs
    make: Callable[[Path], None] = make


PIECES = Pieces()


@dataclass(frozen=True, kw_only=True)
class Mounted:
    """A folder as one host sees it.

    Attributes:
        host: its name.
        mount: what it is mounted from; None if the kernel does not tell.
        free_ratio: free space, of all space.
        free_inodes_ratio: free inodes, of all of them; None where the file system has no fixed number of them.
        broken: each network file system of the host that does not answer, and how it fails.
    """

    host: str
    mount: Mount | None
    free_ratio: float
    free_inodes_ratio: float | None
    broken: tuple[str, ...] = field(default=())


def look(folder: Path, host: str, *, answer_seconds: float = ANSWER_SECONDS, pieces: Pieces | None = None) -> Mounted:
    """Look at a folder, which is made where it is missing, and at every network file system of this host.

    Raises: EnvironmentBroken if the folder itself cannot be looked at, or its file system does not answer.
    """
    ask = pieces or PIECES
    try:
        _within(answer_seconds, lambda: ask.make(folder))
        real = _within(answer_seconds, lambda: folder.resolve(strict=True))
        told = _within(answer_seconds, lambda: ask.statvfs(str(real)))
    except (OSError, TimeoutError) as error:
        raise EnvironmentBroken(
            f"{host}: {folder} cannot be looked at: {_why(error, answer_seconds)}. Mount it again, and look at its "
            "server"
        ) from error
    try:
        found = ask.mounts()
    except OSError as error:
        print(f"{host}: what is mounted is not known: {error}")
        found = ()
    network = [mount for mount in found if mount.is_network]
    asked = [_begin(lambda mount=mount: ask.statvfs(mount.point)) for mount in network]  # type: ignore[misc]  # bound now
    # All at once: a server that is gone may have many of them.
    until = time.monotonic() + answer_seconds
    broken = []
    for mount, answer in zip(network, asked, strict=True):
        try:
            answer(max(0.0, until - time.monotonic()))
        except (OSError, TimeoutError) as error:
            if isinstance(error, TimeoutError) or error.errno in _GONE:
                broken.append(f"{mount}: {_why(error, answer_seconds)}")
    return Mounted(
        host=host,
        mount=files.mount_of(real, found),
        free_ratio=told.f_bavail / told.f_blocks if told.f_blocks else 0.0,
        free_inodes_ratio=told.f_favail / told.f_files if told.f_files else None,
        broken=tuple(broken),
    )


def require_alike(folder: Path, seen: Sequence[Mounted]) -> None:
    """Make sure that a folder is on the same kind of file system on all hosts, and can be written to on each; and that
    no host has a network file system that does not answer.

    Different sources or options are printed: a server may have several addresses. What its files show, decides.

    Raises: EnvironmentBroken naming the few hosts that differ from the others, or where something is broken.
    """
    told = [f"- {one.host}: {what}" for one in seen for what in one.broken]
    texts = {
        "the type of file system": [one.mount.kind if one.mount else "unknown" for one in seen],
        "what may be done": ["read only" if one.mount and one.mount.read_only else "read and write" for one in seen],
    }
    for what, values in texts.items():
        told += [f"- {what} of {folder}: {text}" for text in _deviants(seen, values)]
    told += [
        f"- {folder} is mounted read only on {one.host}"
        for one in seen
        if one.mount and one.mount.read_only and all(other.mount and other.mount.read_only for other in seen)
    ]
    sources = [str(one.mount) for one in seen]
    for text in _deviants(seen, sources):
        print(f"{folder} is mounted differently: {text}")
    if told:
        raise EnvironmentBroken(
            "\n".join(
                [
                    "file systems differ between the nodes, or do not answer:",
                    *told,
                    "what to do: compare `findmnt` on the named hosts with the others, and mount again what is gone "
                    "(`umount -f -l`, then `mount`)",
                ]
            )
        )


def not_shared(seen: Sequence[Mounted]) -> str:
    """Return what an operator should hear where a folder is not the same one on all hosts."""
    lines = []
    for one in seen:
        local = one.mount is not None and not one.mount.is_network
        lines.append(f"- {one.host}: {one.mount or 'unknown'}{', which is no network file system' if local else ''}")
    return "\n".join(
        [
            "what it is mounted from:",
            *lines,
            "what to do: pass a folder on a file system that all nodes share (--gpucluster-scratch FOLDER; without it "
            "the run's own folder is used). A cluster that has none does not meet this criterion; to judge all the "
            "rest of it, leave the file out (--deselect acceptance/test_shared_filesystem.py), and the verdict is that "
            "of a selection",
        ]
    )


def _deviants(seen: Sequence[Mounted], values: Sequence[str]) -> list[str]:
    """Return "value on hosts" for each value but the commonest one. Of two equally common ones the first counts."""
    counted = Counter(values)
    [(usual, number)] = counted.most_common(1)
    found = []
    for value in dict.fromkeys(values):
        if value != usual:
            hosts = ", ".join(one.host for one, its in zip(seen, values, strict=True) if its == value)
            found.append(f"{value} on {hosts}, where {number} of {len(seen)} hosts have {usual}")
    return found


def _why(error: BaseException, answer_seconds: float) -> str:
    if isinstance(error, TimeoutError) and getattr(error, "errno", None) is None:
        return f"no answer within {answer_seconds:g} s"
    known = _GONE.get(getattr(error, "errno", None) or 0, "")
    return f"{known} ({error})" if known else str(error)


def _within(seconds: float, ask: Callable[[], T]) -> T:
    """Ask the kernel something, and wait so long for the answer.

    Raises: TimeoutError without an errno, or the OSError that the kernel gave.
    """
    return _begin(ask)(seconds)


def _begin(ask: Callable[[], T]) -> Callable[[float], T]:
    """Ask the kernel something in a thread: a file system whose server is gone never answers, nor can it be stopped.

    Returns: what waits so long for the answer, as :func:`_within`.
    """
    came: list[T] = []
    failed: list[OSError] = []

    def run() -> None:
        try:
            came.append(ask())
        except OSError as error:  # raised again below
            failed.append(error)

    thread = threading.Thread(target=run, name="gpucluster-statvfs", daemon=True)
    thread.start()

    def wait(seconds: float) -> T:
        thread.join(seconds)
        if failed:
            raise failed[0]
        if not came:
            raise TimeoutError
        return came[0]

    return wait
