"""What it costs to make each report of a large run: 1,024 ranks and 40 criteria, one process for each report.

    python perf/reports.py                                # makes the journal, then every report of it
    python perf/reports.py --ranks 4096                   # the bounds grow in proportion
    python perf/reports.py --journal RUN/journal.jsonl    # of a run of your own

Time is processor time of reading the journal and rendering, without the start of Python: so it is that of a machine
that does nothing else, whatever this one does. Memory is the most that the process held at any moment, Python included
(VmHWM of /proc/self/status; ru_maxrss would begin with what the parent held). Each report must take less than 5 s and
500 MB, and the HTML page must be smaller than 2 MB; with more than 1,024 ranks, as much more as there are more ranks.
The exit code is 1 where one of them is not. They are made at the end of a run, while its ranks wait.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

MOST_SECONDS = 5.0
MOST_BYTES = 500e6
MOST_HTML_BYTES = 2e6
BOUNDS_RANKS = 1024
_CHILD_SECONDS = 600.0

REPORTS: Mapping[str, str] = {
    "reading alone": "",
    "text": "pytest_gpucluster.reports.terminal",
    "html": "pytest_gpucluster.reports.html.page",
    "json": "pytest_gpucluster.reports.results_json",
    "prometheus": "pytest_gpucluster.reports.prometheus",
    "markdown": "pytest_gpucluster.reports.markdown",
    "junit": "pytest_gpucluster.reports.junit",
}
"""Report -> the module whose ``render`` makes it."""


def one(name: str, journal_path: Path) -> dict[str, Any]:
    """Make one report in this process, and return what it took."""
    from pytest_gpucluster.journal import journal

    render: Callable[..., str] = importlib.import_module(REPORTS[name]).render if REPORTS[name] else lambda _: ""
    begin = time.process_time()
    told = journal.read(journal_path, keep_samples=False)
    read = time.process_time()
    text = render(told, folder=journal_path.parent) if name == "html" else render(told)
    end = time.process_time()
    return {
        "name": name,
        "read_seconds": read - begin,
        "render_seconds": end - read,
        "peak_bytes": peak_bytes(),
        "report_bytes": len(text.encode("utf-8", "surrogatepass")),
    }


def peak_bytes() -> float:
    """Return the most memory that this process has held. Source: proc_pid_status(5), VmHWM, in KiB."""
    status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    return 1024.0 * next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:"))


def missed(told: Mapping[str, Any], ranks: int = BOUNDS_RANKS) -> str:
    """Return what a report of so many ranks takes too much of; an empty text if it takes nothing too much."""
    times = max(1.0, ranks / BOUNDS_RANKS)
    parts = []
    if not told["read_seconds"] + told["render_seconds"] < MOST_SECONDS * times:
        parts.append(f"{MOST_SECONDS * times:g} s or more")
    if not told["peak_bytes"] < MOST_BYTES * times:
        parts.append(f"{MOST_BYTES * times / 1e6:g} MB of memory or more")
    if told["name"] == "html" and not told["report_bytes"] < MOST_HTML_BYTES * times:
        parts.append(f"{MOST_HTML_BYTES * times / 1e6:g} MB of page or more")
    return ", ".join(parts)


def row(told: Mapping[str, Any], ranks: int = BOUNDS_RANKS) -> str:
    """Return a row of the table."""
    return (
        f"| {told['name']:13} | {told['read_seconds']:6.2f} | {told['render_seconds']:6.2f} "
        f"| {told['peak_bytes'] / 1e6:6.0f} | {told['report_bytes'] / 1e6:7.3f} | {missed(told, ranks) or 'yes'} |"
    )


def _in_a_process(name: str, path: Path) -> dict[str, Any]:
    command = [sys.executable, __file__, "--journal", str(path), "--one", name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_CHILD_SECONDS, check=False)
    if done.returncode != 0:
        raise SystemExit(f"the report {name} could not be made:\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _made(folder: Path, *, ranks: int, criteria: int) -> Path:
    """Write the journal and the files of a large run that never was."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    examples = importlib.import_module("example_runs")
    run: Path = examples.write_large(folder, ranks=ranks, criteria=criteria)
    return run / "journal.jsonl"


def _some(text: str) -> list[str]:
    names = text.split(",")
    unknown = [name for name in names if name not in REPORTS]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r}: allowed are {', '.join(map(repr, REPORTS))}")
    return names


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; return 1 where a report takes too much."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1024, help="of the journal that is made")
    parser.add_argument("--criteria", type=int, default=40, help="of the journal that is made")
    parser.add_argument("--journal", type=Path, help="take this one instead")
    parser.add_argument("--only", type=_some, default=[*REPORTS], help="names, separated by commas (default: all)")
    parser.add_argument("--one", choices=[*REPORTS], help="make one report in this process, and print what it took")
    asked = parser.parse_args(arguments)
    if asked.one is not None:
        if asked.journal is None:
            parser.error("--one needs --journal")
        print(json.dumps(one(asked.one, asked.journal)))
        return 0
    with tempfile.TemporaryDirectory(prefix="gpucluster-reports-") as folder:
        path = asked.journal or _made(Path(folder), ranks=asked.ranks, criteria=asked.criteria)
        size = path.stat().st_size / 1e6
        what = path if asked.journal else f"{asked.ranks} ranks, {asked.criteria} criteria"
        load = f"{os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f}"
        print(f"{what}: a journal of {size:.0f} MB; {load}; Python {platform.python_version()}\n", flush=True)
        ranks = BOUNDS_RANKS if asked.journal else asked.ranks
        print("| report        | read s | made s | MB     | size MB | within bounds |")
        print("|---|---:|---:|---:|---:|---|")
        good = True
        for name in asked.only:
            told = _in_a_process(name, path)
            print(row(told, ranks), flush=True)
            good = good and not missed(told, ranks)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
