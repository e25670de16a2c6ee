"""All simulations of one page: which GPUs and fleets, how many of each, and what became of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from rule_trials import FLEETS, NOISES, SLOW, SPREADS, Compared, Sampled, compare, sample, slow_fleet
from straggler_trials import Kind, Named, name_all

SLOW_FLEETS = ((2, 0), (2, 1), (2, 2), (8, 0), (8, 4), (8, 5), (8, 8), (64, 0), (64, 32), (64, 33), (64, 64))
"""Ranks, and how many of them are slow."""
SLOW_FLEET, SLOW_FLEET_SPREAD = 0.9, 0.01


@dataclass(frozen=True, kw_only=True)
class Results:
    """All simulations.

    ``one_slow`` is by ranks, spread and what the slow rank does; 1 stands for no slow rank. ``slow_fleets`` is by ranks
    and how many are slow, ``healthy_fleets`` by ranks and spread, both with how many the shipped entry refuses.
    ``named`` is by kind of fleet and rule.
    """

    trials: int
    sampled: Mapping[str, Sampled]
    one_slow: Mapping[tuple[int, float, float], Compared]
    slow_fleets: Mapping[tuple[int, int], tuple[Compared, int]]
    healthy_fleets: Mapping[tuple[int, float], tuple[Compared, int]]
    named: Mapping[Kind, Mapping[str, Named]]


def fleet_trials(ranks: int, trials: int) -> int:
    """Return how many fleets of this size are made: they take longer than a GPU, the largest ones far longer."""
    return math.ceil(trials / (2 if ranks <= 64 else 20))


def simulate(trials: int) -> Results:
    """Run all simulations."""
    return Results(
        trials=trials,
        sampled={name: sample(name, trials) for name in NOISES},
        one_slow={
            (ranks, spread, slow): compare(ranks, spread, slow, fleet_trials(ranks, trials), slow_ranks=int(slow < 1))
            for ranks in FLEETS
            for spread in SPREADS
            for slow in (1.0, *SLOW)
        },
        slow_fleets={
            (ranks, slow): slow_fleet(ranks, slow, SLOW_FLEET, fleet_trials(ranks, trials), spread=SLOW_FLEET_SPREAD)
            for ranks, slow in SLOW_FLEETS
        },
        healthy_fleets={
            (ranks, spread): slow_fleet(ranks, 0, 1.0, fleet_trials(ranks, trials), spread=spread)
            for ranks in FLEETS
            for spread in SPREADS
        },
        named=name_all(trials),
    )
