"""What follows from the probes so far: which groups failed, and which units are culprits, suspects or cleared.

A group fails by itself (wrong data, not finished, a rate below the floor), or compared with other groups of its size.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pytest_gpucluster.isolation.finding import Culprit, Outcome
from pytest_gpucluster.metrics import stats
from pytest_gpucluster.text import some_of

Verdict = Literal["passed", "failed", "unjudged"]
Floor = Callable[[int], float | None]

MIN_RATIO = 0.85
"""Below this share of the usual rate for its size a group is slow. Source: this suite's rule: a lost rail of eight
leaves 0.88 at best and mostly far less, and healthy pairs scatter by a few percent. A slow group alone accuses no unit:
see :class:`Evidence`."""
_SIGMAS = 6.0
_LARGE_SAMPLE = 16
"""From this number of different groups of a size on, their scatter is known well enough to widen the tolerance."""
_FLEET_GROUPS = 4
"""If at least this number of different groups of a size, with no unit in all of them, miss the floor, and no other one
reaches it, the cause is shared."""
_MAD_TO_SIGMA = 1.4826
"""Times the median absolute deviation: the standard deviation of normal samples (see ``stats.mad``)."""


@dataclass(frozen=True, kw_only=True)
class UsualRate:
    """The usual rate of groups of one size, in GB/s.

    ``threshold`` is None where there is nothing to compare with. ``all_below_floor``: none of many groups reaches the
    floor.
    """

    value: float
    threshold: float | None
    floor: float | None
    all_below_floor: bool


@dataclass(frozen=True, kw_only=True, eq=False)  # each is itself: a search looks for one among all of them
class Probe:
    """The outcome of one group with its verdict.

    ``number`` is its round's, from 1. ``members`` are the units that were probed at once. ``usual`` is the rate it was
    compared with; None where no group of its size has a value.
    """

    number: int
    outcome: Outcome
    members: frozenset[int]
    verdict: Verdict
    usual: UsualRate | None

    @property
    def failed(self) -> bool:
        """Whether the verdict is "failed"."""
        return self.verdict == "failed"

    @property
    def passed(self) -> bool:
        """Whether the verdict is "passed", so that its rate is good as well."""
        return self.verdict == "passed"

    def clears(self, failed: Probe) -> bool:
        """Whether it is good where ``failed`` was bad. With no rate to compare with it does not clear of slowness."""
        return self.passed or (self.verdict == "unjudged" and failed.outcome.broken)

    @property
    def reason(self) -> str:
        """The result, and what it was compared with."""
        outcome, usual = self.outcome, self.usual
        if outcome.wrong:
            return f"wrong data: {outcome.wrong}"
        if outcome.failure or outcome.busbw is None:
            return outcome.failure or "no value, and no reason was reported"
        group = f"{len(self.members)} units" if len(self.members) > 1 else "one unit"
        rate = f"{outcome.busbw:.4g} GB/s"
        if usual is None or self.passed:
            return rate
        if self.verdict == "unjudged":
            return f"{rate}; there is nothing to compare it with"
        if usual.floor is not None and not usual.all_below_floor and outcome.busbw < usual.floor:
            return f"{rate}; the limit for {group} is {usual.floor:.4g} GB/s"
        return f"{rate}; usual for {group} is {usual.value:.4g} GB/s"


def judge_probes(rounds: Sequence[Sequence[Outcome]], *, floor: Floor, min_ratio: float = MIN_RATIO) -> list[Probe]:
    """Compare every outcome of all rounds with the groups of the same size, and with the floor for that size.

    A group fails if its data were wrong, if it did not finish, if it is below the floor, or if it is below
    ``min_ratio`` of the usual rate: the ninth decile of the medians of different groups of that size over all rounds,
    or the best of them while they are fewer than 16. A high one, because among few units most groups may contain a bad
    one. From 16 groups on it must also be six standard deviations below the healthy ones.

    If at least four different groups of a size with no unit in all of them have been probed and none reaches the floor,
    the floor shows nothing about a single one: they are only compared with each other, and ``below_floor`` names the
    size.

    A value with no floor and no other group of its size is "unjudged": neither good nor bad.

    Args:
        rounds: the outcomes of each round.
        floor: number of units of a group -> GB/s that it must reach, or None.
        min_ratio: between 0 and 1.
    """
    usual = _usual_rates((outcome for outcomes in rounds for outcome in outcomes), floor=floor, min_ratio=min_ratio)
    return [
        Probe(
            number=number,
            outcome=outcome,
            members=frozenset(outcome.members),
            verdict=_verdict(outcome, usual.get(len(outcome.members))),
            usual=usual.get(len(outcome.members)),
        )
        for number, outcomes in enumerate(rounds, start=1)
        for outcome in outcomes
    ]


def below_floor(rounds: Sequence[Sequence[Outcome]], *, floor: Floor) -> dict[int, tuple[float, float]]:
    """Return the sizes at which every group misses the floor: size -> (best GB/s, floor in GB/s)."""
    usual = _usual_rates((outcome for outcomes in rounds for outcome in outcomes), floor=floor, min_ratio=MIN_RATIO)
    return {size: (of.value, of.floor) for size, of in usual.items() if of.all_below_floor and of.floor is not None}


def _usual_rates(outcomes: Iterable[Outcome], *, floor: Floor, min_ratio: float) -> Mapping[int, UsualRate]:
    values: dict[int, dict[tuple[int, ...], list[float]]] = {}
    for outcome in outcomes:
        if not outcome.broken and outcome.busbw is not None:
            values.setdefault(len(outcome.members), {}).setdefault(outcome.members, []).append(outcome.busbw)
    return {size: _usual_rate(groups, floor(size), min_ratio) for size, groups in values.items()}


def _usual_rate(groups: Mapping[tuple[int, ...], Sequence[float]], floor: float | None, min_ratio: float) -> UsualRate:
    medians = [values[0] if len(values) == 1 else stats.median(values) for values in groups.values()]
    usual = stats.percentile(medians, 90) if len(medians) >= _LARGE_SAMPLE else max(medians)
    threshold: float | None = None
    if len(medians) > 1:
        threshold = min_ratio * usual
        if len(medians) >= _LARGE_SAMPLE:
            healthy = [value for value in medians if value >= threshold]
            threshold = min(threshold, stats.median(healthy) - _SIGMAS * _MAD_TO_SIGMA * stats.mad(healthy))
    shared = len(medians) >= _FLEET_GROUPS and not frozenset(min(groups)).intersection(*groups)
    below = floor is not None and shared and all(value < floor for value in medians)
    return UsualRate(value=usual, threshold=threshold, floor=floor, all_below_floor=below)


def _verdict(outcome: Outcome, usual: UsualRate | None) -> Verdict:
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
"""Number of failed probes that only this unit, or this link, explains: the first and two more."""
_CHANCE = 0.001
_RARE_CHANCE = 0.0005
"""A link is not accused while an intermittent end would have spared all its other partners with at least this
probability: the first if the pair has always failed, the second if it has passed too. The second also holds for a unit
of larger groups, and an intermittent one that would have failed with it only."""
_FALSE_ALARM = 0.0002
"""A unit is not accused while one of all units would collect as many failures with at least this probability, if each
unit failed as often as the others do."""
_PRIOR_FAILURES, _PRIOR_PROBES = 0.5, 50.0
"""How often a probe fails with no unit at fault is unknown at first: 1 %, with the weight of fifty probes."""
_LINES = 8

Members = frozenset[int]


class Evidence:
    """What follows from all probes so far.

    A failed probe is *explained* if a culprit is in it. One that is not *implicates* a unit if no other unit in it can
    be at fault: each of the others has passed, without that unit, in a group that was no smaller, and has failed in no
    smaller or equal group without it, unless with one that has never passed with another. Where that holds for two
    units, as for the ends of a bad link, the probe implicates neither. A group in which a pair fails implicates no
    unit.

    A unit is a culprit if three probes implicate it, more than chance explains where any probe may fail. Where it
    failed alone, another must have passed alone. Else they are with three different groups of others, or with two where
    no more have passed at all. Where they are groups of three or more, no such group may have passed with it or failed
    without it, and enough of both have that chance is ruled out (Fisher's exact test).

    A link between two units is a culprit if the pair has failed three times, if neither of the two has failed without
    the other, and if since the first failure each has passed so often with others that chance is ruled out (Fisher's
    exact test).

    Everything is computed again from all probes, so an accusation is withdrawn if a later probe contradicts it.
    """

    def __init__(self, units: Sequence[int], probes: Sequence[Probe], *, name: Callable[[int], str] = str) -> None:
        self.units = tuple(units)
        self.probes = tuple(probes)
        self._name = name
        self._passes: dict[int, list[Probe]] = {unit: [] for unit in units}
        self._probes: dict[int, list[Probe]] = {unit: [] for unit in units}
        for probe in probes:
            for unit in probe.members:
                self._probes[unit].append(probe)
                if not probe.failed:
                    self._passes[unit].append(probe)
        with_others = {unit: [probe for probe in self._passes[unit] if len(probe.members) > 1] for unit in units}
        self._not_failed_with_others = {unit for unit in units if with_others[unit]}
        self._passed_with_others = {unit for unit in units if any(probe.passed for probe in with_others[unit])}
        self.unexplained = [probe for probe in probes if probe.failed]
        self.reproduced = bool(self.unexplained)
        self._failures = self._failures_by_unit()
        accused: list[tuple[int, ...]] = []
        while (found := self._next_culprit()) is not None:
            accused.append(found)
            self.unexplained = [probe for probe in self.unexplained if not probe.members.issuperset(found)]
            self._failures = self._failures_by_unit()
        self.guilty: Members = frozenset(unit for found in accused for unit in found if len(found) == 1)
        # Made after all are known: a failure that one culprit explains does not count for another.
        self.culprits = tuple(self._culprit(found, accused) for found in sorted(accused))

    @property
    def suspects(self) -> Members:
        """Units that have failed alone or in a pair without an explanation."""
        return frozenset(unit for probe in self.unexplained if len(probe.members) <= 2 for unit in probe.members)

    @property
    def undecided(self) -> Members:
        """Units of the smallest unexplained failed groups, and those that never surely passed with others."""
        groups = {probe.members for probe in self.unexplained}
        smallest = [group for group in groups if not any(other < group for other in groups)]
        open_ = {unit for group in smallest for unit in group}
        linked = {unit for culprit in self.culprits for unit in culprit.units}
        return frozenset((open_ | (set(self.units) - self._passed_with_others)) - linked)

    def islands(self) -> list[list[int]]:
        """Return sets of units that pass among themselves and in no group with others, though that was tried.

        The largest set is the main part of the cluster, and not among them. A group with a failed pair shows nothing.
        """
        island_of = {unit: frozenset({unit}) for unit in self.units}
        for probe in self.probes:
            if not probe.failed and not probe.members <= island_of[probe.outcome.members[0]]:
                joined = frozenset().union(*(island_of[unit] for unit in probe.members))
                island_of.update(dict.fromkeys(joined, joined))
        sets = {island for island in island_of.values() if len(island) > 1}
        islands = sorted(sets, key=lambda island: -len(island))[1:]
        small = {probe.members for probe in self.unexplained if len(probe.members) <= 2}
        between = [probe for probe in self.probes if not any(pair < probe.members for pair in small)]
        tried = {
            island: sum(1 for probe in between if probe.members & island and probe.members - island)
            for island in islands
        }
        return [sorted(island) for island in islands if tried[island] >= CONFIRMED]

    def failures(self, unit: int) -> int:
        """Return how many probes with it have failed without an explanation."""
        return len(self._failures[unit])

    def has_passed(self, unit: int) -> bool:
        """Return whether it has been in a group of several that has not failed."""
        return unit in self._not_failed_with_others

    def pairs(self, unit: int) -> Iterator[tuple[int, Probe]]:
        """Yield each pair that it was in, the oldest first: the other unit, and the probe."""
        for probe in self._probes[unit]:
            if len(probe.members) == 2:
                (other,) = probe.members - {unit}
                yield other, probe

    def small_probes(self, unit: int) -> int:
        """Return the number of probes of it, alone or in a pair."""
        return sum(len(probe.members) <= 2 for probe in self._probes[unit])

    def alone(self, unit: int) -> list[Probe]:
        """Return the probes of it alone."""
        return [probe for probe in self._probes[unit] if len(probe.members) == 1]

    def _failures_by_unit(self) -> dict[int, list[Probe]]:
        failures: dict[int, list[Probe]] = {unit: [] for unit in self.units}
        for probe in self.unexplained:
            for unit in probe.members:
                failures[unit].append(probe)
        return failures

    def _next_culprit(self) -> tuple[int, ...] | None:
        against: dict[int, list[Probe]] = {}
        small = {probe.members for probe in self.unexplained if len(probe.members) <= 2}
        for probe in self.unexplained:
            if any(group < probe.members for group in small):
                continue  # the failure of a part of it has to be explained first
            implicated = self._implicated(probe)
            if len(implicated) == 1:
                against.setdefault(implicated[0], []).append(probe)
        for unit in sorted(against, key=lambda unit: (-len(against[unit]), unit)):
            if len(against[unit]) >= CONFIRMED and self._is_confirmed(unit, against[unit]):
                return (unit,)
        pairs = Counter(probe.outcome.members for probe in self.unexplained if len(probe.members) == 2)
        return next((pair for pair in sorted(pairs) if pairs[pair] >= CONFIRMED and self._is_bad_link(pair)), None)

    def _implicated(self, probe: Probe) -> list[int]:
        """Return the units that may be at fault in a failed probe, if no other unit in it can."""
        if len(probe.members) == 1 and not any(any(self._good_groups(unit, probe)) for unit in self.units):
            return []  # no unit is good alone: the cause may be shared
        never_passed = [unit for unit in probe.members if not any(self._good_groups(unit, probe))]
        if len(never_passed) > 1:
            return []
        return [
            unit
            for unit in never_passed or probe.members
            if all(self._is_exonerated(other, unit, probe) for other in probe.members if other != unit)
        ]

    def _good_groups(self, unit: int, failed: Probe) -> Iterator[Members]:
        """Yield the groups that have passed with it, no smaller than a failed one."""
        size = len(failed.members)
        return (probe.members for probe in self._passes[unit] if len(probe.members) >= size and probe.clears(failed))

    def _is_exonerated(self, unit: int, without: int, failed: Probe) -> bool:
        return any(without not in members for members in self._good_groups(unit, failed)) and all(
            without in other.members
            or len(other.members) > len(failed.members)
            or any(member != unit and member not in self._not_failed_with_others for member in other.members)
            for other in self._failures[unit]
        )

    def _is_confirmed(self, unit: int, against: Sequence[Probe]) -> bool:
        """Return whether the probes that implicate a unit are more than its partners, or chance, explain."""
        sizes = [len(probe.members) for probe in against]
        if 1 in sizes:
            return self._exceeds_chance(unit, {1, 2})
        others = sum(1 for other in self._not_failed_with_others if other != unit)
        if len({probe.members for probe in against}) < max(2, min(CONFIRMED, others)):
            return False
        if 2 in sizes:
            return self._exceeds_chance(unit, {2})
        # In larger groups an intermittent unit of all that failed may be at fault: with this one all fail, and without
        # it, but with all those, all pass.
        large = [probe for probe in self.probes if len(probe.members) >= min(sizes)]
        with_it = [probe for probe in large if unit in probe.members]
        common = frozenset.intersection(*(probe.members for probe in with_it)) - {unit}
        without = [probe for probe in large if unit not in probe.members and probe.members >= common]
        passed = sum(all(map(probe.clears, with_it)) for probe in without)
        return (
            all(probe.failed == (unit in probe.members) for probe in large)
            and passed >= CONFIRMED
            and (not common or _RARE_CHANCE * math.comb(len(with_it) + passed, passed) >= 1)
        )

    def _exceeds_chance(self, unit: int, sizes: set[int]) -> bool:
        """Return whether it failed too often for failures that any unit may have (binomial, for one of all units)."""
        own = [probe for probe in self._probes[unit] if len(probe.members) in sizes]
        failed = sum(probe in self._failures[unit] for probe in own)
        others = self._not_failed_with_others - {unit}
        known = [probe for probe in self.probes if len(probe.members) in sizes and probe.members <= others]
        background = sum(probe in self.unexplained for probe in known)
        rate = (_PRIOR_FAILURES + background) / (_PRIOR_PROBES + len(known))
        chance = sum(
            math.comb(len(own), count) * rate**count * (1 - rate) ** (len(own) - count)
            for count in range(failed, len(own) + 1)
        )
        return chance * len(self.units) < _FALSE_ALARM

    def _is_bad_link(self, pair: Sequence[int]) -> bool:
        of_pair = [probe for probe in self._probes[pair[0]] if probe.members == set(pair)]
        # The partner of an end at its first failure is no evidence: there has to be one.
        first = next(index for index, probe in enumerate(of_pair) if probe.failed)
        again = of_pair[first + 1 :]
        failed = sum(probe.failed for probe in again)
        allowed = _CHANCE if failed == len(of_pair) - 1 else _RARE_CHANCE
        for unit in pair:
            elsewhere = [probe for other, probe in self.pairs(unit) if other not in pair]
            if any(probe in self._failures[unit] for probe in elsewhere):
                return False  # it fails with others too
            apart = sum(probe.passed for probe in elsewhere if probe.number > of_pair[first].number)
            if math.comb(len(again), failed) > allowed * math.comb(len(again) + apart, failed):
                return False
        return True

    def _culprit(self, found: tuple[int, ...], accused: Sequence[tuple[int, ...]]) -> Culprit:
        others = [other for other in accused if other != found]
        own = [
            probe
            for probe in self._probes[found[0]]
            if probe.members.issuperset(found) and not any(probe.members.issuperset(other) for other in others)
        ]
        sizes = {len(probe.members) for probe in own if probe.failed}
        if len(found) == 2:
            sizes = {2}  # a larger group need not use the link
        elif 1 in sizes or 2 in sizes:
            sizes &= {1, 2}
        counted = [probe for probe in own if len(probe.members) in sizes and probe.verdict != "unjudged"]
        failed = [probe for probe in counted if probe.failed]
        return Culprit(
            units=found,
            kind="unit" if len(found) == 1 else "link",
            failed=len(failed),
            probes=len(counted),
            evidence=tuple(self._evidence_lines(found, failed)),
        )

    def _evidence_lines(self, found: tuple[int, ...], failed: Sequence[Probe]) -> Iterator[str]:
        partners: set[int] = set()
        for probe in failed[:_LINES]:
            others = sorted(probe.members - set(found))
            partners.update(others)
            partner_text = f"with {some_of([*map(self._name, others)], 4)}" if others else "alone"
            yield f"round {probe.number}, {partner_text if len(found) == 1 else 'the two'}: {probe.reason}"
        if len(failed) > _LINES:
            yield f"and {len(failed) - _LINES} more that failed"
        for unit in found if len(found) == 2 else ():
            passed = sum(probe.passed for other, probe in self.pairs(unit) if other not in found)
            yield f"{self._name(unit)} passed {passed} pairs with others"
        exonerated = [
            unit
            for unit in sorted(partners)
            if any(not probe.members.issuperset(found) for probe in self._passes[unit])
        ]
        if exonerated and len(found) == 1:
            yield f"passed without it: {some_of([*map(self._name, exonerated)], 4)}"
