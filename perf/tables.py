"""Print the tables of all programs here, one after the other, and at the end the duration and the verdict of each.

    python perf/tables.py                       # as `make perf` does; on 2 CPU cores without other load
    python perf/tables.py --only scale,reports

A program that misses a goal does not stop the others. At Ctrl-C or SIGTERM the running one gets time to end what it has
started. The exit code is 1 where a goal is missed, a program breaks, or all take longer than 15 minutes.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from comparison import Conditions, parser_of, some_of

FOLDER = Path(__file__).resolve().parent
GOAL_SECONDS = 900.0
MAX_SECONDS = 600.0
"""Of one program, so that the tables of the others are printed."""
FAREWELL_SECONDS = 30.0
PROGRAMS: Mapping[str, Sequence[str]] = {
    "overhead": ("overhead.py", "--pairs", "6"),
    "agreement": ("agreement.py", "--pairs", "3", "--tests", "100"),
    "scale": ("scale.py", "--tests", "5"),
    "a failing test at scale": ("scale.py", "--ranks", "1024", "--failing"),
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
_MISSED, _BROKE, _OVERDUE = 1, 70, 124
_GUARDED = f"""\
import runpy, sys, traceback
sys.argv = sys.argv[1:]
sys.path[0] = {str(FOLDER)!r}
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
except (SystemExit, KeyboardInterrupt) as stop:
    # With a text Python would end with 1, as a program that has missed a goal does.
    code = getattr(stop, "code", 130)
    if not isinstance(code, (int, type(None))):
        print(code, file=sys.stderr)
        code = {_BROKE}
    sys.exit(code)
except BaseException:
    traceback.print_exc()
    sys.exit({_BROKE})
"""
"""Runs a program so that an exception does not look like a missed goal."""


def run(name: str) -> tuple[float, int]:
    """Run a program; return its seconds and its exit code."""
    script, *arguments = PROGRAMS[name]
    print(f"\n## {name}: python perf/{' '.join([script, *arguments])}\n", flush=True)
    # torch's threads as with torchrun, and byte code kept, as after pip's installation.
    environ = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    begin = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-c", _GUARDED, str(FOLDER / script), *arguments],
        env=environ | {"OMP_NUM_THREADS": "1"},
        process_group=0,
    )
    try:
        code = process.wait(MAX_SECONDS)
    except subprocess.TimeoutExpired:
        code = _OVERDUE
    finally:
        _end(process)
    return time.monotonic() - begin, code


def _end(process: subprocess.Popen[bytes]) -> None:
    """Let a running program end what it has started; kill it after a while, or at a second signal."""
    try:
        if process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(FAREWELL_SECONDS)
    finally:
        if process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def verdict(name: str, code: int) -> str:
    """Return the verdict for a program's exit code."""
    verdicts = {
        0: "met",
        _MISSED: "MISSED",
        _OVERDUE: f"BROKE, not ended after {MAX_SECONDS:g} s",
    }
    return verdicts.get(code, f"BROKE, exit code {code}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print all tables, then the summary."""
    parser = parser_of(__doc__)
    parser.add_argument("--only", type=some_of(PROGRAMS), default=[*PROGRAMS], help="names of programs (default: all)")
    names = parser.parse_args(arguments).only

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupted)
    conditions, begin = Conditions(), time.monotonic()
    results = {name: run(name) for name in names}
    total = time.monotonic() - begin
    print("\n## All programs\n\n| program | seconds | goals |\n| --- | ---: | --- |")
    for name, (seconds, code) in results.items():
        print(f"| {name} | {seconds:.0f} | {verdict(name, code)} |")
    in_time = total <= GOAL_SECONDS
    print(f"| total | {total:.0f} | {GOAL_SECONDS:.0f} s: {'met' if in_time else 'MISSED'} |\n\n{conditions.line()}")
    return 0 if in_time and not any(code for _, code in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
