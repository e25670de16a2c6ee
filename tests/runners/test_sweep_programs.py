"""A scheduler's programs: one srun that is watched, and one that is asked and missing, fails or hangs."""

import os
import sys
from types import SimpleNamespace

import pytest
from recordings import wait_until

from pytest_gpucluster.errors import EnvironmentBroken
from pytest_gpucluster.runners import sweep
from pytest_gpucluster.runners.sweep_slurm import Step


def python(code):
    return [sys.executable, "-S", "-c", code]


@pytest.mark.parametrize(
    ("output", "hint"),
    [
        ("", "it has printed nothing"),
        ("one\ntwo\n", "two"),
        ("ERROR: usage: no such option\nTraceback\n=====\ncode: 1\n=====\n", "ERROR: usage: no such option"),
        ("a\nsrun: error: gpu-7: task 0: Killed\nb\n", "srun: error: gpu-7: task 0: Killed"),
        ("x" * 100_000 + "\nlast\n", "last"),
    ],
)
def test_the_end_of_its_output_is_the_hint(tmp_path, output, hint):
    command = python(f"import sys; sys.stdout.write({output!r}); sys.exit(7)")
    slurm = SimpleNamespace(environ=dict(os.environ), grace_seconds=60)
    started = Step(slurm, command, reports=tmp_path / "n1", within_seconds=60)
    ended = wait_until(started.poll)
    assert (ended.exit, ended.stop_reason, ended.hint, ended.log) == (7, "", hint, str(tmp_path / "n1.log"))


def test_one_that_cannot_be_started_is_named(tmp_path):
    with pytest.raises(EnvironmentBroken, match="no-such-srun"):
        Step(SimpleNamespace(environ={}), ["no-such-srun"], reports=tmp_path / "n1", within_seconds=1)


def test_what_it_prints_is_returned():
    assert sweep.run_tool(python("print(input())"), given="hello\n", within_seconds=60) == "hello\n"


@pytest.mark.parametrize(
    ("command", "within", "message"),
    [
        (python("import sys; sys.exit('oops\\nthere')"), 60, "exit code 1: oops there"),
        (python("raise SystemExit(3)"), 60, "exit code 3"),
        (python("import time; time.sleep(600)"), 0.2, "0.2 s"),
        (["/no/such/program"], 60, "/no/such/program"),
    ],
)
def test_anything_else_is_an_error(command, within, message):
    with pytest.raises(EnvironmentBroken, match=message):
        sweep.run_tool(command, within_seconds=within)
