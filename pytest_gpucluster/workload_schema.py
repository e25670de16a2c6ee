"""The JSON Schema of a file of workloads, for editors: made from the keys that the loader reads by.

What takes more than one value to see (a window longer than its longest time, who inherits from whom), or a look at the
amount behind a quantity, only the loader sees.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pytest_gpucluster.config.value_types import Amount, Choice, Duration, Kind, Ratio, Sizes, Whole
from pytest_gpucluster.config.workload import KEYS, PROFILES, SECTIONS
from pytest_gpucluster.config.workload_loader import FILE_KEYS, INHERITS, SCHEMA_VERSION, key_tree
from pytest_gpucluster.config.workload_sections import Spec
from pytest_gpucluster.schema import Schema, document, mapping, one_or_more, quantity


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
        "description": "Another profile of this file, which says what this one does not.",
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
    return {"required": list(tree), **({"properties": nested} if nested else {})}


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
