"""The judgement on the measurements of a test, where those of all ranks have been collected: once, for all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from typing import TYPE_CHECKING

from pytest_gpucluster.agreement.exchange import Merged, RankOutcome, rehearsed_too_slowly
from pytest_gpucluster.errors import MeasurementError
from pytest_gpucluster.journal.test_record import TestRecord, unique
from pytest_gpucluster.judge.judge import Judgement, judge
from pytest_gpucluster.judge.judged import cause_order
from pytest_gpucluster.judge.limits import demand, looser
from pytest_gpucluster.metrics import measurement
from pytest_gpucluster.metrics.measurement import Measurement
from pytest_gpucluster.text import first_line

if TYPE_CHECKING:
    from pytest_gpucluster.session.run import Run


def judge_merged(run: Run, record: TestRecord, merged: Merged, outcomes: Sequence[RankOutcome]) -> Merged:
    """Judge the measurements of a test; return what the test's outcome is then.

    A criterion that measured nothing is an error. A test that has failed already keeps its failure, unless a limit is
    missed too: a verdict about the hardware outweighs a broken run. The judged values are recorded in any case.
    """
    criterion = record.test.criterion
    record.telemetry = {o.rank: o.telemetry for o in outcomes if o.telemetry}
    try:
        by_rank = {o.rank: [Measurement.from_json(m) for m in o.measurements] for o in outcomes}
    except MeasurementError as error:  # such as a metric that only some ranks know
        if merged.outcome != "passed":
            return merged
        return Merged(outcome="error", message=first_line(str(error)), text=str(error), ranks=merged.ranks)
    if not any(by_rank.values()):
        if criterion is None or merged.outcome != "passed":
            return merged
        message = f"criterion {criterion} has measured nothing: nothing is accepted without a measurement"
        return Merged(outcome="error", message=message, text=message, ranks=merged.ranks)
    gpu = run.gpu_name()
    judgement = judge(
        by_rank,
        world=dict(run.names),
        node_of=run.node_of(),
        limits=run.limits.slower(run.slowdown),
        sku=run.sku(gpu),
        gpu_name=gpu,
        telemetry=record.telemetry,
        host_of=dict(enumerate(run.roll.hosts)),
    )
    if run.settings.thresholds is not None:
        judgement = _with_shipped(run, judgement, by_rank)
    if run.baseline is not None:
        judgement, notes = run.baseline.compare(
            judgement,
            nodeid=record.test.nodeid,
            name=record.test.name,
            conditions=run.conditions(run.roll.who),
            names=run.names,
        )
        record.properties = unique([*record.properties, *notes])
    if run.rehearsal:
        judgement, slow = _rehearsed(judgement)
        if slow is not None and (merged.outcome, judgement.outcome) == ("passed", "passed"):
            merged = rehearsed_too_slowly(slow)
    record.measurements = [judged.to_json() for judged in judgement.measurements]
    if not merged.too_slow:
        record.unjudged = _unjudged(judgement, by_rank, sku=run.sku(gpu), rehearsal=run.rehearsal)
    if (
        judgement.outcome == "passed"
        or merged.outcome == "failed"
        or (merged.too_slow and judgement.outcome == "error")
    ):
        return merged  # of a body that was ended early, values are missing
    if merged.outcome == "error" and judgement.outcome != "failed":
        return merged
    missed: dict[int, str] = {}
    for judged in sorted(judgement.measurements, key=cause_order):
        for rank, what in judged.misses.items():
            missed.setdefault(rank, what)
    return Merged(
        outcome=judgement.outcome,
        message=first_line(judgement.message),
        text=judgement.text if merged.outcome == "passed" else f"{judgement.text}\n\n{merged.text}",
        culprits=sorted(missed),
        released=[rank for rank in merged.released if rank not in missed],
        ranks=[
            *({"rank": rank, "outcome": "failed", "message": why} for rank, why in sorted(missed.items())),
            *(row for row in merged.ranks if row["rank"] not in missed),
        ],
        group_invalid=merged.group_invalid,
        judged=True,
    )


def _unjudged(
    judgement: Judgement, by_rank: Mapping[int, Sequence[Measurement]], *, sku: str | None, rehearsal: bool
) -> str:
    """Return why no limit judges a test, and what to do: nothing is accepted by that. "" if one does.

    That is where the limits only record all that the test asked for, or all rates of hardware among it: a ratio to the
    other ranks passes where all are slow alike. The floors of a rehearsal say nothing about rates.
    """
    asked = {
        (measured.metric, frozenset(measured.labels.items()))
        for measurements in by_rank.values()
        for measured in measurements
        if not measured.record_only
    }
    values = [judged for judged in judgement.measurements if (judged.metric, frozenset(judged.labels.items())) in asked]
    rates = [] if rehearsal else [judged for judged in values if measurement.known(judged.metric).is_rate]
    for some in (rates, values):
        if some and all(judged.status == "recorded" for judged in some):
            return (
                f"no limit for {some[-1].metric} on {sku}: set one by gpucluster thresholds calibrate, or in a file for"
                f" --gpucluster-thresholds; {some[-1].reason}"
            )
    return ""


def _with_shipped(run: Run, judgement: Judgement, by_rank: Mapping[int, Sequence[Measurement]]) -> Judgement:
    """Return a judgement with the shipped limit added to each of the site's that asks for less.

    A value that the site leaves without a limit that the shipped ones have is a deviation, and recorded as one.
    """
    asked = {measured.metric for each in by_rank.values() for measured in each if not measured.record_only}
    measurements = []
    for judged in judgement.measurements:
        shipped = run.shipped_limit(judged.metric, judged.labels) if judged.metric in asked else None
        if shipped is not None and judged.limit is not None and looser(judged.limit, shipped, judged.unit):
            judged = replace(judged, shipped=shipped)
        elif shipped is not None and judged.status == "recorded":
            run.deviate(
                f"{judged.metric} is recorded only, by the site's limits; shipped is {demand(shipped, judged.unit)}"
            )
        measurements.append(judged)
    return replace(judgement, measurements=tuple(measurements))


def _rehearsed(judgement: Judgement) -> tuple[Judgement, str | None]:
    """Return a judgement without what did not settle, and the first of that: a busy CPU says nothing about a GPU."""
    unsettled = [judged for judged in judgement.measurements if judged.unsettled]
    if not unsettled:
        return judgement, None
    measurements = tuple(
        replace(judged, status="recorded", reason=f"too slow to rehearse here: {judged.reason}", misses={})
        if judged.unsettled
        else judged
        for judged in judgement.measurements
    )
    if any(judged.status == "failed" for judged in measurements):
        return replace(judgement, measurements=measurements), unsettled[0].reason
    errors = [judged.reason for judged in measurements if judged.status == "error"]
    text = "\n".join(errors)
    settled = Judgement(
        outcome="error" if errors else "passed", message=first_line(text), text=text, measurements=measurements
    )
    return settled, unsettled[0].reason


def keep_interrupted(
    run: Run,
    record: TestRecord,
    *,
    message: str,
    measured: Sequence[Measurement],
    properties: Sequence[tuple[str, object]],
) -> None:
    """Record what rank 0 has measured in a test whose body was interrupted: an error, and never a pass.

    The test comes to no other end, and the other ranks report nothing any more. A test that has measured nothing is
    reported by the end of the run.
    """
    if run.rank != 0 or not measured:
        return
    own = RankOutcome(
        rank=0, outcome="error", message=message, text=message, measurements=[each.to_json() for each in measured]
    )
    merged = Merged(
        outcome="error", message=message, text=message, ranks=[{"rank": 0, "outcome": "error", "message": message}]
    )
    merged = judge_merged(run, record, merged, [own])
    spent = datetime.now(timezone.utc) - datetime.fromisoformat(record.started_at)
    record.properties = unique([*record.properties, *properties])
    seconds = max(0.0, spent.total_seconds())
    record.add("call", outcome="failed", message=merged.message, text=merged.text, seconds=seconds, merged=merged)
    run.send(record.line())
