"""How a LoRA training goes, whatever the number of ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
from each import of_each

from pytest_gpucluster.benchmarks.lora.training_plan import Recipe, cosine, group_size, micro_batch, seed_of_step

RECIPE = Recipe(steps=100, warmup_steps=10, global_batch=128, micro_batch=4, learning_rate=2e-5)


def test_the_learning_rate_rises_in_ten_steps_and_falls_as_half_a_cosine():
    rates = [cosine(step, RECIPE) for step in range(1, 101)]
    assert rates[0] == pytest.approx(2e-6)
    assert rates[9] == max(rates) == 2e-5
    assert rates[54] == pytest.approx(1e-5, rel=0.03)
    assert 0 < rates[-1] < 1e-8
    assert rates[9:] == sorted(rates[9:], reverse=True)


def test_groups_of_at_most_16_ranks_share_the_global_batch():
    for world_size, ranks in [(1, 1), (2, 2), (16, 16), (32, 16), (64, 16), (24, 8), (7, 1)]:
        assert group_size(world_size, 128) == ranks
        assert micro_batch(RECIPE, ranks) == 4


def test_a_micro_batch_divides_the_share_of_a_rank():
    assert micro_batch(Recipe(steps=2, warmup_steps=1, global_batch=18, micro_batch=4, learning_rate=1.0), 3) == 3
    with pytest.raises(ValueError, match=r"divided among 5 ranks"):
        micro_batch(RECIPE, 5)


def test_what_is_compared_has_no_dropout_and_a_schedule_of_its_own():
    compared = RECIPE.compared(steps=10, global_batch=16, precision="fp32")
    assert (compared.dropout, compared.precision, compared.global_batch) == (False, "fp32", 16)
    assert [cosine(step, compared) > 1e-5 for step in (1, 2, 3)] == [True] * 3


def test_dropout_is_drawn_anew_in_each_step_and_on_each_rank():
    seeds = [seed_of_step(step, rank, seed) for step in range(1, 20) for rank in range(16) for seed in range(3)]
    assert len(set(seeds)) == len(seeds)


@of_each("wrong", [{"warmup_steps": 100}, {"global_batch": 0}, {"precision": "fp8"}, {"recompute": "maybe"}])
def test_a_recipe_that_cannot_be_followed_is_refused(wrong):
    with pytest.raises(ValueError, match=r"must be more|is one of"):
        replace(RECIPE, **wrong)
