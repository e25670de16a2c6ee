"""Whether all nodes see the same file: after a write or an overwrite, and while it is replaced by renames.

A file that is being replaced must always be there, and always be whole. rename(2): "If newpath already exists, it will
be atomically replaced, so that there is no point at which another process attempting to access newpath will find it
missing." Checkpoints and their "latest" rely on that.
"""

from __future__ import annotations

import errno
import hashlib
import os
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from pytest_gpucluster.benchmarks.storage import checkpoint
from pytest_gpucluster.errors import EnvironmentBroken, WrongResult

FILE_BYTES = 16384
"""Several pages, so that a part of a file can be seen."""
_DIGEST_BYTES = 32
_PAUSE_SECONDS = 0.001
"""Between two renames, so that readers come between."""
_MOST_SECONDS_EACH = 0.1
_IDLE_SECONDS = 1.0
"""When nothing new has been seen for so long, the reader looks less often."""
_TOLD = 5


@dataclass(frozen=True, kw_only=True)
class RenameOperations:
    """What is done to the files. A test puts one that is broken in the place of another."""

    replace: Callable[[Path, Path], None] = os.replace
    read: Callable[[Path], bytes] = Path.read_bytes


RENAME_OPERATIONS = RenameOperations()


@dataclass(kw_only=True)
class Reads:
    """What a reader has found.

    Attributes:
        whole: reads that found a whole file.
        missing: reads that found none.
        torn: reads that found something else.
        stale: reads that the file system refused since the file had been replaced after it was opened (ESTALE). NFS
            does so; the reader opens it again.
        backward: reads that found an older version than the one before. A network file system may do so for a while.
        versions: how many different versions were seen.
        last: the newest one.
        examples: of what was wrong.
    """

    whole: int = 0
    missing: int = 0
    torn: int = 0
    stale: int = 0
    backward: int = 0
    versions: int = 0
    last: int = -1
    examples: list[str] = field(default_factory=list)

    @property
    def whole_ratio(self) -> float:
        """Part of the reads that found a whole file; those that were refused are not counted."""
        counted = self.whole + self.missing + self.torn
        return self.whole / counted if counted else 0.0

    def require_whole(self, host: str, path: Path, renames: int) -> None:
        """Make sure that no read found anything but a whole file, and that the last version was seen.

        Raises: WrongResult.
        """
        told = []
        if self.missing or self.torn:
            counted = self.whole + self.missing + self.torn
            told.append(
                f"{host} found {path} missing {self.missing} times and torn {self.torn} times in {counted} reads, "
                f"while it was replaced by {renames} renames: " + "; ".join(self.examples)
            )
        if self.last < renames:
            seen = f"version {self.last}" if self.last >= 0 else "none"
            told.append(
                f"{host} saw {seen} of {path} at last, and version {renames} lay there: it is shown what was replaced "
                f"more than {checkpoint.SEEN_SECONDS:g} s ago"
            )
        if told:
            raise WrongResult(
                "\n".join([*told, "what to do: look at the file system's type and its mount options on that host"])
            )


def version_content(version: int) -> bytes:
    """Return a version of the file: its number, many times, and the digest of all of that.

    >>> len(version_content(3)) == FILE_BYTES, version_of(version_content(3)), version_of(version_content(3)[:-1])
    (True, 3, None)
    """
    body = (f"{version:015d}\n".encode() * (FILE_BYTES // 16))[: FILE_BYTES - _DIGEST_BYTES]
    return body + hashlib.sha256(body).digest()


def version_of(content: bytes) -> int | None:
    """Return the version of a whole file, None for anything else."""
    body, digest = content[:-_DIGEST_BYTES], content[-_DIGEST_BYTES:]
    if len(content) != FILE_BYTES or hashlib.sha256(body).digest() != digest:
        return None
    return int(body[:15])


def put_version(path: Path, version: int, *, pieces: RenameOperations | None = None) -> None:
    """Put a version of the file in the place of the one before.

    Raises: OSError.
    """
    new = path.with_name(f"{path.name}.new")
    with new.open("wb") as stream:
        stream.write(version_content(version))
    (pieces or RENAME_OPERATIONS).replace(new, path)


def replace_and_read(path: Path, renames: int, *, writes: bool, pieces: RenameOperations | None = None) -> Reads:
    """Read a file until its last version is seen, while one of the hosts replaces it again and again.

    Args:
        path: of the file; version 0 must be there.
        renames: the number of the last version.
        writes: this host is the one that replaces it, in a thread.
        pieces: by default ``RENAME_OPERATIONS`` of this module.

    Raises: OSError of the writer, or of the reader but for a file that is missing or stale.
    """
    do = pieces or RENAME_OPERATIONS
    failed: list[OSError] = []
    stop = threading.Event()

    def write() -> None:
        try:
            for version in range(1, renames + 1):
                if stop.is_set():
                    return
                put_version(path, version, pieces=do)
                time.sleep(_PAUSE_SECONDS)
        except OSError as error:  # raised again below
            failed.append(error)

    writer = threading.Thread(target=write, name="gpucluster-renames")
    if writes:
        writer.start()
    try:
        found = _read(path, renames, do, lambda: bool(failed))
    finally:
        stop.set()
        if writes:
            writer.join()
    if failed:
        raise failed[0]
    return found


def longest_seconds(renames: int) -> float:
    """Return how long :func:`replace_and_read` can take."""
    return renames * _MOST_SECONDS_EACH + checkpoint.SEEN_SECONDS


def _read(path: Path, renames: int, pieces: RenameOperations, failed: Callable[[], bool]) -> Reads:
    found = Reads()
    until = time.monotonic() + longest_seconds(renames)
    changed = time.monotonic()
    while found.last < renames and time.monotonic() < until and not failed():
        if time.monotonic() > changed + _IDLE_SECONDS:
            time.sleep(_IDLE_SECONDS / 100)
        try:
            content = pieces.read(path)
        except FileNotFoundError:
            found.missing += 1
            _remember(found, f"missing after version {found.last}")
            continue
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
            found.stale += 1
            continue
        version = version_of(content)
        if version is None:
            found.torn += 1
            _remember(found, f"{len(content)} bytes that are no version, after version {found.last}")
            continue
        found.whole += 1
        if version != found.last:
            found.versions += 1
            changed = time.monotonic()
        found.backward += version < found.last
        found.last = max(found.last, version)
    return found


def _remember(found: Reads, text: str) -> None:
    if len(found.examples) < _TOLD:
        found.examples.append(text)


_POLL_SECONDS = 0.02
ROUNDS = ("written", "written over")


@dataclass(frozen=True, kw_only=True)
class VisibilityOperations:
    """What is done to the files. A test puts one that is broken in the place of another."""

    write: Callable[[Path, bytes], None]
    read: Callable[[Path], bytes]


def write_probe(path: Path, content: bytes) -> None:
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


def read_probe(path: Path) -> bytes:
    """Read a whole file. Opening it anew makes an NFS client ask the server for its age.

    Source: nfs(5), close-to-open cache consistency.

    Raises: OSError.
    """
    return path.read_bytes()


VISIBILITY_OPERATIONS = VisibilityOperations(write=write_probe, read=read_probe)


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
                        f"{host} does not see what other nodes have written, after {checkpoint.SEEN_SECONDS:g} s:",
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


def turn_content(node: int, turn: int, size_bytes: int) -> bytes:
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
    pieces: VisibilityOperations | None = None,
) -> Seen:
    """Read the files of other nodes until they are as they were written, or the time that this may take is up.

    Args:
        folder: where they lie.
        nodes: whose files.
        turn: which writing: 0 for the first one.
        size_bytes: of each file.
        hosts: node -> its name.
        pieces: by default ``VISIBILITY_OPERATIONS`` of this module.
    """
    look = pieces or VISIBILITY_OPERATIONS
    seconds, wrong, missing = 0.0, [], []
    for node in nodes:
        path, due = path_of(folder, node), hashlib.sha256(turn_content(node, turn, size_bytes)).hexdigest()
        begin = time.monotonic()
        while True:
            found, size = "", -1
            try:
                content = look.read(path)
                found, size = hashlib.sha256(content).hexdigest(), len(content)
            except FileNotFoundError:
                pass  # maybe not yet
            if found == due or time.monotonic() > begin + checkpoint.SEEN_SECONDS:
                break
            time.sleep(_POLL_SECONDS)
        if found == due:
            seconds = max(seconds, time.monotonic() - begin)
        elif size < 0:
            missing.append(f"- {path}, {ROUNDS[turn]} by {hosts[node]}, is not there")
        else:
            stale = found == hashlib.sha256(turn_content(node, turn - 1, size_bytes)).hexdigest() if turn else False
            told = "what was there before" if stale else f"{size} bytes with sha256 {found[:16]}..."
            wrong.append(
                f"- {path}, {ROUNDS[turn]} by {hosts[node]}: found {told}, expected {size_bytes} bytes with sha256 "
                f"{due[:16]}..., after {checkpoint.SEEN_SECONDS:g} s"
            )
    right = len(nodes) - len(wrong) - len(missing)
    return Seen(files=len(nodes), right=right, slowest_seconds=seconds, wrong=tuple(wrong), missing=tuple(missing))
