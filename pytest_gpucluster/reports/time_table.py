"""Where the time of a run's tests went, as text: one line a test, those that took the longest first."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pytest_gpucluster.journal import Journal
from pytest_gpucluster.journal_lines import TestResult
from pytest_gpucluster.metrics.time_budget import (
    AGREEING,
    MEASURING,
    OTHER,
    PARTS,
    SET_UP,
    VERIFYING,
    WARM_UP,
    in_words,
)
from pytest_gpucluster.reports.outline import short_name
from pytest_gpucluster.reports.timing import duration, run_seconds
from pytest_gpucluster.text import Column, clean, columns, line_of, paragraph, shortened, total, widths

ROWS = 10
"""So many tests have a line of their own."""
_TITLES = {
    SET_UP: "set-up",
    WARM_UP: "warm-up",
    MEASURING: "measure",
    VERIFYING: "verify",
    AGREEING: "agree",
    OTHER: "other",
}
_HEADS = (Column(title="test"), *(Column(title=title, is_right=True) for title in ("all", *_TITLES.values())))
_LEAST_SECONDS = 0.05
"""What takes less is shown as 0.0."""
_LONGEST_NAME = 100
_CELL = 5
"""Columns of a number: whatever a journal says, no line becomes too wide."""


@dataclass(frozen=True, kw_only=True)
class _Row:
    name: str
    seconds: tuple[float, ...]
    """In the order of ``PARTS``."""

    @property
    def whole(self) -> float:
        return sum(self.seconds)


def seconds_in_tests(journal: Journal) -> float:
    """Return how long the tests took of which it is on record where their time went, in seconds of the first rank."""
    return sum(row.whole for row in _rows(journal))


def time_lines(journal: Journal, *, width: int) -> list[str]:
    """Return a table of the tests that took the longest, with all others in one line and the sum in another.

    It is empty where a journal does not say where the time went, such as one from before it did.
    """
    rows = sorted(_rows(journal), key=lambda row: -row.whole)
    if not rows:
        return []
    most = ROWS if len(rows) > ROWS + 1 else len(rows)
    shown = [row for row in rows[:most] if row.whole >= _LEAST_SECONDS] or rows[:1]
    others = rows[len(shown) :]
    rest = [_together(f"{len(others)} other{'s' * (len(others) != 1)}", others)] if others else []
    told = [*shown, *rest, _together("together", rows)]
    cells = [[row.name, _number(row.whole), *map(_number, row.seconds)] for row in told]
    titles = [head.title for head in _HEADS]
    wide = widths([titles, *cells])
    wide[0] = max(columns(titles[0]), wide[0] - max(0, total(wide) - width))
    spent = duration(sum(row.whole for row in rows))
    head = f"Where the time went (rank 0's seconds; {spent} of {duration(run_seconds(journal))} in tests):"
    lines = [*paragraph(head, width), line_of(titles, _HEADS, wide)]
    for row in cells:
        if columns(row[0]) <= wide[0]:
            lines.append(line_of(row, _HEADS, wide))
        else:
            lines += [*paragraph(row[0], width, rest="  "), line_of(["", *row[1:]], _HEADS, wide)]
    unknown = sum(not _has_parts(result) for result in journal.results)
    if unknown:
        lines.append(f"and {unknown} test{'s' * (unknown != 1)} whose parts are not on record")
    return lines


def time_text(result: TestResult) -> str:
    """Return "measuring 6.1, verifying 0.4": a test's parts that took a tenth of a second; "" where none did."""
    if not _has_parts(result):
        return ""
    told = ((part, result.spent[part].seconds) for part in PARTS)
    return ", ".join(f"{in_words(part)} {_number(seconds)}" for part, seconds in told if seconds >= _LEAST_SECONDS)


def _rows(journal: Journal) -> list[_Row]:
    return [
        _Row(
            name=shortened(
                clean((result.name or short_name(result.nodeid)).removeprefix("test_") or result.nodeid), _LONGEST_NAME
            ),
            seconds=tuple(result.spent[part].seconds for part in PARTS),
        )
        for result in journal.results
        if _has_parts(result)
    ]


def _has_parts(result: TestResult) -> bool:
    """Tell whether it is on record where a test's time went: every part, in numbers that can be times."""
    return result.spent.keys() >= set(PARTS) and all(
        math.isfinite(part.seconds) and part.seconds >= 0 for part in result.spent.values()
    )


def _together(name: str, rows: Sequence[_Row]) -> _Row:
    return _Row(name=name, seconds=tuple(map(sum, zip(*(row.seconds for row in rows), strict=True))))


def _number(seconds: float) -> str:
    if seconds < 999.95:
        return f"{seconds:.1f}"
    told = f"{seconds:.0f}" if seconds < 99_999.5 else f"{seconds / 3600:.0f} h"
    return shortened(told, _CELL)
