"""Text for people: one safe line from any text, ranges of ranks, tables and paragraphs of a given width.

No line of a table or paragraph is wider than that. Widths are columns of a terminal: a Chinese character takes two, an
accent none.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

MESSAGE_CHARACTERS = 200
"""A failure's message is one line of at most this many characters. Source: what CI readers show in their lists."""
_RANGES = 24

# XML 1.0 allows #x9 | #xA | #xD | [#x20-#xD7FF] | [#xE000-#xFFFD] | [#x10000-#x10FFFF]
# (https://www.w3.org/TR/xml/#charsets). DEL and the C1 controls are allowed but act on terminals, and a lone
# carriage return would be read back as a newline.
_INVISIBLE = re.compile("[^\t\n\x20-\x7e\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def visible(text: str) -> str:
    """Return a text with every character that XML cannot carry shown as ``#x1B``. Nothing is dropped."""
    return _INVISIBLE.sub(lambda match: f"#x{ord(match.group()):02X}", text.replace("\r\n", "\n"))


def printable(text: str) -> str:
    """Return a text in which nothing breaks a line or acts on a terminal: what is not printable becomes U+FFFD."""
    return "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text)


def first_line(text: str, characters: int = MESSAGE_CHARACTERS) -> str:
    """Return the first line of a text that is not empty, cut with an ellipsis to so many characters.

    >>> first_line("\\n  the cause\\nwhere it was")
    'the cause'
    """
    return _cut(next((line.strip() for line in text.splitlines() if line.strip()), ""), characters)


def one_line(text: str, characters: int) -> str:
    """Return a whole text on one line, visible, cut with an ellipsis to so many characters.

    >>> one_line("the cause\\n  where it was", 20)
    'the cause where it …'
    """
    # Made visible first: Python takes some control characters for white space.
    return _cut(" ".join(visible(text).split()), characters)


def _cut(line: str, characters: int) -> str:
    return line if len(line) <= characters else line[: characters - 1] + "\N{HORIZONTAL ELLIPSIS}"


def duration(seconds: float) -> str:
    """Return a time as minutes and seconds, from an hour on with hours.

    >>> duration(75.4), duration(7384)
    ('1:15', '2:03:04')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def rank_ranges(ranks: Iterable[int]) -> str:
    """Return "rank 3" or "ranks 0-2, 5"; after many ranges only how many ranks there are.

    >>> rank_ranges([5, 0, 1, 2])
    'ranks 0-2, 5'
    """
    numbers = sorted(set(ranks))
    ranges: list[list[int]] = []
    for rank in numbers:
        if ranges and rank == ranges[-1][1] + 1:
            ranges[-1][1] = rank
        else:
            ranges.append([rank, rank])
    shown = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges[:_RANGES])
    more = f", ... ({len(numbers)} ranks)" if len(ranges) > _RANGES else ""
    return f"{'rank' if len(numbers) == 1 else 'ranks'} {shown}{more}"


_GAP = "  "
_TIED = "\0"
_ELLIPSIS = "\N{HORIZONTAL ELLIPSIS}"
_STYLES = {"red": "31", "green": "32", "yellow": "33", "bold": "1"}


@dataclass(frozen=True, kw_only=True)
class Column:
    """One column of a table. ``is_right`` for numbers: their ends stand under each other."""

    title: str
    is_right: bool = False


def clean(text: str) -> str:
    """Return a text from anywhere on one line, with nothing in it that acts on a terminal or turns the writing
    around."""
    # Made visible first, so that a control character keeps its number. What is left are characters that only other
    # writing needs (U+202E), which turn the rest of a line around.
    return printable(" ".join(visible(text).split()))


def columns(text: str) -> int:
    """Return how many columns of a terminal a clean text takes.

    >>> columns("node-a"), columns("節点")
    (6, 4)
    """
    if text.isascii():
        return len(text)
    # Source: Unicode Standard Annex 11: W and F take two columns; combining characters (Mn, Me) take none.
    return sum(
        0 if unicodedata.category(each) in ("Mn", "Me") else 2 if unicodedata.east_asian_width(each) in "WF" else 1
        for each in text
    )


def shortened(text: str, most: int) -> str:
    """Return a clean text cut with an ellipsis to so many columns.

    >>> shortened("a long host name", 8)
    'a long …'
    """
    if columns(text) <= most:
        return text
    kept = text[: max(0, most - 1)]
    while columns(kept) > max(0, most - 1):
        kept = kept[:-1]
    return kept + _ELLIPSIS


def styled(text: str, style: str, *, colour: bool) -> str:
    """Return a text in red, green, yellow or bold, where colour is wanted."""
    return f"\x1b[{_STYLES[style]}m{text}\x1b[0m" if colour and text else text


def padded(text: str, width: int, *, is_right: bool = False) -> str:
    """Return a clean text with spaces after it, or before it, up to so many columns."""
    spaces = " " * max(0, width - columns(text))
    return spaces + text if is_right else text + spaces


def paragraph(text: str, width: int, *, first: str = "", rest: str = "") -> list[str]:
    """Return a text from anywhere as lines no wider than ``width``.

    ``first`` stands before the first line, ``rest`` before all others. A word that is wider than a line is broken.

    >>> paragraph("rank 3 is lost", 12, first="- ", rest="  ")
    ['- rank 3 is', '  lost']
    """
    lines: list[str] = []
    before, line = first, ""
    # A percent sign stays with its number.
    for word in clean(text).replace(" %", f"{_TIED}%").split(" "):
        word = word.replace(_TIED, " ")
        room = width - columns(before)
        if line and columns(line) + 1 + columns(word) <= room:
            line += f" {word}"
            continue
        if line:
            lines.append(before + line)
            before, line = rest, ""
            room = width - columns(before)
        while columns(word) > max(1, room):
            part = _fitting(word, room)
            lines.append(before + part)
            before, word = rest, word[len(part) :]
            room = width - columns(before)
        line = word
    return [*lines, before + line] if line or not lines else lines


def widths(rows: Sequence[Sequence[str]]) -> list[int]:
    """Return how wide each column must be for all its cells."""
    return [max(map(columns, cells)) for cells in zip(*rows, strict=True)] if rows else []


def line_of(cells: Sequence[str], heads: Sequence[Column], wide: Sequence[int]) -> str:
    """Return one line of a table. The last column has no spaces after it."""
    told = [padded(cell, width, is_right=head.is_right) for cell, head, width in zip(cells, heads, wide, strict=True)]
    return _GAP.join(told).rstrip()


def total(wide: Sequence[int]) -> int:
    """Return how wide a line of columns of these widths is."""
    return sum(wide) + len(_GAP) * max(0, len(wide) - 1)


def _fitting(word: str, room: int) -> str:
    """Return as many characters as fit, and one at least."""
    part = word[: max(1, room)]
    while len(part) > 1 and columns(part) > room:
        part = part[:-1]
    return part
