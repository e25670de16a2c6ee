"""The conversations of glaive-function-calling-v2: read from a file or the hub, split into turns, and held out.

Rows that cannot be used are returned with the reason. Held-out conversations are kept from the training, to measure
how it generalizes beyond its own data.

Source of the format: glaiveai/glaive-function-calling-v2. A row has two texts. ``system`` starts with ``SYSTEM: `` and
holds the functions as indented JSON. ``chat`` holds the turns (``USER: ...``, ``ASSISTANT: ...``,
``FUNCTION RESPONSE: ...``), with two empty lines between them; a text of the assistant ends with ``<|endoftext|>``.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pytest_gpucluster.benchmarks.lora.hub import HubName, fetch, hub_name
from pytest_gpucluster.errors import EnvironmentBroken

Role = Literal["user", "assistant", "function"]

END = "<|endoftext|>"
"""Ends each text of the assistant."""

BETWEEN = "\n\n\n"
"""Separates two turns."""

LABELS: dict[Role, str] = {"user": "USER:", "assistant": "ASSISTANT:", "function": "FUNCTION RESPONSE:"}
"""How a turn of each role begins."""

_ROLES = {label: role for role, label in LABELS.items()}
# At the start of a line only: a turn may contain "ASSISTANT:" in the middle of a sentence.
_TURN = re.compile(rf"^[ \t]*({'|'.join(map(re.escape, _ROLES))})", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One text of one role.

    Attributes:
        role: user, assistant or function.
        text: without label, without white space around it, and without ``END`` at its end.
        start, end: where ``text`` stands in the chat: ``chat[start:end] == text``.
    """

    role: Role
    text: str
    start: int
    end: int


def turns_of(chat: str) -> tuple[Turn, ...]:
    """Split a chat into turns.

    Raises: ValueError with the reason why it is no conversation: it is empty, has text before the first turn, or no
    text of the assistant.
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
        raise ValueError("no turn of the assistant has a text: there is nothing to train on")
    return tuple(turns)


def _stripped(chat: str, start: int, end: int) -> tuple[int, int]:
    text = chat[start:end].rstrip()
    while text.endswith(END):
        text = text.removesuffix(END).rstrip()
    bare = text.lstrip()
    start += len(text) - len(bare)
    return start, start + len(bare)


MALFORMED_RATIO = 0.01
"""The part of the rows that may be malformed. Source: this suite's rule; a file with more is not the expected one."""

SHAPES: Mapping[str, tuple[str, ...]] = {
    "glaive": ("system", "chat"),
    "instruction": ("instruction", "output"),
}
"""The keys that a row must have, by the name of its shape. An instruction row may have an ``input`` as well."""

_ALLOWED = "{system, chat} as in glaive-function-calling-v2, or {instruction, input, output}"
_LISTED = 5
_LENGTH_BYTES = 8  # of safetensors, before its JSON: https://huggingface.co/docs/safetensors/index, "Format"
_NOT_SPACE = re.compile(r"[^ \t\r\n]")
_DECODER = json.JSONDecoder()


@dataclass(frozen=True, kw_only=True)
class Row:
    """A conversation.

    Attributes:
        system: the text before it: ``SYSTEM: ...`` with the functions, or nothing.
        chat: its turns, as text.
        line: where it begins in its file, from 1; 0 if it is from none.
    """

    system: str
    chat: str
    line: int = 0

    @property
    def turns(self) -> tuple[Turn, ...]:
        """Take the chat apart, at each access. Raises: ValueError if it is no conversation."""
        return turns_of(self.chat)

    def key(self) -> str:
        """Return a key that two rows share exactly if they are the same conversation."""
        return hashlib.sha256(
            f"{self.system.strip()}\0{self.chat.strip()}".encode("utf-8", "surrogatepass")
        ).hexdigest()


@dataclass(frozen=True, kw_only=True)
class Malformed:
    """A row that cannot be used.

    Attributes:
        line: where it begins in its file, from 1.
        row: its number, from 0.
        reason: what is wrong with it.
    """

    line: int
    row: int
    reason: str

    def __str__(self) -> str:
        return f"line {self.line} (row {self.row}): {self.reason}"


@dataclass(frozen=True, kw_only=True)
class Rows:
    """The rows of a source.

    Attributes:
        rows: the conversations, in the order of the file.
        malformed: the rows that were left out.
        sha256: of the file's bytes.
        source: the path or hub name.
        revision: of the hub's repository; None for a path.
    """

    rows: tuple[Row, ...]
    malformed: tuple[Malformed, ...]
    sha256: str
    source: str
    revision: str | None = None


def load_rows(source: str | Path, *, sha256: str | None = None, revision: str | None = None) -> Rows:
    """Read conversations from a file, or from a repository of data sets on the Hugging Face hub.

    The file is one JSON array, or JSONL: one object a line. A row has one of the ``SHAPES``. A row that cannot be used
    is left out and listed in ``malformed``.

    Args:
        source: a path, or as text ``owner/name`` with or without ``@revision``. A path that exists wins.
        sha256: that the file must have. The original's own is known and always demanded.
        revision: of the hub's repository, unless ``source`` names it. The original's own is known.

    Raises:
        EnvironmentBroken: no such file; the hub does not answer, or HF_HUB_OFFLINE is set and nothing is cached; the
            sha256 is another one; the file is empty, not UTF-8, cut off or of an unknown shape; or more than
            ``MALFORMED_RATIO`` of its rows are malformed. The message says where.
    """
    path = Path(source)
    name = None if isinstance(source, Path) else hub_name(source, revision)
    if not path.exists() and name is None:
        raise EnvironmentBroken(
            f"{source}: no such file, and no name on the hub, which is owner/name or owner/name@revision"
        )
    if not path.exists() and name is not None:
        path = fetch(name)
        sha256 = sha256 or name.sha256
        label: str | HubName = name
    else:
        label, name = str(source), None
    data = _bytes(path)
    found = hashlib.sha256(data).hexdigest()
    if sha256 is not None and found != sha256.strip().lower():
        raise EnvironmentBroken(
            f"{label}: its sha256 is {found}, and {sha256} is expected: it is another file, or damaged; get it again,"
            " or give its own sha256"
        )
    rows, malformed = read_rows(data, str(label))
    return Rows(
        rows=tuple(rows),
        malformed=tuple(malformed),
        sha256=found,
        source=str(source),
        revision=name.revision if name else None,
    )


def read_rows(data: bytes, where: str) -> tuple[list[Row], list[Malformed]]:
    """Read the bytes of a file: the rows that can be used, and the others.

    Args:
        data: UTF-8, with or without a byte order mark.
        where: the file's name, for messages.

    Raises: EnvironmentBroken, as ``load_rows``.
    """
    if data[_LENGTH_BYTES : _LENGTH_BYTES + 1] == b"{" and b"\0" in data[:_LENGTH_BYTES]:
        raise EnvironmentBroken(f"{where}: a safetensors file, not rows; give the file of rows that it was made of")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise EnvironmentBroken(
            f"{where}:{line}: not UTF-8: byte {error.start} is 0x{data[error.start]:02x}; store the file as UTF-8"
        ) from None
    if not (first := _NOT_SPACE.search(text)):
        raise EnvironmentBroken(f"{where}: the file is empty; there must be rows of {_ALLOWED}")
    rows: list[Row] = []
    malformed: list[Malformed] = []
    values = _array(text, first.start(), where) if first.group() == "[" else _lines(text, where)
    for number, (line, value) in enumerate(values):
        try:
            if isinstance(value, json.JSONDecodeError):
                raise ValueError(f"no JSON: {value.msg} at column {value.colno}")
            rows.append(row_of(value, line))
        except UnknownShape as error:
            if number == 0:
                raise EnvironmentBroken(f"{where}:{line}: {error}") from None
            malformed.append(Malformed(line=line, row=number, reason=str(error)))
        except ValueError as error:
            malformed.append(Malformed(line=line, row=number, reason=str(error)))
    _refuse_many(malformed, len(rows) + len(malformed), where)
    return rows, malformed


class UnknownShape(ValueError):
    """A row has the keys of no known shape."""


def row_of(value: object, line: int = 0) -> Row:
    """Make a row of a JSON object of any of the ``SHAPES``.

    Raises:
        UnknownShape: its keys are of none.
        ValueError: it is no object, a field is no text, or its chat is no conversation.
    """
    if not isinstance(value, dict):
        raise ValueError(f"a row must be an object, not {_kind(value)}")
    shape = next((name for name, keys in SHAPES.items() if all(key in value for key in keys)), None)
    if shape is None:
        keys = ", ".join(map(str, value)) or "none"
        raise UnknownShape(f"a row has the keys {keys[:200]}; allowed are {_ALLOWED}")
    if shape == "glaive":
        row = Row(system=_text(value, "system"), chat=_text(value, "chat"), line=line)
    else:
        asked = [_text(value, "instruction"), _text(value, "input") if value.get("input") is not None else ""]
        question = "\n".join(part.strip() for part in asked if part.strip())
        chat = [f"{LABELS['user']} {question}", f"{LABELS['assistant']} {_text(value, 'output').strip()}"]
        row = Row(system="", chat=BETWEEN.join(chat), line=line)
    turns_of(row.chat)
    return row


def _text(value: dict[str, Any], key: str) -> str:
    text = value[key]
    if not isinstance(text, str):
        raise ValueError(f"{key} must be a text, not {_kind(text)}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{key} has half a character, {text[error.start]!r}, at {error.start}") from None
    return text


def _kind(value: object) -> str:
    kinds = {
        bool: "true or false",
        int: "a number",
        float: "a number",
        str: "a text",
        list: "an array",
        dict: "an object",
    }
    return kinds.get(type(value), "null")


def _lines(text: str, where: str) -> Iterator[tuple[int, Any]]:
    """Yield each line's number and value, or the error in it. A cut-off last line is an error of the whole file."""
    lines = text.split("\n")
    readable = False
    for number, line in enumerate(lines, 1):
        if not _NOT_SPACE.search(line):
            continue
        try:
            value, _ = _json(line, 0, whole=True)
            readable = True
            yield number, value
        except json.JSONDecodeError as error:
            # A file without one readable line is no JSONL: then its last line does not show that it is cut off.
            if number == len(lines) and readable:
                raise EnvironmentBroken(
                    f"{where}:{number}:{error.colno}: the file is cut off in its last line: {error.msg}; get it again"
                ) from None
            yield number, error


def _array(text: str, at: int, where: str) -> Iterator[tuple[int, Any]]:
    """Yield where each element of one JSON array begins, and its value."""
    line, counted, count = 1, 0, 0
    at = _next(text, at + 1, where, count)
    while text[at] != "]":
        if count:
            if text[at] != ",":
                raise _broken(text, at, where, count, f"',' or ']' expected, not {text[at]!r}")
            at = _next(text, at + 1, where, count)
        line, counted = line + text.count("\n", counted, at), at
        try:
            value, end = _json(text, at)
        except json.JSONDecodeError as error:
            raise _broken(text, error.pos, where, count, error.msg) from None
        yield line, value
        count += 1
        at = _next(text, end, where, count)
    if rest := _NOT_SPACE.search(text, at + 1):
        raise _broken(text, rest.start(), where, count, "nothing may follow the array")
    if not count:
        raise EnvironmentBroken(f"{where}: the file is empty: an array without any row")


def _json(text: str, at: int, *, whole: bool = False) -> tuple[Any, int]:
    """Read the value at a position of a text, with the position after it; ``whole``: it must be all of the text.

    Raises: json.JSONDecodeError, for any defect.
    """
    try:
        return (json.loads(text), len(text)) if whole else _DECODER.raw_decode(text, at)
    except json.JSONDecodeError:
        raise
    except RecursionError:
        raise json.JSONDecodeError("nested too deeply", text, at) from None
    except ValueError as error:  # such as a number of more digits than Python reads
        raise json.JSONDecodeError(str(error).partition(";")[0], text, at) from None


def _next(text: str, at: int, where: str, count: int) -> int:
    found = _NOT_SPACE.search(text, at)
    if not found:
        raise _broken(text, len(text), where, count, "the array does not end")
    return found.start()


def _broken(text: str, at: int, where: str, count: int, message: str) -> EnvironmentBroken:
    line, column = text.count("\n", 0, at) + 1, at - text.rfind("\n", 0, at)
    cut = "the file is cut off" if not _NOT_SPACE.search(text, at) or "Unterminated" in message else "no JSON"
    return EnvironmentBroken(f"{where}:{line}:{column}: {cut} in row {count}: {message}; get it again, or mend it")


def _refuse_many(malformed: Sequence[Malformed], count: int, where: str) -> None:
    if len(malformed) <= MALFORMED_RATIO * count:
        return
    listed = "; ".join(map(str, malformed[:_LISTED]))
    more = f"; and {len(malformed) - _LISTED} more" if len(malformed) > _LISTED else ""
    raise EnvironmentBroken(
        f"{where}: {len(malformed)} of {count} rows are malformed, and at most {MALFORMED_RATIO:.0%} may be:"
        f" {listed}{more}; repair or remove them, or give another file: one JSON array, or one object a line"
    )


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise EnvironmentBroken(f"{path}: {error.strerror or error}; give a file of rows") from None


def held_out_split(rows: Sequence[Row], ratio: float, seed: int) -> tuple[list[Row], list[Row]]:
    """Split rows into those to train on and those held out, each in their order.

    No conversation is in both, however often it occurs. Which are held out depends on their texts and the seed, not on
    their order.

    Args:
        rows: conversations.
        ratio: the part of the different conversations to hold out, rounded up: above 0 and below 1.
        seed: selects which are held out.

    Raises: ValueError if the ratio is not between 0 and 1, or nothing would be left to train on.
    """
    if not 0 < ratio < 1:
        raise ValueError(f"the held-out part must be above 0 % and below 100 %, not {ratio * 100:g} %")
    keys = [row.key() for row in rows]
    ranked = sorted(set(keys), key=lambda key: hashlib.sha256(f"{seed}/{key}".encode()).digest())
    count = math.ceil(ratio * len(ranked))
    if count >= len(ranked):
        raise ValueError(
            f"{len(ranked)} different conversations are too few to hold {ratio * 100:g} % out and train on the others"
        )
    held_out = set(ranked[:count])
    return (
        [row for row, key in zip(rows, keys, strict=True) if key not in held_out],
        [row for row, key in zip(rows, keys, strict=True) if key in held_out],
    )
