"""What every report is made from: which number stands for a test, what comes first, what did not run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from example_runs import write

from pytest_gpucluster.journal import JudgedLimit, JudgedMetric, read
from pytest_gpucluster.reports.outline import NOT_RUN, RUNNING, Outline, Row, headline, is_whole, outline

PASSED = JudgedMetric(
    metric="hbm.copy.bandwidth", unit="TB/s", status="passed", value=3.0, limit=JudgedLimit(min=2.5), margin=0.2
)


def judged(metric: str, **changes: Any) -> JudgedMetric:
    return replace(PASSED, metric=metric, **changes)


VERIFIED = judged("ddp.verified", unit="%", value=100.0, limit=JudgedLimit(min=100.0), margin=0.0)
FINDINGS = judged("gpu.findings", unit="findings", value=0.0, limit=JudgedLimit(max=0.0), margin=0.0)


@pytest.mark.parametrize(
    ("measurements", "metric"),
    [
        pytest.param([], None, id="nothing"),
        pytest.param([judged("a", margin=0.2), judged("b", margin=0.1)], "b", id="the least margin"),
        pytest.param([judged("a", margin=0.1), judged("b", status="failed", margin=-0.1)], "b", id="a miss wins"),
        pytest.param(
            [judged("a", status="failed", margin=-0.1), judged("b", status="failed", margin=-0.3)],
            "b",
            id="the worst miss",
        ),
        pytest.param(
            [judged("a", margin=0.01), judged("b", status="error", margin=None)], "b", id="what was not judged"
        ),
        pytest.param(
            [judged("a", status="recorded", limit=None, margin=None), judged("b")], "b", id="recorded comes last"
        ),
        pytest.param([VERIFIED, judged("b", margin=3.0)], "b", id="what cannot be better tells nothing"),
        pytest.param(
            [judged("a", limit=JudgedLimit(max=9.0), value=0.9, margin=0.9), judged("b", margin=2.0)],
            "b",
            id="an upper limit is kept ten times over, a lower one three times",
        ),
        pytest.param([VERIFIED, FINDINGS], "ddp.verified", id="unless there is nothing else"),
        pytest.param(
            [judged("a"), replace(VERIFIED, status="failed", value=99.0, margin=-0.01)],
            "ddp.verified",
            id="but a miss of it does",
        ),
    ],
)
def test_the_headline_is_what_decides(measurements: list[JudgedMetric], metric: str | None) -> None:
    found = headline(measurements)
    assert (None if found is None else found.metric) == metric


@pytest.mark.parametrize(
    ("one", "whole"),
    [
        (VERIFIED, True),
        (FINDINGS, True),
        (judged("share", unit="ratio", value=1.0, limit=JudgedLimit(min=1.0)), True),
        (judged("share", unit="ratio", value=0.9, limit=JudgedLimit(min=0.9)), False),
        (judged("rate", value=100.0, limit=JudgedLimit(min=100.0)), False),
        (judged("rate", value=None), False),
        (judged("rate", limit=None), False),
    ],
)
def test_all_of_something_is_no_near_miss(one: JudgedMetric, whole: bool) -> None:
    assert is_whole(one) is whole


def test_the_example_that_is_rejected(tmp_path: Path) -> None:
    seen = outline(read(write(tmp_path, "cluster") / "journal.jsonl"))
    assert (seen.word, seen.exit, seen.is_good) == ("REJECTED", 1, False)
    assert list(seen.counts) == ["failed", "error", NOT_RUN, "skipped", "passed"]
    assert [row.outcome for row in seen.worst_first] == (
        ["failed"] * 5 + ["error", NOT_RUN, "skipped"] + ["passed"] * 6 + ["skipped"]
    )
    assert [row.outcome for row in seen.bad] == ["failed"] * 5 + ["error"]
    assert {row.name for row in seen.did_not_run} == {"test_checkpoint_bandwidth", "test_qwen2_lora", "test_kubernetes"}
    margins = [judged.margin for _, judged in seen.tightest()]
    assert margins == sorted(margins, key=lambda margin: margin or 0.0)
    assert all(judged.status == "passed" and not is_whole(judged) for _, judged in seen.tightest())


def test_what_had_to_run_stands_before_what_passed_and_other_skips_behind_it() -> None:
    outcomes = (("passed", False), ("skipped", False), ("skipped", True), ("failed", False))
    rows = tuple(
        Row(nodeid=f"t.py::{number}", name=str(number), outcome=outcome, is_gap=is_gap)
        for number, (outcome, is_gap) in enumerate(outcomes)
    )
    seen = Outline(word="REJECTED", exit=1, reason="", rehearsal=False, rows=rows, counts={})
    assert [row.name for row in seen.worst_first] == ["3", "2", "0", "1"]


def test_a_run_that_was_cut_off_is_no_pass(tmp_path: Path) -> None:
    seen = outline(read(write(tmp_path, "broken") / "journal.jsonl"))
    assert (seen.word, seen.exit) == ("BROKEN", 11)
    assert [row.outcome for row in seen.bad] == [RUNNING]
    assert seen.bad[0].why == "the run ended here"
    assert "REHEARSAL" in seen.title
