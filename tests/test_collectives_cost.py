"""perf/collectives.py: when it says that our measurement is as good as a bare loop, and when not."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import pytest

PERF = Path(__file__).parent.parent / "perf"
sys.path.insert(0, str(PERF))  # programs, not a package
try:
    import collectives
finally:
    sys.path.remove(str(PERF))


def pairs(ours: float, *, spread: float) -> list[dict[str, float]]:
    """Twenty pairs in which a bare call takes 1 s, give or take, and ours so many times as long."""
    noise = [1 + spread * (number - 9.5) / 9.5 for number in range(20)]
    return [{"bare": 1.0, "again": one, "ours": ours * one} for one in noise]


@pytest.mark.parametrize(
    ("device", "ours", "spread", "good"),
    [
        ("cpu", 1.0, 0.1, True),
        ("cpu", 1.05, 0.1, True),
        ("cpu", 1.2, 0.1, False),
        ("cpu", 0.8, 0.1, False),
        ("cuda", 1.0, 0.005, True),
        ("cuda", 1.01, 0.005, True),
        ("cuda", 1.03, 0.005, False),
        ("cuda", 1.0, 0.2, False),
    ],
    ids=["same", "inside", "slower", "too fast", "on a GPU", "1 % on a GPU", "3 % on a GPU", "not sure on a GPU"],
)
def test_ours_is_good_inside_of_the_band_and_on_a_gpu_surely_above_the_least(
    device: str, ours: float, spread: float, good: bool
) -> None:
    found = {"collective": "all_gather", "bytes": 2**20, "pairs": pairs(ours, spread=spread)}
    text, told = collectives.row(found, 2, device)
    assert told is good
    assert text.endswith("| good |" if good else "| MISSED |")


def test_a_row_has_busbw_of_the_collective() -> None:
    found = {"collective": "all_gather", "bytes": 4 * 10**9, "pairs": pairs(2.0, spread=0.0)}
    assert collectives.row(found, 4, "cpu")[0].startswith("| all_gather | 3814.7 MiB | 3.000 | 1.500 | 0.500 (0.500 to")


def test_small_sizes_and_unknown_names_are_refused() -> None:
    assert collectives.sizes("1M:4M:2") == [2**20, 2**21, 2**22]
    with pytest.raises(argparse.ArgumentTypeError, match="below 1 MiB"):
        collectives.sizes("64k,1M")
    with pytest.raises(argparse.ArgumentTypeError, match="is no range"):
        collectives.sizes("1M:2M")
    with pytest.raises(argparse.ArgumentTypeError, match="is not some of all_reduce"):
        collectives.collectives("gather")


def test_fewer_pairs_are_refused() -> None:
    command = [sys.executable, str(PERF / "collectives.py"), "--pairs=19"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert "at least 20 pairs and 2 ranks are needed" in done.stderr
