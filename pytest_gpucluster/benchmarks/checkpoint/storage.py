"""Writing and reading one large file whose bytes are known, past the page cache of this host."""

from __future__ import annotations

import errno
import mmap
import os
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from pytest_gpucluster import files
from pytest_gpucluster.benchmarks.pattern import FACTOR, Pattern, PatternWriter

CHUNK_BYTES = 2**24
"""Written or read by one call: of the order in which torch writes its checkpoints."""

PAGE_BYTES = 4096
"""The largest alignment that O_DIRECT commonly asks for (Source: open(2)); so files are a multiple of it. Each piece of
so many bytes differs from all others, so that no file system stores one for many."""

_BUFFERS = 3
"""One is read into while another is verified."""


class Contents:
    """The bytes of a file, chunk by chunk: a pattern, and the number of each page as its first word.

    Args:
        start: tells the files of one rank from those of another.
    """

    def __init__(self, start: int) -> None:
        self._map = mmap.mmap(-1, CHUNK_BYTES)
        self._words = torch.frombuffer(self._map, dtype=torch.int64)
        PatternWriter(self._words.device, len(self._words)).fill(self._words, Pattern(start=start))

    def bytes_at(self, offset: int) -> memoryview:
        """Return the chunk that begins at a byte, a multiple of ``CHUNK_BYTES``. It is valid until the next call."""
        self._mark(offset)
        return memoryview(self._map)

    def defect(self, words: torch.Tensor, offset: int) -> str:
        """Compare what was read from a byte on with what it must be: "" if it is the same."""
        self._mark(offset)
        due = self._words[: len(words)]
        if torch.equal(words, due):
            return ""
        place = int((words != due).nonzero()[0])
        found, wanted = (int(one[place]) % 2**64 for one in (words, due))
        return f"at byte {offset + 8 * place}: found {found:016x}, expected {wanted:016x}"

    def _mark(self, offset: int) -> None:
        pages = torch.arange(offset // PAGE_BYTES, (offset + CHUNK_BYTES) // PAGE_BYTES)
        self._words[:: PAGE_BYTES // 8] = pages * FACTOR


def write_file(path: Path, size_bytes: int, contents: Contents) -> float:
    """Write a file and wait until it is on stable storage; return the seconds that this took, the opening included.

    Then the kernel is asked to drop what it keeps of the file.

    Raises: OSError.
    """
    begin = time.perf_counter()
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        for offset in range(0, size_bytes, CHUNK_BYTES):
            left = contents.bytes_at(offset)[: size_bytes - offset]
            while left:
                left = left[os.write(handle, left) :]
        os.fsync(handle)
        seconds = time.perf_counter() - begin
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(handle)
    return seconds


@dataclass(frozen=True, kw_only=True)
class FileRead:
    """What reading a file has shown.

    Attributes:
        seconds: from opening it until all is verified.
        verified_bytes: that were compared and right.
        defect: what is wrong with it; "" if nothing is.
    """

    seconds: float
    verified_bytes: int
    defect: str


def read_file(path: Path, size_bytes: int, contents: Contents, *, direct: bool) -> FileRead:
    """Read a file, verifying each chunk while the next one is read.

    Args:
        path: of the file.
        size_bytes: how long it must be.
        contents: what it must hold.
        direct: read by O_DIRECT; else the kernel is asked to drop what it keeps of the file first.

    Raises: OSError.
    """
    maps = [mmap.mmap(-1, CHUNK_BYTES) for _ in range(_BUFFERS)]  # begin at a page, as O_DIRECT needs
    buffers = [torch.frombuffer(one, dtype=torch.int64) for one in maps]
    compared: list[tuple[int, Future[str]]] = []
    defects = []
    begin = time.perf_counter()
    with ThreadPoolExecutor(max_workers=1) as pool, _opened(path, direct) as handle:
        for number, offset in enumerate(range(0, size_bytes, CHUNK_BYTES)):
            if number >= _BUFFERS:
                compared[number - _BUFFERS][1].result()  # its buffer is in use until then
            due = min(CHUNK_BYTES, size_bytes - offset)
            place = number % _BUFFERS
            length = _read(handle, memoryview(maps[place])[:due], offset)
            if length < due:
                defects.append(f"ends at byte {offset + length} of {size_bytes}")
                break
            compared.append((due, pool.submit(contents.defect, buffers[place][: due // 8], offset)))
        verified = sum(length for length, one in compared if not one.result())
        seconds = time.perf_counter() - begin
    defects = [one.result() for _, one in compared if one.result()] + defects
    return FileRead(seconds=seconds, verified_bytes=verified, defect=next(iter(defects), ""))


def reads_directly(path: Path) -> bool:
    """Tell whether a file can be read by O_DIRECT: not every file system lets it.

    Raises: OSError if it cannot be read at all.
    """
    try:
        with _opened(path, True) as handle, mmap.mmap(-1, PAGE_BYTES) as page:
            return os.preadv(handle, [page], 0) > 0
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
            return False
        raise


def file_system_of(path: Path) -> str:
    """Return the type of the file system that a folder is on, as the kernel calls it; "unknown" if it does not tell.

    Source: proc(5), /proc/pid/mountinfo.
    """
    try:
        found = files.mount_of(path.resolve(), files.read_mounts())
    except OSError:
        return "unknown"
    return "unknown" if found is None else found.kind


@contextmanager
def _opened(path: Path, direct: bool) -> Iterator[int]:
    handle = os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
    try:
        if not direct:
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        yield handle
    finally:
        os.close(handle)


def _read(handle: int, into: memoryview, offset: int) -> int:
    """Fill a buffer from a byte of the file on; return how many bytes there were."""
    done = 0
    while done < len(into):
        got = os.preadv(handle, [into[done:]], offset + done)
        done += got
        if not got or done % PAGE_BYTES:  # the end; O_DIRECT could not go on from the middle of a page
            break
    return done
