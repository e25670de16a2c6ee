"""Print the tables of all programs here, one after the other, and at the end how long each took and what it says.

    python perf/tables.py                       # as `make perf` does; on 2 CPU cores that do nothing else
    python perf/tables.py --only scale,reports

Each runs to its end whatever the ones before it say. The exit code is 1 where a goal is missed, or a program ends in
another way than it should, or all together take longer than 15 minutes.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
GOAL_SECONDS = 900.0
PROGRAMS: Mapping[str, Sequence[str]] = {
    "overhead": ("overhead.py", "--pairs", "10"),
    "agreement": ("agreement.py", "--pairs", "3", "--tests", "100"),
    "scale": ("scale.py", "--tests", "5"),
    "a failing test at scale": ("scale.py", "--ranks", "1024", "--failing"),
    "resolver": ("resolver.py", "--ranks", "16"),
    "faults": ("faults.py",),
    "reports": ("reports.py",),
    "reports of 4,096 ranks": ("reports.py", "--ranks", "4096"),
    "training": ("training.py",),
    "loader": ("loader.py",),
    "fidelity": ("fidelity.py",),
    "collectives": ("collectives.py",),
    "sampler": ("sampler.py",),
    "noise": ("noise.py",),
    "rules": ("rules.py",),
    "isolation": ("isolation.py",),
    "soak": ("soak.py", "--rounds", "10", "--session", "0", "--at-once", "2"),
}
"""Name -> script in this folder, and its arguments. docs/performance.md has what they said."""
_MISSED = 1


def run(name: str) -> tuple[float, int]:
    """Run a program with its output shown as it comes; return its seconds and its exit code."""
    script, *arguments = PROGRAMS[name]
    print(f"\n## {name}: python perf/{' '.join([script, *arguments])}\n", flush=True)
    begin = time.monotonic()
    done = subprocess.run(
        [sys.executable, str(FOLDER / script), *arguments], env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False
    )
    return time.monotonic() - begin, done.returncode


def said(code: int) -> str:
    """Return what an exit code says."""
    return {0: "met", _MISSED: "MISSED"}.get(code, f"BROKE, exit code {code}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print all tables, then the summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="names of programs, separated by commas (default: all)")
    asked = parser.parse_args(arguments)
    names = asked.only.split(",") if asked.only else list(PROGRAMS)
    unknown = [name for name in names if name not in PROGRAMS]
    if unknown:
        parser.error(f"--only {unknown[0]!r}: allowed are {', '.join(map(repr, PROGRAMS))}")
    found = {name: run(name) for name in names}
    print("\n## All together\n\n| program | seconds | goals |\n| --- | ---: | --- |")
    for name, (seconds, code) in found.items():
        print(f"| {name} | {seconds:.0f} | {said(code)} |")
    total = sum(seconds for seconds, _ in found.values())
    in_time = total <= GOAL_SECONDS
    print(f"| together | {total:.0f} | {GOAL_SECONDS:.0f} s: {'met' if in_time else 'MISSED'} |")
    print(f"\n{os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f}")
    return 0 if in_time and not any(code for _, code in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
