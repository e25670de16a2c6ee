"""Who is probed with whom in a round of pairs."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from pytest_gpucluster.isolation.evidence import Evidence
from pytest_gpucluster.links.tournament import count_of_rounds, partner

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
