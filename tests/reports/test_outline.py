"""What every report is made from: which number stands for a test, what comes first, what did not run."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from each import of_each

from pytest_gpucluster.journal.fields import JudgedLimit, JudgedMetric
from pytest_gpucluster.reports.summary import headline, is_whole

PASSED = JudgedMetric(
    metric="hbm.copy.bandwidth", unit="TB/s", status="passed", value=3.0, limit=JudgedLimit(min=2.5), margin=0.2
)


def judged(metric: str, **changes: Any) -> JudgedMetric:
    return replace(PASSED, metric=metric, **changes)


MOST = JudgedLimit(max=1.0)
VERIFIED = judged("ddp.verified", unit="%", value=100.0, limit=JudgedLimit(min=100.0), margin=0.0)
FINDINGS = judged("gpu.findings", unit="findings", value=0.0, limit=JudgedLimit(max=0.0), margin=0.0)


HEADLINES: dict[str, tuple[list[JudgedMetric], str | None]] = {
    "nothing": ([], None),
    "the least margin": ([judged("a", margin=0.2), judged("b", margin=0.1)], "b"),
    "a miss wins": ([judged("a", margin=0.1), judged("b", status="failed", margin=-0.1)], "b"),
    "the worst miss": (
        [judged("a", status="failed", margin=-0.1), judged("b", status="failed", margin=-0.3)],
        "b",
    ),
    "the miss that explains the others, however far they miss": (
        [
            judged("lora.resume_error", status="failed", margin=-90.0),
            judged("lora.loss_error", status="failed", margin=-3.0),
            judged("lora.gradient_error", status="failed", margin=-2.0),
            judged("lora.tokens_per_second", status="failed", margin=-99.0),
        ],
        "lora.gradient_error",
    ),
    "what is wrong on one rank, before what all have of it": (
        [
            judged(
                "x.gradient_error", status="failed", values={0: 2.0, 1: 2.0}, limit=JudgedLimit(max=1.0), margin=-1.0
            ),
            judged("x.loss_error", status="failed", values={0: 0.5, 1: 1.1}, limit=MOST, margin=-0.1),
        ],
        "x.loss_error",
    ),
    "what was not judged": ([judged("a", margin=0.01), judged("b", status="error", margin=None)], "b"),
    "recorded comes last": ([judged("a", status="recorded", limit=None, margin=None), judged("b")], "b"),
    "what cannot be better comes last": ([VERIFIED, judged("b", margin=3.0)], "b"),
    "an upper limit is kept ten times over, a lower one three times": (
        [judged("a", limit=JudgedLimit(max=9.0), value=0.9, margin=0.9), judged("b", margin=2.0)],
        "b",
    ),
    "unless there is nothing else": ([VERIFIED, FINDINGS], "ddp.verified"),
    "but a miss of it does": (
        [judged("a"), replace(VERIFIED, status="failed", value=99.0, margin=-0.01)],
        "ddp.verified",
    ),
}


@of_each("case", list(HEADLINES))
def test_the_headline_is_what_decides(case: str) -> None:
    measurements, metric = HEADLINES[case]
    found = headline(measurements)
    assert (None if found is None else found.metric) == metric


def test_all_of_something_is_no_near_miss() -> None:
    whole = [VERIFIED, FINDINGS, judged("share", unit="ratio", value=1.0, limit=JudgedLimit(min=1.0))]
    others = [
        judged("share", unit="ratio", value=0.9, limit=JudgedLimit(min=0.9)),
        judged("rate", value=100.0, limit=JudgedLimit(min=100.0)),
        judged("rate", value=None),
    ]
    assert [is_whole(one) for one in (*whole, *others)] == [True] * 3 + [False] * 3
