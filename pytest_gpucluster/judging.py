"""Hold what all ranks measured against the limits, once, where all of it has come together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pytest_gpucluster.agreement.merge import Merged, RankOutcome, one_line
from pytest_gpucluster.judge import judge
from pytest_gpucluster.metrics import Measurement
from pytest_gpucluster.record import TestRecord
from pytest_gpucluster.reports.terminal import measurement_table

if TYPE_CHECKING:
    from pytest_gpucluster.run import Run


def judge_merged(run: Run, record: TestRecord, merged: Merged, outcomes: Sequence[RankOutcome]) -> Merged:
    """Judge the measurements of a test; return what the test's outcome is then.

    A criterion that measured nothing is an error. A test that has failed already keeps its failure, unless a limit is
    missed too: a verdict about the hardware outweighs a broken run. The judged values go on record in any case.
    """
    by_rank = {o.rank: [Measurement.from_json(m) for m in o.measurements] for o in outcomes}
    criterion = record.test.criterion
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
        limits=run.limits,
        sku=run.sku(gpu),
        gpu_name=gpu,
    )
    record.measurements = [judged.to_json() for judged in judgement.measurements]
    if judgement.outcome == "passed" or merged.outcome == "failed":
        return merged
    if merged.outcome == "error" and judgement.outcome != "failed":
        return merged
    text = f"{judgement.text}\n\n{measurement_table(record.measurements)}"
    return Merged(
        outcome=judgement.outcome,
        message=one_line(judgement.message),
        text=text if merged.outcome == "passed" else f"{text}\n\n{merged.text}",
        culprits=sorted(
            {m.worst_rank for m in judgement.measurements if m.status == "failed" and m.worst_rank is not None}
        ),
        released=merged.released,
        ranks=merged.ranks,
        dirty=merged.dirty,
    )
