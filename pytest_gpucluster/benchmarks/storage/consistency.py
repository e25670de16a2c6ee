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
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from pytest_gpucluster.benchmarks.storage import checkpoint
from pytest_gpucluster.errors import EnvironmentBroken, WrongResult

FILE_BYTES = 16384
"""Several pages, so that a part of a file can be seen."""
_DIGEST_BYTES = 32
_PAUSE_SECONDS = 0.001
"""Between two renames, so that readers get a chance to read."""
_MOST_SECONDS_EACH = 0.1
_IDLE_SECONDS = 1.0
"""After this time without a new version, the reader reads less often."""
_LISTED = 5


def write_probe(path: Path, content: bytes) -> None:
    """Write a file, overwriting an existing one, and wait until it is on stable storage.

    Raises: OSError.
    """
    with path.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())


read_probe = read_renamed = read_small = Path.read_bytes
write_small, rename, statvfs = Path.write_bytes, os.replace, os.statvfs
"""The system calls, by what they are used for: tests replace one of them.

Opening a file again, as each read does, makes an NFS client ask the server for its age. Source: nfs(5), close-to-open
cache consistency.
"""


@dataclass(kw_only=True)
class ReadCounts:
    """The reads of a file that was replaced.

    Attributes:
        path: of the file.
        renames: the number of its last version.
        whole: reads of a whole file.
        broken: what the others found, such as no file, with the number of these reads.
        last: the newest version that was read. A network file system may return an older one for a while.
    """

    path: Path
    renames: int
    whole: int = 0
    broken: Counter[str] = field(default_factory=Counter)
    last: int = -1

    @property
    def counted(self) -> int:
        """All reads."""
        return self.whole + self.broken.total()

    @property
    def whole_ratio(self) -> float:
        """Part of the reads that found a whole file."""
        return self.whole / self.counted if self.counted else 0.0

    def require_whole(self, host: str) -> None:
        """Check that every read found a whole file, and that the last version was seen.

        Raises: WrongResult.
        """
        problems = []
        if self.broken:
            found = ", ".join(f"{what} {count} times" for what, count in self.broken.most_common(_LISTED))
            problems.append(
                f"{host} found {self.path} {found} in {self.counted} reads, while it was replaced by {self.renames} "
                "renames"
            )
        if self.last < self.renames:
            last = f"version {self.last}" if self.last >= 0 else "none"
            problems.append(
                f"{host} saw {last} of {self.path} at last, and version {self.renames} was there: it sees a file that "
                f"was replaced more than {checkpoint.VISIBILITY_SECONDS:g} s ago"
            )
        if problems:
            problems.append("what to do: check the file system's type and its mount options on that host")
            raise WrongResult("\n".join(problems))


def version_content(version: int) -> bytes:
    """Return a version of the file: its number, repeated, and the digest of all of that.

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


def put_version(path: Path, version: int) -> None:
    """Replace the file by a version.

    Raises: OSError.
    """
    new = path.with_name(f"{path.name}.new")
    with new.open("wb") as stream:
        stream.write(version_content(version))
    rename(new, path)


def replace_and_read(path: Path, renames: int, *, writes: bool) -> ReadCounts:
    """Read a file until its last version is seen, while one of the hosts replaces it again and again.

    Args:
        path: of the file; version 0 must be there.
        renames: the number of the last version.
        writes: this host is the one that replaces it, in a thread.

    Raises: OSError of the writer, or of the reader but for a file that is missing or stale.
    """
    stop = threading.Event()

    def write() -> None:
        for version in range(1, renames + 1) if writes else ():
            if stop.is_set():
                return
            put_version(path, version)
            time.sleep(_PAUSE_SECONDS)

    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="gpucluster-renames") as pool:
        writer = pool.submit(write)
        try:
            found = _read(path, renames, lambda: writer.done() and writer.exception() is not None)
        finally:
            stop.set()
        writer.result()
    return found


def longest_seconds(renames: int) -> float:
    """Return how long :func:`replace_and_read` can take."""
    return renames * _MOST_SECONDS_EACH + checkpoint.VISIBILITY_SECONDS


def _read(path: Path, renames: int, failed: Callable[[], bool]) -> ReadCounts:
    found = ReadCounts(path=path, renames=renames)
    until = time.monotonic() + longest_seconds(renames)
    changed = time.monotonic()
    while found.last < renames and time.monotonic() < until and not failed():
        if time.monotonic() > changed + _IDLE_SECONDS:
            time.sleep(_IDLE_SECONDS / 100)
        try:
            content = read_renamed(path)
        except FileNotFoundError:
            found.broken["missing"] += 1
            continue
        except OSError as error:
            if error.errno != errno.ESTALE:  # NFS rejects a file that has been replaced since it was opened
                raise
            continue
        version = version_of(content)
        if version is None:
            found.broken[f"with {len(content)} bytes that are no version"] += 1
            continue
        found.whole += 1
        if version > found.last:
            found.last, changed = version, time.monotonic()
    return found


_POLL_SECONDS = 0.02
ROUNDS = ("written", "written over")


@dataclass(kw_only=True)
class Visibility:
    """What one node has read of the others' files.

    Attributes:
        files: read, each round counted.
        slowest_seconds: until the last one with the expected content had it.
        wrong: a text for each file with another content.
        missing: a text for each missing file.
    """

    files: int = 0
    slowest_seconds: float = 0.0
    wrong: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    @property
    def right(self) -> int:
        """Files with the expected content."""
        return self.files - len(self.wrong) - len(self.missing)

    def require_visible(self, host: str) -> None:
        """Check that no file was missing.

        Raises: EnvironmentBroken.
        """
        if self.missing:
            first = f"{host} does not see the files of other nodes after {checkpoint.VISIBILITY_SECONDS:g} s:"
            last = "what to do: choose a folder on a file system that all nodes share (--gpucluster-scratch)"
            raise EnvironmentBroken("\n".join([first, *self.missing, last]))

    def require_content(self, host: str) -> None:
        """Check that every visible file had the expected content.

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


def nodes_to_read(node: int, count: int) -> tuple[int, ...]:
    """Return the nodes whose files a node reads: the first node reads those of all, each other one the first node's and
    that of the node after it. So every file is read on two nodes, and the work stays small with many nodes.

    >>> nodes_to_read(0, 4), nodes_to_read(1, 4), nodes_to_read(3, 4), nodes_to_read(0, 2), nodes_to_read(0, 1)
    ((1, 2, 3), (0, 2), (0,), (1,), (0,))
    """
    if count == 1:
        return (0,)
    if node == 0:
        return tuple(range(1, count))
    return tuple(dict.fromkeys((0, (node + 1) % count)))


def read_until_visible(
    seen: Visibility, folder: Path, nodes: tuple[int, ...], *, turn: int, size_bytes: int, hosts: dict[int, str]
) -> None:
    """Read the files of other nodes until they have the expected content, or the time limit is reached.

    Args:
        seen: what the result is added to.
        folder: of the files.
        nodes: whose files to read.
        turn: the number of the write: 0 for the first one.
        size_bytes: of each file.
        hosts: node -> its name.
    """
    for node in nodes:
        path, due, begin = path_of(folder, node), turn_content(node, turn, size_bytes), time.monotonic()
        while True:
            found: bytes | None = None
            with suppress(FileNotFoundError):  # maybe not visible yet
                found = read_probe(path)
            if found == due or time.monotonic() > begin + checkpoint.VISIBILITY_SECONDS:
                break
            time.sleep(_POLL_SECONDS)
        seen.files += 1
        file = f"- {path}, {ROUNDS[turn]} by {hosts[node]}"
        if found == due:
            seen.slowest_seconds = max(seen.slowest_seconds, time.monotonic() - begin)
        elif found is None:
            seen.missing.append(f"{file}, is missing")
        else:
            stale = turn > 0 and found == turn_content(node, turn - 1, size_bytes)
            what = "the content before" if stale else f"{len(found)} other bytes"
            seen.wrong.append(
                f"{file}: found {what}, expected the {size_bytes} bytes that were written, after "
                f"{checkpoint.VISIBILITY_SECONDS:g} s"
            )
