"""Outputs of comparisons: JSON for programs, and text that fits the terminal."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from pytest_gpucluster.metrics.codec import to_json
from pytest_gpucluster.text import Column, line_of, one_line, paragraph, total, widths

_LONGEST = 400
_INDENT = 4


def fields_of(record: object, *names: str) -> dict[str, Any]:
    """Return attributes of an object by their names, which are those of the JSON."""
    return {name: getattr(record, name) for name in names}


def json_document(content: Mapping[str, object]) -> str:
    """Return an indented JSON document; numbers that JSON lacks become text."""
    return json.dumps(to_json(content), indent=1, allow_nan=False) + "\n"


def wrapped(text: str, width: int, indent: int = 0) -> list[str]:
    """Return a text of at most 400 characters as lines no wider than ``width``, but at least 20."""
    space = " " * indent
    return paragraph(one_line(text, _LONGEST), max(width, 20), first=space, rest=f"{space}  ")


def table(heads: Sequence[Column], rows: Iterable[tuple[Sequence[str], Sequence[str]]], width: int) -> Iterator[str]:
    """Yield a table with a header; a table that is wider than ``width`` becomes paragraphs.

    Args:
        heads: of the columns.
        rows: cells, and texts to put below them.
        width: columns of the terminal.
    """
    rows = list(rows)
    titles = [head.title for head in heads]
    wide = widths([titles, *(cells for cells, _ in rows)])
    fits = total(wide) <= width
    if fits and rows:
        yield line_of(titles, heads, wide)
    for cells, details in rows:
        if fits:
            yield line_of(cells, heads, wide)
        else:
            yield from wrapped(" ".join(filter(None, cells)), width)
        for text in details:
            yield from wrapped(text, width, _INDENT)
