"""The cost of each report of a large run: 1,024 ranks and 40 criteria, one process for each report.

    python perf/reports.py                                # makes the journal, then every report of it
    python perf/reports.py --ranks 4096                   # the bounds grow in proportion
    python perf/reports.py --journal RUN/journal.jsonl    # of a run of your own

Time is processor time of reading the journal and rendering, without the start of Python: other load does not count.
Memory is the peak of the process, Python included (VmHWM of /proc/self/status; ru_maxrss would include the parent's).
Each report must take less than 5 s and 500 MB, and the HTML page must be smaller than 2 MB; with more than 1,024 ranks
in proportion. The exit code is 1 where one does not. They are made at the end of a run, while its ranks wait.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from comparison import TEMPORARY, Conditions, parser_of, peak_bytes, some_of

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
    """Make one report in this process, and return its time and memory."""
    from pytest_gpucluster.journal import journal

    render: Callable[..., str] = importlib.import_module(REPORTS[name]).render if REPORTS[name] else lambda _: ""
    begin = time.process_time()
    content = journal.read(journal_path, keep_samples=False)
    read = time.process_time()
    text = render(content, folder=journal_path.parent) if name == "html" else render(content)
    end = time.process_time()
    return {
        "name": name,
        "read_seconds": read - begin,
        "render_seconds": end - read,
        "peak_bytes": peak_bytes("self"),
        "report_bytes": len(text.encode("utf-8", "surrogatepass")),
    }


def missed(cost: Mapping[str, Any], ranks: int = BOUNDS_RANKS) -> str:
    """Return the bounds that a report of a run with this number of ranks exceeds; an empty text if none."""
    times = max(1.0, ranks / BOUNDS_RANKS)
    parts = []
    if not cost["read_seconds"] + cost["render_seconds"] < MOST_SECONDS * times:
        parts.append(f"{MOST_SECONDS * times:g} s or more")
    if not cost["peak_bytes"] < MOST_BYTES * times:
        parts.append(f"{MOST_BYTES * times / 1e6:g} MB of memory or more")
    if cost["name"] == "html" and not cost["report_bytes"] < MOST_HTML_BYTES * times:
        parts.append(f"{MOST_HTML_BYTES * times / 1e6:g} MB of page or more")
    return ", ".join(parts)


def table_row(cost: Mapping[str, Any], ranks: int = BOUNDS_RANKS) -> str:
    """Return a row of the table."""
    return (
        f"| {cost['name']:13} | {cost['read_seconds']:6.2f} | {cost['render_seconds']:6.2f} "
        f"| {cost['peak_bytes'] / 1e6:6.0f} | {cost['report_bytes'] / 1e6:7.3f} | {missed(cost, ranks) or 'yes'} |"
    )


def _in_a_process(name: str, path: Path) -> dict[str, Any]:
    command = [sys.executable, __file__, "--journal", str(path), "--one", name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_CHILD_SECONDS, check=False)
    if done.returncode != 0:
        raise SystemExit(f"the report {name} could not be made:\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _made(folder: Path, *, ranks: int, criteria: int) -> Path:
    """Write the journal and the files of a large example run."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    examples = importlib.import_module("example_runs")
    run: Path = examples.write_large(folder, ranks=ranks, criteria=criteria)
    return run / "journal.jsonl"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; return 1 where a report exceeds a bound."""
    parser = parser_of(__doc__)
    conditions = Conditions()
    parser.add_argument("--ranks", type=int, default=1024, help="of the journal that is made")
    parser.add_argument("--criteria", type=int, default=40, help="of the journal that is made")
    parser.add_argument("--journal", type=Path, help="take this one instead")
    parser.add_argument(
        "--only", type=some_of(REPORTS), default=[*REPORTS], help="names, separated by commas (default: all)"
    )
    parser.add_argument("--one", choices=[*REPORTS], help="make one report in this process, and print its cost")
    options = parser.parse_args(arguments)
    if options.one is not None:
        if options.journal is None:
            parser.error("--one needs --journal")
        print(json.dumps(one(options.one, options.journal)))
        return 0
    with tempfile.TemporaryDirectory(prefix=TEMPORARY) as folder:
        path = options.journal or _made(Path(folder), ranks=options.ranks, criteria=options.criteria)
        size = path.stat().st_size / 1e6
        what = path if options.journal else f"{options.ranks} ranks, {options.criteria} criteria"
        print(f"{what}: a journal of {size:.0f} MB; {conditions.line()}\n", flush=True)
        ranks = BOUNDS_RANKS if options.journal else options.ranks
        print("| report        | read s | made s | MB     | size MB | within bounds |")
        print("|---|---:|---:|---:|---:|---|")
        good = True
        for name in options.only:
            cost = _in_a_process(name, path)
            print(table_row(cost, ranks), flush=True)
            good = good and not missed(cost, ranks)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
