"""Whether a probed group has failed: by itself, or beside groups of as many units."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pytest_gpucluster import stats
from pytest_gpucluster.isolation.probe import Outcome

Verdict = Literal["passed", "failed", "unjudged"]
Floor = Callable[[int], float | None]

MIN_RATIO = 0.85
"""Below this share of what is usual for its size a group is slow. Source: this suite's rule: a rail of eight that is
lost leaves 0.88 at best and mostly far less, and healthy pairs scatter by a few percent. A suspicion convicts nobody:
see ``evidence``."""
_SPREADS = 6.0
_MANY = 16
"""From so many different groups of a size their scatter is known well enough to widen the tolerance by it."""
_FLEET = 4
"""If so many different groups of a size, and all there are, miss the floor, it is not this group's own fault."""
_NORMAL = 1.4826
"""Times the median absolute deviation: the standard deviation of normal samples (see ``stats.mad``)."""


@dataclass(frozen=True, kw_only=True)
class Usual:
    """What is usual for groups of one size, in GB/s.

    ``threshold`` is None where there is nothing to compare. ``all_below_floor``: no group of many reaches the floor.
    """

    value: float
    threshold: float | None
    floor: float | None
    all_below_floor: bool


@dataclass(frozen=True, kw_only=True)
class Held:
    """A probe that was held beside the others.

    ``number`` is its round's, from 1. ``members`` are the units that were probed together. ``usual`` is what it was
    held against; None where no group of its size has a value.
    """

    number: int
    outcome: Outcome
    members: frozenset[int]
    verdict: Verdict
    usual: Usual | None

    @property
    def failed(self) -> bool:
        """Whether it was bad."""
        return self.verdict == "failed"

    @property
    def passed(self) -> bool:
        """Whether it was good, its speed too."""
        return self.verdict == "passed"

    def clears(self, failed: Held) -> bool:
        """Whether it was good where a failed group was bad. Without a speed to compare it clears of no slowness."""
        return self.passed or (self.verdict == "unjudged" and failed.outcome.broken)

    @property
    def why(self) -> str:
        """What it did, and what it was held against."""
        outcome, usual = self.outcome, self.usual
        if outcome.wrong:
            return f"wrong data: {outcome.wrong}"
        if outcome.failure or outcome.busbw is None:
            return outcome.failure or "no value, and nothing says why"
        alike = f"{len(self.members)} units" if len(self.members) > 1 else "one unit"
        shown = f"{outcome.busbw:.4g} GB/s"
        if usual is None or self.passed:
            return shown
        if self.verdict == "unjudged":
            return f"{shown}; there is nothing to hold it against"
        if usual.floor is not None and not usual.all_below_floor and outcome.busbw < usual.floor:
            return f"{shown}; the limit for {alike} is {usual.floor:.4g} GB/s"
        return f"{shown}; usual for {alike} is {usual.value:.4g} GB/s"


def hold(rounds: Sequence[Sequence[Outcome]], *, floor: Floor, min_ratio: float = MIN_RATIO) -> list[Held]:
    """Hold every probe of all rounds beside the probes of as many units, and against the floor for that size.

    A group fails if its data were wrong, if it did not finish, if it is below the floor, or if it is below
    ``min_ratio`` of what is usual. What is usual: the ninth decile of the medians of different groups of that size
    over all rounds, or the best of them while they are fewer than 16. A high one, because among few units most groups
    may have a bad one in them. From 16 groups on it must also be six standard deviations below the healthy ones.

    If four different groups of a size or more have been probed and none reaches the floor, the floor tells nothing
    about one of them: they are only held beside each other, and ``below_floor`` names the size.

    A value with no floor and no other group of its size is "unjudged": neither good nor bad.

    Args:
        rounds: the outcomes of each round.
        floor: number of units of a group -> GB/s that it must reach, or None.
        min_ratio: between 0 and 1.
    """
    usual = _usual((outcome for outcomes in rounds for outcome in outcomes), floor=floor, min_ratio=min_ratio)
    held = []
    for number, outcomes in enumerate(rounds, start=1):
        for outcome in outcomes:
            of_size = usual.get(len(outcome.members))
            verdict = _verdict(outcome, of_size)
            members = frozenset(outcome.members)
            held.append(Held(number=number, outcome=outcome, members=members, verdict=verdict, usual=of_size))
    return held


def below_floor(rounds: Sequence[Sequence[Outcome]], *, floor: Floor) -> dict[int, tuple[float, float]]:
    """Return the sizes at which every group misses the floor: size -> (best GB/s, floor in GB/s)."""
    usual = _usual((outcome for outcomes in rounds for outcome in outcomes), floor=floor, min_ratio=MIN_RATIO)
    return {size: (of.value, of.floor) for size, of in usual.items() if of.all_below_floor and of.floor is not None}


def _usual(outcomes: Iterable[Outcome], *, floor: Floor, min_ratio: float) -> Mapping[int, Usual]:
    values: dict[int, dict[tuple[int, ...], list[float]]] = {}
    for outcome in outcomes:
        if not outcome.broken and outcome.busbw is not None:
            values.setdefault(len(outcome.members), {}).setdefault(outcome.members, []).append(outcome.busbw)
    return {size: _of_size(groups, floor(size), min_ratio) for size, groups in values.items()}


def _of_size(groups: Mapping[tuple[int, ...], Sequence[float]], floor: float | None, min_ratio: float) -> Usual:
    medians = [values[0] if len(values) == 1 else stats.median(values) for values in groups.values()]
    usual = stats.percentile(medians, 90) if len(medians) >= _MANY else max(medians)
    threshold: float | None = None
    if len(medians) > 1:
        threshold = min_ratio * usual
        if len(medians) >= _MANY:
            healthy = [value for value in medians if value >= threshold]
            threshold = min(threshold, stats.median(healthy) - _SPREADS * _NORMAL * stats.mad(healthy))
    below = floor is not None and len(medians) >= _FLEET and all(value < floor for value in medians)
    return Usual(value=usual, threshold=threshold, floor=floor, all_below_floor=below)


def _verdict(outcome: Outcome, usual: Usual | None) -> Verdict:
    value = outcome.busbw
    if outcome.broken:
        return "failed"
    if value is None or usual is None:
        return "unjudged"
    floor = None if usual.all_below_floor else usual.floor
    if floor is None and usual.threshold is None:
        return "unjudged"
    return "failed" if value < max(floor or 0.0, usual.threshold or 0.0) else "passed"
