"""The bandwidth of one rank; with more, tests/acceptance/test_acceptance_checkpoint.py."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import replace

import pytest
import torch.distributed as dist
from each import of_each

from pytest_gpucluster.benchmarks.storage import bandwidth
from pytest_gpucluster.benchmarks.storage.bandwidth import (
    COMPONENTS,
    PAGE_BYTES,
    shift_of,
    storage_bandwidth,
    write_file,
)
from pytest_gpucluster.errors import EnvironmentBroken, WrongResult

SIZE = 4 * PAGE_BYTES


@pytest.fixture
def measure(tmp_path):
    """The measurement over a group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    def run(**more):
        given = {"hosts": ["a"], "file_bytes": SIZE, "passes": 2} | more
        return storage_bandwidth(dist.group.WORLD, tmp_path, **given)

    yield run
    dist.destroy_process_group()


@of_each("case", [("aabb", 2), ("abab", 1), ("aaab", 1), ("aabbcc", 2), ("ab", 1), ("aa", 1), ("a", 0)])
def test_every_rank_reads_the_file_of_one_other_rank_if_possible_on_another_host(case):
    assert shift_of(case[0]) == case[1]


def test_one_rank_reads_its_own_file_and_the_time_is_that_of_the_pieces(measure, tmp_path):
    def write(path, size_bytes, contents):
        write_file(path, size_bytes, contents)
        return 0.5

    reports = []
    found = measure(progress=lambda step, of: reports.append((step, of)), components=replace(COMPONENTS, write=write))
    assert found.written_bytes_per_second == (2 * SIZE, 2 * SIZE)
    assert len(found.read_bytes_per_second) == 2
    assert (found.verified_ratio, found.file_bytes, found.other_host) == (1.0, SIZE, False)
    assert reports == [(1, 2), (2, 2)]
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_byte_is_found_and_no_file_is_left(measure, tmp_path):
    def write(path, size_bytes, contents):
        seconds = write_file(path, size_bytes, contents)
        path.write_bytes(path.read_bytes()[:-1] + b"?")
        return seconds

    with pytest.raises(WrongResult, match=rf"pass-0-rank-00000\.bin at byte {SIZE - 8}: found"):
        measure(components=replace(COMPONENTS, write=write))
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


@of_each("more", [{"passes": 0}, {"file_bytes": 0}, {"file_bytes": 5000}])
def test_wrong_arguments_are_refused(measure, more):
    with pytest.raises(ValueError, match=r"file_bytes a multiple of 4096"):
        measure(**more)
