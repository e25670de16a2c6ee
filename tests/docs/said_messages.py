"""What the product says: every text in its source, so that a page which quotes a message can be held against it."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parent.parent.parent / "pytest_gpucluster"
SUITE = Path(__file__).parent.parent.parent / "acceptance"
ELLIPSIS = "…"
_VALUE = "\x00"  # where a value stands in an f-string
_FEWEST_LETTERS = 12
_LONGEST_VALUE = 400


@functools.cache
def templates() -> tuple[str, ...]:
    """Every string of the package and of the suite that is no docstring, a value in it standing as one character."""
    found: dict[str, None] = {}
    for folder in (PACKAGE, SUITE):
        for path in sorted(folder.rglob("*.py")):
            found.update(dict.fromkeys(_texts(ast.parse(path.read_text(encoding="utf-8")))))
    return tuple(found)


def is_said(message: str) -> bool:
    """Tell whether the product has a message with these words, in this order, in one of its texts.

    Args:
        message: as a page quotes it, with an ellipsis for each name or number.

    Raises:
        ValueError: there are too few words in it to be told from any other message.
    """
    pieces = [piece.strip() for piece in message.split(ELLIPSIS) if piece.strip()]
    if sum(letter.isalpha() for piece in pieces for letter in piece) < _FEWEST_LETTERS:
        raise ValueError(f"{message}: quote more words of the message; so few can be found anywhere")
    words = re.compile(f".{{0,{_LONGEST_VALUE}}}?".join(map(re.escape, pieces)), re.DOTALL)
    return any(words.search(template) for template in templates())


def _texts(module: ast.Module) -> Iterator[str]:
    passed: set[int] = set()
    for node in ast.walk(module):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            passed.add(id(node.value))
        elif isinstance(node, ast.JoinedStr):
            yield "".join(part.value if isinstance(part, ast.Constant) else _VALUE for part in node.values)
            passed |= {id(part) for part in node.values}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in passed:
            yield node.value
