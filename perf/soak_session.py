"""One long session: whether its processes hold more and more descriptors, threads or memory.

The suite (soak_suite/test_session.py) is one run with 2 ranks. Each tenth test has a fault that the run survives: a
rank raises, raises inside of a collective, hangs, or does not enter a collective; so process groups are thrown away and
made anew. Between the tests each rank samples itself, and rank 0 its recorder as well.

The first third of the samples is warm-up: imports, caches, the first groups. Of descriptors and threads the fewest
there are compared with the fewest in the last third, and may not have grown at all: what comes and goes does not count,
what stays does. Memory is what no file stands behind (RssAnon);
what each test adds is the median of all slopes between two samples of the last two thirds (Theil, Sen), which a single
jump of the allocator does not move. A session keeps its reports, so something is added: a record of each test on rank
0, pytest's own reports on all ranks. What is allowed stands in ALLOWED_KB.
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
"""kB that a test may add to a process, after the warm-up: some twice what was found in 300 tests (17 kB on rank 0, 8 kB
on others). pytest keeps each test and its reports to the end, and rank 0 the values that it puts on record."""
LEAST_SAMPLES = 6
DEADLINE_SECONDS = 1800.0
HELD = ("descriptors", "threads", "memory")
_PROCESSES = (*(f"rank {rank}" for rank in range(RANKS)), "recorder")


@dataclass(frozen=True, kw_only=True)
class Growth:
    """How much of something a process held: in the first and the last third, and what a test has added.

    Of descriptors and threads ``first`` and ``last`` are the fewest, of memory the median, in kB.
    """

    process: str
    what: str
    first: float
    last: float
    a_test: float

    @property
    def is_allowed(self) -> bool:
        """Tell whether it has not grown, or not by more than a record of each test needs."""
        if self.what == "memory":
            return self.a_test <= ALLOWED_KB
        return self.last <= self.first


@dataclass(kw_only=True)
class Session:
    """What came of the session. ``wrong``: what is not as it should be, each in a few words."""

    tests: int
    seconds: float = 0.0
    growths: list[Growth] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


def run(tests: int, directory: Path, leak: str = "") -> Session:
    """Run the session in a folder.

    Args:
        tests: how many; each tenth has a fault.
        leak: what rank 1 leaks in each test, to see that it is seen: "descriptor", "thread" or "memory".
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
        found.wrong += wrong_with_verdicts(started.verdicts, tests)
    except (AssertionError, OSError) as error:
        found.wrong.append((str(error).splitlines() or [type(error).__name__])[0])
    found.wrong += [f"left behind: process {left}" for left in started.left_over]
    found.growths = growths(read(samples))
    found.wrong += wrong_with_growths(found.growths)
    found.seconds = time.monotonic() - begin
    return found


_CONFTEST = """
def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: item.callspec.params["number"])
"""


def wrong_with_verdicts(said: Mapping[str, str], tests: int) -> list[str]:
    """Say which tests did not end as they should: each tenth names its culprit, all others pass."""
    wrong = []
    for number in range(tests):
        is_fault = number % FAULT_EVERY == FAULT_EVERY - 1
        name = f"test_{'fault' if is_fault else 'criterion'}[{number}]"
        verdict = said.get(name, "not in the report")
        culprit = f": rank {number // FAULT_EVERY % RANKS} ({HOST})"
        if (culprit not in verdict) if is_fault else verdict != "passed":
            wrong.append(f"{name}: {verdict}")
    return wrong


def read(folder: Path) -> dict[str, list[dict[str, float]]]:
    """Return the samples of each process in their order; each with the number of its test."""
    found: dict[str, list[dict[str, float]]] = {}
    for path in sorted(folder.glob("rank*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            told = json.loads(line)
            number = told.pop("number")
            for process, held in told.items():
                found.setdefault(process, []).append({"number": number, **held})
    return found


def growths(samples: Mapping[str, Sequence[Mapping[str, float]]]) -> list[Growth]:
    """Return the growth of everything in every process that was sampled often enough."""
    found = []
    for process, held in samples.items():
        third = len(held) // 3
        if len(held) < LEAST_SAMPLES:
            continue
        for what in HELD:
            of = statistics.median if what == "memory" else min
            found.append(
                Growth(
                    process=process,
                    what=what,
                    first=of(one[what] for one in held[:third]),
                    last=of(one[what] for one in held[-third:]),
                    a_test=_slope([(one["number"], one[what]) for one in held[third:]]),
                )
            )
    return found


def _slope(points: Sequence[tuple[float, float]]) -> float:
    """Return the median slope between two points. Source: P. K. Sen, J. Am. Stat. Assoc. 63 (1968) 1379."""
    return statistics.median((b[1] - a[1]) / (b[0] - a[0]) for a, b in itertools.combinations(points, 2))


def wrong_with_growths(found: Sequence[Growth]) -> list[str]:
    """Say what grows, and which process was not sampled often enough to know."""
    known = {growth.process for growth in found}
    wrong = [f"{process}: fewer than {LEAST_SAMPLES} samples" for process in _PROCESSES if process not in known]
    for growth in found:
        if not growth.is_allowed:
            wrong.append(
                f"{growth.process}: {growth.what} grow from {growth.first:g} to {growth.last:g}, "
                f"by {growth.a_test:.1f} a test"
            )
    return wrong


def table(session: Session) -> list[str]:
    """Return what the session held, and what is wrong with that."""
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
    return [*lines, *(f"BAD: {wrong}" for wrong in session.wrong)]
