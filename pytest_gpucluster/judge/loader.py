"""Limits: YAML files into frozen values, each with the file and line it came from.

All errors of all files are reported at once. Within one file two entries that could both decide are refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from pytest_gpucluster.config.yaml_source import Document, Node
from pytest_gpucluster.errors import MeasurementError, ThresholdsError, UnitError
from pytest_gpucluster.judge.limits import (
    EVERY_SKU,
    FORMS,
    KNOWN_LABELS,
    TOPOLOGY,
    Condition,
    Limit,
    Thresholds,
    condition,
    peak_of,
)
from pytest_gpucluster.metrics import datasheets, measurement, units
from pytest_gpucluster.metrics.catalogue import Metric

SCHEMA_VERSION = 1

# The keys of each level of a file. The schema for editors is made from the same.
FILE_KEYS = ("schema_version", "defaults", "every_sku", "skus")
DEFAULT_KEYS = ("when", "min_ratio_to_median", "ratio_source")
EVERY_SKU_KEYS = ("limits",)
SKU_KEYS = ("nvml_name", "like", "limits")
ENTRY_KEYS = (
    *("min", "max", "min_ratio_to_median", "expected", "expect_transport"),
    *("source", "when", "record_only", "despite_peak"),
)
WHEN_KEYS = (*TOPOLOGY, *KNOWN_LABELS, "labels")
RECORD_ONLY_EXCLUDES = tuple(name for name in ENTRY_KEYS if name not in ("when", "record_only"))
BOUNDS = ("min", "max", "min_ratio_to_median")
"""At least one of them stands in an entry that is judged."""
QUANTITIES = ("min", "max", "expected")
"""The keys whose value is in the metric's unit. ``expected`` is reported and never judged."""
NEEDED_BOUND = {"higher": "min", "lower": "max"}
"""Without this one, or a ratio to the median, any value passes."""
NO_RATIO = "none"
"""``min_ratio_to_median`` of an entry that does not take the default one."""

# A floor under this part of the data sheet peak is nearly always a wrong unit, and so is such a ratio.
_LEAST_OF_PEAK = 0.05
# All-reduce busbw measured with in-switch reduction: 482 GB/s where the links carry 450 in one direction.
_MOST_OF_UNBOUND_PEAK = 1.1


def shipped_path() -> Path:
    """Return the limits that come with this version: inside the package of a wheel, at the top of a
    checkout."""
    package = Path(__file__).parents[1]
    inside = package / "thresholds.yaml"
    return inside if inside.is_file() else package.parent / "thresholds.yaml"


def load(*paths: Path) -> Thresholds:
    """Read limit files, later ones overlaying earlier ones. Without a path, read the shipped file.

    Raises: ThresholdsError listing every error of every file, each as ``file:line:column: ...``.
    """
    shipped = shipped_path()
    return _shipped(shipped) if paths in ((), (shipped,)) else _load(*paths)


@cache
def _shipped(path: Path) -> Thresholds:
    """Read the shipped file once a process: several parts need it, and it takes as long as all else at a start."""
    return _load(path)


def _load(*paths: Path) -> Thresholds:
    skus = dict(datasheets.SKUS)
    limits: list[Limit] = []
    errors: list[str] = []
    names: set[str] = set()
    defaults: dict[str, _Default] = {}
    for layer, path in enumerate(paths):
        name = "thresholds.yaml" if path == shipped_path() else str(path)
        if name in names:
            name = str(path.resolve())
        names.add(name)
        reader = _Reader(name, layer, skus, defaults)
        reader.read(path)
        # A site's own floor does not switch off the comparison of its ranks; its conditions are its own.
        defaults = {metric: replace(default, when=()) for metric, default in reader.defaults.items()}
        limits += reader.limits
        errors += reader.file.report()
    if errors:
        raise ThresholdsError("\n".join(errors))
    # Layers come in order, so a later entry with the same conditions takes the place of the earlier one.
    kept = {
        (limit.sku, limit.metric, frozenset((part.key, part.text) for part in limit.when)): limit for limit in limits
    }
    return Thresholds(skus=skus, limits=tuple(kept.values()))


@dataclass(frozen=True, kw_only=True)
class _Default:
    """What the judged entries of a metric have that do not give it themselves."""

    when: tuple[Condition, ...]
    ratio: float | None
    ratio_source: str


class _Reader:
    """Reads one file, collecting errors instead of stopping at the first."""

    def __init__(
        self, name: str, layer: int, skus: dict[str, datasheets.Sku], defaults: Mapping[str, _Default]
    ) -> None:
        self.file = Document(name)
        self.layer = layer
        self.skus = skus
        self.limits: list[Limit] = []
        self.defaults = dict(defaults)

    def read(self, path: Path) -> None:
        needs = "schema_version, and every_sku or skus"
        root = self.file.root(path, needs=needs, block_scalar_hint=f"a condition is {FORMS}")
        top = None if root is None else self.file.mapping(root, "the file", FILE_KEYS)
        if root is None or top is None:
            return
        whole = not self.file.complaints  # else what is missing may be what was misspelt
        self.file.require_version(root, top, SCHEMA_VERSION)
        if "defaults" in top:
            for metric, _, value in self._by_metric(top["defaults"][1], "defaults"):
                self._default(metric, value)
        if "every_sku" in top:
            body = self.file.mapping(top["every_sku"][1], "every_sku", EVERY_SKU_KEYS)
            if body and "limits" in body:
                self._limits(EVERY_SKU, body["limits"][1])
        if "skus" not in top:
            if whole and "every_sku" not in top:
                self.file.fail(root, "skus is missing; it maps the name of a GPU to its limits")
            return
        for name, (key, value) in (self.file.mapping(top["skus"][1], "skus", None) or {}).items():
            self._sku(name, key, value)

    # Each method below reads one kind of node.

    def _sku(self, name: str, key: Node, node: Node) -> None:
        body = self.file.mapping(node, f"the SKU {name!r}", SKU_KEYS)
        if body is None:
            return
        if "nvml_name" in body:
            patterns = self._patterns(name, body["nvml_name"][1])
            known = self.skus.get(name, datasheets.Sku(name=name))
            self.skus[name] = replace(known, nvml_names=(*known.nvml_names, *patterns))
        elif name not in self.skus:
            self.file.fail(
                key,
                f"unknown SKU {name!r}; a SKU that is none of {', '.join(self.skus)} needs its nvml_name"
                f"{units.did_you_mean(name, self.skus)}",
            )
        if "limits" in body:
            self._limits(name, body["limits"][1])
        if "like" in body:
            self._like(name, body["like"][1])

    def _like(self, name: str, node: Node) -> None:
        """Take over the entries of an earlier SKU for each metric that this one has none for."""
        other = self.file.text(node, "like")
        theirs = [limit for limit in self.limits if limit.sku == other]
        if other is not None and not theirs:
            earlier = {limit.sku for limit in self.limits} - {EVERY_SKU}
            self.file.fail(
                node,
                f"like is {other!r}; it must be a SKU that stands before this one in this file: "
                f"{', '.join(sorted(earlier)) or 'there is none'}",
            )
        own = {limit.metric for limit in self.limits if limit.sku == name}
        for limit in (limit for limit in theirs if limit.metric not in own):
            whole = not limit.source or limit.source.startswith(("derived: ", "rule: "))
            source = limit.source if whole else f"derived: {limit.sku}: {limit.source}"
            self.limits.append(replace(limit, sku=name, source=source))

    def _limits(self, sku: str, node: Node) -> None:
        what = f"the limits of {sku}" if sku == EVERY_SKU else f"the limits of {sku!r}"
        for metric, key, value in self._by_metric(node, what):
            self._metric(sku, metric, key, value)

    def _by_metric(self, node: Node, what: str) -> Iterator[tuple[Metric, Node, Node]]:
        """Yield (metric, its key, its value) of a mapping whose keys are metrics, or several with commas between."""
        seen: set[str] = set()
        for keys, (key, value) in (self.file.mapping(node, what, None) or {}).items():
            for name in (part.strip() for part in keys.split(",")):
                if name in seen:
                    self.file.fail(key, f"duplicate key {name!r}")
                    continue
                seen.add(name)
                try:
                    yield measurement.known(name), key, value
                except MeasurementError as error:
                    self.file.fail(key, str(error))

    def _default(self, metric: Metric, node: Node) -> None:
        body = self.file.mapping(node, f"the defaults of {metric.name}", DEFAULT_KEYS) or {}
        ratio_text = self._text_of(body, "min_ratio_to_median")
        source = self._text_of(body, "ratio_source")
        if ("min_ratio_to_median" in body) != ("ratio_source" in body):
            self.file.fail(node, "min_ratio_to_median and ratio_source need each other")
        self.defaults[metric.name] = _Default(
            when=self._when(body["when"][1]) if "when" in body else (),
            ratio=self._ratio(ratio_text, body, metric) if "min_ratio_to_median" in body else None,
            ratio_source=source or "",
        )

    def _text_of(self, body: Mapping[str, tuple[Node, Node]], name: str) -> str | None:
        return self.file.text(body[name][1], name) if name in body else None

    def _patterns(self, sku: str, node: Node) -> list[str]:
        if sku == datasheets.CPU_REHEARSAL:
            self.file.fail(node, f"{sku} takes no nvml_name: its limits apply to no GPU")
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

    def _metric(self, sku: str, metric: Metric, key: Node, node: Node) -> None:
        entries: list[tuple[Node, Limit]] = []
        for item in (inner for outer in self.file.items(node) for inner in self.file.items(outer)):
            limit = self._entry(sku, metric, item)
            if limit is None:
                continue
            if sku == EVERY_SKU and metric.peak is not None and limit.record_only is None:
                self.file.fail(
                    key,
                    f"{metric.name} is compared with the data sheet peak of each SKU, so its limits belong under skus",
                )
            for other_node, other in entries:
                if limit.precedence == other.precedence and limit.overlaps(other):
                    self.file.fail(
                        item,
                        f"this entry ({limit.conditions()}) and that at line {other_node.start_mark.line + 1}"
                        f" ({other.conditions()}) can both apply; add a condition to one of them",
                    )
            entries.append((item, limit))
        self.limits += [limit for _, limit in entries]

    def _entry(self, sku: str, metric: Metric, node: Node) -> Limit | None:
        """Return an entry, or None where its conditions cannot be read."""
        before = len(self.file.complaints)
        body = self.file.mapping(node, f"an entry of {metric.name}", ENTRY_KEYS)
        if body is None:
            return None
        whole = len(self.file.complaints) == before  # else what is missing may be what was misspelt
        nested = ("when", "expect_transport")
        values = {name: self.file.text(value, name) for name, (_, value) in body.items() if name not in nested}
        bounds = {
            name: self._quantity(name, values[name], body[name][1], metric) for name in QUANTITIES if name in body
        }
        judged = "record_only" not in body and sku not in (EVERY_SKU, datasheets.CPU_REHEARSAL)
        default = self.defaults.get(metric.name) if judged else None
        ratio, source = None, values.get("source") or ""
        if "min_ratio_to_median" in body:
            if default is None or values["min_ratio_to_median"] != NO_RATIO:
                ratio = self._ratio(values["min_ratio_to_median"], body, metric)
        elif default is not None and default.ratio is not None:
            ratio, source = default.ratio, f"{source}; ratio: {default.ratio_source}"
        transports = self._transports(body["expect_transport"][1]) if "expect_transport" in body else None
        so_far = len(self.file.complaints)
        when = self._when(body["when"][1]) if "when" in body else ()
        conditions_are_good = len(self.file.complaints) == so_far
        if default is not None:
            own = {part.key for part in when}
            when = (*when, *(part for part in default.when if part.key not in own))
        limit = Limit(
            metric=metric.name,
            sku=sku,
            unit=metric.unit,
            **bounds,
            min_ratio_to_median=ratio,
            expect_transport=transports,
            source=source,
            origin=f"{self.file.name}:{node.start_mark.line + 1}:{node.start_mark.column + 1}",
            when=when,
            record_only=values.get("record_only"),
            layer=self.layer,
        )
        if "record_only" in body:
            for name in RECORD_ONLY_EXCLUDES:
                if name in body:
                    self.file.fail(body[name][0], f"{name} and record_only exclude each other")
        elif whole:
            without_ratio = {"min_ratio_to_median"} if values.get("min_ratio_to_median") == NO_RATIO else set()
            self._complete(node, body.keys() - without_ratio, metric)
            self._lint(limit, metric, body, values)
        return limit if conditions_are_good else None

    def _quantity(self, name: str, text: str | None, node: Node, metric: Metric) -> float | None:
        if text is None:
            return None
        try:
            amount = units.parse(text, like=metric.unit).to(metric.unit)
        except UnitError as error:
            self.file.fail(node, f"{name}: {error}")
            return None
        if math.copysign(1, amount) < 0 or (amount == 0 and name != "max"):
            needs = {"min": "above zero, or nothing can miss it", "max": "zero or more"}.get(name, "above zero")
            self.file.fail(node, f"{name} is {text}; it must be {needs}")
            return None
        return amount

    def _ratio(self, text: str | None, body: Mapping[str, tuple[Node, Node]], metric: Metric) -> float | None:
        name = "min_ratio_to_median"
        key, node = body[name]
        if metric.scope == "world" or metric.better == "none":
            why = (
                "there is one value in the whole run" if metric.scope == "world" else "neither more nor less is better"
            )
            self.file.fail(key, f"{name} does not apply to {metric.name}: {why}")
        if text is None:
            return None
        bare = units.magnitude(text)
        try:
            # 0.75 without a unit is no three quarters of a percent.
            like = "ratio" if bare is not None and bare[0] == "number" and bare[1] <= 1 else "%"
            ratio = units.parse(text, like=like).to("ratio")
        except UnitError as error:
            self.file.fail(node, f"{name}: {error}")
            return None
        if not _LEAST_OF_PEAK <= ratio <= 1:
            self.file.fail(node, f"{name} is {text}; it must be from {_LEAST_OF_PEAK * 100:g} % to 100 %")
            return None
        return ratio

    def _transports(self, node: Node) -> tuple[str, ...]:
        found: list[str] = []
        for item in self.file.items(node):
            name = self.file.text(item, "expect_transport")
            if name in found:
                self.file.fail(item, f"expect_transport has {name!r} twice")
            elif name is not None:
                found.append(name)
        return tuple(found)

    def _complete(self, node: Node, body: Set[str], metric: Metric) -> None:
        if not any(name in body for name in BOUNDS):
            self.file.fail(
                node,
                f"no limit for {metric.name}; give {', '.join(BOUNDS[:-1])} or {BOUNDS[-1]} with a source, or"
                " record_only with a reason" + ("; expected is never judged" if "expected" in body else ""),
            )
            return
        needed = NEEDED_BOUND.get(metric.better)
        if needed and needed not in body and "min_ratio_to_median" not in body:
            self.file.fail(
                node,
                f"{metric.name} needs {needed}: {metric.better} is better, and without it any value passes",
            )
        if "source" not in body:
            self.file.fail(node, "source is missing; say where the figure comes from")

    def _lint(self, limit: Limit, metric: Metric, body: Mapping[str, Any], written: Mapping[str, str | None]) -> None:
        def fail(name: str, problem: str) -> None:
            self.file.fail(body[name][1], f"{name} {written[name]} is {problem}")

        if limit.min is not None and limit.max is not None and limit.min > limit.max:
            fail("min", f"above max {written['max']}")
        if limit.expected is not None:
            if limit.min is not None and limit.expected < limit.min:
                fail("expected", f"below min {written['min']}; what is expected must keep the limit")
            elif limit.max is not None and limit.expected > limit.max:
                fail("expected", f"above max {written['max']}; what is expected must keep the limit")
        peak = peak_of(metric, self.skus.get(limit.sku))
        if peak is None or "despite_peak" in body:
            return
        most = 1.0 if metric.peak_is_bound else _MOST_OF_UNBOUND_PEAK
        times = "" if metric.peak_is_bound else f"{most:g} times "
        sheet = f"{units.show(peak, metric.unit)}, the data sheet peak of {limit.sku}"
        # Between nodes a slow fabric is no mistake: the links in the node say nothing about it.
        between_nodes = metric.peak in datasheets.LINK_PEAKS and any(
            part.key == "nnodes" and part.low > 1 for part in limit.when
        )
        for name, value in (("min", limit.min), ("expected", limit.expected)):
            if value is not None and value > most * peak:
                fail(name, f"above {times}{sheet}; lower it, or give the reason in despite_peak")
            if value is not None and not between_nodes and value < peak * _LEAST_OF_PEAK:
                under = f"under {_LEAST_OF_PEAK * 100:g} % of {sheet}"
                fail(name, f"{under}; check the unit, or give the reason in despite_peak")

    def _when(self, node: Node) -> tuple[Condition, ...]:
        body = self.file.mapping(node, "when", WHEN_KEYS) or {}
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
        try:
            return condition(key, text)
        except ThresholdsError as error:
            self.file.fail(node, str(error))
            return None
