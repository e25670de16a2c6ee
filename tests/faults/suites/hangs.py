"""Hangs that can be ended; each is followed by a test that needs all ranks."""

import ctypes
import threading
import time

import pytest
from stamps import RANK, all_reduce, meet, stamp


def test_first(cluster):
    meet(cluster, "nothing")


def test_sleep(cluster):
    stamp("sleep")
    if RANK == 1:
        time.sleep(600)
    all_reduce(cluster)


def test_after_sleep(cluster):
    meet(cluster, "sleep")


def test_lock(cluster):
    stamp("lock")
    if RANK == 1:
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()
    all_reduce(cluster)


def test_after_lock(cluster):
    meet(cluster, "lock")


def test_loop(cluster):
    stamp("loop")
    while RANK == 0:
        pass
    all_reduce(cluster)


def test_after_loop(cluster):
    meet(cluster, "loop")


def test_finished_early(cluster):
    stamp("finished_early")
    all_reduce(cluster)
    if RANK == 0:
        all_reduce(cluster)


def test_after_finished_early(cluster):
    meet(cluster, "finished_early")


def test_another_collective(cluster):
    import torch

    stamp("another_collective")
    all_reduce(cluster)
    if RANK == 1:
        torch.distributed.barrier(group=cluster.group)
    else:
        all_reduce(cluster)


def test_after_another_collective(cluster):
    meet(cluster, "another_collective")


def test_never_joined_the_group(cluster):
    stamp("never_joined_the_group")
    cluster.discard(epoch=10_000)
    if RANK == 0:
        all_reduce(cluster)


def test_after_never_joined_the_group(cluster):
    meet(cluster, "never_joined_the_group")


@pytest.fixture
def slow_setup():
    stamp("setup")
    if RANK == 1:
        time.sleep(600)


def test_setup(cluster, slow_setup):
    stamp("body_entered_in_spite_of_the_setup")
    all_reduce(cluster)


def test_after_setup(cluster):
    meet(cluster, "setup")


@pytest.fixture
def slow_teardown():
    yield
    stamp("teardown")
    if RANK == 1:
        time.sleep(600)


def test_teardown(cluster, slow_teardown):
    all_reduce(cluster)


def test_after_teardown(cluster):
    meet(cluster, "teardown")


def test_c_call_that_signals_end(cluster):
    stamp("c_call_that_signals_end")
    if RANK == 1:
        ctypes.CDLL("libc.so.6").sleep(600)
    all_reduce(cluster)


def test_after_c_call_that_signals_end(cluster):
    meet(cluster, "c_call_that_signals_end")


def test_everywhere():
    stamp("everywhere")
    time.sleep(600)


def test_after_everywhere(cluster):
    meet(cluster, "everywhere")


@pytest.mark.deadline(20)
def test_slow_but_within_its_own_deadline(cluster):
    time.sleep(1.5)
    all_reduce(cluster)


@pytest.mark.deadline(20)
def test_peer_that_still_computes(cluster):
    stamp("peer_that_still_computes")
    if RANK == 1:
        raise RuntimeError("rank 1 fails")
    time.sleep(2)
    stamp("computed")
    all_reduce(cluster)


def test_after_peer_that_still_computes(cluster):
    meet(cluster, "peer_that_still_computes")
