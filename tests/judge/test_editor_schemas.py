"""The JSON Schema for editors: it takes what the loader takes, and marks unknown keys and wrong units."""

import json
import re
import runpy
from pathlib import Path

import jsonschema
import yaml
from each import of_each
from hypothesis import assume, given
from hypothesis import strategies as st
from test_thresholds import OK, entry

from pytest_gpucluster.errors import UnitError
from pytest_gpucluster.judge import editor_schemas, loader
from pytest_gpucluster.metrics import measurement, units

ROOT = Path(__file__).parents[2]


# Made before any test runs: other tests add metrics of their own.
PAGES = runpy.run_path(str(ROOT / "docs" / "generate.py"), run_name="generate")["schemas"]()
SCHEMA = editor_schemas.limits_schema()


class EditorLoader(yaml.SafeLoader):
    """YAML as editors take it: YAML 1.2 has no dates, and off is a word."""


EditorLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith((":timestamp", ":bool"))]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def complaints(text):
    errors = jsonschema.Draft7Validator(SCHEMA).iter_errors(yaml.load(text, EditorLoader))
    return [f"{error.json_path}: {error.message}" for error in errors]


@of_each("path", list(PAGES), name=lambda path: path.name)
def test_the_schema_in_docs_is_one_that_editors_understand(path):
    jsonschema.Draft7Validator.check_schema(json.loads(PAGES[path]))
    # Patterns that a browser's editor understands, too.
    assert re.findall(r'"pattern": "[^"]*(?:\(\?(?![:=!])|\\\\[AZz]|\(\?P)', PAGES[path]) == []


def test_the_shipped_file_names_its_schema_and_keeps_it():
    text = loader.shipped_path().read_text(encoding="utf-8")
    found = re.match(r"# yaml-language-server: \$schema=(.+)\n", text)
    assert (loader.shipped_path().parent / found[1]).resolve() in PAGES
    assert complaints(text) == []


VALID = {
    "a limit": entry("{" + OK + "}"),
    "only of every SKU": "schema_version: 1\nevery_sku: {limits: {ddp.loss_error: {max: 1 ratio, source: us}}}\n",
    "a list": entry("[{when: {world_size: 8}, " + OK + "}, {record_only: why}]"),
    "a ratio alone": entry("{min_ratio_to_median: 75 %, source: us}"),
    "transports": entry("{" + OK + ", expect_transport: [P2P, SHM]}"),
    "both bounds": entry("{min: 1e2 TFLOPS, max: +.5 PFLOPS, source: us}"),
    "all conditions": entry(
        "{when: {world_size: 2 to 7, nnodes: 1, local_world_size: below 8, size: 1 GB or more, dtype: bf16,"
        " transport: NET/IB, labels: {bucket: 25, n: 8192 or more}}, " + OK + "}"
    ),
    "sources that yaml takes for something else": entry("{min: 700 TFLOPS, source: 2024-01-01}"),
    "a quoted version": entry("{" + OK + "}").replace(": 1", ": '1'", 1),
    "a new sku": "schema_version: 1\nskus: {H300: {nvml_name: [NVIDIA H300, 'NVIDIA H300 \\d+GB']}}\n",
}


@of_each("text", list(VALID.values()))
def test_what_the_loader_takes_the_schema_takes(text, tmp_path):
    path = tmp_path / "my.yaml"
    path.write_text(text, encoding="utf-8")
    loader.load(path)
    assert complaints(text) == []


def test_the_examples_for_operators_are_taken_by_both(tmp_path):
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    examples = [
        block for block in re.findall(r"^```yaml\n(.*?)^```$", readme, re.DOTALL | re.MULTILINE) if "skus:" in block
    ]
    header = loader.shipped_path().read_text(encoding="utf-8").split("#     schema_version: 1\n")[1]
    examples.append("schema_version: 1\n" + header.split("\n# An entry")[0].replace("#     ", ""))
    assert len(examples) >= 2
    for example in examples:
        (tmp_path / "my.yaml").write_text(example, encoding="utf-8")
        loader.load(tmp_path / "my.yaml")
        assert complaints(example) == []


WRONG = {
    "an unknown key of an entry": entry("{mim: 700 TFLOPS, source: us}"),
    "an unknown metric": entry("{" + OK + "}", metric="matmul.bf61.tflops"),
    "an unknown condition": entry("{when: {wrld_size: 8}, " + OK + "}"),
    "a label's condition among the labels": entry("{when: {labels: {size: 1 GB}}, " + OK + "}"),
    "an unknown SKU without its name": entry("{" + OK + "}", sku="H100 SMX"),
    "a unit of something else": entry("{min: 400 GiB, source: us}", metric="nccl.all_reduce.busbw"),
    "a misspelt unit": entry("{min: 400 gb/s, source: us}", metric="nccl.all_reduce.busbw"),
    "no unit": entry("{min: 700, source: us}"),
    "another version": entry("{" + OK + "}").replace(": 1", ": 2", 1),
}


@of_each("text", list(WRONG.values()))
def test_an_unknown_key_and_a_wrong_unit_are_marked(text):
    assert complaints(text) != []


@given(st.text(alphabet="0123456789.eE+- \tTGBFLOPSs/%x", max_size=12))
def test_the_pattern_of_a_quantity_takes_what_units_take(text):
    assume(not re.search(r"[eE][+-]?[0-9]{3}", text))  # no pattern sees that a number is too large, or too small
    try:
        units.parse(text, like="TFLOPS")
    except UnitError:
        understood = False
    else:
        understood = not text.strip().startswith("-")
    assert bool(re.search(editor_schemas.quantity("TFLOPS")["pattern"], text)) == understood


def test_every_metric_has_a_place_with_what_it_is():
    made = SCHEMA["definitions"]["limits"]["properties"]
    assert {name: schema["description"].startswith(measurement.METRICS[name].doc) for name, schema in made.items()} == (
        dict.fromkeys(measurement.METRICS, True)
    )
