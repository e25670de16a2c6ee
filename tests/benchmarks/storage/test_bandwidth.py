"""A file is written and read to its last byte, and each wrong one is found; on one rank."""

from __future__ import annotations

import os
from collections import namedtuple
from pathlib import Path
from unittest.mock import patch

import pytest
from each import of_each

from pytest_gpucluster.benchmarks.storage import bandwidth
from pytest_gpucluster.benchmarks.storage.bandwidth import (
    PAGE_BYTES,
    Contents,
    file_system_of,
    read_file,
    reads_directly,
    shift_of,
    storage_bandwidth,
    write_file,
)
from pytest_gpucluster.errors import EnvironmentBroken, WrongResult

SIZE = 4 * PAGE_BYTES


@pytest.fixture
def measure(group, tmp_path):
    """The measurement over a group of this process alone."""

    def run(write=write_file, **more):
        with patch.object(bandwidth, "write_file", write):
            return storage_bandwidth(group, tmp_path, **{"hosts": ["a"], "file_bytes": SIZE, "passes": 2, **more})

    return run


@of_each("case", [("aabb", 2), ("abab", 1), ("aaab", 1), ("aabbcc", 2), ("ab", 1), ("aa", 1), ("a", 0)])
def test_every_rank_reads_the_file_of_one_other_rank_if_possible_on_another_host(case):
    assert shift_of(case[0]) == case[1]


def test_one_rank_reads_its_own_file_and_the_time_is_that_of_the_pieces(measure, tmp_path):
    def write(path, size_bytes, contents):
        write_file(path, size_bytes, contents)
        return 0.5

    reports = []
    found = measure(progress=lambda step, of: reports.append((step, of)), write=write)
    assert found.written_bytes_per_second == (2 * SIZE, 2 * SIZE)
    assert len(found.read_bytes_per_second) == 2
    assert (found.verified_ratio, found.other_host) == (1.0, False)
    assert reports == [(1, 2), (2, 2)]
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_byte_is_found_and_no_file_is_left(measure, tmp_path):
    def write(path, size_bytes, contents):
        seconds = write_file(path, size_bytes, contents)
        path.write_bytes(path.read_bytes()[:-1] + b"?")
        return seconds

    with pytest.raises(WrongResult, match=rf"pass-0-rank-00000\.bin at byte {SIZE - 8}: found"):
        measure(write=write)
    assert list(tmp_path.iterdir()) == []


def test_without_o_direct_it_says_so(measure, monkeypatch):
    monkeypatch.setattr(bandwidth, "reads_directly", lambda path: False)
    found = measure()
    assert (found.past_the_cache, found.verified_ratio) == ("posix_fadvise", 1.0)


def test_too_little_space_is_the_environment_s_fault(measure, monkeypatch):
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(bandwidth.shutil, "disk_usage", lambda path: usage(free=10_000))
    with pytest.raises(EnvironmentBroken, match=r"1\.64e-05 GB, and 1e-05 GB are free.*checkpoint\.size"):
        measure()


CHUNK = 2**16


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    monkeypatch.setattr(bandwidth, "CHUNK_BYTES", CHUNK)


@pytest.fixture(params=[True, False], ids=["O_DIRECT", "posix_fadvise"])
def direct(request, tmp_path):
    """Both ways to read, the first one where the file system has it."""
    probe = tmp_path / "probe"
    probe.write_bytes(bytes(PAGE_BYTES))
    if request.param and not reads_directly(probe):
        pytest.skip("no O_DIRECT here")
    return request.param


@of_each("size", [PAGE_BYTES, CHUNK, CHUNK + 3 * PAGE_BYTES, 5 * CHUNK])
def test_what_was_written_is_read_and_verified(tmp_path, size, direct):
    path = tmp_path / f"{size}"
    assert write_file(path, size, Contents(3)) > 0
    assert path.stat().st_size == size
    seconds, *found = read_file(path, size, Contents(3), direct=direct)
    assert found == [size, ""]
    assert seconds > 0
    with pytest.raises(FileExistsError):
        write_file(path, PAGE_BYTES, Contents(3))


@of_each("at", [0, 4097, CHUNK - 1, CHUNK, 4 * CHUNK + 17, 5 * CHUNK - 1])
def test_each_single_wrong_bit_is_found(tmp_path, at, direct):
    path, size = tmp_path / f"{at}", 5 * CHUNK
    write_file(path, size, Contents(3))
    content = bytearray(path.read_bytes())
    content[at] ^= 128
    path.write_bytes(content)
    _, verified, defect = read_file(path, size, Contents(3), direct=direct)
    assert defect.startswith(f"at byte {at - at % 8}: found ")
    assert verified == 4 * CHUNK


@of_each("left", [0, 100, PAGE_BYTES, CHUNK, 2 * CHUNK + 5000])
def test_a_file_that_ends_too_soon_is_found(tmp_path, left, direct):
    path, size = tmp_path / f"{left}", 5 * CHUNK
    write_file(path, size, Contents(3))
    os.truncate(path, left)
    _, *found = read_file(path, size, Contents(3), direct=direct)
    assert found == [left - left % CHUNK, f"ends at byte {left} of {size}"]


def test_the_file_of_another_rank_is_none_of_this_one_and_no_page_is_like_another_one(tmp_path, direct):
    path = tmp_path / "file"
    write_file(path, CHUNK, Contents(3))
    assert read_file(path, CHUNK, Contents(4), direct=direct)[2].startswith("at byte 8: found ")
    content = path.read_bytes()
    assert len({content[at : at + PAGE_BYTES] for at in range(0, CHUNK, PAGE_BYTES)}) == CHUNK // PAGE_BYTES


def test_a_file_that_cannot_be_opened_is_an_error_and_no_lack_of_o_direct(tmp_path):
    with pytest.raises(FileNotFoundError):
        reads_directly(tmp_path / "none")


MOUNTS = r"""24 1 8:1 / / rw shared:1 - ext4 /dev/sda1 rw
25 24 0:22 / /run rw - tmpfs tmpfs rw
26 24 0:50 / /mnt/a\040b rw - lustre mgs:/fs rw
27 24 0:51 / /mnt rw shared:7 master:3 - nfs4 server:/mnt rw
28 27 0:52 / /mnt rw - ceph server:/mnt rw
"""


def test_the_file_system_is_that_of_the_longest_mount_point_and_unknown_where_the_kernel_does_not_tell(monkeypatch):
    def fail(self, **how):
        raise PermissionError

    monkeypatch.setattr(bandwidth.Path, "read_text", lambda self, **how: MOUNTS)
    known = {"/home/x": "ext4", "/run/y/z": "tmpfs", "/mnt/a b/c": "lustre", "/mnt/z": "ceph"}
    assert {path: file_system_of(Path(path)) for path in known} == known
    monkeypatch.setattr(bandwidth.Path, "read_text", fail)
    assert file_system_of(Path("/run")) == "unknown"
