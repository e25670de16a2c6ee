"""Whether a busy process beside a run flips its verdict: real sessions on CPU, with limits at 80 % of the median.

    python perf/noise.py                           # matmul and HBM on one rank, all-reduce on two
    python perf/noise.py --only matmul --repeats 5
    python perf/noise.py --busy 2                  # two of them: on 2 cores they take from what is measured

First each criterion is measured with nothing beside it, by a few sessions of the criteria in acceptance/. 80 % of the
median of what they found becomes the limit, in a file of limits of its own. Then the sessions are repeated beside one
process that never rests (odd repeats), or that works and rests by turns of 4 to 20 ms (even repeats). Where the ranks
have all cores of the machine, as two ranks have of 2, that is no noise but theft: a process that never rests takes a
third of what is measured. Beside those the process does what an agent of a node does, a tenth of a core in bits of 2 to
6 ms; --kind takes another one.

A verdict is wrong where a criterion is refused although the machine still does what the limit asks for. Whether it does
tells the median of all repeats beside the same kind of process: where that is below the limit, the process has taken so
much that refusing is right, and accepting is wrong. A session that ends INCOMPLETE, being too slow to rehearse here,
gives no verdict: it is shown as not usable and repeated, up to 3 times in all. The exit code is 1 if a verdict flipped,
rightly or not, if a session was never usable, or if the machine was not quiet before: then nothing is known.

Sessions are made by fork, from a process that has imported torch: importing it anew takes longer than all the rest. The
measuring itself is the product's own: acceptance/, its sampling, its judge; the values are read from the journals. The
times are shorter than in a profile for GPUs. The tolerance is what the limit asks for: an interval that is 15 % wide
reaches some 8 % down, and the limit lies 20 % down. matmul keeps 10 %. On CPU that takes too long of HBM, whose
memory others use too, and of all-reduce, whose samples follow when the kernel wakes the threads of gloo. With 25 % half
of the repeats of all-reduce were refused, for the process takes a tenth of it.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from noise_sessions import BUSY, Session, beside, session

SHARE = 0.8
"""Of the quiet median: the limit."""
QUIET = 5
REPEATS = 20
ATTEMPTS = 3
"""Of a session that is not usable."""
METRICS: Mapping[str, tuple[str, int, str, str]] = {
    "matmul": ("matmul.fp32.tflops", 1, "test_matmul.py", "test_matmul and fp32"),
    "hbm": ("hbm.copy.bandwidth", 1, "test_hbm.py", "test_hbm and copy"),
    "all-reduce": ("nccl.all_reduce.busbw", 2, "test_nccl.py", "test_all_reduce and node-fp32"),
}
"""Name -> the metric that is held against the limit, the ranks, the file in acceptance/, and what `-k` is given."""
WORKLOAD = {
    "matmul.sizes": "256",
    # Beyond all of a last level cache that others on the same host fill too: 16 MiB were copied at 33 to 46 GB/s with
    # nothing beside them, 256 MiB at 28 to 34. What is copied is verified, which takes longer than copying it.
    "hbm.sizes": "128 MiB",
    # One size for both, so that no time goes into a latency that nobody asks for. Of 1 MB most is waking up; 32 MB go
    # through memory, which others on the same host use.
    "nccl.all_reduce.sizes": "4 MB",
    "nccl.all_reduce.latency_sizes": "4 MB",
    **{
        f"{section}.{key}": value
        for section in ("matmul", "hbm")
        for key, value in (("warmup", "0.1 s"), ("window", "0.1 s"), ("longest", "2 s"), ("tolerance", "10 %"))
    },
    "hbm.window": "0.4 s",
    "hbm.tolerance": "15 %",
    "nccl.all_reduce.warmup": "0.1 s",
    "nccl.all_reduce.window": "2 s",
    "nccl.all_reduce.longest": "4 s",
    "nccl.all_reduce.tolerance": "15 %",
}
"""What is measured, and for how long: 4 s at most where it does not settle before, all-reduce 8 s. Of a window of 0.1 s
a sample is 12.5 ms, less than most time slices of a neighbour: a slice spoils few samples, which the median leaves
aside. Samples of 0.25 s would nearly all be spoilt a little. The price: so short samples tell what a rank does while it
has its core, and little of how often it has none; only where most samples are spoilt is that seen. HBM's are 50 ms: a
copy alone takes some 8 ms, and the memory's own pace changes within seconds."""


class NotUsableError(Exception):
    """A session gave no verdict, because this machine was too busy for it."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a session found of one metric, as its journal has it: of the worst rank, in the metric's own unit."""

    outcome: str
    value: float
    low: float
    high: float
    inconclusive: str
    stopped: str


def overlay(minimum: Mapping[str, tuple[float, str]]) -> str:
    """Return a file of limits: metric -> its least value, and the unit of that."""
    lines = ["schema_version: 1", "skus:", "  cpu-rehearsal:", "    limits:"]
    for metric, (least, unit) in minimum.items():
        # The small size beside it is recorded, as in the shipped file.
        when = f", when: {{size: {WORKLOAD['nccl.all_reduce.sizes']}}}" if metric.startswith("nccl.") else ""
        lines.append(f"      {metric}:")
        lines.append(f"        - {{min: {least:.9g} {unit}, source: {100 * SHARE:g} % of the quiet median{when}}}")
        if when:
            lines.append("        - {when: {size: below 64 kB}, record_only: the time is all latency}")
    return "\n".join(lines) + "\n"


def kinds(name: str, cores: int) -> tuple[str, ...]:
    """Return the processes that are noise beside this criterion, on a machine with so many cores."""
    return ("light",) if METRICS[name][1] >= cores else ("steady", "bursts")


def by_kind(names: Sequence[str], number: int, asked: str | None, *, cores: int) -> list[tuple[str, list[str]]]:
    """Return what is measured beside which process in this repeat, counted from 1."""
    found: dict[str, list[str]] = {}
    for name in names:
        of_name = kinds(name, cores)
        found.setdefault(asked or of_name[(number - 1) % len(of_name)], []).append(name)
    return list(found.items())


def selected(names: Sequence[str]) -> list[tuple[int, list[str]]]:
    """Return the sessions that measure these criteria: ranks, and the names that one session measures."""
    by_ranks: dict[int, list[str]] = {}
    for name in names:
        by_ranks.setdefault(METRICS[name][1], []).append(name)
    return sorted(by_ranks.items())


def measured(names: Sequence[str], folder: Path, limits: Path | None, workload: Mapping[str, str]) -> dict[str, Found]:
    """Run the sessions that measure these criteria; return what each has found.

    Raises:
        NotUsableError: a session is INCOMPLETE.
        RuntimeError: a session left no value, or broke; it has what was printed.
    """
    found: dict[str, Found] = {}
    for ranks, of_session in selected(names):
        options = [f"acceptance/{METRICS[name][2]}" for name in of_session]
        options += ["-k", " or ".join(f"({METRICS[name][3]})" for name in of_session)]
        options += [f"--gpucluster-workload={key}={value}" for key, value in workload.items()]
        options += [f"--gpucluster-thresholds={limits}"] if limits is not None else []
        made = session(options, ranks=ranks, folder=folder / f"{ranks}-ranks")
        if made.journal.verdict == "INCOMPLETE":
            raise NotUsableError(made.journal.reason)
        if made.journal.verdict not in ("REHEARSED", "REJECTED"):
            raise RuntimeError(f"the session ended as {made.journal.verdict}:\n{made.said}")
        found.update((name, _found(made, METRICS[name][0])) for name in of_session)
    return found


def usable(
    beside: str, names: Sequence[str], folder: Path, limits: Path | None, workload: Mapping[str, str]
) -> dict[str, Found] | None:
    """Measure these criteria beside a process, again where a session is not usable; None if no attempt was."""
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return measured(names, folder / f"{attempt}", limits, workload)
        except NotUsableError as error:
            print(f"| {beside} | {', '.join(names)} | not usable | | | {error} |", flush=True)
    return None


def _found(made: Session, metric: str) -> Found:
    from pytest_gpucluster.reports.tables import stopped_text

    held = [
        (result.outcome, one)
        for result in made.journal.results
        for one in result.measurements
        if one.metric == metric and one.limit is not None
    ]
    if len(held) != 1 or held[0][1].value is None or held[0][1].interval is None:
        raise RuntimeError(
            f"the session left {len(held)} values of {metric} with a limit and an interval:\n{made.said}"
        )
    [(outcome, judged)] = held
    assert judged.value is not None
    assert judged.interval is not None
    low, high = judged.interval
    return Found(
        outcome=outcome,
        value=judged.value,
        low=low,
        high=high,
        inconclusive=judged.inconclusive,
        stopped=stopped_text(judged),
    )


@dataclass(frozen=True, kw_only=True)
class Verdicts:
    """What became of one criterion beside one kind of process.

    Attributes:
        of_quiet: the median of all repeats over the quiet median.
        refused: repeats that did not pass.
        wrong: repeats whose verdict is not the one that this median asks for.
        right: that verdict.
    """

    repeats: int
    of_quiet: float
    refused: int
    wrong: int
    right: str


def verdicts(found: Sequence[Found], quiet: float) -> Verdicts:
    """Return which verdict was right of these repeats, and how many came to another one."""
    middle = statistics.median(one.value for one in found)
    refused = sum(one.outcome != "passed" for one in found)
    keeps = middle >= SHARE * quiet
    return Verdicts(
        repeats=len(found),
        of_quiet=middle / quiet,
        refused=refused,
        wrong=refused if keeps else len(found) - refused,
        right="accepted" if keeps else "refused: truly slower",
    )


def units(names: Sequence[str]) -> dict[str, str]:
    """Return the unit of each criterion's metric."""
    from pytest_gpucluster.metrics.measurement import known

    return {name: known(METRICS[name][0]).unit for name in names}


@contextmanager
def busy(kind: str, count: int) -> Iterator[None]:
    """Keep so many busy processes beside what is done meanwhile."""
    with ExitStack() as stack:
        for _ in range(count):
            stack.enter_context(beside(kind))
        yield


def row(repeat: str, name: str, found: Found, quiet: float, unit: str) -> str:
    """Return a line of the table."""
    why = f"; {found.inconclusive}" if found.inconclusive else ""
    return (
        f"| {repeat} | {name} | {found.outcome} | {found.value:.4g} ({found.low:.4g} to {found.high:.4g}) {unit} "
        f"| {100 * found.value / quiet:.0f} % | {found.stopped}{why} |"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Set the limits, repeat, and say whether a verdict flipped."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help=f"separated by commas (default: {','.join(METRICS)})")
    parser.add_argument("--repeats", type=int, default=REPEATS, help=f"(default: {REPEATS})")
    parser.add_argument("--busy", type=int, default=1, help="busy processes (default: 1)")
    parser.add_argument("--kind", choices=tuple(BUSY), help="of busy process (default: in turn)")
    parser.add_argument("--workload", action="append", default=[], metavar="KEY=VALUE", help="as of a session")
    asked = parser.parse_args(arguments)
    names = asked.only.split(",") if asked.only else list(METRICS)
    unknown = [name for name in names if name not in METRICS]
    if unknown:
        parser.error(f"--only {unknown[0]!r}: allowed are {', '.join(map(repr, METRICS))}")
    if asked.repeats < 1 or asked.busy < 0:
        parser.error("--repeats must be 1 or more, --busy 0 or more")
    if lacking := [pair for pair in asked.workload if "=" not in pair]:
        parser.error(f"--workload {lacking[0]!r}: KEY=VALUE is needed, such as matmul.window=0.2s")
    workload = {**WORKLOAD, **dict(pair.split("=", 1) for pair in asked.workload)}
    seen: dict[tuple[str, str], list[Found]] = {}
    with tempfile.TemporaryDirectory(prefix="noise-") as place:
        folder, limits = Path(place), Path(place) / "limits.yaml"
        print(f"load average before: {os.getloadavg()[0]:.1f}\n")
        print("| beside | criterion | outcome | value (95 % interval) | of the quiet median | sampling |")
        print("|---|---|---|---|---:|---|", flush=True)
        taken = [usable("nothing", names, folder / f"quiet-{number}", None, workload) for number in range(QUIET)]
        quiet = [one for one in taken if one is not None]
        if not quiet:
            print("\nNOT QUIET: no session was usable with nothing beside it. Something else used the machine.")
            return 1
        lost = QUIET - len(quiet)
        middle = {name: statistics.median(one[name].value for one in quiet) for name in names}
        unit = units(names)
        for one in quiet:
            for name, of_name in one.items():
                print(row("nothing", name, of_name, middle[name], unit[name]), flush=True)
        limits.write_text(overlay({METRICS[name][0]: (SHARE * middle[name], unit[name]) for name in names}))
        for number in range(1, asked.repeats + 1):
            for kind, of_kind in by_kind(names, number, asked.kind, cores=os.cpu_count() or 1):
                with busy(kind, asked.busy):
                    found = usable(kind, of_kind, folder / f"{number}-{kind}", limits, workload)
                lost += found is None
                for name, of_name in (found or {}).items():
                    seen.setdefault((name, kind), []).append(of_name)
                    print(row(kind, name, of_name, middle[name], unit[name]), flush=True)
    unsure = sum(bool(of_name.inconclusive) for one in quiet for of_name in one.values())
    told = {key: verdicts(of_key, middle[key[0]]) for key, of_key in seen.items()}
    if unsure:
        print(
            f"\nNOT QUIET: {unsure} values with nothing beside them are inconclusive. Something else used the machine."
        )
    print(f"\nLimits: {100 * SHARE:g} % of the quiet median.\n")
    print("| criterion | beside | repeats | of the quiet median | refused | right verdict | wrong |")
    print("|---|---|---:|---:|---:|---|---:|")
    for (name, kind), one in sorted(told.items()):
        share = f"{100 * one.of_quiet:.0f} %"
        print(f"| {name} | {kind} | {one.repeats} | {share} | {one.refused} | {one.right} | {one.wrong} |")
    import torch

    print(
        f"\n{asked.busy} busy beside each, {os.cpu_count()} cores, {platform.machine()}, Python "
        f"{platform.python_version()}, torch {torch.__version__}, load average {os.getloadavg()[0]:.1f}"
    )
    flipped = sum(one.refused for one in told.values())
    if lost:
        print(f"\nNOT USABLE: {lost} sessions ended INCOMPLETE {ATTEMPTS} times. Something else used the machine.")
    met = not flipped and not unsure and not lost
    print(f"\ngoal: no verdict flips: {'met' if met else 'MISSED'} ({flipped} of {sum(map(len, seen.values()))})")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
