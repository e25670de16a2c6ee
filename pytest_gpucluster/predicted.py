"""How long a run is going to measure, from its workload and its tests. Pure.

Only what the workload says in seconds is predicted: warm-up and samples of the criteria below. What they need beside
that, and all other tests, is not; it is counted and named. After ``warmup`` samples are taken for ``window`` at least,
and for twice ``longest`` at most (``sampling.Sampling``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from pytest_gpucluster.sampling import Sampling
from pytest_gpucluster.workloads import Workload

_NAMES_SHOWN = 4
BURN_IN_SLACK = 1.2
"""So much of its duration a burn-in may take; the deadline of its test."""


@dataclass(frozen=True, kw_only=True)
class Span:
    """Between so many seconds and so many."""

    least_seconds: float = 0.0
    most_seconds: float = 0.0

    def __add__(self, other: Span) -> Span:
        return Span(
            least_seconds=self.least_seconds + other.least_seconds, most_seconds=self.most_seconds + other.most_seconds
        )


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """What is known of a run's time before its first test."""

    span: Span
    tests: int
    """How many tests it is of."""
    others: tuple[str, ...]
    """Criteria, or tests without one, whose time is not predicted; each once."""
    other_tests: int

    def __str__(self) -> str:
        """Say it in one sentence: never a time alone that somebody could take for that of the whole run."""
        if not self.tests:
            return "the time of none of these tests is known beforehand"
        span = self.span
        time = f"{duration_text(span.least_seconds)} to {duration_text(span.most_seconds)}"
        tests = f"{self.tests} test{'s' * (self.tests != 1)}"
        text = f"{time} of warm-up and samples in {tests}, if all are run; beside it set-up and verifying"
        if not self.other_tests:
            return text
        names = ", ".join(self.others[:_NAMES_SHOWN]) + (", ..." if len(self.others) > _NAMES_SHOWN else "")
        return f"{text}, and {self.other_tests} test{'s' * (self.other_tests != 1)} of unknown length ({names})"


def predict(tests: Iterable[tuple[str, str | None]], workload: Workload) -> Predicted:
    """Return how long the tests are going to measure.

    Args:
        tests: name and criterion of every test that is going to run, such as ("test_hbm[copy]", "hbm").
        workload: what they measure with.
    """
    span, known, others = Span(), 0, []
    for name, criterion in tests:
        rule = _RULES.get(criterion or "")
        if rule is None:
            others.append(criterion or name)
            continue
        span, known = span + rule(workload, name), known + 1
    return Predicted(span=span, tests=known, others=tuple(dict.fromkeys(others)), other_tests=len(others))


def duration_text(seconds: float) -> str:
    """Return a time in a unit that a person plans with.

    >>> [duration_text(seconds) for seconds in (0.35, 42, 75, 3600, 90000)]
    ['0.35 s', '42 s', '1.2 min', '1 h', '25 h']
    """
    if seconds < 60:
        return f"{seconds:.2g} s"
    value, unit = (seconds / 60, "min") if seconds < 3600 else (seconds / 3600, "h")
    return f"{value:.0f} {unit}" if value >= 10 else f"{value:.1f}".removesuffix(".0") + f" {unit}"


def _series(sampling: Sampling, count: int = 1) -> Span:
    return Span(
        least_seconds=count * (sampling.warmup_seconds + sampling.window_seconds),
        most_seconds=count * (sampling.warmup_seconds + sampling.at_most_seconds),
    )


def _all_reduce(workload: Workload, name: str) -> Span:
    """One GPU alone takes one small and the largest size."""
    swept = workload.all_reduce
    count = 2 if "[gpu-" in name else len({*swept.sizes, *swept.latency_sizes})
    return _series(swept.sampling, count)


def _burn_in(workload: Workload, name: str) -> Span:
    seconds = workload.burn_in.duration_seconds
    return Span(least_seconds=seconds, most_seconds=BURN_IN_SLACK * seconds)


def _health(workload: Workload, name: str) -> Span:
    seconds = workload.health.load_seconds
    return Span(least_seconds=seconds, most_seconds=seconds)


def _collectives(workload: Workload, name: str) -> Span:
    swept = workload.collectives
    return _series(swept.sampling, len({*swept.sizes, *swept.latency_sizes}))


def _matmul_search(workload: Workload, name: str) -> Span:
    """Each candidate is looked at and, but for the first, warmed up as long; fp8 is multiplied in one layout."""
    search = workload.matmul_search
    count = len(search.shapes) * (1 if "[fp8]" in name else len(search.layouts))
    looks = (2 * count - 1) * search.look_seconds + search.sampling.warmup_seconds
    return Span(least_seconds=looks, most_seconds=looks) + _series(search.sampling)


_RULES: Mapping[str, Callable[[Workload, str], Span]] = MappingProxyType(
    {
        "matmul": lambda workload, name: _series(workload.matmul.sampling, len(workload.matmul.sizes)),
        "matmul.search": _matmul_search,
        "hbm": lambda workload, name: _series(workload.hbm.sampling, len(workload.hbm.sizes_bytes)),
        "nccl.all_reduce": _all_reduce,
        "nccl.collectives": _collectives,
        "burn_in": _burn_in,
        "gpu.health": _health,
        "training.throughput": lambda workload, name: _series(workload.throughput.sampling),
    }
)
"""Criterion -> what one of its tests takes, as its test in ``acceptance/`` goes through the workload."""
