"""perf/overhead.py: what is counted for the suite, and when a goal is missed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PERF = Path(__file__).parent.parent / "perf"
sys.path.insert(0, str(PERF))  # programs, not a package
try:
    import overhead
finally:
    sys.path.remove(str(PERF))

SUITE = """
import pytest


@pytest.fixture
def slow():
    import time
    time.sleep(0.1)


@pytest.mark.training
def test_slow(slow):
    from pytest_gpucluster.time_spent import counted
    import time
    with counted("verifying"):
        time.sleep(0.2)
"""


def test_a_run_leaves_its_moments_in_their_order_and_the_parts_of_its_tests(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(SUITE)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    stamps = tmp_path / "stamps.json"
    began = overhead_now()
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "overhead_stamps", *overhead.LEFT_OUT),
            *("--gpucluster-device=cpu", f"--gpucluster-report-dir={tmp_path / 'reports'}", str(tmp_path)),
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(PERF), "PERF_STAMPS": str(stamps)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = {**overhead.told(stamps, tmp_path / "reports"), "began": began}
    parts = overhead.start_parts(found)
    # A process begins at a tick of 10 ms, which may lie before the moment in which it was asked for.
    assert all(seconds >= -0.02 for seconds in parts.values()), parts
    assert sum(parts.values()) == pytest.approx(found["moments"]["first test"] - began)
    assert parts[overhead._TORCH] > 0
    assert 0 < overhead.ours(parts) < sum(parts.values()) - parts[overhead._TORCH] + 0.02
    assert overhead.processor_beyond(found) > 0
    [test] = found["tests"]
    assert (test["name"], test["training"]) == ("test_slow", True)
    parts = test["parts"]
    assert parts["set_up"] >= 0.1
    assert parts["verifying"] >= 0.2
    assert parts["warm_up"] == parts["measuring"] == 0
    assert sum(parts.values()) <= test["seconds"]


def overhead_now() -> float:
    """The clock of the stamps."""
    import time

    return time.clock_gettime(time.CLOCK_BOOTTIME)


def test_only_the_suites_own_parts_count() -> None:
    moments = dict(zip([end for _, _, end in overhead.START], range(10, 110, 10), strict=True))
    parts = overhead.start_parts({"began": 0.0, "moments": moments | {"torch begins": 30, "connecting begins": 50}})
    assert set(parts.values()) == {10.0}
    assert overhead.ours(parts) == 60.0  # of ten parts, four are torchrun's, torch's and waiting


@pytest.mark.parametrize(("milliseconds", "met"), [(14.9, True), (16.0, False)])
def test_an_import_that_takes_too_long_misses_its_goal(
    milliseconds: float, met: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pair = {"without": (0.5, 0.4), "installed": (0.6, 0.4 + milliseconds / 1e3)}
    monkeypatch.setattr(overhead, "import_pairs", lambda pairs: [pair] * pairs)
    assert overhead.show_import(20) == met
    out = capsys.readouterr().out
    assert ("MISSED" not in out) == met
    assert f"| processor time | 400 ms | {400 + milliseconds:.0f} ms | {milliseconds} ms" in out


def test_the_time_of_what_has_failed_is_no_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match=r"ended with 3:\nbad"):
        overhead.seconds_of([sys.executable, "-c", "print('bad'); raise SystemExit(3)"], tmp_path)
    failed = subprocess.CompletedProcess([], 1, stdout="1 failed", stderr="")
    monkeypatch.setattr(overhead.subprocess, "run", lambda *arguments, **keywords: failed)
    with pytest.raises(RuntimeError, match="1 failed"):
        overhead.run_suite(tmp_path)


def test_a_rehearsal_is_held_against_both_goals(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tests = [
        {"name": "test_quick", "training": False, "seconds": 40.0, "parts": {"warm_up": 1.0}},
        {"name": "test_trains", "training": True, "seconds": 125.0, "parts": {"agreeing": 0.5}},
    ]
    found = {"began": 0.0, "end": 181.0, "moments": {"first test": 10.0}, "tests": tests}
    monkeypatch.setattr(overhead, "run_suite", lambda folder, *options: found)
    assert not overhead.show_rehearsal("")
    out = capsys.readouterr().out
    assert "60 s, without those that train: met (56.000 s)" in out
    assert "180 s, all: MISSED (181.000 s)" in out
    assert "| together | 165.00 | 0.00 | 1.00 | 0.00 | 0.00 | 0.50 | 163.50 |" in out
    # Of a selection nobody can say what all criteria take.
    assert overhead.show_rehearsal("not training")
    assert "180 s, all" not in capsys.readouterr().out
