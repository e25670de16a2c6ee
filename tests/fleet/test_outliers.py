"""Who is behind the fleet, and who is not."""

from __future__ import annotations

import random

import pytest
from written_runs import MATMUL, case, measured, place, read, write

from pytest_gpucluster.cli import main
from pytest_gpucluster.fleet.node import Answer, fleet
from pytest_gpucluster.fleet.outliers import outliers


def node(number, *values, metric="matmul.bf16.tflops", sku="H100 SXM", limit=None, width=0.005, **run):
    host = f"gpu-{number:03}"
    ranks = [place(rank, host=host) for rank in range(len(values))]
    line = measured(list(values), metric, limit=limit, width=width)
    return Answer(path=f"{host}.jsonl", journal=read(case(MATMUL, "passed", line), ranks=ranks, sku=sku, **run))


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
    assert found([*alike, a_bit]) == [], "one in a thousand is no fault, though nobody scatters"
    assert sum(len(found(healthy(32, seed=seed))) for seed in range(20)) == 0


def test_half_of_the_fleet_may_be_slow_and_the_other_half_is_no_outlier():
    half = [node(number, *([730.0 + number] * 2)) for number in range(5)]
    slow = [node(number, *([500.0 + number] * 2)) for number in range(5, 9)]
    assert {each[0] for each in found([*half, *slow])} <= {f"gpu-{number:03}" for number in range(5, 9)}


@pytest.mark.parametrize("value", ["NaN", -3, "Infinity"])
def test_what_is_no_number_is_left_to_the_limits(value):
    assert found([*healthy(4, gpus=2), node(9, 730, value)]) == []


def test_less_is_better_where_it_is():
    fast = [node(number, 20 + number / 10, metric="nccl.all_reduce.latency") for number in range(8)]
    assert found([*fast, node(9, 60, metric="nccl.all_reduce.latency")]) == [("gpu-009", 0, "nccl.all_reduce.latency")]
    assert found([*fast, node(9, 5, metric="nccl.all_reduce.latency")]) == []


def test_only_like_stands_beside_like():
    h100, h200 = healthy(6), node(9, *([500.0] * 8), sku="H200 SXM")
    assert found([*h100, h200]) == []
    assert found([*h100, node(9, *([500.0] * 4))]) == [], "with another number of ranks"
    assert found([node(1, *([730.0] * 7), 200)]) == [], "one node is no fleet"


def test_a_limits_own_ratio_holds_over_the_fleet_also_where_there_are_few_nodes():
    limit = {"min": 1.0, "min_ratio_to_median": 0.95}
    runs = [node(0, 730, limit=limit), node(1, 731, limit=limit), node(2, 690, limit=limit)]
    [behind] = outliers(fleet(runs))
    assert (behind.node, behind.why) == ("gpu-002", "94.5 % of the fleet's median, 95 % is required")
    assert found([node(0, 730), node(1, 731), node(2, 690)]) == [], "three values do not say how much they scatter"


def test_a_state_of_the_moment_is_no_reason():
    cool = [node(number, 60, metric="gpu.temperature") for number in range(8)]
    assert found([*cool, node(9, 80, metric="gpu.temperature")]) == []


def test_by_how_much_is_set_by_the_operator():
    runs = [*healthy(8), node(9, *([690.0] * 8))]
    assert len(found(runs)) == 8
    assert found(runs, behind=0.10) == []


def test_a_value_with_samples_is_held_against_the_median_and_not_its_limit(tmp_path, monkeypatch, capsys):
    """Also as the command reads journals, without the samples themselves."""
    limit = {"max": 10_000.0}
    for number in range(8):
        line = measured([60 if number == 7 else 20 + number / 10], "nccl.all_reduce.latency", limit=limit)
        write(
            tmp_path / f"{number}",
            case(MATMUL, "passed", line),
            ranks=[place(0, host=f"gpu-{number}")],
            run_id=f"{number}",
        )
    assert main(["fleet", str(tmp_path)]) == 1
    assert "gpu-7: outlier" in capsys.readouterr().out
