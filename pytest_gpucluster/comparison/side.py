"""What one run brings to a comparison: the facts that must be alike, and its values without their samples."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from pytest_gpucluster.comparison.rule import Known, known
from pytest_gpucluster.journal import Journal
from pytest_gpucluster.journal_lines import RankPlace, TestResult
from pytest_gpucluster.journal_measurements import JudgedLimit, JudgedMetric
from pytest_gpucluster.metrics.measurement import METRICS
from pytest_gpucluster.reports.outline import NOT_RUN, is_better_higher

Key = tuple[str, tuple[tuple[str, str], ...]]
"""A metric's name and its labels, sorted."""


class Bounds(Protocol):
    """A limit, as far as it matters here."""

    @property
    def min(self) -> float | None: ...
    @property
    def max(self) -> float | None: ...


class Named(Protocol):
    """A metric with its labels."""

    @property
    def metric(self) -> str: ...
    @property
    def labels(self) -> Mapping[str, str]: ...


class Measured(Named, Protocol):
    """A judged metric, from a journal or just judged."""

    @property
    def unit(self) -> str: ...
    @property
    def status(self) -> str: ...
    @property
    def limit(self) -> Bounds | None: ...
    @property
    def values(self) -> Mapping[int, float]: ...
    @property
    def intervals(self) -> Mapping[int, tuple[float, float]]: ...
    @property
    def samples(self) -> Mapping[int, Sequence[float]]: ...


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Under which conditions a run has measured."""

    sku: str | None = None
    gpu_name: str | None = None
    rehearsal: bool = False
    world_size: int = 1
    nnodes: int = 1
    places: Mapping[int, RankPlace] = field(default_factory=dict)
    workload: Mapping[str, str] | None = None
    """Key -> value; None where it is not on record."""

    @property
    def shape(self) -> str:
        """Return "16 ranks on 2 nodes"."""
        ranks = f"{self.world_size} rank{'s' * (self.world_size != 1)}"
        return f"{ranks} on {self.nnodes} node{'s' * (self.nnodes != 1)}"


@dataclass(frozen=True, kw_only=True)
class Values:
    """One metric with one set of labels: a value of each rank that has one."""

    metric: str
    labels: Mapping[str, str]
    unit: str
    recorded: bool
    """No limit has judged it."""
    higher: bool | None
    """More is better; None where neither is, or it is not known."""
    limit_max: float | None
    of_rank: Mapping[int, Known]

    @property
    def key(self) -> Key:
        return key_of(self)

    @property
    def scope(self) -> str:
        """Return who reports it: rank, node or world."""
        metric = METRICS.get(self.metric)
        return metric.scope if metric is not None else "rank"


@dataclass(frozen=True, kw_only=True)
class Tested:
    """One test: how it ended, and what it has measured."""

    nodeid: str
    name: str
    outcome: str
    message: str = ""
    criterion: str | None = None
    values: Mapping[Key, Values] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Side:
    """One of the two runs."""

    facts: Facts
    tests: Mapping[str, Tested]
    """By id."""


def key_of(measured: Named) -> Key:
    """Return by what a metric of a test is known."""
    return measured.metric, tuple(sorted(measured.labels.items()))


def values_of(measured: Measured) -> Values:
    """Return a metric's values, each with its noise."""
    limit = measured.limit
    return Values(
        metric=measured.metric,
        labels=dict(measured.labels),
        unit=measured.unit,
        recorded=measured.status == "recorded",
        higher=_higher(measured),
        limit_max=None if limit is None else limit.max,
        of_rank={
            rank: known(value, measured.intervals.get(rank), measured.samples.get(rank, ()))
            for rank, value in measured.values.items()
        },
    )


def by_key(measurements: Iterable[Measured]) -> dict[Key, Values]:
    """Return the values of a test by metric and labels."""
    return {values.key: values for values in map(values_of, measurements)}


def facts_of(journal: Journal) -> Facts:
    """Return under which conditions a run has measured, as far as its journal says."""
    run, limits, workload = journal.run, journal.limits, journal.workload
    ranks = journal.cluster.ranks if journal.cluster is not None else ()
    of_ranks = next((place.gpu["name"] for place in ranks if place.gpu and place.gpu.get("name")), None)
    return Facts(
        sku=limits.sku if limits is not None else None,
        gpu_name=(limits.gpu_name if limits is not None else None) or of_ranks,
        rehearsal=run.rehearsal,
        world_size=run.world_size,
        nnodes=run.nnodes,
        places={place.rank: place for place in ranks},
        workload=None if workload is None else workload.values,
    )


def without_samples(result: TestResult) -> TestResult:
    """Return a result with the noise of each value as its interval, and without the samples and telemetry behind it.

    A journal that is read with this is small, and nothing is missing that a comparison needs.
    """
    return replace(result, telemetry={}, measurements=tuple(map(_with_noise, result.measurements)))


def _with_noise(judged: JudgedMetric) -> JudgedMetric:
    found = {
        rank: known(value, judged.intervals.get(rank), judged.samples.get(rank, ()))
        for rank, value in judged.values.items()
    }
    intervals = {rank: (each.low, each.high) for rank, each in found.items() if each.sampled}
    return replace(judged, intervals=intervals, samples={}, telemetry={})


def side(journal: Journal) -> Side:
    """Return what a run brings to a comparison.

    The journal must have been read with its samples, or ``without_samples``.
    """
    tests = {
        result.nodeid: Tested(
            nodeid=result.nodeid,
            name=result.name or result.nodeid.partition("::")[2] or result.nodeid,
            outcome=result.outcome,
            message=result.message,
            criterion=result.criterion,
            values=by_key(result.measurements),
        )
        for result in journal.results
    }
    why = {test.nodeid: "the run ended before it" for test in journal.not_run}
    if journal.running is not None and journal.running.nodeid not in tests:
        why[journal.running.nodeid] = "the run ended in it"
    told = {test.nodeid: test for test in journal.collected or ()}
    for nodeid, message in why.items():
        test = told.get(nodeid)
        tests[nodeid] = Tested(
            nodeid=nodeid,
            name=(test.name if test else "") or nodeid.partition("::")[2] or nodeid,
            outcome=NOT_RUN,
            message=message,
            criterion=test.criterion if test else None,
        )
    return Side(facts=facts_of(journal), tests=tests)


def _higher(measured: Measured) -> bool | None:
    limit = measured.limit
    return is_better_higher(
        JudgedMetric(
            metric=measured.metric,
            limit=None if limit is None else JudgedLimit(min=limit.min, max=limit.max),
        )
    )
