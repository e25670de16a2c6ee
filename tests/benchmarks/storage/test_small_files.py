"""Small files are counted over the time, and one that is lost or changed is noticed."""

from __future__ import annotations

from pathlib import Path

import pytest

from pytest_gpucluster.benchmarks.storage.shared_filesystem import (
    FILE_BYTES,
    FileOperations,
    make_file,
    small_files_per_second,
)
from pytest_gpucluster.errors import WrongResult


def test_all_are_made_read_and_removed(tmp_path: Path) -> None:
    sizes = []

    def read(path: Path) -> bytes:
        content = path.read_bytes()
        sizes.append(len(content))
        return content

    assert small_files_per_second(tmp_path / "small", 20, components=FileOperations(read=read)) > 0
    assert sizes == [FILE_BYTES] * 20
    assert list(tmp_path.iterdir()) == []


def test_a_lost_or_changed_file_and_a_file_system_that_fails_are_noticed(tmp_path: Path) -> None:
    def lose(path: Path, content: bytes) -> None:
        if path.name != "000003":
            make_file(path, content)

    with pytest.raises(WrongResult, match=r"1 of 5 .*listed wrongly.* 000003"):
        small_files_per_second(tmp_path / "lost", 5, components=FileOperations(make=lose))
    with pytest.raises(WrongResult, match=r"000000 .*was written"):
        small_files_per_second(
            tmp_path / "changed", 5, components=FileOperations(read=lambda path: path.read_bytes()[:-1])
        )
    with pytest.raises(FileNotFoundError):
        small_files_per_second(tmp_path / "none" / "small", 1)
