"""How long it takes from a fault to the report on disk, and from a fault to the next test passing.

    python perf/faults.py
    python perf/faults.py --at-once 2     # sooner, and a little longer each: most of a run is waiting

Runs some of tests/faults, one run at a time if not told otherwise: real torchrun with 2 ranks, or with 4 on two
launchers for the lost node. A rank is killed, raises, hangs so that it can be released and so that it cannot, is
stopped; the launcher gets SIGTERM. The times are from stamps of the ranks and from the files that the product has
written. tests/faults/times.py has the goals, and the tests print the same table of all faults. The runs are set to
stuck=2 and dead=3, so that they need not wait for long, and their goals are as much shorter.

All of it is wall time, so the load average stands below. The exit code is 1 where a goal is missed, and 2 where a test
has failed: then the run has not done what it was timed at.
"""

from __future__ import annotations

import argparse
import importlib
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

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
"""How the text of each goal begins that must have been measured."""
_DEADLINE_SECONDS = 900
_FAREWELL_SECONDS = 10.0
_MISSED, _BROKE = 1, 2


def measured(tests: Sequence[str], folder: Path, started: list[subprocess.Popen[str]]) -> list[Any]:
    """Run tests for faults and return the rows of their table (``times.Row``).

    Args:
        tests: as pytest is told of them, below tests/faults.
        folder: where to put what they have timed; it is made.
        started: takes the process, for whoever has to end it.

    Raises:
        RuntimeError: a test has failed, or nothing was timed, so that the times mean nothing.
    """
    times, written = _times(), folder / "times.json"
    folder.mkdir()
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *(str(FAULTS / test) for test in tests)]
    with subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "FAULT_TIMES": str(written)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as running:
        started.append(running)
        try:
            output, _ = running.communicate(timeout=_DEADLINE_SECONDS)
        except subprocess.TimeoutExpired:
            running.kill()
            raise
    if running.returncode != 0 or not written.exists():
        raise RuntimeError(f"{' '.join(command)} ended with {running.returncode}:\n{output[-4000:]}")
    rows: list[Any] = times.read(written)
    return rows


def _times() -> Any:
    sys.path.insert(0, str(FAULTS))
    try:
        return importlib.import_module("times")
    finally:
        sys.path.remove(str(FAULTS))


def show(rows: Sequence[Any]) -> bool:
    """Print the table and what it says of each goal; return whether all are met and none was left out."""
    times = _times()
    print("\n".join(times.table(rows)))
    for line in times.verdicts(rows):
        print(f"\n{line}")
    held = {cell.goal.text for row in rows for cell in (row.report, row.next_test) if cell.goal is not None}
    left_out = [start for start in GOALS if not any(text.startswith(start) for text in held)]
    for start in left_out:
        print(f"\ngoal of {start} …: MISSED (not measured)")
    return not left_out and not any(row.is_missed for row in rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; return 1 if a goal is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--at-once", type=int, default=1, metavar="N", help="runs at the same time (default: 1)")
    at_once = parser.parse_args(arguments).at_once
    if not 1 <= at_once <= len(TESTS):
        parser.error(f"--at-once {at_once}: 1 to {len(TESTS)} are allowed")
    load = [os.getloadavg()[0]]
    started: list[subprocess.Popen[str]] = []
    with tempfile.TemporaryDirectory(prefix="gpucluster-perf-") as name, ThreadPoolExecutor(at_once) as threads:
        folders = [Path(name) / str(number) for number in range(at_once)]
        shares = [TESTS[number::at_once] for number in range(at_once)]
        try:
            found = threads.map(measured, shares, folders, [started] * at_once)
            rows = [row for of_share in found for row in of_share]
        except KeyboardInterrupt:
            # A signal to the whole group has reached them, too, and a second one would break into their own ending. One
            # to this program alone has not, and the threads would wait.
            until = time.monotonic() + _FAREWELL_SECONDS
            while any(running.poll() is None for running in started) and time.monotonic() < until:
                time.sleep(0.1)
            for running in started:
                running.send_signal(signal.SIGINT)
            raise
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            print(error, file=sys.stderr)
            return _BROKE
    met = show(rows)
    load.append(os.getloadavg()[0])
    import pytest
    import torch

    print(
        f"\n{at_once} at a time, {os.cpu_count()} cores, load average {min(load):.1f} to {max(load):.1f}; Python "
        f"{platform.python_version()}, pytest {pytest.__version__}, torch {torch.__version__}"
    )
    return 0 if met else _MISSED


if __name__ == "__main__":
    sys.exit(main())
