"""Outputs of comparisons: JSON for programs, and a result as text that fits the terminal and as a page.

A result is a sequence of blocks: a line of text, which is one of a list where it begins with blanks; an empty line; a
table; or a chart, for the page alone.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pytest_gpucluster.metrics.codec import to_json
from pytest_gpucluster.reports.charts.svg import Svg
from pytest_gpucluster.reports.html.page import render_document
from pytest_gpucluster.reports.markup import html_table, line
from pytest_gpucluster.text import Column, line_of, one_line, paragraph, total, widths

_LONGEST = 400
_INDENT = 4


def fields_of(record: object, *names: str) -> dict[str, Any]:
    """Return attributes of an object by their names, which are those of the JSON."""
    return {name: getattr(record, name) for name in names}


def json_document(content: Mapping[str, object]) -> str:
    """Return an indented JSON document; numbers that JSON lacks become text."""
    return json.dumps(to_json(content), indent=1, allow_nan=False) + "\n"


@dataclass(frozen=True, kw_only=True)
class Rows:
    """A table: its columns, and of each row the cells and the texts below it. Some are for the page alone."""

    caption: str
    heads: Sequence[Column]
    rows: Sequence[tuple[Sequence[str], Sequence[str]]]
    on_page_only: bool = False


Block = str | Rows | Svg


def as_text(blocks: Iterable[Block], width: int) -> str:
    """Return a result for a terminal of ``width`` columns."""
    lines: list[str] = []
    for block in blocks:
        if isinstance(block, Rows):
            lines += [] if block.on_page_only else _table_lines(block, width)
        elif not isinstance(block, Svg):
            lines += _wrapped(block.strip(), width, len(block) - len(block.lstrip())) if block else [""]
    return "".join(f"{each}\n" for each in lines)


def as_page(heading: str, blocks: Iterable[Block], *, is_good: bool | None, reasons: Sequence[str] = ()) -> str:
    """Return a result as one HTML document; ``heading`` is its answer, and is_good is None if that is undecided."""
    parts: list[tuple[str, object]] = []
    shown = (block for block in blocks if (block.rows if isinstance(block, Rows) else block))
    for kind, group in itertools.groupby(shown, key=_kind):
        if kind == "items":
            parts.append((kind, [line(str(each).strip()) for each in group]))
        else:
            parts += [(kind, _table(each) if isinstance(each, Rows) else each) for each in group]
    return render_document(line(heading), is_good=is_good, reasons=list(map(line, reasons)), parts=parts)


def _kind(block: Block) -> str:
    if isinstance(block, Rows):
        return "table"
    return "chart" if isinstance(block, Svg) else "items" if block.startswith(" ") else "text"


def _table(block: Rows) -> Any:
    heads = [head.title for head in block.heads]
    rows = [(*cells, "; ".join(details)) for cells, details in block.rows]
    numbers = [head.title for head in block.heads if head.is_right]
    return html_table(block.caption, (*heads, "Details"), rows, numbers=numbers)


def _wrapped(text: str, width: int, indent: int = 0) -> list[str]:
    """Return a text of at most 400 characters as lines no wider than ``width``, but at least 20."""
    space = " " * indent
    return paragraph(one_line(text, _LONGEST), max(width, 20), first=space, rest=f"{space}  ")


def _table_lines(block: Rows, width: int) -> Iterator[str]:
    """Yield a table with a header; a table that is wider than ``width`` becomes paragraphs."""
    titles = [head.title for head in block.heads]
    wide = widths([titles, *(cells for cells, _ in block.rows)])
    fits = total(wide) <= width
    if fits and block.rows:
        yield line_of(titles, block.heads, wide)
    for cells, details in block.rows:
        yield from [line_of(cells, block.heads, wide)] if fits else _wrapped(" ".join(filter(None, cells)), width)
        for text in details:
            yield from _wrapped(text, width, _INDENT)
