from __future__ import annotations

import contextlib
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from each import of_each

from pytest_gpucluster.benchmarks.vision import loader
from pytest_gpucluster.benchmarks.vision.loader import (
    SharedMemory,
    needed_bytes,
    require_shared_memory,
    shared_memory_shortage,
)
from pytest_gpucluster.errors import EnvironmentBroken

MIB = 2**20


class FakeRanks:
    """The ranks of a group, of which all but the first are made up."""

    def __init__(self, *others):
        self._others, self.count = [list(map(float, other)) for other in others], 1 + len(others)

    def gather(self, numbers):
        return [list(map(float, numbers)), *self._others]

    def name(self, index):
        return f"rank {index}"


def free(mib, total=64, device=7):
    return lambda: SharedMemory(total_bytes=total * MIB, free_bytes=int(mib * MIB), device=device)


def missing():
    raise FileNotFoundError(2, "No such file or directory", "/dev/shm")


def test_the_need_counts_all_batches_of_all_workers_in_whole_pages():
    assert needed_bytes([5000, 64], workers=8, prefetch=4) == (32 + 2) * 3 * 4096
    assert needed_bytes([5000], workers=0, prefetch=4) == 0


def test_dev_shm_of_this_machine_is_looked_at():
    room = loader.inspect_shared_memory()
    assert 0 < room.free_bytes <= room.total_bytes
    assert room.device == Path("/dev/shm").stat().st_dev


def test_a_tmpfs_without_a_limit_has_room_for_anything(monkeypatch):
    monkeypatch.setattr(loader.os, "statvfs", lambda folder: SimpleNamespace(f_frsize=4096, f_blocks=0, f_bavail=0))
    require_shared_memory(FakeRanks(), node=0, needed=2**50)


def test_too_little_names_what_was_found_what_is_needed_and_the_fix():
    require_shared_memory(FakeRanks(), node=0, needed=32 * MIB, inspect=free(40))  # times 1.25
    require_shared_memory(FakeRanks(), node=0, needed=0, inspect=missing)
    message = (
        r"^rank 0: /dev/shm has 0\.0586 GiB free of 0\.0625 GiB, .* 1 ranks .* 2\.5 GiB\. .*--shm-size=3g.*size=3G"
    )
    with pytest.raises(EnvironmentBroken, match=rf"{message}.*vision\.workers=2.*vision\.prefetch=2$"):
        require_shared_memory(FakeRanks(), node=0, needed=2048 * MIB, inspect=free(60))
    with pytest.raises(EnvironmentBroken, match=r"^rank 0: /dev/shm cannot.* .* need 0\.00122 GiB\."):
        require_shared_memory(FakeRanks(), node=0, needed=MIB, inspect=missing)


@of_each(
    "case",
    [
        # node, device, total, free, needed: rank 0 is on node 0, with device 7.
        ((0, 7, 64 * MIB, 60 * MIB, 30 * MIB), r"rank 0: /dev/shm has 0\.0586 GiB .* of the 2 ranks"),
        ((1, 7, 64 * MIB, 60 * MIB, 30 * MIB), None),
        ((0, 8, 64 * MIB, 60 * MIB, 30 * MIB), None),
        ((1, 7, 64 * MIB, 9 * MIB, 30 * MIB), r"rank 1: /dev/shm has 0\.00879 GiB .* of the 1 ranks"),
        ((1, -1, 0, 0, 30 * MIB), "rank 1: /dev/shm cannot"),
    ],
)
def test_ranks_that_share_it_are_counted_together(case):
    other, message = case
    with contextlib.nullcontext() if message is None else pytest.raises(EnvironmentBroken, match=rf"^{message}"):
        require_shared_memory(FakeRanks(other), node=0, needed=30 * MIB, inspect=free(60))


def test_after_a_failure_what_there_is_is_reported():
    assert re.search(
        r"/dev/shm has 0\.00146 GiB free of 0\.0625 GiB now\. .*larger: docker.* ", shared_memory_shortage(free(1.5))
    )
    assert re.search(r"/dev/shm cannot.*: \[Errno 2\]", shared_memory_shortage(missing))
