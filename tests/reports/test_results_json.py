"""results.json: it keeps its published schema, whatever the run; and it never makes a run look better than it was."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import example_runs
import jsonschema
import pytest

from pytest_gpucluster import journal
from pytest_gpucluster.journal import Journal, JournalBuilder, PartOfTime, encode
from pytest_gpucluster.reports import results_json
from pytest_gpucluster.reports.results_schema import results_schema
from pytest_gpucluster.time_spent import PARTS

SCHEMA = json.loads((Path(__file__).parents[2] / "docs" / "results.schema.json").read_text(encoding="utf-8"))
VALID = jsonschema.Draft7Validator(SCHEMA)
RUN = {"type": "run", "schema_version": 1, "run_id": "r", "started_at": "2026-01-02T03:04:05Z"}


def read(*lines: dict[str, Any]) -> Journal:
    builder = JournalBuilder(keep_samples=False)
    for line in lines:
        builder.add(json.loads(encode(line)))
    return builder.journal()


def document(found: Journal) -> Any:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    return json.loads(results_json.render(found), parse_constant=refuse)


_BESIDE = {
    "kind": "worse",
    "old": {"value": 3.1, "interval": None},
    "old_rank": 0,
    "rank": 0,
    "matched_by": "rank",
    "change_ratio": -0.1,
    "allowed_ratio": 0.03,
    "decides": True,
    "why": "",
}
_JUDGED = {"metric": "hbm.copy.bandwidth", "unit": "TB/s", "status": "failed", "value": 2.8, "baseline": _BESIDE}
MERGED = read(
    {**RUN, "merged_from": [{"journal": "a", "verdict": "BROKEN", "exit": 11}], "merged_despite": ["other hosts"]},
    {"type": "test", "nodeid": "t.py::a", "outcome": "failed", "measurements": [_JUDGED]},
)


@pytest.fixture(scope="module", params=example_runs.NAMES)
def example(request: pytest.FixtureRequest) -> Journal:
    return read(*example_runs.lines(request.param))


def objects(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every schema within a schema, with where it stands."""
    yield path, schema
    for name, inner in schema.get("properties", {}).items():
        yield from objects(inner, f"{path}/{name}")
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            yield from objects(schema[key], f"{path}/*")


def keys(value: Any, schema: dict[str, Any], path: str = "") -> Iterator[str]:
    """Where the keys of a document stand, as ``objects`` names them."""
    if isinstance(value, dict):
        for name, inner in value.items():
            known = name in schema.get("properties", {})
            under = schema["properties"][name] if known else schema["additionalProperties"]
            place = f"{path}/{name if known else '*'}"
            yield place
            yield from keys(inner, under, place)
    elif isinstance(value, list):
        for inner in value:
            yield from keys(inner, schema["items"], f"{path}/*")


def test_every_example_keeps_the_published_schema(example: Journal) -> None:
    VALID.validate(document(example))


def test_the_schema_is_closed_and_describes_each_key() -> None:
    assert results_schema() == SCHEMA
    for path, schema in objects(SCHEMA):
        assert schema.get("description"), path
        if "properties" in schema:
            assert schema["additionalProperties"] is False, path
            assert schema["required"] == list(schema["properties"]), path


def test_no_key_of_the_schema_is_one_that_no_run_has() -> None:
    told = set(keys(document(MERGED), SCHEMA))
    for name in example_runs.NAMES:
        told |= set(keys(document(read(*example_runs.lines(name))), SCHEMA))
    named = {path for path, schema in objects(SCHEMA) if path and not path.endswith("/*")}
    assert named - told == set()


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("verdict", "word"), None),
        (("verdict", "accepted"), "yes"),
        (("tests", 0, "measurements"), None),
        (("tests", 0, "outcome"), "fine"),
        (("tests", 1, "measurements", 0, "value"), "much"),
        (("run", "seconds"), None),
        (("more",), 1),
    ],
    ids=str,
)
def test_the_schema_refuses_what_is_not_as_it_says(place: tuple[Any, ...], value: Any) -> None:
    told = document(read(*example_runs.lines("cluster")))
    inner = told
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    assert not VALID.is_valid(told)


def test_only_an_accepted_run_on_gpus_is_accepted() -> None:
    said = {name: document(read(*example_runs.lines(name)))["verdict"] for name in example_runs.NAMES}
    assert [name for name, verdict in said.items() if verdict["accepted"]] == ["accepted"]
    assert said["rehearsal"]["exit"] == 0


def test_nothing_of_a_run_is_left_out() -> None:
    found = read(*example_runs.lines("cluster"))
    told = document(found)
    assert (told["verdict"]["word"], told["verdict"]["exit"]) == (found.verdict, found.exit)
    by_id = {test["nodeid"]: test for test in told["tests"]}
    assert list(by_id) == [*(result.nodeid for result in found.results), *(test.nodeid for test in found.not_run)]
    for result in found.results:
        test = by_id[result.nodeid]
        assert (test["outcome"], test["message"]) == (result.outcome, result.message)
        assert len(test["measurements"]) == len(result.measurements)
        for measured, judged in zip(test["measurements"], result.measurements, strict=True):
            assert measured["value"] == judged.value
            assert measured["values"] == {str(rank): value for rank, value in judged.values.items()}
            assert (measured["limit"] is None) == (judged.limit is None)
    skipped = {test["nodeid"] for test in told["not_run"]}
    assert skipped == {nodeid for nodeid, test in by_id.items() if test["outcome"] in ("skipped", "not run")}


def test_the_worst_value_names_its_host_and_gpu_and_the_headline_is_the_one_that_was_missed() -> None:
    told = document(read(*example_runs.lines("cluster")))
    matmul = next(test for test in told["tests"] if test["nodeid"] == example_runs.MATMUL)
    worst = matmul["measurements"][matmul["headline"]]
    assert (worst["status"], worst["worst"]["rank"], worst["worst"]["host"]) == ("failed", 11, "gpu-02")
    ranks = {place["rank"]: place for place in told["cluster"]["ranks"]}
    assert worst["worst"]["gpu_uuid"] == ranks[11]["gpu"]["uuid"]
    assert worst["better"] == "higher"
    assert worst["peak"] == pytest.approx(989)


def test_what_json_lacks_is_text() -> None:
    judged = {
        "metric": "hbm.copy.bandwidth",
        "unit": "TB/s",
        "status": "error",
        "value": math.nan,
        "values": {"0": math.nan, "1": math.inf, "2": -math.inf},
        "interval": [-math.inf, math.inf],
    }
    told = document(read(RUN, {"type": "test", "nodeid": "t.py::a", "outcome": "error", "measurements": [judged]}))
    VALID.validate(told)
    measured = told["tests"][0]["measurements"][0]
    assert (measured["value"], measured["values"]) == ("NaN", {"0": "NaN", "1": "Infinity", "2": "-Infinity"})
    assert measured["interval"] == ["-Infinity", "Infinity"]


def test_a_run_that_never_came_to_a_test_has_nothing_made_up() -> None:
    told = document(read(RUN))
    VALID.validate(told)
    assert (told["verdict"]["word"], told["verdict"]["accepted"], told["tests"]) == ("BROKEN", False, [])
    assert (told["limits"], told["environment"], told["workload"], told["run"]["ended_at"]) == (None, None, None, None)


def test_the_test_in_which_a_run_ended_says_so_and_when_it_began() -> None:
    start = {"type": "start", "nodeid": "t.py::a", "at": "2026-01-02T03:04:06Z"}
    told = document(read(RUN, {"type": "collected", "tests": [{"nodeid": "t.py::a"}, {"nodeid": "t.py::b"}]}, start))
    VALID.validate(told)
    assert [(test["outcome"], test["started_at"]) for test in told["tests"]] == [
        ("running", "2026-01-02T03:04:06Z"),
        ("not run", None),
    ]


@pytest.mark.parametrize(
    "isolation",
    [
        {"culprits": "all"},
        {"culprits": [{"units": 3, "failed": "many", "evidence": {"a": 1}}, "x"], "names": [1]},
        {"cleared": {"0": 1}, "undecided": [None, {}], "why_undecided": None, "reproduced": "yes"},
    ],
    ids=str,
)
def test_an_isolation_of_another_form_breaks_nothing_and_accuses_nobody(isolation: dict[str, Any]) -> None:
    told = document(read(RUN, {"type": "test", "nodeid": "t.py::a", "outcome": "failed", "isolation": isolation}))
    VALID.validate(told)
    found = told["tests"][0]["isolation"]
    assert found["reproduced"] is False
    assert [name for culprit in found["culprits"] for name in culprit["names"]] == []


def test_a_merged_run_and_a_baseline_are_told() -> None:
    told = document(MERGED)
    VALID.validate(told)
    assert [each["verdict"] for each in told["run"]["merged_from"]] == ["BROKEN"]
    assert told["run"]["merged_despite"] == ["other hosts"]
    beside = told["tests"][0]["measurements"][0]["baseline"]
    assert (beside["kind"], beside["old"], beside["change_ratio"], beside["decides"]) == ("worse", 3.1, -0.1, True)


@pytest.mark.parametrize("baseline", [{"kind": 1}, {"old": "3"}, {"old": {"value": "much"}, "rank": "1", "decides": 1}])
def test_a_baseline_of_another_form_breaks_nothing_and_says_nothing(baseline: dict[str, Any]) -> None:
    judged = {"metric": "hbm.copy.bandwidth", "status": "passed", "baseline": baseline}
    told = document(read(RUN, {"type": "test", "nodeid": "t.py::a", "outcome": "passed", "measurements": [judged]}))
    VALID.validate(told)
    found = told["tests"][0]["measurements"][0]["baseline"]
    assert (found["old"], found["rank"], found["decides"]) == (None, None, False)


def test_parts_of_time_are_told_all_or_not_at_all() -> None:
    spent = {part: PartOfTime(seconds=1.0, most_seconds=2.0, most_rank=1) for part in PARTS}
    told = results_json._spent(spent)
    assert told is not None
    assert list(told) == list(PARTS)
    del spent[PARTS[-1]]
    assert results_json._spent(spent) is None


def test_it_is_ascii_whatever_the_names_are() -> None:
    text = results_json.render(read(*example_runs.lines("hostile")))
    assert text.isascii()
    assert "\x1b" not in text


def test_it_is_the_same_for_the_journal_on_disk(tmp_path: Path) -> None:
    path = example_runs.write(tmp_path / "run", "cluster") / journal.FILE_NAME
    assert results_json.render(journal.read(path, keep_samples=True)) == results_json.render(
        journal.read(path, keep_samples=False)
    )


def test_the_page_names_every_key_of_the_file() -> None:
    page = (Path(__file__).parents[2] / "docs" / "reports.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([a-z_]+)`", page))
    assert set(SCHEMA["properties"]) - named == set()
