"""What follows from the probes so far: which groups failed, and which units are guilty, suspect or cleared.

A group fails by itself (wrong data, not finished, a rate below the floor), or compared with other groups of its size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pytest_gpucluster.isolation.finding import Culprit, Outcome
from pytest_gpucluster.metrics import stats

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


CONFIRMED = 3
"""So many probes must have failed that only this unit, or this link, explains: the first and two more."""
_CHANCE = 0.015
_RARE_CHANCE = 0.0005
"""A link is not accused while an end that fails now and then could have spared all its other partners by such a
chance: the first if the pair has always failed, the second if it has passed too."""
_FALSE_ALARM = 0.0002
"""A unit is not accused while one of all units would collect as many failures by such a chance, if failures came to
anybody, as often as they do to the others."""
_PRIOR_FAILURES, _PRIOR_PROBES = 0.5, 50.0
"""How often a probe fails without anybody's fault is not known at first: 1 %, with the weight of fifty probes."""
_LINES = 8

Members = frozenset[int]


class Evidence:
    """What all probes so far say.

    A failed probe is *explained* if a culprit is in it. One that is not *tells on* a unit if nobody else in it can be
    at fault: each of the others has passed, without that unit, in a group that was no smaller, and has failed no
    smaller or equal group without it, unless with one that has never passed with anybody. Where that can be said of
    two units, as of the ends of a bad link, the probe tells on neither. A group in which a pair fails tells on nobody.

    A unit is a culprit if three probes tell on it, more than chance would give it where probes fail now and then.
    Where it failed alone, another must have passed alone. Else they are with three different groups of others, or with
    two where there are no more that have passed at all. Where they are groups of three or more, no such group may have
    passed with it or failed without it, and three have passed without it.

    A link between two units is a culprit if the pair has failed three times, if neither of the two has failed without
    the other, and if since the first failure each has passed so often with others that this is no chance (Fisher's
    exact test).

    All of it is worked out anew from all probes, so an accusation falls if a later probe speaks against it.
    """

    def __init__(self, units: Sequence[int], held: Sequence[Held], *, name: Callable[[int], str] = str) -> None:
        self.units = tuple(units)
        self.held = tuple(held)
        self._name = name
        self._passes: dict[int, list[Held]] = {unit: [] for unit in units}
        self._probes: dict[int, list[Held]] = {unit: [] for unit in units}
        for one in held:
            for unit in one.members:
                self._probes[unit].append(one)
                if not one.failed:
                    self._passes[unit].append(one)
        together = {unit: [one for one in self._passes[unit] if len(one.members) > 1] for unit in units}
        self._social = {unit for unit in units if together[unit]}
        self._judged = {unit for unit in units if any(one.passed for one in together[unit])}
        self.unexplained = [one for one in held if one.failed]
        self.reproduced = bool(self.unexplained)
        self._failures = self._by_unit()
        accused: list[tuple[int, ...]] = []
        while (found := self._next_culprit()) is not None:
            accused.append(found)
            self.unexplained = [one for one in self.unexplained if not one.members.issuperset(found)]
            self._failures = self._by_unit()
        self.guilty: Members = frozenset(unit for found in accused for unit in found if len(found) == 1)
        # Told after all are known: what one explains does not count for another.
        self.culprits = tuple(self._culprit(found, accused) for found in sorted(accused))

    @property
    def suspects(self) -> Members:
        """Units that have failed alone or in a pair, which nothing explains."""
        return frozenset(unit for one in self.unexplained if len(one.members) <= 2 for unit in one.members)

    @property
    def undecided(self) -> Members:
        """Units of the smallest failed groups that nothing explains, and those that never surely passed with others."""
        groups = {one.members for one in self.unexplained}
        smallest = [group for group in groups if not any(other < group for other in groups)]
        open_ = {unit for group in smallest for unit in group}
        linked = {unit for culprit in self.culprits for unit in culprit.units}
        return frozenset((open_ | (set(self.units) - self._judged)) - linked)

    def islands(self) -> list[list[int]]:
        """Return sets of units that pass among themselves and in no group with others, though that was tried.

        The largest set of all is the mainland, and not among them.
        """
        land = {unit: frozenset({unit}) for unit in self.units}
        for one in self.held:
            if not one.failed and not one.members <= land[one.outcome.members[0]]:
                joined = frozenset().union(*(land[unit] for unit in one.members))
                land.update(dict.fromkeys(joined, joined))
        islands = sorted({island for island in land.values() if len(island) > 1}, key=lambda island: -len(island))[1:]
        tried = {
            island: sum(1 for one in self.held if one.members & island and one.members - island) for island in islands
        }
        return [sorted(island) for island in islands if tried[island] >= CONFIRMED]

    def failures(self, unit: int) -> int:
        """Return how many probes with it have failed that nothing explains."""
        return len(self._failures[unit])

    def has_passed(self, unit: int) -> bool:
        """Return whether it has been in a group that has not failed."""
        return unit in self._social

    def pairs(self, unit: int) -> Iterator[tuple[int, Held]]:
        """Yield each pair that it was in, the oldest first: the other one, and what came of it."""
        for one in self._probes[unit]:
            if len(one.members) == 2:
                (other,) = one.members - {unit}
                yield other, one

    def alone(self, unit: int) -> list[Held]:
        """Return the probes of it alone."""
        return [one for one in self._probes[unit] if len(one.members) == 1]

    def _by_unit(self) -> dict[int, list[Held]]:
        failures: dict[int, list[Held]] = {unit: [] for unit in self.units}
        for one in self.unexplained:
            for unit in one.members:
                failures[unit].append(one)
        return failures

    def _next_culprit(self) -> tuple[int, ...] | None:
        tells: dict[int, list[Held]] = {}
        small = {one.members for one in self.unexplained if len(one.members) <= 2}
        for one in self.unexplained:
            if any(group < one.members for group in small):
                continue  # why a part of it fails has to be told first
            told_on = self._told_on(one)
            if len(told_on) == 1:
                tells.setdefault(told_on[0], []).append(one)
        for unit in sorted(tells, key=lambda unit: (-len(tells[unit]), unit)):
            if len(tells[unit]) >= CONFIRMED and self._of_many(unit, tells[unit]):
                return (unit,)
        pairs: dict[tuple[int, ...], int] = {}
        for one in self.unexplained:
            if len(one.members) == 2:
                pairs[one.outcome.members] = pairs.get(one.outcome.members, 0) + 1
        return next((pair for pair in sorted(pairs) if pairs[pair] >= CONFIRMED and self._only_link(pair)), None)

    def _told_on(self, one: Held) -> list[int]:
        """Return the units that may be at fault in a failed probe, if nobody else in it can."""
        if len(one.members) == 1 and not any(any(self._good(unit, one)) for unit in self.units):
            return []  # nobody is good alone: it may be what all share
        strangers = [unit for unit in one.members if not any(self._good(unit, one))]
        if len(strangers) > 1:
            return []
        return [
            unit
            for unit in strangers or one.members
            if all(self._vouched(other, unit, one) for other in one.members if other != unit)
        ]

    def _good(self, unit: int, failed: Held) -> Iterator[Members]:
        """Yield the groups that have passed with it, no smaller than a failed one."""
        size = len(failed.members)
        return (one.members for one in self._passes[unit] if len(one.members) >= size and one.clears(failed))

    def _vouched(self, unit: int, without: int, failed: Held) -> bool:
        return any(without not in members for members in self._good(unit, failed)) and all(
            without in other.members
            or len(other.members) > len(failed.members)
            or any(member != unit and member not in self._social for member in other.members)
            for other in self._failures[unit]
        )

    def _of_many(self, unit: int, tells: Sequence[Held]) -> bool:
        """Return whether what tells on a unit is more than its company's doing, or chance."""
        sizes = [len(one.members) for one in tells]
        if 1 in sizes:
            return self._no_chance(unit, {1, 2})
        others = sum(1 for other in self._social if other != unit)
        if len({one.members for one in tells}) < max(2, min(CONFIRMED, others)):
            return False
        if 2 in sizes:
            return self._no_chance(unit, {2})
        # In larger groups anybody else may be at fault who fails now and then: with it all fail, without it all pass.
        large = [one for one in self.held if len(one.members) >= min(sizes)]
        without = [one for one in large if unit not in one.members]
        return (
            all(one.failed for one in large if unit in one.members)
            and len(without) >= CONFIRMED
            and not any(one.failed for one in without)
        )

    def _no_chance(self, unit: int, sizes: set[int]) -> bool:
        """Return whether it failed too often for failures that come to anybody (binomial, for one of all units)."""
        own = [one for one in self._probes[unit] if len(one.members) in sizes]
        failed = sum(one in self._failures[unit] for one in own)
        known = [one for one in self.held if len(one.members) in sizes and one.members <= self._social - {unit}]
        background = sum(one in self.unexplained for one in known)
        rate = (_PRIOR_FAILURES + background) / (_PRIOR_PROBES + len(known))
        chance = sum(
            math.comb(len(own), count) * rate**count * (1 - rate) ** (len(own) - count)
            for count in range(failed, len(own) + 1)
        )
        return chance * len(self.units) < _FALSE_ALARM

    def _only_link(self, pair: Sequence[int]) -> bool:
        together = [one for one in self._probes[pair[0]] if one.members == set(pair)]
        # Whom an end was with when it first failed is no evidence: it had to be somebody.
        first = next(index for index, one in enumerate(together) if one.failed)
        again = together[first + 1 :]
        failed = sum(one.failed for one in again)
        allowed = _CHANCE if failed == len(together) - 1 else _RARE_CHANCE
        for unit in pair:
            elsewhere = [one for other, one in self.pairs(unit) if other not in pair]
            if any(one in self._failures[unit] for one in elsewhere):
                return False  # it fails with others too
            apart = sum(one.passed for one in elsewhere if one.number > together[first].number)
            if math.comb(len(again), failed) > allowed * math.comb(len(again) + apart, failed):
                return False
        return True

    def _culprit(self, found: tuple[int, ...], accused: Sequence[tuple[int, ...]]) -> Culprit:
        others = [other for other in accused if other != found]
        own = [
            one
            for one in self._probes[found[0]]
            if one.members.issuperset(found) and not any(one.members.issuperset(other) for other in others)
        ]
        sizes = {len(one.members) for one in own if one.failed}
        if len(found) == 2:
            sizes = {2}  # a larger group need not use the link
        elif 1 in sizes or 2 in sizes:
            sizes &= {1, 2}
        counted = [one for one in own if len(one.members) in sizes and one.verdict != "unjudged"]
        failed = [one for one in counted if one.failed]
        return Culprit(
            units=found,
            kind="unit" if len(found) == 1 else "link",
            failed=len(failed),
            probes=len(counted),
            evidence=tuple(self._told(found, failed)),
        )

    def _told(self, found: tuple[int, ...], failed: Sequence[Held]) -> Iterator[str]:
        partners: set[int] = set()
        for one in failed[:_LINES]:
            others = sorted(one.members - set(found))
            partners.update(others)
            company = f"with {_few([self._name(other) for other in others])}" if others else "alone"
            yield f"round {one.number}, {company if len(found) == 1 else 'the two'}: {one.why}"
        if len(failed) > _LINES:
            yield f"and {len(failed) - _LINES} more that failed"
        for unit in found if len(found) == 2 else ():
            passed = sum(one.passed for other, one in self.pairs(unit) if other not in found)
            yield f"{self._name(unit)} passed {passed} pairs with others"
        vouched = [
            unit for unit in sorted(partners) if any(not one.members.issuperset(found) for one in self._passes[unit])
        ]
        if vouched and len(found) == 1:
            yield f"passed without it: {_few([self._name(unit) for unit in vouched])}"


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
