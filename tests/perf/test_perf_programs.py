"""The programs of perf/: each runs, and rejects wrong arguments.

The soak is in test_soak_of_the_suite.py.
"""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import example_runs
import pytest
from each import of_each
from sessions import DEADLINE_SECONDS, environment

from pytest_gpucluster.journal import journal

PERF = Path(__file__).parents[2] / "perf"
sys.path.insert(0, str(PERF))  # programs, not a package
try:
    import reports
    import tables
finally:
    sys.path.remove(str(PERF))


def run(script: str, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
    """Run a program."""
    return subprocess.run(
        [sys.executable, str(PERF / script), *words],
        env=environment(more),
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECONDS,
        check=False,
    )


# ---- each runs, on few ranks and for a short time

SMALL = {
    "agreement.py": ["--ranks=2", "--tests=4", "--pairs=1"],
    "collectives.py": ["--sizes=1 MiB", "--window=0.01"],
    "fidelity.py": ["--only=matmul,rectangle,hbm", "--dtypes=bf16", "--n=64", "--mebibytes=1", "--window=0.01"],
    "loader.py": ["--side=16", "--pairs=6", "--images=16"],
    "overhead.py": ["--only=import", "--pairs=6"],
    "power.py": ["--ranks=2", "--sizes=0.01"],
    "reports.py": ["--ranks=64", "--criteria=2", "--only=html"],
    "scale.py": ["--ranks=4", "--tests=2"],
}


@pytest.mark.extended
@pytest.mark.parametrize("script", SMALL)
def test_a_program_runs_to_its_end_and_prints_a_table(script: str) -> None:
    done = run(script, *SMALL[script])
    assert done.returncode in (0, 1), done.stdout + done.stderr  # so short it may miss its goal
    assert "Traceback" not in done.stderr
    assert re.search(r"\d", done.stdout)


def test_every_program_is_among_the_tables() -> None:
    programs = {path.name for path in PERF.glob("*.py") if "parser_of(__doc__)" in path.read_text()}
    assert programs - {"tables.py"} == {script for script, *_ in tables.PROGRAMS.values()}
    assert set(SMALL) <= programs


# ---- wrong arguments

WRONG = [
    ("collectives", "--pairs=19", "20 pairs"),
    ("collectives", "--sizes=64KiB,1MiB", "below 1 MiB"),
    ("collectives", "--sizes=1", "no unit"),
    ("collectives", "--collectives=gather", "all_reduce"),
    ("faults", "--at-once=9", "--at-once=9"),
    ("fidelity", "--n=2", "64 rows"),
    ("fidelity", "--only=matmul,hbn", "'matmul,hbn'"),
    ("reports", "--only=htm", "'htm'"),
    ("scale", "--tests=0", "--tests 0"),
    ("scale", "--ranks=64,100", "a multiple of 8"),
    ("tables", "--only=scales", "'overhead'"),
]


@of_each("wrong", WRONG, name=lambda wrong: " ".join(wrong[:2]))
def test_wrong_arguments_are_usage_errors_that_name_what_is_allowed(
    wrong: tuple[str, str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program, word, expected = wrong
    monkeypatch.setattr(sys, "argv", [f"{program}.py", word])
    monkeypatch.syspath_prepend(str(PERF))
    with pytest.raises(SystemExit) as error:
        importlib.import_module(program).main()
    assert error.value.code == 2
    assert expected in capsys.readouterr().err


# ---- reports


# The largest ones; `make perf` makes all of them, of the whole run.
@pytest.mark.parametrize("name", ["json", pytest.param("html", marks=pytest.mark.extended)])
def test_a_report_of_1024_ranks_keeps_its_bounds(name: str, tmp_path: Path) -> None:
    path = example_runs.write_large(tmp_path / "large", criteria=1) / journal.JOURNAL_FILE
    cost = json.loads(run("reports.py", "--journal", str(path), "--one", name).stdout)
    # All criteria of a journal are never in memory at once, so that more of them hardly need more of it.
    assert cost["peak_bytes"] < reports.MOST_BYTES
    assert cost["report_bytes"] > 0
    assert name != "html" or cost["report_bytes"] < reports.MOST_HTML_BYTES / 40 + 400_000
