"""perf/tables.py: every program is run, whatever the others say, and what was missed or broke is told."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

PERF = Path(__file__).parent.parent / "perf"
sys.path.insert(0, str(PERF))  # programs, not a package
try:
    import tables
finally:
    sys.path.remove(str(PERF))


def test_programs_that_miss_or_break_do_not_keep_the_others_from_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name, code in (("good", 0), ("bad", 1), ("broken", 3)):
        (tmp_path / f"{name}.py").write_text(f"print('table of {name}'); raise SystemExit({code})")
    monkeypatch.setattr(tables, "FOLDER", tmp_path)
    monkeypatch.setattr(tables, "PROGRAMS", {"bad": ("bad.py",), "broken": ("broken.py",), "good": ("good.py",)})
    assert tables.main([]) == 1
    out = capfd.readouterr().out
    for said in ("table of bad", "table of broken", "table of good", "| bad | 0 | MISSED |", "| good | 0 | met |"):
        assert said in out
    assert "| broken | 0 | BROKE, exit code 3 |" in out
    assert tables.main(["--only", "good"]) == 0
    monkeypatch.setattr(tables, "GOAL_SECONDS", 0.0)
    assert tables.main(["--only", "good"]) == 1
    assert "| 0 s: MISSED |" in capfd.readouterr().out


def test_a_program_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        tables.main(["--only", "scales"])
    assert "--only 'scales': allowed are 'overhead'" in capsys.readouterr().err


def test_every_program_here_is_run() -> None:
    scripts = {script for script, *_ in tables.PROGRAMS.values()}
    programs = {path.name for path in PERF.glob("*.py") if "argparse.ArgumentParser(" in path.read_text()}
    assert programs - {"tables.py"} == scripts
