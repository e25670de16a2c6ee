"""Two runs compared: all changes, the worst first, and the answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from pytest_gpucluster.comparison.changes import Change, Pair, Terms, changes_of
from pytest_gpucluster.comparison.conditions import notes, obstacles, why_not_of
from pytest_gpucluster.comparison.places import match
from pytest_gpucluster.comparison.rule import ALLOWED_RATIO, BETTER, MISSING, NOT_COMPARABLE, OPEN, REGRESSED, SAME
from pytest_gpucluster.comparison.side import Side, Tested

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


def compare(
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
