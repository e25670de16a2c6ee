"""How a LoRA training goes, whatever the number of ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
from each import of_each

from pytest_gpucluster.benchmarks.lora.packing import share
from pytest_gpucluster.benchmarks.lora.training_plan import (
    Recipe,
    cosine,
    crosses_links,
    group_size,
    micro_batches,
    seed_of_step,
)

RECIPE = Recipe(steps=100, warmup_steps=10, global_batch=128, micro_batch=4, learning_rate=2e-5)


def test_the_learning_rate_rises_in_ten_steps_and_falls_as_half_a_cosine():
    rates = [cosine(step, RECIPE) for step in range(1, 101)]
    assert rates[0] == pytest.approx(2e-6)
    assert rates[9] == max(rates) == 2e-5
    assert rates[54] == pytest.approx(1e-5, rel=0.03)
    assert 0 < rates[-1] < 1e-8
    assert rates[9:] == sorted(rates[9:], reverse=True)


def nodes_of(*ranks):
    return [node for node, count in enumerate(ranks) for _ in range(count)]


@of_each("each", [1, 2, 4, 8, 16])
def test_on_any_number_of_nodes_groups_use_every_rank_and_cross_nodes_and_share_the_batch(each):
    for count in range(1, 65):
        nodes = nodes_of(*[each] * count)
        size = group_size(nodes, 128)
        assert len(nodes) % size == 0
        assert crosses_links(nodes, size), (count, size)
        shares = [len(share(range(128), rank=rank, world_size=size)) for rank in range(size)]
        assert sum(shares) == 128
        assert max(shares) <= 1.5 * min(shares), "a rank with less than most would look slow"
        calls, at_once = micro_batches(RECIPE, size)
        assert at_once <= 4
        assert calls * at_once >= max(shares)


@of_each("case", [((1,), 1), ((3,), 3), ((8,) * 3, 12), ((8,) * 5, 10), ((8,) * 7, 14), ((8,) * 17, 17), ((8, 4), 12)])
def test_the_groups_of_clusters_that_do_not_divide_the_batch(case):
    ranks, size = case
    assert group_size(nodes_of(*ranks), 128) == size


@of_each("case", [((8,) * 131, 128), ((1, 1), 1), ((2,), 1)])
def test_groups_that_cross_no_link_are_known(case):
    ranks, batch = case
    nodes = nodes_of(*ranks)
    assert not crosses_links(nodes, group_size(nodes, batch))


def test_what_is_compared_has_no_dropout_and_a_schedule_of_its_own():
    compared = RECIPE.compared(steps=10, global_batch=16, precision="fp32")
    assert (compared.dropout, compared.precision, compared.global_batch) == (False, "fp32", 16)
    assert [cosine(step, compared) > 1e-5 for step in (1, 2, 3)] == [True] * 3


def test_dropout_is_drawn_anew_in_each_step_and_on_each_rank():
    seeds = [seed_of_step(step, rank, seed) for step in range(1, 20) for rank in range(16) for seed in range(3)]
    assert len(set(seeds)) == len(seeds)


def test_a_warm_up_as_long_as_the_training_is_refused():
    with pytest.raises(ValueError, match="must be more"):
        replace(RECIPE, warmup_steps=RECIPE.steps)
