"""What is seen of a training of which a rank dies, and what is not accepted of its launcher."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch

from pytest_gpucluster.benchmarks.training.dying_rank import EXIT_CODE, Stamps
from pytest_gpucluster.benchmarks.training.failure_propagation import (
    Components,
    Propagation,
    _environment,
    check_propagation,
)
from pytest_gpucluster.benchmarks.training.model import Geometry
from pytest_gpucluster.errors import EnvironmentBroken, WrongResult

GEOMETRY = Geometry(layers=1, width=64, heads=2, vocab=64, sequence=16)


def check(folder: Path, **more: object) -> Propagation:
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
    return check_propagation(torch.device("cpu"), GEOMETRY, **settings)  # type: ignore[arg-type]  # by name


@pytest.mark.extended
@pytest.mark.parametrize(("how", "codes"), [("raise", {1, -6, -15}), ("kill", {-9})])
def test_a_rank_that_raises_or_is_killed_ends_the_job_and_is_named(tmp_path: Path, how: str, codes: set[int]) -> None:
    found = check(tmp_path, how=how)
    assert 0 < found.seconds < 60
    assert found.exit_code == 1
    assert found.rank == 1
    # gloo's threads may abort an interpreter that ends with an exception. And its peer may be gone before it: then the
    # launcher ends it in the middle of its own end.
    assert found.rank_exit_code in codes
    if how == "raise":
        assert re.search(r"in training", (tmp_path / "job" / "output.txt").read_text())


# A launcher that tells what it was message to, and whose ranks leave only stamps.
LAUNCHER = """
import os, sys, time
from pathlib import Path

folder = Path(next(word for word in sys.argv if word.startswith("--folder=")).partition("=")[2])
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


def launched(folder: Path, text: str, **more: object) -> Propagation:
    (folder / "launcher.py").write_text(LAUNCHER)
    (folder / "message.txt").write_text(text)
    return check(folder, components=Components(launcher=(sys.executable, str(folder / "launcher.py"))), **more)


@pytest.mark.parametrize(
    ("text", "is_root"),
    [
        (message((1, EXIT_CODE), root=1), True),
        (message((0, 1), (1, EXIT_CODE), root=1), True),
        (message((0, 1), (1, EXIT_CODE), root=0), False),
        (message((1, EXIT_CODE), root=1).replace("Root Cause (first observed failure):", ""), False),
    ],
    ids=["alone", "next to its peer", "after its peer", "without a root cause"],
)
def test_the_rank_is_found_among_those_that_failed(tmp_path: Path, text: str, is_root: bool) -> None:
    found = launched(tmp_path, text)
    assert (found.rank_exit_code, found.is_root_cause) == (EXIT_CODE, is_root)


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
    sleeps = Components(launcher=("sh", "-c", "sleep 600"))
    with pytest.raises(EnvironmentBroken, match=r"after 0\.5 s \(rank 0: not started, rank 1: not st"):
        check(tmp_path, start_seconds=0.5, components=sleeps)


@pytest.mark.parametrize("wrong", [{"ranks": 1}, {"steps": 0}, {"how": "sleep"}], ids=str)
def test_what_makes_no_such_job_is_refused(tmp_path: Path, wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="are needed"):
        check(tmp_path, **wrong)


def test_the_gpus_of_the_job_are_those_of_the_nodes_ranks() -> None:
    made = _environment({"CUDA_VISIBLE_DEVICES": "3", "RANK": "3"}, ["GPU-1", "GPU-2"])
    assert made["CUDA_VISIBLE_DEVICES"] == "GPU-1,GPU-2"
    assert "RANK" not in made
    assert _environment({"CUDA_VISIBLE_DEVICES": "3"}, [])["CUDA_VISIBLE_DEVICES"] == "3"


def test_a_stamp_that_is_only_half_written_is_none(tmp_path: Path) -> None:
    stamps = Stamps(tmp_path, 0)
    assert stamps.read() == []
    stamps.write("step-1")
    with (tmp_path / "rank-0.txt").open("a") as file:
        file.write("dies 12.")
    assert [stamp.name for stamp in stamps.read()] == ["step-1"]
