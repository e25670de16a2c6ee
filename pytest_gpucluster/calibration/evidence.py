"""What accepted runs have measured, put together by metric, labels and topology."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from pytest_gpucluster.acceptance_record.objections import objections
from pytest_gpucluster.errors import MeasurementError
from pytest_gpucluster.journal import Journal
from pytest_gpucluster.journal_measurements import JudgedLimit, JudgedMetric
from pytest_gpucluster.metrics import measurement, units

RATES = ("compute rate", "data rate", "token rate", "image rate", "file rate")
"""Dimensions that a floor is proposed for. All else is a rule, such as no finding at all, and no figure of hardware."""

_OUTCOMES = ("transport", "nics")
"""Labels that say what came of it, and not what was asked for: with other ones it is the same measurement."""

_OF_ONE_GPU = ("matmul.", "hbm.")
_OF_ONE_NODE = ("host_link.",)
"""Metrics whose values do not depend on how many GPUs there are, or only on how many share the node."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """A journal that floors are made of."""

    path: str
    sha256: str
    journal: Journal

    @property
    def sku(self) -> str | None:
        """The SKU whose limits were in force."""
        return self.journal.limits.sku if self.journal.limits is not None else None


@dataclass(frozen=True, kw_only=True)
class Number:
    """What one rank's value is held against a floor with: the low end of its interval, where it has one."""

    value: float
    rank: int
    place: str
    run: int
    """Which source, counted from 1."""


@dataclass(frozen=True, kw_only=True)
class Series:
    """All values of one measurement, of all ranks of all runs."""

    metric: str
    unit: str
    labels: Mapping[str, str]
    topology: Mapping[str, str]
    """The facts that it depends on, besides the labels: of world_size, nnodes and local_world_size."""
    is_judged: bool
    """Some run held it against a limit."""
    numbers: tuple[Number, ...]
    samples: tuple[tuple[float, ...], ...] = ()
    """Those behind each value that has any."""
    limits: tuple[JudgedLimit, ...] = field(default=())
    """What the runs held it against."""


def refusals(sources: Sequence[Source], *, sku: str | None = None) -> list[str]:
    """Return why no floor may be made of these journals; nothing, where one may."""
    found = [f"{source.path}: {why}" for source in sources for why in objections(source.journal)]
    seen: dict[str, str] = {}
    for source in sources:
        run = source.journal.run
        # A merged journal holds the values of the runs that it was made of.
        keys = {source.sha256, f"run {run.run_id}"}
        keys |= {key for one in run.merged_from for key in (one.sha256, f"run {one.run_id}")}
        same = next((seen[key] for key in sorted(keys) if key in seen), None)
        if same is not None:
            found.append(f"{source.path}: the same run as {same}, or merged of it; a run counts once")
        seen |= dict.fromkeys(keys, source.path)
    wanted = sku if sku is not None else next((source.sku for source in sources if source.sku), None)
    said = "--sku is" if sku is not None else f"{sources[0].path} has"
    found += [
        f"{source.path}: its SKU is {source.sku or 'not known'}, and {said} {wanted}; calibrate each SKU alone"
        for source in sources
        if source.sku != wanted
    ]
    first = sources[0].journal.workload
    for source in sources[1:]:
        other = source.journal.workload
        ours, theirs = (one.values if one is not None else {} for one in (first, other))
        differing = [key for key in sorted({*ours, *theirs}) if ours.get(key) != theirs.get(key)]
        if differing:
            shown = ", ".join(
                f"{key} ({theirs.get(key, 'none')}, not {ours.get(key, 'none')})" for key in differing[:3]
            )
            more = f" and {len(differing) - 3} more" if len(differing) > 3 else ""
            found.append(f"{source.path}: it measured otherwise than {sources[0].path}: {shown}{more}")
    return found


def series(sources: Sequence[Source]) -> list[Series]:
    """Return the rates of which more is better, in the order in which they were measured.

    What is not known to this version has no floor: nothing says whether more of it is better.
    """
    groups: dict[tuple[object, ...], list[tuple[int, Source, JudgedMetric]]] = {}
    for run, source in enumerate(sources, start=1):
        for judged in _rates(source.journal):
            labels = tuple(sorted(_asked(judged).items()))
            topology = tuple(_topology(judged, source.journal).items())
            groups.setdefault((judged.metric, labels, topology), []).append((run, source, judged))
    return [_series(of_all) for of_all in groups.values()]


def judged_beside(one: Series, measured: Sequence[Series]) -> Series | None:
    """Return what is judged of the same metric and could not be told from a recorded series by floors of both.

    Floors with as many conditions that do not contradict each other can both apply, which a file of limits must not
    leave open: such are the single sizes of a product (label ``n``) beside the best of them (``best_of``).
    """
    if one.is_judged:
        return None
    ours = {**one.topology, **one.labels}
    for other in measured:
        theirs = {**other.topology, **other.labels}
        shared = ours.keys() & theirs.keys()
        is_same = other.metric == one.metric and len(theirs) == len(ours)
        if other.is_judged and is_same and all(ours[key] == theirs[key] for key in shared):
            return other
    return None


def _rates(journal: Journal) -> Iterator[JudgedMetric]:
    for result in journal.results:
        if result.outcome != "passed":
            continue
        for judged in result.measurements:
            try:
                metric = measurement.known(judged.metric)
            except MeasurementError:
                continue
            is_rate = units.unit(metric.unit).dimension in RATES and judged.unit == metric.unit
            if is_rate and metric.better == "higher" and judged.status in ("passed", "recorded"):
                yield judged


def _asked(judged: JudgedMetric) -> dict[str, str]:
    return {key: value for key, value in judged.labels.items() if key not in _OUTCOMES}


def _topology(judged: JudgedMetric, journal: Journal) -> dict[str, str]:
    if judged.metric.startswith(_OF_ONE_GPU):
        return {}
    ranks, nodes = journal.run.world_size, journal.run.nnodes
    if judged.metric.startswith(_OF_ONE_NODE):
        return {"local_world_size": str(ranks // nodes)} if nodes and ranks % nodes == 0 else {"world_size": str(ranks)}
    known = {"world_size": str(ranks), "nnodes": str(nodes)}
    # A label of the same name describes who measured, and stands among the labels.
    return {key: value for key, value in known.items() if key not in judged.labels}


def _series(of_all: Sequence[tuple[int, Source, JudgedMetric]]) -> Series:
    _, source, first = of_all[0]
    numbers, samples = [], []
    for run, where, judged in of_all:
        for rank, value in judged.values.items():
            low = judged.intervals[rank][0] if rank in judged.intervals else value
            low = low if math.isnan(low) else min(value, low)
            numbers.append(Number(value=low, rank=rank, place=_place(where.journal, rank), run=run))
        samples += [each for each in judged.samples.values() if each]
    return Series(
        metric=first.metric,
        unit=first.unit,
        labels=_asked(first),
        topology=_topology(first, source.journal),
        is_judged=any(judged.limit is not None for _, _, judged in of_all),
        numbers=tuple(numbers),
        samples=tuple(samples),
        limits=tuple(judged.limit for _, _, judged in of_all if judged.limit is not None),
    )


def _place(journal: Journal, rank: int) -> str:
    place = journal.place(rank)
    return f"rank {rank}" + (f" ({place.host})" if place is not None and place.host else "")
