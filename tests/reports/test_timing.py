"""Times of a run: read from a journal, as text, and where the time of its tests went."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timezone

from each import of_each

from pytest_gpucluster.journal.journal import Journal
from pytest_gpucluster.journal.records import End, PartOfTime, Run, Started, TestResult
from pytest_gpucluster.metrics.time_budget import PARTS
from pytest_gpucluster.reports import terminal
from pytest_gpucluster.reports.registry import FILES, render
from pytest_gpucluster.reports.summary import duration, moment, run_seconds
from pytest_gpucluster.reports.tables import time_lines, time_text
from pytest_gpucluster.reports.terminal import LONG_SECONDS

BEGAN = "2026-11-21T09:00:00+00:00"


def journal(**changes: object) -> Journal:
    return replace(Journal(run=Run(run_id="x", started_at=BEGAN)), **changes)  # type: ignore[arg-type]


def test_a_time_is_read_with_its_zone_and_else_is_utc() -> None:
    assert moment("2026-11-21T09:00:00z") == datetime(2026, 11, 21, 9, tzinfo=timezone.utc)
    assert moment("2026-11-21T09:00:00") == datetime(2026, 11, 21, 9, tzinfo=timezone.utc)
    assert moment("yesterday") is None


def test_a_run_lasts_until_its_end_or_the_last_that_is_known() -> None:
    assert run_seconds(journal(end=End(verdict="BROKEN", exit=11, at="2026-11-21T09:01:00Z"))) == 60
    result = TestResult(nodeid="a", outcome="passed", started_at="2026-11-21T09:00:10Z", duration_seconds=7)
    assert run_seconds(journal(results=(result,))) == 17
    assert run_seconds(replace(journal(results=(result,)), run=Run(run_id="x", started_at=""))) == 7
    assert run_seconds(journal(running=Started(nodeid="b", at="2026-11-21T09:00:30Z"), results=(result,))) == 30


@of_each(
    "case",
    [
        (began, seconds)
        for seconds in (1e300, 1e12, -1e12, math.inf, math.nan)
        for began in (BEGAN, "9999-12-31T23:59:59-14:00", "0001-01-01T00:00:00+14:00", "")
    ],
)
def test_no_time_of_a_test_breaks_a_report(case: tuple[str, float]) -> None:
    began, seconds = case
    tests = tuple(
        TestResult(nodeid=name, outcome="passed", started_at=began, duration_seconds=each)
        for name, each in (("a", seconds), ("b", seconds), ("c", -seconds), ("d", 1e308), ("e", 1e308))
    )
    found = journal(results=tests, running=Started(nodeid="f", at="2026-11-21T09:00:30Z"))
    assert run_seconds(found) == 30
    strange = replace(found, run=Run(run_id="x", started_at=began))
    for kind in FILES:
        assert render(kind, strange)


def test_a_minute_is_never_sixty_seconds_and_what_is_no_duration_is_unknown() -> None:
    assert {duration(seconds) for seconds in (math.nan, math.inf, -1.0, 1e300)} == {"unknown"}
    assert duration(59.96) == "1 min 0 s"
    assert duration(3599.7) == "1 h 0 min"


def result_of(name: str, *seconds: float) -> TestResult:
    """A test whose parts took these seconds, in the order of ``PARTS``; unknown where there are none."""
    values = [*seconds, *[0.0] * (len(PARTS) - len(seconds))] if seconds else []
    spent = {part: PartOfTime(seconds=each, most_seconds=each) for part, each in zip(PARTS, values, strict=False)}
    return TestResult(nodeid=f"test_it.py::{name}", name=name, outcome="passed", spent=spent)


def journal_of(results: Sequence[TestResult]) -> Journal:
    return Journal(
        run=Run(run_id="r", started_at="2026-11-21T09:00:00+00:00"),
        results=tuple(results),
        end=End(verdict="REHEARSED", exit=0, at="2026-11-21T09:02:00+00:00"),
    )


@of_each("seconds", [[], [math.nan], [-1.0], [1.0, math.inf]])
def test_a_test_of_which_nothing_is_known_is_not_in_the_table(seconds: list[float]) -> None:
    unknown = result_of("test_old", *seconds)
    assert time_lines(journal_of([unknown]), width=80) == []
    assert time_text(unknown) == ""
    lines = time_lines(journal_of([unknown, result_of("test_new", 1.0)]), width=80)
    assert [line.split() for line in lines[1:]] == [["1.0", "s", "new:", "set-up", "1.0"]]


def test_the_table_is_shown_for_long_runs() -> None:
    def is_shown(seconds: float, verbosity: int) -> bool:
        text = terminal.render(journal_of([result_of("test_it", 0.0, 0.0, seconds)]), verbosity=verbosity)
        return "\nWhere the time went" in text

    cases = [(LONG_SECONDS - 0.1, 0), (LONG_SECONDS, 0), (0.1, 1), (1000.0, -1)]
    assert [is_shown(*case) for case in cases] == [False, True, True, False]
