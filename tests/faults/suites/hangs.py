"""Hangs that can be ended; each is followed by a test that needs all ranks."""

import ctypes
import threading
import time

import pytest
from stamps import RANK, all_reduce, meet, stamp, then_meet


def test_first(cluster):
    meet(cluster, "nothing")


@then_meet
def test_sleep(cluster):
    stamp("sleep")
    if RANK == 1:
        time.sleep(600)
    all_reduce(cluster)


@then_meet
def test_lock(cluster):
    stamp("lock")
    if RANK == 1:
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()
    all_reduce(cluster)


@then_meet
def test_loop(cluster):
    stamp("loop")
    while RANK == 0:
        pass
    all_reduce(cluster)


@then_meet
def test_finished_early(cluster):
    stamp("finished_early")
    all_reduce(cluster)
    if RANK == 0:
        all_reduce(cluster)


@then_meet
def test_another_collective(cluster):
    import torch

    stamp("another_collective")
    all_reduce(cluster)
    if RANK == 1:
        torch.distributed.barrier(group=cluster.group)
    else:
        all_reduce(cluster)


@then_meet
def test_never_joined_the_group(cluster):
    stamp("never_joined_the_group")
    cluster.discard(epoch=10_000)
    if RANK == 0:
        all_reduce(cluster)


@pytest.fixture
def slow_setup():
    stamp("setup")
    if RANK == 1:
        time.sleep(600)


@then_meet
def test_setup(cluster, slow_setup):
    stamp("body_entered_in_spite_of_the_setup")
    all_reduce(cluster)


@pytest.fixture
def slow_teardown():
    yield
    stamp("teardown")
    if RANK == 1:
        time.sleep(600)


@then_meet
def test_teardown(cluster, slow_teardown):
    all_reduce(cluster)


@then_meet
def test_c_call_that_signals_end(cluster):
    stamp("c_call_that_signals_end")
    if RANK == 1:
        ctypes.CDLL("libc.so.6").sleep(600)
    all_reduce(cluster)


@then_meet
def test_everywhere():
    stamp("everywhere")
    time.sleep(600)


@pytest.mark.deadline(20)
def test_slow_but_within_its_own_deadline(cluster):
    time.sleep(1.5)
    all_reduce(cluster)


@then_meet
@pytest.mark.deadline(20)
def test_peer_that_still_computes(cluster):
    stamp("peer_that_still_computes")
    if RANK == 1:
        raise RuntimeError("rank 1 fails")
    time.sleep(2)
    stamp("computed")
    all_reduce(cluster)
