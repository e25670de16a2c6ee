"""Messages by what they name: places, names, numbers, in their order, and not by their words."""

import re


def in_order(text, words):
    """Tell whether a text has all of these words, one behind the other, with anything between them."""
    return re.search(".*?".join(map(re.escape, words.split())), text, re.DOTALL) is not None


def require_complaints(lines, wanted, *, file="my.yaml:"):
    """Check that each line is about this file, and that it begins with the place of its entry and has its words.

    The first word is the place, "5:33:".
    """
    assert len(lines) == len(wanted), lines
    for line, words in zip(lines, wanted, strict=True):
        assert line.startswith(file + words.split()[0]), line
        assert in_order(line, words), f"{words!r} is not in {line!r}"
