"""The JSON Schema of workloads and their loader agree, as far as a schema can say it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from test_workload_file import BROKEN, COMPLETE, SHIPPED

from pytest_gpucluster.errors import ThresholdsError
from pytest_gpucluster.workload_file import load
from pytest_gpucluster.workload_schema import workloads_schema
from pytest_gpucluster.workloads import KEYS

SCHEMA = workloads_schema()
JUDGE = jsonschema.Draft7Validator(SCHEMA)


class EditorLoader(yaml.SafeLoader):
    """YAML as editors take it: YAML 1.2 has no dates, and off is a word."""


EditorLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith((":timestamp", ":bool"))]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def schema_accepts(text: str) -> bool:
    try:
        data = yaml.load(text, EditorLoader)
    except yaml.YAMLError:
        return False
    return bool(JUDGE.is_valid(data))


def loader_accepts(text: str, path: Path) -> bool:
    path.write_text(text, encoding="utf-8")
    try:
        load(path, profile="cpu")
    except ThresholdsError:
        return False
    return True


def test_the_schema_is_a_schema() -> None:
    jsonschema.Draft7Validator.check_schema(SCHEMA)


def test_the_shipped_file_names_its_schema_and_keeps_it() -> None:
    text = SHIPPED.read_text(encoding="utf-8")
    assert text.splitlines()[0] == "# yaml-language-server: $schema=../docs/workloads.schema.json"
    assert (SHIPPED.parent / "../docs/workloads.schema.json").is_file()
    # In YAML 1.1 as well as in 1.2.
    assert [f"{error.json_path}: {error.message}" for error in JUDGE.iter_errors(yaml.safe_load(text))] == []


def test_every_key_has_a_place_with_what_it_means() -> None:
    for key, spec in KEYS.items():
        at: Any = SCHEMA["properties"]["profiles"]["properties"]["full"]
        for part in key.split("."):
            at = at["properties"][part]
        assert at["description"] == f"{spec.doc}: {spec.allowed}"


VALID = {
    "complete": COMPLETE,
    "inherited": COMPLETE + "  full: {inherits: cpu, nccl: {all_reduce: {sizes: [1 GB, 8 GiB]}}}\n",
    "inherits and nothing more": COMPLETE + "  full: {inherits: cpu}\n",
    "quoted": COMPLETE.replace("off", '"off"').replace("[128, 256]", '["128", "256"]').replace(": 1\n", ": '1'\n", 1),
    "a number for a list": COMPLETE.replace("[128, 256]", "128"),
}


@pytest.mark.parametrize("text", VALID.values(), ids=VALID)
def test_what_the_loader_takes_the_schema_takes(text: str, tmp_path: Path) -> None:
    assert loader_accepts(text, tmp_path / "my.yaml")
    assert [error.message for error in JUDGE.iter_errors(yaml.load(text, EditorLoader))] == []


# What takes more than one value to see, or a look at the amount behind a quantity, only the loader sees.
LOADER_ONLY = {
    *("duplicate key", "a size twice", "a shape that is no multiple"),
    *("a window longer than its longest time", "a window longer than an inherited longest time"),
    "a window longer than its longest time in a profile that others inherit",
    *("inherits from nobody", "inherits in a circle"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_one_mistake_is_refused_by_both_or_known_to_be_the_loader_s(name: str, tmp_path: Path) -> None:
    text, _ = BROKEN[name]
    assert not loader_accepts(text, tmp_path / "my.yaml")
    assert schema_accepts(text) == (name in LOADER_ONLY)


def test_every_exception_is_a_case_that_is_tried() -> None:
    assert LOADER_ONLY - set(BROKEN) == set()


WRITTEN = st.sampled_from(
    [
        "16",
        "100",
        "128",
        "off",
        "on",
        "",
        "1",
        "1 s",
        "0 s",
        "1 h",
        "50 ms",
        "-1 s",
        "8 MiB",
        "8 Mib",
        "1 GB/s",
        "nan %",
        "50 %",
        "0 %",
    ]
)


@given(st.sampled_from(sorted(KEYS)), st.one_of(WRITTEN, st.lists(WRITTEN, max_size=3)))
def test_what_the_loader_takes_for_any_key_the_schema_takes(
    tmp_path_factory: pytest.TempPathFactory, key: str, value: Any
) -> None:
    data = yaml.load(COMPLETE, EditorLoader)
    *folders, name = key.split(".")
    at = data["profiles"]["cpu"]
    for folder in folders:
        at = at[folder]
    at[name] = value
    if loader_accepts(json.dumps(data), tmp_path_factory.getbasetemp() / "made.yaml"):
        assert [error.message for error in JUDGE.iter_errors(data)] == []
