"""Two runs compared: the change of each metric of each test on all ranks, the worst first, and the overall answer."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from pytest_gpucluster.analysis.run_view import (
    OF_A_SEARCH,
    STATES,
    Key,
    Match,
    Side,
    Tested,
    Values,
    key_of,
    match,
    notes,
    obstacles,
    why_not_of,
)
from pytest_gpucluster.analysis.significance import (
    ALLOWED_RATIO,
    BETTER,
    KINDS,
    MISSING,
    NOT_COMPARABLE,
    OPEN,
    REGRESSED,
    SAME,
    Known,
    weigh,
)
from pytest_gpucluster.journal.records import RankPlace

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


REGRESSION = "REGRESSION"
NO_REGRESSION = "NO REGRESSION"
UNDECIDED = "UNDECIDED"
NOT_COMPARED = "NOT COMPARABLE"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What has become of a run."""

    allowed: float
    partial: bool
    """What only one of the two runs has does not make the answer undecided."""
    obstacles: tuple[str, ...]
    """Why nothing can be compared; empty where something can."""
    notes: tuple[str, ...]
    changes: tuple[Change, ...]
    """The worst first; those that decide before those that do not."""

    @property
    def answer(self) -> str:
        """Return the answer: ``REGRESSION``, ``NO_REGRESSION``, ``UNDECIDED`` or ``NOT_COMPARED``."""
        if self.regressed:
            return REGRESSION
        weighed = any(pair.change is not None for change in self.changes if change.decides for pair in change.pairs)
        if self.obstacles or not weighed:
            return NOT_COMPARED
        return UNDECIDED if self.undecided else NO_REGRESSION

    @property
    def regressed(self) -> tuple[Change, ...]:
        """Return what has become worse beyond noise and by more than is allowed."""
        return tuple(change for change in self.changes if change.decides and change.kind == REGRESSED)

    @property
    def undecided(self) -> tuple[Change, ...]:
        """Return what gives no answer, and should."""
        passed_over = (MISSING,) if self.partial else ()
        return tuple(
            change
            for change in self.changes
            if change.decides
            and any(pair.kind in OPEN and pair.kind not in passed_over for pair in change.pairs)
            and change.kind != REGRESSED
        )

    @property
    def counts(self) -> dict[str, int]:
        """Return kind -> how many values of ranks, of those that decide."""
        return dict(Counter(pair.kind for change in self.changes if change.decides for pair in change.pairs))


def terms_of(old: Side, new: Side, *, allowed: float, recorded_decide: bool = False) -> Terms:
    """Return how the values of two runs are compared."""
    return Terms(
        allowed=allowed,
        recorded_decide=recorded_decide,
        why_not=why_not_of(old.facts, new.facts),
        of_gpu=match(old.facts.places, new.facts.places),
        of_slot=match(old.facts.places, new.facts.places, by_gpu=False),
        new_ranks=new.facts.places,
    )


def compare_runs(
    old: Side, new: Side, *, allowed: float = ALLOWED_RATIO, recorded_decide: bool = False, partial: bool = False
) -> Comparison:
    """Compare two runs.

    Args:
        old: the one that is the measure.
        new: the one in question.
        allowed: the ratio by which a value may be worse than before.
        recorded_decide: values that no limit judges decide too.
        partial: what only one of the two has is told, and leaves the answer as it is.
    """
    stop = obstacles(old.facts, new.facts)
    changes: list[Change] = []
    if not stop:
        terms = terms_of(old, new, allowed=allowed, recorded_decide=recorded_decide)
        for nodeid in dict.fromkeys([*new.tests, *old.tests]):
            changes += _of_test(old.tests.get(nodeid), new.tests.get(nodeid), terms)
    return Comparison(
        allowed=allowed,
        partial=partial,
        obstacles=stop,
        notes=() if stop else notes(old.facts, new.facts),
        changes=tuple(sorted(changes, key=lambda change: (not change.decides, *change.worst.badness))),
    )


def _of_test(before: Tested | None, now: Tested | None, terms: Terms) -> Iterator[Change]:
    outcome = _of_outcome(before, now)
    if outcome is not None:
        yield outcome
    if before is not None and now is not None and (before.values or now.values) and _ran(before) and _ran(now):
        yield from changes_of(before, now, terms)


def _of_outcome(before: Tested | None, now: Tested | None) -> Change | None:
    """Return what has become of how a test ended; nothing where there is nothing to say, or its values say it."""
    test = now or before
    assert test is not None  # it is in one of the two
    was, is_now = _ended(before), _ended(now)
    if not _ran(before) and not _ran(now):
        return None
    if before is None or now is None or not (_ran(before) and _ran(now)):
        # Nobody has chosen to leave a test out in which, or before which, the run ended; and no run leaves out what
        # it has failed. So none of these is passed over.
        is_sound = now is None or now.outcome in ("passed", "skipped")
        kind = MISSING if is_sound else NOT_COMPARABLE
        pair = Pair(kind=kind, why=f"{was} before, {is_now} now{_because(now, before)}")
    elif before.outcome == now.outcome:
        if before.values or now.values:
            return None
        pair = Pair(kind=SAME, why=f"{was} before and now")
    elif now.outcome == "failed":
        pair = Pair(kind=REGRESSED, why=f"{was} before, failed now{_because(now)}")
    elif now.outcome == "error":
        pair = Pair(kind=NOT_COMPARABLE, why=f"{was} before, broke now{_because(now)}")
    else:
        pair = Pair(kind=BETTER, why=f"{was} before, passed now")
    return Change(nodeid=test.nodeid, name=test.name, criterion=test.criterion, labels={}, pairs=(pair,), decides=True)


def _ran(test: Tested | None) -> bool:
    return test is not None and test.outcome in ("passed", "failed", "error")


def _ended(test: Tested | None) -> str:
    return "not in the run" if test is None else test.outcome


def _because(*tests: Tested | None) -> str:
    return next((f": {test.message}" for test in tests if test is not None and test.message), "")
