"""One srun: its end, its deadline, and the words of its output that tell most."""

from __future__ import annotations

import os
import sys
import time

import pytest

from pytest_gpucluster.errors import EnvironmentBroken
from pytest_gpucluster.sweep.step import Step


def step(tmp_path, code, *, within=60.0, grace=60.0):
    command = [sys.executable, "-S", "-c", code]
    return Step(command, environ=dict(os.environ), log=tmp_path / "log", within_seconds=within, grace=grace)


def end_of(started):
    until = time.monotonic() + 60
    while (ended := started.look()) is None and time.monotonic() < until:
        time.sleep(0.02)
    assert ended is not None
    return ended


@pytest.mark.parametrize(
    ("said", "hint"),
    [
        ("", "it has printed nothing"),
        ("one\ntwo\n", "two"),
        ("ERROR: usage: no such option\nTraceback\n=====\ncode: 1\n=====\n", "ERROR: usage: no such option"),
        ("a\nsrun: error: gpu-7: task 0: Killed\nb\n", "srun: error: gpu-7: task 0: Killed"),
        ("x" * 100_000 + "\nlast\n", "last"),
    ],
)
def test_the_end_of_its_output_is_the_hint(tmp_path, said, hint):
    ended = end_of(step(tmp_path, f"import sys; sys.stdout.write({said!r}); sys.exit(7)"))
    assert (ended.exit, ended.stopped, ended.hint, ended.log) == (7, "", hint, str(tmp_path / "log"))


def test_at_its_deadline_it_is_told_to_end(tmp_path):
    ended = end_of(step(tmp_path, "import time; time.sleep(600)", within=0.1))
    assert (ended.exit, ended.stopped) == (-15, "no answer within 0.1 s")


def test_one_that_is_deaf_is_killed_and_has_no_exit_code(tmp_path):
    code = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"
    )
    started = step(tmp_path, code, grace=0.2)
    until = time.monotonic() + 60
    while (tmp_path / "log").read_text() != "deaf\n" and time.monotonic() < until:
        time.sleep(0.02)
    started.tell_to_end("the sweep ended")
    ended = end_of(started)
    assert (ended.exit, ended.stopped) == (None, "the sweep ended")


def test_one_that_cannot_be_started_is_named(tmp_path):
    with pytest.raises(EnvironmentBroken, match="no-such-srun cannot be started: No such file"):
        Step(["no-such-srun"], environ={}, log=tmp_path / "log", within_seconds=1, grace=1)
