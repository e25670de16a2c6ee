"""The rows that are made up: glaive's format, the same for a seed everywhere, and held out without overlap."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys

import pytest

from pytest_gpucluster.benchmarks.lora.function_calls import FunctionCall, has_call, parse
from pytest_gpucluster.benchmarks.lora.held_out import held_out_split
from pytest_gpucluster.benchmarks.lora.rows import read
from pytest_gpucluster.benchmarks.lora.synthetic import FUNCTIONS, WITH_FUNCTIONS, synthetic_rows

ROWS = synthetic_rows(300, seed=5)


def digest(rows):
    return hashlib.sha256("\n".join(row.key() for row in rows).encode()).hexdigest()


def test_the_rows_of_a_seed_are_the_same_in_any_process_and_in_every_version():
    code = (
        "import hashlib\nfrom pytest_gpucluster.benchmarks.lora.synthetic import synthetic_rows\n"
        "print(hashlib.sha256('\\n'.join(row.key() for row in synthetic_rows(300, seed=5)).encode()).hexdigest())"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert found.stdout.strip() == digest(ROWS) == "498bef60a5c7cd542815b9e9a6f42dbce87b5b10c0b6d45785cebe1c72bf25a3"


def test_fewer_rows_are_the_first_of_more_and_another_seed_makes_others():
    assert synthetic_rows(10, seed=5) == ROWS[:10]
    assert not {row.key() for row in synthetic_rows(50, seed=6)} >= {row.key() for row in ROWS[:50]}


def test_all_rows_are_different():
    assert len({row.key() for row in ROWS}) == len(ROWS)


def test_every_call_is_of_a_function_that_the_system_text_has_with_all_its_parameters():
    calls = 0
    for row in ROWS:
        said = [turn.text for turn in row.turns if turn.role == "assistant" and has_call(turn.text)]
        if not said:
            assert [turn.role for turn in row.turns] == ["user", "assistant"]
            continue
        calls += 1
        assert [turn.role for turn in row.turns] == ["user", "assistant", "function", "assistant"]
        call = parse(said[0])
        assert isinstance(call, FunctionCall)
        assert row.system.startswith(WITH_FUNCTIONS)
        schemas = row.system.removeprefix(WITH_FUNCTIONS).split("\n\n")
        [schema] = [schema for schema in map(json.loads, schemas) if schema["name"] == call.name]
        assert list(call.arguments) == schema["parameters"]["required"]
        kinds = {"integer": int, "string": str}
        for name, value in call.arguments.items():
            assert type(value) is kinds[schema["parameters"]["properties"][name]["type"]]
    assert 240 < calls < 300
    called = [parse(turn.text) for row in ROWS for turn in row.turns if has_call(turn.text)]
    assert {call.name for call in called} == {function.name for function in FUNCTIONS}


def test_what_the_user_asks_for_is_what_is_called_and_the_answer_has_the_response():
    for row in ROWS:
        asked, *rest = row.turns
        if len(rest) < 3:
            continue
        call, response = parse(rest[0].text), json.loads(rest[1].text)
        assert isinstance(call, FunctionCall)
        assert all(str(value) in asked.text for value in call.arguments.values())
        told = [str(value) for name, value in response.items() if name != "status"]
        assert all(value in rest[2].text for value in told)


def test_they_are_read_as_a_file_of_rows_is():
    data = json.dumps([{"system": row.system, "chat": row.chat} for row in ROWS]).encode()
    rows, malformed = read(data, "rows.json")
    assert malformed == []
    assert [row.key() for row in rows] == [row.key() for row in ROWS]


@pytest.mark.parametrize("count", [0, -1])
def test_a_count_below_1_is_refused(count):
    with pytest.raises(ValueError, match="count must be at least 1"):
        synthetic_rows(count, seed=0)


def test_more_rows_than_there_are_different_ones_are_refused(monkeypatch):
    monkeypatch.setattr("pytest_gpucluster.benchmarks.lora.synthetic._TALK_RATIO", 1.0)
    with pytest.raises(ValueError, match="there are not 300 different conversations"):
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


def test_at_least_one_is_held_out():
    assert len(held_out_split(ROWS[:3], 0.001, seed=0)[1]) == 1


@pytest.mark.parametrize(("rows", "ratio"), [(ROWS, 0.0), (ROWS, 1.0), (ROWS[:1], 0.5), ([], 0.5), (ROWS[:1] * 5, 0.5)])
def test_a_split_that_leaves_a_side_empty_is_refused(rows, ratio):
    with pytest.raises(ValueError, match=r"above 0 % and below 100 %|too few"):
        held_out_split(rows, ratio, seed=0)
