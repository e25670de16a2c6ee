"""A table of a page, as plain texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pytest_gpucluster.reports.html.readable import line

_SHORT = 16
"""Characters that fit into a column on paper."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows of texts under a heading. The first column names the row."""

    caption: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numbers: frozenset[int] = frozenset()
    """Columns of figures, which stand to the right."""
    short: tuple[int, ...] = ()
    """Columns, from 1, whose texts stand on one line even where there is little room."""
    tones: tuple[str, ...] = ()
    """For each row the outcome that marks it, or nothing; empty where no row is marked."""
    left_out: str = ""
    """What of it is not here, and where it is."""


def table(
    caption: str,
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    numbers: Sequence[str] = (),
    tones: Sequence[str] = (),
    most: int = 400,
) -> Table:
    """Return a table without the columns in which nothing stands, at most so many rows of it.

    Args:
        caption: what it shows.
        head: names of the columns.
        rows: as many texts each.
        numbers: names of the columns of figures.
        tones: for each row the outcome that marks it.
        most: rows; what is left out is said.
    """
    kept = [index for index in range(len(head)) if index == 0 or any(row[index] for row in rows)]
    more = len(rows) - most
    cells = [tuple(line(row[index]) for index in kept) for row in rows[:most]]
    return Table(
        caption=caption,
        head=tuple(head[index] for index in kept),
        rows=tuple(cells),
        short=tuple(at + 1 for at in range(len(kept)) if all(len(row[at]) <= _SHORT for row in cells)),
        numbers=frozenset(at for at, index in enumerate(kept) if head[index] in numbers),
        tones=tuple(tones[:most]),
        left_out=f"and {more} more, which the journal has" if more > 0 else "",
    )
