"""The JSON Schema for editors and the loader agree, as far as a schema can say it."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import jsonschema
import yaml
from each import of_each
from hypothesis import assume, given
from hypothesis import strategies as st
from test_thresholds import BROKEN, OK, entry

from pytest_gpucluster.errors import ThresholdsError, UnitError
from pytest_gpucluster.judge import editor_schemas, loader
from pytest_gpucluster.metrics import measurement, units

ROOT = Path(__file__).parents[2]


def pages() -> dict[Path, str]:
    spec = importlib.util.spec_from_file_location("gpucluster_schemas", ROOT / "docs" / "schemas.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    made: dict[Path, str] = module.pages()
    return made


# Made before any test runs: other tests add metrics of their own.
PAGES = pages()
LIMITS = jsonschema.Draft7Validator(editor_schemas.limits_schema())


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
    return bool(LIMITS.is_valid(data))


def complaints(text: str, path: Path) -> list[str]:
    """What the loader says."""
    path.write_text(text, encoding="utf-8")
    try:
        loader.load(path)
    except ThresholdsError as error:
        return str(error).splitlines()
    return []


def loader_accepts(text: str, path: Path) -> bool:
    return complaints(text, path) == []


@of_each("path", list(PAGES), name=lambda path: path.name)
def test_the_schema_in_docs_is_one_that_editors_understand(path: Path) -> None:
    jsonschema.Draft7Validator.check_schema(json.loads(PAGES[path]))
    # Patterns that a browser's editor understands, too.
    assert re.findall(r'"pattern": "[^"]*(?:\(\?(?![:=!])|\\\\[AZz]|\(\?P)', PAGES[path]) == []


def test_the_shipped_file_names_its_schema_and_keeps_it() -> None:
    text = loader.shipped_path().read_text(encoding="utf-8")
    assert text.splitlines()[0] == "# yaml-language-server: $schema=docs/thresholds.schema.json"
    assert (ROOT / "docs" / "thresholds.schema.json") in PAGES
    errors = [f"{error.json_path}: {error.message}" for error in LIMITS.iter_errors(yaml.safe_load(text))]
    assert errors == []


VALID = {
    "a limit": entry("{" + OK + "}"),
    "only of every SKU": "schema_version: 1\nevery_sku: {limits: {ddp.loss_error: {max: 1 ratio, source: us}}}\n",
    "a list": entry("[{when: {world_size: 8}, " + OK + "}, {record_only: why}]"),
    "a ratio alone": entry("{min_ratio_to_median: 75 %, source: us}"),
    "a transport": entry("{" + OK + ", expect_transport: NET/IB}"),
    "transports": entry("{" + OK + ", expect_transport: [P2P, SHM]}"),
    "both bounds": entry("{min: 1e2 TFLOPS, max: +.5 PFLOPS, source: us}"),
    "a ceiling of zero": entry("{max: 0 findings, source: us}", metric="gpu.findings"),
    "a reason for exceeding the peak": entry("{min: 990 TFLOPS, source: us, despite_peak: overclocked}"),
    "all conditions": entry(
        "{when: {world_size: 2 to 7, nnodes: 1, local_world_size: below 8, size: 1 GB or more, dtype: bf16,"
        " transport: NET/IB, labels: {bucket: 25, n: 8192 or more}}, " + OK + "}"
    ),
    "sources that yaml takes for something else": entry("{min: 700 TFLOPS, source: 2024-01-01}"),
    "a year as a source": entry("{min: 700 TFLOPS, source: 2024}"),
    "a quoted version": entry("{" + OK + "}").replace(": 1", ": '1'", 1),
    "a new sku": "schema_version: 1\nskus: {H300: {nvml_name: [NVIDIA H300, 'NVIDIA H300 \\d+GB']}}\n",
    "a rehearsal": entry("{min: 1 GFLOPS, source: us}", sku="cpu-rehearsal"),
    "a metric without a better side": entry("{max: 16 ranks, source: us}", metric="inventory.ranks"),
}


@of_each("text", list(VALID.values()))
def test_what_the_loader_takes_the_schema_takes(text: str, tmp_path: Path) -> None:
    assert complaints(text, tmp_path / "my.yaml") == []
    assert [error.message for error in LIMITS.iter_errors(yaml.load(text, EditorLoader))] == []


def test_the_examples_for_operators_are_taken_by_both(tmp_path: Path) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    examples = [
        block for block in re.findall(r"^```yaml\n(.*?)^```$", readme, re.DOTALL | re.MULTILINE) if "skus:" in block
    ]
    header = loader.shipped_path().read_text(encoding="utf-8").split("#     schema_version: 1\n")[1]
    examples.append("schema_version: 1\n" + header.split("\n#\n")[0].replace("#     ", ""))
    assert len(examples) >= 2
    for example in examples:
        assert schema_accepts(example)
        assert loader_accepts(example, tmp_path / "my.yaml")


# What takes more than one value to see, or a look at how a value is written, only the loader sees: by its complaint.
LOADER_ONLY = re.compile(
    r"duplicate|'<<'|above [0-9m]|below min|under 5 %|1e999|(100.1|0.75) % 5"
    r"|'01'|1\.5 or more|8 to 2|5 world_size|'none'|\(X|'\.\*'"
)


@of_each("broken", BROKEN)
def test_one_mistake_is_refused_by_both_or_known_to_be_the_loader_s(broken: tuple[str, ...], tmp_path: Path) -> None:
    text, *expected = broken
    assert not loader_accepts(text, tmp_path / "my.yaml")
    assert schema_accepts(text) == all(map(LOADER_ONLY.search, expected))


@given(st.text(alphabet="0123456789.eE+- \tTGBFLOPSs/%x", max_size=12))
def test_the_pattern_of_a_quantity_takes_what_units_take(text: str) -> None:
    pattern = editor_schemas.quantity("TFLOPS")["pattern"]
    above_zero = editor_schemas.quantity("TFLOPS", above_zero=True)["pattern"]
    assume(not re.search(r"[eE][+-]?[0-9]{3}", text))  # no pattern sees that a number is too large, or too small
    try:
        value = units.parse(text, like="TFLOPS").value
    except UnitError:
        understood, value = False, 0.0
    else:
        understood = not text.strip().startswith("-")
    assert bool(re.search(pattern, text)) == understood
    assert bool(re.search(above_zero, text)) == (understood and value > 0)


def test_every_metric_has_a_place_in_the_schema_with_what_it_is() -> None:
    made = editor_schemas.limits_schema()["definitions"]["limits"]["properties"]
    assert set(made) == set(measurement.METRICS)
    assert all(made[name]["description"].startswith(metric.doc) for name, metric in measurement.METRICS.items())
