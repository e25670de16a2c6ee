"""What every report is made from: which number stands for a test, and how long a run took."""

import math
from dataclasses import replace
from datetime import datetime, timezone

from each import of_each

from pytest_gpucluster.journal.journal import Journal
from pytest_gpucluster.journal.records import End, PartOfTime, Run, Started, TestResult
from pytest_gpucluster.judge.judged import JudgedLimit, JudgedMetric
from pytest_gpucluster.metrics.time_budget import PARTS
from pytest_gpucluster.reports.registry import FILES, render
from pytest_gpucluster.reports.summary import GROUPS, Row, headline, is_whole, moment, run_seconds
from pytest_gpucluster.reports.tables import time_text
from pytest_gpucluster.text import duration_text

PASSED = JudgedMetric(
    metric="hbm.copy.bandwidth", unit="TB/s", status="passed", value=3.0, limit=JudgedLimit(min=2.5), margin=0.2
)


def judged(metric, **changes):
    return replace(PASSED, metric=metric, **changes)


MOST = JudgedLimit(max=1.0)
VERIFIED = judged("ddp.verified", unit="%", value=100.0, limit=JudgedLimit(min=100.0), margin=0.0)
FINDINGS = judged("gpu.findings", unit="findings", value=0.0, limit=JudgedLimit(max=0.0), margin=0.0)

HEADLINES = {
    "nothing": ([], None),
    "the least margin": ([judged("a", margin=0.2), judged("b", margin=0.1)], "b"),
    "a miss wins": ([judged("a", margin=0.1), judged("b", status="failed", margin=-0.1)], "b"),
    "the worst miss": ([judged("a", status="failed", margin=-0.1), judged("b", status="failed", margin=-0.3)], "b"),
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
def test_the_headline_is_what_decides(case):
    measurements, metric = HEADLINES[case]
    found = headline(measurements)
    assert (None if found is None else found.metric) == metric


def test_what_equals_its_limit_without_scatter_is_no_near_miss():
    whole = [VERIFIED, FINDINGS, judged("share", unit="ratio", value=1.0, limit=JudgedLimit(min=1.0))]
    whole.append(judged("ports", unit="ports", value=8.0, limit=JudgedLimit(min=8.0)))
    others = [
        judged("share", unit="ratio", value=0.9, limit=JudgedLimit(min=0.8)),
        judged("rate", value=100.0, limit=JudgedLimit(min=100.0), interval=(100.0, 101.0)),
        judged("rate", value=None, limit=JudgedLimit(min=100.0)),
    ]
    assert [is_whole(one) for one in (*whole, *others)] == [True] * 4 + [False] * 3


def test_every_criterion_has_a_group():
    from pytest_gpucluster.config.workload import CRITERIA

    groups = {name: Row(nodeid="a", name="a", outcome="passed", criterion=name).group for name in CRITERIA}
    assert "other" not in groups.values(), groups
    assert {groups["dns"], groups["matmul.search"], groups["links"], groups["lora_tiny"]} == set(GROUPS[:-1])
    assert Row(nodeid="a", name="a", outcome="passed").group == "other"


# ---- times

BEGAN = "2026-11-21T09:00:00+00:00"


def journal(**changes):
    return replace(Journal(run=Run(run_id="x", started_at=BEGAN)), **changes)


def test_a_time_is_read_with_its_zone_and_else_is_utc():
    assert moment("2026-11-21T09:00:00z") == datetime(2026, 11, 21, 9, tzinfo=timezone.utc)
    assert moment("2026-11-21T09:00:00") == datetime(2026, 11, 21, 9, tzinfo=timezone.utc)
    assert moment("yesterday") is None


def test_a_run_lasts_until_its_end_or_the_last_that_is_known():
    assert run_seconds(journal(end=End(verdict="BROKEN", exit=11, at="2026-11-21T09:01:00Z"))) == 60
    result = TestResult(nodeid="a", outcome="passed", started_at="2026-11-21T09:00:10Z", duration_seconds=7)
    assert run_seconds(journal(results=(result,))) == 17
    assert run_seconds(replace(journal(results=(result,)), run=Run(run_id="x", started_at=""))) == 7
    assert run_seconds(journal(running=Started(nodeid="b", at="2026-11-21T09:00:30Z"), results=(result,))) == 30


@of_each(
    "case",
    [
        (began, seconds)
        for seconds in (1e300, 1e12, -1e12, math.inf, math.nan)
        for began in (BEGAN, "9999-12-31T23:59:59-14:00", "0001-01-01T00:00:00+14:00", "")
    ],
)
def test_no_time_of_a_test_breaks_a_report(case):
    began, seconds = case
    tests = tuple(
        TestResult(nodeid=name, outcome="passed", started_at=began, duration_seconds=each)
        for name, each in (("a", seconds), ("b", seconds), ("c", -seconds), ("d", 1e308), ("e", 1e308))
    )
    found = journal(results=tests, running=Started(nodeid="f", at="2026-11-21T09:00:30Z"))
    assert run_seconds(found) == 30
    strange = replace(found, run=Run(run_id="x", started_at=began))
    for kind in FILES:
        assert render(kind, strange)


def test_a_minute_is_never_sixty_seconds_and_what_is_no_duration_is_unknown():
    assert {duration_text(seconds) for seconds in (math.nan, math.inf, -1.0, 1e300)} == {"unknown"}
    assert duration_text(59.96) == "1 min 0 s"
    assert duration_text(3599.7) == "1 h 0 min"


def test_the_parts_of_a_test_are_shown_if_all_are_known():
    def text(*seconds):
        values = [*seconds, *[0.0] * (len(PARTS) - len(seconds))] if seconds else []
        spent = {part: PartOfTime(seconds=each) for part, each in zip(PARTS, values, strict=False)}
        return time_text(TestResult(nodeid="a", outcome="passed", spent=spent))

    assert [text(), text(math.nan), text(-1.0), text(1.0, math.inf)] == [""] * 4
    assert text(1.0, 0.04, 2.0) == "set-up 1.0, measuring 2.0"
