"""Untrusted text for a page, and tables of it.

Nothing in the text is invisible, changes the text direction, or fills the page.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from pytest_gpucluster.text import clip, one_line, visible

WORD_CHARACTERS = 160
"""Host names, labels, UUIDs and the like; longer ones are cut with an ellipsis."""
LINE_CHARACTERS = 600
"""Reasons, messages and values of properties."""
TEXT_CHARACTERS = 24 * 1024
"""A failure's text. The journal has all of it."""

# Characters that change the text direction: with them a host name can look like another one.
# Source: Unicode Standard Annex #9, table 1 (https://www.unicode.org/reports/tr9/#Directional_Formatting_Characters).
_TURNING = re.compile("[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
# Unpaired surrogates have no UTF-8, U+FFFE and U+FFFF are no characters; ``visible`` shows them like the controls.


def readable(text: str) -> str:
    """Return a text with every control and direction character shown as ``#x202E``.

    >>> readable("gpu-0\\u202e1\\x07")
    'gpu-0#x202E1#x07'
    """
    return _TURNING.sub(lambda match: f"#x{ord(match.group()):04X}", visible(text))


def word(text: str) -> str:
    """Return a name on one line, of limited length."""
    return one_line(text, WORD_CHARACTERS)


def line(text: str) -> str:
    """Return a text on one line, of limited length."""
    return one_line(text, LINE_CHARACTERS)


def passage(text: str, characters: int = TEXT_CHARACTERS) -> str:
    """Return a text of several lines; of a long one the beginning and the end, and what is left out."""
    return clip(text.strip("\n"), characters)


_SHORT = 16
"""Characters of a cell that is not wrapped."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows of texts under a heading. The first column names the row."""

    caption: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numbers: frozenset[int] = frozenset()
    """Columns of numbers, aligned to the right."""
    short: tuple[int, ...] = ()
    """Columns, from 1, whose cells are never wrapped."""
    tones: tuple[str, ...] = ()
    """For each row the outcome that marks it, or an empty text; empty if no row is marked."""
    left_out: str = ""
    """What is left out, and where it is."""


def html_table(
    caption: str,
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    numbers: Sequence[str] = (),
    tones: Sequence[str] = (),
    most: int = 400,
    left_out: str = "",
) -> Table | None:
    """Return a table of at most ``most`` rows, without empty columns; None if there are no rows.

    Args:
        caption: what it shows.
        head: names of the columns.
        rows: as many texts each.
        numbers: names of the columns of numbers.
        tones: for each row the outcome that marks it.
        most: rows; the number of rows left out is stated.
        left_out: what else is left out.
    """
    if not rows:
        return None
    filled = [index for index in range(len(head)) if index == 0 or any(row[index] for row in rows)]
    more = len(rows) - most
    cells = [tuple(line(row[index]) for index in filled) for row in rows[:most]]
    return Table(
        caption=caption,
        head=tuple(head[index] for index in filled),
        rows=tuple(cells),
        short=tuple(at + 1 for at in range(len(filled)) if all(len(row[at]) <= _SHORT for row in cells)),
        numbers=frozenset(at for at, index in enumerate(filled) if head[index] in numbers),
        tones=tuple(tones[:most]),
        left_out=left_out or (f"and {more} more in the journal" if more > 0 else ""),
    )
