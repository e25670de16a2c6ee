"""Which groups to probe next, so that few rounds find the culprits and no healthy unit is accused.

:func:`pairing` selects the partners of a round of pairs; :class:`Planner` plans the rounds of disjoint groups.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from random import Random

from pytest_gpucluster.isolation.finding import IsolationResult, Outcome
from pytest_gpucluster.isolation.inference import CONFIRMED, MIN_RATIO, Evidence, Probe, below_floor, judge_probes
from pytest_gpucluster.isolation.round_robin import count_of_rounds, pair, partner
from pytest_gpucluster.text import some_of

_APART = 3
"""Probes with others between two of a pair that has failed and passed: it is intermittent, so others show more."""


def pairing(evidence: Evidence, number: int) -> list[tuple[int, ...]]:
    """Return disjoint pairs of all units but the culprits, for the ``number``-th such round in a row.

    While there is no suspect, it is the next round of a tournament, in which every unit meets every other one. Else a
    unit that has failed comes first, and gets the least suspected partner among those it has met least. A pair that
    failed is probed again once both have passed with another. A unit that failed alone is probed alone again. Of an odd
    number one is left out, each time another.
    """
    units = [unit for unit in evidence.units if unit not in evidence.guilty]
    suspects = evidence.suspects
    linked = {culprit.units for culprit in evidence.culprits if culprit.kind == "link"}
    if not suspects and not linked:
        return _tournament(evidence, units)
    alone = {unit for unit in units if _is_probed_alone(evidence, unit, number)}
    met: dict[int, dict[int, int]] = {unit: {} for unit in units if unit not in alone}
    for unit, partners in met.items():
        for other, _ in evidence.pairs(unit):
            partners[other] = partners.get(other, 0) + 1

    def priority(unit: int) -> tuple[int, ...]:
        probes = sum(met[unit].values())
        if unit not in suspects:
            return 2, probes, unit
        # Units with a partner still to meet go first; else a bad one takes the only partner each time.
        has_new = len(met[unit].keys() & met.keys()) < len(met) - 1
        return (0, -evidence.failures(unit), unit) if has_new else (1, probes, unit)

    left = dict.fromkeys(sorted(met, key=priority))
    groups: list[tuple[int, ...]] = [(unit,) for unit in alone]
    while len(left) > 1:
        unit = next(iter(left))
        del left[unit]
        if unit in suspects:
            mate = _retried_partner(evidence, unit, left)
        else:
            mate = next((other for other in left if other not in met[unit]), None)
        if mate is None:
            mate = min(
                left,
                key=lambda other: (
                    pair(unit, other) in linked,
                    met[unit].get(other, 0),
                    other in suspects and unit in suspects,
                    evidence.failures(other) if unit in suspects else 0,
                ),
            )
        del left[mate]
        groups.append(pair(unit, mate))
    return sorted(groups)


def _tournament(evidence: Evidence, units: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the pairs of the next round; all continue from the unit that has been in most pairs."""
    if len(units) < 2:
        return []
    round_ = max(sum(1 for _ in evidence.pairs(unit)) for unit in units) % count_of_rounds(len(units))
    # Neighbours meet in the first round: they mostly share a switch, so it tests them and not the links beyond.
    first = [(seat, partner(seat, 0, len(units))) for seat in range(len(units))]
    seats = [seat for one, other in first if other is not None and one < other for seat in (one, other)]
    seats += [one for one, other in first if other is None]
    unit_of = dict(zip(seats, units, strict=True))
    met = ((seat, partner(seat, round_, len(units))) for seat in range(len(units)))
    return sorted(pair(unit_of[one], unit_of[other]) for one, other in met if other is not None and one < other)


def _is_probed_alone(evidence: Evidence, unit: int, number: int) -> bool:
    probes = evidence.alone(unit)
    if unit not in evidence.suspects or not any(probe.failed for probe in probes):
        return False
    return all(probe.failed for probe in probes) or number % 2 == 0


def _retried_partner(evidence: Evidence, unit: int, left: Collection[int]) -> int | None:
    """Return the partner of a failed pair that is due again, because each of the two has passed with another since."""
    pairs = list(evidence.pairs(unit))
    failed_with = {other for other, probe in pairs if probe.failed and probe in evidence.unexplained}
    if len(failed_with) != 1 or not failed_with <= set(left):
        return None
    (mate,) = failed_with
    apart = 1 if all(probe.failed for other, probe in pairs if other == mate) else _APART
    for one, other in ((unit, mate), (mate, unit)):
        since = 0
        for met, probe in evidence.pairs(one):
            since = 0 if met == other else since + probe.passed
        if since < apart:
            return None
    return mate


Group = tuple[int, ...]
Round = Sequence[Group]
Work = Iterator[Round]

_TOURNAMENT_UNITS = 6
"""Up to this number of units each meets every other one first: that costs no more than halving."""
_QUIET_ROUNDS = 12
"""Rounds of pairs without a new failure that end the search for one that has occurred once."""
_STUCK_ROUNDS = 24
"""Rounds of pairs without a new culprit that end it, whatever fails."""
_NO_PASS_ROUNDS = 4
"""If no pair has passed in this number of rounds of pairs, there is no unit to compare with."""
_ISLAND_ROUNDS = 8
"""Rounds of pairs that are tried where some pass among themselves, and fail with all others."""
_SHOWN_PROBES = 24
"""Probes of a unit, alone or in a pair, in which it fails once with 96 % probability if it fails in one of eight."""
_NAMED_PROBES = 72
"""Probes of a unit after which it would have been named with 96 % or more if it fails in one of eight (simulated:
docs/simulations.md)."""
MAX_ROUNDS = 120
"""The budget. Random failures of any unit would else keep the search going."""
_SURE_ROUNDS = 9
"""How often a group is probed without a unit, and without another one, until that unit is sure to be the culprit."""
_NARROW_ROUNDS = 24
"""Rounds without a failure that end the search for two ends that fail together now and then."""
_TRIES = 4
"""How often all are probed at once, if nothing fails."""
_RETRY_ROUNDS = 3
"""Rounds of pairs with new partners in between."""


class Planner:
    """Plans rounds of disjoint groups, takes their outcomes, and returns what follows from them.

    The order of work: each unit alone; all in pairs; each unit that failed with other partners that have passed, until
    the fault is confirmed to be one unit's or one link's; then the rest at once. If that fails although all pairs pass,
    only larger groups show the fault: groups are halved while a half fails; if neither does, the two ends of a link are
    searched crosswise, and then the unit without which the group passes. If nothing fails at all it is tried again with
    new partners, a few times. Last, what looks fine is probed again in pairs until an intermittent fault is excluded.

    >>> planner = Planner([0, 1, 2])
    >>> planner.next_round()
    ((0,), (1,), (2,))

    Args:
        units: nodes, or the GPUs of one node: different numbers.
        floor: number of units of a group -> GB/s that the limits require of such a group, or None.
        min_ratio: below this share of the usual rate for as many units, a group is slow.
        name: unit -> its name in the evidence.
        alone: whether a unit by itself has links to probe: a node of several GPUs does, a single GPU does not.

    Raises:
        ValueError: there are no units, or one of them is given twice.
    """

    def __init__(
        self,
        units: Sequence[int],
        *,
        floor: Callable[[int], float | None] = lambda units: None,
        min_ratio: float = MIN_RATIO,
        name: Callable[[int], str] = str,
        alone: bool = True,
    ) -> None:
        self._units = tuple(sorted(units))
        if not self._units or len(set(self._units)) < len(self._units):
            raise ValueError(f"units must be different numbers, one or more, not {list(units)!r}")
        self._floor = floor
        self._min_ratio = min_ratio
        self._name = name
        self._alone = alone
        self._rounds: list[tuple[Outcome, ...]] = []
        self._evidence = Evidence(self._units, [], name=name)
        self._requested: tuple[Group, ...] | None = None
        self._halved: set[Group] = set()
        self._inspected: set[Group] = set()
        self._work = itertools.chain(self._plan(), self._exclude_intermittent())
        self._done = False
        self.repeats = False
        """Whether all else is done, and pairs are only repeated to exclude an intermittent fault."""

    def next_round(self) -> tuple[Group, ...] | None:
        """Return the disjoint groups to probe at once, or None when nothing is left to do.

        Raises:
            RuntimeError: the outcomes of the previous round were not taken yet.
        """
        if self._requested is not None:
            raise RuntimeError("take() the outcomes of the last round before asking for the next one")
        if self._done or len(self._rounds) >= MAX_ROUNDS:
            return None
        groups = next(self._work, None)
        self._done = groups is None
        self._requested = None if groups is None else tuple(groups)
        return self._requested

    def take(self, outcomes: Sequence[Outcome]) -> None:
        """Take the outcomes of the groups of the last round, in any order.

        Raises:
            RuntimeError: no round was requested.
            ValueError: the outcomes are not those of its groups.
        """
        if self._requested is None:
            raise RuntimeError("there is no round to take the outcomes of: call next_round() first")
        if sorted(outcome.members for outcome in outcomes) != sorted(self._requested):
            found = [outcome.members for outcome in outcomes]
            raise ValueError(f"one outcome for each group of the round is needed, {self._requested!r}, not {found!r}")
        self._rounds.append(tuple(outcomes))
        self._requested = None
        probes = judge_probes(self._rounds, floor=self._floor, min_ratio=self._min_ratio)
        self._evidence = Evidence(self._units, probes, name=self._name)

    def finding(self) -> IsolationResult:
        """Return the result so far. It may be called at any time; what is undecided then is listed as such."""
        evidence = self._evidence
        accused = {unit for culprit in evidence.culprits for unit in culprit.units}
        undecided = evidence.undecided
        return IsolationResult(
            culprits=evidence.culprits,
            cleared=tuple(unit for unit in self._units if unit not in accused and unit not in undecided),
            undecided=tuple(sorted(undecided)),
            rounds=tuple(self._rounds),
            why_undecided="; ".join([*self._reasons(), *self._not_excluded()]),
            reproduced=evidence.reproduced,
            unjudged=len(self._unjudged()),
        )

    # What is probed, in order. Each round is yielded; when the generator resumes, its outcomes have been taken.

    def _plan(self) -> Work:
        if self._alone:
            yield [(unit,) for unit in self._units]
        if len(self._units) == 1:
            while self._evidence.suspects and len(self._rounds) < CONFIRMED:
                yield [self._units]
            return
        rounds = len(self._units) - 1 + len(self._units) % 2
        yield from self._settle(rounds if len(self._units) <= _TOURNAMENT_UNITS else 1)
        for _ in range(_TRIES):
            while True:
                known = len(self._evidence.culprits)
                rest = self._rest()
                if len(rest) < 2:
                    return
                yield [rest]
                if self._is_fleet():
                    return
                # Where its speed cannot be judged, its parts may show it, once.
                if self._has_failed(rest) or (not self._has_passed(rest) and rest not in self._halved):
                    yield from self._halve(rest)
                if len(self._evidence.culprits) == known:
                    break
            if self._evidence.suspects or (self._evidence.culprits and not self._evidence.unexplained):
                return
            yield from self._settle(_RETRY_ROUNDS)

    def _exclude_intermittent(self) -> Work:
        """Probe all but the culprits again in pairs, until a fault that shows now and then would have been found.

        Among two units no pair can name one of them, so they are mostly probed alone.
        """
        for number in itertools.count():
            now = self._evidence
            left = [unit for unit in self._units if unit not in now.guilty]
            hopeless = self._is_fleet() or not any(map(now.has_passed, left)) or bool(now.islands())
            alone = self._alone and len(left) == 2 and number % 3 > 0
            groups = [(unit,) for unit in left] if alone else pairing(now, number)
            if hopeless or not groups or self._is_excluded(left):
                return
            self.repeats = True
            yield groups

    def _is_excluded(self, units: Sequence[int]) -> bool:
        """Return whether an intermittent fault would have been named by now, or shown where a culprit is known.

        Two failures that have a unit in common are pursued as long as the rounds last.
        """
        now = self._evidence
        if any(now.failures(unit) > 1 for unit in now.suspects):
            return False
        enough = _SHOWN_PROBES if now.culprits and not now.unexplained else _NAMED_PROBES
        return all(now.small_probes(unit) >= enough for unit in units)

    def _is_fleet(self) -> bool:
        """Return whether every pair is too slow by the limits: then larger groups would show nothing more."""
        return 2 in below_floor(self._rounds, floor=self._floor)

    def _rest(self) -> Group:
        """Return the units to probe at once: no culprit, no suspect, and one end of a bad link only."""
        out = self._evidence.guilty | self._evidence.suspects
        out |= {culprit.units[0] for culprit in self._evidence.culprits if culprit.kind == "link"}
        return tuple(unit for unit in self._units if unit not in out)

    def _settle(self, least: int) -> Work:
        """Probe in pairs for ``least`` rounds or more: until every failure of a pair or a unit is explained."""
        rounds = quiet = stuck = 0
        while True:
            groups = pairing(self._evidence, rounds)
            if not groups:
                return
            before = self._evidence
            yield groups
            rounds += 1
            now = self._evidence
            quiet = quiet + 1 if len(now.unexplained) <= len(before.unexplained) else 0
            stuck = stuck + 1 if len(now.culprits) <= len(before.culprits) else 0
            if rounds >= least and (not now.suspects or quiet >= _QUIET_ROUNDS or stuck >= _STUCK_ROUNDS):
                return
            if rounds >= _NO_PASS_ROUNDS and not any(now.has_passed(unit) for unit in self._units):
                return
            if rounds >= _ISLAND_ROUNDS and now.suspects and now.islands():
                return

    def _halve(self, group: Group) -> Work:
        """Halve a group that has failed while a half of it fails, then inspect what is left."""
        self._halved.add(group)
        failed, parts, whole = [group], [group], []
        while failed:
            parts = [half for part in parts for half in _halves(part) if len(half) > 1]
            if not parts:
                break
            yield parts
            below = []
            for one in failed:
                bad = [half for half in _halves(one) if self._has_failed(half)]
                below += [half for half in bad if len(half) > 2]
                if not bad:
                    whole.append(one)
            failed = below
        for one in whole:
            if not self._evidence.suspects:
                yield from self._inspect(one)
        if self._evidence.suspects:
            yield from self._settle(1)

    def _inspect(self, group: Group) -> Work:
        """Inspect a group that has failed, and whose halves pass: a link between them, or a unit among many."""
        yield [group]
        if not all(probe.failed for probe in self._evidence.probes if probe.members == frozenset(group)):
            yield from self._settle(_QUIET_ROUNDS)  # it comes and goes: pairs show a unit that does so sooner
            yield from self._narrow(group)
            return
        if group in self._inspected:
            return
        self._inspected.add(group)
        left, right = _halves(group)
        if len(left) > 1:
            yield [_join(left[-1:], right[:1]), _join(left[:1], right[-1:])]  # neighbours in a ring of all
            if self._evidence.suspects:
                return
        yield from self._cross(left, right)
        if not self._evidence.suspects:
            yield from self._needed(group)

    def _narrow(self, group: Group) -> Work:
        """Search two ends that fail together now and then: a part that fails has both. It is split anew each time."""
        random, quiet = Random(len(group)), 0
        while len(group) > 2 and quiet < _NARROW_ROUNDS:
            if not any(probe.members == frozenset(group) for probe in self._evidence.unexplained):
                return
            parts = [part for part in map(_join, _halves(tuple(random.sample(group, len(group))))) if len(part) > 1]
            yield parts
            failed = [part for part in parts if self._has_failed(part)]
            group, quiet = (failed[0], 0) if failed else (group, quiet + 1)
        if self._evidence.suspects:
            yield from self._settle(1)

    def _cross(self, left: Group, right: Group) -> Work:
        """Search the two ends of a link: both sides pass, and the whole group fails."""
        while len(left) + len(right) > 2:
            (a, b), (c, d) = _halves(left), _halves(right)
            for sides in (((a, c), (b, d)), ((a, d), (b, c))):
                met = [(one, other) for one, other in sides if one and other]
                yield [_join(one, other) for one, other in met]
                bad = [(one, other) for one, other in met if self._has_failed(_join(one, other))]
                if bad:
                    left, right = bad[0]
                    break
            else:
                return

    def _needed(self, group: Group) -> Work:
        """Search the unit without which a group passes, by leaving parts out; others that passed take their places."""
        spare = [unit for unit in self._rest() if unit not in group]

        def without(out: Group) -> Group:
            return _join(tuple(unit for unit in group if unit not in out), tuple(spare[: len(out)]))

        left, size, sure = group, max(1, len(group) // 4), False
        while len(left) > 1:
            out = left[: max(1, min(len(left) // 2, size))]
            yield [without(out)]
            if self._has_failed(without(out)):
                left = tuple(unit for unit in left if unit not in out)
                continue
            if not sure:  # does it pass without these units, or without any as many?
                other = tuple(unit for unit in group if unit not in out)[: len(out)]
                yield [without(other)]
                sure = self._has_failed(without(other))
                if not sure and len(out) == 1:
                    return
                size = size if sure else len(out) // 2
            left = out if sure else left
        others = itertools.cycle((unit,) for unit in group if unit not in left)
        for other in itertools.islice(others, _SURE_ROUNDS):
            for out in (left, other):  # it passes each time without the one, and never without another
                if self._evidence.guilty.issuperset(left):
                    return
                yield [without(out)]
                if self._has_failed(without(out)) is (out == left):
                    return

    def _last(self, group: Group) -> Probe | None:
        wanted = frozenset(group)
        return next((probe for probe in reversed(self._evidence.probes) if probe.members == wanted), None)

    def _has_failed(self, group: Group) -> bool:
        """Return whether the last probe of a group has failed."""
        last = self._last(group)
        return last is not None and last.failed

    def _has_passed(self, group: Group) -> bool:
        """Return whether the last probe of a group has passed. Where its speed cannot be judged, it has not."""
        last = self._last(group)
        return last is not None and last.passed

    def _reasons(self) -> Iterator[str]:
        found = self._evidence
        if not self._rounds:
            yield "nothing was probed"
            return
        if not (self._done or self.repeats):
            yield f"the search ended after {len(self._rounds)} rounds, before it was complete"
        elif not found.reproduced:
            yield f"nothing failed again in {len(self._rounds)} rounds of probes"
        for size, (usual, needed) in sorted(below_floor(self._rounds, floor=self._floor).items()):
            group = "none alone" if size == 1 else f"no group of {size}"
            yield (
                f"{group} reaches the limit of {needed:.4g} GB/s (usual is {usual:.4g} GB/s), so the cause is not a"
                " single one; look at what all share: NCCL's settings and transport, the switches"
            )
            return
        for island in found.islands():
            yield (
                f"{self._few(island)} pass among themselves and fail with all others: look at the link between them,"
                " such as a switch"
            )
        if found.unexplained:
            yield self._unconfirmed()
        unjudged = self._unjudged()
        if unjudged:
            yield f"{len(unjudged[-1].members)} at once reached {unjudged[-1].reason}"

    def _unjudged(self) -> list[Probe]:
        probes = self._evidence.probes
        return [probe for probe in probes if probe.verdict == "unjudged" and probe.outcome.busbw is not None]

    def _not_excluded(self) -> Iterator[str]:
        """Yield which intermittent faults those that are cleared may have all the same."""
        accused = {unit for culprit in self._evidence.culprits for unit in culprit.units}
        cleared = [unit for unit in self._units if unit not in accused | self._evidence.undecided]
        if len(cleared) < 2:
            return
        met: Counter[Group] = Counter()
        for unit in cleared:
            met.update(pair(unit, other) for other, _ in self._evidence.pairs(unit) if unit < other)
        unit = min(sum(1 for _ in self._evidence.pairs(unit)) for unit in cleared)
        link = min(met[two] for two in itertools.combinations(cleared, 2))
        yield (
            f"not excluded: a unit that is bad {_rarer_than(unit)} (each was in {unit} or more pairs),"
            f" or a link that is bad {_rarer_than(link)} ({link} or more probes)"
        )

    def _unconfirmed(self) -> str:
        found = self._evidence
        left = [unit for unit in self._units if unit not in found.guilty]
        if len(self._units) == 1:
            return "there is only one unit, and none to compare it with"
        if len(left) == 2 and any(len(probe.members) == 2 for probe in found.unexplained):
            return "with two units it is unknown whether one of them or the link between them is at fault"
        if not any(found.has_passed(unit) for unit in left) and len(left) > 1:
            return "no unit has passed with another: none is known to be good, and all may share the cause"
        smallest = min(found.unexplained, key=lambda probe: (len(probe.members), probe.number))
        same = [probe for probe in found.probes if probe.members == smallest.members]
        failed = sum(probe.failed for probe in same)
        parts = " although its parts pass" if len(smallest.members) > 2 else ""
        return (
            f"not confirmed: {self._few(smallest.outcome.members)} failed {failed} of {len(same)} probes{parts}"
            f" (round {smallest.number}: {smallest.reason})"
        )

    def _few(self, units: Sequence[int]) -> str:
        return some_of([*map(self._name, units)], 4)


def _rarer_than(probes: int) -> str:
    """Return which faults a number of probes shows once with a probability below 90 %."""
    often = int(1 / (1 - 0.1 ** (1 / probes))) if probes else 0
    return f"less often than in one probe of {often}" if often > 1 else "now and then"


def _halves(group: Group) -> tuple[Group, Group]:
    middle = len(group) // 2
    return (group[:middle], group[middle:]) if middle else (group, ())


def _join(*groups: Iterable[int]) -> Group:
    return tuple(sorted(unit for group in groups for unit in group))
