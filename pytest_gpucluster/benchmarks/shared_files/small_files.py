"""How fast many small files are made, found and removed: what an import or a data set of single files does."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pytest_gpucluster.errors import WrongResult

FILE_BYTES = 4096


def make(path: Path, content: bytes) -> None:
    """Make a file. Raises: OSError."""
    path.write_bytes(content)


@dataclass(frozen=True, kw_only=True)
class Pieces:
    """What is done to the files. A test puts one that is broken in the place of another."""

    make: Callable[[Path, bytes], None] = make
    read: Callable[[Path], bytes] = Path.read_bytes


PIECES = Pieces()


def rate(folder: Path, count: int, *, pieces: Pieces | None = None) -> float:
    """Make files of 4 KiB in a folder, list them, read each and remove all of them; return files a second.

    Args:
        folder: a new one is made here, and removed at the end.
        count: of the files.
        pieces: by default ``PIECES`` of this module.

    Raises:
        WrongResult: a file is not as it was written, or the list is not complete.
        OSError: the file system fails.
    """
    do = pieces or PIECES
    folder.mkdir()
    begin = time.perf_counter()
    names = [f"{index:06d}" for index in range(count)]
    for name in names:
        do.make(folder / name, _content(name))
    listed = sorted(path.name for path in folder.iterdir())
    if listed != names:
        lost = sorted(set(names) ^ set(listed))
        raise WrongResult(f"{folder}: {len(lost)} of {count} files are listed wrongly, the first of them is {lost[0]}")
    for name in names:
        if do.read(folder / name) != _content(name):
            raise WrongResult(f"{folder / name} is not as it was written")
    for name in names:
        (folder / name).unlink()
    seconds = time.perf_counter() - begin
    folder.rmdir()
    return count / seconds


def _content(name: str) -> bytes:
    return name.encode() * (FILE_BYTES // len(name)) + bytes(FILE_BYTES % len(name))
