"""Text from anywhere made fit for a page, and tables of such text.

Nothing in the text is invisible, changes the direction of the line, or fills the page.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from pytest_gpucluster.text import one_line, visible

WORD_CHARACTERS = 160
"""Host names, labels, UUIDs and the like; longer ones are cut with an ellipsis."""
LINE_CHARACTERS = 600
"""Reasons, messages and values of properties."""
TEXT_CHARACTERS = 24 * 1024
"""A failure's text. The journal keeps what is left out."""

# Characters that change the order in which a line is read: with them a host name can look like another one.
# Source: Unicode Standard Annex #9, table 1 (https://www.unicode.org/reports/tr9/#Directional_Formatting_Characters).
_TURNING = re.compile("[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")
# Unpaired surrogates have no UTF-8, U+FFFE and U+FFFF are no characters; ``visible`` shows them with the controls.


def readable(text: str) -> str:
    """Return a text with every control character and every change of direction shown as ``#x202E``.

    >>> readable("gpu-0\\u202e1\\x07")
    'gpu-0#x202E1#x07'
    """
    return _TURNING.sub(lambda match: f"#x{ord(match.group()):04X}", visible(text))


def word(text: str) -> str:
    """Return a name on one line, cut where no real one is so long."""
    return one_line(text, WORD_CHARACTERS)


def line(text: str) -> str:
    """Return a text on one line."""
    return one_line(text, LINE_CHARACTERS)


def passage(text: str, characters: int = TEXT_CHARACTERS) -> str:
    """Return a text of several lines; of a long one the beginning and the end, and how much is left out."""
    text = text.strip("\n")
    if len(text) <= characters:
        return text
    half = characters // 2
    left_out = len(text) - 2 * half
    return f"{text[:half]}\n[... {left_out} characters left out; the journal has them ...]\n{text[-half:]}"


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


def html_table(
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
