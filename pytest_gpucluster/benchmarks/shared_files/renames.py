"""Is a file that is being replaced by renames always there, and always whole?

rename(2): "If newpath already exists, it will be atomically replaced, so that there is no point at which another
process attempting to access newpath will find it missing." Checkpoints and their "latest" rely on that.
"""

from __future__ import annotations

import errno
import hashlib
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from pytest_gpucluster.benchmarks.checkpoint import shared_folder
from pytest_gpucluster.errors import WrongResult

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
class Pieces:
    """What is done to the files. A test puts one that is broken in the place of another."""

    replace: Callable[[Path, Path], None] = os.replace
    read: Callable[[Path], bytes] = Path.read_bytes


PIECES = Pieces()


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
                f"more than {shared_folder.SEEN_SECONDS:g} s ago"
            )
        if told:
            raise WrongResult(
                "\n".join([*told, "what to do: look at the file system's type and its mount options on that host"])
            )


def content_of(version: int) -> bytes:
    """Return a version of the file: its number, many times, and the digest of all of that.

    >>> len(content_of(3)) == FILE_BYTES, version_of(content_of(3)), version_of(content_of(3)[:-1])
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


def put(path: Path, version: int, *, pieces: Pieces | None = None) -> None:
    """Put a version of the file in the place of the one before.

    Raises: OSError.
    """
    new = path.with_name(f"{path.name}.new")
    with new.open("wb") as stream:
        stream.write(content_of(version))
    (pieces or PIECES).replace(new, path)


def replace_and_read(path: Path, renames: int, *, writes: bool, pieces: Pieces | None = None) -> Reads:
    """Read a file until its last version is seen, while one of the hosts replaces it again and again.

    Args:
        path: of the file; version 0 must be there.
        renames: the number of the last version.
        writes: this host is the one that replaces it, in a thread.
        pieces: by default ``PIECES`` of this module.

    Raises: OSError of the writer, or of the reader but for a file that is missing or stale.
    """
    do = pieces or PIECES
    failed: list[OSError] = []
    stop = threading.Event()

    def write() -> None:
        try:
            for version in range(1, renames + 1):
                if stop.is_set():
                    return
                put(path, version, pieces=do)
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
    return renames * _MOST_SECONDS_EACH + shared_folder.SEEN_SECONDS


def _read(path: Path, renames: int, pieces: Pieces, failed: Callable[[], bool]) -> Reads:
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
