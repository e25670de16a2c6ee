"""Shared by the programs here: ratios of two ways of the same work in one run, arguments, and the line of conditions.

Ratios are of pairs. In each pair the bare way is taken twice, so that next to the ratio of ours to the bare way there
is that of the bare way to itself (A/A): how far two figures of the same work lie apart here. The order changes from
pair to pair, so that other load affects all alike.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

LEAST_ON_GPU = 0.98
"""Of the ratio's lower bound. On a GPU there is no other load; on cpu the ratio must lie inside the A/A band."""
LEAST_PAIRS = 20
TEMPORARY = "gpucluster-perf-"
"""Prefix of temporary folders."""


def in_turn(number: int, ours: Callable[[], float], bare: Callable[[], float]) -> dict[str, float]:
    """Return the seconds of one operation, of pair ``number``: of ours, and twice of the bare way."""
    ways = {"ours": ours, "bare": bare, "again": bare}
    order = list(ways)
    turned = order[number % 3 :] + order[: number % 3]
    return {way: ways[way]() for way in (turned if number % 2 else turned[::-1])}


def compared(pairs: Sequence[Mapping[str, float]], each: float, device: str) -> tuple[float, float, list[str], bool]:
    """Compare ours with the bare way; one operation is ``each`` of something.

    A ratio is of rates, so above 1 ours is faster. It is good if on a GPU the lower end of the 95 % interval of its
    median is 0.98 or more, and on cpu if its median lies inside the A/A band.

    Returns: the median rates of the bare way and of ours; a table's cells with ours to bare, A/A and the verdict;
        whether ours is good.
    """
    from pytest_gpucluster.metrics.stats import median_interval

    bare, ours = (each / statistics.median(pair[way] for pair in pairs) for way in ("bare", "ours"))
    ratios = [pair["bare"] / pair["ours"] for pair in pairs]
    same = [pair["bare"] / pair["again"] for pair in pairs]
    band = min(same), max(same)
    on_gpu = device == "cuda"
    good = median_interval(ratios)[0] >= LEAST_ON_GPU if on_gpu else band[0] <= statistics.median(ratios) <= band[1]
    cells = [
        median_text(ratios),
        f"{statistics.median(same):.3f} ({band[0]:.3f} to {band[1]:.3f})",
        "good" if good else "MISSED",
    ]
    return bare, ours, cells, good


def median_text(values: Sequence[float], digits: int = 3) -> str:
    """Return the median of some values with its 95 % interval."""
    from pytest_gpucluster.metrics.stats import median_interval

    low, high = median_interval(values)
    return f"{statistics.median(values):.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def row(cells: Iterable[str]) -> str:
    """Return a row of a table."""
    return f"| {' | '.join(cells)} |"


def run_child(script: str, arguments: Sequence[str], *, ranks: int, deadline_seconds: float) -> dict[str, Any]:
    """Run a script in processes of its own, under torchrun for several ranks; return what it wrote to ``--result``.

    Raises:
        RuntimeError: it failed, so that its figures mean nothing.
    """
    command = [sys.executable]
    if ranks > 1:
        command += ["-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--standalone"]
    with tempfile.TemporaryDirectory(prefix=TEMPORARY) as folder:
        result = Path(folder) / "result.json"
        command += [script, f"--result={result}", *arguments]
        environ = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "true", **os.environ}
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=deadline_seconds)
        if done.returncode != 0 or not result.exists():
            raise RuntimeError(f"ended with {done.returncode}:\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
        found: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
        return found


def peak_bytes(pid: int | str) -> int:
    """Return the peak memory of a process. Source: proc_pid_status(5), VmHWM, in KiB.

    Raises:
        OSError: it has ended.
    """
    for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace").splitlines():
        if line.startswith("VmHWM:"):
            return 1024 * int(line.split()[1])
    raise ProcessLookupError(f"process {pid} has ended")


class Conditions:
    """What to print below a table: the machine, its load average since this was made, and versions."""

    def __init__(self) -> None:
        self._load = os.getloadavg()[0]

    def line(self, *, on: str = "") -> str:
        """Return the line. ``on``: instead of the number of cores."""
        load = sorted((self._load, os.getloadavg()[0]))
        versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("pytest", "torch"))
        return (
            f"{on or f'{os.cpu_count()} cores'}, load average {load[0]:.1f} to {load[1]:.1f}; "
            f"Python {platform.python_version()}, {versions}"
        )


def some_of(known: Iterable[str]) -> Callable[[str], list[str]]:
    """Return a reader of names that are separated by commas, as an argument's type."""
    allowed = list(known)

    def read(text: str) -> list[str]:
        names = [name.strip() for name in text.split(",")]
        if not set(names) <= set(allowed):
            raise argparse.ArgumentTypeError(f"{text!r} is not some of {', '.join(map(repr, allowed))}")
        return names

    return read


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """Return a parser whose help is the module's docstring."""
    return argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
