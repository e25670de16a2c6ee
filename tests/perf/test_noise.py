"""perf/noise.py: what it makes of sessions that give no verdict, and a run of it with real ones."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, repeat
from pathlib import Path
from types import SimpleNamespace

import pytest
from sessions import DEADLINE_SECONDS, environment

PERF = Path(__file__).parents[2] / "perf"
sys.path.insert(0, str(PERF))  # programs, not a package: they import each other by name
try:
    import noise
    import noise_sessions
finally:
    sys.path.remove(str(PERF))


def program(monkeypatch: pytest.MonkeyPatch, ends: Iterator[str]) -> int:
    """Run the program with sessions that end so, each with the same value."""

    def session(options: Sequence[str], *, ranks: int, folder: Path) -> SimpleNamespace:
        return SimpleNamespace(journal=SimpleNamespace(verdict=next(ends), reason="too slow"), said="")

    found = noise.Found(outcome="passed", value=1.0, low=1.0, high=1.0, inconclusive="", stopped="sure")
    monkeypatch.setattr(noise, "session", session)
    monkeypatch.setattr(noise, "_found", lambda made, metric: found)
    return noise.main(["--only", "matmul", "--repeats", "2", "--busy", "0"])


@pytest.mark.parametrize(
    ("ends", "shown", "code"),
    [
        (["INCOMPLETE", "REHEARSED"] * 7, 7, 0),
        (chain(["REHEARSED"] * 5, repeat("INCOMPLETE")), 2 * noise.ATTEMPTS, 1),
        (chain(["INCOMPLETE"] * noise.ATTEMPTS, repeat("REHEARSED")), noise.ATTEMPTS, 1),
        (repeat("INCOMPLETE"), noise.QUIET * noise.ATTEMPTS, 1),
    ],
    ids=["each at first", "each beside a process", "one with nothing beside it", "all"],
)
def test_an_incomplete_session_is_shown_and_repeated_and_without_a_usable_one_nothing_is_met(
    ends: Iterable[str], shown: int, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert program(monkeypatch, iter(ends)) == code
    assert capsys.readouterr().out.count("| not usable |") == shown


def test_a_broken_session_ends_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="BROKEN"):
        program(monkeypatch, repeat("BROKEN"))


@pytest.mark.extended
def test_the_program_runs_real_sessions_on_two_ranks_and_says_what_it_found() -> None:
    command = [sys.executable, str(PERF / "noise.py"), "--only", "all-reduce", "--repeats", "2"]
    command += ["--workload", "nccl.all_reduce.tolerance=300 %"]  # a test asks for no quiet machine
    done = subprocess.run(
        command, env=environment(), capture_output=True, text=True, timeout=4 * DEADLINE_SECONDS, check=False
    )
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in done.stdout.splitlines()]
    taken = [row for row in rows if row[0] in ("nothing", *noise_sessions.BUSY)]
    assert {row[1] for row in taken} == {"all-reduce"}, done.stderr
    # On a machine with much else to do even that may not be enough: then the row says so, and the program too.
    usable = [row for row in taken if row[2] != "not usable"]
    found, beside = Counter(row[0] for row in usable), (2 * noise.kinds("all-reduce", os.cpu_count() or 1))[:2]
    asked = Counter([*["nothing"] * noise.QUIET, *beside])
    assert found <= asked
    said = re.compile(r"(precise|time up) after \d+ samples in .*: interval .*, allowed 300 %.*")
    assert all(said.fullmatch(row[5]) for row in usable), taken
    unsure = any(row[0] == "nothing" and row[5].startswith("time up") for row in usable)
    assert ("NOT QUIET" in done.stdout) == (unsure or not found["nothing"])
    judged = [row for row in rows if row[0] == "all-reduce"]
    assert {row[1]: int(row[2]) for row in judged} == {kind: count for kind, count in found.items() if kind in beside}
    assert done.returncode == int(unsure or found != asked or any(row[4] != "0" for row in judged))
