"""Lines of facts and tables, never wider than asked for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pytest_gpucluster.text import Column, clean, line_of, padded, paragraph, shortened, total, widths

_KEY_COLUMNS = 16
_LEAST_COLUMNS, _WIDE_COLUMNS = 4, 24


def fact(key: str, text: str, width: int) -> list[str]:
    """Return a fact as lines: its name, and beside it the text."""
    name = padded(shortened(clean(key), _KEY_COLUMNS - 1), _KEY_COLUMNS)
    return paragraph(text, width, first=f"  {name}", rest=" " * (2 + _KEY_COLUMNS))


def facts(pairs: Iterable[tuple[str, str | None]], width: int) -> Iterable[str]:
    """Yield facts; what is not known is said to be."""
    for key, text in pairs:
        yield from fact(key, text or "not told", width)


def table(titles: Sequence[str], rows: Sequence[Sequence[str]], width: int, left: int = 1) -> list[str]:
    """Return a table; the first ``left`` columns begin at the left, numbers end at the right. The widest cells of texts
    are cut until it fits."""
    heads = [Column(title=title, is_right=at >= left) for at, title in enumerate(titles)]
    cells = [[clean(cell) for cell in row] for row in [titles, *rows]]
    wide = widths(cells)
    while total(wide) > width - 2 and max(wide) > _LEAST_COLUMNS:
        # Numbers are cut last: a part of one is another number.
        cut = [at for at in range(len(wide)) if wide[at] > _WIDE_COLUMNS]
        cut = cut or [at for at in range(left) if wide[at] > _LEAST_COLUMNS] or list(range(len(wide)))
        wide[max(cut, key=lambda at: wide[at])] -= 1
    return [
        "  " + line_of([shortened(cell, most) for cell, most in zip(row, wide, strict=True)], heads, wide)
        for row in cells
    ]


def amount(in_bytes: float | None) -> str:
    """Return bytes as people say them of memory.

    >>> amount(2**31), amount(1500), amount(None)
    ('2 GiB', '1.46 KiB', '?')
    """
    if in_bytes is None:
        return "?"
    units = iter(("B", "KiB", "MiB", "GiB"))
    unit = next(units)
    while abs(in_bytes) >= 1024 and unit != "TiB":
        in_bytes, unit = in_bytes / 1024, next(units, "TiB")
    return f"{in_bytes:.0f} {unit}" if abs(in_bytes) >= 1000 else f"{in_bytes:.3g} {unit}"


def shown(value: object, unit: str = "") -> str:
    """Return a value with its unit, or a question mark."""
    return "?" if value is None else f"{value}{unit and f' {unit}'}"


def switch(value: bool | None, on: str = "on", off: str = "off") -> str:
    """Return what is on, off or not known."""
    return "?" if value is None else on if value else off


def count(number: int | None, what: str) -> str:
    """Return "8 GPUs" or "1 GPU"."""
    return f"? {what}s" if number is None else f"{number} {what}{'s' * (number != 1)}"
