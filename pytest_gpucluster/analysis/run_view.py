"""A run prepared for comparisons: conditions, values without samples, comparability, and matching ranks.

A rank of one run corresponds to that of another with the same GPU, else the same slot, else the same number.
"""

from __future__ import annotations

import fnmatch
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from pytest_gpucluster.config.workload import SECTIONS
from pytest_gpucluster.journal.journal import Journal
from pytest_gpucluster.journal.records import KIND_NAMES, RankPlace, TestResult
from pytest_gpucluster.judge.judged import JudgedMetric
from pytest_gpucluster.metrics import stats
from pytest_gpucluster.metrics.measurement import METRICS
from pytest_gpucluster.reports.summary import NOT_RUN, short_name
from pytest_gpucluster.text import plural


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A value and the interval that encloses it; None where there are no samples."""

    value: float
    interval: tuple[float, float] | None

    @property
    def low(self) -> float:
        return self.value if self.interval is None else self.interval[0]

    @property
    def high(self) -> float:
        return self.value if self.interval is None else self.interval[1]


def estimate(value: float, interval: tuple[float, float] | None, samples: Sequence[float] = ()) -> Estimate:
    """Return a value with its noise: its interval, else that of its samples, else none.

    Of fewer than 6 samples the interval reaches from the smallest to the largest. An interval that does not enclose
    the value is ignored, so that it excuses nothing.
    """
    if interval is None and samples and all(map(math.isfinite, samples)):
        try:
            interval = stats.median_interval(samples, correlation=stats.rank_correlation(samples))
        except ValueError:  # too few of them
            interval = min(samples), max(samples)
    if interval is None or not interval[0] <= value <= interval[1] or not all(map(math.isfinite, interval)):
        return Estimate(value=value, interval=None)
    return Estimate(value=value, interval=interval)


Key = tuple[str, tuple[tuple[str, str], ...]]
"""A metric's name and its labels, sorted."""


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """The conditions under which a run has measured."""

    sku: str | None = None
    gpu_name: str | None = None
    kind: str = ""
    """Of the run (``KINDS``)."""
    world_size: int = 1
    nnodes: int = 1
    places: Mapping[int, RankPlace] = field(default_factory=dict)
    workload: Mapping[str, str] | None = None
    """Key -> value; None where it is not recorded."""

    @classmethod
    def of(cls, journal: Journal) -> Conditions:
        """Return the conditions of a run, as far as its journal has them."""
        first_name = next((place.gpu["name"] for place in journal.ranks if place.gpu and place.gpu.get("name")), None)
        return cls(
            sku=journal.sku,
            gpu_name=journal.gpu_name or first_name,
            kind=journal.run.kind,
            world_size=journal.run.world_size,
            nnodes=journal.run.nnodes,
            places={place.rank: place for place in journal.ranks},
            workload=None if journal.workload is None else journal.workload.values,
        )

    @property
    def shape(self) -> str:
        """Return "16 ranks on 2 nodes"."""
        return f"{plural(self.world_size, 'rank')} on {plural(self.nnodes, 'node')}"


@dataclass(frozen=True, kw_only=True)
class RunView:
    """A run prepared for comparisons."""

    conditions: Conditions
    tests: Mapping[str, TestResult]
    """By id, ``without_samples``; of a test that did not run the outcome is ``NOT_RUN``, and the message why."""

    @classmethod
    def of(cls, journal: Journal) -> RunView:
        """Return the view of a run whose journal was read with its samples, or ``without_samples``."""
        tests = {result.nodeid: without_samples(result) for result in journal.results}
        reasons = {test.nodeid: "the run ended before it" for test in journal.not_run}
        if journal.running is not None and journal.running.nodeid not in tests:
            reasons[journal.running.nodeid] = "the run ended in it"
        collected = {test.nodeid: test for test in journal.collected or ()}
        for nodeid, message in reasons.items():
            test = collected.get(nodeid)
            tests[nodeid] = TestResult(
                nodeid=nodeid,
                name=(test.name if test else "") or short_name(nodeid),
                outcome=NOT_RUN,
                message=message,
                criterion=test.criterion if test else None,
            )
        return cls(conditions=Conditions.of(journal), tests=tests)


def without_samples(result: TestResult) -> TestResult:
    """Return a result with the noise of each value as its interval, and without the samples and telemetry behind it.

    A journal read with this is small, and has all that a comparison needs.
    """

    def with_noise(judged: JudgedMetric) -> JudgedMetric:
        estimates = {rank: estimate_of(judged, rank) for rank in judged.values}
        intervals = {rank: each.interval for rank, each in estimates.items() if each.interval is not None}
        return replace(judged, intervals=intervals, samples={}, telemetry={})

    return replace(
        result,
        name=result.name or short_name(result.nodeid),
        telemetry={},
        measurements=tuple(map(with_noise, result.measurements)),
    )


def estimate_of(judged: JudgedMetric, rank: int) -> Estimate:
    """Return a rank's value with its noise."""
    return estimate(judged.values[rank], judged.intervals.get(rank), judged.samples.get(rank, ()))


def key_of(judged: JudgedMetric) -> Key:
    """Return the key of a metric within a test."""
    return judged.metric, tuple(sorted(judged.labels.items()))


def scope_of(judged: JudgedMetric) -> str:
    """Return the scope of a metric."""
    metric = METRICS.get(judged.metric)
    return metric.scope if metric is not None else "rank"


STATES = frozenset(
    {
        *("gpu.temperature", "burn_in.temperature", "gpu.memory.free", "clock.skew"),
        *("dns.forward", "dns.reverse", "connectivity.connect", "connectivity.rendezvous", "slurm.controller"),
        *("shared_filesystem.visible", "shared_filesystem.free", "shared_filesystem.free_inodes"),
    }
)
"""Metrics of a momentary state. Limits judge them; a change since an earlier run decides nothing."""

OF_ONE_GPU = ("matmul.", "hbm.", "gpu.", "burn_in.")
"""Metrics whose value does not depend on how many ranks there are."""

IN_LABELS = ("sizes", "latency_sizes")
"""Keys of a workload whose values are among the labels, so that another size is another metric."""

TIMES = (
    *("warmup", "window", "longest", "tolerance", "deadline", "interval", "budget", "probe", "lookup"),
    *("clock_samples", "round", "repeats", "look"),
)
"""Keys of a workload for the duration of a measurement, not for its subject."""

OF_A_SEARCH = ".best_tflops"
"""Suffix of a metric that is the best of a search. Its labels are what was found; only the keys below
``matmul.search`` define the search."""


def obstacles(old: Conditions, new: Conditions) -> Iterator[str]:
    """Yield why two runs cannot be compared; nothing where they can."""
    if old.kind != new.kind:
        yield f"a {KIND_NAMES[old.kind]} before, a {KIND_NAMES[new.kind]} now"
    elif old.sku != new.sku:
        yield f"another SKU: {old.sku or 'unknown'} before, {new.sku or 'unknown'} now"
    elif old.gpu_name != new.gpu_name:
        yield f"another GPU: {old.gpu_name or 'unknown'} before, {new.gpu_name or 'unknown'} now"
    if (old.workload is None) != (new.workload is None):
        yield f"what was run {'before' if old.workload is None else 'now'} is not recorded"


def notes(old: Conditions, new: Conditions) -> Iterator[str]:
    """Yield the differences between runs that can be compared in part."""
    if _is_other_shape(old, new):
        yield f"another shape: {old.shape} before, {new.shape} now; only what one GPU does is compared"
    hosts = [{place.host for place in run.places.values() if place.host} for run in (old, new)]
    if hosts[0] and hosts[1] and not hosts[0] & hosts[1]:
        yield "other hosts than before; ranks that share no GPU are matched by their number"


def metric_obstacles(old: Conditions, new: Conditions) -> Callable[[str], str]:
    """Return a function: metric -> why it is not comparable between these two runs, "" where it is."""
    shape = f"{old.shape} before, {new.shape} now" if _is_other_shape(old, new) else ""
    before, now = old.workload or {}, new.workload or {}
    keys = [key for key in sorted({*before, *now}) if key.rpartition(".")[2] not in (*IN_LABELS, *TIMES)]
    changed = [key for key in keys if before.get(key) != now.get(key)]

    def why_not(metric: str) -> str:
        if shape and not metric.startswith(OF_ONE_GPU):
            return shape
        for key in changed:
            if _concerns(key, metric):
                return f"measured otherwise: {key} was {before.get(key, 'not set')}, is {now.get(key, 'not set')}"
        return ""

    return why_not


def _concerns(key: str, metric: str) -> bool:
    """Whether a key of a workload affects a metric, as its section declares; an unknown key affects all."""
    sections = [section for section in SECTIONS if key.startswith(f"{section.path}.")]
    patterns = max(sections, key=lambda section: len(section.path)).metrics if sections else ("*",)
    return any(fnmatch.fnmatchcase(metric, pattern) for pattern in patterns)


def _is_other_shape(old: Conditions, new: Conditions) -> bool:
    return (old.world_size, old.nnodes) != (new.world_size, new.nnodes)


GPU, SLOT, NUMBER = "GPU", "slot", "rank number"
"""How two ranks were matched."""


@dataclass(frozen=True, kw_only=True)
class Match:
    """The rank before, and how it was matched."""

    old: int
    by: str
    swapped: str = ""
    """The UUID of the GPU that was in this slot before, where it is another one now."""


def match(old: Mapping[int, RankPlace], new: Mapping[int, RankPlace], *, by_gpu: bool = True) -> dict[int, Match]:
    """Return the earlier rank of each rank that has one.

    A GPU is identified by its UUID, wherever it is now. Without one, or where it is new, the slot decides (host and
    local rank), and then the rank's number. No rank is matched twice.

    Args:
        old: the ranks before.
        new: the ranks now.
        by_gpu: match by GPU first; False for metrics of a node or of the whole cluster.
    """
    found: dict[int, Match] = {}
    taken: set[int] = set()

    def take(by: str, key: Callable[[RankPlace], Hashable | None]) -> None:
        free = {key(place): rank for rank, place in old.items() if rank not in taken and key(place) is not None}
        for rank, place in new.items():
            before = free.pop(key(place), None) if rank not in found else None
            if before is not None:
                taken.add(before)
                was = old[before].uuid
                is_swapped = by_gpu and was and place.uuid and was != place.uuid
                found[rank] = Match(old=before, by=by, swapped=was if is_swapped else "")

    if by_gpu:
        take(GPU, lambda place: place.uuid or None)
    take(SLOT, lambda place: (place.host, place.local_rank) if place.host else None)
    take(NUMBER, lambda place: place.rank)
    return found
