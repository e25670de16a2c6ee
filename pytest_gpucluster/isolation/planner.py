"""Which groups to probe next, so that few rounds find the culprits and no healthy unit is accused.

:func:`pairing` selects the partners of a round of pairs; :class:`Planner` plans the rounds of disjoint groups.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence

from pytest_gpucluster.isolation.finding import Isolated, Outcome
from pytest_gpucluster.isolation.inference import CONFIRMED, MIN_RATIO, Evidence, Held, below_floor, hold
from pytest_gpucluster.isolation.round_robin import count_of_rounds, partner

_APART = 3
"""Probes with others between two of a pair that has failed and passed: it comes and goes, so others tell more."""


def pairing(evidence: Evidence, number: int) -> list[tuple[int, ...]]:
    """Return disjoint pairs of all units that are no culprits, for the ``number``-th such round in a row.

    While nobody is under suspicion, it is the next round of a tournament, in which everybody meets everybody. Else who
    has failed comes first, and gets the partner that it has met least and that is under the least suspicion. A pair
    that failed is probed again once both have passed with another. Whoever failed alone is probed alone again. Of an
    odd number one is left out, each time another.
    """
    units = [unit for unit in evidence.units if unit not in evidence.guilty]
    suspects = evidence.suspects
    linked = {culprit.units for culprit in evidence.culprits if culprit.kind == "link"}
    if not suspects and not linked:
        return _tournament(evidence, units)
    alone = {unit for unit in units if _alone(evidence, unit, number)}
    met: dict[int, dict[int, int]] = {unit: {} for unit in units if unit not in alone}
    for unit, partners in met.items():
        for other, _ in evidence.pairs(unit):
            partners[other] = partners.get(other, 0) + 1

    def turn(unit: int) -> tuple[int, ...]:
        probes = sum(met[unit].values())
        if unit not in suspects:
            return 2, probes, unit
        # Those who still have somebody new to meet go first; else a bad one takes the only partner each time.
        has_new = len(met[unit].keys() & met.keys()) < len(met) - 1
        return (0, -evidence.failures(unit), unit) if has_new else (1, probes, unit)

    left = dict.fromkeys(sorted(met, key=turn))
    groups: list[tuple[int, ...]] = [(unit,) for unit in alone]
    while len(left) > 1:
        unit = next(iter(left))
        del left[unit]
        if unit in suspects:
            mate = _again(evidence, unit, left)
        else:
            mate = next((other for other in left if other not in met[unit]), None)
        if mate is None:
            mate = min(
                left,
                key=lambda other: (
                    _pair(unit, other) in linked,
                    met[unit].get(other, 0),
                    other in suspects and unit in suspects,
                    evidence.failures(other) if unit in suspects else 0,
                ),
            )
        del left[mate]
        groups.append(_pair(unit, mate))
    return sorted(groups)


def _tournament(evidence: Evidence, units: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the pairs of the next round, in which all go on from whoever has been in most pairs."""
    if len(units) < 2:
        return []
    round_ = max(sum(1 for _ in evidence.pairs(unit)) for unit in units) % count_of_rounds(len(units))
    # Neighbours meet in the first round: they mostly share a switch, so it tests them and not what is beyond.
    first = [(seat, partner(seat, 0, len(units))) for seat in range(len(units))]
    seats = [seat for one, other in first if other is not None and one < other for seat in (one, other)]
    seats += [one for one, other in first if other is None]
    unit_of = dict(zip(seats, units, strict=True))
    met = ((seat, partner(seat, round_, len(units))) for seat in range(len(units)))
    return sorted(_pair(unit_of[one], unit_of[other]) for one, other in met if other is not None and one < other)


def _pair(one: int, other: int) -> tuple[int, ...]:
    return min(one, other), max(one, other)


def _alone(evidence: Evidence, unit: int, number: int) -> bool:
    probes = evidence.alone(unit)
    if unit not in evidence.suspects or not any(one.failed for one in probes):
        return False
    return all(one.failed for one in probes) or number % 2 == 0


def _again(evidence: Evidence, unit: int, left: Collection[int]) -> int | None:
    """Return whom a suspect is probed with again, because each of the two has passed with another since."""
    pairs = list(evidence.pairs(unit))
    failed_with = {other for other, one in pairs if one.failed and one in evidence.unexplained}
    if len(failed_with) != 1 or not failed_with <= set(left):
        return None
    (mate,) = failed_with
    apart = 1 if all(one.failed for other, one in pairs if other == mate) else _APART
    for one, other in ((unit, mate), (mate, unit)):
        since = 0
        for met, probe in evidence.pairs(one):
            since = 0 if met == other else since + probe.passed
        if since < apart:
            return None
    return mate


Group = tuple[int, ...]
Round = Sequence[Group]
Work = Generator[Round, None, None]

_TOURNAMENT = 6
"""Up to so many units every one meets every other, before anything else is tried: that costs no more than to halve."""
_QUIET = 12
"""So many rounds of pairs without a new failure end the search for one that has shown once."""
_STUCK = 24
"""So many rounds of pairs without a new culprit end it, whatever fails."""
_NOBODY = 4
"""If no pair has passed in so many rounds of pairs, there is nobody to compare with."""
_ISLANDS = 8
"""So many rounds of pairs are tried where some pass among themselves, and fail with all others."""
MOST_ROUNDS = 60
"""Where no budget is given: so many rounds end the search. Failures that come to anybody would else keep it going."""
_TRIES = 4
"""How often all are probed together, if nothing shows."""
_ANEW = 3
"""Rounds of pairs with new partners in between."""


class Planner:
    """Plans rounds of disjoint groups, sees nothing but what came of them, and says what follows.

    The order of work: each unit alone; all in pairs; whoever failed with other partners that have passed, until it is
    one unit's or one link's fault beyond doubt; then the rest together. If that fails although all pairs pass, the
    fault shows in larger groups only: groups are halved while a half fails; if neither does, the two ends of a link
    are searched crosswise, and then the unit without which the group passes. If nothing fails at all it is tried
    again with new partners, a few times.

    >>> planner = Planner([0, 1, 2])
    >>> planner.next_round()
    ((0,), (1,), (2,))

    Args:
        units: nodes, or the GPUs of one node: different numbers.
        budget_rounds: plan no more rounds than that; None stands for ``MOST_ROUNDS``, which are seldom needed.
        floor: number of units of a group -> GB/s that the limits demand of such a group, or None.
        min_ratio: below this share of what is usual for as many units, a group is slow.
        name: what a unit is called, in the evidence.
        alone: whether a unit by itself has links to probe: a node of several GPUs does, a single GPU does not.

    Raises:
        ValueError: there are no units, or one of them is there twice.
    """

    def __init__(
        self,
        units: Sequence[int],
        *,
        budget_rounds: int | None = None,
        floor: Callable[[int], float | None] = lambda units: None,
        min_ratio: float = MIN_RATIO,
        name: Callable[[int], str] = str,
        alone: bool = True,
    ) -> None:
        self._units = tuple(sorted(units))
        if not self._units or len(set(self._units)) < len(self._units):
            raise ValueError(f"units must be different numbers, one or more, not {list(units)!r}")
        self._budget_rounds = MOST_ROUNDS if budget_rounds is None else budget_rounds
        self._floor = floor
        self._min_ratio = min_ratio
        self._name = name
        self._alone = alone
        self._rounds: list[tuple[Outcome, ...]] = []
        self._evidence = Evidence(self._units, [], name=name)
        self._asked: tuple[Group, ...] | None = None
        self._narrowed: set[Group] = set()
        self._untangled: set[Group] = set()
        self._work = self._plan()
        self._done = False

    def next_round(self) -> tuple[Group, ...] | None:
        """Return the disjoint groups to probe at once, or None when there is no more to do.

        Raises:
            RuntimeError: the outcomes of the round before were not taken yet.
        """
        if self._asked is not None:
            raise RuntimeError("take() the outcomes of the last round before asking for the next one")
        if self._done or len(self._rounds) >= self._budget_rounds:
            return None
        asked = next(self._work, None)
        self._done = asked is None
        self._asked = None if asked is None else tuple(asked)
        return self._asked

    def take(self, outcomes: Sequence[Outcome]) -> None:
        """Take what came of the groups of the last round, in any order.

        Raises:
            RuntimeError: no round was asked for.
            ValueError: the outcomes are not those of its groups.
        """
        if self._asked is None:
            raise RuntimeError("there is no round to take the outcomes of: call next_round() first")
        if sorted(outcome.members for outcome in outcomes) != sorted(self._asked):
            found = [outcome.members for outcome in outcomes]
            raise ValueError(f"one outcome for each group of the round is needed, {self._asked!r}, not {found!r}")
        self._rounds.append(tuple(outcomes))
        self._asked = None
        held = hold(self._rounds, floor=self._floor, min_ratio=self._min_ratio)
        self._evidence = Evidence(self._units, held, name=self._name)

    def finding(self) -> Isolated:
        """Return what is known by now. It may be asked at any time; what is not decided then is said to be so."""
        found = self._evidence
        blamed = {unit for culprit in found.culprits for unit in culprit.units}
        undecided = found.undecided
        return Isolated(
            culprits=found.culprits,
            cleared=tuple(unit for unit in self._units if unit not in blamed and unit not in undecided),
            undecided=tuple(sorted(undecided)),
            rounds=tuple(self._rounds),
            why_undecided=self._why(),
            reproduced=found.reproduced,
        )

    # What is probed, in order. Each round is yielded; when it goes on, its outcomes have been taken.

    def _plan(self) -> Work:
        if self._alone:
            yield [(unit,) for unit in self._units]
        if len(self._units) == 1:
            while self._evidence.suspects and len(self._rounds) < CONFIRMED:
                yield [self._units]
            return
        rounds = len(self._units) - 1 + len(self._units) % 2
        yield from self._settle(rounds if len(self._units) <= _TOURNAMENT else 1)
        for _ in range(_TRIES):
            while True:
                known = len(self._evidence.culprits)
                rest = self._rest()
                if len(rest) < 2:
                    return
                yield [rest]
                if self._is_fleet():
                    return
                # Where its speed cannot be judged, its parts may tell, once.
                if self._has_failed(rest) or (not self._has_passed(rest) and rest not in self._narrowed):
                    yield from self._narrow(rest)
                if len(self._evidence.culprits) == known:
                    break
            if self._evidence.suspects or (self._evidence.culprits and not self._evidence.unexplained):
                return
            yield from self._settle(_ANEW)

    def _is_fleet(self) -> bool:
        """Return whether every pair is too slow by the limits: then larger groups would not tell anything more."""
        return 2 in below_floor(self._rounds, floor=self._floor)

    def _rest(self) -> Group:
        """Return who may be probed together: no culprit, no suspect, and one end of a bad link only."""
        out = self._evidence.guilty | self._evidence.suspects
        out |= {culprit.units[0] for culprit in self._evidence.culprits if culprit.kind == "link"}
        return tuple(unit for unit in self._units if unit not in out)

    def _settle(self, least: int) -> Work:
        """Probe in pairs, so many rounds or more: until every failure of a pair or a unit is explained."""
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
            if rounds >= least and (not now.suspects or quiet >= _QUIET or stuck >= _STUCK):
                return
            if rounds >= _NOBODY and not any(now.has_passed(unit) for unit in self._units):
                return
            if rounds >= _ISLANDS and now.suspects and now.islands():
                return

    def _narrow(self, group: Group) -> Work:
        """Halve a group that has failed while a half of it fails, then look into what is left."""
        self._narrowed.add(group)
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
                yield from self._untangle(one)
        if self._evidence.suspects:
            yield from self._settle(1)

    def _untangle(self, group: Group) -> Work:
        """Look into a group that has failed, and whose halves pass: a link between them, or a unit among many."""
        yield [group]
        if group in self._untangled or not self._has_failed(group):
            return  # it comes and goes: pairs with new partners find that sooner
        self._untangled.add(group)
        left, right = _halves(group)
        if len(left) > 1:
            yield [_join(left[-1:], right[:1]), _join(left[:1], right[-1:])]  # neighbours in a ring of all
            if self._evidence.suspects:
                return
        yield from self._cross(left, right)
        if not self._evidence.suspects:
            yield from self._needed(group)

    def _cross(self, left: Group, right: Group) -> Work:
        """Search the two ends of a link: both sides pass, together they fail."""
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
        """Search the unit without which a group passes, by leaving parts of it out; others that passed fill it up."""
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
            if not sure:  # does it pass because of whom it lacks, or because it is smaller?
                other = tuple(unit for unit in group if unit not in out)[: len(out)]
                yield [without(other)]
                sure = self._has_failed(without(other))
                if not sure and len(out) == 1:
                    return
                size = size if sure else len(out) // 2
            left = out if sure else left
        others = itertools.cycle((unit,) for unit in group if unit not in left)
        for other in itertools.islice(others, CONFIRMED):
            for out in (left, other):  # it passes each time without the one, and never without another
                if self._evidence.guilty.issuperset(left):
                    return
                yield [without(out)]
                if self._has_failed(without(out)) is (out == left):
                    return

    def _last(self, group: Group) -> Held | None:
        wanted = frozenset(group)
        return next((one for one in reversed(self._evidence.held) if one.members == wanted), None)

    def _has_failed(self, group: Group) -> bool:
        """Return whether the last probe of a group has failed."""
        last = self._last(group)
        return last is not None and last.failed

    def _has_passed(self, group: Group) -> bool:
        """Return whether the last probe of a group has passed. Where its speed cannot be judged, it has not."""
        last = self._last(group)
        return last is not None and last.passed

    def _why(self) -> str:
        return "; ".join(self._reasons())

    def _reasons(self) -> Iterator[str]:
        found = self._evidence
        if not self._rounds:
            yield "nothing was probed"
            return
        if not self._done:
            yield f"the search ended after {len(self._rounds)} rounds, before it was through"
        elif not found.reproduced:
            yield f"nothing failed again in {len(self._rounds)} rounds of probes"
        for size, (usual, needed) in sorted(below_floor(self._rounds, floor=self._floor).items()):
            group = "none alone" if size == 1 else f"no group of {size}"
            yield (
                f"{group} reaches the limit of {needed:.4g} GB/s (usual is {usual:.4g} GB/s): that is more than one of"
                " them; look at what all share: NCCL's settings and transport, the switches"
            )
            return
        for island in found.islands():
            yield (
                f"{self._few(island)} pass among themselves and fail with all others: look at what lies between, such"
                " as a switch"
            )
        if found.unexplained:
            yield self._open()
        together = [one for one in found.held if one.verdict == "unjudged" and one.outcome.busbw is not None]
        if together:
            yield f"{len(together[-1].members)} together did {together[-1].why}"

    def _open(self) -> str:
        found = self._evidence
        left = [unit for unit in self._units if unit not in found.guilty]
        if len(self._units) == 1:
            return "there is only one: nobody to compare it with"
        if len(left) == 2 and any(len(one.members) == 2 for one in found.unexplained):
            return "of two it cannot be told which one it is, or whether it is the link between them"
        if not any(found.has_passed(unit) for unit in left) and len(left) > 1:
            return "nobody has passed with another: none is known to be good, and all may share the cause"
        smallest = min(found.unexplained, key=lambda one: (len(one.members), one.number))
        same = [one for one in found.held if one.members == smallest.members]
        failed = sum(one.failed for one in same)
        parts = " although its parts pass" if len(smallest.members) > 2 else ""
        return (
            f"not confirmed: {self._few(smallest.outcome.members)} failed {failed} of {len(same)} probes{parts}"
            f" (round {smallest.number}: {smallest.why})"
        )

    def _few(self, units: Sequence[int]) -> str:
        more = f" and {len(units) - 4} more" if len(units) > 4 else ""
        return ", ".join(self._name(unit) for unit in units[:4]) + more


def _halves(group: Group) -> tuple[Group, Group]:
    middle = len(group) // 2
    return (group[:middle], group[middle:]) if middle else (group, ())


def _join(*groups: Iterable[int]) -> Group:
    return tuple(sorted(unit for group in groups for unit in group))
