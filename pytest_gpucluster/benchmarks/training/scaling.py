"""How much of one GPU's rate is left to each GPU in a larger group: weak scaling.

The rate of the slowest rank in the larger groups stands over that of the median rank in the smaller ones. Both are
per GPU, with the same model and the same tokens per GPU and step. The median, because a GPU that is slow by itself
holds up the larger group: over the slowest rank's own rate nothing of that would be seen.

>>> one_gpu, node = [_rate(100.0), _rate(102.0), _rate(60.0)], [_rate(57.0), _rate(57.0), _rate(57.0)]
>>> efficiency(node, one_gpu).median
0.57
"""

from __future__ import annotations

import math
from collections.abc import MutableMapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from pytest_gpucluster.benchmarks.blocks import NO_CONTEXT, Progress
from pytest_gpucluster.benchmarks.group import Ranks
from pytest_gpucluster.benchmarks.memory_budget import releases_memory
from pytest_gpucluster.benchmarks.training.throughput import throughput
from pytest_gpucluster.benchmarks.training.throughput_setup import Setup
from pytest_gpucluster.errors import EnvironmentBroken
from pytest_gpucluster.metrics import stats
from pytest_gpucluster.metrics.sampling import Sampling, Series


@dataclass(frozen=True, kw_only=True)
class Rates:
    """The rates of all ranks in groups of one size, all groups at once. Equal on all ranks, but for ``notes``.

    Attributes:
        group_size: ranks that trained together.
        of_rank: tokens a second of each rank of the world, without the samples.
        mine: this rank's own, with them.
        notes: remarks on this rank's training for the report.
    """

    group_size: int
    of_rank: tuple[Series, ...]
    mine: Series
    notes: tuple[str, ...]

    @property
    def slowest(self) -> int:
        """The rank with the lowest rate, or the first whose rate is no number."""
        return min(range(len(self.of_rank)), key=lambda rank: _order(self.of_rank[rank].median))


@releases_memory()
def rates(
    world: dist.ProcessGroup,
    group: dist.ProcessGroup | None,
    device: torch.device,
    setup: Setup,
    *,
    sampling: Sampling,
    known: MutableMapping[int, Rates] | None = None,
    using: AbstractContextManager[object] = NO_CONTEXT,
    during: AbstractContextManager[object] = NO_CONTEXT,
    progress: Progress | None = None,
) -> Rates:
    """Train in groups of one size, all of them at once, and exchange the rates.

    Collective: every rank of the world must call this, with groups of one size. No rank warms up before all have
    compiled; each group ends when its own rate is known.

    Args:
        world: all ranks.
        group: the ranks that train together; None: each rank alone, which needs no group.
        device: where this rank trains.
        setup: the training.
        sampling: how long to warm up and to measure, and the required confidence.
        known: group size -> rates that were measured before with the same setup and sampling. They are reused where all
            ranks have them, and new ones that are conclusive are added.
        using: entered while the group is used, and no other one.
        during: entered for the time of the steps that count.
        progress: as of ``throughput``.

    Raises:
        EnvironmentBroken: the ranks have groups of different sizes.
        As ``throughput`` otherwise.
    """
    everyone = Ranks(world, device)
    size = 1 if group is None else dist.get_world_size(group)
    before = {} if known is None else known
    of_ranks = everyone.gather([size, size in before])
    other = next((rank for rank, (its, _) in enumerate(of_ranks) if its != of_ranks[0][0]), None)
    if other is not None:
        raise EnvironmentBroken(
            f"{everyone.name(other)} trains in a group of {of_ranks[other][0]:.0f}, {everyone.name(0)} in one of "
            f"{of_ranks[0][0]:.0f}: start the same number of ranks on every node"
        )
    # A rank that failed in between has less than the others.
    if all(has for _, has in of_ranks):
        return before[size]
    with using:
        found = throughput(
            group,
            device,
            setup,
            sampling=sampling,
            during=during,
            progress=progress,
            in_parts=False,
            # The start line: some compile longer, and the others' rates would be those of idle neighbours until then.
            # The world's group has been used above, so it has nothing to connect here.
            ready=lambda: everyone.gather([size]),
        )
    mine = found.tokens_per_second
    of_rank = tuple(gather_series(everyone, mine))
    measured = Rates(group_size=size, of_rank=of_rank, mine=mine, notes=found.notes)
    # An inconclusive rate is measured again the next time. All ranks decide the same.
    if not any(one.inconclusive for one in of_rank):
        before[size] = measured
    return measured


def gather_series(ranks: Ranks, mine: Series) -> list[Series]:
    """Return every rank's series, without the samples. Collective: every rank must call this."""
    gathered = ranks.gather([mine.median, mine.low, mine.high, bool(mine.inconclusive)])
    return [
        _rate(median, low, high, f"the rate of {ranks.name(rank)} is inconclusive" * bool(unsure))
        for rank, (median, low, high, unsure) in enumerate(gathered)
    ]


def efficiency(larger: Sequence[Series], smaller: Sequence[Series]) -> Series:
    """Return the slowest rate in larger groups over the median rate in smaller ones, with the interval of the ratio.

    The interval is from the lowest possible numerator over the highest possible denominator, to the opposite: at
    least as wide as the true one with the same confidence. An inconclusive rate of any rank makes the ratio
    inconclusive. A rate that is no positive number makes it NaN, which is never accepted.

    Args:
        larger: the rate of each rank in the larger groups.
        smaller: the rate of each rank in the smaller groups.
    """
    every = [*larger, *smaller]
    if not all(0 < end < math.inf for one in every for end in (one.low, one.median, one.high)):
        return _rate(math.nan)
    above = [min(getattr(one, end) for one in larger) for end in ("median", "low", "high")]
    below = [stats.median([getattr(one, end) for one in smaller]) for end in ("median", "high", "low")]
    median, low, high = (upper / lower for upper, lower in zip(above, below, strict=True))
    return _rate(median, low, high, next((one.inconclusive for one in every if one.inconclusive), ""))


def _rate(median: float, low: float | None = None, high: float | None = None, inconclusive: str = "") -> Series:
    return Series(
        samples=(),
        median=median,
        low=median if low is None else low,
        high=median if high is None else high,
        inconclusive=inconclusive,
    )


def _order(rate: float) -> float:
    return -math.inf if math.isnan(rate) else rate
