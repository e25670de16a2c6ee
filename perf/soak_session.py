"""One long session: whether descriptors, threads or memory of its processes grow.

The suite (soak_suite/test_session.py) is one run with 2 ranks. Each tenth test has a fault that the run survives: a
rank raises, raises inside of a collective, hangs, or does not enter a collective; so process groups are discarded and
made again. Between the tests each rank samples itself, and rank 0 its recorder as well.

The first third of the samples is warm-up: imports, caches, the first groups. The fewest descriptors and threads in it
are compared with the fewest in the last third, and may not grow at all: temporary ones do not count. Memory is RssAnon;
the growth of a test is the median of all slopes between two samples of the last two thirds (Theil, Sen), which a single
jump of the allocator does not change. A session keeps its reports, so it grows by a record of each test on rank 0, and
pytest's own reports on all ranks: up to ALLOWED_KB.
"""

from __future__ import annotations

import itertools
import json
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torchrun
from soak_faults import HOST, RANKS

SUITE = Path(__file__).parent / "soak_suite" / "test_session.py"
FAULT_EVERY = 10
ALLOWED_KB = 40.0
"""kB that a test may add to a process, after the warm-up: some twice the result of 300 tests (17 kB on rank 0, 8 kB on
others). pytest keeps each test and its reports to the end, and rank 0 the recorded values."""
LEAST_SAMPLES = 6
DEADLINE_SECONDS = 1800.0
RESOURCES = ("descriptors", "threads", "memory")
_PROCESSES = (*(f"rank {rank}" for rank in range(RANKS)), "recorder")


@dataclass(frozen=True, kw_only=True)
class Growth:
    """A resource of a process: in the first and the last third, and the growth of a test.

    Of descriptors and threads ``first`` and ``last`` are the fewest, of memory the median, in kB.
    """

    process: str
    what: str
    first: float
    last: float
    a_test: float

    @property
    def is_allowed(self) -> bool:
        """Whether it has not grown, or not by more than a record of each test needs."""
        if self.what == "memory":
            return self.a_test <= ALLOWED_KB
        return self.last <= self.first


@dataclass(kw_only=True)
class Session:
    """The result of the session. ``problems``: each in a few words."""

    tests: int
    seconds: float = 0.0
    growths: list[Growth] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def run(tests: int, directory: Path, leak: str = "") -> Session:
    """Run the session in a folder.

    Args:
        tests: their number; each tenth has a fault.
        leak: what rank 1 leaks in each test, for a test of the check: "descriptor", "thread" or "memory".
    """
    begin = time.monotonic()
    samples = directory / "samples"
    samples.mkdir()
    environment = {"SOAK_TESTS": str(tests), "SOAK_SAMPLES": str(samples), "SOAK_LEAK": leak}
    files = {"test_session.py": SUITE.read_text(encoding="utf-8"), "conftest.py": _CONFTEST}
    started = torchrun.start(
        directory,
        files,
        ranks=RANKS,
        hosts=(HOST,),
        timeouts="stuck=10",
        deadline=90.0,
        environment=environment,
        forked=False,
    )
    started.deadline = DEADLINE_SECONDS
    found = Session(tests=tests)
    try:
        started.wait()
        found.problems += verdict_problems(started.verdicts, tests)
    except (AssertionError, OSError) as error:
        found.problems.append((str(error).splitlines() or [type(error).__name__])[0])
    found.problems += [f"left behind: process {left}" for left in started.left_over]
    found.growths = growths(read(samples))
    found.problems += growth_problems(found.growths)
    found.seconds = time.monotonic() - begin
    return found


_CONFTEST = """
def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: item.callspec.params["number"])
"""


def verdict_problems(verdicts: Mapping[str, str], tests: int) -> list[str]:
    """Return the tests with an unexpected verdict: each tenth names its culprit, all others pass."""
    problems = []
    for number in range(tests):
        is_fault = number % FAULT_EVERY == FAULT_EVERY - 1
        name = f"test_{'fault' if is_fault else 'criterion'}[{number}]"
        verdict = verdicts.get(name, "not in the report")
        culprit = f": rank {number // FAULT_EVERY % RANKS} ({HOST})"
        if (culprit not in verdict) if is_fault else verdict != "passed":
            problems.append(f"{name}: {verdict}")
    return problems


def read(folder: Path) -> dict[str, list[dict[str, float]]]:
    """Return the samples of each process in their order; each with the number of its test."""
    found: dict[str, list[dict[str, float]]] = {}
    for path in sorted(folder.glob("rank*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            sample = json.loads(line)
            number = sample.pop("number")
            for process, usage in sample.items():
                found.setdefault(process, []).append({"number": number, **usage})
    return found


def growths(samples: Mapping[str, Sequence[Mapping[str, float]]]) -> list[Growth]:
    """Return the growth of everything in every process that was sampled often enough."""
    found = []
    for process, usage in samples.items():
        third = len(usage) // 3
        if len(usage) < LEAST_SAMPLES:
            continue
        for what in RESOURCES:
            of = statistics.median if what == "memory" else min
            found.append(
                Growth(
                    process=process,
                    what=what,
                    first=of(one[what] for one in usage[:third]),
                    last=of(one[what] for one in usage[-third:]),
                    a_test=_slope([(one["number"], one[what]) for one in usage[third:]]),
                )
            )
    return found


def _slope(points: Sequence[tuple[float, float]]) -> float:
    """Return the median slope between two points. Source: P. K. Sen, J. Am. Stat. Assoc. 63 (1968) 1379."""
    return statistics.median((b[1] - a[1]) / (b[0] - a[0]) for a, b in itertools.combinations(points, 2))


def growth_problems(found: Sequence[Growth]) -> list[str]:
    """Return what grows, and the processes without enough samples."""
    known = {growth.process for growth in found}
    problems = [f"{process}: fewer than {LEAST_SAMPLES} samples" for process in _PROCESSES if process not in known]
    for growth in found:
        if not growth.is_allowed:
            problems.append(
                f"{growth.process}: {growth.what} grow from {growth.first:g} to {growth.last:g}, "
                f"by {growth.a_test:.1f} a test"
            )
    return problems


def table(session: Session) -> list[str]:
    """Return the growth of the session's processes, and the problems."""
    lines = [f"one session of {session.tests} tests, {session.seconds:.0f} s; each tenth test has a fault", ""]
    lines += [
        "| process | what | first third | last third | a test | allowed |",
        "| --- | --- | ---: | ---: | ---: | --- |",
    ]
    for growth in session.growths:
        is_memory = growth.what == "memory"
        what = "memory (kB)" if is_memory else growth.what
        allowed = f"{ALLOWED_KB:g} kB a test" if is_memory else "no growth"
        mark = "yes" if growth.is_allowed else "NO"
        cells = (growth.process, what, f"{growth.first:g}", f"{growth.last:g}", f"{growth.a_test:.2f}")
        lines.append(f"| {' | '.join(cells)} | {allowed}: {mark} |")
    return [*lines, *(f"BAD: {problem}" for problem in session.problems)]
