"""perf/faults.py: what it has measured is shown with its goals, and a goal that is missed or left out is no pass."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

PERF = Path(__file__).parent.parent / "perf"
sys.path.insert(0, str(PERF))  # programs, not a package
try:
    import faults
finally:
    sys.path.remove(str(PERF))

times = faults._times()
GOOD = [
    times.Row("death", times.Cell(0.5, times.DEATH)),
    times.Row("exception", times.Cell(1.1), times.Cell(1.2, times.SURVIVED)),
    times.Row("hang", times.Cell(0.5, times.HANG), times.Cell(0.6, times.SURVIVED)),
    times.Row("stuck", times.Cell(3.7, times.stuck(2.0))),
    times.Row("signal", times.Cell(0.7, times.SIGNAL)),
    times.Row("node", times.Cell(3.3, times.lost_node(3.0))),
]


def said(
    rows: Sequence[object], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> tuple[int, str]:
    monkeypatch.setattr(faults, "measured", lambda tests, folder, started: rows)
    return faults.main([]), capsys.readouterr().out


def test_what_meets_every_goal_is_a_pass(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    code, out = said(GOOD, monkeypatch, capsys)
    assert code == 0
    assert out.count("\ngoal of ") == 6
    assert "MISSED" not in out
    assert out.splitlines()[-1].split(", ")[-1].startswith("torch ")
    assert "load average" in out.splitlines()[-1]


@pytest.mark.parametrize("number", range(len(GOOD)))
def test_one_that_takes_too_long_misses(
    number: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    row = GOOD[number]
    cells = [times.Cell(33.0 if cell.goal else cell.seconds, cell.goal) for cell in (row.report, row.next_test)]
    code, out = said([*GOOD[:number], times.Row(row.fault, *cells), *GOOD[number + 1 :]], monkeypatch, capsys)
    assert code == 1
    assert f"worst 33.00 s: {row.fault})" in out


@pytest.mark.parametrize("number", [0, 3, 4, 5])
def test_a_goal_for_which_nothing_was_measured_is_missed(
    number: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out = said([*GOOD[:number], *GOOD[number + 1 :]], monkeypatch, capsys)
    assert code == 1
    assert "MISSED (not measured)" in out


def test_times_of_tests_that_fail_are_no_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(faults, "FAULTS", tmp_path)
    (tmp_path / "times.py").write_text((PERF.parent / "tests" / "faults" / "times.py").read_text(encoding="utf-8"))
    (tmp_path / "test_it.py").write_text("def test_good(): pass\ndef test_bad(): assert False, 'the run went on'\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    monkeypatch.setattr(faults, "TESTS", ("test_it.py::test_bad",))
    assert faults.main([]) == 2
    assert "the run went on" in capsys.readouterr().err
    # Tests that pass and have timed nothing are no figures either.
    with pytest.raises(RuntimeError, match="ended with 0"):
        faults.measured(["test_it.py::test_good"], tmp_path / "times", [])


def test_at_once_each_test_is_run_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    taken: list[tuple[str, ...]] = []

    def measured(tests: Sequence[str], folder: Path, started: object) -> list[times.Row]:
        taken.append(tuple(tests))
        return [row for row, test in zip(GOOD, faults.TESTS, strict=False) if test in tests]

    monkeypatch.setattr(faults, "measured", measured)
    assert faults.main(["--at-once", "3"]) == 0
    assert len(taken) == 3
    assert sorted(test for share in taken for test in share) == sorted(faults.TESTS)
    assert "3 at a time" in capsys.readouterr().out


def test_the_tests_that_it_runs_are_there() -> None:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, *(str(faults.FAULTS / test) for test in faults.TESTS)],
        cwd=faults.ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for test in faults.TESTS:
        assert test in done.stdout
