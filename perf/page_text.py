"""Markdown for a page that a program writes: paragraphs, lists and tables, line by line."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence

_HARD = "\N{NO-BREAK SPACE}"
WIDTH = 120


def paragraph(text: str) -> Iterator[str]:
    """Yield the lines of a paragraph, and the empty one after it."""
    yield from _lines(text)
    yield ""


def bullets(*texts: str) -> Iterator[str]:
    """Yield the lines of a list, and the empty one after it."""
    for text in texts:
        yield from _lines(text, first="- ", others="  ")
    yield ""


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a table, and the empty one after it."""
    yield "| " + " | ".join(head) + " |"
    yield "|" + "---|" * len(head)
    for row in rows:
        yield "| " + " | ".join(row) + " |"
    yield ""


def _lines(text: str, *, first: str = "", others: str = "") -> Iterator[str]:
    # No line begins with the sign of a number that stands at the end of the one before.
    wrapped = textwrap.wrap(
        text.replace(" %", f"{_HARD}%"),
        WIDTH,
        initial_indent=first,
        subsequent_indent=others,
        break_long_words=False,
        break_on_hyphens=False,
    )
    yield from (line.replace(_HARD, " ") for line in wrapped)
