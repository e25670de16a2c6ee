"""Text for people: safe single lines, ranges of ranks, tables and paragraphs of a given width.

Widths are columns of a terminal: a Chinese character takes two, an accent none.
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
    """Return the first line of a text that is not empty, cut with an ellipsis to ``characters``.

    >>> first_line("\\n  the cause\\nwhere it was")
    'the cause'
    """
    return _cut(next((line.strip() for line in text.splitlines() if line.strip()), ""), characters)


def one_line(text: str, characters: int) -> str:
    """Return a whole text on one line, visible, cut with an ellipsis to ``characters``.

    >>> one_line("the cause\\n  where it was", 20)
    'the cause where it …'
    """
    # Made visible first: Python takes some control characters for white space.
    return _cut(" ".join(visible(text).split()), characters)


def _cut(line: str, characters: int) -> str:
    return line if len(line) <= characters else line[: characters - 1] + "\N{HORIZONTAL ELLIPSIS}"


def clip(text: str, characters: int) -> str:
    """Return a text of several lines; of a long one the beginning and the end, and how much is left out.

    >>> clip("abcdefg", 5)
    'ab\\n[... 3 characters left out ...]\\nfg'
    """
    if len(text) <= characters:
        return text
    half = characters // 2
    return f"{text[:half]}\n[... {len(text) - 2 * half} characters left out ...]\n{text[-half:]}"


def duration(seconds: float) -> str:
    """Return a time as minutes and seconds, from an hour on with hours.

    >>> duration(75.4), duration(7384)
    ('1:15', '2:03:04')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


_LONGEST_SECONDS = 1e10
"""About 300 years; more is an invalid duration."""


def duration_text(seconds: float) -> str:
    """Return a duration in words.

    >>> [duration_text(seconds) for seconds in (0.04, 7.25, 75, 3725)]
    ['0.04 s', '7.2 s', '1 min 15 s', '1 h 2 min']
    """
    if not 0 <= seconds < _LONGEST_SECONDS:
        return "unknown"
    if seconds < 59.95:
        return f"{seconds:.2g} s" if seconds < 1 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def plural(number: int, noun: str) -> str:
    """Return "1 rank" or "2 ranks".

    >>> plural(0, "rank"), plural(1, "rank")
    ('0 ranks', '1 rank')
    """
    return f"{number} {noun}{'s' * (number != 1)}"


def rank_ranges(ranks: Iterable[int]) -> str:
    """Return "rank 3" or "ranks 0-2, 5"; after 24 ranges the number of ranks.

    >>> rank_ranges([5, 0, 1, 2])
    'ranks 0-2, 5'
    """
    numbers = set(ranks)
    ranges = number_ranges(numbers)
    more = f", ... ({len(numbers)} ranks)" if len(ranges) > _RANGES else ""
    return f"{'rank' if len(numbers) == 1 else 'ranks'} {', '.join(ranges[:_RANGES])}{more}"


def number_ranges(numbers: Iterable[int]) -> list[str]:
    """Return different numbers as ranges.

    >>> number_ranges([8, 0, 1, 2])
    ['0-2', '8']
    """
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and number == ranges[-1][1] + 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return [str(first) if first == last else f"{first}-{last}" for first, last in ranges]


def some_of(texts: Sequence[str], most: int = 3, separator: str = ", ") -> str:
    """Return the first texts, and how many more there are.

    >>> some_of(["gpu-01", "gpu-02", "gpu-03"], 2), some_of(["gpu-01"])
    ('gpu-01, gpu-02 and 1 more', 'gpu-01')
    """
    more = f" and {len(texts) - most} more" if len(texts) > most else ""
    return separator.join(texts[:most]) + more


_GAP = "  "
_NO_BREAK = "\0"
_ELLIPSIS = "\N{HORIZONTAL ELLIPSIS}"
_STYLES = {"red": "31", "green": "32", "yellow": "33", "bold": "1"}


@dataclass(frozen=True, kw_only=True)
class Column:
    """One column of a table. ``is_right``: cells to the right, for numbers."""

    title: str
    is_right: bool = False


def heads(titles: str, *, right: str = "") -> list[Column]:
    """Return the columns of a table by their titles with commas between; ``right`` are those of numbers."""
    return [Column(title=title, is_right=title in right.split(", ")) for title in titles.split(", ")]


def clean(text: str) -> str:
    """Return untrusted text on one line, without characters that act on a terminal or change the text direction."""
    # Made visible first, so that a control character keeps its number. The rest changes the text direction (U+202E).
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
    """Return a clean text cut with an ellipsis to ``most`` columns.

    >>> shortened("a long host name", 8)
    'a long …'
    """
    if columns(text) <= most:
        return text
    beginning = text[: max(0, most - 1)]
    while columns(beginning) > max(0, most - 1):
        beginning = beginning[:-1]
    return beginning + _ELLIPSIS


def styled(text: str, style: str, *, colour: bool) -> str:
    """Return a text in red, green, yellow or bold if ``colour``."""
    return f"\x1b[{_STYLES[style]}m{text}\x1b[0m" if colour and text else text


def padded(text: str, width: int, *, is_right: bool = False) -> str:
    """Return a clean text padded with spaces to ``width`` columns."""
    spaces = " " * max(0, width - columns(text))
    return spaces + text if is_right else text + spaces


def paragraph(text: str, width: int, *, first: str = "", rest: str = "") -> list[str]:
    """Return untrusted text as lines no wider than ``width``.

    ``first`` is the prefix of the first line, ``rest`` of the others. A word that is wider than a line is broken.

    >>> paragraph("rank 3 is lost", 12, first="- ", rest="  ")
    ['- rank 3 is', '  lost']
    """
    lines: list[str] = []
    prefix, line = first, ""
    # A percent sign stays with its number.
    for word in clean(text).replace(" %", f"{_NO_BREAK}%").split(" "):
        word = word.replace(_NO_BREAK, " ")
        free = width - columns(prefix)
        if line and columns(line) + 1 + columns(word) <= free:
            line += f" {word}"
            continue
        if line:
            lines.append(prefix + line)
            prefix, line = rest, ""
            free = width - columns(prefix)
        while columns(word) > max(1, free):
            part = _fitting(word, free)
            lines.append(prefix + part)
            prefix, word = rest, word[len(part) :]
            free = width - columns(prefix)
        line = word
    return [*lines, prefix + line] if line or not lines else lines


def widths(rows: Sequence[Sequence[str]]) -> list[int]:
    """Return the width of each column: its widest cell."""
    return [max(map(columns, cells)) for cells in zip(*rows, strict=True)] if rows else []


def line_of(cells: Sequence[str], heads: Sequence[Column], wide: Sequence[int]) -> str:
    """Return one line of a table. The last column has no spaces after it."""
    aligned = (padded(cell, size, is_right=head.is_right) for cell, head, size in zip(cells, heads, wide, strict=True))
    return _GAP.join(aligned).rstrip()


def total(wide: Sequence[int]) -> int:
    """Return the width of a line whose columns have these widths."""
    return sum(wide) + len(_GAP) * max(0, len(wide) - 1)


def fitted_table(
    heads: Sequence[Column], rows: Sequence[Sequence[str]], width: int, *, name: int = 0
) -> tuple[str, list[list[str]]]:
    """Return the head line of a table, and the lines of each row, none wider than ``width``.

    Column ``name`` shrinks as necessary: a name that is too long for it has lines of its own.
    """
    titles = [head.title for head in heads]
    wide = widths([titles, *rows])
    wide[name] = max(columns(titles[name]), wide[name] - max(0, total(wide) - width))
    found = []
    for row in rows:
        lines = [line_of(row, heads, wide)]
        if columns(row[name]) > wide[name]:
            indent = "".join(padded(row[column], wide[column]) + _GAP for column in range(name))
            lines = paragraph(row[name], width, first=indent, rest=" " * len(indent) or _GAP)
            if any(row[name + 1 :]):
                lines.append(line_of([""] * (name + 1) + list(row[name + 1 :]), heads, wide))
        found.append(lines)
    return line_of(titles, heads, wide), found


def _fitting(word: str, free: int) -> str:
    """Return the beginning of a word that fits; at least one character."""
    part = word[: max(1, free)]
    while len(part) > 1 and columns(part) > free:
        part = part[:-1]
    return part
