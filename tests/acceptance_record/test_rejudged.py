"""A value of a journal passes only by the figures that stand beside it, and the verdict only by its lines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from made_records import journal_of, lines

from pytest_gpucluster.acceptance_record.rejudged import doubt, verdict_again
from pytest_gpucluster.journal import Journal, JudgedMetric

BF16, BUSBW = "matmul.bf16.tflops", "nccl.all_reduce.busbw"


@pytest.fixture(scope="module")
def journal() -> Journal:
    return journal_of(lines())


def judged(journal: Journal, metric: str = BF16) -> JudgedMetric:
    return next(
        one
        for result in reversed(journal.results)
        for one in result.measurements
        if one.metric == metric and one.limit is not None
    )


@pytest.mark.parametrize("name", ["accepted", "cluster", "rehearsal", "hostile"])
def test_what_the_judge_has_passed_passes_again(name):
    journal = journal_of(lines(name))
    values = [one for r in journal.results for one in r.measurements if one.status in ("passed", "recorded")]
    assert values
    assert [doubt(one, journal) for one in values] == [""] * len(values)


@pytest.mark.parametrize("name", ["accepted", "cluster", "rehearsal", "hostile"])
def test_the_verdict_comes_again(name):
    journal = journal_of(lines(name))
    # Which of several faults rejects a run may be told by its ending alone; the word is the same.
    assert verdict_again(journal).word == journal.verdict


def changed(**values: Any) -> Callable[[JudgedMetric], JudgedMetric]:
    return lambda one: replace(one, **values)


def of_rank_3(value: float) -> Callable[[JudgedMetric], JudgedMetric]:
    return lambda one: replace(one, values={**one.values, 3: value}, intervals={})


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (changed(limit=None), "it passed, and has no limit"),
        (lambda one: replace(one, limit=replace(one.limit, min=None, min_ratio_to_median=None)), "has no limit"),
        (lambda one: replace(one, limit=replace(one.limit, source="")), "where its limit comes from"),
        (changed(status="recorded"), "it is recorded only, and has a limit"),
        (changed(value=999.0), "its value is told as 999.0"),
        (changed(value=None, values={}), "its value is told as None"),
        (changed(value=float("nan")), "its value is told as nan"),
        (changed(unit="GFLOPS"), "it is told in GFLOPS"),
        (of_rank_3(500.0), "500 TFLOPS < 700 TFLOPS (n=16384, load=burn-in) on rank 3 (gpu-01)"),
        (of_rank_3(float("nan")), "the value is NaN on rank 3 (gpu-01)"),
        (of_rank_3(2000.0), "too fast to be true"),
        (lambda one: replace(one, values={r: v for r, v in one.values.items() if r != 3}), "no value from rank 3"),
        (lambda one: replace(one, values={**one.values, 16: 730.0}), "measured by rank 16, which is no part"),
        (lambda one: replace(one, intervals={**one.intervals, 3: (600.0, 800.0)}), "is not surely above 700 TFLOPS"),
        (changed(inconclusive="it scatters"), "is inconclusive: it scatters"),
        (changed(margin=0.5), "its worst rank, margin or interval"),
        (changed(interval=(729.0, 731.0)), "its worst rank, margin or interval"),
    ],
)
def test_a_value_that_does_not_pass_is_doubted(journal, change, why):
    assert why in doubt(change(judged(journal)), journal)


def test_a_transport_that_the_limit_does_not_allow_is_doubted(journal):
    one = judged(journal, BUSBW)
    assert one.limit is not None
    assert one.limit.expect_transport == ("NET/IB",)
    assert "NET/Socket carries it" in doubt(replace(one, labels={**one.labels, "transport": "NET/Socket"}), journal)
    without = {key: label for key, label in one.labels.items() if key != "transport"}
    assert "no label says which transport" in doubt(replace(one, labels=without), journal)


def test_a_metric_of_the_sites_own_is_held_against_its_bounds(journal):
    one = replace(judged(journal), metric="site.rate", unit="GB/s", ratio_to_median=0.99)
    assert doubt(one, journal) == ""
    assert "500" in doubt(of_rank_3(500.0)(one), journal)
    assert "told to have 0.5 of" in doubt(replace(one, ratio_to_median=0.5), journal)
    assert one.limit is not None
    only_ratio = replace(one, limit=replace(one.limit, min=None))
    assert doubt(only_ratio, journal) == ""
    assert "no finite number" in doubt(of_rank_3(float("inf"))(only_ratio), journal)
