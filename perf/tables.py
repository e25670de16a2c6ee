"""Print the tables of all programs here, one after the other, and at the end the duration and the verdict of each.

    python perf/tables.py                       # as `make perf` does; on 2 CPU cores without other load
    python perf/tables.py --only scale,reports

A program that misses a goal does not stop the others. Ctrl-C ends the running one, then this. The exit code is 1 where
a goal is missed, a program breaks, or all take longer than 15 minutes.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from comparison import Conditions, parser_of, some_of

FOLDER = Path(__file__).resolve().parent
GOAL_SECONDS = 900.0
MAX_SECONDS = 600.0
"""Of one program, so that the tables of the others are printed."""
FAREWELL_SECONDS = 30.0
PROGRAMS: Mapping[str, Sequence[str]] = {
    "agreement": ("agreement.py", "--pairs", "3", "--tests", "100"),
    "scale": ("scale.py", "--tests", "5"),
    "a failing test at scale": ("scale.py", "--ranks", "1024", "--failing"),
    "a slow GPU at scale": ("scale.py", "--ranks", "1024", "--failing", "slow"),
    "faults": ("faults.py",),
    "reports": ("reports.py", "--only", "reading alone,html,json,junit"),
    "reports of 4096 ranks": ("reports.py", "--ranks", "4096", "--only", "html"),
    "training": ("training.py", "--runs", "2", "--steps", "15"),
    "power": ("power.py", "--ranks", "2", "--sizes", "0.01"),
    "fidelity": ("fidelity.py", "--window", "0.1"),
    "collectives": ("collectives.py", "--sizes", "8 MiB", "--window", "0.05"),
    "simulate": ("simulate.py", "--only", "hbm,row-remapped", "--seeds", "1", "--anew"),
    "soak": ("soak.py", "--rounds", "7", "--session", "0", "--at-once", "2"),
}
"""Name -> script in this folder, and its arguments, chosen so that all fit into a quarter of an hour: with the defaults
most do more. docs/performance.md has the results."""
_VERDICTS = {0: "met", 1: "MISSED, or it broke as shown above", 124: f"BROKE, not ended after {MAX_SECONDS:g} s"}


def run(name: str) -> tuple[float, int]:
    """Run a program; return its seconds and its exit code."""
    script, *arguments = PROGRAMS[name]
    print(f"\n## {name}: python perf/{' '.join([script, *arguments])}\n", flush=True)
    # torch's threads as with torchrun, and byte code kept, as after pip's installation.
    environ = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    limit = ["timeout", "--foreground", "--signal=INT", f"--kill-after={FAREWELL_SECONDS:g}", f"{MAX_SECONDS:g}"]
    command, begin = [*limit, sys.executable, str(FOLDER / script), *arguments], time.monotonic()
    done = subprocess.run(command, env=environ | {"OMP_NUM_THREADS": "1"}, check=False)
    return time.monotonic() - begin, done.returncode


def main(arguments: Sequence[str] | None = None) -> int:
    """Print all tables, then the summary."""
    parser = parser_of(__doc__)
    parser.add_argument("--only", type=some_of(PROGRAMS), default=[*PROGRAMS], help="names of programs (default: all)")
    names = parser.parse_args(arguments).only
    conditions, begin = Conditions(), time.monotonic()
    results = {name: run(name) for name in names}
    total = time.monotonic() - begin
    print("\n## All programs\n\n| program | seconds | goals |\n| --- | ---: | --- |")
    for name, (seconds, code) in results.items():
        print(f"| {name} | {seconds:.0f} | {_VERDICTS.get(code, f'BROKE, exit code {code}')} |")
    in_time = total <= GOAL_SECONDS
    print(f"| total | {total:.0f} | {GOAL_SECONDS:.0f} s: {'met' if in_time else 'MISSED'} |\n\n{conditions.line()}")
    return 0 if in_time and not any(code for _, code in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
