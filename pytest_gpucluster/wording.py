"""Texts from anywhere made fit for one line, and ranks told shortly."""

from __future__ import annotations

import re
from collections.abc import Iterable

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
