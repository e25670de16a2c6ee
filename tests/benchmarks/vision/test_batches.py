"""The loader, with real worker processes. The images stand in this module, from where a worker imports them."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest
import torch

from pytest_gpucluster.benchmarks.training.data import worker_context
from pytest_gpucluster.benchmarks.vision.loader import Batches, EndlessBatchSampler, SharedMemory
from pytest_gpucluster.errors import EnvironmentBroken

SETTINGS = {"batch": 4, "workers": 2, "prefetch": 2, "rank": 0, "world_size": 2, "seed": 0, "pinned": False}


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


def look():
    return SharedMemory(total_bytes=2**26, free_bytes=2**20, device=1)


@pytest.fixture
def started():
    """Make batches that end with the test, and see that their workers do."""
    all_of = []

    def start(images, **changes):
        all_of.append(Batches(images, **{**SETTINGS, "inspect": look, **changes}))
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


def test_batches_come_without_end_and_in_another_order_in_each_epoch():
    make = torch.utils.data.DistributedSampler
    rows = iter(EndlessBatchSampler(Numbered(10), batch=4, rank=0, world_size=1, seed=0, make=make))
    read = [row for batch in itertools.islice(rows, 5) for row in batch]
    assert [sorted(read[:10]), sorted(read[10:])] == [list(range(10))] * 2
    assert read[:10] != read[10:]


@pytest.mark.parametrize("workers", [0, 2])
def test_an_image_that_cannot_be_read_is_an_error_in_plain_words(started, workers):
    with pytest.raises(EnvironmentBroken, match=r"^n0001/13\.jpg: cannot be decoded: it is cut off$"):
        rows_of(started(Broken(), world_size=1, workers=workers), 11)


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (signal.SIGBUS, r"of SIGBUS, .*/dev/shm has 0\.000977 GiB free of 0\.0625 "),
        (signal.SIGKILL, r"was killed \(SIGKILL\)"),
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
    with pytest.raises(EnvironmentBroken, match=r"^a DataLoader .*shared memory\. "):
        next(batches)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_mistake_in_the_program_stays_what_it_is(started, workers):
    batches = started(Wrong(), workers=workers)
    with pytest.raises(KeyError):
        next(batches)


def test_after_closing_there_is_no_next_batch_and_no_worker(started):
    batches = started(Numbered())
    next(batches)
    workers = multiprocessing.active_children()
    assert len(workers) == 2
    batches.close()
    assert not any(worker.is_alive() for worker in workers)
    with pytest.raises(ValueError, match="have been closed"):
        next(batches)


def read_until_killed(ours):
    batches = Batches(Numbered(), **SETTINGS)
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
