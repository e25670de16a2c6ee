"""perf/scale.py: simulated ranks take part in a real run, and a rank that fails there is no figure."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest

PERF = Path(__file__).parent.parent / "perf"
sys.path.insert(0, str(PERF))  # programs, not a package
try:
    import scale
finally:
    sys.path.remove(str(PERF))


@pytest.mark.parametrize("ranks", [2, 8, 16, 1024])
def test_every_rank_but_the_real_one_is_in_one_process(ranks: int) -> None:
    simulated = [rank for first, last in scale.shares(ranks) for rank in range(first, last + 1)]
    assert simulated == list(range(1, ranks))


def test_whole_nodes_are_demanded() -> None:
    assert scale.numbers("4,8,1024") == [4, 8, 1024]
    for text in ("1", "12", "64,100"):
        with pytest.raises(argparse.ArgumentTypeError, match="a multiple of 8"):
            scale.numbers(text)


@pytest.mark.parametrize("failing", ["", "equal", "different"], ids=["passing", "failing", "each in its own way"])
def test_simulated_ranks_take_part_in_a_real_run(failing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scale, "CROWD_PROCESSES", 1)
    found = scale.measure(4, 2, failing, tmp_path)
    assert len(found["tests"]) == 2
    assert found["failed"] == bool(failing)
    # 20 kB of each of three simulated ranks, or once.
    assert (found["junit_bytes"] > 50_000) == (failing == "different")
    assert (found["junit_bytes"] > 18_000) == bool(failing)
    # Of each simulated rank: collection, three phases of two tests, and the end; each is a set and a get at least.
    assert found["operations"] > 2 * 8
    # Four values of some 4 kB, once: what rank 0 has read in the first test.
    assert 4 * 2_000 < found["bytes"] < 4 * 20_000
    assert found["watched"].recorder is not None
    assert found["watched"].store.descriptors > 2 * 3


def test_a_rank_that_breaks_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scale, "CROWD_PROCESSES", 1)
    monkeypatch.setattr(scale, "_SUITE", scale._SUITE.replace("test_measures", "test_others"))
    with pytest.raises(RuntimeError, match="rank 0 collected something else"):
        scale.measure(2, 1, "", tmp_path)


@pytest.mark.parametrize(
    ("seconds", "connected", "met"),
    [(0.9, 9.9, True), (1.1, 1.0, False), (0.5, 10.1, False)],
    ids=["good", "a slow test", "slow to connect"],
)
@pytest.mark.parametrize("resolver", [False, True], ids=["without DNS", "with it"])
def test_what_is_slow_misses_a_goal(
    resolver: bool,
    seconds: float,
    connected: float,
    met: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    watched = scale.Watched(scale.Usage(1), scale.Usage(1))
    found = {
        "ranks": 1024,
        "tests": [9.0, seconds, seconds, seconds],
        "cpu": 1.0,
        "watched": watched,
        "connect_seconds": connected,
        "operations": 1.0,
        "bytes": 1.0,
        "journal_bytes": 1.0,
    }
    asked = []

    def measure(*_: object, resolver: bool) -> dict[str, object]:
        asked.append(resolver)
        return dict(found)

    monkeypatch.setattr(scale, "measure", measure)
    assert scale.passing(argparse.Namespace(ranks=[1024], tests=4, resolver=resolver)) == met
    assert asked == [resolver]
    out = capsys.readouterr().out
    assert f"| {connected:.1f} s |" in out
    assert ("with this machine's resolver" if resolver else "without DNS") in out
    assert ("MISSED" not in out) == met
