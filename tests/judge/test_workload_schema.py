"""The JSON Schema of workloads and their loader agree, as far as a schema can say it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jsonschema
import yaml
from each import of_each
from test_schema import EditorLoader
from workload_files import BROKEN, COMPLETE, SHIPPED

from pytest_gpucluster.config.workload import KEYS
from pytest_gpucluster.config.workload_loader import load
from pytest_gpucluster.errors import ThresholdsError
from pytest_gpucluster.judge.editor_schemas import workloads_schema

SCHEMA = workloads_schema()
JUDGE = jsonschema.Draft7Validator(SCHEMA)


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


@of_each("text", list(VALID.values()))
def test_what_the_loader_takes_the_schema_takes(text: str, tmp_path: Path) -> None:
    assert loader_accepts(text, tmp_path / "my.yaml")
    assert [error.message for error in JUDGE.iter_errors(yaml.load(text, EditorLoader))] == []


# What takes more than one value to see, or a look at the amount behind a quantity, only the loader sees.
LOADER_ONLY = re.compile(r"duplicate 's|64000 B|64x64x60|window .*longest|inherits '(quick|soak)|inherits full")


@of_each("broken", BROKEN)
def test_one_mistake_is_refused_by_both_or_known_to_be_the_loader_s(broken: tuple[str, ...], tmp_path: Path) -> None:
    text, *expected = broken
    assert not loader_accepts(text, tmp_path / "my.yaml")
    assert schema_accepts(text) == bool(LOADER_ONLY.search(" ".join(expected)))
