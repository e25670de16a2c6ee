"""The values and the verdict of a journal, judged anew by what stands beside them, and by the rules of a run.

A journal is a file that many hands can reach. What it says of itself counts only where its own lines bear it out.
"""

from __future__ import annotations

import math
from dataclasses import replace

from pytest_gpucluster import verdict
from pytest_gpucluster.errors import MeasurementError
from pytest_gpucluster.journal import Journal
from pytest_gpucluster.journal_measurements import JudgedLimit, JudgedMetric
from pytest_gpucluster.judge.judge import judge
from pytest_gpucluster.judge.limits import Limit, Thresholds
from pytest_gpucluster.metrics import datasheets, measurement
from pytest_gpucluster.metrics.catalogue import Metric
from pytest_gpucluster.metrics.measurement import Measurement
from pytest_gpucluster.text import first_line


def verdict_again(journal: Journal) -> verdict.Verdict:
    """Return the verdict that the lines of a journal make, whatever its closing line says."""
    return verdict.decide(
        [result.for_verdict for result in journal.results],
        pytest_exit=0,
        problems=[problem.message or problem.name for problem in journal.problems],
        not_run=[test.nodeid for test in journal.not_run],
        required=journal.run.required,
        rehearsal=journal.run.rehearsal,
        selection=journal.run.selection,
        manifest=journal.has_manifest,
        deviations=journal.deviations,
        topology=f"{journal.run.nnodes} nodes, {journal.run.world_size} ranks",
    )


def doubt(judged: JudgedMetric, journal: Journal) -> str:
    """Return why a value that is told to have passed, or to be recorded only, is no such value; "" if it is."""
    limit = judged.limit
    if judged.status == "recorded":
        return "it is recorded only, and has a limit" if limit is not None else ""
    if limit is None or (limit.min, limit.max, limit.min_ratio_to_median) == (None, None, None):
        return "it passed, and has no limit"
    if not (limit.source and limit.origin):
        return "nobody knows where its limit comes from"
    if judged.value is None or judged.worst_rank is None or judged.values.get(judged.worst_rank) != judged.value:
        return f"its value is told as {judged.value}, and that of its worst rank otherwise"
    if _is_known(judged.metric) and measurement.known(judged.metric).unit != judged.unit:
        return f"it is told in {judged.unit or 'no unit'}, and never measured in that"
    return _judged_anew(judged, limit, journal)


def _judged_anew(judged: JudgedMetric, limit: JudgedLimit, journal: Journal) -> str:
    ranks = journal.cluster.ranks if journal.cluster is not None else ()
    ratio = limit.min_ratio_to_median
    if not _is_known(judged.metric):
        # A metric of the site's own: whether more of it is better, and so who is behind, stands in no journal.
        told = judged.ratio_to_median
        if ratio is not None and not (told is not None and told >= ratio):
            return f"its lowest rank is told to have {told} of the others' median, and {ratio} is demanded"
        if limit.min is None and limit.max is None:
            finite = all(math.isfinite(value) for value in judged.values.values())
            return "" if finite else "a value is no finite number"
        limit = replace(limit, min_ratio_to_median=None)
    sku = (journal.limits.sku if journal.limits is not None else None) or ""
    decides = Limit(
        metric=judged.metric,
        sku=sku,
        unit=judged.unit,
        min=limit.min,
        max=limit.max,
        min_ratio_to_median=limit.min_ratio_to_median,
        expect_transport=limit.expect_transport,
        source=limit.source,
        origin=limit.origin,
    )
    found = judge(
        {rank: [_measurement(judged, rank)] for rank in judged.values},
        world={place.rank: f"rank {place.rank} ({place.host})" for place in ranks},
        node_of={place.rank: place.node_rank for place in ranks},
        limits=Thresholds(skus=datasheets.SKUS, limits=(decides,)),
        sku=sku,
        gpu_name=journal.limits.gpu_name if journal.limits is not None else None,
        known=lambda name: measurement.known(name) if _is_known(name) else _stranger(judged),
    )
    if found.outcome != "passed":
        return first_line(found.message)
    [anew] = found.measurements
    worst = judged.worst_rank
    is_same = worst is not None and worst == anew.worst_rank and judged.interval == judged.intervals.get(worst)
    if not is_same or not _is_close(judged.margin, anew.margin):
        return "its worst rank, margin or interval is not what comes of its values"
    return ""


def _is_close(told: float | None, comes: float | None) -> bool:
    return told == comes or (told is not None and comes is not None and math.isclose(told, comes, rel_tol=1e-9))


def _measurement(judged: JudgedMetric, rank: int) -> Measurement:
    return Measurement(
        metric=judged.metric,
        value=judged.values[rank],
        unit=judged.unit,
        interval=judged.intervals.get(rank),
        samples=judged.samples.get(rank, ()),
        inconclusive=judged.inconclusive if rank == judged.worst_rank else "",
        labels=judged.labels,
    )


def _is_known(metric: str) -> bool:
    try:
        measurement.known(metric)
    except MeasurementError:
        return False
    return True


def _stranger(judged: JudgedMetric) -> Metric:
    """Return a metric of which nothing is known but its unit: its bounds hold, and any rank may have measured it."""
    return Metric(name=judged.metric, unit=judged.unit, better="none", scope="world", doc="")
