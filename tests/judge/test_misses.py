"""Values that are not surely good enough, ranks that stand behind the others, and data that went another way."""

import dataclasses
import math

import pytest
from complaints import in_order
from each import of_each
from hypothesis import given
from hypothesis import strategies as st
from verdicts import BUSBW, GB, bf16, busbw, hold

from pytest_gpucluster.judge import loader
from pytest_gpucluster.judge.limits import Limit
from pytest_gpucluster.judge.misses import margin
from pytest_gpucluster.metrics.measurement import measurement
from pytest_gpucluster.metrics.sampling import Sampling, Series, series

LATENCY = "nccl.all_reduce.latency"
RANK_3 = "rank 3 (gpu-00, GPU 3 GPU-1f2e)"


def sure(value, low, high, why=""):
    return Series(samples=(low, value, high), median=value, low=low, high=high, inconclusive=why)


def with_rank_3(series_of_rank_3, healthy=730.0):
    by_rank = {rank: [bf16(healthy)] for rank in range(8)}
    return by_rank | {3: [measurement("matmul.bf16.tflops", series_of_rank_3, unit="TFLOPS")]}


def limits(entry, tmp_path, metric="matmul.bf16.tflops"):
    path = tmp_path / "mine.yaml"
    path.write_text(f"schema_version: 1\nskus: {{H100 SXM: {{limits: {{{metric}: {{{entry}, source: us}}}}}}}}\n")
    return loader.load(path)


# Not sure --------------------------------------------------------------------------------------------------------


def test_a_value_above_the_limit_whose_interval_reaches_below_it_fails():
    verdict = hold(with_rank_3(sure(703, 697, 709)))
    assert verdict.outcome == "failed"
    assert in_order(verdict.message, f"matmul.bf16.tflops 703 TFLOPS 700 TFLOPS 95 % interval 697 709 TFLOPS {RANK_3}")
    (judged,) = verdict.measurements
    assert (judged.value, judged.worst_rank, judged.interval) == (703.0, 3, (697.0, 709.0))
    assert judged.margin == pytest.approx(-3 / 700)
    assert in_order(judged.inconclusive, "95 % interval 697 709 TFLOPS")
    assert list(judged.misses) == [3]


def test_a_value_above_the_limit_whose_whole_interval_is_above_passes_with_the_margin_of_its_low_end():
    verdict = hold(with_rank_3(sure(714, 707, 721)))
    assert verdict.outcome == "passed"
    (judged,) = verdict.measurements
    assert (judged.worst_rank, judged.inconclusive) == (3, "")
    assert judged.margin == pytest.approx(0.01)
    assert hold(with_rank_3(sure(714, 700, 721))).outcome == "passed"
    assert hold(with_rank_3(sure(714, math.nextafter(700, 0), 721))).outcome == "failed"


def test_the_lowest_end_decides_who_is_worst_and_not_the_lowest_value():
    by_rank = with_rank_3(sure(720, 701, 739))
    by_rank[5] = [measurement("matmul.bf16.tflops", sure(710, 709, 711), unit="TFLOPS")]
    (judged,) = hold(by_rank).measurements
    assert (judged.status, judged.worst_rank, judged.value) == ("passed", 3, 720.0)


def test_a_value_below_the_limit_is_a_plain_miss_however_wide_its_interval():
    verdict = hold(with_rank_3(sure(697, 690, 704, why="it scatters")))
    assert verdict.message == f"matmul.bf16.tflops 697 TFLOPS < 700 TFLOPS on {RANK_3}"
    assert verdict.measurements[0].margin == pytest.approx(-10 / 700)
    assert verdict.measurements[0].inconclusive == "it scatters"


def test_a_maximum_takes_the_high_end():
    def latency(high):
        made = measurement(LATENCY, sure(0.8, 0.7, high), unit="s", labels={"size": "4 B"})
        return {0: [made], 1: [made]}

    assert hold(latency(1.0), size=2, sku="cpu-rehearsal").outcome == "passed"
    verdict = hold(latency(1.2), size=2, sku="cpu-rehearsal")
    assert in_order(
        verdict.message,
        "nccl.all_reduce.latency 800000 us 1000000 us 95 % interval 700000 1200000 us size=4 B rank 0 rank 1",
    )


def test_with_both_bounds_each_end_is_held_against_its_own(tmp_path):
    mine = limits("min: 700 TFLOPS, max: 800 TFLOPS", tmp_path)
    assert hold(with_rank_3(sure(750, 700, 800)), limits=mine).outcome == "passed"
    assert in_order(hold(with_rank_3(sure(750, 700, 801)), limits=mine).message, "800")
    assert in_order(hold(with_rank_3(sure(750, 699, 800)), limits=mine).message, "700")


def test_samples_that_scatter_too_much_fail_even_above_the_limit():
    verdict = hold(with_rank_3(sure(780, 750, 810, why="the 95 % interval is 7.7 % wide")))
    assert verdict.outcome == "failed"
    assert in_order(verdict.message, f"matmul.bf16.tflops 95 % interval 7.7 % {RANK_3}")
    assert verdict.measurements[0].inconclusive == "the 95 % interval is 7.7 % wide"
    sampling = Sampling(warmup_seconds=0, window_seconds=1, longest_seconds=2, tolerance_ratio=0.01)
    assert hold(with_rank_3(series([730.0, 790.0] * 10, sampling, spent_seconds=20))).outcome == "failed"
    assert hold(with_rank_3(series([750.0, 750.5] * 10, sampling, spent_seconds=3))).outcome == "passed"


def test_what_is_only_recorded_notes_that_it_scatters():
    noisy = measurement("matmul.bf16.tflops", sure(5, 1, 9, why="it scatters"), unit="TFLOPS", record_only=True)
    verdict = hold({rank: [noisy] for rank in range(8)})
    assert verdict.outcome == "passed"
    assert in_order(verdict.measurements[0].reason, "rank 0 gpu-00 GPU 0 GPU-1f2e 7 ranks")


@of_each(
    "case",
    [
        ((math.nan, 740.0), "nan to 740"),
        ((720.0, math.nan), "720 to nan"),
        ((720.0, math.inf), "720 to inf"),
        ((-1.0, 740.0), "-1 to 740"),
        ((740.0, 720.0), "740 to 720"),
        ((731.0, 740.0), "731 to 740"),
    ],
)
def test_an_interval_that_makes_no_sense_is_an_error_that_names_its_rank(case):
    interval, shown = case
    for record_only in (False, True):
        good = measurement("matmul.bf16.tflops", 730.0, unit="TFLOPS", record_only=record_only)
        bad = dataclasses.replace(good, interval=interval)
        verdict = hold({rank: [bad if rank == 3 else good] for rank in range(8)})
        assert verdict.outcome == "error"
        assert in_order(verdict.message, f"matmul.bf16.tflops 730 interval {shown} {RANK_3}")


@given(st.floats(0, 1e6), st.floats(0, 1e6), st.floats(0, 1e6), st.none() | st.floats(1, 1e6), st.floats(1, 1e6))
def test_the_margin_is_negative_if_and_only_if_an_end_misses_its_bound(a, b, c, low_bound, high_bound):
    low, value, high = sorted((a, b, c))
    limit = Limit(metric="x", sku="x", unit="us", min=low_bound, max=high_bound, source="x", origin="x")
    distance = margin(measurement(LATENCY, sure(value, low, high), unit="us"), limit)
    assert (distance < 0) == (high > high_bound or (low_bound is not None and low < low_bound))


# Behind the others -----------------------------------------------------------------------------------------------


def test_a_rank_behind_the_others_fails_although_it_keeps_the_minimum():
    verdict = hold(with_rank_3(705.0, healthy=790.0))
    assert verdict.outcome == "failed"
    assert in_order(verdict.message, f"matmul.bf16.tflops 705 TFLOPS 0.8924 median 7 ranks 790 TFLOPS 0.929 {RANK_3}")
    (judged,) = verdict.measurements
    assert judged.ratio_to_median == pytest.approx(705 / 790)
    assert (judged.worst_rank, list(judged.misses)) == (3, [3])


def test_how_far_more_than_two_others_scatter_is_shown():
    def message(*others):
        return hold({rank: [bf16(value)] for rank, value in enumerate((705.0, *others))}, size=1 + len(others)).message

    assert in_order(message(780, 790, 800), "705 TFLOPS median 3 ranks 790 TFLOPS MAD 10 TFLOPS 0.929")
    assert "MAD" not in message(790, 800)
    assert "MAD" not in message(790, 790, 790), "where they do at all"


def test_of_two_ranks_the_slow_one_is_named_with_its_true_ratio(tmp_path):
    mine = limits("min: 100 TFLOPS, min_ratio_to_median: 75 %", tmp_path)
    for slow, fast in ((0, 1), (1, 0)):
        by_rank = {slow: [bf16(444.0)], fast: [bf16(740.0)]}
        verdict = hold(by_rank, size=2, limits=mine)
        assert in_order(verdict.message, "matmul.bf16.tflops 444 TFLOPS 0.6 rank 740 TFLOPS 0.75")
        assert verdict.measurements[0].worst_rank == slow
        assert verdict.measurements[0].ratio_to_median == pytest.approx(0.6)


def test_exactly_the_required_ratio_passes(tmp_path):
    mine = limits("min: 100 TFLOPS, min_ratio_to_median: 75 %", tmp_path)
    assert hold(with_rank_3(600.0, healthy=800.0), limits=mine).outcome == "passed"
    assert hold(with_rank_3(599.9, healthy=800.0), limits=mine).outcome == "failed"


def test_where_less_is_better_the_largest_is_behind(tmp_path):
    mine = limits("max: 90 us, min_ratio_to_median: 75 %", tmp_path, metric=LATENCY)
    by_rank = {rank: [measurement(LATENCY, 40 if rank == 2 else 20, unit="us")] for rank in range(4)}
    assert in_order(
        hold(by_rank, size=4, limits=mine).message,
        "nccl.all_reduce.latency 40 us median 3 ranks 20 us 0.5 0.75 rank 2 gpu-00 GPU 2 GPU-1f2e",
    )


def test_a_ratio_stands_alone_but_not_with_one_rank(tmp_path):
    mine = limits("min_ratio_to_median: 75 %", tmp_path)
    verdict = hold(with_rank_3(400.0), limits=mine)
    assert verdict.outcome == "failed"
    assert verdict.measurements[0].margin == pytest.approx(400 / 730 / 0.75 - 1)
    shipped = hold({0: [bf16(730.0)]}, size=1)
    assert (shipped.outcome, shipped.measurements[0].ratio_to_median) == ("passed", None), "the minimum decides alone"
    assert hold(with_rank_3(730.0), limits=mine).outcome == "passed"
    alone = hold({0: [bf16(730.0)]}, size=1, limits=mine)
    assert alone.outcome == "error"
    assert in_order(alone.message, "no other rank min max")
    assert f"at {alone.measurements[0].limit.origin}" in alone.text


@pytest.mark.parametrize("bad", [None, math.nan], ids=["missing", "nan"])
def test_without_every_rank_s_value_no_rank_is_called_a_straggler(bad):
    by_rank = with_rank_3(705.0, healthy=790.0)
    by_rank[6] = [] if bad is None else [bf16(bad)]
    verdict = hold(by_rank)
    assert verdict.outcome == "error"
    assert verdict.measurements[0].ratio_to_median is None


# Another way -----------------------------------------------------------------------------------------------------


def across(value, transport):
    labels = GB if transport is None else GB | {"transport": transport}
    return {rank: [busbw(value, labels=labels)] for rank in range(16)}


def test_data_that_another_transport_carried_fails_although_it_was_fast():
    assert hold(across(435.0, "NET/IB"), size=16).outcome == "passed"
    verdict = hold(across(435.0, "NET/Socket"), size=16)
    assert verdict.outcome == "failed"
    assert in_order(verdict.message, f"{BUSBW} NET/Socket NET/IB size=1 GB transport=NET/Socket")
    assert verdict.measurements[0].misses == {}
    slow = hold(across(3.0, "NET/Socket"), size=16)
    assert in_order(slow.message, f"{BUSBW} NET/Socket NET/IB 3 GB/s < 415 GB/s")
    assert "rank 0" not in slow.text
    assert slow.measurements[0].misses == {}, "what they share explains all of it"
    one = hold(across(435.0, "NET/Socket") | {9: across(3.0, "NET/Socket")[9]}, size=16)
    assert list(one.measurements[0].misses) == [9]
    assert in_order(one.text, "NET/Socket NET/IB 3 GB/s rank 9")
    verdict = hold(across(435.0, "NET/IB") | {9: across(435.0, "NET/Socket")[9]}, size=16)
    assert [judged.status for judged in verdict.measurements] == ["error", "failed"]


def test_an_unknown_transport_cannot_be_judged():
    verdict = hold(across(435.0, None), size=16)
    assert verdict.outcome == "error"
    assert in_order(verdict.message, f"{BUSBW} size=1 GB NET/IB thresholds.yaml")
    assert in_order(hold(across(3.0, None), size=16).text, "transport")
    silent = busbw(435.0, telemetry={"transport": "NCCL wrote no log"})
    assert hold({rank: [silent] for rank in range(16)}, size=16).message.endswith(": NCCL wrote no log")


def test_any_of_several_transports_will_do(tmp_path):
    mine = limits("min: 300 GB/s, expect_transport: [P2P, SHM]", tmp_path, metric=BUSBW)
    for transport, outcome in (("P2P", "passed"), ("SHM", "passed"), ("p2p", "failed"), ("", "failed")):
        by_rank = {rank: [busbw(435.0, labels={"transport": transport})] for rank in range(8)}
        assert hold(by_rank, limits=mine).outcome == outcome
    assert hold({rank: [busbw(435.0, labels=GB | {"transport": "SHM"})] for rank in range(8)}).outcome == "passed"


# The telemetry of the GPU ---------------------------------------------------------------------------------------

HOT = {"samples": 30, "throttle_share": {"hw_thermal": 0.62}, "temperature_celsius": [70, 88, 91]}
WHY = "HW thermal slowdown 62 % of the time, 91 degC"


def test_a_missed_value_is_explained_by_what_its_gpu_did():
    size = {"n": "16384"}
    healthy = {rank: [bf16(730.0, labels=size)] for rank in range(8)}
    verdict = hold(healthy | {3: [bf16(612.0, labels=size, telemetry=HOT)]})
    assert verdict.message == f"matmul.bf16.tflops 612 TFLOPS < 700 TFLOPS (n=16384): {WHY} on {RANK_3}"
    assert verdict.measurements[0].misses == {3: f"matmul.bf16.tflops 612 TFLOPS < 700 TFLOPS: {WHY}"}
    # Without telemetry of its own the whole test explains it; its own window comes before that.
    assert f": {WHY} on {RANK_3}" in hold(with_rank_3(612.0), telemetry={3: HOT, 5: {"lost": "gone"}}).message
    cool = {"samples": 30, "throttle_share": {}, "temperature_celsius": [50, 50, 50]}
    by_rank = with_rank_3(730.0) | {3: [bf16(612.0, telemetry=cool)]}
    message = "matmul.bf16.tflops 612 TFLOPS < 700 TFLOPS on "
    assert hold(by_rank, telemetry={3: HOT}).message == message + RANK_3
    verdict = hold(with_rank_3(730.0), telemetry=dict.fromkeys(range(8), HOT))
    assert (verdict.outcome, verdict.message) == ("passed", "")


def test_each_rank_that_misses_has_its_own_explanation():
    by_rank = with_rank_3(612.0) | {5: [bf16(650.0, telemetry={"lost": "gone", "samples": 1})]}
    verdict = hold(by_rank, telemetry={3: HOT})
    assert list(verdict.measurements[0].misses.values()) == [
        f"matmul.bf16.tflops 612 TFLOPS < 700 TFLOPS: {WHY}",
        "matmul.bf16.tflops 650 TFLOPS < 700 TFLOPS: the GPU was lost",
    ]


def test_the_margin_of_a_bound_of_zero_is_the_distance_itself():
    at_least = Limit(metric=BUSBW, sku="H100 SXM", unit="GB/s", min=0.0, max=None, source="us", origin="here")
    assert margin(busbw(3.0), at_least) == 3.0
