"""Why a run is not accepted: its values and its verdict, re-evaluated from its journal.

A journal is a file that many people can write to. A statement in it counts only where its other lines support it; the
verdict alone proves nothing. This finds a journal that contradicts itself. One that is invented as a whole does not;
against that only its digest helps, kept out of reach.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from pytest_gpucluster.analysis.output import fields_of
from pytest_gpucluster.journal.journal import Journal
from pytest_gpucluster.journal.records import KIND_NAMES, OUTCOMES
from pytest_gpucluster.journal.verdict import ACCEPTED
from pytest_gpucluster.judge.judge import judge
from pytest_gpucluster.judge.judged import JudgedLimit, JudgedMetric
from pytest_gpucluster.judge.limits import Limit, Thresholds
from pytest_gpucluster.metrics import datasheets
from pytest_gpucluster.metrics.catalogue import Metric
from pytest_gpucluster.metrics.datasheets import CPU_REHEARSAL
from pytest_gpucluster.metrics.measurement import METRICS, Measurement
from pytest_gpucluster.text import first_line, rank_ranges, some_of


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
    metric = METRICS.get(judged.metric)
    if metric is not None and metric.unit != judged.unit:
        return f"its unit is {judged.unit or 'missing'}, which is not that of the metric"
    if metric is None:
        # A metric of the site: the journal does not state whether more of it is better, and so which rank is behind.
        # Its bounds apply, and any rank may have measured it.
        metric = Metric(name=judged.metric, unit=judged.unit, better="none", scope="world", doc="")
        ratio, recorded = limit.min_ratio_to_median, judged.ratio_to_median
        if ratio is not None and not (recorded is not None and recorded >= ratio):
            return f"its lowest rank has {recorded} of the others' median, and {ratio} is required"
        if limit.min is None and limit.max is None:
            finite = all(map(math.isfinite, judged.values.values()))
            return "" if finite else "a value is not a finite number"
        limit = replace(limit, min_ratio_to_median=None)
    return _reevaluation(judged, limit, metric, journal)


def _reevaluation(judged: JudgedMetric, limit: JudgedLimit, metric: Metric, journal: Journal) -> str:
    """Return why the judge does not pass a value again, or with other figures; "" where it does."""
    sku = journal.sku or ""
    replayed = Limit(
        metric=judged.metric,
        sku=sku,
        unit=judged.unit,
        **fields_of(limit, "min", "max", "min_ratio_to_median", "expect_transport", "source", "origin"),
    )
    measured = {
        rank: [
            Measurement(
                metric=judged.metric,
                value=value,
                unit=judged.unit,
                interval=judged.intervals.get(rank),
                samples=judged.samples.get(rank, ()),
                inconclusive=judged.inconclusive if rank == judged.worst_rank else "",
                labels=judged.labels,
            )
        ]
        for rank, value in judged.values.items()
    }
    result = judge(
        measured,
        world={place.rank: f"rank {place.rank} ({place.host})" for place in journal.ranks},
        node_of={place.rank: place.node_rank for place in journal.ranks},
        limits=Thresholds(skus=datasheets.SKUS, limits=(replayed,)),
        sku=sku,
        gpu_name=journal.gpu_name,
        known=lambda name: metric,
    )
    if result.outcome != "passed":
        return first_line(result.message)
    [again] = result.measurements
    worst, recorded, computed = again.worst_rank, judged.margin, again.margin
    is_close = recorded == computed
    if recorded is not None and computed is not None:
        is_close = is_close or math.isclose(recorded, computed, rel_tol=1e-9)
    if judged.worst_rank != worst or worst is None or judged.interval != judged.intervals.get(worst) or not is_close:
        return "its worst rank, margin or interval does not follow from its values"
    return ""


_UUIDS = ("gpu-", "mig-")
"""Prefixes of the UUID of a GPU or a MIG slice."""


def blockers(journal: Journal) -> tuple[str, ...]:
    """Return every reason why this run is not accepted; empty where it is."""
    checks = (_run_problems, _contradictions, _missing_facts, _rank_problems)
    return tuple(reason for check in checks for reason in check(journal))


def _named(names: Sequence[str], what: str) -> list[str]:
    return [f"{some_of(names)}: {what}"] if names else []


def _run_problems(journal: Journal) -> Iterator[str]:
    if journal.cut:
        yield "the journal's last line is cut off"
    if journal.end is None:
        yield f"the journal has no closing line: {journal.reason}"
    if journal.run.kind:
        yield f"it is a {KIND_NAMES[journal.run.kind]}, which states nothing about hardware"
    elif journal.run.device != "cuda":
        yield f"it ran on {journal.run.device or 'an unknown device'}, not on cuda"
    if journal.run.selection:
        yield "only a selection of the tests ran"
    if journal.verdict != ACCEPTED or journal.exit != 0:
        yield f"its verdict is {journal.verdict}, exit code {journal.exit}: {first_line(journal.reason)}"
    else:
        again = journal.recompute_verdict(topology=f"{journal.run.nnodes} nodes, {journal.run.world_size} ranks")
        if again.word != ACCEPTED:
            yield f"its closing line states {ACCEPTED}, and by its other lines it is {again.word}: {again.reason}"


def _contradictions(journal: Journal) -> Iterator[str]:
    """Yield what no accepted run has, independent of its closing line."""
    results, end = journal.results, journal.end
    yield from _named(
        [f"{r.nodeid} ({r.outcome})" for r in results if r.outcome in ("failed", "error")], "did not pass"
    )
    if journal.running is not None:
        yield f"{journal.running.nodeid} never ended"
    yield from _named([test.nodeid for test in journal.not_run], "never ran")
    yield from _named([problem.name for problem in journal.problems], "fault outside the tests")
    if journal.silence is not None:
        yield f"it ends in silence: {first_line(journal.silence.message)}"
    counted = Counter(result.outcome for result in results)
    if end is not None and end.counts:
        wrong = [kind for kind in OUTCOMES if end.counts.get(kind, 0) != counted[kind]]
        listed = ", ".join(f"{end.counts.get(kind, 0)} {kind}, and there are {counted[kind]}" for kind in wrong)
        if wrong:
            yield f"its closing line has other counts than its tests: {listed}"
    if end is not None:
        yield from _named(end.not_run, "did not run, by its closing line")
    if journal.cluster is not None:
        yield from _named([first_line(problem) for problem in journal.cluster.problems], "found by the preflight")
    missed, doubted = [], []
    for result in results:
        for judged in result.measurements if result.outcome == "passed" else ():
            name = f"{result.nodeid}: {judged.metric}"
            if judged.status in ("failed", "error"):
                missed.append(name)
            elif why := inconsistency(judged, journal):
                doubted.append(f"{name}: {why}")
    yield from _named(missed, "passed, with a value that did not pass")
    yield from _named(doubted, "recorded as passed, and not by its own figures")


def _missing_facts(journal: Journal) -> Iterator[str]:
    for is_there, what in (
        (journal.run.run_id and journal.run.started_at, "run id or start time"),
        (journal.collected is not None, "list of the collected tests"),
        (journal.cluster is not None, "description of the cluster"),
        (journal.sku is not None, "SKU for its limits"),
        (journal.limit_files, "list of the files of limits in force"),
    ):
        if not is_there:
            yield f"the journal has no {what}"
    if journal.sku == CPU_REHEARSAL and not journal.run.rehearsal:
        yield f"it was judged by the limits of {CPU_REHEARSAL}"
    unsure = [file.path for file in journal.limit_files if not re.fullmatch("[0-9a-f]{64}", file.sha256)]
    yield from _named(unsure, "has no recorded digest")


def _rank_problems(journal: Journal) -> Iterator[str]:
    ranks = journal.ranks
    if not ranks:
        return
    numbers, launched = Counter(place.rank for place in ranks), set(range(journal.run.world_size))
    uuids = {place.rank: place.uuid.casefold() for place in ranks}
    for found, what in (
        (launched - set(numbers), "nothing is known of {}"),
        (set(numbers) - launched, f"{{}} is recorded, and the run had {journal.run.world_size}"),
        ({rank for rank, count in numbers.items() if count > 1}, "{} is recorded more than once"),
        ({place.rank for place in ranks if not place.host}, "the host is unknown of {}"),
        ({rank for rank in uuids if not uuids[rank].startswith(_UUIDS)}, "the UUID is unknown of the GPU of {}"),
    ):
        if found:
            yield what.format(rank_ranges(found))
    nodes = {place.node_rank for place in ranks}
    if len(nodes) != journal.run.nnodes:
        yield f"its ranks are on {len(nodes)} nodes, and the run had {journal.run.nnodes}"
    seen = Counter(place.uuid.casefold() for place in ranks)
    duplicates = [uuid for uuid, count in seen.items() if uuid and count > 1]
    yield from _named(duplicates, "is the UUID of more than one rank's GPU")
    judged_as = journal.gpu_name
    other = {name for place in ranks if place.gpu and (name := place.gpu.get("name", "")) != judged_as}
    yield from _named(sorted(other), f"is a GPU of this run, and its limits are those of {judged_as or 'no GPU'}")
