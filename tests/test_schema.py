"""The JSON Schema for editors and the loader agree, as far as a schema can say it."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from hypothesis import assume, given
from hypothesis import strategies as st
from test_thresholds import BROKEN, OK, entry

from pytest_gpucluster import metrics, schema, thresholds, units
from pytest_gpucluster.errors import ThresholdsError, UnitError

ROOT = Path(__file__).parent.parent
GOLDEN = sorted((ROOT / "tests" / "golden").glob("*.yaml"))


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
OF_YAML = [path for path in PAGES if path.name != "results.schema.json"]
LIMITS = jsonschema.Draft7Validator(schema.limits_schema())


class EditorLoader(yaml.SafeLoader):
    """YAML as editors take it: YAML 1.2 has no dates."""


EditorLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
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
        thresholds.load(path)
    except ThresholdsError as error:
        return str(error).splitlines()
    return []


def loader_accepts(text: str, path: Path) -> bool:
    return complaints(text, path) == []


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_the_schema_in_docs_is_what_the_code_says(path: Path) -> None:
    assert path.read_text(encoding="utf-8") == PAGES[path], "it is stale; make it again: python docs/schemas.py"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_the_schema_is_a_schema(path: Path) -> None:
    made = json.loads(PAGES[path])
    jsonschema.Draft7Validator.check_schema(made)
    assert made["$schema"] == schema.DRAFT


@pytest.mark.parametrize("path", OF_YAML, ids=lambda path: path.name)
def test_its_patterns_are_ones_that_a_browser_s_editor_understands_too(path: Path) -> None:
    patterns = re.findall(r'"pattern": "(.*)"', PAGES[path])
    assert patterns
    assert [pattern for pattern in patterns if re.search(r"\(\?(?![:=!])|\\[AZz]|\(\?P", pattern)] == []


def test_the_shipped_file_names_its_schema_and_keeps_it() -> None:
    text = thresholds.shipped_path().read_text(encoding="utf-8")
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
    "a reason beside the peak": entry("{min: 990 TFLOPS, source: us, despite_peak: overclocked}"),
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


@pytest.mark.parametrize("text", VALID.values(), ids=VALID)
def test_what_the_loader_takes_the_schema_takes(text: str, tmp_path: Path) -> None:
    assert complaints(text, tmp_path / "my.yaml") == []
    assert [error.message for error in LIMITS.iter_errors(yaml.load(text, EditorLoader))] == []


def test_the_examples_for_operators_are_taken_by_both(tmp_path: Path) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    examples = [
        block for block in re.findall(r"^```yaml\n(.*?)^```$", readme, re.DOTALL | re.MULTILINE) if "skus:" in block
    ]
    header = thresholds.shipped_path().read_text(encoding="utf-8").split("#     schema_version: 1\n")[1]
    examples.append("schema_version: 1\n" + header.split("\n#\n")[0].replace("#     ", ""))
    assert len(examples) >= 2
    for example in examples:
        assert schema_accepts(example)
        assert loader_accepts(example, tmp_path / "my.yaml")


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_whole_files_of_mistakes_are_refused_by_both(path: Path, tmp_path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert not loader_accepts(text, tmp_path / "my.yaml")
    # Of two equal keys an editor's YAML keeps one, and a schema sees only that.
    assert schema_accepts(text) == (path.stem == "03-duplicates")


# What takes more than one value to see, or a look at how a value is written, only the loader sees.
LOADER_ONLY = {
    *("duplicate key", "duplicate metric", "merge key", "octal version", "infinite"),
    *("min above max", "above the peak", "busbw above any link", "a factor of 1000 low"),
    *("half a rank", "backward range", "two entries that both apply", "any pattern", "bad pattern"),
    *("ratio above all", "ratio of a hundredth"),
    *("expected above the peak", "expected far below the peak"),
    *("less expected than demanded", "more expected than allowed"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_one_mistake_is_refused_by_both_or_known_to_be_the_loader_s(name: str, tmp_path: Path) -> None:
    text, _ = BROKEN[name]
    assert not loader_accepts(text, tmp_path / "my.yaml")
    assert schema_accepts(text) == (name in LOADER_ONLY)


def test_every_exception_is_a_case_that_is_tried() -> None:
    assert LOADER_ONLY - set(BROKEN) == set()


# Entries made at random -----------------------------------------------------------------------------------------

NUMBERS = st.sampled_from(
    ["700", "0.7", "1e2", "+5", ".5", "5.", "0", "-1", "1e999", "1,000", "nan", "", "١٢", "8 or more", "0.0e5"]
)
SYMBOLS = st.sampled_from(["TFLOPS", "GFLOPS", "tflops", "GB/s", "Gb/s", "GiB", "us", "%", "ratio", "", "findings"])
QUANTITIES = st.builds("{}{}{}".format, NUMBERS, st.sampled_from(["", " ", "  "]), SYMBOLS)
WORDS = st.sampled_from(["us", "", "bf16", "NET/IB", "NO", "2024", "8", "1 GB", "~"])
AMOUNTS = st.sampled_from(["8", "2", "1.5", "0", "1 GB", "64 kB", "1 GB/s", "x", "", "-1"])
CONDITIONS = st.one_of(
    AMOUNTS,
    st.builds("{} or more".format, AMOUNTS),
    st.builds("below {}".format, AMOUNTS),
    st.builds("{} to {}".format, AMOUNTS, AMOUNTS),
    WORDS,
)
WHEN = st.dictionaries(
    st.sampled_from(["world_size", "nnodes", "local_world_size", "size", "dtype", "transport", "rank"]),
    CONDITIONS,
    max_size=3,
)
ENTRIES = st.fixed_dictionaries(
    {},
    optional={
        "min": QUANTITIES,
        "max": QUANTITIES,
        "min_ratio_to_median": QUANTITIES | st.sampled_from(["75 %", "0.75 ratio", "0.75"]),
        "expect_transport": WORDS | st.lists(WORDS, max_size=2),
        "source": WORDS,
        "when": WHEN | WORDS,
        "record_only": WORDS,
        "despite_peak": WORDS,
        "mim": QUANTITIES,
    },
)
NAMES = ["matmul.bf16.tflops", "nccl.all_reduce.busbw", "nccl.all_reduce.latency", "gpu.findings", "inventory.ranks"]

# What a schema cannot say: the loader alone knows it.
BEYOND_A_SCHEMA = re.compile(
    r"is above|is under 5 %|is too large|nothing lies in that range|counts in whole numbers from 1|can both apply"
    r"|it must be from 5 % to 100 %|with numbers such as 8"
)


def written(made: Any, metric: str) -> str:
    # Quoted throughout: what is compared is the texts, not YAML's ideas of them.
    return json.dumps({"schema_version": "1", "skus": {"H100 SXM": {"limits": {metric: made}}}}, ensure_ascii=False)


@given(st.one_of(ENTRIES, st.lists(ENTRIES, max_size=2)), st.sampled_from(NAMES))
def test_schema_and_loader_agree_about_any_entry(
    tmp_path_factory: pytest.TempPathFactory, made: Any, metric: str
) -> None:
    text = written(made, metric)
    told = complaints(text, tmp_path_factory.getbasetemp() / "made.yaml")
    by_schema = [f"{error.json_path}: {error.message}" for error in LIMITS.iter_errors(json.loads(text))]
    if not told:
        assert by_schema == []
    if not by_schema:
        assert [line for line in told if not BEYOND_A_SCHEMA.search(line)] == []


@given(st.text(alphabet="0123456789.eE+- \tTGBFLOPSs/%x", max_size=12))
def test_the_pattern_of_a_quantity_takes_what_units_take(text: str) -> None:
    pattern = schema.quantity("TFLOPS")["pattern"]
    above_zero = schema.quantity("TFLOPS", above_zero=True)["pattern"]
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
    made = schema.limits_schema()["definitions"]["limits"]["properties"]
    assert set(made) == set(metrics.METRICS)
    assert all(made[name]["description"].startswith(metric.doc) for name, metric in metrics.METRICS.items())


def test_a_quantity_of_an_unknown_unit_is_refused() -> None:
    with pytest.raises(UnitError, match="did you mean 'GB/s'"):
        schema.quantity("GBps")
