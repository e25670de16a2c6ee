"""The differences between two certificates: parts moved, replaced, added or removed, and their firmware.

A GPU is identified by its UUID, a network adapter by its GUID. A slot is a place in a node: its PCI address, where that
is known.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from pytest_gpucluster.analysis.certificate import ADAPTER_FIELDS, COMPONENTS, GPU_FIELDS, Certificate
from pytest_gpucluster.text import some_of

_NOUNS = {"GPU": (GPU_FIELDS, "uuid"), "adapter": (ADAPTER_FIELDS, "guid")}
"""Kind of a part -> its keys with their names in messages, and the key that identifies it."""
_SLOT = "pci_bus_id"
"""The place of a part, not a property of it."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One difference. ``where`` names nodes and slots, ``what`` the parts.

    ``kind``: node removed, node added, moved, replaced, removed, added, changed, unknown, twice.
    """

    kind: str
    where: str
    what: str


@dataclass(frozen=True, kw_only=True)
class _Part:
    """A part in its slot; ``place`` has its kind, its node and the slot."""

    noun: str
    place: tuple[str, str, str]
    where: str
    """The place in messages."""
    identity: tuple[str, str]
    """Its kind and what identifies it."""
    facts: Mapping[str, str]

    def __str__(self) -> str:
        serial = self.facts.get("serial", "")
        return self.identity[1] + (f" (serial {serial})" if serial else "")


def differences(old: Certificate, new: Certificate) -> tuple[Difference, ...]:
    """Return the differences; empty where every part is in its slot with the same firmware and versions."""
    before, after = list(_parts(old)), list(_parts(new))
    return (
        *_of_nodes(old, new),
        *_twice(before, "old"),
        *_twice(after, "new"),
        *_of_parts(before, after),
        *_changes(old, new, before, after),
    )


def _versions(certificate: Certificate) -> dict[str, Mapping[str, str]]:
    """Return node -> its versions. Containers may share a host name: then the name has the node's number."""
    nodes = certificate.content.nodes
    hosts = Counter(node.host for node in nodes)
    names = [node.host if hosts[node.host] == 1 else f"{node.host} (node {node.node_rank})" for node in nodes]
    return {name: node.versions for name, node in zip(names, nodes, strict=True)}


def _parts(certificate: Certificate) -> Iterator[_Part]:
    """Yield the parts. The MIG slices of a GPU share its PCI address and are numbered in order."""
    numbers = Counter[tuple[str, str, str]]()
    for host, node in zip(_versions(certificate), certificate.content.nodes, strict=True):
        found = [("GPU", f"GPU {facts.get('index') or '?'}", facts) for facts in node.gpus]
        found += [("adapter", facts.get("name", ""), facts) for facts in node.adapters]
        for noun, name, known in found:
            fields, identifies = _NOUNS[noun]
            facts = {key: known.get(key, "") for key in fields}
            place = noun, host, facts[_SLOT] or name
            numbers[place] += 1
            number = numbers[place]
            yield _Part(
                noun=noun,
                place=place if number == 1 else (noun, host, f"{place[2]}#{number}"),
                where=f"{host} {name} ({facts[_SLOT] or 'of unknown PCI address'})"
                + (f", slice {number}" if number > 1 else ""),
                identity=(noun, facts[identifies]),
                facts=facts,
            )


def _of_nodes(old: Certificate, new: Certificate) -> Iterator[Difference]:
    before, after = _versions(old), _versions(new)
    for kind, one, nodes, others in (("removed", old, before, after), ("added", new, after, before)):
        for host, node in zip(nodes, one.content.nodes, strict=True):
            if host not in others:
                yield Difference(kind=f"node {kind}", where=host, what=f"{len(node.gpus)} GPUs")


def _twice(parts: list[_Part], which: str) -> Iterator[Difference]:
    seen: dict[tuple[str, str], _Part] = {}
    for part in parts:
        if part.identity[1] and part.identity in seen:
            where = f"{seen[part.identity].where} and {part.where}"
            yield Difference(kind="twice", where=where, what=f"{part.identity[1]}, in the {which} certificate")
        seen.setdefault(part.identity, part)


def _of_parts(before: list[_Part], after: list[_Part]) -> Iterator[Difference]:
    was_at, is_at = ({part.place: part for part in parts} for parts in (before, after))
    old, new = ({part.identity: part for part in parts if part.identity[1]} for parts in (before, after))
    for place in dict.fromkeys([*was_at, *is_at]):
        part, now = was_at.get(place), is_at.get(place)
        nameless = next((one for one in (part, now) if one is not None and not one.identity[1]), None)
        if nameless is not None:
            what = (
                f"the {'old' if nameless is part else 'new'} certificate has no identity of the {nameless.noun} there"
            )
            yield Difference(kind="unknown", where=nameless.where, what=what)
        moved = new.get(part.identity) if part is not None else None
        if part is not None and moved is not None:
            if moved.place != place:
                yield Difference(kind="moved", where=f"{part.where} -> {moved.where}", what=str(part))
        elif part is not None and nameless is None:
            if now is not None and now.identity not in old:
                yield Difference(kind="replaced", where=part.where, what=f"{part} by {now}")
                continue
            yield Difference(kind="removed", where=part.where, what=str(part))
        if now is not None and now.identity not in old and nameless is None:
            yield Difference(kind="added", where=now.where, what=str(now))


def _changes(old: Certificate, new: Certificate, before: list[_Part], after: list[_Part]) -> Iterator[Difference]:
    places: dict[tuple[str, str, str], list[str]] = {}
    is_now = {part.identity: part for part in after if part.identity[1]}
    for identity, part in {part.identity: part for part in before}.items():
        now = is_now.get(identity)
        for key, words in _NOUNS[part.noun][0].items() if now is not None else ():
            if now is not None and part.facts[key] != now.facts[key] and key != _SLOT:
                change = f"{words} of the {part.noun}", part.facts[key], now.facts[key]
                places.setdefault(change, []).append(now.where)
    versions = _versions(new)
    for host, were in _versions(old).items():
        for component in COMPONENTS if host in versions else ():
            change = component, were.get(component, ""), versions[host].get(component, "")
            if change[1] != change[2]:
                places.setdefault(change, []).append(host)
    for (what, was, is_), where in places.items():
        text = f"{what}: {was or 'unknown'} -> {is_ or 'unknown'}"
        yield Difference(kind="changed", where=some_of(where, 4), what=text)
