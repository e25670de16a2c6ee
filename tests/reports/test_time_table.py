"""Where the time of a run's tests went, as a table: what has a line of its own, and that no line is too wide."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import pytest

from pytest_gpucluster.journal import End, Journal, PartOfTime, Run, TestResult
from pytest_gpucluster.reports.text import LONG_SECONDS, render
from pytest_gpucluster.reports.time_table import ROWS, time_lines, time_text
from pytest_gpucluster.time_spent import PARTS


def result_of(name: str, *seconds: float) -> TestResult:
    """A test whose parts took these seconds, in the order of ``PARTS``; unknown where there are none."""
    told = [*seconds, *[0.0] * (len(PARTS) - len(seconds))] if seconds else []
    spent = {part: PartOfTime(seconds=each, most_seconds=each) for part, each in zip(PARTS, told, strict=False)}
    return TestResult(nodeid=f"test_it.py::{name}", name=name, outcome="passed", spent=spent)


def journal_of(results: Sequence[TestResult]) -> Journal:
    return Journal(
        run=Run(run_id="r", started_at="2026-11-21T09:00:00+00:00"),
        results=tuple(results),
        end=End(verdict="REHEARSED", exit=0, at="2026-11-21T09:02:00+00:00"),
    )


def test_those_that_took_the_longest_come_first_and_the_rest_is_one_line() -> None:
    results = [result_of(f"test_{n:02d}", 0.0, 1.0, float(n), 0.5) for n in range(ROWS + 5)]
    lines = time_lines(journal_of(results), width=80)
    sums = sum(range(ROWS + 5)), sum(range(5))
    assert lines[0] == "Where the time went (rank 0's seconds; 2 min 8 s of 2 min 0 s in tests):"
    rows = [line.split() for line in lines if line and line[0] in "0123456789t"]
    assert [row[0] for row in rows] == ["test", *(f"{n:02d}" for n in range(ROWS + 4, 4, -1)), "5", "together"]
    assert rows[-2] == ["5", "others", f"{sums[1] + 7.5:.1f}", "0.0", "5.0", f"{sums[1]:.1f}", "2.5", "0.0", "0.0"]
    assert rows[-1] == ["together", f"{sums[0] + 22.5:.1f}", "0.0", "15.0", f"{sums[0]:.1f}", "7.5", "0.0", "0.0"]


def test_one_more_than_fits_is_no_others() -> None:
    lines = time_lines(journal_of([result_of(f"test_{n}", 1.0) for n in range(ROWS + 1)]), width=80)
    assert not any("others" in line for line in lines)
    assert len(lines) == 2 + ROWS + 1 + 1


def test_what_took_no_time_worth_a_line_is_among_the_others() -> None:
    results = [result_of("test_long", 1.0), result_of("test_short", 0.04), result_of("test_shorter", 0.03)]
    lines = time_lines(journal_of(results), width=80)
    assert [line.split()[0] for line in lines[2:]] == ["long", "2", "together"]
    alone = time_lines(journal_of(results[1:2]), width=80)
    assert [line.split()[0] for line in alone[2:]] == ["short", "together"]


@pytest.mark.parametrize("width", [60, 80, 200])
@pytest.mark.parametrize(
    ("name", "seconds"),
    [
        ("test_collective[node-reduce_scatter-bf16]", [0.04, 12.0, 1234.5, 99_999.4, 99_999.6, 3.6e7]),
        ("test_" + "節点" * 90 + "\x1b[31m", [1e300] * 6),
        ("test_", [0.0] * 6),
    ],
    ids=["long", "hostile", "nothing"],
)
def test_no_line_is_wider_than_asked_for(width: int, name: str, seconds: list[float]) -> None:
    from pytest_gpucluster.reports.layout import columns

    lines = time_lines(journal_of([result_of(name, *seconds)]), width=width)
    assert max(map(columns, lines)) <= width
    assert not any("\x1b" in line for line in lines)


def test_long_times_are_in_hours() -> None:
    lines = time_lines(journal_of([result_of("test_soak", 0.0, 1234.5, 720_000.0)]), width=80)
    assert lines[2].split() == ["soak", "200", "h", "0.0", "1234", "200", "h", "0.0", "0.0", "0.0"]


@pytest.mark.parametrize(
    "seconds", [[], [math.nan], [-1.0], [1.0, math.inf]], ids=["none", "nan", "negative", "endless"]
)
def test_a_test_of_which_nothing_is_known_is_not_in_the_table(seconds: list[float]) -> None:
    unknown = result_of("test_old", *seconds)
    assert time_lines(journal_of([unknown]), width=80) == []
    assert time_text(unknown) == ""
    lines = time_lines(journal_of([unknown, result_of("test_new", 1.0)]), width=80)
    assert lines[-1] == "and 1 test whose parts are not on record"
    assert not any(line.startswith("old") for line in lines)


def test_a_test_of_which_a_part_is_missing_is_not_in_the_table_either() -> None:
    whole = result_of("test_it", 1.0)
    torn = dataclasses.replace(whole, spent={part: told for part, told in whole.spent.items() if part != PARTS[2]})
    assert time_text(torn) == ""
    assert time_lines(journal_of([torn]), width=80) == []


def test_a_tests_parts_in_words_are_those_that_took_a_tenth_of_a_second() -> None:
    assert time_text(result_of("test_it", 0.04, 2.0, 6.1, 0.4, 0.06, 0.0)) == (
        "warm-up 2.0, measuring 6.1, verifying 0.4, agreeing 0.1"
    )
    assert time_text(result_of("test_it", 0.01, 0.02)) == ""


@pytest.mark.parametrize(
    ("seconds", "verbosity", "shown"),
    [(LONG_SECONDS - 0.1, 0, False), (LONG_SECONDS, 0, True), (0.1, 1, True), (1000.0, -1, False)],
    ids=["short", "long", "verbose", "quiet"],
)
def test_the_table_is_shown_where_somebody_may_ask(seconds: float, verbosity: int, shown: bool) -> None:
    text = render(journal_of([result_of("test_it", 0.0, 0.0, seconds)]), verbosity=verbosity)
    assert ("Where the time went" in text) == shown
