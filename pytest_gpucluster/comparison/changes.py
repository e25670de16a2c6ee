"""What has become of one metric of one test, on all ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from pytest_gpucluster.comparison.conditions import OF_A_SEARCH, STATES
from pytest_gpucluster.comparison.places import Match
from pytest_gpucluster.comparison.rule import KINDS, MISSING, NOT_COMPARABLE, Known, weigh
from pytest_gpucluster.comparison.side import Key, Tested, Values, key_of
from pytest_gpucluster.journal_lines import RankPlace

FOUND_LABELS = ("transport", "nics")
"""Labels that say what was found, and not what was asked for: such a value is the same one with another label."""
_FOUND_BY_A_SEARCH = ("m", "n", "k", "layout")
"""The same of the best of a search alone: elsewhere another size is another value."""


@dataclass(frozen=True, kw_only=True)
class Pair:
    """One rank's value before and now. ``rank`` is its number now, or before where it has none now."""

    kind: str
    rank: int | None = None
    """None for what concerns the whole run."""
    old_rank: int | None = None
    by: str = ""
    """How the two ranks were found to belong together."""
    old: Known | None = None
    new: Known | None = None
    change: float | None = None
    """A share; positive is better."""
    why: str = ""

    @property
    def badness(self) -> tuple[int, float]:
        """Return what to sort by: the worst comes first."""
        return KINDS.index(self.kind), math.inf if self.change is None else self.change


@dataclass(frozen=True, kw_only=True)
class Change:
    """What has become of a metric, or, where ``metric`` is empty, of the outcome of a test."""

    nodeid: str
    name: str
    criterion: str | None = None
    metric: str = ""
    labels: Mapping[str, str]
    unit: str = ""
    higher: bool | None = None
    decides: bool = True
    """Whether the answer of the whole comparison depends on it."""
    pairs: tuple[Pair, ...]
    """The worst first; never empty."""
    note: str = ""

    @property
    def worst(self) -> Pair:
        return self.pairs[0]

    @property
    def kind(self) -> str:
        return self.worst.kind

    @property
    def key(self) -> Key:
        return key_of(self)

    def of_kind(self, kind: str) -> tuple[Pair, ...]:
        """Return the pairs of a kind, the worst first."""
        return tuple(pair for pair in self.pairs if pair.kind == kind)


@dataclass(frozen=True, kw_only=True)
class Terms:
    """How values are compared."""

    allowed: float
    recorded_decide: bool = False
    """Values that no limit judges decide too."""
    why_not: Callable[[str], str] = lambda metric: ""
    """Why a metric cannot be compared between these two runs; empty where it can."""
    of_gpu: Mapping[int, Match]
    """Rank now -> before, for what a GPU does."""
    of_slot: Mapping[int, Match]
    """The same for what a node does."""
    new_ranks: Mapping[int, RankPlace]


def changes_of(old: Tested, new: Tested, terms: Terms) -> Iterator[Change]:
    """Yield what has become of each metric of a test; of one that only one side has, too."""
    partners = dict(_partners(old.values, new.values))
    for key, now in new.values.items():
        before = old.values.get(partners.get(key, key))
        if before is None:
            yield _one_sided(now, new, "now", terms)
        else:
            yield _change(before, now, new, terms)
    used = set(partners.values())
    for key, before in old.values.items():
        if key not in used:
            yield _one_sided(before, new, "before", terms)


def _partners(old: Mapping[Key, Values], new: Mapping[Key, Values]) -> Iterator[tuple[Key, Key]]:
    """Yield each metric of now with that of before, also where only what was found is labelled otherwise."""
    free: dict[Key, list[Key]] = {}
    for key in old:
        if key not in new:
            free.setdefault(_asked(key), []).append(key)
    for key in new:
        if key in old:
            yield key, key
        elif free.get(_asked(key)):
            yield key, free[_asked(key)].pop(0)


def _asked(key: Key) -> Key:
    found = found_labels(key[0])
    return key[0], tuple((name, text) for name, text in key[1] if name not in found)


def found_labels(metric: str) -> tuple[str, ...]:
    """Return the labels of a metric that say what was found, and not what was asked for."""
    return (*FOUND_LABELS, *_FOUND_BY_A_SEARCH) if metric.endswith(OF_A_SEARCH) else FOUND_LABELS


def _change(before: Values, now: Values, test: Tested, terms: Terms) -> Change:
    why = terms.why_not(now.metric)
    if not why and before.unit != now.unit:
        why = f"in {before.unit} before, in {now.unit} now"
    if not why and now.higher is None:
        why = "nobody has said whether more of it is better or less"
    if why:
        pairs = [Pair(kind=NOT_COMPARABLE, why=why)]
    elif now.scope == "world":
        pairs = [_weighed(_worst(before), _worst(now), now, terms)]
    else:
        pairs = list(_by_rank(before, now, terms))
    found = [
        f"{name} {before.labels.get(name, 'unknown')} before, {now.labels.get(name, 'unknown')} now"
        for name in found_labels(now.metric)
        if before.labels.get(name) != now.labels.get(name)
    ]
    return Change(
        nodeid=test.nodeid,
        name=test.name,
        criterion=test.criterion,
        metric=now.metric,
        labels=now.labels,
        unit=now.unit,
        higher=now.higher,
        decides=_decides(now, terms) or _decides(before, terms),
        pairs=tuple(sorted(pairs, key=lambda pair: pair.badness)),
        note="; ".join(found),
    )


def _by_rank(before: Values, now: Values, terms: Terms) -> Iterator[Pair]:
    matches = terms.of_gpu if now.scope == "rank" else terms.of_slot
    left = dict(before.of_rank)
    for rank, value in now.of_rank.items():
        match = matches.get(rank, None if terms.new_ranks else Match(old=rank, by="rank number"))
        old = left.pop(match.old, None) if match is not None else None
        if match is None or old is None:
            yield Pair(kind=MISSING, rank=rank, new=value, why="no value before")
            continue
        found = _weighed((match.old, old), (rank, value), now, terms)
        swapped = f"another GPU in this slot: {match.swapped} before" if match.swapped else ""
        yield Pair(**{**vars(found), "by": match.by, "why": "; ".join(filter(None, (found.why, swapped)))})
    for rank, value in left.items():
        yield Pair(kind=MISSING, old_rank=rank, old=value, why="no value now")


def _weighed(old: tuple[int, Known], new: tuple[int, Known], now: Values, terms: Terms) -> Pair:
    assert now.higher is not None  # or it is not compared
    found = weigh(old[1], new[1], higher=now.higher, allowed=terms.allowed, limit_max=now.limit_max)
    return Pair(
        kind=found.kind, rank=new[0], old_rank=old[0], old=old[1], new=new[1], change=found.change, why=found.why
    )


def _worst(values: Values) -> tuple[int, Known]:
    """Return the rank with the worst value; one that is no number is the worst of all."""

    def goodness(rank: int) -> float:
        value = values.of_rank[rank].value
        return -math.inf if not math.isfinite(value) else value if values.higher else -value

    rank = min(values.of_rank, key=goodness)
    return rank, values.of_rank[rank]


def _one_sided(values: Values, test: Tested, when: str, terms: Terms) -> Change:
    other = "now" if when == "before" else "before"
    return Change(
        nodeid=test.nodeid,
        name=test.name,
        criterion=test.criterion,
        metric=values.metric,
        labels=values.labels,
        unit=values.unit,
        higher=values.higher,
        decides=_decides(values, terms),
        pairs=(Pair(kind=MISSING, why=f"no such value {other}"),),
    )


def _decides(values: Values, terms: Terms) -> bool:
    if values.higher is None or values.metric in STATES:
        return False
    return terms.recorded_decide or not values.recorded
