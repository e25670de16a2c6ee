"""A file system that replaces files at once passes; a reader that finds none, a part, or an old one is noticed."""

from __future__ import annotations

import errno
import itertools
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from pytest_gpucluster.benchmarks.storage import checkpoint, consistency
from pytest_gpucluster.benchmarks.storage.consistency import (
    FILE_BYTES,
    ReadCounts,
    RenameOperations,
    version_content,
    version_of,
)
from pytest_gpucluster.errors import WrongResult

TIMES = 40


def run(
    folder: Path,
    *,
    replace: Callable[[Path, Path], None] = os.replace,
    read: Callable[[Path], bytes] = Path.read_bytes,
    times: int = TIMES,
) -> ReadCounts:
    path = folder / "file"
    consistency.put_version(path, 0)
    return consistency.replace_and_read(
        path, times, writes=True, components=RenameOperations(replace=replace, read=read)
    )


def check(found: ReadCounts, folder: Path) -> None:
    found.require_whole("node-b", folder / "file", TIMES)


def test_a_version_is_known_by_its_whole_content_only() -> None:
    content = version_content(123456)
    assert (version_of(content), len(content)) == (123456, FILE_BYTES)
    assert version_of(content[:4096] + version_content(5)[4096:]) is None
    assert version_of(content[:-1]) is None
    assert version_of(b"") is None


def test_this_host_s_file_system_replaces_at_once(tmp_path: Path) -> None:
    found = run(tmp_path)
    assert (found.missing, found.torn, found.stale, found.backward) == (0, 0, 0, 0)
    assert (found.whole_ratio, found.last) == (1.0, TIMES)
    assert found.versions > 2
    check(found, tmp_path)


def test_a_file_that_is_missing_for_a_moment_is_noticed(tmp_path: Path) -> None:
    reads = itertools.count(1)

    def read(path: Path) -> bytes:
        if next(reads) % 10 == 0:
            raise FileNotFoundError(path)
        return path.read_bytes()

    found = run(tmp_path, read=read)
    assert found.missing > 0
    assert found.whole_ratio < 1
    with pytest.raises(WrongResult, match=r"(?s)node-b .*/file missing \d+ times and torn 0 .*missing after version"):
        check(found, tmp_path)


def test_a_file_that_is_written_in_place_is_seen_in_parts(tmp_path: Path) -> None:
    reads = itertools.count(1)

    def read(path: Path) -> bytes:
        content = path.read_bytes()
        return content[:4096] if next(reads) % 7 == 0 else content

    found = run(tmp_path, read=read)
    with pytest.raises(WrongResult, match=r"missing 0 times and torn \d+ times"):
        check(found, tmp_path)
    assert re.search(r"4096 .*version, after", found.examples[0])


def test_a_reader_that_is_shown_an_old_version_for_ever_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "VISIBILITY_SECONDS", 0.1)
    monkeypatch.setattr(consistency, "_MOST_SECONDS_EACH", 0.005)
    old = version_content(3)
    found = run(tmp_path, read=lambda path: old)
    assert (found.last, found.whole_ratio) == (3, 1.0)
    with pytest.raises(WrongResult, match=r"node-b saw version 3 of .* .*and version 40 was there"):
        check(found, tmp_path)


def test_a_reader_that_sees_nothing_is_no_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consistency, "_MOST_SECONDS_EACH", 0.0)
    monkeypatch.setattr(checkpoint, "VISIBILITY_SECONDS", 0.0)
    found = run(tmp_path)
    assert (found.whole, found.last, found.whole_ratio) == (0, -1, 0.0)
    with pytest.raises(WrongResult, match=r"node-.*saw none"):
        check(found, tmp_path)


def test_stale_handles_and_older_versions_are_counted_and_no_failure(tmp_path: Path) -> None:
    reads = itertools.count(1)

    def read(path: Path) -> bytes:
        number = next(reads)
        if number % 5 == 0:
            raise OSError(errno.ESTALE, "Stale file handle")
        return version_content(0) if number == 31 else path.read_bytes()

    found = run(tmp_path, read=read)
    assert found.stale > 0
    assert found.backward <= 1
    check(found, tmp_path)


def test_a_writer_that_fails_ends_the_reading_at_once_and_another_error_of_the_reader_is_raised(tmp_path: Path) -> None:
    def replace(new: Path, path: Path) -> None:
        if version_of(new.read_bytes()) == 5:
            raise OSError(errno.EDQUOT, "Disk quota exceeded")
        new.replace(path)

    def read(path: Path) -> bytes:
        raise PermissionError(errno.EACCES, "Permission denied")

    with pytest.raises(OSError, match="Disk quota exceeded"):
        run(tmp_path, replace=replace)
    with pytest.raises(PermissionError):
        run(tmp_path, read=read)
