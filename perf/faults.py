"""The time from a fault to the report on disk, and from a fault to the next test passing.

    python perf/faults.py

Runs some of tests/faults: real torchrun with 2 ranks, or with 4 on two launchers for the lost node. A rank is killed,
raises, hangs in a way that can be released and in one that cannot, is stopped; the launcher gets SIGTERM. The times are
from stamps of the ranks and from the files that the product has written. tests/faults/times.py has the goals, and the
tests print the same table of all faults. The runs are set to stuck=2 and dead=3, so that they need not wait for long,
and their goals are shorter by as much.

All times are wall time. The exit code is 1 where a goal is missed, and 2 where a test has failed: then the times mean
nothing.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from comparison import TEMPORARY, Conditions, parser_of

ROOT = Path(__file__).resolve().parents[1]
FAULTS = ROOT / "tests" / "faults"
TESTS = (
    "test_deaths.py::test_a_dead_rank_is_named[kill-1]",
    "test_deaths.py::test_a_dead_rank_0_is_named_by_the_recorder[kill-0]",
    "test_exceptions.py::test_the_report_names_the_culprit_and_the_next_test_passes",
    "test_hangs.py::test_the_report_names_the_culprit_and_the_next_test_passes",
    "test_stuck.py::test_the_run_ends_and_the_report_names_the_culprit[hang_in_c-1]",
    "test_stuck.py::test_the_run_ends_and_the_report_names_the_culprit[stop-0]",
    "test_termination.py::test_a_signal_to_the_launcher_ends_the_run_with_reports[SIGTERM]",
    "test_nodes.py::test_a_lost_node_is_named_by_its_host",
)
GOALS = (
    "a dead rank",
    "a fault that is survived",
    "a hang to its report",
    "a hang that nothing ends",
    "a signal",
    "a lost node",
)
"""Beginning of the text of each goal that must have been measured."""
_DEADLINE_SECONDS = 900
_MISSED, _BROKE = 1, 2


def measured(folder: Path) -> list[Any]:
    """Run the tests and return the rows of their table (``times.Row``).

    Raises:
        RuntimeError: a test has failed, or nothing was timed, so that the times mean nothing.
    """
    written = folder / "times.json"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *(str(FAULTS / test) for test in TESTS)]
    environ = {**os.environ, "FAULT_TIMES": str(written)}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=_DEADLINE_SECONDS)
    if done.returncode != 0 or not written.exists():
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-4000:]}")
    rows: list[Any] = _times().read(written)
    return rows


def _times() -> Any:
    sys.path.insert(0, str(FAULTS))
    try:
        return importlib.import_module("times")
    finally:
        sys.path.remove(str(FAULTS))


def show(rows: Sequence[Any]) -> bool:
    """Print the table and the verdict on each goal; return whether all are met and none was left out."""
    times = _times()
    print("\n".join(times.table(rows)))
    for line in times.verdicts(rows):
        print(f"\n{line}")
    measured_goals = {cell.goal.text for row in rows for cell in (row.report, row.next_test) if cell.goal is not None}
    left_out = [start for start in GOALS if not any(text.startswith(start) for text in measured_goals)]
    for start in left_out:
        print(f"\ngoal of {start} …: MISSED (not measured)")
    return not left_out and not any(row.is_missed for row in rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; return 1 if a goal is missed."""
    parser_of(__doc__).parse_args(arguments)
    conditions = Conditions()
    with tempfile.TemporaryDirectory(prefix=TEMPORARY) as folder:
        try:
            rows = measured(Path(folder))
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            print(error, file=sys.stderr)
            return _BROKE
    met = show(rows)
    print(f"\n{conditions.line()}")
    return 0 if met else _MISSED


if __name__ == "__main__":
    sys.exit(main())
