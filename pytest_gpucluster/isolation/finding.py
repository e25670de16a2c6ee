"""What an isolation has found, as plain values: for the journal, the reports and the exclude list."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from pytest_gpucluster.isolation.probe import Outcome

_NAMED = 16


@dataclass(frozen=True, kw_only=True)
class Culprit:
    """A unit, or the link between two units, that fails whoever it is probed with.

    ``failed`` of ``probes`` probes with it have failed; those count that no other culprit explains. ``evidence`` has
    a line for each that failed, and one for what speaks for its partners.
    """

    units: tuple[int, ...]
    kind: Literal["unit", "link"]
    failed: int
    probes: int
    evidence: tuple[str, ...]

    @property
    def intermittent(self) -> bool:
        """Whether some probe with it has passed."""
        return self.failed < self.probes

    def summary(self, name: Callable[[int], str] = str) -> str:
        """Return one line, such as "gpu-003: failed 3 of 3 probes, whoever it was with"."""
        who = " and ".join(name(unit) for unit in self.units)
        who = f"the link between {who}" if self.kind == "link" else who
        often = f"failed {self.failed} of {self.probes} probes"
        if self.intermittent:
            return f"{who}: {often}: intermittent"
        return f"{who}: {often}" + (
            ", whoever it was with" if self.kind == "unit" else "; each of the two passes with others"
        )

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON types."""
        return {
            "units": list(self.units),
            "kind": self.kind,
            "failed": self.failed,
            "probes": self.probes,
            "intermittent": self.intermittent,
            "evidence": list(self.evidence),
        }


@dataclass(frozen=True, kw_only=True)
class Isolated:
    """The result of an isolation.

    ``culprits`` are confirmed by further probes with known-good partners. ``cleared`` have passed with others, and
    every failed group that they were in has a culprit. ``undecided`` are the rest; ``why_undecided`` says why, and is
    not empty where there are any, or where the fault did not show again. ``rounds`` has the outcomes of each round.
    """

    culprits: tuple[Culprit, ...]
    cleared: tuple[int, ...]
    undecided: tuple[int, ...]
    rounds: tuple[tuple[Outcome, ...], ...]
    why_undecided: str
    reproduced: bool

    @property
    def probes(self) -> int:
        """How many groups were probed."""
        return sum(len(outcomes) for outcomes in self.rounds)

    def summary(self, name: Callable[[int], str] = str) -> tuple[str, ...]:
        """Return a few lines for an operator; ``name`` tells what a unit is called."""
        tried = f"{len(self.rounds)} rounds, {self.probes} probes"
        if self.culprits:
            count = len(self.culprits)
            head = f"{count} {'culprit' if count == 1 else 'culprits'} found in {tried}"
        elif self.reproduced:
            head = f"no culprit confirmed in {tried}"
        else:
            head = f"not reproduced in {tried}"
        lines = [head]
        for culprit in self.culprits:
            lines.append(culprit.summary(name))
            lines += (f"  {line}" for line in culprit.evidence)
        if self.undecided:
            lines.append(f"undecided: {_names(self.undecided, name)}")
        if self.why_undecided:
            lines.append(self.why_undecided)
        if self.cleared:
            lines.append(f"cleared: {_names(self.cleared, name)}")
        return tuple(lines)

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON types."""
        return {
            "culprits": [culprit.to_json() for culprit in self.culprits],
            "cleared": list(self.cleared),
            "undecided": list(self.undecided),
            "why_undecided": self.why_undecided,
            "reproduced": self.reproduced,
            "rounds": [[outcome.to_json() for outcome in outcomes] for outcomes in self.rounds],
        }


def _names(units: Iterable[int], name: Callable[[int], str]) -> str:
    named = [name(unit) for unit in units]
    more = f" and {len(named) - _NAMED} more" if len(named) > _NAMED else ""
    return ", ".join(named[:_NAMED]) + more
