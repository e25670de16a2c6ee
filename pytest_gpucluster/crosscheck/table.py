"""A crosscheck as text that fits the terminal, what matters first."""

from __future__ import annotations

from pytest_gpucluster.crosscheck.compared import (
    AGREEMENT,
    AGREES,
    DIFFERS,
    FINDING,
    FINDINGS,
    MISSING,
    NOT_COMPARABLE,
    NOTHING,
    Compared,
    Crosscheck,
)
from pytest_gpucluster.reports.tables import percent, quantity
from pytest_gpucluster.text import Column, line_of, paragraph, total, widths

_HEADS = (
    Column(title="collective"),
    Column(title="dtype"),
    Column(title="size"),
    Column(title="ranks", is_right=True),
    Column(title="ours", is_right=True),
    Column(title="nccl-tests", is_right=True),
    Column(title="difference", is_right=True),
    Column(title=""),
)
_INDENT = "    "


def table(found: Crosscheck, width: int = 80) -> str:
    """Return the answer, what is to be said about the whole, and a line for each size; busbw is in GB/s.

    Args:
        found: the crosscheck.
        width: columns of the terminal.
    """
    lines = paragraph(answer_text(found), width, rest="  ")
    for mark, texts in (("wrong data", found.wrong), ("not compared", found.unmatched), ("note", found.notes)):
        for text in texts:
            lines += paragraph(f"{mark}: {text}", width, rest="  ")
    rows = sorted(found.rows, key=lambda row: 0 if row.kind in FINDINGS else 2 if row.kind == AGREES else 1)
    if rows:
        cells = [_cells(row) for row in rows]
        wide = widths([tuple(head.title for head in _HEADS), *cells])
        lines.append("")
        if total(wide) <= width:
            lines.append(line_of(tuple(head.title for head in _HEADS), _HEADS, wide))
        for row, texts in zip(rows, cells, strict=True):
            if total(wide) <= width:
                lines.append(line_of(texts, _HEADS, wide))
            else:
                lines += paragraph(" ".join(filter(None, texts)), width, rest=_INDENT)
            if row.why:
                lines += paragraph(row.why, width, first=_INDENT, rest=_INDENT)
    return "\n".join(lines) + "\n"


def answer_text(found: Crosscheck) -> str:
    """Return the answer in one sentence."""
    counts = {kind: len(found.of_kind(kind)) for kind in (*FINDINGS, MISSING, NOT_COMPARABLE, AGREES)}
    of = ", ".join(f"{many} {'agree' if kind == AGREES else kind}" for kind, many in counts.items() if many)
    beyond = f"{100 * found.beyond:g} %"
    if found.answer == FINDING:
        what = f"busbw differs by more than {beyond}" if counts[DIFFERS] else "nccl-tests has found wrong data"
        return f"FINDING: {what} ({of or 'no size compared'})"
    if found.answer == NOTHING:
        return f"NOTHING COMPARED: no size has a figure on both sides ({of or 'the journal has none'})"
    if found.answer == AGREEMENT:
        return f"AGREEMENT: busbw differs by no more than {beyond} at any size ({of})"
    return f"UNDECIDED: nothing differs by more than {beyond}, but not everything was compared ({of})"


def _cells(row: Compared) -> tuple[str, ...]:
    point = row.point
    figures = (quantity(value, "") if value is not None else "" for value in (row.ours, row.theirs))
    difference = "" if row.difference is None else percent(row.difference)
    return (point.collective, point.dtype, point.size, str(point.ranks), *figures, difference, row.kind)
