"""Draws follow from their seed alone, for good."""

from __future__ import annotations

from each import of_each

from pytest_gpucluster.benchmarks.lora.synthetic import Draws


def test_the_draws_of_a_seed_are_these_for_ever():
    draws = Draws(7, "row", 3)
    assert [draws.below(100) for _ in range(8)] == [61, 24, 82, 71, 39, 70, 92, 85]
    items = list(range(8))
    draws.shuffle(items)
    assert items == [4, 3, 0, 7, 5, 1, 6, 2]


def test_other_keys_and_other_seeds_give_other_draws():
    assert len({Draws(*keys).below(1000) for keys in [(0,), (1,), (0, "a"), (0, "b"), (0, "a", 1)]}) == 5


@of_each("end", [1, 2, 7])
def test_every_number_below_the_end_comes_and_no_other(end):
    draws = Draws(0, end)
    assert {draws.below(end) for _ in range(500)} == set(range(end))
    assert {draws.between(3, 3 + end - 1) for _ in range(500)} == set(range(3, 3 + end))


def test_chance_and_one_are_of_their_ranges():
    draws = Draws(2)
    assert 400 < sum(draws.chance(0.5) for _ in range(1000)) < 600
    assert not any(Draws(3).chance(0.0) for _ in range(9))
    assert {draws.one("abc") for _ in range(100)} == set("abc")
