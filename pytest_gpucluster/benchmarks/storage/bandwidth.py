"""The rates at which the shared file system writes and reads the checkpoints of all ranks at once.

Each rank writes one large file with known bytes, and reads that of another rank, bypassing its host's page cache.
"""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from pytest_gpucluster import files
from pytest_gpucluster.benchmarks.group import on_all_ranks, on_first_rank
from pytest_gpucluster.benchmarks.memory_budget import releases_memory
from pytest_gpucluster.benchmarks.storage.checkpoint import make_unique_folder, wait_for
from pytest_gpucluster.benchmarks.verify import FACTOR, Pattern, PatternWriter
from pytest_gpucluster.errors import EnvironmentBroken, WrongResult
from pytest_gpucluster.metrics.time_budget import MEASURING, counted

CHUNK_BYTES = 2**24
"""Written or read by one call: of the order in which torch writes its checkpoints."""

PAGE_BYTES = 4096
"""The largest alignment that O_DIRECT commonly needs (Source: open(2)); so files are a multiple of it. Each block of
this size differs from all others, so that no file system deduplicates them."""

write_bytes, read_into = os.write, os.preadv
"""The system calls on the file; a simulation replaces them by slow ones."""

_BUFFERS = 3
"""One is read into while another is verified."""


class Contents:
    """The bytes of a file, chunk by chunk: a pattern, and the number of each page as its first word.

    Args:
        start: distinguishes the files of one rank from those of another.
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
        """Compare bytes that were read from an offset on with the expected ones: "" if they are the same."""
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
    """Write a file and wait until it is on stable storage; return the seconds that this took, including the opening.

    Then the kernel is asked to drop the file from its cache.

    Raises: OSError.
    """
    begin = time.perf_counter()
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        for offset in range(0, size_bytes, CHUNK_BYTES):
            left = contents.bytes_at(offset)[: size_bytes - offset]
            while left:
                left = left[write_bytes(handle, left) :]
        os.fsync(handle)
        seconds = time.perf_counter() - begin
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(handle)
    return seconds


def read_file(path: Path, size_bytes: int, contents: Contents, *, direct: bool) -> tuple[float, int, str]:
    """Read a file, verifying each chunk while the next one is read.

    Returns the seconds from opening it until all is verified, the bytes that were compared and right, and the defect,
    "" if there is none.

    Args:
        path: of the file.
        size_bytes: its expected length.
        contents: its expected bytes.
        direct: read by O_DIRECT; else the kernel is asked to drop the file from its cache first.

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
    return seconds, verified, next(iter(defects), "")


def reads_directly(path: Path) -> bool:
    """Return whether a file can be read by O_DIRECT: not every file system supports it.

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
    """Return the type of a folder's file system as the kernel names it; "unknown" if it is not reported.

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
    """Fill a buffer from a byte of the file on; return the number of bytes read."""
    done = 0
    while done < len(into):
        got = read_into(handle, [into[done:]], offset + done)
        done += got
        if not got or done % PAGE_BYTES:  # the end; O_DIRECT could not continue from the middle of a page
            break
    return done


@dataclass(frozen=True, kw_only=True)
class Bandwidth:
    """The rates of this rank while all ranks did the same: a number for each pass.

    Attributes:
        written_bytes_per_second: from opening the file until it is on stable storage.
        read_bytes_per_second: of the file that another rank has written, until all of it is verified.
        verified_ratio: bytes that were compared and right, over all bytes of the files read.
        past_the_cache: how this host's page cache was bypassed, the same on all ranks. "O_DIRECT" bypasses it; with
            "posix_fadvise" the kernel is asked to drop the file, and may keep it.
        other_host: whether every rank has read a file that was written on another host.
        file_system: its type, as the first rank's kernel names it.
    """

    written_bytes_per_second: tuple[float, ...]
    read_bytes_per_second: tuple[float, ...]
    verified_ratio: float
    past_the_cache: str
    other_host: bool
    file_system: str


@releases_memory()
def storage_bandwidth(
    group: dist.ProcessGroup,
    folder: Path,
    *,
    hosts: Sequence[str],
    file_bytes: int,
    passes: int,
    progress: Callable[..., None] | None = None,
) -> Bandwidth:
    """Have each rank write a file, and then read the one of another rank, all at the same time; several times.

    Collective: every rank of the group must call this, with the same folder and sizes.

    Files are verified to the last byte. A rank reads what was written on another host wherever that is possible, so
    that neither its own page cache nor its own file system client has it.

    Args:
        group: the ranks that take part.
        folder: on the file system to be measured, which all ranks share. The files lie in a new folder there, which is
            removed at the end; after an error it stays, empty unless a rank was killed.
        hosts: of each rank.
        file_bytes: of each file; a multiple of ``PAGE_BYTES``.
        passes: number of passes.
        progress: called after each pass: ``progress(step, of)``.

    Raises:
        WrongResult: on the rank that has read other bytes than were written.
        EnvironmentBroken: on all ranks: too little space, or the file system is not shared or fails otherwise.
    """
    with counted(MEASURING):
        check = _Passes(group, folder, list(hosts), file_bytes)
        return check.run(passes, progress or (lambda *steps, **figures: None))


def shift_of(hosts: Sequence[str]) -> int:
    """Return the distance to the rank whose file each rank reads: if possible one on another host.

    >>> shift_of(["a", "a", "b", "b"]), shift_of(["a", "a"]), shift_of(["a"])
    (2, 1, 0)
    """
    count = len(hosts)
    apart = (
        shift for shift in range(1, count) if all(hosts[rank] != hosts[(rank + shift) % count] for rank in range(count))
    )
    return next(apart, 1 % count)


class _Passes:
    def __init__(self, group: dist.ProcessGroup, folder: Path, hosts: list[str], file_bytes: int) -> None:
        self._group, self._folder, self._file_bytes = group, folder, file_bytes
        rank, count, shift = dist.get_rank(group), dist.get_world_size(group), shift_of(hosts)
        self._rank, self._other = rank, (rank + shift) % count
        self._other_host = all(hosts[one] != hosts[(one + shift) % count] for one in range(count))
        self._mine, self._others = Contents(rank), Contents(self._other)

    def run(self, passes: int, progress: Callable[..., None]) -> Bandwidth:
        self._folder = Path(on_first_rank(self._group, lambda: str(self._begin())))
        on_all_ranks(self._group, lambda: wait_for(self._folder))
        written, read, direct = [], [], False
        verified, defect = 0, ""
        for number in range(passes):
            mine, other = (self._folder / f"pass-{number}-rank-{rank:05d}.bin" for rank in (self._rank, self._other))
            try:
                seconds = on_all_ranks(self._group, partial(write_file, mine, self._file_bytes, self._mine))
                written.append(self._file_bytes / seconds[self._rank])
                on_all_ranks(self._group, partial(wait_for, other))
                if number == 0:
                    direct = all(on_all_ranks(self._group, partial(reads_directly, other)))
                reading = partial(read_file, other, self._file_bytes, self._others, direct=direct)
                taken, right, wrong = on_all_ranks(self._group, reading)[self._rank]
                read.append(self._file_bytes / taken)
                verified += right
                defect = defect or (f"{other} {wrong}" if wrong else "")
            except BaseException:
                with suppress(OSError):  # it would hide the first error
                    mine.unlink(missing_ok=True)
                raise
            on_all_ranks(self._group, partial(mine.unlink, missing_ok=True))
            progress(number + 1, passes)
        kind = on_first_rank(self._group, lambda: file_system_of(self._folder))
        on_first_rank(self._group, lambda: shutil.rmtree(self._folder))
        if defect:
            raise WrongResult(
                f"rank {dist.get_global_rank(self._group, self._rank)} has read other bytes than rank "
                f"{dist.get_global_rank(self._group, self._other)} has written: {defect}. Check the file system, and "
                "the memory and network of both hosts"
            )
        return Bandwidth(
            written_bytes_per_second=tuple(written),
            read_bytes_per_second=tuple(read),
            verified_ratio=verified / (passes * self._file_bytes),
            past_the_cache="O_DIRECT" if direct else "posix_fadvise",
            other_host=self._other_host,
            file_system=kind,
        )

    def _begin(self) -> Path:
        self._folder.mkdir(parents=True, exist_ok=True)
        needed, free = dist.get_world_size(self._group) * self._file_bytes, shutil.disk_usage(self._folder).free
        if free < needed + CHUNK_BYTES:
            raise EnvironmentBroken(
                f"{self._folder}: the files of all ranks need {needed / 1e9:.3g} GB, and {free / 1e9:.3g} GB are free. "
                "Free some space, choose another folder (--gpucluster-scratch), or smaller files "
                "(--gpucluster-workload checkpoint.size=...)"
            )
        return make_unique_folder(self._folder)
