"""Processes of a dead rank are ended, in whatever session they are, and no others."""

import contextlib
import os
import signal
import subprocess
import sys

import pytest

from pytest_gpucluster.launch import detached_process

SLEEPS = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]


def start(**more):
    return subprocess.Popen(SLEEPS, start_new_session=True, **more)


def test_what_a_rank_has_started_is_ended_and_nothing_else(tmp_path):
    rank, other = str(tmp_path / "rank"), str(tmp_path / "other")
    with contextlib.ExitStack() as started:
        before = started.enter_context(start())
        with pytest.MonkeyPatch.context() as mark:
            mark.setenv(detached_process.VARIABLE, rank)
            ours = started.enter_context(start())
            light = started.enter_context(start(env=detached_process.child_environment()))
        with pytest.MonkeyPatch.context() as mark:
            mark.setenv(detached_process.VARIABLE, other)
            others = started.enter_context(start())
        after = started.enter_context(start())
        started.callback(lambda: [process.kill() for process in (before, ours, light, others, after)])
        assert detached_process.end_stale_processes([rank]) == [ours.pid]
        assert ours.wait(10) == -signal.SIGKILL
        assert [process.poll() for process in (before, light, others, after)] == [None] * 4
        assert detached_process.end_stale_processes([rank]) == []
        assert detached_process.end_stale_processes([]) == []


def test_what_a_rank_has_forked_is_ended_also_when_its_file_is_gone(tmp_path):
    file = tmp_path / "rank"
    with file.open("x"):
        pid = os.fork()
        if pid == 0:
            signal.pause()
            os._exit(0)
    file.unlink()
    assert detached_process.end_stale_processes([str(file)]) == [pid]
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL
