"""Where the time of a run's tests went: which tests are named, and when it is shown."""

from __future__ import annotations

import math
from collections.abc import Sequence

from each import of_each

from pytest_gpucluster.journal.journal import Journal
from pytest_gpucluster.journal.records import End, PartOfTime, Run, TestResult
from pytest_gpucluster.metrics.time_budget import PARTS
from pytest_gpucluster.reports.tables import time_lines, time_text
from pytest_gpucluster.reports.terminal import LONG_SECONDS, render


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
        text = render(journal_of([result_of("test_it", 0.0, 0.0, seconds)]), verbosity=verbosity)
        return "\nWhere the time went" in text

    cases = [(LONG_SECONDS - 0.1, 0), (LONG_SECONDS, 0), (0.1, 1), (1000.0, -1)]
    assert [is_shown(*case) for case in cases] == [False, True, True, False]
