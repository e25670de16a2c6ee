"""A conversation as text, taken apart into turns: ``USER: ...``, ``ASSISTANT: ...``, ``FUNCTION RESPONSE: ...``.

Source of the format: glaiveai/glaive-function-calling-v2. A row has two texts. ``system`` starts with ``SYSTEM: `` and
holds the functions as indented JSON. ``chat`` holds the turns, with two empty lines between them; what the assistant
says ends with ``<|endoftext|>``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Role = Literal["user", "assistant", "function"]

END = "<|endoftext|>"
"""What stands in the text where the assistant has finished."""

BETWEEN = "\n\n\n"
"""What stands between two turns."""

LABELS: dict[Role, str] = {"user": "USER:", "assistant": "ASSISTANT:", "function": "FUNCTION RESPONSE:"}
"""What a turn of each role begins with."""

_ROLES = {label: role for role, label in LABELS.items()}
# At the start of a line only: a turn may tell of an "ASSISTANT:" in the middle of a sentence.
_TURN = re.compile(rf"^[ \t]*({'|'.join(map(re.escape, _ROLES))})", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Turn:
    """What one side says.

    Attributes:
        role: who says it.
        text: without label, without white space around it, and without ``END`` at its end.
        start, end: where ``text`` stands in the chat: ``chat[start:end] == text``.
    """

    role: Role
    text: str
    start: int
    end: int


def turns_of(chat: str) -> tuple[Turn, ...]:
    """Take a chat apart.

    Raises: ValueError, saying why it is no conversation: nothing in it, text before the first turn, or no turn of the
    assistant that says anything.
    """
    marks = list(_TURN.finditer(chat))
    if not chat.strip():
        raise ValueError("the chat is empty")
    if not marks or chat[: marks[0].start()].strip():
        raise ValueError(f"the chat does not begin with a turn ({', '.join(_ROLES)}), but with {chat.strip()[:40]!r}")
    turns = []
    for mark, following in zip(marks, [*marks[1:], None], strict=True):
        start, end = _stripped(chat, mark.end(), following.start() if following else len(chat))
        turns.append(Turn(role=_ROLES[mark[1]], text=chat[start:end], start=start, end=end))
    if not any(turn.role == "assistant" and turn.text for turn in turns):
        raise ValueError("the assistant says nothing in it: there is nothing to learn")
    return tuple(turns)


def _stripped(chat: str, start: int, end: int) -> tuple[int, int]:
    text = chat[start:end].rstrip()
    while text.endswith(END):
        text = text.removesuffix(END).rstrip()
    bare = text.lstrip()
    start += len(text) - len(bare)
    return start, start + len(bare)
