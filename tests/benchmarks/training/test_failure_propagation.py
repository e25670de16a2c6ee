"""A training of which a rank dies, and the job in which it runs: nothing of it is left."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from pytest_gpucluster.benchmarks.training import failure_propagation
from pytest_gpucluster.benchmarks.training.failure_propagation import (
    EXIT_CODE,
    ChildJob,
    check_propagation,
    child_environment,
    stamps_of,
)
from pytest_gpucluster.benchmarks.training.model import Geometry
from pytest_gpucluster.device import environment
from pytest_gpucluster.errors import EnvironmentBroken, WrongResult

STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('here', flush=True); time.sleep(600)"
)
STARTS_IT = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {STUBBORN!r}], start_new_session=True)"


def job(tmp_path: Path, code: str) -> ChildJob:
    return ChildJob([sys.executable, "-c", code], dict(os.environ), tmp_path / "output.txt")


def is_there(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_its_environment_has_what_the_site_has_set_and_nothing_of_this_rank() -> None:
    site = {"PATH", "HOME", "NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "LD_PRELOAD"}
    rank = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_NAME", "MASTER_ADDR"}
    rank |= {"MASTER_PORT", "TORCHELASTIC_RUN_ID", "PET_NNODES", "TORCH_NCCL_ASYNC_ERROR_HANDLING"}
    rank |= {"TORCH_FR_BUFFER_SIZE", "NCCL_DEBUG", "NCCL_DEBUG_FILE", "NCCL_DEBUG_SUBSYS"}
    assert set(child_environment(dict.fromkeys(site | rank, "1"))) - {"PYTHONPATH"} == site


def test_what_is_set_for_this_suite_s_own_ranks_is_taken_away() -> None:
    own: dict[str, str] = {}
    environment.prepare(own)
    left = set(child_environment(own)) - {"PYTHONPATH"}
    assert left == {"NCCL_NO_CACHE", "CUBLAS_WORKSPACE_CONFIG"}, "what a job does not mind"


def test_a_job_that_ends_leaves_its_exit_code_and_the_last_of_its_words(tmp_path: Path) -> None:
    with job(tmp_path, "import sys; print('x' * 100000 + 'the end'); sys.exit(7)") as child:
        assert child.wait(lambda: child.exit_code is not None, seconds=60)
        assert (child.exit_code, child.processes()) == (7, {})
        assert len(child.output_tail) < 5000
        assert child.output_tail.endswith("the end")
    with ChildJob(["true"], {}, tmp_path / "silent.txt") as child:
        assert child.output_tail.endswith("nothing was printed")


def test_its_processes_are_found_whatever_session_they_are_in_and_none_is_left(tmp_path: Path) -> None:
    with job(tmp_path, STARTS_IT) as child:
        assert child.wait(lambda: "here" in child.text and child.exit_code is not None, seconds=60)
        [(living, state)] = child.processes().items()
        assert living != child.pid
        assert state in "RSD"
    assert not is_there(living)


def test_it_is_ended_too_where_the_test_is_torn_out_of_its_wait(tmp_path: Path) -> None:
    child = job(tmp_path, STUBBORN)

    def torn_out() -> None:
        with child:
            assert child.wait(lambda: "here" in child.text, seconds=60)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        torn_out()
    assert child.exit_code == -9
    assert not is_there(child.pid)


def test_other_processes_are_not_touched(tmp_path: Path) -> None:
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        with job(tmp_path, STUBBORN) as child:
            assert child.wait(lambda: "here" in child.text, seconds=60)
            assert other.pid not in child.processes()
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_a_wait_has_a_deadline(tmp_path: Path) -> None:
    with job(tmp_path, STUBBORN) as child:
        begin = time.monotonic()
        assert not child.wait(lambda: False, seconds=0.1)
        assert time.monotonic() - begin < 30


GEOMETRY = Geometry(layers=1, width=64, heads=2, vocab=64, sequence=16)


def check(folder: Path, launcher: Sequence[str] = failure_propagation.LAUNCHER, **more: object) -> float:
    settings: dict[str, object] = {
        "ranks": 2,
        "how": "exit",
        "batch": 2,
        "steps": 2,
        "folder": folder / "job",
        "start_seconds": 120.0,
        "end_seconds": 60.0,
        **more,
    }
    with patch.object(failure_propagation, "LAUNCHER", launcher):
        return check_propagation(torch.device("cpu"), GEOMETRY, **settings)  # type: ignore[arg-type]  # by name


@pytest.mark.extended
@pytest.mark.parametrize("how", ["exit", "raise", "kill"])
def test_a_rank_that_dies_ends_the_job_of_torchrun_and_is_named(tmp_path: Path, how: str) -> None:
    assert 0 < check(tmp_path, how=how) < 60
    if how == "raise":
        assert re.search(r"in training", (tmp_path / "job" / "output.txt").read_text())


# A launcher that tells what it was message to, and whose ranks leave only stamps.
LAUNCHER = """
import json, os, sys, time
from pathlib import Path

folder = Path(json.loads(sys.argv[-1])["folder"])
for rank, name in enumerate(("step-2", "dies")):
    (folder / f"rank-{rank}.txt").write_text(f"{name} {time.monotonic()!r} {os.getpid()}\\n")
print(Path(__file__).with_name("message.txt").read_text())
sys.exit(1)
"""


def message(*failures: tuple[int, int], root: int) -> str:
    """What torchrun prints of failures, the root cause last."""
    blocks = [
        f"[{index}]:\n  time      : 2026-01-01_00:00:00\n  host      : node-a\n"
        f"  rank      : {rank} (local_rank: {rank})\n  exitcode  : {code} (pid: 12{rank})\n"
        "  error_file: <N/A>\n  traceback : none\n"
        for index, (rank, code) in enumerate(failures)
    ]
    others = "".join(block for (rank, _), block in zip(failures, blocks, strict=True) if rank != root)
    last = "".join(block for (rank, _), block in zip(failures, blocks, strict=True) if rank == root)
    return f"x FAILED\nFailures:\n{others or '  <NO_OTHER_FAILURES>'}\nRoot Cause (first observed failure):\n{last}"


def launched(folder: Path, text: str, **more: object) -> float:
    (folder / "launcher.py").write_text(LAUNCHER)
    (folder / "message.txt").write_text(text)
    return check(folder, (sys.executable, str(folder / "launcher.py")), **more)


@pytest.mark.parametrize(
    "text",
    [
        message((1, EXIT_CODE), root=1),
        message((0, 1), (1, EXIT_CODE), root=1),
        message((0, 1), (1, EXIT_CODE), root=0),
    ],
    ids=["alone", "next to its peer", "after its peer"],
)
def test_the_rank_is_found_among_those_that_failed(tmp_path: Path, text: str) -> None:
    assert launched(tmp_path, text) > 0


@pytest.mark.parametrize(
    ("how", "text", "names"),
    [
        ("exit", "", "it names no rank, and rank 1 with the exit code 43"),
        ("exit", message((0, 1), root=0), "it names rank 0 with 1, and rank 1 with the exit code 43"),
        ("exit", message((1, 1), root=1), "it names rank 1 with 1, and rank 1 with the exit code 43"),
        ("kill", message((1, EXIT_CODE), root=1), "it names rank 1 with 43, and rank 1 with the exit code -9"),
        ("raise", message((1, 0), root=1), "it names rank 1 with 0, and rank 1 with another exit code than 0"),
    ],
    ids=["nobody", "another rank", "another exit code", "no signal", "no failure"],
)
def test_a_launcher_that_does_not_say_who_it_was_is_rejected(tmp_path: Path, how: str, text: str, names: str) -> None:
    with pytest.raises(WrongResult, match=r"does not") as raised:
        launched(tmp_path, text, how=how)
    assert names in str(raised.value)


def test_a_job_that_never_comes_as_far_is_an_error_after_its_time(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentBroken, match=r"after 0\.5 s \(rank 0: not started, rank 1: not st"):
        check(tmp_path, ("sh", "-c", "sleep 600"), start_seconds=0.5)


def test_the_gpus_of_the_job_are_those_of_the_nodes_ranks() -> None:
    made = child_environment({"CUDA_VISIBLE_DEVICES": "3", "RANK": "3"}, ["GPU-1", "GPU-2"])
    assert made["CUDA_VISIBLE_DEVICES"] == "GPU-1,GPU-2"
    assert child_environment({"CUDA_VISIBLE_DEVICES": "3"}, [])["CUDA_VISIBLE_DEVICES"] == "3"


def test_a_stamp_that_is_only_half_written_is_none(tmp_path: Path) -> None:
    assert stamps_of(tmp_path, 0) == []
    (tmp_path / "rank-0.txt").write_text("step-1 11.5 7\ndies 12.")
    assert stamps_of(tmp_path, 0) == [("step-1", 11.5, 7)]
