"""What is advised: data, and how it stands beside what is set. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pytest_gpucluster.metrics.finding import Finding, Identity
from pytest_gpucluster.nccl_advice.fabric import Fabric

GUIDE = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html"
"""NCCL user guide, Environment Variables."""
TROUBLESHOOTING = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html"


@dataclass(frozen=True, kw_only=True)
class Set:
    """A variable that this node needs.

    Attributes:
        name, value: of the variable.
        why: what was seen that asks for it.
        source: what says that this is the variable for it.
        now: its value at present, None where it is not set; ``origin``: where that is from.
        is_met: what is set has the same effect.
    """

    name: str
    value: str
    why: str
    source: str
    now: str | None = None
    origin: str = ""
    is_met: bool = False

    @property
    def state(self) -> str:
        """How it stands, in a few words."""
        if self.now is None:
            return "not set"
        is_same = "the same" if self.now == self.value else f"{self.now}, which has the same effect"
        return f"set: {is_same}" if self.is_met else f"set otherwise: {self.now} ({self.origin})"


@dataclass(frozen=True, kw_only=True)
class Remove:
    """A variable that is set and hurts here. ``origin``: "environment" or a file; ``also``: files that set it, too."""

    name: str
    value: str
    origin: str
    why: str
    remedy: str
    source: str
    also: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Look:
    """A variable that is set, and helps in one place and hurts in another."""

    name: str
    value: str
    origin: str
    why: str
    source: str


@dataclass(frozen=True, kw_only=True)
class Leave:
    """A variable that is best left alone here. ``now``: its value where it is set all the same."""

    name: str
    why: str
    source: str
    now: str | None = None


@dataclass(frozen=True, kw_only=True)
class Step:
    """Something to do that is no variable."""

    what: str
    why: str
    source: str


@dataclass(frozen=True, kw_only=True)
class Advised:
    """All that there is to say of a node.

    Attributes:
        fabric: what was found of it; where its kind is None, nothing about it is advised.
        set, remove, look, leave, steps: see the types.
        unknown: what could not be told, and what to do about it.
    """

    fabric: Fabric
    set: tuple[Set, ...] = ()
    remove: tuple[Remove, ...] = ()
    look: tuple[Look, ...] = ()
    leave: tuple[Leave, ...] = ()
    steps: tuple[Step, ...] = ()
    unknown: tuple[str, ...] = ()

    @property
    def differs(self) -> bool:
        """Tell whether anything should be set or removed that is not."""
        return bool(self.remove) or any(not one.is_met for one in self.set)

    def notes(self, host: str) -> Iterator[Finding]:
        """Yield a note for each variable that should be set and is not, or is set otherwise."""
        for one in self.set:
            if not one.is_met:
                yield Finding(
                    code=f"advice.{one.name.lower()}",
                    kind="note",
                    gpu=Identity(host=host),
                    found=f"{one.name} is {one.state}: {one.why}",
                    allowed=f"{one.name}={one.value} is advised",
                    remedy=f"set it, or keep what works; source: {one.source}",
                )

    def properties(self) -> dict[str, str]:
        """Return what goes on record beside a criterion's values."""
        kind = self.fabric.kind or "unknown"
        told = {"advice.fabric": f"{kind}: {self.fabric.why}"}
        told |= {f"advice.{one.name}": f"{one.value}; {one.state}; {one.why}" for one in self.set}
        told |= {f"advice.step.{number}": f"{one.what}: {one.why}" for number, one in enumerate(self.steps, start=1)}
        return told | {f"advice.unknown.{number}": text for number, text in enumerate(self.unknown, start=1)}

    def to_json(self) -> dict[str, Any]:
        """Return plain types: ``fabric``, and a list for each of the other attributes."""
        fabric = self.fabric
        return {
            "fabric": {
                "kind": fabric.kind,
                "why": fabric.why,
                "ports": [card.name for card in fabric.cards],
                "outside": {card.name: why for card, why in fabric.outside},
                "slow": [card.name for card in fabric.slow],
                "unclear": fabric.unclear,
            },
            "set": [
                {
                    "name": one.name,
                    "value": one.value,
                    "why": one.why,
                    "source": one.source,
                    "now": one.now,
                    "origin": one.origin,
                    "is_met": one.is_met,
                }
                for one in self.set
            ],
            "remove": [vars(one) | {"also": list(one.also)} for one in self.remove],
            "look": [vars(one) for one in self.look],
            "leave": [vars(one) for one in self.leave],
            "steps": [vars(one) for one in self.steps],
            "unknown": list(self.unknown),
        }
