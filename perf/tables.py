"""Print the tables of all programs here, one after the other, and at the end how long each took and what it says.

    python perf/tables.py                       # as `make perf` does; on 2 CPU cores that do nothing else
    python perf/tables.py --only scale,reports

Each runs to its end whatever the ones before it say; those that hold no wall time against a goal run last, together. At
Ctrl-C or SIGTERM what runs is given time to end what it has started. The exit code is 1 where a goal is missed, or a
program ends in another way than it should, or all together take longer than 15 minutes.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
GOAL_SECONDS = 900.0
LONGEST_SECONDS = 600.0
"""Of a program; what has not ended by then is ended, so that the tables of the others come."""
FAREWELL_SECONDS = 30.0
LOOK_SECONDS = 0.05
PROGRAMS: Mapping[str, Sequence[str]] = {
    "overhead": ("overhead.py", "--pairs", "6"),
    "agreement": ("agreement.py", "--pairs", "3", "--tests", "100"),
    "scale": ("scale.py", "--tests", "5"),
    "a failing test at scale": ("scale.py", "--ranks", "1024", "--failing"),
    "faults": ("faults.py", "--at-once", "2"),
    "reports": ("reports.py", "--only", "reading alone,html,json,junit"),
    "reports of 4096 ranks": ("reports.py", "--ranks", "4096", "--only", "html"),
    "training": ("training.py", "--runs", "2", "--steps", "15"),
    "loader": ("loader.py", "--pairs", "6"),
    "fidelity": ("fidelity.py", "--window", "0.1"),
    "collectives": ("collectives.py", "--sizes", "8M", "--window", "0.05"),
    "soak": ("soak.py", "--rounds", "7", "--session", "0", "--at-once", "2"),
}
"""Name -> script in this folder, and its arguments, chosen so that all fit into a quarter of an hour: by themselves
most do more. docs/performance.md has what they said."""
NO_GOAL = ("loader",)
"""What prints figures that are held against nothing."""
UNHURRIED = ("reports of 4096 ranks",)
"""What simulates, waits for a resolver, or counts processor time. They run together: wall time there is longer than
alone, and only processor time is held against a bound."""
_MISSED, _BROKE, _OVERDUE = 1, 70, 124
_GUARDED = f"""\
import runpy, sys, traceback
sys.argv = sys.argv[1:]
sys.path[0] = {str(FOLDER)!r}
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
except (SystemExit, KeyboardInterrupt) as stop:
    # A text is an error, and Python would end with 1, as one that has missed a goal does.
    code = getattr(stop, "code", 130)
    if not isinstance(code, (int, type(None))):
        print(code, file=sys.stderr)
        code = {_BROKE}
    sys.exit(code)
except BaseException:
    traceback.print_exc()
    sys.exit({_BROKE})
"""
"""Runs a program so that one that breaks does not look like one that has missed a goal."""


def groups(names: Sequence[str]) -> list[list[str]]:
    """Return what runs one after the other: each by itself, and last those that hold no wall time against a goal."""
    alone, together = ([name for name in names if (name in UNHURRIED) == is_one] for is_one in (False, True))
    return [*([name] for name in alone), *([together] if together else [])]


def run(names: Sequence[str]) -> dict[str, tuple[float, int]]:
    """Run programs at the same time; return the seconds until each had ended, and its exit code.

    The output of one alone is shown as it comes, that of several one after the other when all have ended.
    """
    begin = time.monotonic()
    processes: list[subprocess.Popen[bytes]] = []
    with ExitStack() as stack:
        stack.enter_context(_ended_by_signals(processes))
        shown = [stack.enter_context(tempfile.TemporaryFile()) if len(names) > 1 else None for _ in names]
        for name, output in zip(names, shown, strict=True):
            script, *arguments = PROGRAMS[name]
            head = f"\n## {name}: python perf/{' '.join([script, *arguments])}\n\n"
            if output is None:
                print(head, end="", flush=True)
            else:
                output.write(head.encode())
                output.flush()
            processes.append(
                subprocess.Popen(
                    [sys.executable, "-c", _GUARDED, str(FOLDER / script), *arguments],
                    env=_environment(),
                    stdout=output,
                    stderr=output,
                    process_group=0,
                )
            )
        found = _ended(processes, begin)
        for output in filter(None, shown):
            output.seek(0)
            print(output.read().decode(errors="replace"), end="", flush=True)
    return dict(zip(names, found, strict=True))


def _environment() -> dict[str, str]:
    """Return that of the programs: torch's threads as torchrun has them, and byte code kept, as where pip installs."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**kept, "OMP_NUM_THREADS": "1"}


@contextmanager
def _ended_by_signals(processes: Sequence[subprocess.Popen[bytes]]) -> Iterator[None]:
    """End all of them where this program is told to end. Each is a group of its own: no terminal does it."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupted) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    except BaseException:
        _end(processes)
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _ended(processes: Sequence[subprocess.Popen[bytes]], begin: float) -> list[tuple[float, int]]:
    ended: dict[int, float] = {}
    while len(ended) < len(processes) and time.monotonic() - begin < LONGEST_SECONDS:
        for number, process in enumerate(processes):
            if number not in ended and process.poll() is not None:
                ended[number] = time.monotonic() - begin
        time.sleep(LOOK_SECONDS)
    _end(processes)
    overdue = (time.monotonic() - begin, _OVERDUE)
    return [(ended[number], process.wait()) if number in ended else overdue for number, process in enumerate(processes)]


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Let those that still run end what they have started; kill them after a while, or at a second signal.

    What a killed one had started in a session of its own ends by its own limits.
    """
    until = time.monotonic() + FAREWELL_SECONDS
    running = [process for process in processes if process.poll() is None]
    try:
        _send(signal.SIGINT, running)
        while any(process.poll() is None for process in running) and time.monotonic() < until:
            time.sleep(LOOK_SECONDS)
    finally:
        _send(signal.SIGKILL, [process for process in running if process.poll() is None])
        for process in running:
            process.wait()


def _send(number: signal.Signals, processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        with suppress(ProcessLookupError):  # it has ended meanwhile
            os.killpg(process.pid, number)


def said(name: str, code: int) -> str:
    """Return what a program's exit code says."""
    words = {
        0: "none" if name in NO_GOAL else "met",
        _MISSED: "MISSED",
        _OVERDUE: f"BROKE, not ended after {LONGEST_SECONDS:g} s",
    }
    return words.get(code, f"BROKE, exit code {code}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print all tables, then the summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="names of programs, separated by commas (default: all)")
    asked = parser.parse_args(arguments)
    names = asked.only.split(",") if asked.only else list(PROGRAMS)
    unknown = [name for name in names if name not in PROGRAMS]
    if unknown:
        parser.error(f"--only {unknown[0]!r}: allowed are {', '.join(map(repr, PROGRAMS))}")
    begin = time.monotonic()
    found = {name: told for group in groups(names) for name, told in run(group).items()}
    total = time.monotonic() - begin
    print("\n## All together\n\n| program | seconds | goals |\n| --- | ---: | --- |")
    for name, (seconds, code) in found.items():
        print(f"| {name} | {seconds:.0f} | {said(name, code)} |")
    in_time = total <= GOAL_SECONDS
    print(f"| together | {total:.0f} | {GOAL_SECONDS:.0f} s: {'met' if in_time else 'MISSED'} |")
    print(f"\n{os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f}")
    return 0 if in_time and not any(code for _, code in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
