"""A rank's end of the node's sampler: its summaries, and that no failure of it disturbs the measurement."""

import gc
import json
import os
import re
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import fake_sampler
import pytest

from pytest_gpucluster.agreement.liveness import process_state
from pytest_gpucluster.node.health import telemetry
from pytest_gpucluster.node.health.telemetry import QUERIES, Link, NodeSampler

GPU, OTHER = "GPU-1f2e3d4c", "GPU-5a6b7c8d"
DEADLINE = 30.0
"""Seconds after which a test gives up. Nothing here depends on how long it takes."""
VALUES = {
    "clock.sm": 1755,
    "clock.memory": 2619,
    "power.draw": 698.25,
    "temperature.gpu": 67,
    "utilization.gpu": 99,
    "throttle.reasons": ["gpu_idle", "sw_power_cap"],
}
Start = Callable[..., NodeSampler]


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Start a sampler whose GPUs are not there, and end it after the test."""
    started = []

    def make(gpus):
        monkeypatch.setattr(telemetry, "COMMAND", fake_sampler.command(tmp_path, gpus))
        started.append(telemetry.start_sampler())
        return started[-1]

    yield make
    for each in started:
        each.close()


_made = []


def linked(address, *arguments, **settings):
    """A link that is closed after the test."""
    _made.append(Link(address, *arguments, **settings))
    return _made[-1]


def patient(sampler, uuid=GPU, interval_seconds=0.01):
    """A link that waits for a process which is still starting."""
    return linked(sampler.address, uuid, interval_seconds, answer_seconds=DEADLINE)


@pytest.fixture(autouse=True)
def links_are_closed():
    yield
    while _made:
        link = _made.pop()
        link._owner = os.getpid()
        link.close()


def missing(summary):
    assert set(summary["not_available"]) == set(QUERIES)
    return set(summary["not_available"].values())


class Mute:
    """A process in the sampler's place that sends given answers, or none."""

    def __init__(self):
        self.address = f"gpucluster-test-{os.urandom(8).hex()}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(f"\0{self.address}")
        self._listener.listen()
        self.channel = None

    def accept(self):
        """Accept the rank; return its messages so far."""
        self.channel, _ = self._listener.accept()
        self.channel.settimeout(DEADLINE)
        return [json.loads(self.channel.recv(65536)), json.loads(self.channel.recv(65536))]

    def close(self):
        for each in (self.channel, self._listener):
            if each is not None:
                each.close()


@pytest.fixture
def mute():
    made = Mute()
    yield made
    made.close()


# ---- what a rank receives


def test_a_window_summarises_each_rank_s_own_gpu(start):
    sampler = start({GPU: VALUES, OTHER: {**VALUES, "clock.sm": 1200}})
    with patient(sampler, OTHER).window() as second, patient(sampler).window() as window:
        pass
    assert second.summary()["sm_clock_mhz"][1] == 1200
    summary = window.summary()
    assert summary["sm_clock_mhz"] == [1755, 1755, 1755]
    assert summary["power_watts"] == [698.2, 698.2, 698.2]
    assert summary["throttle"] == ["sw_power_cap"]
    assert summary["throttle_share"] == {"sw_power_cap": 1.0}
    assert (summary["samples"] >= 1, summary["not_available"]) == (True, {})
    assert json.loads(json.dumps(summary)) == summary


def test_windows_can_lie_inside_each_other(start):
    link = patient(start({GPU: VALUES}), interval_seconds=60.0)
    with link.window() as outer:
        for _ in range(2):
            with link.window() as inner:
                pass
    assert (outer.summary()["samples"], inner.summary()["samples"]) == (2, 1)
    with pytest.raises(ZeroDivisionError), inner:
        _ = 1 / 0
    assert inner.summary()["samples"] == 2, "one that is entered again adds up, and hides no error"


def test_a_window_is_not_entered_while_it_is_open(start):
    with patient(start({GPU: VALUES})).window() as window, pytest.raises(RuntimeError, match="open already"):
        window.__enter__()


def test_windows_without_a_reference_are_forgotten(mute):
    link = linked(mute.address, GPU, answer_seconds=0.0)
    with link.window() as window:
        pass
    number = window._number
    del window
    gc.collect()
    with link.window():
        hello, first = mute.accept()
    assert hello == {"gpu": GPU, "interval": 0.1}
    assert (first["open"], first["forget"]) == (number, [])
    assert json.loads(mute.channel.recv(65536))["close"] == number
    assert json.loads(mute.channel.recv(65536))["forget"] == [number]


def test_on_cpu_windows_do_nothing():
    link = linked(None, None)
    with link.window() as window:
        pass
    assert window.summary() == {}
    assert link._channel is None


# ---- a sampler at its worst


def test_without_nvml_a_window_says_why(start):
    with patient(start(None)).window() as window:
        pass
    assert [why.endswith(fake_sampler.NO_NVML) for why in missing(window.summary())] == [True]


def test_a_gpu_that_nvml_does_not_know_is_lost_and_named(start):
    with patient(start({OTHER: VALUES})).window() as window:
        pass
    assert window.summary()["lost"].startswith("the GPU is lost")


def test_nvml_that_hangs_is_named_on_every_rank_and_keeps_none_waiting(start):
    hanging = {**VALUES, "power.draw": {"hang": 3600}}
    sampler = start({GPU: hanging, OTHER: VALUES})
    with patient(sampler).window() as window:
        pass
    summary = window.summary()
    assert summary["sm_clock_mhz"] == [1755, 1755, 1755]
    assert summary["not_available"]["power_watts"].startswith("NVML ")
    with patient(sampler, OTHER).window() as second:
        pass
    (why,) = missing(second.summary())
    assert re.match(f"not read: .* power_watts of {GPU}$", why)


def test_without_a_sampler_or_an_opened_window_or_after_the_end_it_says_why(start):
    closed = patient(start({GPU: VALUES}))
    closed.close()
    for link, expected in (
        (linked(None, GPU, why_not="it could not be started: no more processes"), ": no more processes"),
        (linked("gpucluster-none", GPU), ": Connection refused"),
        (closed, " closed"),
    ):
        with link.window() as window:
            pass
        assert [why.endswith(expected) for why in missing(window.summary())] == [True]
    assert ["never opened" in why for why in missing(linked("none", GPU).window().summary())] == [True]


def test_a_sampler_that_is_killed_leaves_the_summary_of_before(start):
    sampler = start({GPU: VALUES})
    link = patient(sampler)
    window = link.window()
    with window:
        pass
    before = window.summary()
    with window:
        os.kill(sampler.process.pid, signal.SIGKILL)
        sampler.process.wait(DEADLINE)
    summary = window.summary()
    assert summary["sm_clock_mhz"] == before["sm_clock_mhz"]
    assert summary["seconds"] >= before["seconds"]
    assert all("exited" in why for why in missing(summary))
    with link.window() as later:
        pass
    assert all("the node's sampler" in why for why in missing(later.summary()))


def test_a_sampler_that_is_stopped_delays_no_caller(start):
    sampler = start({GPU: VALUES})
    link = patient(sampler)
    with link.window():
        pass
    os.kill(sampler.process.pid, signal.SIGSTOP)
    end = time.monotonic() + DEADLINE
    while not process_state(sampler.process.pid).startswith("T"):
        assert time.monotonic() < end
    link._answer_seconds = 0.01
    with link.window() as window:
        pass
    assert [why.endswith("0.01 s") for why in missing(window.summary())] == [True]
    os.kill(sampler.process.pid, signal.SIGCONT)
    link._answer_seconds, link._is_silent = DEADLINE, False
    with link.window() as after:
        pass
    # The answer that came too late was another window's.
    assert after.summary()["not_available"] == {}
    assert not link._is_silent


def test_who_has_not_answered_is_not_waited_for_as_long_again(mute):
    link = linked(mute.address, GPU, answer_seconds=0.2)
    begin = time.monotonic()
    with link.window():
        pass
    first = time.monotonic() - begin
    assert first >= 0.2
    assert link._patience == 0.05


def test_a_sampler_that_takes_nothing_is_not_waited_for(mute):
    link = linked(mute.address, GPU, answer_seconds=0.0)
    windows = [link.window() for _ in range(100_000)]
    for window in windows:  # until the socket's buffer is full
        window.__enter__()
        if link._unopened:
            break
    assert [why.endswith("takes no messages") for why in set(link._unopened.values())] == [True]
    window.__exit__(None, None, None)
    assert [why.endswith("takes no messages") for why in missing(window.summary())] == [True]


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        pytest.param(b"{}}", "the node's sampler has failed: ", id="no JSON"),
        pytest.param(
            b'{"failure": "KeyError: 7"}', "the node's sampler rejected a message: KeyError: 7", id="a refusal"
        ),
    ],
)
def test_a_sampler_that_makes_no_sense_is_left(mute, answer, why):
    link = linked(mute.address, GPU, answer_seconds=DEADLINE)
    with link.window() as window:
        mute.accept()
        mute.channel.send(answer)
    (summary,) = missing(window.summary())
    assert summary.startswith(why)
    assert link._channel is None


def test_a_process_that_was_forked_from_the_rank_says_nothing_in_its_name(start):
    link = patient(start({GPU: VALUES}))
    with link.window():
        pass
    link._owner = -1  # as in a forked child, which has the same objects and another process id
    with link.window() as window:
        pass
    assert ["forked" in why for why in missing(window.summary())] == [True]


# ---- the process, for who has started it


def test_nothing_of_it_is_left_when_it_is_closed(start):
    sampler = start({GPU: VALUES})
    sampler.close()
    assert not Path(f"/proc/{sampler.process.pid}").exists()
    assert sampler.address not in Path("/proc/net/unix").read_text()
