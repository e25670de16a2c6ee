"""Processes of a node take turns, and nobody waits for ever for one that hangs."""

from __future__ import annotations

import itertools
import subprocess
import sys
import textwrap

import pytest
import torch

from pytest_gpucluster.benchmarks.host_link import measure_host_link
from pytest_gpucluster.benchmarks.host_link_copies import Turn
from pytest_gpucluster.device.backends import Cpu
from pytest_gpucluster.errors import EnvironmentBroken
from pytest_gpucluster.metrics.sampling import Sampling

CPU = torch.device("cpu")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "turn.lock"


def test_one_waits_until_the_other_has_ended(path):
    with Turn(path, wait_seconds=0.01) as first, Turn(path, wait_seconds=0.01) as second:
        first.begin()
        with pytest.raises(EnvironmentBroken, match=r"alone within 0\.01 s"):
            second.begin()
        first.end()
        second.begin()


def test_the_kernel_takes_the_turn_of_a_process_that_dies(path):
    code = """
        import os, sys
        from pathlib import Path
        from pytest_gpucluster.benchmarks.host_link_copies import Turn
        with Turn(Path(sys.argv[1])) as turn:
            turn.begin()
            os._exit(9)
    """
    child = subprocess.run([sys.executable, "-c", textwrap.dedent(code), str(path)], timeout=60, check=False)
    assert child.returncode == 9
    with Turn(path, wait_seconds=0) as turn:
        turn.begin()


def test_a_turn_can_be_begun_again_and_ended_without_one(path):
    with Turn(path, wait_seconds=0) as turn:
        turn.end()
        turn.begin()
        turn.begin()
        turn.end()
    turn.end()


def test_where_no_lock_can_be_made_it_is_an_error_and_no_measurement(tmp_path):
    with pytest.raises(EnvironmentBroken, match=r"ranks cannot.* .*: .*or directory; .* TMPDIR"):
        Turn(tmp_path / "nowhere" / "turn.lock").__enter__()
    (tmp_path / "link").symlink_to(tmp_path / "target")
    with pytest.raises(EnvironmentBroken, match=r"ranks cannot"):
        Turn(tmp_path / "link").__enter__()


def test_a_turn_is_begun_before_the_first_copy_and_ended_before_the_comparison(path, monkeypatch):
    done = []

    class Noted(Turn):
        def begin(self):
            super().begin()
            done.append("begin")

        def end(self):
            super().end()
            done.append("end")

    class Copying(Cpu):
        def copy_over_link(self, direction, source, target):
            super().copy_over_link(direction, source, target)
            done.append("copy")

    equal = torch.equal

    def compared(found, expected):
        done.append("compare")
        return equal(found, expected)

    monkeypatch.setattr(torch, "equal", compared)
    quick = Sampling(warmup_seconds=0.001, window_seconds=0.01, longest_seconds=0.01, tolerance_ratio=10)
    measure_host_link(
        CPU,
        "h2d",
        payload_bytes=8000,
        copies=4,
        sampling=quick,
        by=Copying(CPU),
        turn=Noted(path),
    )
    assert {"-".join(step for step, _ in itertools.groupby(done))[: len("begin-copy-end-compare-") * 3]} == {
        "begin-copy-end-compare-" * 3
    }
