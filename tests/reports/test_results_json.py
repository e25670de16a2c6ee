"""results.json: it keeps its published schema, whatever the run; and it never makes a run look better than it was."""

import json
import math
from pathlib import Path

import example_runs
import jsonschema
from each import of_each
from example_runs import read

from pytest_gpucluster.reports import results_json
from pytest_gpucluster.reports.results_json import results_schema

SCHEMA = json.loads((Path(__file__).parents[2] / "docs" / "results.schema.json").read_text(encoding="utf-8"))
VALID = jsonschema.Draft7Validator(SCHEMA)
RUN = {"type": "run", "schema_version": 1, "run_id": "r", "started_at": "2026-01-02T03:04:05Z"}


def document(found):
    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    return json.loads(results_json.render(found), parse_constant=refuse)


_BASELINE = {"kind": "worse", "old": {"value": 3.1, "interval": None}, "old_rank": 0, "rank": 0, "matched_by": "rank"}
_BASELINE |= {"change_ratio": -0.1, "allowed_ratio": 0.03, "decides": True, "why": ""}
_JUDGED = {"metric": "hbm.copy.bandwidth", "unit": "TB/s", "status": "failed", "value": 2.8, "baseline": _BASELINE}
MERGED = read(
    {**RUN, "merged_from": [{"journal": "a", "verdict": "BROKEN", "exit": 11}]},
    {"type": "test", "nodeid": "t.py::a", "outcome": "failed", "measurements": [_JUDGED]},
)


def objects(schema, path=""):
    """Every schema within a schema, with where it stands."""
    yield path, schema
    for name, inner in schema.get("properties", {}).items():
        yield from objects(inner, f"{path}/{name}")
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            yield from objects(schema[key], f"{path}/*")


@of_each("name", example_runs.NAMES)
def test_every_example_keeps_the_published_schema_and_is_ascii(name):
    found = example_runs.journal_of(name)
    VALID.validate(document(found))
    text = results_json.render(found)
    assert text.isascii()
    assert "\x1b" not in text


def test_the_schema_is_closed_and_describes_each_key():
    assert results_schema() == SCHEMA
    for path, schema in objects(SCHEMA):
        assert schema.get("description"), path
        if "properties" in schema:
            assert schema["additionalProperties"] is False, path
            assert schema["required"] == list(schema["properties"]), path


CHANGES = [
    (("verdict", "word"), None),
    (("verdict", "accepted"), "yes"),
    (("tests", 0, "measurements"), None),
    (("tests", 0, "outcome"), "fine"),
    (("tests", 1, "measurements", 0, "value"), "much"),
    (("run", "seconds"), None),
    (("more",), 1),
]


@of_each("change", CHANGES)
def test_the_schema_refuses_what_is_not_as_it_says(change):
    (*places, key), value = change
    results = inner = document(example_runs.journal_of("cluster"))
    for place in places:
        inner = inner[place]
    inner[key] = value
    assert not VALID.is_valid(results)


def test_what_json_lacks_is_text():
    judged = {
        "metric": "hbm.copy.bandwidth",
        "unit": "TB/s",
        "status": "error",
        "value": math.nan,
        "values": {"0": math.nan, "1": math.inf, "2": -math.inf},
        "interval": [-math.inf, math.inf],
    }
    results = document(read(RUN, {"type": "test", "nodeid": "t.py::a", "outcome": "error", "measurements": [judged]}))
    VALID.validate(results)
    measured = results["tests"][0]["measurements"][0]
    assert (measured["value"], measured["values"]) == ("NaN", {"0": "NaN", "1": "Infinity", "2": "-Infinity"})
    assert measured["interval"] == ["-Infinity", "Infinity"]


def test_a_run_that_never_came_to_a_test_has_nothing_made_up():
    results = document(read(RUN))
    VALID.validate(results)
    assert (results["verdict"]["word"], results["verdict"]["accepted"], results["tests"]) == ("BROKEN", False, [])
    assert (results["limits"], results["environment"], results["workload"], results["run"]["ended_at"]) == (
        None,
        None,
        None,
        None,
    )


@of_each(
    "isolation",
    [
        {"culprits": "all"},
        {"culprits": [{"units": 3, "failed": "many", "evidence": {"a": 1}}, "x"], "names": [1]},
        {"cleared": {"0": 1}, "undecided": [None, {}], "why_undecided": None, "reproduced": "yes"},
    ],
)
def test_an_isolation_of_another_form_breaks_nothing_and_names_no_culprit(isolation):
    results = document(read(RUN, {"type": "test", "nodeid": "t.py::a", "outcome": "failed", "isolation": isolation}))
    VALID.validate(results)
    found = results["tests"][0]["isolation"]
    assert found["reproduced"] is False
    assert [name for culprit in found["culprits"] for name in culprit["names"]] == []


def test_a_merged_run_and_a_baseline_are_reported():
    results = document(MERGED)
    VALID.validate(results)
    assert [each["verdict"] for each in results["run"]["merged_from"]] == ["BROKEN"]
    baseline = results["tests"][0]["measurements"][0]["baseline"]
    assert (baseline["kind"], baseline["old"], baseline["change_ratio"], baseline["decides"]) == (
        "worse",
        3.1,
        -0.1,
        True,
    )
    for baseline in (
        {"kind": 1},
        {"old": "3"},
        {"old": {"value": "much"}, "rank": "1", "decides": 1},
    ):  # of another form
        judged = {"metric": "hbm.copy.bandwidth", "status": "passed", "baseline": baseline}
        results = document(
            read(RUN, {"type": "test", "nodeid": "t.py::a", "outcome": "passed", "measurements": [judged]})
        )
        VALID.validate(results)
        found = results["tests"][0]["measurements"][0]["baseline"]
        assert (found["old"], found["rank"], found["decides"]) == (None, None, False)
