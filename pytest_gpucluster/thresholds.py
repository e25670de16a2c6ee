"""Limits: YAML files into frozen values, each with the file and line it came from.

A file is read node by node from its syntax tree, never through YAML's own ideas of types: there ``1e9`` is
text, ``012`` is ten, ``NO`` is False and the last of two equal keys wins. All errors of all files are
reported at once.

Files are layers. Where an entry of a later file applies, it decides; elsewhere the earlier files stand.
Within one file the entry with the most conditions decides, and two that could both decide are refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pytest_gpucluster import hardware, metrics, units
from pytest_gpucluster.errors import MeasurementError, ThresholdsError, UnitError

if TYPE_CHECKING:
    import yaml

SCHEMA_VERSION = 1

# The facts about a run that a limit can depend on, besides a measurement's labels.
TOPOLOGY = ("world_size", "nnodes", "local_world_size")
# Labels that may stand directly under `when`. Others go under `labels:` there, so that a misspelt key is an
# error.
KNOWN_LABELS = ("size", "dtype", "transport")

# A floor outside this part of the data sheet peak is nearly always a wrong unit.
_LEAST_OF_PEAK = 0.05
# All-reduce busbw measured with in-switch reduction: 482 GB/s where the links carry 450 in one direction.
_MOST_OF_UNBOUND_PEAK = 1.1

_FORMS = "a value, 'X or more', 'below X' or 'X to Y'"


@dataclass(frozen=True, kw_only=True)
class Condition:
    """One line of ``when``: the fact ``key`` must be equal to, or lie in the range of, ``text``.

    A number or quantity is compared by its amount, so ``1 GB`` holds for ``1000 MB``. What is neither is
    compared as text. A fact that is missing, or of another dimension, never holds.
    """

    key: str
    text: str
    dimension: str | None
    low: float = -math.inf
    high: float = math.inf
    high_open: bool = False

    @property
    def exact(self) -> bool:
        """Tell whether a single value satisfies the condition."""
        return self.dimension is None or self.low == self.high

    def holds(self, fact: str | None) -> bool:
        """Tell whether a fact, as text, satisfies the condition."""
        if fact is None:
            return False
        if self.dimension is None:
            return fact == self.text
        amount = units.magnitude(fact)
        if amount is None or amount[0] != self.dimension:
            return False
        # "1.1 GB" and "1100 MB" differ in the last bit.
        value, slack = amount[1], 1e-12 * abs(amount[1])
        return self.low - slack <= value and (
            value + slack < self.high if self.high_open else value - slack <= self.high
        )

    def overlaps(self, other: Condition) -> bool:
        """Tell whether one fact could satisfy both conditions."""
        if self.dimension is None or other.dimension is None:
            return self.text == other.text
        if self.dimension != other.dimension:
            return False
        first, second = (self, other) if self.low <= other.low else (other, self)
        return second.low < first.high if first.high_open else second.low <= first.high


@dataclass(frozen=True, kw_only=True)
class Limit:
    """What a metric must reach on a SKU, in the metric's canonical unit, or why it is only recorded there.

    Either ``min`` or ``max`` (or both) with a ``source``, or ``record_only`` with the reason.
    """

    metric: str
    sku: str
    unit: str
    min: float | None
    max: float | None
    source: str
    origin: str
    when: tuple[Condition, ...] = ()
    record_only: str | None = None
    layer: int = 0

    @property
    def precedence(self) -> tuple[int, int, int]:
        """Order entries: later files first, then more conditions, then more exact ones."""
        return self.layer, len(self.when), sum(condition.exact for condition in self.when)

    def applies(self, facts: Mapping[str, str]) -> bool:
        """Tell whether all conditions hold."""
        return all(condition.holds(facts.get(condition.key)) for condition in self.when)

    def overlaps(self, other: Limit) -> bool:
        """Tell whether some run could satisfy the conditions of both."""
        theirs = {condition.key: condition for condition in other.when}
        return all(ours.overlaps(theirs[ours.key]) for ours in self.when if ours.key in theirs)

    def conditions(self) -> str:
        """Write the conditions in one line."""
        return ", ".join(f"{condition.key} {condition.text}" for condition in self.when) or "always"

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON types."""
        return {"min": self.min, "max": self.max, "source": self.source, "origin": self.origin}


@dataclass(frozen=True, kw_only=True)
class Thresholds:
    """All limits and SKUs in force."""

    skus: Mapping[str, hardware.Sku]
    limits: tuple[Limit, ...]
    _by_name: Mapping[tuple[str, str], list[Limit]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        index: dict[tuple[str, str], list[Limit]] = {}
        for limit in sorted(self.limits, key=lambda limit: limit.precedence, reverse=True):
            index.setdefault((limit.sku, limit.metric), []).append(limit)
        object.__setattr__(self, "_by_name", index)

    def sku_for(self, nvml_name: str) -> str | None:
        """Name the SKU whose pattern matches the whole NVML name. None: an unknown GPU.

        Raises: ThresholdsError if several SKUs claim the name.
        """
        found = hardware.matching(self.skus.values(), nvml_name)
        if len(found) > 1:
            raise ThresholdsError(
                f"the GPU {nvml_name!r} is claimed by {' and '.join(map(repr, found))}: make their nvml_name"
                " patterns narrower, or choose one with --gpucluster-sku"
            )
        return found[0] if found else None

    def limit(self, metric: str, *, sku: str, world_size: int, nnodes: int, labels: Mapping[str, str]) -> Limit | None:
        """Return the entry that decides about this metric here, or None if there is none."""
        known = facts(world_size=world_size, nnodes=nnodes, labels=labels)
        return next((limit for limit in self.entries(metric, sku=sku) if limit.applies(known)), None)

    def entries(self, metric: str, *, sku: str) -> Sequence[Limit]:
        """Return every entry for a metric on a SKU, the one that decides first in front."""
        return self._by_name.get((sku, metric), [])


def facts(*, world_size: int, nnodes: int, labels: Mapping[str, str]) -> dict[str, str]:
    """Return what conditions are held against: the topology of the run, and the labels of the measurement.

    A label called like a fact of the topology (``world_size`` of a sub-group) describes who measured, so it
    wins. ``local_world_size`` is known where the ranks divide evenly among the nodes.
    """
    known = {"world_size": str(world_size), "nnodes": str(nnodes)} | dict(labels)
    if "local_world_size" not in known:
        ranks, nodes = known["world_size"], known["nnodes"]
        if ranks.isdecimal() and nodes.isdecimal() and int(nodes) and int(ranks) % int(nodes) == 0:
            known["local_world_size"] = str(int(ranks) // int(nodes))
    return known


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
        errors += reader.report()
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
        self.name = name
        self.layer = layer
        self.skus = skus
        self.limits: list[Limit] = []
        self._errors: list[tuple[int, int, str]] = []

    def report(self) -> list[str]:
        places = sorted(set(self._errors))
        return [f"{self.name}:{line}:{column}: {text}" for line, column, text in places]

    def read(self, path: Path) -> None:
        import yaml  # here, because everything that judges imports this module and only this needs YAML

        try:
            text = path.read_text(encoding="utf-8-sig")
        except OSError as error:
            self._errors.append((1, 1, f"the file cannot be read: {error.strerror or error}"))
            return
        except UnicodeDecodeError as error:
            self._errors.append((1, 1, f"the file is not UTF-8: byte {error.start} is {error.object[error.start]:#x}"))
            return
        try:
            root = yaml.compose(text, Loader=yaml.SafeLoader)
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            place = (mark.line + 1, mark.column + 1) if mark else (1, 1)
            what = ", ".join(part for part in (error.context, error.problem) if part)
            hint = f"; a condition is {_FORMS}" if "chomping or indentation" in what else ""
            self._errors.append((*place, f"no valid YAML: {what}{hint}"))
            return
        except yaml.reader.ReaderError as error:
            before = text[: error.position]
            place = before.count("\n") + 1, len(before) - (before.rfind("\n") + 1) + 1
            self._errors.append(
                (*place, f"no valid YAML: the character U+{ord(text[error.position]):04X} is not allowed")
            )
            return
        if root is None:
            self._errors.append((1, 1, "the file is empty; it needs schema_version and skus"))
            return
        self._file(root)

    # Each method below reads one kind of node.

    def _file(self, root: yaml.Node) -> None:
        top = self._mapping(root, "the file", ("schema_version", "skus"))
        if top is None:
            return
        whole = not self._errors  # else what is missing may be what was misspelt
        if "schema_version" in top:
            node = top["schema_version"][1]
            version = self._text(node, "schema_version")
            if version is not None and version != str(SCHEMA_VERSION):
                self._fail(node, f"schema_version is {version!r}; this version reads {SCHEMA_VERSION}")
        elif whole:
            self._fail(root, f"schema_version is missing; this version reads schema_version: {SCHEMA_VERSION}")
        if "skus" not in top:
            if whole:
                self._fail(root, "skus is missing; it maps the name of a GPU to its limits")
            return
        for name, (key, value) in (self._mapping(top["skus"][1], "skus", None) or {}).items():
            self._sku(name, key, value)

    def _sku(self, name: str, key: yaml.Node, node: yaml.Node) -> None:
        body = self._mapping(node, f"the SKU {name!r}", ("nvml_name", "limits"))
        if body is None:
            return
        if "nvml_name" in body:
            patterns = self._patterns(name, body["nvml_name"][1])
            known = self.skus.get(name, hardware.Sku(name=name))
            self.skus[name] = replace(known, nvml_names=(*known.nvml_names, *patterns))
        elif name not in self.skus:
            self._fail(
                key,
                f"unknown SKU {name!r}; a SKU that is none of {', '.join(self.skus)} needs its nvml_name"
                f"{units.did_you_mean(name, self.skus)}",
            )
        if "limits" in body:
            found = self._mapping(body["limits"][1], f"the limits of {name!r}", None) or {}
            for metric, (metric_key, value) in found.items():
                self._metric(name, metric, metric_key, value)

    def _patterns(self, sku: str, node: yaml.Node) -> list[str]:
        if sku == hardware.CPU_REHEARSAL:
            self._fail(node, f"{sku} takes no nvml_name: its limits say nothing about a GPU")
            return []
        found = []
        for item in self._items(node):
            pattern = self._text(item, "nvml_name")
            if pattern is None:
                continue
            try:
                matches_any = re.fullmatch(pattern, "a name that no GPU has")
            except re.error as error:
                self._fail(item, f"bad pattern {pattern!r}: {error}; nvml_name is a regular expression")
                continue
            if matches_any:
                self._fail(item, f"the pattern {pattern!r} takes any GPU; write the name that nvidia-smi -L shows")
                continue
            found.append(pattern)
        return found

    def _metric(self, sku: str, name: str, key: yaml.Node, node: yaml.Node) -> None:
        try:
            metric = metrics.known(name)
        except MeasurementError as error:
            self._fail(key, str(error))
            return
        entries: list[tuple[yaml.Node, Limit]] = []
        for item in self._items(node):
            limit = self._entry(sku, metric, item)
            if limit is None:
                continue
            for other_node, other in entries:
                if limit.precedence == other.precedence and limit.overlaps(other):
                    self._fail(
                        item,
                        f"this entry ({limit.conditions()}) and that at line {other_node.start_mark.line + 1}"
                        f" ({other.conditions()}) can both apply; add a condition to one of them",
                    )
            entries.append((item, limit))
        self.limits += [limit for _, limit in entries]

    def _entry(self, sku: str, metric: metrics.Metric, node: yaml.Node) -> Limit | None:
        before = len(self._errors)
        body = self._mapping(
            node,
            f"an entry of {metric.name}",
            ("min", "max", "source", "when", "record_only", "despite_peak"),
        )
        if body is None:
            return None
        whole = len(self._errors) == before  # else what is missing may be what was misspelt
        values = {name: self._text(value, name) for name, (_, value) in body.items() if name != "when"}
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
            origin=f"{self.name}:{node.start_mark.line + 1}:{node.start_mark.column + 1}",
            when=self._when(body["when"][1]) if "when" in body else (),
            record_only=values.get("record_only"),
            layer=self.layer,
        )
        if "record_only" in body:
            for name in ("min", "max", "source", "despite_peak"):
                if name in body:
                    self._fail(body[name][0], f"{name} and record_only exclude each other")
        elif whole:
            self._complete(node, body, metric)
            if len(self._errors) == before:
                self._lint(limit, metric, body, values)
        return limit if len(self._errors) == before else None

    def _bound(self, name: str, text: str | None, node: yaml.Node, metric: metrics.Metric) -> float | None:
        if text is None:
            return None
        try:
            value = units.parse(text, like=metric.unit).to(metric.unit)
        except UnitError as error:
            self._fail(node, f"{name}: {error}")
            return None
        if value < 0 or (value == 0 and name == "min"):
            needs = "above zero, or nothing can miss it" if name == "min" else "zero or more"
            self._fail(node, f"{name} is {text}; it must be {needs}")
        return value

    def _complete(self, node: yaml.Node, body: Mapping[str, Any], metric: metrics.Metric) -> None:
        if "min" not in body and "max" not in body:
            self._fail(
                node,
                f"no limit for {metric.name}; give min or max with a source, or record_only with a reason",
            )
            return
        needed = {"higher": "min", "lower": "max"}.get(metric.better)
        if needed and needed not in body:
            self._fail(
                node,
                f"{metric.name} needs {needed}: {metric.better} is better, and without it any value passes",
            )
        if "source" not in body:
            self._fail(node, "source is missing; say where the figure comes from")

    def _lint(
        self, limit: Limit, metric: metrics.Metric, body: Mapping[str, Any], written: Mapping[str, str | None]
    ) -> None:
        if limit.min is not None and limit.max is not None and limit.min > limit.max:
            self._fail(body["min"][1], f"min {written['min']} is above max {written['max']}")
        peak = peak_of(metric, self.skus.get(limit.sku))
        if peak is None or limit.min is None or written.get("despite_peak") is not None:
            return
        sheet = f"{units.show(peak, metric.unit)}, the data sheet peak of {limit.sku}"
        if limit.min > (peak if metric.peak_is_bound else peak * _MOST_OF_UNBOUND_PEAK):
            times = "" if metric.peak_is_bound else f"{_MOST_OF_UNBOUND_PEAK:g} times "
            self._fail(
                body["min"][1],
                f"min {written['min']} is above {times}{sheet}; lower it, or give the reason in despite_peak",
            )
        # Between nodes a slow fabric is no mistake: the links in the node say nothing about it.
        within = metric.peak not in hardware.LINK_PEAKS or any(
            part.key == "nnodes" and part.exact and part.low == 1 for part in limit.when
        )
        if within and limit.min < peak * _LEAST_OF_PEAK:
            self._fail(
                body["min"][1],
                f"min {written['min']} is under {_LEAST_OF_PEAK * 100:g} % of {sheet}; check the unit, or give"
                " the reason in despite_peak",
            )

    def _when(self, node: yaml.Node) -> tuple[Condition, ...]:
        body = self._mapping(node, "when", (*TOPOLOGY, *KNOWN_LABELS, "labels")) or {}
        found = [self._condition(key, value) for key, (_, value) in body.items() if key != "labels"]
        if "labels" in body:
            for key, (key_node, value) in (self._mapping(body["labels"][1], "labels", None) or {}).items():
                if key in TOPOLOGY or key in KNOWN_LABELS:
                    self._fail(key_node, f"{key} stands directly under when, not under labels")
                found.append(self._condition(key, value))
        return tuple(condition for condition in found if condition is not None)

    def _condition(self, key: str, node: yaml.Node) -> Condition | None:
        text = self._text(node, key)
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
            self._fail(node, f"{key} is {text!r}; allowed is {_FORMS}, with {kind}")
            return None
        if key in TOPOLOGY and any(value < 1 or value != int(value) for _, value in known):
            self._fail(node, f"{key} is {text!r}; it counts in whole numbers from 1")
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
            self._fail(node, f"{key} is {text!r}; nothing lies in that range")
        return condition

    def _items(self, node: yaml.Node) -> list[yaml.Node]:
        import yaml

        if not isinstance(node, yaml.SequenceNode):
            return [node]
        if not node.value:
            self._fail(node, "the list is empty")
        return list(node.value)

    def _mapping(
        self, node: yaml.Node, what: str, allowed: Sequence[str] | None
    ) -> dict[str, tuple[yaml.Node, yaml.Node]] | None:
        import yaml

        if not isinstance(node, yaml.MappingNode):
            empty = isinstance(node, yaml.ScalarNode) and node.value == ""
            self._fail(node, f"{what} is {'empty' if empty else 'no mapping'}; it must be keys with values")
            return None
        if not node.value:
            self._fail(node, f"{what} is empty; it must be keys with values")
            return None
        found: dict[str, tuple[yaml.Node, yaml.Node]] = {}
        for key, value in node.value:
            name = self._text(key, "a key")
            if name is None:
                continue
            if name in found:
                first = found[name][0].start_mark.line + 1
                self._fail(key, f"duplicate key {name!r}; the first one is at line {first}")
            elif allowed is not None and name not in allowed:
                hint = units.did_you_mean(name, allowed)
                self._fail(key, f"unknown key {name!r}; allowed are {', '.join(allowed)}{hint}")
            else:
                found[name] = key, value
        return found

    def _text(self, node: yaml.Node, what: str) -> str | None:
        import yaml

        if not isinstance(node, yaml.ScalarNode):
            kind = "list" if isinstance(node, yaml.SequenceNode) else "mapping"
            self._fail(node, f"{what} must be a single value, not a {kind}")
            return None
        text: str = node.value.strip()
        if not text or node.tag == "tag:yaml.org,2002:null":
            self._fail(node, f"{what} is empty")
            return None
        return text

    def _fail(self, node: yaml.Node, text: str) -> None:
        self._errors.append((node.start_mark.line + 1, node.start_mark.column + 1, text))


def peak_of(metric: metrics.Metric, sku: hardware.Sku | None) -> float | None:
    """Return the data sheet peak that the metric is held beside, in the metric's unit, where there is one.

    Raises: MeasurementError if the metric names a peak that no data sheet entry has.
    """
    if metric.peak is None or sku is None or sku.peaks is None:
        return None
    if metric.peak not in hardware.PEAK_UNITS:
        raise MeasurementError(
            f"metric {metric.name!r} names the peak {metric.peak!r}; known are {', '.join(hardware.PEAK_UNITS)}"
        )
    peak: float | None = getattr(sku.peaks, metric.peak)
    return None if peak is None else units.convert(peak, hardware.PEAK_UNITS[metric.peak], metric.unit)
