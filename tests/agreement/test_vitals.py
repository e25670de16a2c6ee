import os
import select
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
from ranks import DEADLINE_SECONDS
from recordings import wait_until

from pytest_gpucluster.agreement import liveness
from pytest_gpucluster.agreement.liveness import Heartbeats, Siblings, computes, process_state, start_time


@pytest.fixture
def child():
    process = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(100)"])
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def ended_child():
    """A process that has ended and is not yet reaped."""
    process = subprocess.Popen([sys.executable, "-S", "-c", ""])
    wait_until(lambda: process_state(process.pid).startswith("Z"))
    return process


def facts(pid, *, host="gpu-06", started=None):
    return {"host": host, "pid": pid, "start_time": start_time(pid) if started is None else started}


def siblings(who):
    """Rank 0 is this process."""
    return Siblings({0: facts(os.getpid()), **who}, 0)


def test_a_process_has_one_start_time_for_all_its_life(child):
    begin = start_time(child.pid)
    assert begin is not None
    assert start_time(child.pid) == begin
    assert (start_time(os.getpid()) or 0) <= begin


def test_a_process_that_is_gone_has_neither_start_time_nor_state():
    process = ended_child()
    process.wait()
    assert start_time(process.pid) is None
    assert process_state(process.pid) == "gone"
    assert siblings({1: facts(process.pid, started=5)}).rank_fds == {}


def test_the_name_of_a_program_cannot_spoil_what_is_read_of_it():
    code = "import ctypes, time; ctypes.CDLL(None).prctl(15, b') Z 1 (', 0, 0, 0); print(flush=True); time.sleep(100)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        try:
            wait_until(lambda: process_state(process.pid) == "S: sleeping")
            assert start_time(process.pid)
        finally:
            process.kill()


def test_a_process_stopped_by_a_signal_is_told_from_one_that_sleeps(child):
    wait_until(lambda: process_state(child.pid) == "S: sleeping")
    child.send_signal(signal.SIGSTOP)
    wait_until(lambda: process_state(child.pid) == "T: stopped by a signal")
    child.send_signal(signal.SIGCONT)
    wait_until(lambda: process_state(child.pid) == "S: sleeping")


def test_the_end_of_a_sibling_is_seen_at_once_and_told_once(child):
    before = set(os.listdir("/proc/self/fd"))
    watched = siblings({1: facts(child.pid)})
    assert list(watched.rank_fds) == [1], "not this process itself"
    poller = select.poll()
    watched.watch(poller)
    assert watched.rank_of(999, poller) is None
    assert poller.poll(0) == []
    assert watched.ended() == []
    child.kill()
    ready = [fd for fd, _ in poller.poll(DEADLINE_SECONDS * 1000)]
    assert watched.ended() == [1]
    assert [watched.rank_of(fd, poller) for fd in ready] == [1]
    assert [watched.rank_of(fd, poller) for fd in ready] == [None]
    assert poller.poll(0) == [], "else the watcher's loop would spin"
    watched.close()
    assert watched.rank_fds == {}
    assert set(os.listdir("/proc/self/fd")) == before


def test_a_stopped_sibling_has_not_ended(child):
    watched = siblings({1: facts(child.pid)})
    child.send_signal(signal.SIGSTOP)
    wait_until(lambda: process_state(child.pid).startswith("T"))
    assert watched.ended() == []
    watched.close()


def test_a_sibling_that_ended_before_anybody_looked_is_ended():
    process = ended_child()
    watched = siblings({1: facts(process.pid)})
    assert watched.ended() == [1]
    process.wait()
    watched.close()


@pytest.mark.parametrize(
    "changed",
    [
        pytest.param({"host": "gpu-07"}, id="on another host"),
        pytest.param({"started": 1}, id="another process under a number used again"),
        pytest.param({"started": -1}, id="in another pid namespace"),
    ],
)
def test_what_is_no_sibling_is_not_watched(child, changed):
    before = set(os.listdir("/proc/self/fd"))
    watched = siblings({1: facts(child.pid, **changed)})
    assert watched.rank_fds == {}
    assert set(os.listdir("/proc/self/fd")) == before


def test_a_number_given_to_another_process_just_now_is_not_taken(child, monkeypatch):
    told = facts(child.pid)
    real = os.pidfd_open

    def reused(pid):
        """Between any earlier look and the pidfd the number goes to another process."""
        monkeypatch.setattr(liveness, "start_time", lambda pid: told["start_time"] + 1)
        return real(pid)

    monkeypatch.setattr(os, "pidfd_open", reused)
    assert siblings({1: told}).rank_fds == {}


def test_a_sibling_can_be_signalled_until_it_has_ended_and_after(child):
    watched = siblings({1: facts(child.pid)})
    watched.signal(1, signal.SIGKILL)
    assert child.wait(DEADLINE_SECONDS) == -signal.SIGKILL
    watched.signal(1, signal.SIGKILL)
    watched.signal(7, signal.SIGKILL)
    watched.close()


def test_a_heartbeat_counts_from_when_it_last_changed(monkeypatch):
    clock = SimpleNamespace(now=50.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(liveness, "time", clock)
    beats = Heartbeats([1, 2])
    assert beats.ranks == [1, 2]
    clock.now += 3
    assert beats.silent_for(1) == 3, "also one that has never beaten"
    beats.update({1: b"100", 2: b"7"})
    clock.now += 4
    beats.update({1: b"100", 2: b"8"})
    clock.now += 1
    assert (beats.silent_for(1), beats.silent_for(2)) == (5, 1)
    beats.update({1: b"0"})
    assert beats.silent_for(1) == 0, "a beat is a change, whatever the other clock says"


def seen_by_a_thread():
    """Whether this process computes, as its watcher sees it while the main thread waits."""
    with ThreadPoolExecutor(max_workers=1) as pool:
        return pool.submit(computes).result()


def test_a_child_that_computes_is_seen_and_none_that_waits(child):
    assert not seen_by_a_thread()
    shell = subprocess.Popen(["sh", "-c", "while :; do :; done & wait"], start_new_session=True)
    try:
        wait_until(seen_by_a_thread)  # the shell has to start its own child first
    finally:
        os.killpg(shell.pid, signal.SIGKILL)
        shell.wait()


def test_the_main_thread_is_looked_at_and_other_threads_are_not():
    ended = threading.Event()
    found = []

    def spin(seconds):
        end = time.monotonic() + seconds
        while time.monotonic() < end and not ended.is_set():
            pass

    looking = threading.Thread(target=lambda: (found.append(computes()), ended.set()))
    looking.start()
    spin(DEADLINE_SECONDS)
    looking.join()
    assert found == [True]
    ended.clear()
    spinning = threading.Thread(target=spin, args=(1.0,))
    spinning.start()
    looking = threading.Thread(target=lambda: found.append(computes()))
    looking.start()
    looking.join()
    ended.set()
    spinning.join()
    assert found == [True, False]
