from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from pytest_gpucluster.benchmarks.vision import shared_memory
from pytest_gpucluster.benchmarks.vision.shared_memory import (
    Room,
    look,
    needed_bytes,
    require_shared_memory,
    shortage,
)
from pytest_gpucluster.errors import EnvironmentBroken

MIB = 2**20


class Told:
    """The ranks of a group, of which all but the first are made up."""

    def __init__(self, *others):
        self._others, self.count = [list(map(float, other)) for other in others], 1 + len(others)

    def gather(self, numbers):
        return [list(map(float, numbers)), *self._others]

    def name(self, index):
        return f"rank {index}"


def free(mib, total=64, device=7):
    return lambda: Room(total_bytes=total * MIB, free_bytes=int(mib * MIB), device=device)


def missing():
    raise FileNotFoundError(2, "No such file or directory", "/dev/shm")


def test_the_need_counts_all_batches_of_all_workers_in_whole_pages():
    assert needed_bytes([4096, 1], workers=1, prefetch=1) == (1 + 2) * 2 * 4096
    assert needed_bytes([5000, 64], workers=8, prefetch=4) == (32 + 2) * 3 * 4096
    assert needed_bytes([5000], workers=0, prefetch=4) == 0


def test_dev_shm_of_this_machine_is_looked_at():
    room = look()
    assert 0 < room.free_bytes <= room.total_bytes
    assert room.device == Path("/dev/shm").stat().st_dev


def test_a_tmpfs_without_a_limit_has_room_for_anything(monkeypatch):
    monkeypatch.setattr(
        shared_memory.os, "statvfs", lambda folder: SimpleNamespace(f_frsize=4096, f_blocks=0, f_bavail=0)
    )
    require_shared_memory(Told(), node=0, needed=2**50)


def test_enough_is_enough():
    require_shared_memory(Told(), node=0, needed=32 * MIB, look=free(40))  # times 1.25


def test_too_little_names_what_was_found_what_is_needed_and_the_fix():
    with pytest.raises(EnvironmentBroken) as caught:
        require_shared_memory(Told(), node=0, needed=2048 * MIB, look=free(60))
    assert str(caught.value) == (
        "rank 0: /dev/shm has 0.0586 GiB free of 0.0625 GiB, and the DataLoader workers of the 1 ranks that share it "
        "need 2.5 GiB. Make it larger: docker run --shm-size=3g, or --ipc=host; in Kubernetes mount an emptyDir with "
        "medium: Memory at /dev/shm; on bare metal and under Slurm mount -o remount,size=3G /dev/shm. Or ask for less: "
        "--gpucluster-workload vision.workers=2 --gpucluster-workload vision.prefetch=2"
    )


@pytest.mark.parametrize(
    ("others", "told"),
    [
        # node, device, total, free, needed: rank 0 is on node 0, with device 7.
        (
            [(0, 7, 64 * MIB, 60 * MIB, 30 * MIB)],
            "rank 0: /dev/shm has 0.0586 GiB free of 0.0625 GiB, .* of the 2 ranks",
        ),
        ([(1, 7, 64 * MIB, 60 * MIB, 30 * MIB)], None),
        ([(0, 8, 64 * MIB, 60 * MIB, 30 * MIB)], None),
        ([(1, 7, 64 * MIB, 9 * MIB, 30 * MIB)], "rank 1: /dev/shm has 0.00879 GiB free .* of the 1 ranks"),
        ([(1, -1, 0, 0, 30 * MIB)], "rank 1: /dev/shm cannot be looked at, and the DataLoader workers"),
    ],
    ids=["together too much", "another node", "a container each", "another node too small", "another node has none"],
)
def test_ranks_that_share_it_are_counted_together(others, told):
    ranks = Told(*others)
    if told is None:
        require_shared_memory(ranks, node=0, needed=30 * MIB, look=free(60))
        return
    with pytest.raises(EnvironmentBroken, match=rf"^{told}"):
        require_shared_memory(ranks, node=0, needed=30 * MIB, look=free(60))


def test_without_dev_shm_there_is_no_room():
    with pytest.raises(EnvironmentBroken, match=r"^rank 0: /dev/shm cannot be looked at, and .* need 0\.00122 GiB\."):
        require_shared_memory(Told(), node=0, needed=MIB, look=missing)


def test_without_workers_nothing_is_needed():
    require_shared_memory(Told(), node=0, needed=0, look=missing)


def test_after_a_failure_what_there_is_is_told():
    assert shortage(free(1.5)).startswith(
        "/dev/shm has 0.00146 GiB free of 0.0625 GiB now. Make it larger: docker run "
    )
    assert shortage(missing).startswith("/dev/shm cannot be looked at: [Errno 2]")
