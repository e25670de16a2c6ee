"""A value of a journal passes only by its own figures, and the verdict only by its lines."""

from dataclasses import replace

import pytest
from each import of_each
from journal_lines import journal_of
from made_records import lines

from pytest_gpucluster.analysis.certificate_blockers import inconsistency

BF16, BUSBW = "matmul.bf16.tflops", "nccl.all_reduce.busbw"


@pytest.fixture(scope="module")
def journal():
    return journal_of(lines())


def judged(journal, metric=BF16):
    return next(
        one
        for result in reversed(journal.results)
        for one in result.measurements
        if one.metric == metric and one.limit is not None
    )


@of_each("name", ["accepted", "cluster", "rehearsal", "hostile"])
def test_what_the_judge_has_passed_passes_again_and_so_does_the_verdict(name):
    journal = journal_of(lines(name))
    values = [one for r in journal.results for one in r.measurements if one.status in ("passed", "recorded")]
    assert values
    assert [inconsistency(one, journal) for one in values] == [""] * len(values)
    # Which of several faults rejects a run may be visible in its closing line only; the word is the same.
    assert journal.recompute_verdict(topology="").word == journal.verdict


def changed(**values):
    return lambda one: replace(one, **values)


def of_rank_3(value):
    return lambda one: replace(one, values={**one.values, 3: value}, intervals={})


@of_each(
    "case",
    [
        (changed(limit=None), "no limit"),
        (lambda one: replace(one, limit=replace(one.limit, min=None, min_ratio_to_median=None)), "no limit"),
        (lambda one: replace(one, limit=replace(one.limit, source="")), "its limit has no source"),
        (changed(status="recorded"), "recorded only"),
        (changed(value=999.0), "999.0"),
        (changed(value=None, values={}), "None"),
        (changed(value=float("nan")), "nan"),
        (changed(unit="GFLOPS"), "GFLOPS"),
        (of_rank_3(500.0), "500 TFLOPS < 700 TFLOPS (n=16384, load=burn-in) on rank 3 (gpu-01)"),
        (of_rank_3(float("nan")), "NaN on rank 3 (gpu-01)"),
        (of_rank_3(2000.0), "too fast"),
        (lambda one: replace(one, values={r: v for r, v in one.values.items() if r != 3}), "rank 3"),
        (lambda one: replace(one, values={**one.values, 16: 730.0}), "rank 16"),
        (lambda one: replace(one, intervals={**one.intervals, 3: (600.0, 800.0)}), "above 700 TFLOPS"),
        (changed(inconclusive="it scatters"), "inconclusive: it scatters"),
        (changed(margin=0.5), "margin or interval"),
        (changed(interval=(729.0, 731.0)), "margin or interval"),
    ],
)
def test_a_value_that_does_not_pass_is_doubted(journal, case):
    change, why = case
    assert why in inconsistency(change(judged(journal)), journal)


def test_a_transport_that_the_limit_does_not_allow_is_doubted(journal):
    one = judged(journal, BUSBW)
    assert one.limit.expect_transport == ("NET/IB",)
    assert "NET/Socket" in inconsistency(replace(one, labels={**one.labels, "transport": "NET/Socket"}), journal)
    without = {key: label for key, label in one.labels.items() if key != "transport"}
    assert "transport" in inconsistency(replace(one, labels=without), journal)


def test_a_metric_of_the_sites_own_is_held_against_its_bounds(journal):
    one = replace(judged(journal), metric="site.rate", unit="GB/s", ratio_to_median=0.99)
    assert inconsistency(one, journal) == ""
    assert "500" in inconsistency(of_rank_3(500.0)(one), journal)
    assert "0.5" in inconsistency(replace(one, ratio_to_median=0.5), journal)
    assert one.limit is not None
    only_ratio = replace(one, limit=replace(one.limit, min=None))
    assert inconsistency(only_ratio, journal) == ""
    assert "finite" in inconsistency(of_rank_3(float("inf"))(only_ratio), journal)
