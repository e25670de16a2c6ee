"""GPUs and nodes that do worse than the fleet, though no limit may have noticed.

Each value stands beside the median of all others. It is an outlier where it is behind by more than is allowed, and by
far more than the others scatter: its modified z-score, 0.6745 (x - median) / MAD, is beyond 3.5. Source: Iglewicz and
Hoaglin, "How to Detect and Handle Outliers" (ASQC, 1993). Half of the values can be bad without moving median or MAD.
A limit's own ``min_ratio_to_median`` holds over the fleet as well, as it does inside a run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pytest_gpucluster.comparison.conditions import STATES
from pytest_gpucluster.fleet.node import Fleet, Node
from pytest_gpucluster.journal_measurements import JudgedMetric
from pytest_gpucluster.judge.misses import straggler_ratios
from pytest_gpucluster.metrics import stats
from pytest_gpucluster.reports.outline import is_better_higher

BEHIND_RATIO = 0.03
"""Nobody is called an outlier for less, however much alike the others are."""
Z_SCORE = 3.5
FEWEST = 5
"""With fewer values their scatter is not known; then only a limit's own ratio decides."""

_TO_SIGMA = 0.6745


@dataclass(frozen=True, kw_only=True)
class Outlier:
    """A value that is worse than the fleet's."""

    node: str
    nodeid: str
    test: str
    judged: JudgedMetric
    rank: int
    value: float
    median: float
    """Of all other values of the fleet."""
    behind: float
    """By which share it is worse than the median."""
    why: str


@dataclass(frozen=True, kw_only=True)
class _Value:
    node: Node
    test: str
    nodeid: str
    judged: JudgedMetric
    rank: int
    value: float


def outliers(fleet: Fleet, *, behind: float = BEHIND_RATIO) -> tuple[Outlier, ...]:
    """Return all outliers, the worst first. GPUs stand beside GPUs of the same SKU in runs of the same kind.

    Args:
        fleet: of nodes.
        behind: the share by which a value must be worse than the median.
    """
    groups: dict[tuple[object, ...], list[_Value]] = {}
    for node in fleet.nodes:
        journal = node.answer.journal
        kind = (journal.run.rehearsal, journal.limits.sku if journal.limits else None, journal.run.world_size)
        for result in journal.results:
            for judged in result.measurements:
                labels = tuple(sorted(judged.labels.items()))
                key = (*kind, result.nodeid, judged.metric, judged.unit, labels)
                for rank, value in judged.values.items():
                    groups.setdefault(key, []).append(
                        _Value(
                            node=node,
                            test=result.name or result.nodeid.partition("::")[2] or result.nodeid,
                            nodeid=result.nodeid,
                            judged=judged,
                            rank=rank,
                            value=value,
                        )
                    )
    found = [outlier for values in groups.values() for outlier in _in_group(values, behind)]
    return tuple(sorted(found, key=lambda outlier: (-outlier.behind, outlier.node)))


def _in_group(values: Sequence[_Value], behind: float) -> Iterator[Outlier]:
    """Yield the outliers among the values of one metric of the whole fleet."""
    metric = values[0].judged
    higher = next((told for each in values if (told := is_better_higher(each.judged)) is not None), None)
    values = [each for each in values if math.isfinite(each.value) and each.value >= 0]
    if higher is None or metric.metric in STATES or len({each.node.name for each in values}) < 2:
        return
    required = next(
        (r for each in values if each.judged.limit and (r := each.judged.limit.min_ratio_to_median) is not None), None
    )
    ratios = straggler_ratios(
        {number: each.value for number, each in enumerate(values)}, "higher" if higher else "lower"
    )
    numbers = [each.value for each in values]
    middle, spread = stats.median(numbers), stats.mad(numbers)
    for number, each in enumerate(values):
        loss = middle - each.value if higher else each.value - middle
        if loss <= 0:
            continue
        share = _share(loss, each, middle, higher)
        score = _TO_SIGMA * loss / spread if spread > 0 else math.inf
        why = ""
        if required is not None and ratios[number] < required:
            why = f"{100 * ratios[number]:.1f} % of the fleet's median, {100 * required:.4g} % is required"
        elif len(values) >= FEWEST and share > behind and score > Z_SCORE:
            scatter = f"{score:.3g} times" if math.isfinite(score) else "beyond"
            why = f"{100 * share:.3g} % behind the fleet's median, {scatter} its scatter"
        if why:
            yield Outlier(
                node=each.node.name,
                nodeid=each.nodeid,
                test=each.test,
                judged=each.judged,
                rank=each.rank,
                value=each.value,
                median=middle,
                behind=share,
                why=why,
            )


def _share(loss: float, each: _Value, middle: float, higher: bool) -> float:
    """Return by which share a value is behind; of one without samples of which less is better, a share of its limit."""
    yardstick = middle
    limit = each.judged.limit
    if not higher and limit is not None and limit.max is not None and each.rank not in each.judged.intervals:
        yardstick = max(yardstick, limit.max)
    return loss / yardstick if yardstick > 0 else math.inf
