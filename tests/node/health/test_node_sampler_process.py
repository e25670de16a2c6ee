"""The node's sampler process: light, deaf to what launchers send, and never left behind."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from textwrap import dedent

import fake_sampler
import pytest
from each import of_each

from pytest_gpucluster.launch import detached_process
from pytest_gpucluster.node.health import sampler_process, telemetry
from pytest_gpucluster.node.health.telemetry import Link

GPU = "GPU-1f2e3d4c"
DEADLINE = 30.0


@pytest.fixture
def sampler(tmp_path, monkeypatch):
    monkeypatch.setattr(telemetry, "COMMAND", fake_sampler.command(tmp_path, {GPU: {"clock.sm": 1755}}))
    started = telemetry.start_sampler()
    yield started
    started.close()


def answers(sampler):
    link = Link(sampler.address, GPU, answer_seconds=DEADLINE)
    with link.window() as window:
        pass
    link.close()
    return window.summary().get("sm_clock_mhz") == [1755, 1755, 1755]


def test_it_has_its_own_session_and_no_torch_and_outlives_what_launchers_send(sampler):
    assert answers(sampler)
    assert os.getsid(sampler.process.pid) == sampler.process.pid
    assert "torch" not in Path(f"/proc/{sampler.process.pid}/maps").read_text()
    for number in detached_process.SHIELDED:
        os.kill(sampler.process.pid, number)
    assert answers(sampler)


def test_it_ends_with_a_parent_that_is_killed(tmp_path):
    command = fake_sampler.command(tmp_path, {GPU: {"clock.sm": {"hang": 3600}}})
    code = f"""
        import time
        from pytest_gpucluster.node.health import telemetry
        from pytest_gpucluster.node.health.telemetry import Link
        telemetry.COMMAND = {command!r}
        sampler = telemetry.start_sampler()
        window = Link(sampler.address, {GPU!r}, answer_seconds={DEADLINE}).window()
        with window:  # NVML hangs, and that must not keep the process either
            pass
        print(sampler.process.pid, flush=True)
        time.sleep({DEADLINE})
    """
    with subprocess.Popen([sys.executable, "-c", dedent(code)], stdout=subprocess.PIPE, text=True) as parent:
        pid = int(parent.stdout.readline())
        parent.send_signal(signal.SIGKILL)
    until = time.monotonic() + DEADLINE
    while _runs(pid):
        assert time.monotonic() < until, "it has outlived its parent"
        time.sleep(0.01)


def test_it_ends_without_descriptors_of_processes_too(monkeypatch):
    """Some kernels and sandboxes have none."""
    monkeypatch.setattr(detached_process, "end_descriptor", lambda parent: None)
    monkeypatch.setattr(sampler_process, "_TICK_SECONDS", 0.001)
    parents = iter([7, 7, 1])
    monkeypatch.setattr(sampler_process.os, "getppid", lambda: next(parents))
    sampler_process.wait_for_end(7)
    assert next(parents, None) is None


def test_a_rank_that_leaves_takes_its_windows_with_it(sampler):
    link = Link(sampler.address, GPU, 0.001, answer_seconds=DEADLINE)
    link.window().__enter__()
    link.close()
    assert answers(sampler)


NO_MESSAGES = {
    "an interval that is none, of the first rank": b'{"gpu": "GPU-2", "interval": -1}',
    "no JSON": b"no JSON",
    "no object": b"[1]",
    "a window of no GPU": b'{"open": 1, "at": 0, "forget": []}',
    "a window that was never opened": b'{"close": 7, "at": 0, "request": 1}',
}


@of_each("packet", list(NO_MESSAGES.values()))
def test_what_no_rank_says_ends_only_its_own_connection(sampler, packet):
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as channel:
        channel.settimeout(DEADLINE)
        channel.connect(f"\0{sampler.address}")
        channel.send(packet)
        assert b'"failure"' in channel.recv(65536)
        assert channel.recv(65536) == b""
    assert answers(sampler)


def test_only_its_own_user_is_served(sampler, tmp_path):
    if os.geteuid() != 0:
        pytest.skip("only root can be somebody else")
    code = f"""
        import os, socket
        os.setuid(65534)
        channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        channel.connect("\\0{sampler.address}")
        channel.settimeout({DEADLINE})
        print(channel.recv(10))
    """
    assert answers(sampler)
    done = subprocess.run([sys.executable, "-c", dedent(code)], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.strip() == "b''", done.stderr


def _runs(pid):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False
