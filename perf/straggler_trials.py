"""Fleets with none to three slow GPUs, and whom the rules of a run name: the simulations behind a part of the page.

The rules are the product's own, with the limits that are shipped: ``stragglers`` and ``misses``, by which ``judge``
decides. Each kind of fleet seeds itself by its name.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random

from rule_trials import LIMITS, METRIC, SEED, SKU, fleet, shipped_limit

from pytest_gpucluster.judge import misses
from pytest_gpucluster.judge import misses as stragglers
from pytest_gpucluster.judge.limits import Limit
from pytest_gpucluster.metrics import measurement
from pytest_gpucluster.metrics.measurement import Measurement

FLEET_SIZES = (8, 16, 64, 256, 1024)
SLOW_COUNTS = (1, 2, 3)
SLOW_AT = (0.95, 0.9, 0.8)
"""What a slow GPU does of a healthy one."""
SPREADS = (0.005, 0.01, 0.02)

CRITERION = "scaling.tokens_per_second"
"""What the criterion of stragglers holds against its limit; its ratio is that of most other metrics."""


def rules() -> Mapping[str, Limit]:
    """Return the limits that are compared, by name: two ratios by themselves, and the whole entry that is shipped."""
    shipped = shipped_limit()
    loose = LIMITS.limit(CRITERION, sku=SKU, world_size=8, nnodes=1, labels={})
    assert loose is not None  # the shipped file has one
    ratios = (loose.min_ratio_to_median, shipped.min_ratio_to_median)
    alone = [dataclasses.replace(shipped, min=None, min_ratio_to_median=ratio) for ratio in ratios]
    return {**{f"ratio {one.min_ratio_to_median:.3g} alone": one for one in alone}, "the shipped entry": shipped}


@dataclass
class Named:
    """What a rule made of some fleets of one kind.

    Attributes:
        trials: fleets.
        passed: those of which no rank was named.
        missed: slow ranks that were not named, in all fleets together.
        wronged: fleets in which a healthy rank was named, beside slow ones or alone.
    """

    trials: int
    passed: int = 0
    missed: int = 0
    wronged: int = 0


Kind = tuple[int, float, int, float]
"""Ranks, spread, how many are slow, and what these do of a healthy one: 1 where there are none."""


def kinds() -> list[Kind]:
    """Return every kind of fleet."""
    slow = [(0, 1.0), *((count, at) for at in SLOW_AT for count in SLOW_COUNTS)]
    return [(ranks, spread, *one) for ranks in FLEET_SIZES for spread in SPREADS for one in slow]


def fleets_of(ranks: int, trials: int) -> int:
    """Return how many fleets of this size are made."""
    return math.ceil(trials / (4 if ranks <= 64 else 20))


def named(values: Sequence[float], limits: Mapping[str, Limit]) -> dict[str, set[int]]:
    """Return the ranks that a run would name, by each of these limits."""
    ratios = stragglers.straggler_ratios(dict(enumerate(values)), "higher")
    of = {rank: Measurement(metric=METRIC, value=value, unit="TFLOPS") for rank, value in enumerate(values)}
    known = measurement.known(METRIC)
    return {
        name: {rank for miss in misses.misses(known, limit, of, ratios=ratios, transport=None) for rank in miss.by_rank}
        for name, limit in limits.items()
    }


def name_stragglers(kind: Kind, fleets: int) -> dict[str, Named]:
    """Let every rule look at so many fleets of a kind."""
    ranks, spread, count, at = kind
    random = Random(f"{SEED} who {ranks} {spread} {count} {at}")
    limits = rules()
    result = {name: Named(fleets) for name in limits}
    slow = set(range(ranks - count, ranks))
    for _ in range(fleets):
        values = fleet(random, ranks, spread, at, count)
        for name, told in named(values, limits).items():
            seen = result[name]
            seen.passed += not told
            seen.missed += len(slow - told)
            seen.wronged += bool(told - slow)
    return result


def name_all(trials: int) -> dict[Kind, dict[str, Named]]:
    """Run all of these simulations."""
    return {kind: name_stragglers(kind, fleets_of(kind[0], trials)) for kind in kinds()}
