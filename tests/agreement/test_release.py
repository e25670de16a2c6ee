import contextlib
import os
import signal
import socket
import threading
import time

import pytest

from pytest_gpucluster.agreement.release import RELEASE_SIGNAL, PythonReleaser, Released, SocketReleaser

DEADLINE_SECONDS = 20.0


# ---- Python code ---------------------------------------------------------------------------------------------------


@pytest.fixture
def releaser():
    """A releaser of this process's main thread, which is the one that runs the test."""
    before = signal.getsignal(RELEASE_SIGNAL)
    made = PythonReleaser()
    made.install()
    yield made
    signal.signal(RELEASE_SIGNAL, before)


def later(call):
    timer = threading.Timer(0.02, call)
    timer.start()
    return timer


def hold_a_lock():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire(timeout=DEADLINE_SECONDS)


def loop():
    end = time.monotonic() + DEADLINE_SECONDS
    while time.monotonic() < end:
        pass


def swallow_every_exception():
    end = time.monotonic() + DEADLINE_SECONDS
    while time.monotonic() < end:
        with contextlib.suppress(Exception):
            time.sleep(DEADLINE_SECONDS)


@pytest.mark.parametrize(
    "blocked",
    [
        pytest.param(lambda: time.sleep(DEADLINE_SECONDS), id="a sleep"),
        pytest.param(loop, id="a loop"),
        pytest.param(hold_a_lock, id="a lock"),
        pytest.param(swallow_every_exception, id="code that swallows every Exception"),
    ],
)
def test_python_code_that_hangs_is_ended_with_the_reason(releaser, blocked):
    releaser.reason = "not finished within 3 s"
    timer = later(releaser.release)
    begin = time.monotonic()
    with pytest.raises(Released, match=r"^not finished within 3 s$"):
        blocked()
    timer.join()
    assert time.monotonic() - begin < DEADLINE_SECONDS / 2


def test_nothing_is_raised_before_it_is_armed_or_once_the_main_thread_has_come_back(releaser):
    releaser.release()
    signal.raise_signal(RELEASE_SIGNAL)
    releaser.reason = "late"
    releaser.reason = None
    releaser.release()
    signal.raise_signal(RELEASE_SIGNAL)  # one that was already on its way


def test_one_release_raises_once_and_code_that_swallows_it_can_be_released_again(releaser):
    for reason in ("first", "second"):
        releaser.reason = reason
        with pytest.raises(Released, match=f"^{reason}$"):
            signal.raise_signal(RELEASE_SIGNAL)
        signal.raise_signal(RELEASE_SIGNAL)
        releaser.release()


def test_a_test_that_takes_the_signal_loses_it_when_the_handler_is_installed_again(releaser):
    def foreign(signum, frame):
        pytest.fail("the test's own handler was called")

    signal.signal(RELEASE_SIGNAL, foreign)
    releaser.install()
    releaser.reason = "mine"
    with pytest.raises(Released, match=r"^mine$"):
        signal.raise_signal(RELEASE_SIGNAL)


# ---- connections ---------------------------------------------------------------------------------------------------


class Pair:
    """A connection over TCP with both of its ends and its listener in this process."""

    def __init__(self):
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.one = socket.create_connection(self.listener.getsockname())
        self.other, _ = self.listener.accept()
        self.all = (self.listener, self.one, self.other)
        for each in self.all:
            each.settimeout(DEADLINE_SECONDS)

    def close(self):
        for each in self.all:
            each.close()


@pytest.fixture
def pairs():
    made = []

    def make():
        made.append(Pair())
        return made[-1]

    yield make
    for pair in made:
        pair.close()


def is_connected(end):
    """Tell whether an end would wait for data, instead of being told that there will be none."""
    end.setblocking(False)
    try:
        return end.recv(1) != b""
    except BlockingIOError:
        return True
    finally:
        end.settimeout(DEADLINE_SECONDS)


def test_both_sides_of_a_groups_connections_are_freed(pairs):
    releaser = SocketReleaser()
    with releaser.taking():
        pair = pairs()
    timer = later(releaser.release)
    assert pair.other.recv(1) == b""
    assert pair.one.recv(1) == b""
    timer.join()


def test_a_listener_lives_on_because_gloo_aborts_the_process_without_it(pairs):
    releaser = SocketReleaser()
    with releaser.taking():
        pair = pairs()
    releaser.release()
    assert not is_connected(pair.one)
    with socket.create_connection(pair.listener.getsockname()) as again:
        accepted, _ = pair.listener.accept()
        accepted.sendall(b"x")
        assert again.recv(1) == b"x"
        accepted.close()


def test_connections_from_before_and_after_the_group_was_made_are_left_alone(pairs):
    releaser = SocketReleaser()
    before = pairs()
    with releaser.taking():
        mine = pairs()
    with releaser.taking():
        also = pairs()
    after = pairs()
    open_before = set(os.listdir("/proc/self/fd"))
    releaser.release()
    assert [is_connected(pair.one) for pair in (before, mine, also, after)] == [True, False, False, True]
    assert set(os.listdir("/proc/self/fd")) == open_before


def test_a_number_that_was_given_to_another_connection_is_left_alone(pairs):
    releaser = SocketReleaser()
    with releaser.taking():
        mine = pairs()
    number = mine.one.fileno()
    other = pairs()
    os.dup2(other.one.fileno(), number)  # closes the group's connection and takes its number
    releaser.release()
    assert is_connected(other.one)
    assert is_connected(other.other)


def test_connections_that_are_closed_already_are_no_error(pairs):
    releaser = SocketReleaser()
    with releaser.taking():
        mine = pairs()
        also = pairs()
    mine.close()
    also.one.shutdown(socket.SHUT_RDWR)
    releaser.release()
    assert not is_connected(also.other)
    releaser.release()
    with releaser.taking(), socket.socket(type=socket.SOCK_DGRAM), socket.socket():  # without a connection
        releaser.release()


def test_a_group_in_the_making_is_released_in_the_middle_of_it(pairs):
    releaser = SocketReleaser()
    assert not releaser.making_group
    with releaser.taking():
        assert releaser.making_group
        pair = pairs()
        timer = later(releaser.release)
        assert pair.one.recv(1) == b""
        timer.join()
    assert not releaser.making_group
    with pytest.raises(RuntimeError), releaser.taking():
        raise RuntimeError("cannot be made")
    assert not releaser.making_group
