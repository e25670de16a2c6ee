"""When a run began and how long it took."""

from __future__ import annotations

import math
from dataclasses import replace
from datetime import datetime, timezone

from each import of_each

from pytest_gpucluster.journal.journal import Journal
from pytest_gpucluster.journal.records import End, Run, Started, TestResult
from pytest_gpucluster.reports.registry import FILES, render
from pytest_gpucluster.reports.summary import duration, moment, run_seconds

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
