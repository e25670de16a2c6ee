"""Rows come without end, each to one rank only, and from workers as without them."""

from __future__ import annotations

import itertools
import os
import re
import signal
import sys
import time

import pytest
import torch

from pytest_gpucluster.benchmarks.training import data
from pytest_gpucluster.benchmarks.training.data import Loading, PackedTokens, endless_batches
from pytest_gpucluster.benchmarks.training.model import Geometry
from pytest_gpucluster.errors import EnvironmentBroken

CPU = torch.device("cpu")
GEOMETRY = Geometry(layers=1, width=64, heads=2, vocab=64, sequence=16)


class Deadly(PackedTokens):
    def __getitem__(self, row):
        if row == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(row)


class Slow(PackedTokens):
    def __getitem__(self, row):
        signal.pause()


class Watched(PackedTokens):
    """Rows that say what a worker has of the process that has started it."""

    def __getitem__(self, row):
        return torch.tensor(HERITAGE)


HERITAGE = [0]
"""What a copy of this process would have in it."""


def batches(count, *, workers=0, rank=0, ranks=1):
    made = endless_batches(GEOMETRY, Loading(batch=3, workers=workers, prefetch=2), CPU, rank=rank, count=ranks)
    return list(itertools.islice(made, count))


def test_no_two_ranks_share_a_row_and_none_is_left_out():
    one, two = (torch.cat(batches(4, rank=rank, ranks=2)) for rank in (0, 1))
    alone = torch.cat(batches(8))
    assert torch.equal(alone[0::2], one)
    assert torch.equal(alone[1::2], two)


def test_workers_bring_the_same_rows_in_the_same_order():
    assert all(map(torch.equal, batches(7, workers=2), batches(7)))
    assert batches(1)[0].shape == (3, GEOMETRY.sequence + 1)


def test_a_worker_is_no_copy_of_the_rank(monkeypatch):
    monkeypatch.setattr(data, "PackedTokens", Watched)
    monkeypatch.setattr(sys.modules[__name__], "HERITAGE", [1])
    assert batches(1)[0][0] == 1
    assert batches(1, workers=1)[0][0] == 0, "it would have a CUDA context, and the threads' locks"


def test_a_worker_that_dies_is_the_environment_s_fault(monkeypatch):
    monkeypatch.setattr(data, "PackedTokens", Deadly)
    with pytest.raises(EnvironmentBroken, match=r"DataLoader: .* /dev/shm.*--gpucluster-workload, workers=0"):
        batches(5, workers=1)


@pytest.mark.parametrize(
    "error", [ConnectionResetError(104, "Connection reset by peer"), EOFError(), RuntimeError("DataLoader worker died")]
)
def test_a_worker_that_dies_while_it_hands_over_is_the_environment_s_fault(monkeypatch, error):
    def torn(loader):
        raise error

    monkeypatch.setattr(data, "DataLoader", lambda *_, **__: [])  # no real workers, whom the kept error would keep
    monkeypatch.setattr(data, "_next", torn)
    with pytest.raises(EnvironmentBroken, match=rf"DataLoader: {re.escape(str(error)) or 'EOFError'}") as caught:
        batches(1, workers=1)
    assert caught.value.__cause__ is error


@pytest.mark.parametrize("error", [ConnectionResetError("of somebody else"), RuntimeError("a wrong shape")])
def test_what_no_worker_has_done_stays_as_it_is(monkeypatch, error):
    def wrong(loader):
        raise error

    monkeypatch.setattr(data, "_next", wrong)
    with pytest.raises(type(error), match=str(error)):
        batches(1)


def test_a_worker_that_brings_nothing_is_not_waited_for_without_end(monkeypatch):
    monkeypatch.setattr(data, "PackedTokens", Slow)
    monkeypatch.setattr(data, "WAIT_SECONDS", 1.0)
    monkeypatch.setattr(data, "LIVENESS_SECONDS", 0.3)
    began = time.monotonic()
    with pytest.raises(EnvironmentBroken, match=r"DataLoader timed out after 0\.3 seconds"):
        batches(1, workers=1)
    assert time.monotonic() - began > 1, "a look does not end the wait"


def test_an_error_of_the_data_themselves_stays_what_it_is(monkeypatch):
    class Broken(data.PackedTokens):
        def __getitem__(self, row):
            raise RuntimeError("something else")

    monkeypatch.setattr(data, "PackedTokens", Broken)
    with pytest.raises(RuntimeError, match="something else"):
        batches(1)
