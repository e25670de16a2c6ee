"""Why a run is not accepted: its values and its verdict, judged again from what its journal holds.

A journal is a file that many people can write to. What it states counts only where its own lines support it; the
verdict's word alone proves nothing. What is found here is a journal that contradicts itself. One that was made up as a
whole contradicts nothing; against that only its digest helps, kept out of everyone's reach.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from pytest_gpucluster.errors import MeasurementError
from pytest_gpucluster.journal import verdict
from pytest_gpucluster.journal.fields import JudgedLimit, JudgedMetric
from pytest_gpucluster.journal.journal import Journal
from pytest_gpucluster.journal.records import OUTCOMES, RankPlace
from pytest_gpucluster.journal.verdict import ACCEPTED
from pytest_gpucluster.judge.judge import judge
from pytest_gpucluster.judge.limits import Limit, Thresholds
from pytest_gpucluster.metrics import datasheets, measurement
from pytest_gpucluster.metrics.catalogue import Metric
from pytest_gpucluster.metrics.datasheets import CPU_REHEARSAL
from pytest_gpucluster.metrics.measurement import Measurement
from pytest_gpucluster.text import first_line, rank_ranges


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


_NAMED = 3
_UUIDS = ("gpu-", "mig-")
"""How the UUID of a GPU, or of a slice of one, begins; what NVML cannot tell may be any other text."""


def objections(journal: Journal) -> tuple[str, ...]:
    """Return every reason why this run accepts nothing; none, where it does."""
    return tuple(_found(journal))


def _found(journal: Journal) -> Iterator[str]:
    if journal.cut:
        yield "the journal's last line is cut off"
    if journal.end is None:
        yield f"nobody closed the journal: {journal.reason}"
    if journal.run.rehearsal:
        yield "it is a rehearsal on cpu, which says nothing about hardware"
    elif journal.run.device != "cuda":
        yield f"it ran on {journal.run.device or 'nobody knows what'}, not on cuda"
    if journal.run.selection:
        yield "only a selection of the tests ran"
    if journal.run.merged_despite:
        yield f"it is merged of runs of different clusters: {first_line('; '.join(journal.run.merged_despite))}"
    if journal.verdict != ACCEPTED or journal.exit != 0:
        yield f"its verdict is {journal.verdict}, exit code {journal.exit}: {first_line(journal.reason)}"
    else:
        again = verdict_again(journal)
        if again.word != ACCEPTED:
            yield f"its last line says {ACCEPTED}, and its other lines make it {again.word}: {again.reason}"
    yield from _contradictions(journal)
    yield from _doubts(journal)
    yield from _unknown(journal)
    yield from _of_ranks(journal)


def _contradictions(journal: Journal) -> Iterator[str]:
    """Yield what no accepted run has, whatever its closing line says."""
    bad = [result for result in journal.results if result.outcome in ("failed", "error")]
    if bad:
        yield _named([f"{result.nodeid} ({result.outcome})" for result in bad], "did not pass")
    if journal.running is not None:
        yield f"{journal.running.nodeid} never ended"
    if journal.not_run:
        yield _named([test.nodeid for test in journal.not_run], "never ran")
    if journal.problems:
        yield _named([problem.name for problem in journal.problems], "went wrong outside the tests")
    if journal.silence is not None:
        yield f"it ends in silence: {first_line(journal.silence.message)}"
    told = journal.end.counts if journal.end is not None else {}
    counted = Counter(result.outcome for result in journal.results)
    wrong = [kind for kind in OUTCOMES if told.get(kind, 0) != counted[kind]]
    if told and wrong:
        shown = ", ".join(f"{told.get(kind, 0)} {kind}, and there are {counted[kind]}" for kind in wrong)
        yield f"its last line counts other tests than it holds: {shown}"
    if journal.end is not None and journal.end.not_run:
        yield _named(list(journal.end.not_run), "did not run, its last line says")
    missed = [
        f"{result.nodeid}: {judged.metric}"
        for result in journal.results
        if result.outcome == "passed"
        for judged in result.measurements
        if judged.status in ("failed", "error")
    ]
    if missed:
        yield _named(missed, "passed with a value that did not")
    if journal.cluster is not None and journal.cluster.problems:
        yield _named([first_line(problem) for problem in journal.cluster.problems], "found before the first test")


def _doubts(journal: Journal) -> Iterator[str]:
    """Yield what passed on record and does not pass by the figures beside it."""
    passed = [result for result in journal.results if result.outcome == "passed"]
    found = [
        f"{result.nodeid}: {judged.metric}: {why}"
        for result in passed
        for judged in result.measurements
        if judged.status in ("passed", "recorded") and (why := doubt(judged, journal))
    ]
    if found:
        yield _named(found, "passed on record, and not by what stands beside it")


def _unknown(journal: Journal) -> Iterator[str]:
    """Yield what a record must know and the journal does not tell."""
    if not (journal.run.run_id and journal.run.started_at):
        yield "the journal does not say which run it is of, and when that began"
    if journal.collected is None:
        yield "the journal does not say which tests were to run"
    if journal.cluster is None:
        yield "the journal does not say what the cluster is"
    if journal.limits is None or journal.limits.sku is None:
        yield "the journal does not say for which SKU it was judged"
    elif journal.limits.sku == CPU_REHEARSAL and not journal.run.rehearsal:
        yield f"it was judged by the limits of {CPU_REHEARSAL}"
    if journal.limits is None or not journal.limits.files:
        yield "the journal does not say which files of limits were in force"
    else:
        unsure = [path for path, digest in journal.limits.files if not re.fullmatch("[0-9a-f]{64}", digest)]
        if unsure:
            yield _named(unsure, "has no digest on record")


def _of_ranks(journal: Journal) -> Iterator[str]:
    """Yield what a record must know of the ranks, and where they are not those of the run."""
    ranks: tuple[RankPlace, ...] = journal.cluster.ranks if journal.cluster is not None else ()
    if not ranks:
        return
    numbers, launched = Counter(place.rank for place in ranks), set(range(journal.run.world_size))
    absent, strange = launched - set(numbers), set(numbers) - launched
    if absent:
        yield f"nothing is known of {rank_ranges(absent)}"
    if strange:
        yield f"{rank_ranges(strange)} is on record, and the run had {journal.run.world_size}"
    repeated = [rank for rank, count in numbers.items() if count > 1]
    if repeated:
        yield f"{rank_ranges(repeated)} is on record more than once"
    nodes = {place.node_rank for place in ranks}
    if len(nodes) != journal.run.nnodes:
        yield f"its ranks are on {len(nodes)} nodes, and the run had {journal.run.nnodes}"
    homeless = [place.rank for place in ranks if not place.host]
    if homeless:
        yield f"no host is known of {rank_ranges(homeless)}"
    uuids = {place.rank: (place.gpu or {}).get("uuid", "").casefold() for place in ranks}
    nameless = [rank for rank, uuid in uuids.items() if not uuid.startswith(_UUIDS)]
    if nameless:
        yield f"no UUID is known of the GPU of {rank_ranges(nameless)}"
    seen = Counter((place.gpu or {}).get("uuid", "").casefold() for place in ranks)
    twice = [uuid for uuid, count in seen.items() if uuid and count > 1]
    if twice:
        yield _named(twice, "is the UUID of more than one rank's GPU")
    judged_as = journal.limits.gpu_name if journal.limits is not None else None
    other = {name for place in ranks if place.gpu and (name := place.gpu.get("name", "")) != judged_as}
    if other:
        yield _named(sorted(other), f"is a GPU of this run, and its limits are those of {judged_as or 'no GPU'}")


def _named(names: list[str], what: str) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return f"{', '.join(names[:_NAMED])}{more}: {what}"
