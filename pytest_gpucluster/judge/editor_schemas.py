"""JSON Schemas of thresholds.yaml and workloads.yaml for editors, made from the tables that the loaders read by.

With a schema an editor completes keys and marks a wrong unit while it is typed. The loaders still decide: a schema
cannot express what depends on more than one value (duplicate keys, overlapping entries, a floor above a peak, a window
longer than its longest time, inheritance of profiles) or on the amount behind a quantity.

Draft 7, because that is what YAML editors know best. Patterns use only what Python and ECMAScript have in common.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

from pytest_gpucluster.config.declaration import Spec
from pytest_gpucluster.config.value_types import Amount, Choice, Duration, Kind, Ratio, Sizes, Whole
from pytest_gpucluster.config.workload import DECLARED, KEYS, PROFILES, SECTIONS
from pytest_gpucluster.config.workload_loader import FILE_KEYS, INHERITS, SCHEMA_VERSION, key_tree
from pytest_gpucluster.judge import loader
from pytest_gpucluster.judge.limits import KNOWN_LABELS, TOPOLOGY
from pytest_gpucluster.metrics import datasheets, measurement, units
from pytest_gpucluster.metrics.catalogue import Metric

Schema = dict[str, Any]

DRAFT = "http://json-schema.org/draft-07/schema#"

_UNSIGNED = r"\+?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?"
_SIGNED = _UNSIGNED.replace(r"\+?", "[+-]?", 1)
_ABOVE_ZERO = r"(?=[^eE]*[1-9])"


def document(title: str, root: Schema) -> Schema:
    """Return a whole schema.

    Args:
        title: what the editor calls it.
        root: what the file's top level must be.
    """
    return {"$schema": DRAFT, "title": title, **root}


def mapping(properties: Mapping[str, Schema | bool], **more: Any) -> Schema:
    """Return the schema of a mapping that is not empty and has these keys only. ``more`` adds to it or changes it."""
    return {
        "type": "object",
        "minProperties": 1,
        "additionalProperties": False,
        "properties": dict(properties),
        **more,
    }


def scalar(description: str = "", **more: Any) -> Schema:
    """Return the schema of a single value that is not empty, as the loaders read it: as text, whatever its type."""
    found: Schema = {"type": ["string", "number", "boolean"], "pattern": r"\S", **more}
    return {"description": description, **found} if description else found


def quantity(symbol: str, description: str = "", *, above_zero: bool = False) -> Schema:
    """Return the schema of a quantity in units that measure the same as ``symbol``.

    Raises:
        UnitError: the unit is unknown.
    """
    body = f"{_ABOVE_ZERO if above_zero else ''}{_UNSIGNED}[ \\t]*{_units(units.unit(symbol).dimension)}"
    found: Schema = {"type": "string", "pattern": f"^\\s*{body}\\s*$"}
    return {"description": description, **found} if description else found


def one_or_more(item: Schema, **more: Any) -> Schema:
    """Return the schema of one item, or of a list of them that is not empty."""
    return {"if": {"type": "array"}, "then": {"minItems": 1, "items": item, **more}, "else": item}


_RECORDED = "Why this is measured but not judged. It excludes every other key but when."


def limits_schema() -> Schema:
    """Return the schema of a file of limits, for the metrics and SKUs that are known now."""
    limits = _by_metric({metric.name: _metric(metric) for metric in measurement.METRICS.values()}, _to("entries"))
    anywhere = _by_metric(
        {
            metric.name: _metric(metric) if metric.peak is None else _to("recorded")
            for metric in measurement.METRICS.values()
        },
        _to("entries"),
    )
    default = {
        "when": _to("when"),
        "min_ratio_to_median": quantity("%", "What each rank must reach of the others' median, such as 75 %."),
        "ratio_source": scalar("Where that ratio comes from."),
    }
    assert tuple(default) == loader.DEFAULT_KEYS
    pair = ["min_ratio_to_median", "ratio_source"]
    definitions: Schema = {
        "limits": {"description": "The limits, by metric.", **limits},
        "limits_of_every_sku": {
            "description": "The limits, by metric; what has a data sheet peak is only recorded here.",
            **anywhere,
        },
        "when": {
            "description": "What the entry applies to. Within a file the entry with the most conditions decides.",
            **_when(),
        },
        "recorded": one_or_more(
            mapping({"when": _to("when"), "record_only": scalar(_RECORDED)}, required=["record_only"])
        ),
        "default": mapping(default, dependencies={pair[0]: pair[1:], pair[1]: pair[:1]}),
        "entries": {
            "description": "The same entry, or entries, of several metrics.",
            "type": ["object", "array"],
            "minItems": 1,
            "minProperties": 1,
        },
        "nvml_name": {
            "description": "A pattern for the whole name that nvidia-smi -L shows, or a list of patterns.",
            **one_or_more(scalar(format="regex")),
        },
    }
    for metric in measurement.METRICS.values():
        name = _entry_name(metric)
        definitions |= {name: _entry(metric), f"{name}_list": one_or_more(one_or_more(_to(name)))}
    like = scalar("A SKU of this file that stands before: its entries hold for each metric that has none here.")
    sku = {"nvml_name": _to("nvml_name"), "like": like, "limits": _to("limits")}
    assert tuple(sku) == loader.SKU_KEYS
    skus: dict[str, Schema | bool] = {name: mapping(sku) for name in datasheets.SKUS}
    skus[datasheets.CPU_REHEARSAL] = mapping({"limits": _to("limits")})
    version = loader.SCHEMA_VERSION
    root = {
        "schema_version": {"enum": [version, str(version)], "description": "Which form this file has."},
        "defaults": _by_metric(
            dict.fromkeys(measurement.METRICS, _to("default")),
            _to("default"),
            description="What the judged entries of a metric under skus have that do not give it themselves.",
        ),
        "every_sku": mapping(
            {"limits": _to("limits_of_every_sku")},
            required=["limits"],
            description="Limits that hold on each SKU whose own entries do not decide.",
        ),
        "skus": mapping(
            skus,
            additionalProperties=mapping(sku, required=["nvml_name"]),
            description="The kinds of GPUs. One that is not known yet needs its nvml_name.",
        ),
    }
    assert tuple(root) == loader.FILE_KEYS
    return document(
        "Limits of pytest-gpucluster",
        {
            **mapping(root, required=["schema_version"], anyOf=[{"required": ["every_sku"]}, {"required": ["skus"]}]),
            "definitions": definitions,
        },
    )


SCHEMAS: Mapping[str, Callable[[], Schema]] = MappingProxyType({"thresholds.schema.json": limits_schema})
"""File name below docs/ -> what makes it."""


def _by_metric(properties: Mapping[str, Schema | bool], several: Schema, **more: Any) -> Schema:
    """Return the schema of a mapping by metric, or by several metrics with commas between."""
    name = f"(?:{'|'.join(map(re.escape, properties))})"
    return mapping(properties, patternProperties={f"^{name}(?: *, *{name})+$": several}, **more)


def _metric(metric: Metric) -> Schema:
    unit = f" In {metric.unit}; {metric.better} is better." if metric.better != "none" else f" In {metric.unit}."
    return {"description": metric.doc + unit, "allOf": [_to(f"{_entry_name(metric)}_list")]}


def _entry_name(metric: Metric) -> str:
    # Metrics of one unit and kind share a definition.
    shared = "" if metric.scope != "world" else " of the world"
    return re.sub(r"[^A-Za-z0-9_]+", "_", f"entry in {metric.unit} {metric.better}{shared}")


def _entry(metric: Metric) -> Schema:
    compared = metric.better != "none" and metric.scope != "world"
    example = f"A quantity with its unit, such as 400 {metric.unit}."
    properties: dict[str, Schema | bool] = {
        "min": quantity(metric.unit, f"No rank may be below. {example}", above_zero=True),
        "max": quantity(metric.unit, f"No rank may be above. {example}"),
        "min_ratio_to_median": compared
        and {
            "description": "What each rank must reach of the median of the other ranks, such as 75 %; or none.",
            "anyOf": [quantity("%"), {"enum": [loader.NO_RATIO]}],
        },
        "expected": quantity(
            metric.unit,
            f"What a good one reaches: reported with the limit, never judged. {example}",
            above_zero=True,
        ),
        "expect_transport": {
            "description": "What may carry the data, such as NET/IB: the label `transport` of the measurement.",
            **one_or_more(scalar(), uniqueItems=True),
        },
        "source": scalar("Where these figures come from. It is in every report."),
        "when": _to("when"),
        "record_only": scalar(_RECORDED),
        "despite_peak": scalar("Why a min or expected above the data sheet peak, or far under it, is meant."),
    }
    assert tuple(properties) == loader.ENTRY_KEYS
    needed = loader.NEEDED_BOUND.get(metric.better)
    bounds = loader.BOUNDS if needed is None else (needed, "min_ratio_to_median")
    return mapping(
        properties,
        **{
            "if": {"required": ["record_only"]},
            "then": {"properties": dict.fromkeys(loader.RECORD_ONLY_EXCLUDES, False)},
            "else": {"required": ["source"], "anyOf": [{"required": [bound]} for bound in bounds]},
        },
    )


def _when() -> Schema:
    count = f"{_UNSIGNED}"
    whole = {"anyOf": [{"type": "integer", "minimum": 1}, {"type": "string", "pattern": _forms([count])}]}
    size = {
        "anyOf": [
            {"type": "number"},
            {"type": "string", "pattern": _forms([_SIGNED, f"{_SIGNED}[ \\t]*{_units('amount of data')}"])},
        ]
    }
    meanings = {
        "world_size": "Ranks of the group that measured, such as 8, 2 to 7, 16 or more.",
        "nnodes": "Nodes of that group.",
        "local_world_size": "Ranks on each of its nodes.",
        "size": "Bytes of the payload, such as 1 GB or more.",
        "dtype": "Data type, such as bf16.",
        "transport": "What carried the data, such as NET/IB.",
    }
    known = dict.fromkeys(TOPOLOGY, whole) | {name: size if name == "size" else scalar() for name in KNOWN_LABELS}
    labels = {
        "description": "Any other label of the measurement.",
        "type": "object",
        "minProperties": 1,
        "propertyNames": {"not": {"enum": list(known)}},
        "additionalProperties": scalar(),
    }
    properties: dict[str, Schema | bool] = {
        name: {"description": meanings[name], **form} for name, form in known.items()
    }
    properties["labels"] = labels
    assert tuple(properties) == loader.WHEN_KEYS
    return mapping(properties)


def _forms(amounts: Iterable[str]) -> str:
    """Return the pattern of a condition: a value, X or more, below X, X to Y, both ends being of one kind."""
    forms = "|".join(f"{x}|{x} +or +more|below +{x}|{x} +to +{x}" for x in amounts)
    return f"^\\s*(?:{forms})\\s*$"


def _units(dimension: str) -> str:
    symbols = [unit.symbol for unit in units.UNITS.values() if unit.dimension == dimension]
    return f"(?:{'|'.join(symbols)})"


def _to(name: str) -> Schema:
    return {"$ref": f"#/definitions/{name}"}


def workloads_schema() -> Schema:
    """Return the schema of a file of workloads."""
    tree = key_tree()
    profiles: dict[str, Schema | bool] = {
        name: {**_profile(name, tree), "description": f"The profile {name}: complete, or inherits the rest."}
        for name in PROFILES
    }
    root: dict[str, Schema | bool] = {
        "schema_version": {
            "enum": [SCHEMA_VERSION, str(SCHEMA_VERSION)],
            "description": "Which form this file has.",
        },
        "profiles": mapping(profiles, description="What to measure with, by profile."),
    }
    assert tuple(root) == FILE_KEYS
    return document("Workloads of pytest-gpucluster", mapping(root, required=list(root)))


def _profile(name: str, tree: Mapping[str, Any]) -> Schema:
    inherits = {
        "enum": [other for other in PROFILES if other != name],
        "description": "Another profile of this file, for the keys that this one lacks.",
    }
    keys = {key: _level(key, below) for key, below in tree.items()}
    return mapping({INHERITS: inherits, **keys}, **{"if": {"required": [INHERITS]}, "else": _complete(tree)})


def _level(path: str, below: Any) -> Schema:
    if isinstance(below, str):
        return _value(KEYS[below])
    doc = next((section.doc for section in SECTIONS if section.path == path), "")
    body = mapping({key: _level(f"{path}.{key}", inner) for key, inner in below.items()})
    return {"description": doc, **body} if doc else body


def _complete(tree: Any) -> Schema:
    """Return the schema that demands every key below."""
    nested = {key: _complete(below) for key, below in tree.items() if not isinstance(below, str)}
    required = [key for key, below in tree.items() if not _is_declared(below)]
    return {"required": required, **({"properties": nested} if nested else {})}


def _is_declared(below: Any) -> bool:
    """Return whether criteria declare values of all keys below, so that no file needs them."""
    if isinstance(below, str):
        return below in DECLARED
    return all(map(_is_declared, below.values()))


def _value(spec: Spec) -> Schema:
    item = _item(spec.kind)
    body = one_or_more(item, uniqueItems=True) if spec.is_list else item
    return {"description": f"{spec.doc}: {spec.allowed}", **body}


def _item(kind: Kind) -> Schema:
    if isinstance(kind, Whole):
        number = {"type": "integer", "minimum": kind.least, "maximum": kind.most, "multipleOf": kind.multiple_of}
        return {"anyOf": [number, {"type": "string", "pattern": r"^\s*(?:0|[1-9][0-9]*)\s*$"}]}
    if isinstance(kind, Sizes):
        return {"type": "string", "pattern": rf"^\s*{kind.pattern}\s*$"}
    if isinstance(kind, Amount):
        return quantity("B", above_zero=True)
    if isinstance(kind, Duration):
        return quantity("s", above_zero=kind.least_seconds > 0)
    if isinstance(kind, Ratio):
        return quantity("%", above_zero=True)
    assert isinstance(kind, Choice)
    return {"enum": list(kind.words)}
