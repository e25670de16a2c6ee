"""The cost of the suite itself: to import, to start, and of a rehearsal.

    python perf/overhead.py                               # all three
    python perf/overhead.py --only import,start
    python perf/overhead.py --only rehearsal --select 'not training'

* import: `pytest --help` in a project that does not use the plugin, with it installed and with `-p no:gpucluster`, in
  turn. Goal: 15 ms more.
* start: torchrun with 2 ranks over acceptance/, by stamps inside one run (overhead_stamps.py), until the first
  criterion begins. Goal: 1.0 s besides torchrun's own start, importing torch and joining the run.
* rehearsal: the same with all criteria. Goal: 60 s without those that train, 180 s with them. The report of each run
  has the parts of each criterion.

The cost of the ranks' exchanges: perf/agreement.py. An import only computes, so its goal is compared with the least
processor time of each side, which other load can only increase; the other goals are of wall time.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from comparison import TEMPORARY, Conditions, median_text, parser_of, row, some_of

ROOT = Path(__file__).resolve().parents[1]
SUBJECTS = ("import", "start", "rehearsal")
GOAL_IMPORT_SECONDS = 0.015
GOAL_START_SECONDS = 1.0
GOAL_REHEARSAL_SECONDS = {"without those that train": 60.0, "all": 180.0}
RANKS = 2
_DEADLINE_SECONDS = 1800
LEFT_OUT = ("-p", "no:cacheprovider", "-p", "no:hypothesispytest", "-p", "no:anyio")
"""Plugins for this project's own tests, which an operator does not have."""
_FIRST = "test_inventory"
"""A criterion that takes no time, to end a start with."""

_TORCH = "importing torch, with its parts that criteria use"
START = (
    ("torchrun, until rank 0's process begins", None, "exec"),
    ("Python and pytest, until plugins are loaded", "exec", "plugin"),
    ("settings, plugins, conftest files", "plugin", "torch begins"),
    (_TORCH, "torch begins", "torch ends"),
    ("the recorder, settings, limits", "torch ends", "connecting begins"),
    ("connecting to the store", "connecting begins", "connecting ends"),
    ("the facts of this rank", "connecting ends", "roll call begins"),
    ("the roll call, with waiting for rank 1", "roll call begins", "roll call ends"),
    ("the header, collection", "roll call ends", "collected"),
    ("agreeing on the tests", "collected", "first test"),
)
"""Part of a start, from one moment to another; from torchrun's exec where there is none."""
NOT_OURS = {START[0][0], _TORCH, "connecting to the store", "the roll call, with waiting for rank 1"}


def seconds_of(command: Sequence[str], folder: Path) -> tuple[float, float]:
    """Run a command and return its wall time and its processor time.

    Raises:
        RuntimeError: it failed, so that its time means nothing.
    """
    begin = time.perf_counter()
    with (folder / "output.txt").open("wb") as output:
        process = subprocess.Popen(command, cwd=folder, stdout=output, stderr=subprocess.STDOUT)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    wall = time.perf_counter() - begin
    if process.returncode != 0:
        text = (folder / "output.txt").read_text(errors="replace")[-2000:]
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}:\n{text}")
    return wall, usage.ru_utime + usage.ru_stime


def import_pairs(pairs: int) -> list[dict[str, tuple[float, float]]]:
    """Take `pytest --help` with the plugin installed and without it, in turn."""
    taken = []
    with tempfile.TemporaryDirectory(prefix=TEMPORARY) as name:
        folder = Path(name)
        (folder / "pytest.ini").write_text("[pytest]\n")
        command = [sys.executable, "-m", "pytest", "--help", *LEFT_OUT]
        sides = {"installed": command, "without": [*command, "-p", "no:gpucluster"]}
        for side in sides.values():  # byte code is written, and files are read, before the measured ones
            seconds_of(side, folder)
        for number in range(pairs):
            order = list(sides) if number % 2 else list(sides)[::-1]
            taken.append({side: seconds_of(sides[side], folder) for side in order})
    return taken


def show_import(pairs: int) -> bool:
    """Print the cost of the import; return whether the goal is met."""
    taken = import_pairs(pairs)
    print(f"`pytest --help`, {pairs} pairs in turn\n")
    print("| | without the plugin | installed, and off | more (95 % of the median) |")
    print("| --- | ---: | ---: | ---: |")
    for which, what in enumerate(("wall time", "processor time")):
        sides = [statistics.median(pair[side][which] for pair in taken) for side in ("without", "installed")]
        more = [1e3 * (pair["installed"][which] - pair["without"][which]) for pair in taken]
        print(row([what, *(f"{1e3 * side:.0f} ms" for side in sides), f"{median_text(more, 1)} ms"]))
    least = {side: min(pair[side][1] for pair in taken) for side in ("without", "installed")}
    found = least["installed"] - least["without"]
    print(row(["processor time, least", *(f"{1e3 * side:.0f} ms" for side in least.values()), f"{1e3 * found:.1f} ms"]))
    return verdict("import", {"15 ms more of the processor, least": (found, GOAL_IMPORT_SECONDS)})


def verdict(what: str, goals: Mapping[str, tuple[float, float]]) -> bool:
    """Print which goals are met, each with the found and the allowed seconds; return whether all are."""
    for text, (found, allowed) in goals.items():
        print(f"\ngoal of {what}: {text}: {'met' if found <= allowed else 'MISSED'} ({found:.3f} s)")
    return all(found <= allowed for found, allowed in goals.values())


def run_suite(folder: Path, *options: str) -> dict[str, Any]:
    """Run acceptance/ with 2 ranks on cpu and return its stamps, from torchrun's exec on.

    Raises:
        RuntimeError: it did not pass, so that its time means nothing.
    """
    sys.path.insert(0, str(Path(__file__).parent))
    from overhead_stamps import now

    stamps = folder / "stamps.json"
    stamps.unlink(missing_ok=True)
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [
        *(sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={RANKS}", "-m", "pytest"),
        *("-q", "-p", "overhead_stamps", *LEFT_OUT, str(ROOT / "acceptance")),
        *("--gpucluster-device=cpu", f"--gpucluster-report-dir={folder / 'reports'}", *options),
    ]
    begin = now()
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "PERF_STAMPS": str(stamps)},
        capture_output=True,
        text=True,
        timeout=_DEADLINE_SECONDS,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} ended with {done.returncode}:\n{(done.stdout + done.stderr)[-4000:]}")
    return {**json.loads(stamps.read_text()), "began": begin}


def show_start(times: int) -> bool:
    """Print where the time of a start goes; return whether the goal is met."""
    with tempfile.TemporaryDirectory(prefix=TEMPORARY) as name:
        found = [run_suite(Path(name), "-k", _FIRST) for _ in range(times)]
    parts: list[dict[str, float]] = []
    for one in found:
        moments = {None: one["began"], **one["moments"]}
        parts.append({what: moments[end] - moments[begin] for what, begin, end in START})
    print(f"\nfrom torchrun's exec to the first criterion, rank 0 of {RANKS}, medians of {times} starts\n")
    print("| part | seconds | counts |")
    print("| --- | ---: | --- |")
    for what, _, _ in START:
        seconds = statistics.median(one[what] for one in parts)
        print(f"| {what} | {seconds:.2f} | {'no' if what in NOT_OURS else 'yes'} |")
    beyond = statistics.median(sum(one[what] for what in one if what not in NOT_OURS) for one in parts)
    taken = [one["processor"] for one in found]
    processor = statistics.median(one["first test"] + one["torch begins"] - one["torch ends"] for one in taken)
    print(f"| beyond torchrun, torch and joining | {beyond:.2f} | of the processor: {processor:.2f} s |")
    if sys.dont_write_bytecode:
        print("\nPYTHONDONTWRITEBYTECODE is set: each rank compiles the modules without byte code at each start")
    return verdict("start", {"1.0 s beyond importing torch and joining": (beyond, GOAL_START_SECONDS)})


def show_rehearsal(select: str) -> bool:
    """Print the duration of a rehearsal; return whether the goals are met."""
    with tempfile.TemporaryDirectory(prefix=TEMPORARY) as name:
        found = run_suite(Path(name), *(["-m", select] if select else []))
    total, before = found["end"] - found["began"], found["moments"]["first test"] - found["began"]
    training = sum(test["seconds"] for test in found["tests"] if test["training"])
    tests = len(found["tests"])
    print(f"\na rehearsal with {RANKS} ranks: {tests} tests, {total:.1f} s, {before:.1f} s before the first")
    seconds = {"without those that train": total - training} | ({} if select else {"all": total})
    goals = {what: GOAL_REHEARSAL_SECONDS[what] for what in seconds}
    return verdict("the rehearsal", {f"{goal:g} s, {what}": (seconds[what], goal) for what, goal in goals.items()})


def main() -> int:
    """Print the tables; return 1 if a goal is missed."""
    parser = parser_of(__doc__)
    parser.add_argument("--only", type=some_of(SUBJECTS), default=list(SUBJECTS), help="(default: all)")
    parser.add_argument("--pairs", type=int, default=20, help="of `pytest --help` (default: 20)")
    parser.add_argument("--starts", type=int, default=3, help="(default: 3)")
    parser.add_argument("--select", default="", help="of the rehearsal, as pytest's -m (default: all criteria)")
    arguments = parser.parse_args()
    conditions = Conditions()
    met = True
    if "import" in arguments.only:
        met = show_import(arguments.pairs) and met
    if "start" in arguments.only:
        met = show_start(arguments.starts) and met
    if "rehearsal" in arguments.only:
        met = show_rehearsal(arguments.select) and met
    print(f"\n{conditions.line()}")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
