"""JSON Schema of thresholds.yaml for editors, made from the tables that its loader reads by.

With a schema an editor completes keys, shows what they mean, and marks an unknown key or a wrong unit while it is
typed. The loader decides: what depends on more than one value, and the amount behind a quantity, only it sees.

Draft 7, because that is what YAML editors know best. Patterns use only what Python and ECMAScript have in common.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pytest_gpucluster.judge import loader
from pytest_gpucluster.judge.limits import KNOWN_LABELS, TOPOLOGY
from pytest_gpucluster.metrics import datasheets, measurement, units

Schema = dict[str, Any]

_NUMBER = r"\+?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?"


def quantity(symbol: str, description: str = "") -> Schema:
    """Return the schema of a quantity in units that measure the same as ``symbol``.

    Raises:
        UnitError: the unit is unknown.
    """
    dimension = units.unit(symbol).dimension
    symbols = "|".join(unit.symbol for unit in units.UNITS.values() if unit.dimension == dimension)
    return _described(description, {"type": "string", "pattern": f"^\\s*{_NUMBER}[ \\t]*(?:{symbols})\\s*$"})


def _described(description: str, schema: Schema) -> Schema:
    return {"description": description, **schema} if description else schema


def _mapping(properties: Mapping[str, Schema], description: str = "", **more: Any) -> Schema:
    """Return the schema of a mapping that is not empty and has these keys only. ``more`` adds to it or changes it."""
    body = {"minProperties": 1, "additionalProperties": False, "properties": dict(properties)}
    return _described(description, {"type": "object", **body, **more})


def _scalar(description: str = "") -> Schema:
    """Return the schema of a single value that is not empty, as the loaders read it: as text, whatever its type."""
    return _described(description, {"type": ["string", "number", "boolean"], "pattern": r"\S"})


def _one_or_more(item: Schema) -> Schema:
    return {"if": {"type": "array"}, "then": {"minItems": 1, "items": item}, "else": item}


def _to(name: str) -> Schema:
    return {"$ref": f"#/definitions/{name}"}


def limits_schema() -> Schema:
    """Return the schema of a file of limits, for the metrics and SKUs that are known now."""
    metrics = measurement.METRICS.values()
    ratio = quantity("%", "What each rank must reach of the others' median, such as 75 %.")
    default = {
        "when": _to("when"),
        "min_ratio_to_median": ratio,
        "ratio_source": _scalar("Where that ratio comes from."),
    }
    sku = {
        "nvml_name": _described(
            "A pattern for the whole name that nvidia-smi -L shows, or a list of patterns.", _one_or_more(_scalar())
        ),
        "like": _scalar("A SKU of this file that stands before: its entries hold for each metric without own ones."),
        "limits": _to("limits"),
    }
    root = {
        "schema_version": {
            "enum": [loader.SCHEMA_VERSION, str(loader.SCHEMA_VERSION)],
            "description": "Which form this file has.",
        },
        "defaults": _by_metric(
            {metric.name: _mapping(default) for metric in metrics},
            "What the judged entries of a metric under skus have that do not give it themselves.",
        ),
        "every_sku": _mapping(
            {"limits": _to("limits")}, "Limits that hold on each SKU whose own entries do not decide."
        ),
        "skus": _mapping(
            {name: _mapping(sku) for name in datasheets.SKUS},
            "The kinds of GPUs. One that is not known yet needs its nvml_name.",
            additionalProperties=_mapping(sku, required=["nvml_name"]),
        ),
    }
    entries, limits = {}, {}
    for metric in metrics:  # those of one unit share a definition
        name = re.sub(r"[^A-Za-z0-9_]+", "_", f"entry in {metric.unit}")
        entries[name], entries[f"{name}_list"] = _entry(metric.unit), _one_or_more(_one_or_more(_to(name)))
        limits[metric.name] = {"description": f"{metric.doc} In {metric.unit}.", "allOf": [_to(f"{name}_list")]}
    assert (*root, *sku, *default) == (*loader.FILE_KEYS, *loader.SKU_KEYS, *loader.DEFAULT_KEYS)
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Limits of pytest-gpucluster",
        **_mapping(root, required=["schema_version"]),
        "definitions": {"limits": _by_metric(limits, "The limits, by metric."), "when": _when(), **entries},
    }


def _by_metric(properties: Mapping[str, Schema], description: str) -> Schema:
    """Return the schema of a mapping by metric, or by several metrics with commas between."""
    name = f"(?:{'|'.join(map(re.escape, properties))})"
    return _mapping(properties, description, patternProperties={f"^{name}(?: *, *{name})+$": {}})


def _entry(unit: str) -> Schema:
    example = f"A quantity with its unit, such as 400 {unit}."
    ratio = "What each rank must reach of the median of the other ranks, such as 75 %; or none."
    properties = {
        "min": quantity(unit, f"No rank may be below. {example}"),
        "max": quantity(unit, f"No rank may be above. {example}"),
        "min_ratio_to_median": _described(ratio, {"anyOf": [quantity("%"), {"enum": [loader.NO_RATIO]}]}),
        "expected": quantity(unit, f"What a good one reaches: reported with the limit, never judged. {example}"),
        "expect_transport": _described(
            "What may carry the data, such as NET/IB: the label `transport` of the measurement.",
            _one_or_more(_scalar()),
        ),
        "source": _scalar("Where these figures come from. It is in every report."),
        "when": _to("when"),
        "record_only": _scalar("Why this is measured but not judged. It excludes every other key but when."),
        "despite_peak": _scalar("Why a min or expected above the data sheet peak, or far under it, is meant."),
    }
    assert tuple(properties) == loader.ENTRY_KEYS
    return _mapping(properties)


def _when() -> Schema:
    properties = {
        "world_size": _scalar("Ranks of the group that measured, such as 8, 2 to 7, 16 or more."),
        "nnodes": _scalar("Nodes of that group."),
        "local_world_size": _scalar("Ranks on each of its nodes."),
        "size": _scalar("Bytes of the payload, such as 1 GB or more."),
        "dtype": _scalar("Data type, such as bf16."),
        "transport": _scalar("What carried the data, such as NET/IB."),
        "labels": _described(
            "Any other label of the measurement.",
            {
                "type": "object",
                "minProperties": 1,
                "propertyNames": {"not": {"enum": [*TOPOLOGY, *KNOWN_LABELS]}},
                "additionalProperties": _scalar(),
            },
        ),
    }
    assert tuple(properties) == loader.WHEN_KEYS
    return _mapping(properties, "What the entry applies to. Within a file the entry with the most conditions decides.")
