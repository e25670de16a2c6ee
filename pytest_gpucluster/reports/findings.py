"""What the journal keeps as it was given: a test's search for culprits, and a value's comparison with the baseline.

Both may come from another version. What does not have the form that this one writes is replaced by a text that states
so; the journal has it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pytest_gpucluster.errors import JournalError
from pytest_gpucluster.metrics.codec import AnyText, read


@dataclass(frozen=True, kw_only=True)
class Suspect:
    """A culprit: a unit (node or GPU), or the link between two."""

    kind: str = "unit"
    units: tuple[int, ...] = ()
    failed: int = 0
    probes: int = 0
    evidence: tuple[AnyText, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Isolation:
    """A search for culprits."""

    names: Mapping[str, AnyText] = field(default_factory=dict)
    """Number of a unit -> its name."""
    culprits: tuple[Suspect, ...] = ()
    rounds: tuple[Any, ...] = ()
    cleared: tuple[int, ...] = ()
    undecided: tuple[int, ...] = ()
    why_undecided: str = ""
    cut_short: str = ""
    seconds: float = 0.0
    reproduced: bool = False

    def named(self, units: Iterable[int]) -> list[str]:
        """Return the names of some units."""
        return [self.names.get(str(unit), f"unit {unit}") for unit in units]


def isolation_of(found: Mapping[str, Any]) -> Isolation | None:
    """Return the search in a test's result; None if there was none."""
    try:
        return read(Isolation, dict(found), "isolation") if found else None
    except JournalError as error:
        return Isolation(why_undecided=f"{error}; see the journal")


@dataclass(frozen=True, kw_only=True)
class OldValue:
    """A value of the baseline."""

    value: float | None = None


@dataclass(frozen=True, kw_only=True)
class BaselineComparison:
    """The comparison of the worst rank's value with the baseline (docs/compare.md)."""

    kind: AnyText = ""
    old: OldValue | None = None
    old_rank: int | None = None
    rank: int | None = None
    matched_by: AnyText = ""
    change_ratio: float | None = None
    allowed_ratio: float | None = None
    decides: bool = False
    why: AnyText = ""


def baseline_of(found: Mapping[str, Any]) -> BaselineComparison | None:
    """Return the comparison in a judged metric; None without a baseline."""
    try:
        return read(BaselineComparison, dict(found), "baseline") if found else None
    except JournalError as error:
        return BaselineComparison(kind="unknown", why=f"{error}; see the journal")
