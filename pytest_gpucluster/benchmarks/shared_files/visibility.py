"""Is what one node writes what the others read: a new file, and one that is written over?"""

from __future__ import annotations

import hashlib
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pytest_gpucluster.benchmarks.checkpoint import shared_folder
from pytest_gpucluster.errors import EnvironmentBroken, WrongResult

_POLL_SECONDS = 0.02
ROUNDS = ("written", "written over")


@dataclass(frozen=True, kw_only=True)
class Pieces:
    """What is done to the files. A test puts one that is broken in the place of another."""

    write: Callable[[Path, bytes], None]
    read: Callable[[Path], bytes]


def write(path: Path, content: bytes) -> None:
    """Write a file, over the one that is there, and wait until it is on stable storage.

    Raises: OSError.
    """
    handle = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        left = memoryview(content)
        while left:
            left = left[os.write(handle, left) :]
        os.fsync(handle)
    finally:
        os.close(handle)


def read(path: Path) -> bytes:
    """Read a whole file. Opening it anew makes an NFS client ask the server for its age.

    Source: nfs(5), close-to-open cache consistency.

    Raises: OSError.
    """
    return path.read_bytes()


PIECES = Pieces(write=write, read=read)


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What one node has seen of the others' files.

    Attributes:
        files: that were looked at, each round counted.
        right: of these, that were as they had been written.
        slowest_seconds: until the last of them was seen so.
        wrong: each file that was not.
        missing: each file that was not there at all.
    """

    files: int
    right: int
    slowest_seconds: float
    wrong: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()

    def __add__(self, other: Seen) -> Seen:
        return Seen(
            files=self.files + other.files,
            right=self.right + other.right,
            slowest_seconds=max(self.slowest_seconds, other.slowest_seconds),
            wrong=self.wrong + other.wrong,
            missing=self.missing + other.missing,
        )

    def require_there(self, host: str) -> None:
        """Make sure that no file was missing.

        Raises: EnvironmentBroken.
        """
        if self.missing:
            raise EnvironmentBroken(
                "\n".join(
                    [
                        f"{host} does not see what other nodes have written, after {shared_folder.SEEN_SECONDS:g} s:",
                        *self.missing,
                        "what to do: choose a folder on a file system that all nodes share (--gpucluster-scratch)",
                    ]
                )
            )

    def require_right(self, host: str) -> None:
        """Make sure that everything that was there was as it had been written.

        Raises: WrongResult.
        """
        if self.wrong:
            raise WrongResult("\n".join([f"{host} reads something else than was written:", *self.wrong]))


def content_of(node: int, turn: int, size_bytes: int) -> bytes:
    """Return what a node writes: random bytes, the same on every host."""
    return random.Random(f"gpucluster {node} {turn}").randbytes(size_bytes)


def path_of(folder: Path, node: int) -> Path:
    """Return where a node writes."""
    return folder / f"node-{node:05d}.bin"


def others_of(node: int, count: int) -> tuple[int, ...]:
    """Return whose files a node reads: the first node those of all, and each other one the first node's and that of
    the node after it. So every file is read on two nodes, and the work stays small however many there are.

    >>> others_of(0, 4), others_of(1, 4), others_of(3, 4), others_of(0, 2), others_of(0, 1)
    ((1, 2, 3), (0, 2), (0,), (1,), (0,))
    """
    if count == 1:
        return (0,)
    if node == 0:
        return tuple(range(1, count))
    return tuple(dict.fromkeys((0, (node + 1) % count)))


def look_for(
    folder: Path,
    nodes: tuple[int, ...],
    *,
    turn: int,
    size_bytes: int,
    hosts: dict[int, str],
    pieces: Pieces | None = None,
) -> Seen:
    """Read the files of other nodes until they are as they were written, or the time that this may take is up.

    Args:
        folder: where they lie.
        nodes: whose files.
        turn: which writing: 0 for the first one.
        size_bytes: of each file.
        hosts: node -> its name.
        pieces: by default ``PIECES`` of this module.
    """
    look = pieces or PIECES
    seconds, wrong, missing = 0.0, [], []
    for node in nodes:
        path, due = path_of(folder, node), hashlib.sha256(content_of(node, turn, size_bytes)).hexdigest()
        begin = time.monotonic()
        while True:
            found, size = "", -1
            try:
                content = look.read(path)
                found, size = hashlib.sha256(content).hexdigest(), len(content)
            except FileNotFoundError:
                pass  # maybe not yet
            if found == due or time.monotonic() > begin + shared_folder.SEEN_SECONDS:
                break
            time.sleep(_POLL_SECONDS)
        if found == due:
            seconds = max(seconds, time.monotonic() - begin)
        elif size < 0:
            missing.append(f"- {path}, {ROUNDS[turn]} by {hosts[node]}, is not there")
        else:
            stale = found == hashlib.sha256(content_of(node, turn - 1, size_bytes)).hexdigest() if turn else False
            told = "what was there before" if stale else f"{size} bytes with sha256 {found[:16]}..."
            wrong.append(
                f"- {path}, {ROUNDS[turn]} by {hosts[node]}: found {told}, expected {size_bytes} bytes with sha256 "
                f"{due[:16]}..., after {shared_folder.SEEN_SECONDS:g} s"
            )
    right = len(nodes) - len(wrong) - len(missing)
    return Seen(files=len(nodes), right=right, slowest_seconds=seconds, wrong=tuple(wrong), missing=tuple(missing))
