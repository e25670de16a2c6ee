"""The programs of perf/: each runs, and rejects wrong arguments.

The soak is in test_soak_of_the_suite.py.
"""

import importlib
import json
import re
import subprocess
import sys
from dataclasses import replace
from datetime import date, timedelta
from pathlib import Path

import example_runs
import pytest
from each import of_each
from sessions import DEADLINE_SECONDS, environment

from pytest_gpucluster.journal import journal
from pytest_gpucluster.simulation.faults import KINDS

PERF = Path(__file__).parents[2] / "perf"
sys.path.insert(0, str(PERF))  # programs, not a package
try:
    import reports
    import simulate
    import tables
finally:
    sys.path.remove(str(PERF))


def run(script, *words, **more):
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
    "power.py": ["--ranks=2", "--sizes=0.01"],
    "reports.py": ["--ranks=64", "--criteria=2", "--only=html"],
    "scale.py": ["--ranks=4", "--tests=2"],
}


@pytest.mark.extended
@pytest.mark.parametrize("script", SMALL)
def test_a_program_runs_to_its_end_and_prints_a_table(script):
    done = run(script, *SMALL[script])
    assert done.returncode in (0, 1), done.stdout + done.stderr  # so short it may miss its goal
    assert "Traceback" not in done.stderr
    assert re.search(r"\d", done.stdout)


def test_every_program_is_among_the_tables():
    programs = {path.name for path in PERF.glob("*.py") if "parser_of(__doc__)" in path.read_text()}
    assert programs - {"tables.py"} == {script for script, *_ in tables.PROGRAMS.values()}
    assert set(SMALL) <= programs


# ---- what a simulated run has found

FAULT = simulate.Case(what="2x4xH100", fault="hbm:gpu-01/3", seed=1, tests="hbm")
RIGHT, OTHER = "rank 7 (gpu-01, GPU 3 GPU-f0f0…): slow", "rank 0 (gpu-00, GPU 0 GPU-a2b8…): slow"
JUDGED = [
    (FAULT, 1, [RIGHT], (True, True, 0)),
    (FAULT, 1, [RIGHT, OTHER], (True, True, 1)),
    (FAULT, 1, [OTHER], (True, False, 1)),
    (FAULT, 1, ["on rank 0 (gpu-00, GPU 0 GPU-a…), and 15 more ranks: all there are"], (True, False, 0)),
    (FAULT, 11, [], (True, False, 0)),
    (FAULT, 0, [], (False, False, 0)),
    (replace(FAULT, fault=""), 0, [], (False, False, 0)),
    (replace(FAULT, fault=""), 1, [OTHER], (True, False, 1)),
]


@of_each("row", JUDGED)
def test_a_fault_is_found_and_named_and_no_other_part_accused(row):
    case, code, messages, expected = row
    tests = [{"name": "test_hbm[copy]", "outcome": "failed", "message": message} for message in messages]
    found = simulate.judged(case, code, 20.0, tests)
    assert (found.found, found.named, len(found.accused)) == expected
    is_right = expected == (True, True, 0) if case.fault else not code
    assert simulate.is_good({case: found}) is is_right


def test_the_faults_of_a_day_are_others_the_next_day_and_all_have_their_turn():
    names = set()
    for day in range(len(KINDS)):
        healthy, *faults = simulate.of_today(date(2026, 11, 27) + timedelta(day))
        assert not healthy.fault
        names |= {fault.fault.partition(":")[0] for fault in faults}
    assert names == set(KINDS)


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
    ("tables", "--only=scales", "'agreement'"),
]


@of_each("wrong", WRONG, name=lambda wrong: " ".join(wrong[:2]))
def test_wrong_arguments_are_usage_errors_that_name_what_is_allowed(wrong, monkeypatch, capsys):
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
def test_a_report_of_1024_ranks_keeps_its_bounds(name, tmp_path):
    path = example_runs.write_large(tmp_path / "large", criteria=1) / journal.JOURNAL_FILE
    cost = json.loads(run("reports.py", "--journal", str(path), "--one", name).stdout)
    # All criteria of a journal are never in memory at once, so that more of them hardly need more of it.
    assert cost["peak_bytes"] < reports.MOST_BYTES
    assert cost["report_bytes"] > 0
    assert name != "html" or cost["report_bytes"] < reports.MOST_HTML_BYTES / 40 + 400_000
