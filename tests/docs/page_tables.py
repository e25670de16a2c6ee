"""The tables of a page, by their header."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence


def cells(line: str) -> list[str]:
    """The cells of a line of a table; none of any other line."""
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def rows(text: str, header: Sequence[str]) -> Iterator[list[str]]:
    """The rows of every table with this header."""
    inside = False
    for line in text.splitlines():
        if cells(line) == list(header):
            inside = True
        elif inside and line.startswith("|"):
            if not line.startswith("| ---"):
                yield cells(line)
        else:
            inside = False
