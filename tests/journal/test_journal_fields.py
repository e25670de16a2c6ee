import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import pytest
from each import of_each

from pytest_gpucluster.errors import JournalError
from pytest_gpucluster.metrics.codec import AnyText, read


@dataclass(frozen=True, kw_only=True)
class Inner:
    y: str = "z"


@dataclass(frozen=True, kw_only=True)
class Line:
    text: str = ""
    optional_text: str | None = None
    choice: Annotated[str, ("a", "b")] = "a"
    literal: Literal["a", "b"] = "a"
    flag: bool = True
    integer: int = 7
    number: float = 0.5
    integers: tuple[int, ...] = ()
    texts: tuple[str, ...] | None = None
    pairs: tuple[tuple[AnyText, AnyText], ...] = ()
    pair: tuple[float, float] | None = None
    mapping: Mapping[str, Any] = field(default_factory=dict)
    any_texts: Mapping[str, AnyText] = field(default_factory=dict)
    number_by_rank: Mapping[int, float] = field(default_factory=dict)
    numbers_by_rank: Mapping[int, tuple[float, ...]] = field(default_factory=dict)
    pair_by_rank: Mapping[int, tuple[float, float]] = field(default_factory=dict)
    mapping_by_rank: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    inner: Inner = field(default_factory=Inner)
    optional_inner: Inner | None = None
    each: tuple[Inner, ...] = ()


WRONG = {
    "text": [3, ["a"], True],
    "optional_text": [3, {}],
    "choice": ["c", 3, []],
    "literal": ["c"],
    "flag": [1, "true"],
    "integer": [1.0, "1", True],
    "number": ["many", [1], True, 10**400],
    "integers": [["a"], 1, [True]],
    "texts": ["NET/IB", ["a", 1], {}],
    "pairs": [[["a"]], ["ab"]],
    "pair": [[1.0], [1.0, "many"], "12", {}, [1.0, 2.0, 3.0]],
    "mapping": [[], "a"],
    "number_by_rank": [{"0": "many"}, {"first": 1}, []],
    "numbers_by_rank": [{"0": ["many"]}, {"0": 1}, []],
    "pair_by_rank": [{"0": [1.0]}, {"first": [1.0, 2.0]}, {"0": "12"}, []],
    "mapping_by_rank": [{"0": []}, {"first": {}}, []],
    "inner": [[], {"y": 1}],
    "optional_inner": [[], {"y": 1}],
    "each": [["a"], {}],
}


@of_each("name", list(WRONG))
def test_a_field_of_the_wrong_type_is_an_error_that_names_it(name):
    for value in WRONG[name]:
        with pytest.raises(JournalError, match=rf"^line 2: {name}\b.* must be .*, found "):
            read(Line, {name: value}, "line 2")


def test_a_missing_or_null_field_has_its_default_and_an_unknown_one_is_ignored():
    assert read(Line, {}, "line 2") == read(Line, {**dict.fromkeys(WRONG), "colour": "green"}, "line 2") == Line()
    assert read(Line, {"optional_inner": {}}, "line 2").optional_inner is None
    with pytest.raises(JournalError, match=r"^line 2: must be a JSON object, found"):
        read(Line, ["text"], "line 2")


def test_a_field_without_a_default_is_required():
    @dataclass(frozen=True, kw_only=True)
    class Named:
        name: str

    assert read(Named, {"name": "a"}, "line 2").name == "a"
    with pytest.raises(JournalError, match=r"^line 2: name must be text, found None"):
        read(Named, {}, "line 2")


def test_the_path_of_a_wrong_value_is_whole_and_a_long_value_is_cut():
    with pytest.raises(JournalError, match=r"^line 2: each\[1\]\.y must be text, found \['x{50,60}\.\.\.$"):
        read(Line, {"each": [{"y": "a"}, {"y": ["x" * 1000]}]}, "line 2")


def test_values_are_read_as_what_the_annotation_states():
    line = {
        "number": "NaN",
        "pair": [1, "Infinity"],
        "pairs": [["a", 1]],
        "any_texts": {"a": 1, "b": None},
        "number_by_rank": {"0": 1, "1": None, "2": "-Infinity"},
        "pair_by_rank": {"3": ["-Infinity", 2.5], "4": None},
        "optional_inner": {"y": "b"},
    }
    found = read(Line, line, "line 2")
    assert math.isnan(found.number)
    assert (found.pair, found.pairs, found.any_texts) == ((1.0, math.inf), (("a", "1"),), {"a": "1"})
    assert found.number_by_rank == {0: 1.0, 2: -math.inf}
    assert found.pair_by_rank == {3: (-math.inf, 2.5)}
    assert found.optional_inner == Inner(y="b")
