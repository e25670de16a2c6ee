"""The rows that are made up: glaive's format, the same for a seed everywhere, and held out without overlap."""

from __future__ import annotations

import hashlib
import json

import pytest
from each import of_each

from pytest_gpucluster.benchmarks.lora.dataset import held_out_split
from pytest_gpucluster.benchmarks.lora.function_calls import FunctionCall, has_call, parse
from pytest_gpucluster.benchmarks.lora.synthetic import FUNCTIONS, WITH_FUNCTIONS, Draws, synthetic_rows

ROWS = synthetic_rows(300, seed=5)


def test_the_rows_of_a_seed_are_the_same_in_any_process_and_in_every_version_and_all_different():
    keys = [row.key() for row in ROWS]
    digest = hashlib.sha256("\n".join(keys).encode()).hexdigest()
    assert digest == "22dd75bcdca25d02f83fd52a43f503adef0b98e86591bce7a19aa2cf3525f1fb"
    assert len(set(keys)) == len(ROWS)


def test_fewer_rows_are_the_first_of_more_and_another_seed_makes_others():
    assert synthetic_rows(10, seed=5) == ROWS[:10]
    assert not {row.key() for row in synthetic_rows(50, seed=6)} >= {row.key() for row in ROWS[:50]}


def test_every_call_is_of_a_function_that_the_system_text_has_as_it_was_asked_for_and_answered():
    called = []
    for row in ROWS:
        asked, *rest = row.turns
        if not has_call(rest[0].text):
            assert [turn.role for turn in row.turns] == ["user", "assistant"]
            continue
        assert [turn.role for turn in row.turns] == ["user", "assistant", "function", "assistant"]
        call, response = parse(rest[0].text), json.loads(rest[1].text)
        assert isinstance(call, FunctionCall)
        called.append(call.name)
        assert row.system.startswith(WITH_FUNCTIONS)
        schemas = row.system.removeprefix(WITH_FUNCTIONS).split("\n\n")
        [schema] = [schema for schema in map(json.loads, schemas) if schema["name"] == call.name]
        assert list(call.arguments) == schema["parameters"]["required"]
        for name, value in call.arguments.items():
            assert type(value) is {"integer": int, "string": str}[schema["parameters"]["properties"][name]["type"]]
            assert str(value) in asked.text
        assert all(str(value) in rest[2].text for name, value in response.items() if name != "status")
    assert 240 < len(called) < 300
    assert set(called) == {function.name for function in FUNCTIONS}


def test_more_rows_than_there_are_different_ones_are_refused(monkeypatch):
    monkeypatch.setattr("pytest_gpucluster.benchmarks.lora.synthetic._TALK_RATIO", 1.0)
    with pytest.raises(ValueError, match="300 different"):
        synthetic_rows(300, seed=0)


def test_no_conversation_is_on_both_sides_however_often_it_is_there():
    rows = [*ROWS, *ROWS[:100], *ROWS[50:60]]
    train, held_out = held_out_split(rows, 0.1, seed=0)
    ours, theirs = {row.key() for row in train}, {row.key() for row in held_out}
    assert not ours & theirs
    assert len(theirs) == 30
    assert len(train) + len(held_out) == len(rows)
    assert train == [row for row in rows if row.key() in ours]


def test_which_are_held_out_does_not_hang_on_the_order_and_changes_with_the_seed():
    held_out = {row.key() for row in held_out_split(ROWS, 0.1, seed=0)[1]}
    assert {row.key() for row in held_out_split(ROWS[::-1], 0.1, seed=0)[1]} == held_out
    assert {row.key() for row in held_out_split(ROWS, 0.1, seed=1)[1]} != held_out


def test_a_split_that_leaves_a_side_empty_is_refused():
    assert len(held_out_split(ROWS[:3], 0.001, seed=0)[1]) == 1
    for rows in (ROWS[:1], [], ROWS[:1] * 5):
        with pytest.raises(ValueError, match="too few"):
            held_out_split(rows, 0.5, seed=0)


def test_the_draws_of_a_seed_are_these_for_ever():
    draws = Draws(7, "row", 3)
    assert [draws.below(100) for _ in range(8)] == [61, 24, 82, 71, 39, 70, 92, 85]
    items = list(range(8))
    draws.shuffle(items)
    assert items == [4, 3, 0, 7, 5, 1, 6, 2]


def test_other_keys_and_other_seeds_give_other_draws():
    assert len({Draws(*keys).below(1000) for keys in [(0,), (1,), (0, "a"), (0, "b"), (0, "a", 1)]}) == 5


@of_each("end", [1, 2, 7])
def test_every_number_below_the_end_comes_and_no_other(end):
    draws = Draws(0, end)
    assert {draws.below(end) for _ in range(500)} == set(range(end))


def test_chance_and_one_are_of_their_ranges():
    draws = Draws(2)
    assert 400 < sum(draws.chance(0.5) for _ in range(1000)) < 600
    assert not any(Draws(3).chance(0.0) for _ in range(9))
    assert {draws.one("abc") for _ in range(100)} == set("abc")
