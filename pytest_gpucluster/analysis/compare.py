"""A comparison of two runs: the change of each metric of each test by rank, the worst first, and the overall answer.

A value counts as worse than an earlier one beyond its noise, and by more than the allowed percentage. Each value stands
for an interval that encloses the true median with 95 % confidence. Two values differ where their intervals do not
touch. For values that have not changed that happens in less than 1 % of comparisons: Schenker and Gentleman, "On
Judging the Significance of Differences by Examining the Overlap Between Confidence Intervals" (The American
Statistician 55, 2001), find 0.6 % for two means; intervals of order statistics are rather wider. Samples that depend on
each other give shorter intervals than they should, and so more false alarms (docs/simulations.md).

The interval knows the noise inside a run only, not what changes from one run to the next. The allowed percentage covers
that.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace

from pytest_gpucluster.analysis import run_view
from pytest_gpucluster.analysis.run_view import Estimate, Key, Match, RunView, estimate_of, key_of, match, scope_of
from pytest_gpucluster.errors import OptionError
from pytest_gpucluster.journal.records import RankPlace, TestResult
from pytest_gpucluster.judge.judged import JudgedMetric
from pytest_gpucluster.reports.summary import is_better_higher

ALLOWED_RATIO = 0.03
"""Default share by which a value may be worse than before. A choice of this project: runs of one healthy node differ by
a percent or two, while a throttled GPU or a link that has fallen back costs far more."""

REGRESSED = "regressed"
UNSURE = "unsure"
MISSING = "missing"
NOT_COMPARABLE = "not comparable"
WORSE = "worse"
WITHIN_NOISE = "within noise"
SAME = "same"
BETTER = "better"

KINDS = (REGRESSED, MISSING, NOT_COMPARABLE, UNSURE, WORSE, WITHIN_NOISE, SAME, BETTER)
"""The worst first. ``regressed``: worse beyond noise and by more than is allowed. ``unsure``: by more than is allowed,
but the noise is as large. ``worse``: beyond noise, and no more than is allowed."""
OPEN = (MISSING, NOT_COMPARABLE, UNSURE)
"""Kinds without a conclusion."""


FOUND_LABELS = ("transport", "nics")
"""Labels for what was found, not for what was requested: with another such label it is still the same metric."""
_FOUND_BY_A_SEARCH = ("m", "n", "k", "layout")
"""Such labels of the best of a search only: elsewhere another size is another metric."""


@dataclass(frozen=True, kw_only=True)
class Pair:
    """One rank's value before and now. ``rank`` is its number now, or before where it has none now."""

    kind: str
    rank: int | None = None
    """None for what concerns the whole run."""
    old_rank: int | None = None
    matched_by: str = ""
    """How the two ranks were matched."""
    old: Estimate | None = None
    new: Estimate | None = None
    change_ratio: float | None = None
    """A share of the old value; positive is better."""
    why: str = ""

    @property
    def badness(self) -> tuple[int, float]:
        """Return what to sort by: the worst comes first."""
        return KINDS.index(self.kind), math.inf if self.change_ratio is None else self.change_ratio


def assess(old: Estimate, new: Estimate, *, higher: bool, allowed: float, limit_max: float | None = None) -> Pair:
    """Return the change of a value.

    The change is a share of the old value. Of a value without samples of which less is better it is a share of the
    limit, where that is larger: twice a rounding error is no loss while both are a thousandth of what is allowed.

    Args:
        old: before.
        new: now.
        higher: more is better; else less.
        allowed: the ratio by which it may be worse, 0.03 for 3 %.
        limit_max: the maximum that the limit allows.
    """
    for when, each in (("before", old), ("now", new)):
        if not math.isfinite(each.value) or each.value < 0:
            return Pair(old=old, new=new, kind=NOT_COMPARABLE, why=f"the value {when} is {each.value:g}")
    gain = new.value - old.value if higher else old.value - new.value
    if gain == 0:
        return Pair(old=old, new=new, kind=SAME, change_ratio=0.0)
    yardstick = old.value
    if not higher and limit_max is not None and None in (old.interval, new.interval):
        yardstick = max(yardstick, limit_max)
    change = gain / yardstick if yardstick > 0 else math.copysign(math.inf, gain)
    apart = new.high < old.low or old.high < new.low
    if change < -allowed:
        return Pair(old=old, new=new, kind=REGRESSED if apart else UNSURE, change_ratio=change)
    if not apart:
        return Pair(old=old, new=new, kind=WITHIN_NOISE, change_ratio=change)
    return Pair(old=old, new=new, kind=BETTER if gain > 0 else WORSE, change_ratio=change)


def allowance(text: str) -> float:
    """Return the ratio that a percentage means: 0.03 for 3 %.

    >>> allowance("3 %")
    0.03

    Raises:
        OptionError: no percentage, or one outside of 0 to below 100.
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*%?\s*", text, re.ASCII)
    if found is None or not float(found[1]) < 100:
        raise OptionError(f"{text!r} is no percentage from 0 to below 100; write 3% or 0.5%")
    return float(found[1]) / 100


@dataclass(frozen=True, kw_only=True)
class Change:
    """The change of a metric of a test, or, without a metric, of the test's outcome."""

    test: TestResult
    judged: JudgedMetric | None = None
    """The metric now, or before where it has no value now."""
    decides: bool = True
    """Whether the answer of the whole comparison depends on it."""
    pairs: tuple[Pair, ...]
    """The worst first; never empty."""
    note: str = ""

    @property
    def unit(self) -> str:
        return "" if self.judged is None else self.judged.unit

    @property
    def worst(self) -> Pair:
        return self.pairs[0]

    @property
    def kind(self) -> str:
        return self.worst.kind

    def of_kind(self, kind: str) -> tuple[Pair, ...]:
        """Return the pairs of a kind, the worst first."""
        return tuple(pair for pair in self.pairs if pair.kind == kind)


@dataclass(frozen=True, kw_only=True)
class Terms:
    """The rules of a comparison."""

    allowed: float
    obstacle_of: Callable[[str], str] = lambda metric: ""
    """Metric -> why it cannot be compared between these two runs; "" where it can."""
    of_gpu: Mapping[int, Match]
    """Rank now -> before, for what a GPU does."""
    of_slot: Mapping[int, Match]
    """The same for what a node does."""
    new_ranks: Mapping[int, RankPlace]


def changes_of(old: TestResult, new: TestResult, terms: Terms) -> Iterator[Change]:
    """Yield the change of each metric of a test, including metrics of one run only."""
    before_by_key = {key_of(judged): judged for judged in old.measurements}
    now_by_key = {key_of(judged): judged for judged in new.measurements}
    partners = dict(_partners(before_by_key, now_by_key))
    for key, now in now_by_key.items():
        before = before_by_key.get(partners.get(key, key))
        if before is None:
            yield _one_sided(now, new, "now")
        else:
            yield _change(before, now, new, terms)
    used = set(partners.values())
    for key, before in before_by_key.items():
        if key not in used:
            yield _one_sided(before, new, "before")


def _partners(old: Collection[Key], new: Collection[Key]) -> Iterator[tuple[Key, Key]]:
    """Yield each metric of now with that of before, also where only labels of FOUND_LABELS differ."""
    free: dict[Key, list[Key]] = {}
    for key in old:
        if key not in new:
            free.setdefault(_requested(key), []).append(key)
    for key in new:
        if key in old:
            yield key, key
        elif free.get(_requested(key)):
            yield key, free[_requested(key)].pop(0)


def _requested(key: Key) -> Key:
    found = found_labels(key[0])
    return key[0], tuple((name, text) for name, text in key[1] if name not in found)


def found_labels(metric: str) -> tuple[str, ...]:
    """Return the labels of a metric for what was found, not for what was requested."""
    return (*FOUND_LABELS, *_FOUND_BY_A_SEARCH) if metric.endswith(run_view.OF_A_SEARCH) else FOUND_LABELS


def _change(before: JudgedMetric, now: JudgedMetric, test: TestResult, terms: Terms) -> Change:
    why = terms.obstacle_of(now.metric)
    if not why and before.unit != now.unit:
        why = f"in {before.unit} before, in {now.unit} now"
    if not why and is_better_higher(now) is None:
        why = "it is unknown whether more or less of it is better"
    if why:
        pairs = [Pair(kind=NOT_COMPARABLE, why=why)]
    elif scope_of(now) == "world":
        pairs = [_assessed(before, _worst(before), now, _worst(now), terms)]
    else:
        pairs = list(_by_rank(before, now, terms))
    found = [
        f"{name} {before.labels.get(name, 'unknown')} before, {now.labels.get(name, 'unknown')} now"
        for name in found_labels(now.metric)
        if before.labels.get(name) != now.labels.get(name)
    ]
    return Change(
        test=test,
        judged=now,
        decides=_decides(now) or _decides(before),
        pairs=tuple(sorted(pairs, key=lambda pair: pair.badness)),
        note="; ".join(found),
    )


def _by_rank(before: JudgedMetric, now: JudgedMetric, terms: Terms) -> Iterator[Pair]:
    matches = terms.of_slot if scope_of(now) == "node" else terms.of_gpu
    left = set(before.values)
    for rank in now.values:
        match_ = matches.get(rank, None if terms.new_ranks else Match(old=rank, by="rank number"))
        if match_ is None or match_.old not in left:
            yield Pair(kind=MISSING, rank=rank, new=estimate_of(now, rank), why="no value before")
            continue
        left.remove(match_.old)
        pair = _assessed(before, match_.old, now, rank, terms)
        swapped = f"another GPU in this slot: {match_.swapped} before" if match_.swapped else ""
        yield replace(pair, matched_by=match_.by, why="; ".join(filter(None, (pair.why, swapped))))
    for rank in before.values:
        if rank in left:
            yield Pair(kind=MISSING, old_rank=rank, old=estimate_of(before, rank), why="no value now")


def _assessed(before: JudgedMetric, old_rank: int, now: JudgedMetric, rank: int, terms: Terms) -> Pair:
    old, new = estimate_of(before, old_rank), estimate_of(now, rank)
    limit_max = None if now.limit is None else now.limit.max
    pair = assess(old, new, higher=bool(is_better_higher(now)), allowed=terms.allowed, limit_max=limit_max)
    return replace(pair, rank=rank, old_rank=old_rank)


def _worst(judged: JudgedMetric) -> int:
    """Return the rank with the worst value; one that is no number is the worst of all."""
    sign = 1 if is_better_higher(judged) else -1
    return min(
        judged.values, key=lambda rank: sign * value if math.isfinite(value := judged.values[rank]) else -math.inf
    )


def _one_sided(judged: JudgedMetric, test: TestResult, when: str) -> Change:
    other = "now" if when == "before" else "before"
    pair = Pair(kind=MISSING, why=f"no such value {other}")
    return Change(test=test, judged=judged, decides=_decides(judged), pairs=(pair,))


def _decides(judged: JudgedMetric) -> bool:
    return is_better_higher(judged) is not None and judged.metric not in run_view.STATES and judged.status != "recorded"


REGRESSION = "REGRESSION"
NO_REGRESSION = "NO REGRESSION"
UNDECIDED = "UNDECIDED"
NOT_COMPARED = "NOT COMPARABLE"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The comparison of two runs."""

    allowed: float
    partial: bool
    """Metrics of one run only do not make the answer undecided."""
    obstacles: tuple[str, ...]
    """Why the runs cannot be compared; empty where they can."""
    notes: tuple[str, ...]
    changes: tuple[Change, ...]
    """The worst first; those that decide before those that do not."""

    @property
    def answer(self) -> str:
        """Return the answer: ``REGRESSION``, ``NO_REGRESSION``, ``UNDECIDED`` or ``NOT_COMPARED``."""
        if self.regressed:
            return REGRESSION
        weighed = any(
            pair.change_ratio is not None for change in self.changes if change.decides for pair in change.pairs
        )
        if self.obstacles or not weighed:
            return NOT_COMPARED
        return UNDECIDED if self.undecided else NO_REGRESSION

    @property
    def regressed(self) -> tuple[Change, ...]:
        """Return the changes that are worse beyond noise and by more than is allowed."""
        return tuple(change for change in self.changes if change.decides and change.kind == REGRESSED)

    @property
    def undecided(self) -> tuple[Change, ...]:
        """Return the changes that decide and have no conclusion."""
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
        """Return kind -> number of ranks' values, of the changes that decide."""
        return dict(Counter(pair.kind for change in self.changes if change.decides for pair in change.pairs))


def terms_of(old: RunView, new: RunView, *, allowed: float) -> Terms:
    """Return the rules for comparing two runs."""
    return Terms(
        allowed=allowed,
        obstacle_of=run_view.metric_obstacles(old.conditions, new.conditions),
        of_gpu=match(old.conditions.places, new.conditions.places),
        of_slot=match(old.conditions.places, new.conditions.places, by_gpu=False),
        new_ranks=new.conditions.places,
    )


def compare_runs(old: RunView, new: RunView, *, allowed: float = ALLOWED_RATIO, partial: bool = False) -> Comparison:
    """Compare two runs.

    Args:
        old: the reference.
        new: the run in question.
        allowed: the ratio by which a value may be worse than before.
        partial: metrics of one run only are reported, and do not change the answer.
    """
    stop = tuple(run_view.obstacles(old.conditions, new.conditions))
    changes: list[Change] = []
    if not stop:
        terms = terms_of(old, new, allowed=allowed)
        for nodeid in dict.fromkeys([*new.tests, *old.tests]):
            before, now = old.tests.get(nodeid), new.tests.get(nodeid)
            outcome = _of_outcome(before, now)
            changes += [outcome] if outcome is not None else []
            if before is not None and now is not None and _ran(before) and _ran(now):
                changes += changes_of(before, now, terms)
    return Comparison(
        allowed=allowed,
        partial=partial,
        obstacles=stop,
        notes=() if stop else tuple(run_view.notes(old.conditions, new.conditions)),
        changes=tuple(sorted(changes, key=lambda change: (not change.decides, *change.worst.badness))),
    )


def _of_outcome(before: TestResult | None, now: TestResult | None) -> Change | None:
    """Return the change of a test's outcome; None where its values already show it."""
    test = now or before
    assert test is not None  # it is in one of the two
    was, is_now = _ended(before), _ended(now)
    if not _ran(before) and not _ran(now):
        return None
    if before is None or now is None or not (_ran(before) and _ran(now)):
        # A test that the run's end cut off, or that failed or broke, was not left out on purpose: --partial does not
        # excuse it.
        is_sound = now is None or now.outcome in ("passed", "skipped")
        kind = MISSING if is_sound else NOT_COMPARABLE
        pair = Pair(kind=kind, why=f"{was} before, {is_now} now{_because(now, before)}")
    elif before.outcome == now.outcome:
        if before.measurements or now.measurements:
            return None
        pair = Pair(kind=SAME, why=f"{was} before and now")
    elif now.outcome == "failed":
        pair = Pair(kind=REGRESSED, why=f"{was} before, failed now{_because(now)}")
    elif now.outcome == "error":
        pair = Pair(kind=NOT_COMPARABLE, why=f"{was} before, broke now{_because(now)}")
    else:
        pair = Pair(kind=BETTER, why=f"{was} before, passed now")
    return Change(test=test, pairs=(pair,))


def _ran(test: TestResult | None) -> bool:
    return test is not None and test.outcome in ("passed", "failed", "error")


def _ended(test: TestResult | None) -> str:
    return "not in the run" if test is None else test.outcome


def _because(*tests: TestResult | None) -> str:
    return next((f": {test.message}" for test in tests if test is not None and test.message), "")
