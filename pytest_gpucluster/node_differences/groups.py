"""Nodes that are alike in a fact stand in one group: who differs from the others, and in what."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pytest_gpucluster.node_differences.facts import FACTS, Fact, Told, show


@dataclass(frozen=True, kw_only=True)
class Group:
    """Nodes that have told the same. ``shown`` is what, as a text; ``value`` as plain JSON types, None: not told."""

    value: Any
    shown: str
    nodes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One fact over all nodes: the largest group first."""

    name: str
    groups: tuple[Group, ...]

    @property
    def alike(self) -> bool:
        """Whether all nodes have told the same, be it nothing."""
        return len(self.groups) < 2

    @property
    def known(self) -> bool:
        """Whether any node has told it."""
        return any(group.value is not None for group in self.groups)


def compare(told: Mapping[str, Told], facts: Sequence[Fact] = FACTS) -> tuple[Compared, ...]:
    """Return each fact over all nodes. Where some tell it and others do not, they differ.

    Args:
        told: node -> what it has told.
        facts: what to compare.
    """
    return tuple(_compare(fact, {node: fact.read(each) for node, each in sorted(told.items())}) for fact in facts)


def _compare(fact: Fact, values: Mapping[str, Any]) -> Compared:
    groups: list[tuple[Any, list[str]]] = []
    for node, value in values.items():
        for known, nodes in groups:
            if _same(fact, known, value):
                nodes.append(node)
                break
        else:
            groups.append((value, [node]))
    groups.sort(key=lambda group: (-len(group[1]), group[1]))
    return Compared(
        name=fact.name,
        groups=tuple(Group(value=value, shown=show(fact, value), nodes=tuple(nodes)) for value, nodes in groups),
    )


def _same(fact: Fact, one: Any, other: Any) -> bool:
    numbers = all(isinstance(each, (int, float)) and not isinstance(each, bool) for each in (one, other))
    if fact.alike_ratio and numbers:
        return bool(abs(one - other) <= fact.alike_ratio * max(abs(one), abs(other)))
    return type(one) is type(other) and bool(one == other)
