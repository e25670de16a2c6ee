import dataclasses

import pytest

from pytest_gpucluster.benchmarks.collectives import CollectiveResult, busbw_factor
from pytest_gpucluster.metrics.sampling import Sampling, series

SAMPLING = Sampling(warmup_seconds=0, window_seconds=1, longest_seconds=1, tolerance_ratio=0.01)


def result(seconds=0.01, *, slowest=0.02, mean=0.016, ranks=8, noisy=False):
    times = [seconds * (2 if noisy and index % 2 else 1) for index in range(10)]
    return CollectiveResult(
        collective="all_reduce",
        payload_bytes=10**9,
        dtype="bf16",
        ranks=ranks,
        calls_per_window=1,
        windows_per_sample=1,
        latency=series(times, SAMPLING, spent_seconds=3),
        slowest_latency=series([slowest] * 10, SAMPLING, spent_seconds=3),
        mean_latency=series([mean] * 10, SAMPLING, spent_seconds=3),
        verified_elements=1,
        sampling=SAMPLING,
    )


def test_one_rank_has_no_busbw():
    with pytest.raises(ValueError, match=r"2 ranks and.* 1"):
        busbw_factor(1)
    alone = result(ranks=1)
    assert alone.busbw is alone.slowest_busbw is alone.average_busbw is None
    assert alone.algbw.median == pytest.approx(100e9)


@pytest.mark.parametrize(
    ("collective", "factors"),
    [
        ("all_reduce", (1, 1.5, 1.75)),
        ("all_gather", (0.5, 0.75, 0.875)),
        ("reduce_scatter", (0.5, 0.75, 0.875)),
        ("all_to_all", (0.5, 0.75, 0.875)),
        ("broadcast", (1, 1, 1)),
        ("send_recv", (1, 1, 1)),
    ],
)
def test_factors_are_those_of_nccl_tests(collective, factors):
    assert tuple(busbw_factor(ranks, collective) for ranks in (2, 4, 8)) == factors
    moved = dataclasses.replace(result(), collective=collective)
    assert moved.busbw.median == pytest.approx(factors[2] * moved.algbw.median)
    assert moved.slowest_busbw.median == pytest.approx(factors[2] * 50e9)


def test_an_unknown_collective_has_no_busbw():
    with pytest.raises(ValueError, match="not 'gather'; did you mean 'all_gather'"):
        busbw_factor(8, "gather")


def test_bandwidths_are_those_of_their_times():
    eight = result()
    assert eight.algbw.median == pytest.approx(100e9)
    assert eight.busbw.median == pytest.approx(175e9)
    assert eight.slowest_busbw.median == pytest.approx(87.5e9)
    assert eight.average_busbw.median == pytest.approx(1e9 / 0.016 * 1.75)


def test_the_interval_of_a_rate_has_its_ends_the_right_way_round():
    rate = result(noisy=True).busbw
    assert rate.low < rate.high
    assert rate.low == pytest.approx(87.5e9)
    assert rate.high == pytest.approx(175e9)


def test_a_rate_is_as_inconclusive_as_its_time():
    noisy = result(noisy=True)
    assert noisy.latency.inconclusive != ""
    assert noisy.algbw.inconclusive == noisy.busbw.inconclusive == noisy.latency.inconclusive
    assert result().busbw.inconclusive == ""
