"""The differences between two certificates: parts swapped, moved, replaced, added or removed, and their firmware.

A GPU is identified by its UUID, a network adapter by its GUID. A slot is a place in a node: its PCI address, where that
is known.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from pytest_gpucluster.analysis.certificate import ADAPTER_FIELDS, COMPONENTS, GPU_FIELDS, Certificate
from pytest_gpucluster.errors import CertificateError, JournalError
from pytest_gpucluster.metrics.codec import AnyText, read
from pytest_gpucluster.text import some_of


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One difference. ``where`` names nodes and slots, ``what`` the parts.

    ``kind``: node removed, node added, node renamed, swapped, moved, replaced, removed, added, changed, unknown, twice.
    """

    kind: str
    where: str
    what: str


@dataclass(frozen=True, kw_only=True)
class _Part:
    """A part in its slot."""

    noun: str
    host: str
    slot: str
    name: str
    """The slot in messages."""
    identity: str
    facts: Mapping[str, str]

    @property
    def place(self) -> tuple[str, str, str]:
        return self.noun, self.host, self.slot

    @property
    def where(self) -> str:
        return f"{self.host} {self.name}"

    def __str__(self) -> str:
        serial = self.facts.get("serial", "")
        return f"{self.identity or 'of unknown identity'}" + (f" (serial {serial})" if serial else "")


@dataclass(frozen=True, kw_only=True)
class _Inventory:
    """The parts and versions of a certificate."""

    parts: tuple[_Part, ...]
    versions: Mapping[str, Mapping[str, str]]
    """Host -> component -> version."""

    @cached_property
    def by_place(self) -> dict[tuple[str, str, str], _Part]:
        return {part.place: part for part in self.parts}

    @cached_property
    def by_identity(self) -> dict[tuple[str, str], _Part]:
        return {(part.noun, part.identity): part for part in self.parts if part.identity}

    def of_host(self, host: str) -> frozenset[str]:
        return frozenset(part.identity for part in self.parts if part.host == host and part.identity)


_WORDS = {"GPU": GPU_FIELDS, "adapter": ADAPTER_FIELDS}
_IDENTITY = {"GPU": "uuid", "adapter": "guid"}
_SLOT = "pci_bus_id"
"""The place of a part, not a property of it."""


def differences(old: Certificate, new: Certificate) -> tuple[Difference, ...]:
    """Return the differences; empty where every part is in its slot with the same firmware and versions.

    Raises:
        CertificateError: the nodes of a certificate are not in the form that this project writes.
    """
    before, after = _inventory(old), _inventory(new)
    renamed = _renamed(before, after)
    found = [
        Difference(kind="node renamed", where=f"{was} -> {now}", what=f"the same {len(before.of_host(was))} parts")
        for was, now in renamed.items()
    ]
    before = _under_new_names(before, renamed)
    found += _nodes(before, after)
    found += _twice(before, "old")
    found += _twice(after, "new")
    found += _parts(before, after)
    found += _changes(before, after)
    return tuple(found)


def judging_differences(old: Certificate, new: Certificate) -> tuple[str, ...]:
    """Return the differences in limits, versions and acceptance. They are no change of the cluster."""
    lines = []
    for key, words in (("sku", "SKU"), ("gpu_name", "GPU")):
        was, now = old.record["limits"].get(key), new.record["limits"].get(key)
        if was != now:
            lines.append(f"{words}: {was} -> {now}")
    if old.record["limits"].get("files") != new.record["limits"].get("files"):
        lines.append("the files of limits differ")
    was, now = (str(one.record["run"].get("plugin_version")) for one in (old, new))
    if was != now:
        lines.append(f"pytest-gpucluster {was} -> {now}")
    was, now = ("accepted" if one.is_accepted else "NOT accepted" for one in (old, new))
    if was != now:
        lines.append(f"{was} -> {now}")
    return tuple(lines)


def _renamed(before: _Inventory, after: _Inventory) -> dict[str, str]:
    """Return old name -> new name of nodes that hold exactly the same parts under another name."""
    removed = [host for host in before.versions if host not in after.versions]
    added = [host for host in after.versions if host not in before.versions]
    found: dict[str, str] = {}
    for host in removed:
        same = [one for one in added if before.of_host(host) and before.of_host(host) == after.of_host(one)]
        if len(same) == 1:
            found[host] = same[0]
    return found


def _under_new_names(before: _Inventory, renamed: Mapping[str, str]) -> _Inventory:
    return _Inventory(
        parts=tuple(replace(part, host=renamed.get(part.host, part.host)) for part in before.parts),
        versions={renamed.get(host, host): versions for host, versions in before.versions.items()},
    )


def _nodes(before: _Inventory, after: _Inventory) -> Iterator[Difference]:
    for host in before.versions:
        if host not in after.versions:
            yield Difference(kind="node removed", where=host, what=_counted(before, host))
    for host in after.versions:
        if host not in before.versions:
            yield Difference(kind="node added", where=host, what=_counted(after, host))


def _counted(inventory: _Inventory, host: str) -> str:
    return f"{sum(part.noun == 'GPU' and part.host == host for part in inventory.parts)} GPUs"


def _twice(inventory: _Inventory, which: str) -> Iterator[Difference]:
    seen: dict[tuple[str, str], _Part] = {}
    for part in inventory.parts:
        key = part.noun, part.identity
        if part.identity and key in seen:
            where = f"{seen[key].where} and {part.where}"
            yield Difference(kind="twice", where=where, what=f"{part.identity}, in the {which} certificate")
        seen.setdefault(key, part)


def _parts(before: _Inventory, after: _Inventory) -> Iterator[Difference]:
    reported: set[tuple[str, str]] = set()
    for part in before.parts:
        now = after.by_place.get(part.place)
        if not part.identity or (now is not None and not now.identity):
            which = "old" if not part.identity else "new"
            yield Difference(
                kind="unknown",
                where=part.where,
                what=f"the {which} certificate has no identity of the {part.noun} there",
            )
            continue
        key = part.noun, part.identity
        if now is not None and now.identity == part.identity:
            continue
        found = after.by_identity.get(key)
        if found is not None:
            other = before.by_place.get(found.place)
            if now is not None and other is not None and other.identity == now.identity:
                if key not in reported:
                    reported |= {key, (now.noun, now.identity)}
                    yield Difference(kind="swapped", where=f"{part.where} <-> {found.where}", what=f"{part} and {now}")
            else:
                yield Difference(kind="moved", where=f"{part.where} -> {found.where}", what=str(part))
        elif now is not None and (now.noun, now.identity) not in before.by_identity:
            yield Difference(kind="replaced", where=part.where, what=f"{part} by {now}")
        else:
            yield Difference(kind="removed", where=part.where, what=str(part))
    for part in after.parts:
        was = before.by_place.get(part.place)
        if (part.noun, part.identity) in before.by_identity:
            continue
        stayed = was is None or (was.noun, was.identity) in after.by_identity
        if not part.identity:
            if was is None:
                yield Difference(kind="unknown", where=part.where, what=f"a new {part.noun} of unknown identity")
        elif stayed:
            yield Difference(kind="added", where=part.where, what=str(part))


def _changes(before: _Inventory, after: _Inventory) -> Iterator[Difference]:
    """Yield the changed firmware and other properties of parts, and versions of nodes; equal changes are one line."""
    places: dict[tuple[str, str, str], list[str]] = {}
    for identity, part in before.by_identity.items():
        now = after.by_identity.get(identity)
        for key, words in _WORDS[part.noun].items() if now is not None else ():
            if now is not None and part.facts[key] != now.facts[key] and key != _SLOT:
                change = f"{words} of the {part.noun}", part.facts[key], now.facts[key]
                places.setdefault(change, []).append(now.where)
    for host, versions in before.versions.items():
        for component in COMPONENTS if host in after.versions else ():
            if versions[component] != after.versions[host][component]:
                change = component, versions[component], after.versions[host][component]
                places.setdefault(change, []).append(host)
    for (what, old, new), where in places.items():
        text = f"{what}: {old or 'unknown'} -> {new or 'unknown'}"
        yield Difference(kind="changed", where=some_of(where, 4), what=text)


@dataclass(frozen=True, kw_only=True)
class _Node:
    host: str
    node_rank: Any = None
    versions: Mapping[str, AnyText]
    gpus: tuple[Mapping[str, AnyText], ...]
    adapters: tuple[Mapping[str, AnyText], ...] = ()


@dataclass(frozen=True, kw_only=True)
class _Nodes:
    nodes: tuple[_Node, ...]


def _inventory(certificate: Certificate) -> _Inventory:
    try:
        nodes = read(_Nodes, certificate.record, str(certificate.path)).nodes
    except JournalError as error:
        raise CertificateError(str(error)) from None
    parts: list[_Part] = []
    versions: dict[str, Mapping[str, str]] = {}
    hosts = Counter(node.host for node in nodes)
    for node in nodes:
        # Containers may share a host name.
        host = node.host if hosts[node.host] == 1 else f"{node.host} (node {node.node_rank})"
        versions[host] = {component: node.versions.get(component, "") for component in COMPONENTS}
        parts += [_part("GPU", facts, f"GPU {facts.get('index') or '?'}", host) for facts in node.gpus]
        parts += [_part("adapter", facts, facts.get("name", ""), host) for facts in node.adapters]
    return _Inventory(parts=tuple(_apart(parts)), versions=versions)


def _apart(parts: list[_Part]) -> Iterator[_Part]:
    """Yield parts, each in its own slot: the MIG slices of a GPU share its PCI address and are numbered in order."""
    sharing, numbers = Counter(part.place for part in parts), Counter[tuple[str, str, str]]()
    for part in parts:
        if sharing[part.place] == 1:
            yield part
            continue
        numbers[part.place] += 1
        number = numbers[part.place]
        yield replace(part, slot=f"{part.slot}#{number}", name=f"{part.name}, slice {number}")


def _part(noun: str, entry: Mapping[str, str], name: str, host: str) -> _Part:
    facts = {key: entry.get(key, "") for key in _WORDS[noun]}
    return _Part(
        noun=noun,
        host=host,
        slot=facts[_SLOT] or name,
        name=f"{name} ({facts[_SLOT] or 'of unknown PCI address'})",
        identity=facts[_IDENTITY[noun]],
        facts=facts,
    )
