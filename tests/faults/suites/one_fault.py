"""One fault, of the rank VICTIM, that the run may not survive: what happens is in FAULT."""

import ctypes
import os
import signal
import time

import pytest
from stamps import RANK, all_reduce, meet, stamp

FAULT, VICTIM = os.environ["FAULT"], int(os.environ["VICTIM"])


def kill():
    os.kill(os.getpid(), signal.SIGKILL)


def crash():
    ctypes.string_at(0)


def leave_with_3():
    os._exit(3)


def leave_with_0():
    os._exit(0)


def stop():
    os.kill(os.getpid(), signal.SIGSTOP)


def hold_the_gil():
    while True:
        ctypes.PyDLL("libc.so.6").sleep(600)


def hang_in_c():
    libc, mutex = ctypes.CDLL("libc.so.6"), ctypes.create_string_buffer(64)
    libc.pthread_mutex_lock(mutex)
    libc.pthread_mutex_lock(mutex)  # no signal ends this


def interrupt():
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(600)


def terminate():
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(600)


def end_the_session():
    pytest.exit("enough of it", returncode=7)


def wait():
    time.sleep(600)


@pytest.mark.deadline(60)  # the first group of a process takes long on a busy machine
def test_first(cluster):
    meet(cluster, "nothing")


def test_fault(cluster):
    all_reduce(cluster)
    stamp("fault")
    if FAULT == "mismatch":
        all_reduce(cluster, elements=4 if RANK == VICTIM else 9)
    elif RANK == VICTIM:
        globals()[FAULT]()
    all_reduce(cluster)


def test_next(cluster):
    meet(cluster, "fault")
