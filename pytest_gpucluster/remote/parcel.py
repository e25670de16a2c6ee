"""A folder on its way from a node: packed there, and unpacked here without trust in what is in it."""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import IO

from pytest_gpucluster.errors import EnvironmentBroken

_PIECE_BYTES = 96 * 1024
MOST_BYTES = 8 << 30
"""More than any run leaves; less than what fills a disk by mistake."""


class _Pieces(io.RawIOBase):
    """A file that hands on what is written to it."""

    def __init__(self) -> None:
        self.waiting = bytearray()

    def writable(self) -> bool:
        return True

    def write(self, data: object) -> int:
        piece = bytes(data)  # type: ignore[call-overload]  # RawIOBase calls it a buffer, which bytes() takes
        self.waiting += piece
        return len(piece)

    def take(self, least: int) -> Iterator[bytes]:
        while len(self.waiting) >= max(1, least):
            yield bytes(self.waiting[:_PIECE_BYTES])
            del self.waiting[:_PIECE_BYTES]


def pack(folder: Path, beside: Path | None = None) -> Iterator[bytes]:
    """Return a folder as a compressed archive in pieces: files, folders, and links to what lies beside them.

    Args:
        folder: its content is that of the archive.
        beside: a folder that goes with it under its own name.
    """
    pieces = _Pieces()
    with tarfile.open(fileobj=pieces, mode="w|gz", format=tarfile.PAX_FORMAT) as archive:
        found = [(path, folder) for path in sorted(folder.rglob("*"))]
        found += [(path, beside.parent) for path in sorted(beside.rglob("*"))] if beside is not None else []
        for path, root in found:
            name = path.relative_to(root).as_posix()
            try:
                if path.is_symlink() or path.is_file() or path.is_dir():
                    archive.add(path, arcname=name, recursive=False)
            except FileNotFoundError:
                continue  # somebody still writes there, and has taken it away
            yield from pieces.take(_PIECE_BYTES)
    yield from pieces.take(1)


def unpack(archive: IO[bytes], folder: Path) -> int:
    """Unpack an archive into a folder, which must be there, and return how many files came.

    Raises:
        EnvironmentBroken: it is cut off or damaged, too large, or has something in it that is no part of a report: a
            way out of the folder, a device.
        OSError: a file cannot be written.
    """
    count = total = 0
    links: list[tuple[Path, str]] = []
    try:
        with tarfile.open(fileobj=archive, mode="r|gz") as packed:
            for member in packed:
                place = folder / _inside(member.name)
                total += member.size
                if total > MOST_BYTES:
                    raise EnvironmentBroken(f"more than {MOST_BYTES >> 30} GiB; they stay where they are")
                if member.isdir():
                    place.mkdir(parents=True, exist_ok=True)
                elif member.isfile():
                    place.parent.mkdir(parents=True, exist_ok=True)
                    _write(packed, member, place)
                    count += 1
                elif member.issym() and "/" not in member.linkname and member.linkname not in ("", ".", ".."):
                    links.append((place, member.linkname))
                else:
                    raise EnvironmentBroken(f"{member.name!r} among them is neither a file nor a folder")
    except (tarfile.TarError, EOFError, ValueError, OverflowError) as error:
        raise EnvironmentBroken(f"what came is no whole archive: {error}") from None
    # After all else, so that nothing is written through one.
    for place, target in links:
        if not os.path.lexists(place):
            place.symlink_to(target)
    return count


def _write(packed: tarfile.TarFile, member: tarfile.TarInfo, place: Path) -> None:
    source = packed.extractfile(member)
    assert source is not None  # it is a file
    with place.open("xb") as file:
        while piece := source.read(1 << 20):
            file.write(piece)
    os.utime(place, (member.mtime, member.mtime))


def _inside(name: str) -> str:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in name:
        raise EnvironmentBroken(f"{name!r} among them would lie outside of their folder")
    return str(path)
