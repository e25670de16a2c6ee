"""How fast the shared file system takes and gives the checkpoints of all ranks at once."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch.distributed as dist

from pytest_gpucluster.benchmarks.checkpoint.shared_folder import make_own, wait_for
from pytest_gpucluster.benchmarks.checkpoint.storage import (
    CHUNK_BYTES,
    PAGE_BYTES,
    Contents,
    FileRead,
    file_system_of,
    read_file,
    reads_directly,
    write_file,
)
from pytest_gpucluster.benchmarks.checkpoint.together import first, together
from pytest_gpucluster.benchmarks.footprint import memory_returned
from pytest_gpucluster.errors import EnvironmentBroken, WrongResult
from pytest_gpucluster.metrics.time_budget import MEASURING, counted


@dataclass(frozen=True, kw_only=True)
class Bandwidth:
    """What was measured on this rank while all ranks did the same: a number for each pass.

    Attributes:
        written_bytes_per_second: from opening the file until it is on stable storage.
        read_bytes_per_second: of the file that another rank has written, until all of it is verified.
        verified_ratio: bytes that were compared and right, over all bytes of the files read.
        file_bytes: of each rank.
        past_the_cache: how this host's page cache was kept out of reading, the same on all ranks. "O_DIRECT" reads past
            it; with "posix_fadvise" the kernel is asked to drop what it has, and may keep it.
        other_host: whether every rank has read a file that was written on another host.
        file_system: its type, as the first rank's kernel calls it.
    """

    written_bytes_per_second: tuple[float, ...]
    read_bytes_per_second: tuple[float, ...]
    verified_ratio: float
    file_bytes: int
    past_the_cache: str
    other_host: bool
    file_system: str


@dataclass(frozen=True, kw_only=True)
class Pieces:
    """What is timed. A test puts one that is broken in the place of another."""

    write: Callable[[Path, int, Contents], float] = write_file
    read: Callable[..., FileRead] = read_file


PIECES = Pieces()


def storage_bandwidth(
    group: dist.ProcessGroup,
    folder: Path,
    *,
    hosts: Sequence[str],
    file_bytes: int,
    passes: int,
    progress: Callable[..., None] | None = None,
    pieces: Pieces | None = None,
) -> Bandwidth:
    """Let each rank write a file, and then read the one of another rank, all at the same time; several times.

    Collective: every rank of the group must call this, with the same folder and sizes.

    Files are verified to the last byte. A rank reads what was written on another host wherever that is possible, so
    that neither its own page cache nor its own file system client has it.

    Args:
        group: the ranks that take part.
        folder: on the file system to be measured, which all ranks share. The files lie in a folder of their own there,
            which is removed at the end; after an error it stays, empty where no rank was killed.
        hosts: of each rank.
        file_bytes: of each file; a multiple of ``PAGE_BYTES``.
        passes: how often.
        progress: told of each pass: ``progress(step, of)``.
        pieces: what is timed; by default ``PIECES`` of this module.

    Raises:
        WrongResult: on the rank that has read something else than was written.
        EnvironmentBroken: on all ranks: too little space, or the file system is not shared or fails otherwise.
        ValueError: an argument is out of its range.
    """
    if passes < 1 or file_bytes < PAGE_BYTES or file_bytes % PAGE_BYTES:
        raise ValueError(
            f"passes must be at least 1 and file_bytes a multiple of {PAGE_BYTES}, not {passes} and {file_bytes}"
        )
    try:
        with counted(MEASURING), memory_returned():
            check = _Passes(group, folder, list(hosts), file_bytes, pieces or PIECES)
            return check.run(passes, progress or (lambda *told, **more: None))
    finally:
        # A traceback that is kept keeps this frame, and a gloo group that outlives its end aborts the process.
        del group


def shift_of(hosts: Sequence[str]) -> int:
    """Return how many ranks further the rank is whose file each rank reads: if possible one on another host.

    >>> shift_of(["a", "a", "b", "b"]), shift_of(["a", "a"]), shift_of(["a"])
    (2, 1, 0)
    """
    count = len(hosts)
    apart = (
        shift for shift in range(1, count) if all(hosts[rank] != hosts[(rank + shift) % count] for rank in range(count))
    )
    return next(apart, 1 % count)


class _Passes:
    def __init__(
        self, group: dist.ProcessGroup, folder: Path, hosts: list[str], file_bytes: int, pieces: Pieces
    ) -> None:
        self._group, self._folder, self._file_bytes, self._pieces = group, folder, file_bytes, pieces
        rank, count, shift = dist.get_rank(group), dist.get_world_size(group), shift_of(hosts)
        self._rank, self._other = rank, (rank + shift) % count
        self._other_host = all(hosts[one] != hosts[(one + shift) % count] for one in range(count))
        self._mine, self._others = Contents(rank), Contents(self._other)

    def run(self, passes: int, progress: Callable[..., None]) -> Bandwidth:
        self._folder = Path(first(self._group, lambda: str(self._begin())))
        together(self._group, lambda: wait_for(self._folder))
        written, read, direct = [], [], False
        verified, defect = 0, ""
        for number in range(passes):
            mine, other = (self._folder / f"pass-{number}-rank-{rank:05d}.bin" for rank in (self._rank, self._other))
            try:
                seconds = together(self._group, partial(self._pieces.write, mine, self._file_bytes, self._mine))
                written.append(self._file_bytes / seconds[self._rank])
                if number == 0:
                    direct = all(together(self._group, partial(self._reads_directly, other)))
                found = together(self._group, partial(self._read, other, direct=direct))[self._rank]
                read.append(self._file_bytes / found.seconds)
                verified += found.verified_bytes
                defect = defect or (f"{other} {found.defect}" if found.defect else "")
            except BaseException:
                with suppress(OSError):  # it would hide why
                    mine.unlink(missing_ok=True)
                raise
            together(self._group, partial(mine.unlink, missing_ok=True))
            progress(number + 1, passes)
        kind = first(self._group, lambda: file_system_of(self._folder))
        first(self._group, lambda: shutil.rmtree(self._folder))
        if defect:
            raise WrongResult(
                f"rank {dist.get_global_rank(self._group, self._rank)} has read something else than rank "
                f"{dist.get_global_rank(self._group, self._other)} has written: {defect}. Look at the file system, and "
                "at the memory and network of both hosts"
            )
        return Bandwidth(
            written_bytes_per_second=tuple(written),
            read_bytes_per_second=tuple(read),
            verified_ratio=verified / (passes * self._file_bytes),
            file_bytes=self._file_bytes,
            past_the_cache="O_DIRECT" if direct else "posix_fadvise",
            other_host=self._other_host,
            file_system=kind,
        )

    def _reads_directly(self, path: Path) -> bool:
        wait_for(path)
        return reads_directly(path)

    def _read(self, path: Path, *, direct: bool) -> FileRead:
        wait_for(path)
        return self._pieces.read(path, self._file_bytes, self._others, direct=direct)

    def _begin(self) -> Path:
        self._folder.mkdir(parents=True, exist_ok=True)
        needed, free = dist.get_world_size(self._group) * self._file_bytes, shutil.disk_usage(self._folder).free
        if free < needed + CHUNK_BYTES:
            raise EnvironmentBroken(
                f"{self._folder}: the files of all ranks need {needed / 1e9:.3g} GB, and {free / 1e9:.3g} GB are free. "
                "Make room, choose another folder (--gpucluster-scratch), or smaller files "
                "(--gpucluster-workload checkpoint.size=...)"
            )
        return make_own(self._folder)
