from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from each import of_each

from pytest_gpucluster.errors import JournalError
from pytest_gpucluster.journal.fields import Fields

EMPTY = Fields({}, "line 2")

READERS: dict[str, tuple[Callable[[Fields], object], list[object], object]] = {
    "text": (lambda line: line.text("x", ""), [3, ["a"], True], ""),
    "optional text": (lambda line: line.optional_text("x"), [3, {}], None),
    "choice": (lambda line: line.choice("x", ("a", "b"), "a"), ["c", 3], "a"),
    "flag": (lambda line: line.flag("x", True), [1, "true"], True),
    "integer": (lambda line: line.integer("x", 7), [1.0, "1", True], 7),
    "number": (lambda line: line.number("x", 0.5), ["many", [1], True], 0.5),
    "items": (lambda line: line.items("x"), ["ab", {}], []),
    "integers": (lambda line: line.integers("x"), [["a"], 1], ()),
    "pairs": (lambda line: line.pairs("x"), [[["a"]], ["ab"]], ()),
    "mapping": (lambda line: line.mapping("x"), [[], "a"], {}),
    "number by rank": (lambda line: line.number_by_rank("x"), [{"0": "many"}, {"first": 1}, []], {}),
    "numbers by rank": (lambda line: line.numbers_by_rank("x"), [{"0": ["many"]}, {"0": 1}, []], {}),
    "optional texts": (lambda line: line.optional_texts("x"), ["NET/IB", ["a", 1], {}], None),
    "optional pair": (lambda line: line.optional_pair("x"), [[1.0], [1.0, "many"], "12", {}, [1.0, 2.0, 3.0]], None),
    "pair by rank": (lambda line: line.pair_by_rank("x"), [{"0": [1.0]}, {"first": [1.0, 2.0]}, {"0": "12"}, []], {}),
    "mapping by rank": (lambda line: line.mapping_by_rank("x"), [{"0": []}, {"first": {}}, {"0": None}, []], {}),
    "inner": (lambda line: line.inner("x").text("y", "z"), [[], {"y": 1}], "z"),
    "each": (lambda line: line.each("x"), [["a"], {}], []),
}


@of_each("name", list(READERS))
def test_a_missing_field_has_its_default_and_a_wrong_one_is_an_error_that_says_where(
    name: str,
) -> None:
    read, wrong, default = READERS[name]
    assert read(EMPTY) == default
    for value in wrong:
        with pytest.raises(JournalError, match=r"^line 2: "):
            read(Fields({"x": value}, "line 2"))


def test_numbers_that_json_lacks_are_text() -> None:
    line = Fields({"a": "NaN", "b": "-Infinity", "c": {"0": 1, "1": None, "2": "Infinity"}}, "line 2")
    assert math.isnan(line.number("a", 0.0))
    assert line.optional_number("b") == -math.inf
    assert line.number_by_rank("c") == {0: 1.0, 2: math.inf}
    ends = Fields({"a": [1, "Infinity"], "b": {"3": ["-Infinity", 2.5], "4": None}}, "line 2")
    assert ends.optional_pair("a") == (1.0, math.inf)
    assert ends.pair_by_rank("b") == {3: (-math.inf, 2.5)}
