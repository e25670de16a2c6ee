"""Why a run is not accepted: its values and its verdict, re-evaluated from its journal.

A journal is a file that many people can write to. A statement in it counts only where its other lines support it; the
verdict alone proves nothing. This finds a journal that contradicts itself. One that is invented as a whole does not;
against that only its digest helps, kept out of reach.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain

from pytest_gpucluster.errors import MeasurementError
from pytest_gpucluster.journal import verdict
from pytest_gpucluster.journal.fields import JudgedLimit, JudgedMetric
from pytest_gpucluster.journal.journal import Journal
from pytest_gpucluster.journal.records import OUTCOMES
from pytest_gpucluster.journal.verdict import ACCEPTED
from pytest_gpucluster.judge.judge import judge
from pytest_gpucluster.judge.limits import Limit, Thresholds
from pytest_gpucluster.metrics import datasheets, measurement
from pytest_gpucluster.metrics.catalogue import Metric
from pytest_gpucluster.metrics.datasheets import CPU_REHEARSAL
from pytest_gpucluster.metrics.measurement import Measurement
from pytest_gpucluster.text import first_line, rank_ranges, some_of


def recompute_verdict(journal: Journal) -> verdict.Verdict:
    """Return the verdict by the lines of a journal, independent of its closing line."""
    return journal.recompute_verdict(topology=f"{journal.run.nnodes} nodes, {journal.run.world_size} ranks")


def inconsistency(judged: JudgedMetric, journal: Journal) -> str:
    """Return why a value with status passed or recorded contradicts its other fields; "" if it does not."""
    limit = judged.limit
    if judged.status == "recorded":
        return "it is recorded only, and has a limit" if limit is not None else ""
    if limit is None or (limit.min, limit.max, limit.min_ratio_to_median) == (None, None, None):
        return "it passed, and has no limit"
    if not (limit.source and limit.origin):
        return "its limit has no source"
    if judged.value is None or judged.worst_rank is None or judged.values.get(judged.worst_rank) != judged.value:
        return f"its value is {judged.value}, and that of its worst rank is another"
    if _is_known(judged.metric) and measurement.known(judged.metric).unit != judged.unit:
        return f"its unit is {judged.unit or 'missing'}, which is not that of the metric"
    return _reevaluation(judged, limit, journal)


def _reevaluation(judged: JudgedMetric, limit: JudgedLimit, journal: Journal) -> str:
    ratio = limit.min_ratio_to_median
    if not _is_known(judged.metric):
        # A metric of the site: the journal does not state whether more of it is better, and so which rank is behind.
        recorded = judged.ratio_to_median
        if ratio is not None and not (recorded is not None and recorded >= ratio):
            return f"its lowest rank has {recorded} of the others' median, and {ratio} is required"
        if limit.min is None and limit.max is None:
            finite = all(math.isfinite(value) for value in judged.values.values())
            return "" if finite else "a value is not a finite number"
        limit = replace(limit, min_ratio_to_median=None)
    sku = journal.sku or ""
    replayed = Limit(
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
    result = judge(
        {rank: [_measurement(judged, rank)] for rank in judged.values},
        world={place.rank: f"rank {place.rank} ({place.host})" for place in journal.ranks},
        node_of={place.rank: place.node_rank for place in journal.ranks},
        limits=Thresholds(skus=datasheets.SKUS, limits=(replayed,)),
        sku=sku,
        gpu_name=journal.gpu_name,
        known=lambda name: measurement.known(name) if _is_known(name) else _unknown_metric(judged),
    )
    if result.outcome != "passed":
        return first_line(result.message)
    [again] = result.measurements
    worst = judged.worst_rank
    is_same = worst is not None and worst == again.worst_rank and judged.interval == judged.intervals.get(worst)
    if not is_same or not _is_close(judged.margin, again.margin):
        return "its worst rank, margin or interval does not follow from its values"
    return ""


def _is_close(recorded: float | None, computed: float | None) -> bool:
    if recorded is None or computed is None:
        return recorded == computed
    return recorded == computed or math.isclose(recorded, computed, rel_tol=1e-9)


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


def _unknown_metric(judged: JudgedMetric) -> Metric:
    """Return a metric of which only the unit is known: its bounds apply, and any rank may have measured it."""
    return Metric(name=judged.metric, unit=judged.unit, better="none", scope="world", doc="")


_UUIDS = ("gpu-", "mig-")
"""Prefixes of the UUID of a GPU or a MIG slice."""


def blockers(journal: Journal) -> tuple[str, ...]:
    """Return every reason why this run is not accepted; empty where it is."""
    return tuple(
        chain(
            _run_problems(journal),
            _contradictions(journal),
            _inconsistent_values(journal),
            _missing_facts(journal),
            _rank_problems(journal),
        )
    )


def _run_problems(journal: Journal) -> Iterator[str]:
    if journal.cut:
        yield "the journal's last line is cut off"
    if journal.end is None:
        yield f"the journal has no closing line: {journal.reason}"
    if journal.run.rehearsal:
        yield "it is a rehearsal on cpu, which states nothing about hardware"
    elif journal.run.device != "cuda":
        yield f"it ran on {journal.run.device or 'an unknown device'}, not on cuda"
    if journal.run.selection:
        yield "only a selection of the tests ran"
    if journal.run.merged_despite:
        yield f"it was merged from runs of different clusters: {first_line('; '.join(journal.run.merged_despite))}"
    if journal.verdict != ACCEPTED or journal.exit != 0:
        yield f"its verdict is {journal.verdict}, exit code {journal.exit}: {first_line(journal.reason)}"
    else:
        again = recompute_verdict(journal)
        if again.word != ACCEPTED:
            yield f"its closing line states {ACCEPTED}, and by its other lines it is {again.word}: {again.reason}"


def _contradictions(journal: Journal) -> Iterator[str]:
    """Yield what no accepted run has, independent of its closing line."""
    bad = [result for result in journal.results if result.outcome in ("failed", "error")]
    if bad:
        yield _named([f"{result.nodeid} ({result.outcome})" for result in bad], "did not pass")
    if journal.running is not None:
        yield f"{journal.running.nodeid} never ended"
    if journal.not_run:
        yield _named([test.nodeid for test in journal.not_run], "never ran")
    if journal.problems:
        yield _named([problem.name for problem in journal.problems], "fault outside the tests")
    if journal.silence is not None:
        yield f"it ends in silence: {first_line(journal.silence.message)}"
    counts = journal.end.counts if journal.end is not None else {}
    counted = Counter(result.outcome for result in journal.results)
    wrong = [kind for kind in OUTCOMES if counts.get(kind, 0) != counted[kind]]
    if counts and wrong:
        listed = ", ".join(f"{counts.get(kind, 0)} {kind}, and there are {counted[kind]}" for kind in wrong)
        yield f"its closing line has other counts than its tests: {listed}"
    if journal.end is not None and journal.end.not_run:
        yield _named(list(journal.end.not_run), "did not run, by its closing line")
    missed = [
        f"{result.nodeid}: {judged.metric}"
        for result in journal.results
        if result.outcome == "passed"
        for judged in result.measurements
        if judged.status in ("failed", "error")
    ]
    if missed:
        yield _named(missed, "passed, with a value that did not pass")
    if journal.cluster is not None and journal.cluster.problems:
        yield _named([first_line(problem) for problem in journal.cluster.problems], "found by the preflight")


def _inconsistent_values(journal: Journal) -> Iterator[str]:
    """Yield values that are recorded as passed and do not pass by their own figures."""
    passed = [result for result in journal.results if result.outcome == "passed"]
    found = [
        f"{result.nodeid}: {judged.metric}: {why}"
        for result in passed
        for judged in result.measurements
        if judged.status in ("passed", "recorded") and (why := inconsistency(judged, journal))
    ]
    if found:
        yield _named(found, "recorded as passed, and not by its own figures")


def _missing_facts(journal: Journal) -> Iterator[str]:
    """Yield what a certificate needs and the journal lacks."""
    if not (journal.run.run_id and journal.run.started_at):
        yield "the journal has no run id or start time"
    if journal.collected is None:
        yield "the journal has no list of the collected tests"
    if journal.cluster is None:
        yield "the journal has no description of the cluster"
    if journal.sku is None:
        yield "the journal has no SKU for its limits"
    elif journal.sku == CPU_REHEARSAL and not journal.run.rehearsal:
        yield f"it was judged by the limits of {CPU_REHEARSAL}"
    if not journal.limit_files:
        yield "the journal has no list of the files of limits in force"
    unsure = [path for path, digest in journal.limit_files if not re.fullmatch("[0-9a-f]{64}", digest)]
    if unsure:
        yield _named(unsure, "has no recorded digest")


def _rank_problems(journal: Journal) -> Iterator[str]:
    """Yield what a certificate needs of the ranks, and where they are not those of the run."""
    ranks = journal.ranks
    if not ranks:
        return
    numbers, launched = Counter(place.rank for place in ranks), set(range(journal.run.world_size))
    absent, unexpected = launched - set(numbers), set(numbers) - launched
    if absent:
        yield f"nothing is known of {rank_ranges(absent)}"
    if unexpected:
        yield f"{rank_ranges(unexpected)} is recorded, and the run had {journal.run.world_size}"
    repeated = [rank for rank, count in numbers.items() if count > 1]
    if repeated:
        yield f"{rank_ranges(repeated)} is recorded more than once"
    nodes = {place.node_rank for place in ranks}
    if len(nodes) != journal.run.nnodes:
        yield f"its ranks are on {len(nodes)} nodes, and the run had {journal.run.nnodes}"
    without_host = [place.rank for place in ranks if not place.host]
    if without_host:
        yield f"the host is unknown of {rank_ranges(without_host)}"
    uuids = {place.rank: place.uuid.casefold() for place in ranks}
    without_uuid = [rank for rank, uuid in uuids.items() if not uuid.startswith(_UUIDS)]
    if without_uuid:
        yield f"the UUID is unknown of the GPU of {rank_ranges(without_uuid)}"
    seen = Counter(place.uuid.casefold() for place in ranks)
    duplicates = [uuid for uuid, count in seen.items() if uuid and count > 1]
    if duplicates:
        yield _named(duplicates, "is the UUID of more than one rank's GPU")
    judged_as = journal.gpu_name
    other = {name for place in ranks if place.gpu and (name := place.gpu.get("name", "")) != judged_as}
    if other:
        yield _named(sorted(other), f"is a GPU of this run, and its limits are those of {judged_as or 'no GPU'}")


def _named(names: list[str], what: str) -> str:
    return f"{some_of(names)}: {what}"
