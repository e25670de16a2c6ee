"""Who is behind the fleet, and who is not."""

from __future__ import annotations

import random

from written_runs import MATMUL, case, measured, place, read

from pytest_gpucluster.analysis.fleet import NodeRun, fleet, outliers


def node(number, *values, metric="matmul.bf16.tflops", sku="H100 SXM", limit=None, width=0.005, **run):
    host = f"gpu-{number:03}"
    ranks = [place(rank, host=host) for rank in range(len(values))]
    line = measured(list(values), metric, limit=limit, width=width)
    return NodeRun(path=f"{host}.jsonl", journal=read(case(MATMUL, "passed", line), ranks=ranks, sku=sku, **run))


def found(answers, **more):
    return [(each.node, each.rank, each.judged.metric) for each in outliers(fleet(answers), **more)]


def healthy(count, gpus=8, seed=1, middle=730.0):
    draws = random.Random(seed)
    return [node(number, *(draws.gauss(middle, 3) for _ in range(gpus))) for number in range(count)]


def test_a_gpu_far_behind_all_others_is_named_and_the_healthy_are_not():
    slow = node(99, 730, 729, 731, 640, 730, 732, 728, 730)
    assert found([*healthy(8), slow]) == [("gpu-099", 3, "matmul.bf16.tflops")]
    assert found(healthy(64)) == []


def test_the_healthy_are_rarely_named_however_alike_they_are():
    alike = [node(number, *([730.0] * 8)) for number in range(7)]
    a_bit = node(8, *([729.0] * 8))
    assert found([*alike, a_bit]) == [], "one in a thousand is no fault, even without scatter"
    assert sum(len(found(healthy(32, seed=seed))) for seed in range(20)) == 0


def test_half_of_the_fleet_may_be_slow_and_the_other_half_is_no_outlier():
    half = [node(number, *([730.0 + number] * 2)) for number in range(5)]
    slow = [node(number, *([500.0 + number] * 2)) for number in range(5, 9)]
    assert {each[0] for each in found([*half, *slow])} <= {f"gpu-{number:03}" for number in range(5, 9)}


def test_only_like_numbers_are_compared_and_less_is_better_where_it_is():
    for value in ("NaN", -3, "Infinity"):
        assert found([*healthy(4, gpus=2), node(9, 730, value)]) == [], "left to the limits"
    assert found([*healthy(6), node(9, *([500.0] * 8), sku="H200 SXM")]) == []
    assert found([*healthy(6), node(9, *([500.0] * 4))]) == [], "with another number of ranks"
    assert found([node(1, *([730.0] * 7), 200)]) == [], "one node is no fleet"
    cool = [node(number, 60, metric="gpu.temperature") for number in range(8)]
    assert found([*cool, node(9, 80, metric="gpu.temperature")]) == [], "a state of the moment"
    late = "nccl.all_reduce.latency"
    fast = [node(number, 20 + number / 10, metric=late) for number in range(8)]
    assert found([*fast, node(9, 60, metric=late)]) == [("gpu-009", 0, late)]
    assert found([*fast, node(9, 5, metric=late)]) == []
    runs = [*healthy(8), node(9, *([690.0] * 8))]
    assert (len(found(runs)), found(runs, behind=0.10)) == (8, [])


def test_a_limits_own_ratio_holds_over_the_fleet_also_where_there_are_few_nodes():
    limit = {"min": 1.0, "min_ratio_to_median": 0.95}
    runs = [node(0, 730, limit=limit), node(1, 731, limit=limit), node(2, 690, limit=limit)]
    [behind] = outliers(fleet(runs))
    assert (behind.node, "94.5 %" in behind.why, "95 %" in behind.why) == ("gpu-002", True, True)
    assert found([node(0, 730), node(1, 731), node(2, 690)]) == [], "three values do not say how much they scatter"
