"""Texts from anywhere made fit for a page: nothing in them is invisible, turns the line around, or fills the page."""

from __future__ import annotations

import re

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
