"""Groups of NCCL: their abort from another thread, and what torch needs to make them."""

import threading
import time
from functools import partial
from types import SimpleNamespace
from unittest.mock import create_autospec

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from pytest_gpucluster.device import process_group
from pytest_gpucluster.device.process_group import NcclReleaser, changes_algorithms, forget_abort, init_group
from pytest_gpucluster.errors import EnvironmentBroken

DEADLINE_SECONDS = 20.0


@pytest.mark.parametrize("place", ["cpu", "cuda:2"])
def test_a_group_of_a_gpu_connects_at_once(monkeypatch, place):
    made = create_autospec(dist.init_process_group)
    monkeypatch.setattr(dist, "init_process_group", made)
    monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD="all ranks"))
    store, device = dist.HashStore(), torch.device(place)
    found = init_group(device, store=store, rank=0, world_size=1)
    assert found == "all ranks"
    [given] = made.call_args_list
    backend, at_once = ("gloo", {}) if place == "cpu" else ("nccl", {"device_id": device})
    assert (given.args, given.kwargs) == ((backend,), {"store": store, "rank": 0, "world_size": 1, **at_once})


def test_what_an_abort_has_left_on_the_store_is_taken_back():
    store = dist.HashStore()
    store.set("exception_dump", "1")
    forget_abort(store)
    assert not store.check(["exception_dump"])


def test_deterministic_algorithms_would_change_what_nccl_chooses():
    assert not changes_algorithms()
    torch.use_deterministic_algorithms(True)
    try:
        assert changes_algorithms()
    finally:
        torch.use_deterministic_algorithms(False)


class Group:
    def __init__(self, abort):
        self.abort = abort


class Communicators:
    """torch's register of process groups, where what an abort does is written down; and where it is held up."""

    def __init__(self, monkeypatch, groups):
        self.calls = []
        self.held, self.let_go = 0, threading.Event()
        self._all_in = threading.Barrier(groups) if groups else None
        register = {Group(partial(self._abort, index)): str(index) for index in range(groups)}
        monkeypatch.setattr(distributed_c10d, "_world", SimpleNamespace(pg_names=register))
        monkeypatch.setattr(distributed_c10d, "is_initialized", lambda: bool(groups))
        for name in ("_abort_process_group", "destroy_process_group"):
            monkeypatch.setattr(distributed_c10d, name, lambda name=name: self.calls.append(name))

    def _abort(self, index):
        self.calls.append("abort")
        if index < self.held:
            self.let_go.wait(DEADLINE_SECONDS)
        elif not self.held:
            self._all_in.wait(DEADLINE_SECONDS)  # one after the other, the first would wait here for good


def test_where_there_are_no_communicators_there_is_nothing_to_abort(monkeypatch):
    found = Communicators(monkeypatch, 0)
    releaser = NcclReleaser()
    assert not releaser.making_group
    releaser.release()
    releaser.finish()
    assert found.calls == []


def test_communicators_are_aborted_all_at_once_and_once_and_never_destroyed(monkeypatch):
    found = Communicators(monkeypatch, 3)
    releaser = NcclReleaser()
    releaser.release()
    releaser.release()
    releaser.finish()
    assert found.calls == ["abort", "abort", "abort", "_abort_process_group"]


def test_all_aborts_have_one_budget_and_what_hangs_is_an_error_that_counts_it(monkeypatch):
    found = Communicators(monkeypatch, 3)
    found.held = 2
    monkeypatch.setattr(process_group, "ABORT_SECONDS", 0.05)
    releaser = NcclReleaser()
    for _ in range(2):
        with pytest.raises(EnvironmentBroken, match=r"^2 of 3 .* 0\.05 s"):
            releaser.finish()
    assert found.calls.count("abort") <= 4, "one that hangs is not called again"
    assert "_abort_process_group" not in found.calls, "it would wait for the hanging ones, one after the other"
    found.let_go.set()
    found.held = 0
    while any(thread.name == "gpucluster-abort" for thread in threading.enumerate()):
        time.sleep(0.001)


def test_an_abort_that_is_under_way_is_waited_for_before_the_next_group(monkeypatch):
    found = Communicators(monkeypatch, 1)
    found.held = 1
    releaser = NcclReleaser()
    by_watcher = threading.Thread(target=releaser.release)
    by_watcher.start()
    while not found.calls:
        time.sleep(0.001)
    releaser.release()
    assert found.calls == ["abort"], "the watcher is not held up by its own abort"
    timer = threading.Timer(0.02, found.let_go.set)
    timer.start()
    releaser.finish()
    assert found.calls == ["abort", "_abort_process_group"]
    by_watcher.join()
    timer.join()
