"""Limits: YAML files into frozen values, each with the file and line it came from.

All errors of all files are reported at once. Within one file two entries that could both decide are refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pytest_gpucluster import hardware, metrics, units
from pytest_gpucluster.errors import MeasurementError, ThresholdsError, UnitError
from pytest_gpucluster.limits import KNOWN_LABELS, TOPOLOGY, Condition, Limit, Thresholds, peak_of
from pytest_gpucluster.yaml_document import Document, Node

SCHEMA_VERSION = 1

# A floor outside this part of the data sheet peak is nearly always a wrong unit.
_LEAST_OF_PEAK = 0.05
# All-reduce busbw measured with in-switch reduction: 482 GB/s where the links carry 450 in one direction.
_MOST_OF_UNBOUND_PEAK = 1.1

_FORMS = "a value, 'X or more', 'below X' or 'X to Y'"


def shipped_path() -> Path:
    """Return the limits that come with this version: inside the package of a wheel, at the top of a
    checkout."""
    inside = Path(__file__).with_name("thresholds.yaml")
    return inside if inside.is_file() else Path(__file__).parent.parent / "thresholds.yaml"


def load(*paths: Path) -> Thresholds:
    """Read limit files, later ones overlaying earlier ones. Without a path, read the shipped file.

    Raises: ThresholdsError listing every error of every file, each as ``file:line:column: ...``.
    """
    skus = dict(hardware.SKUS)
    limits: list[Limit] = []
    errors: list[str] = []
    shown: set[str] = set()
    for layer, path in enumerate(paths or (shipped_path(),)):
        name = "thresholds.yaml" if path == shipped_path() else str(path)
        if name in shown:
            name = str(path.resolve())
        shown.add(name)
        reader = _Reader(name, layer, skus)
        reader.read(path)
        limits += reader.limits
        errors += reader.file.report()
    if errors:
        raise ThresholdsError("\n".join(errors))
    return Thresholds(skus=skus, limits=_without_replaced(limits))


def _without_replaced(limits: Iterable[Limit]) -> tuple[Limit, ...]:
    # Layers come in order, so a later entry with the same conditions takes the place of the earlier one.
    kept = {
        (limit.sku, limit.metric, frozenset((part.key, part.text) for part in limit.when)): limit for limit in limits
    }
    return tuple(kept.values())


class _Reader:
    """Reads one file, collecting errors instead of stopping at the first."""

    def __init__(self, name: str, layer: int, skus: dict[str, hardware.Sku]) -> None:
        self.file = Document(name)
        self.layer = layer
        self.skus = skus
        self.limits: list[Limit] = []

    def read(self, path: Path) -> None:
        root = self.file.root(path, needs="schema_version and skus", block_scalar_hint=f"a condition is {_FORMS}")
        if root is not None:
            self._top(root)

    # Each method below reads one kind of node.

    def _top(self, root: Node) -> None:
        top = self.file.mapping(root, "the file", ("schema_version", "skus"))
        if top is None:
            return
        whole = not self.file.complaints  # else what is missing may be what was misspelt
        if "schema_version" in top:
            node = top["schema_version"][1]
            version = self.file.text(node, "schema_version")
            if version is not None and version != str(SCHEMA_VERSION):
                self.file.fail(node, f"schema_version is {version!r}; this version reads {SCHEMA_VERSION}")
        elif whole:
            self.file.fail(root, f"schema_version is missing; this version reads schema_version: {SCHEMA_VERSION}")
        if "skus" not in top:
            if whole:
                self.file.fail(root, "skus is missing; it maps the name of a GPU to its limits")
            return
        for name, (key, value) in (self.file.mapping(top["skus"][1], "skus", None) or {}).items():
            self._sku(name, key, value)

    def _sku(self, name: str, key: Node, node: Node) -> None:
        body = self.file.mapping(node, f"the SKU {name!r}", ("nvml_name", "limits"))
        if body is None:
            return
        if "nvml_name" in body:
            patterns = self._patterns(name, body["nvml_name"][1])
            known = self.skus.get(name, hardware.Sku(name=name))
            self.skus[name] = replace(known, nvml_names=(*known.nvml_names, *patterns))
        elif name not in self.skus:
            self.file.fail(
                key,
                f"unknown SKU {name!r}; a SKU that is none of {', '.join(self.skus)} needs its nvml_name"
                f"{units.did_you_mean(name, self.skus)}",
            )
        if "limits" in body:
            found = self.file.mapping(body["limits"][1], f"the limits of {name!r}", None) or {}
            for metric, (metric_key, value) in found.items():
                self._metric(name, metric, metric_key, value)

    def _patterns(self, sku: str, node: Node) -> list[str]:
        if sku == hardware.CPU_REHEARSAL:
            self.file.fail(node, f"{sku} takes no nvml_name: its limits say nothing about a GPU")
            return []
        found = []
        for item in self.file.items(node):
            pattern = self.file.text(item, "nvml_name")
            if pattern is None:
                continue
            try:
                matches_any = re.fullmatch(pattern, "a name that no GPU has")
            except re.error as error:
                self.file.fail(item, f"bad pattern {pattern!r}: {error}; nvml_name is a regular expression")
                continue
            if matches_any:
                self.file.fail(item, f"the pattern {pattern!r} takes any GPU; write the name that nvidia-smi -L shows")
                continue
            found.append(pattern)
        return found

    def _metric(self, sku: str, name: str, key: Node, node: Node) -> None:
        try:
            metric = metrics.known(name)
        except MeasurementError as error:
            self.file.fail(key, str(error))
            return
        entries: list[tuple[Node, Limit]] = []
        for item in self.file.items(node):
            limit = self._entry(sku, metric, item)
            if limit is None:
                continue
            for other_node, other in entries:
                if limit.precedence == other.precedence and limit.overlaps(other):
                    self.file.fail(
                        item,
                        f"this entry ({limit.conditions()}) and that at line {other_node.start_mark.line + 1}"
                        f" ({other.conditions()}) can both apply; add a condition to one of them",
                    )
            entries.append((item, limit))
        self.limits += [limit for _, limit in entries]

    def _entry(self, sku: str, metric: metrics.Metric, node: Node) -> Limit | None:
        before = len(self.file.complaints)
        body = self.file.mapping(
            node,
            f"an entry of {metric.name}",
            ("min", "max", "source", "when", "record_only", "despite_peak"),
        )
        if body is None:
            return None
        whole = len(self.file.complaints) == before  # else what is missing may be what was misspelt
        values = {name: self.file.text(value, name) for name, (_, value) in body.items() if name != "when"}
        bounds = {
            name: self._bound(name, values[name], body[name][1], metric) for name in ("min", "max") if name in body
        }
        limit = Limit(
            metric=metric.name,
            sku=sku,
            unit=metric.unit,
            min=bounds.get("min"),
            max=bounds.get("max"),
            source=values.get("source") or "",
            origin=f"{self.file.name}:{node.start_mark.line + 1}:{node.start_mark.column + 1}",
            when=self._when(body["when"][1]) if "when" in body else (),
            record_only=values.get("record_only"),
            layer=self.layer,
        )
        if "record_only" in body:
            for name in ("min", "max", "source", "despite_peak"):
                if name in body:
                    self.file.fail(body[name][0], f"{name} and record_only exclude each other")
        elif whole:
            self._complete(node, body, metric)
            if len(self.file.complaints) == before:
                self._lint(limit, metric, body, values)
        return limit if len(self.file.complaints) == before else None

    def _bound(self, name: str, text: str | None, node: Node, metric: metrics.Metric) -> float | None:
        if text is None:
            return None
        try:
            value = units.parse(text, like=metric.unit).to(metric.unit)
        except UnitError as error:
            self.file.fail(node, f"{name}: {error}")
            return None
        if value < 0 or (value == 0 and name == "min"):
            needs = "above zero, or nothing can miss it" if name == "min" else "zero or more"
            self.file.fail(node, f"{name} is {text}; it must be {needs}")
        return value

    def _complete(self, node: Node, body: Mapping[str, Any], metric: metrics.Metric) -> None:
        if "min" not in body and "max" not in body:
            self.file.fail(
                node,
                f"no limit for {metric.name}; give min or max with a source, or record_only with a reason",
            )
            return
        needed = {"higher": "min", "lower": "max"}.get(metric.better)
        if needed and needed not in body:
            self.file.fail(
                node,
                f"{metric.name} needs {needed}: {metric.better} is better, and without it any value passes",
            )
        if "source" not in body:
            self.file.fail(node, "source is missing; say where the figure comes from")

    def _lint(
        self, limit: Limit, metric: metrics.Metric, body: Mapping[str, Any], written: Mapping[str, str | None]
    ) -> None:
        if limit.min is not None and limit.max is not None and limit.min > limit.max:
            self.file.fail(body["min"][1], f"min {written['min']} is above max {written['max']}")
        peak = peak_of(metric, self.skus.get(limit.sku))
        if peak is None or limit.min is None or written.get("despite_peak") is not None:
            return
        sheet = f"{units.show(peak, metric.unit)}, the data sheet peak of {limit.sku}"
        if limit.min > (peak if metric.peak_is_bound else peak * _MOST_OF_UNBOUND_PEAK):
            times = "" if metric.peak_is_bound else f"{_MOST_OF_UNBOUND_PEAK:g} times "
            self.file.fail(
                body["min"][1],
                f"min {written['min']} is above {times}{sheet}; lower it, or give the reason in despite_peak",
            )
        # Between nodes a slow fabric is no mistake: the links in the node say nothing about it.
        within = metric.peak not in hardware.LINK_PEAKS or any(
            part.key == "nnodes" and part.exact and part.low == 1 for part in limit.when
        )
        if within and limit.min < peak * _LEAST_OF_PEAK:
            self.file.fail(
                body["min"][1],
                f"min {written['min']} is under {_LEAST_OF_PEAK * 100:g} % of {sheet}; check the unit, or give"
                " the reason in despite_peak",
            )

    def _when(self, node: Node) -> tuple[Condition, ...]:
        body = self.file.mapping(node, "when", (*TOPOLOGY, *KNOWN_LABELS, "labels")) or {}
        found = [self._condition(key, value) for key, (_, value) in body.items() if key != "labels"]
        if "labels" in body:
            for key, (key_node, value) in (self.file.mapping(body["labels"][1], "labels", None) or {}).items():
                if key in TOPOLOGY or key in KNOWN_LABELS:
                    self.file.fail(key_node, f"{key} stands directly under when, not under labels")
                found.append(self._condition(key, value))
        return tuple(condition for condition in found if condition is not None)

    def _condition(self, key: str, node: Node) -> Condition | None:
        text = self.file.text(node, key)
        if text is None:
            return None
        parts = re.fullmatch(
            r"(?P<least>.+?) +or +more|below +(?P<below>.+)|(?P<first>.+?) +to +(?P<last>.+)|(?P<exact>.+)",
            text,
        )
        ends = {name: end for name, end in parts.groupdict().items() if end} if parts else {}
        amounts = {name: units.magnitude(end) for name, end in ends.items()}
        known = [amount for amount in amounts.values() if amount is not None]
        plain = "exact" in ends and not known
        if plain and key not in TOPOLOGY and key != "size":
            return Condition(key=key, text=text, dimension=None)
        allowed = {"size": ("amount of data", "number")}.get(key, ("number",) if key in TOPOLOGY else None)
        dimensions = {dimension for dimension, _ in known}
        wrong = allowed is not None and not dimensions.issubset(allowed)
        if len(known) < len(amounts) or len(dimensions) != 1 or wrong:
            kind = {"size": "sizes such as 1 GB"}.get(key, "numbers such as 8")
            self.file.fail(node, f"{key} is {text!r}; allowed is {_FORMS}, with {kind}")
            return None
        if key in TOPOLOGY and any(value < 1 or value != int(value) for _, value in known):
            self.file.fail(node, f"{key} is {text!r}; it counts in whole numbers from 1")
            return None
        amount = {name: value[1] for name, value in amounts.items() if value is not None}
        exact = amount.get("exact")
        condition = Condition(
            key=key,
            text=text,
            dimension=known[0][0],
            low=amount.get("least", amount.get("first", -math.inf if exact is None else exact)),
            high=amount.get("below", amount.get("last", math.inf if exact is None else exact)),
            high_open="below" in amount,
        )
        if condition.low > condition.high:
            self.file.fail(node, f"{key} is {text!r}; nothing lies in that range")
        return condition
