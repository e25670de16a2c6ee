"""The loader, with real worker processes. The data stand in this module, from where a worker imports them."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from each import of_each

from pytest_gpucluster.benchmarks.training import data, loader
from pytest_gpucluster.benchmarks.training.data import PackedTokens, endless_batches
from pytest_gpucluster.benchmarks.training.loader import needed_bytes, require_shared_memory, worker_context
from pytest_gpucluster.benchmarks.training.model import Geometry
from pytest_gpucluster.benchmarks.vision.datasets import ImageBatches
from pytest_gpucluster.errors import EnvironmentBroken

MIB = 2**20

SETTINGS = {"batch": 4, "workers": 2, "prefetch": 2, "rank": 0, "world_size": 2, "pinned": False}


class Numbered:
    """Image n has the value n in all places, and the label n."""

    name, classes, shape = "numbered", 40, (4, 4, 3)

    def __init__(self, rows=40):
        self.rows = rows

    def __len__(self):
        return self.rows

    def __getitem__(self, row):
        return torch.full(self.shape, row, dtype=torch.uint8), row


class Broken(Numbered):
    def __getitem__(self, row):
        if row == 13:
            raise EnvironmentBroken("n0001/13.jpg: cannot be decoded: it is cut off")
        return super().__getitem__(row)


class Dying(Numbered):
    def __init__(self, number):
        super().__init__()
        self.number = number

    def __getitem__(self, row):
        if row == 13:
            os.kill(os.getpid(), self.number)
        return super().__getitem__(row)


class Wrong(Numbered):
    def __getitem__(self, row):
        return {}[row]


@pytest.fixture
def started():
    """Make batches that end with the test, and see that their workers do."""
    all_of = []

    def start(images, **changes):
        all_of.append(ImageBatches(images, **{**SETTINGS, **changes}))
        return all_of[-1]

    yield start
    for batches in all_of:
        batches.close()
    assert multiprocessing.active_children() == []


def rows_of(batches, count):
    return [next(batches)[1].tolist() for _ in range(count)]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_batch_has_images_and_labels_that_belong_together(started, workers):
    images, labels = next(started(Numbered(), workers=workers))
    assert (images.shape, images.dtype, labels.dtype) == ((4, 4, 4, 3), torch.uint8, torch.int64)
    assert images[:, 0, 0, 0].tolist() == labels.tolist()


def test_ranks_read_different_rows_of_an_epoch_and_all_of_them_and_a_batch_may_be_larger(started):
    # 20 rows of each rank: 5 batches of 4.
    shares = [[row for batch in rows_of(started(Numbered(), rank=rank), 5) for row in batch] for rank in (0, 1)]
    assert sorted(shares[0] + shares[1]) == list(range(40))
    [labels] = rows_of(started(Numbered(3), batch=16, world_size=1, workers=0), 1)
    assert (len(labels), set(labels)) == (16, {0, 1, 2})


def test_batches_come_without_end_and_in_another_order_in_each_epoch(started):
    read = [row for batch in rows_of(started(Numbered(10), workers=0, world_size=1), 5) for row in batch]
    assert [sorted(read[:10]), sorted(read[10:])] == [list(range(10))] * 2
    assert read[:10] != read[10:]


@pytest.mark.parametrize("workers", [0, 2])
def test_an_image_that_cannot_be_read_is_an_error_in_plain_words(started, workers):
    with pytest.raises(EnvironmentBroken, match=r"^n0001/13\.jpg: cannot be decoded: it is cut off$"):
        rows_of(started(Broken(), world_size=1, workers=workers), 11)


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (signal.SIGBUS, r"of SIGBUS\. .*shared memory is full\. .*larger: docker"),
        (signal.SIGKILL, r"died of SIGKILL\. .*lack of memory"),
        (signal.SIGSEGV, r"of SIGSEGV\. "),
    ],
    ids=["bus", "kill", "segv"],
)
def test_a_worker_that_dies_is_reported_of_with_the_cause(started, number, message):
    with pytest.raises(EnvironmentBroken, match=rf"^DataLoader worker \(process \d+\) .*{message}"):
        rows_of(started(Dying(number), world_size=1), 40)


def test_a_batch_that_does_not_fit_into_shared_memory_is_reported_of(started, monkeypatch):
    batches = started(Numbered(), workers=0)

    def full():
        raise RuntimeError("unable to allocate shared memory(shm) for file </torch_1>: No space left on device (28)")
        yield

    monkeypatch.setattr(batches, "_batches", full())
    with pytest.raises(EnvironmentBroken, match=r"^a DataLoader .*shared memory\. .*larger: docker"):
        next(batches)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_mistake_in_the_program_stays_what_it_is(started, workers):
    batches = started(Wrong(), workers=workers)
    with pytest.raises(KeyError):
        next(batches)


def test_after_closing_there_is_no_worker(started):
    batches = started(Numbered())
    next(batches)
    workers = multiprocessing.active_children()
    assert len(workers) == 2
    batches.close()
    assert not any(worker.is_alive() for worker in workers)


def read_until_killed(ours):
    batches = ImageBatches(Numbered(), **SETTINGS)
    next(batches)
    ours.send([worker.pid for worker in multiprocessing.active_children()])
    os.kill(os.getpid(), signal.SIGKILL)


def test_workers_end_with_a_rank_that_is_killed():
    context = worker_context()
    answer, ours = context.Pipe(duplex=False)
    rank = context.Process(target=read_until_killed, args=(ours,))
    rank.start()
    ours.close()
    pids = answer.recv()
    rank.join()
    assert (rank.exitcode, len(pids)) == (-signal.SIGKILL, 2)
    until = time.monotonic() + 30
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < until:
        time.sleep(0.05)
    assert [pid for pid in pids if Path(f"/proc/{pid}").exists()] == []


CPU = torch.device("cpu")
GEOMETRY = Geometry(layers=1, width=64, heads=2, vocab=64, sequence=16)


class Watched(PackedTokens):
    """Rows that say what a worker has of the process that has started it."""

    def __getitem__(self, row):
        return torch.tensor(HERITAGE)


HERITAGE = [0]
"""What a copy of this process would have in it."""


def tokens(count, *, workers=0, rank=0, ranks=1):
    made = endless_batches(GEOMETRY, CPU, rank=rank, count=ranks, batch=3, workers=workers, prefetch=2)
    with contextlib.closing(made):
        return list(itertools.islice(made, count))


def test_no_two_ranks_share_a_row_of_tokens_and_none_is_left_out():
    one, two = (torch.cat(tokens(4, rank=rank, ranks=2)) for rank in (0, 1))
    alone = torch.cat(tokens(8))
    assert torch.equal(alone[0::2], one)
    assert torch.equal(alone[1::2], two)


def test_workers_bring_the_same_rows_in_the_same_order_and_end_with_their_reader():
    assert all(map(torch.equal, tokens(7, workers=2), tokens(7)))
    assert tokens(1)[0].shape == (3, GEOMETRY.sequence + 1)
    assert multiprocessing.active_children() == []


def test_a_worker_is_no_copy_of_the_rank(monkeypatch):
    monkeypatch.setattr(data, "PackedTokens", Watched)
    monkeypatch.setattr(sys.modules[__name__], "HERITAGE", [1])
    assert tokens(1)[0][0] == 1
    assert tokens(1, workers=1)[0][0] == 0, "it would have a CUDA context, and the threads' locks"


class FakeRanks:
    """The ranks of a group, of which all but the first are made up."""

    def __init__(self, *others):
        self._others, self.count = [list(map(float, other)) for other in others], 1 + len(others)

    def gather(self, numbers):
        return [list(map(float, numbers)), *self._others]

    def name(self, index):
        return f"rank {index}"


def free(mib, total=64, device=7):
    return lambda: (device, total * MIB, int(mib * MIB))


def missing():
    raise FileNotFoundError(2, "No such file or directory", "/dev/shm")


def test_the_need_counts_all_batches_of_all_workers_in_whole_pages():
    assert needed_bytes([5000, 64], workers=8, prefetch=4) == (32 + 2) * 3 * 4096
    assert needed_bytes([5000], workers=0, prefetch=4) == 0


def test_dev_shm_of_this_machine_is_looked_at():
    device, total_bytes, free_bytes = loader.inspect_shared_memory()
    assert 0 < free_bytes <= total_bytes
    assert device == Path("/dev/shm").stat().st_dev


def test_a_tmpfs_without_a_limit_has_room_for_anything(monkeypatch):
    monkeypatch.setattr(loader.os, "statvfs", lambda folder: SimpleNamespace(f_frsize=4096, f_blocks=0, f_bavail=0))
    require_shared_memory(FakeRanks(), node=0, needed=2**50)


def test_too_little_names_what_was_found_what_is_needed_and_the_fix(monkeypatch):
    def require_shared_memory(ranks, *, inspect, **needed):
        monkeypatch.setattr(loader, "inspect_shared_memory", inspect)
        loader.require_shared_memory(ranks, **needed)

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
def test_ranks_that_share_it_are_counted_together(case, monkeypatch):
    other, message = case
    monkeypatch.setattr(loader, "inspect_shared_memory", free(60))
    with contextlib.nullcontext() if message is None else pytest.raises(EnvironmentBroken, match=rf"^{message}"):
        require_shared_memory(FakeRanks(other), node=0, needed=30 * MIB)
