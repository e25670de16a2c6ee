"""The conversations of glaive-function-calling-v2: read from a file or the hub, split into turns, and held out.

Rows that cannot be used are returned with the reason. Held-out conversations are kept from the training, to measure
how it generalizes beyond its own data.

Source of the format: glaiveai/glaive-function-calling-v2. A row has two texts. ``system`` starts with ``SYSTEM: `` and
holds the functions as indented JSON. ``chat`` holds the turns (``USER: ...``, ``ASSISTANT: ...``,
``FUNCTION RESPONSE: ...``), with two empty lines between them; a text of the assistant ends with ``<|endoftext|>``.
A row of ``messages`` and ``tools``, as chat templates take them, becomes one of these.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pytest_gpucluster.benchmarks.lora.hub import HubName, fetch_rows, hub_name
from pytest_gpucluster.errors import EnvironmentBroken
from pytest_gpucluster.text import some_of

Role = Literal["user", "assistant", "function"]

END = "<|endoftext|>"
"""Ends each text of the assistant."""

BETWEEN = "\n\n\n"
"""Separates two turns."""

LABELS: dict[Role, str] = {"user": "USER:", "assistant": "ASSISTANT:", "function": "FUNCTION RESPONSE:"}
"""How a turn of each role begins."""

WITH_FUNCTIONS = "SYSTEM: You are a helpful assistant with access to the following functions. Use them if required -\n"
"""Precedes the functions."""

_ROLES = {label: role for role, label in LABELS.items()}
# At the start of a line only: a turn may contain "ASSISTANT:" in the middle of a sentence.
_TURN = re.compile(rf"^[ \t]*({'|'.join(map(re.escape, _ROLES))})", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One text of one role.

    Attributes:
        role: user, assistant or function.
        text: without label, without white space around it, and without ``END`` at its end.
    """

    role: Role
    text: str


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
        text = chat[mark.end() : following.start() if following else len(chat)].strip()
        while text.endswith(END):
            text = text.removesuffix(END).rstrip()
        turns.append(Turn(role=_ROLES[mark[1]], text=text))
    if not any(turn.role == "assistant" and turn.text for turn in turns):
        raise ValueError("no turn of the assistant has a text: there is nothing to train on")
    return tuple(turns)


MALFORMED_RATIO = 0.01
"""The part of the rows that may be malformed. Source: this suite's rule; a file with more is not the expected one."""

_LISTED = 5
_SPACE = " \t\r\n"


@dataclass(frozen=True, kw_only=True)
class Row:
    """A conversation.

    Attributes:
        system: the text before it: ``SYSTEM: ...`` with the functions, or nothing.
        chat: its turns, as text.
    """

    system: str
    chat: str

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
class Rows:
    """The rows of a source.

    Attributes:
        rows: the conversations, in the order of the file.
        malformed: of each row that was left out its number, from 1 (in JSONL that of its line, empty ones not
            counted), and what is wrong with it.
        sha256: of the file's bytes.
        source: the path or hub name.
        revision: of the hub's repository; None for a path.
    """

    rows: tuple[Row, ...]
    malformed: tuple[str, ...]
    sha256: str
    source: str
    revision: str | None = None


def located(source: str | Path, revision: str | None = None) -> HubName | None:
    """Return the name on the hub that a source is; None if it is a path that exists. Asks no network.

    Raises: EnvironmentBroken if it is neither.
    """
    if Path(source).exists():
        return None
    found = None if isinstance(source, Path) else hub_name(source, revision)
    if found is None:
        raise EnvironmentBroken(
            f"{source}: no such file, and no name on the hub, which is owner/name or owner/name@revision"
        )
    return found


def load_rows(source: str | Path, *, sha256: str | None = None, revision: str | None = None) -> Rows:
    """Read conversations from a file, or from a repository of data sets on the Hugging Face hub.

    The file is one JSON array, or JSONL: one object a line. A row that cannot be used is left out and listed in
    ``malformed``.

    Args:
        source: a path, or as text ``owner/name`` with or without ``@revision``. A path that exists wins.
        sha256: that the file must have. The original's own is known and always demanded.
        revision: of the hub's repository, unless ``source`` names it. The original's own is known.

    Raises:
        EnvironmentBroken: no such file; the hub does not answer, or HF_HUB_OFFLINE is set and nothing is cached; the
            sha256 is another one; the file is empty, not UTF-8 or cut off; or more than
            ``MALFORMED_RATIO`` of its rows are malformed. The message says where.
    """
    path, label, on_hub = Path(source), str(source), located(source, revision)
    if on_hub is not None:
        path, label, sha256 = fetch_rows(on_hub), str(on_hub), sha256 or on_hub.sha256
    try:
        data = path.read_bytes()
    except OSError as error:
        raise EnvironmentBroken(f"{path}: {error.strerror or error}; give a file of rows") from None
    found = require_sha256(data, sha256, label)
    rows, malformed = read_rows(data, label)
    return Rows(
        rows=tuple(rows),
        malformed=tuple(malformed),
        sha256=found,
        source=str(source),
        revision=on_hub.revision if on_hub else None,
    )


def require_sha256(data: bytes, sha256: str | None, where: object) -> str:
    """Return the digest of a file's bytes. Raises: EnvironmentBroken if ``sha256`` is given, and another one."""
    found = hashlib.sha256(data).hexdigest()
    if sha256 is not None and found != sha256.strip().lower():
        raise EnvironmentBroken(
            f"{where}: its sha256 is {found}, and {sha256} is expected: it is another file, or damaged; get it again,"
            " or give its own sha256"
        )
    return found


def is_safetensors(start: bytes) -> bool:
    """Whether a file begins as safetensors do: 8 bytes with the length of the JSON object that follows.

    Source: https://huggingface.co/docs/safetensors/index, "Format".
    """
    return start[8:9] == b"{" and b"\0" in start[:8]  # in a text there is no zero


def read_rows(data: bytes, where: str) -> tuple[list[Row], list[str]]:
    """Read the bytes of a file: the rows that can be used, and number and defect of the others.

    Args:
        data: UTF-8, with or without a byte order mark.
        where: the file's name, for messages.

    Raises: EnvironmentBroken, as ``load_rows``.
    """
    if is_safetensors(data):
        raise EnvironmentBroken(f"{where}: a safetensors file, not rows; give the file of rows that it was made of")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise EnvironmentBroken(
            f"{where}:{line}: not UTF-8: byte {error.start} is 0x{data[error.start]:02x}; store the file as UTF-8"
        ) from None
    rows: list[Row] = []
    malformed: list[str] = []
    for number, value in enumerate(_values(text, where), start=1):
        try:
            if isinstance(value, ValueError):
                raise value
            rows.append(row_of(value))
        except ValueError as error:
            malformed.append(f"row {number}: {error}")
    count = len(rows) + len(malformed)
    if not count:
        raise EnvironmentBroken(f"{where}: the file is empty; there must be rows of {{system, chat}}")
    if len(malformed) > MALFORMED_RATIO * count:
        raise EnvironmentBroken(
            f"{where}: {len(malformed)} of {count} rows are malformed, and at most {MALFORMED_RATIO:.0%} may be: "
            f"{some_of(malformed, _LISTED, '; ')}; repair or remove them, or give another file: one JSON array, or one "
            "object a line"
        )
    return rows, malformed


def row_of(value: object) -> Row:
    """Make a row of a JSON object with the texts ``system`` and ``chat``, or with ``messages`` and maybe ``tools``.

    Raises: ValueError: it is no object, a field is missing or no text, or its chat is no conversation.
    """
    if not isinstance(value, dict):
        raise ValueError(f"a row must be an object, not {value!r:.40}")
    if "messages" in value:
        value = _as_texts(value["messages"], value.get("tools"))
    if not {"system", "chat"} <= value.keys():
        keys = ", ".join(map(str, value)) or "none"
        raise ValueError(
            f"a row has the keys {keys[:200]}; needed are messages, or system and chat as in glaive-function-calling-v2"
        )
    row = Row(system=_text(value, "system"), chat=_text(value, "chat"))
    turns_of(row.chat)
    return row


_MESSAGES = {"user": LABELS["user"], "assistant": LABELS["assistant"]} | dict.fromkeys(
    ("tool", "function"), LABELS["function"]
)


def _as_texts(messages: object, tools: object) -> dict[str, Any]:
    """Return the texts of glaive's format for messages and tools as chat templates take them."""
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise ValueError(f"messages must be a list of objects, not {messages!r:.40}")
    functions = [tool.get("function", tool) if isinstance(tool, dict) else tool for tool in _listed(tools)]
    systems, turns = list[str](), list[str]()
    for message in messages:
        role, content = message.get("role"), message.get("content") or ""
        if role not in ("system", *_MESSAGES) or not isinstance(content, str):
            raise ValueError(f"a message must have a known role and a text, not {role!r:.40} and {content!r:.40}")
        if role == "system":
            systems.append(content)
            continue
        calls = [call.get("function", call) for call in _listed(message.get("tool_calls")) if isinstance(call, dict)]
        for call in calls:
            given = call.get("arguments")
            arguments = given if isinstance(given, str) else json.dumps(given)
            content += f'\n<functioncall> {{"name": {json.dumps(call.get("name"))}, "arguments": \'{arguments}\'}}'
        if found := _TURN.search(content):
            raise ValueError(f"a line of a message begins as a turn does: {found[1]}")
        turns.append(f"{_MESSAGES[role]} {content.strip()}")
    if functions:
        listed = "\n\n".join(json.dumps(function, indent=4) for function in functions)
        systems.append(WITH_FUNCTIONS.removeprefix("SYSTEM: ") + listed)
    system = "\n".join(systems)
    return {"system": f"SYSTEM: {system}" if system else "", "chat": BETWEEN.join(turns)}


def _listed(value: object) -> list[Any]:
    """Return a list, which may be JSON in a text; an empty one for nothing."""
    found: Any = (_json(value) if isinstance(value, str) and value.strip() else value) or []
    if not isinstance(found, list):
        raise ValueError(f"tools and tool_calls must be lists, not {value!r:.40}")
    return found


def _text(value: dict[str, Any], key: str) -> str:
    text = value[key]
    if not isinstance(text, str):
        raise ValueError(f"{key} must be a text, not {text!r:.40}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{key} has half a character, {text[error.start]!r}, at {error.start}") from None
    return text


def _values(text: str, where: str) -> Iterator[Any]:
    """Yield each row's value, or the error in it. A cut-off last line of JSONL is an error of the whole file."""
    if text.lstrip(_SPACE).startswith("["):
        try:
            yield from _json(text)
        except ValueError as error:
            raise EnvironmentBroken(f"{where}: cut off, or no JSON array: {error}; get it again, or mend it") from None
        return
    lines = text.split("\n")
    readable = False
    for number, line in enumerate(lines, start=1):
        if not line.strip(_SPACE):
            continue
        value: Any
        try:
            value, readable = _json(line), True
        except ValueError as error:
            # A file without one readable line is no JSONL: then its last line does not show that it is cut off.
            if number == len(lines) and readable:
                raise EnvironmentBroken(f"{where}: cut off in its last line: {error}; get it again") from None
            value = error
        yield value


def _json(text: str) -> Any:
    """Read a JSON text. Raises: ValueError for any defect, also a number of more digits than Python reads."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"no JSON: {str(error).partition(';')[0]}") from None


def held_out_split(rows: Sequence[Row], ratio: float, seed: int) -> tuple[list[Row], list[Row]]:
    """Split rows into those to train on and those held out, each in their order.

    No conversation is in both, however often it occurs. Which are held out depends on their texts and the seed, not on
    their order.

    Args:
        rows: conversations.
        ratio: the part of the different conversations to hold out, rounded up: above 0 and below 1.
        seed: selects which are held out.

    Raises: ValueError if nothing would be left to train on.
    """
    keys = [row.key() for row in rows]
    ranked = sorted(set(keys), key=lambda key: hashlib.sha256(f"{seed}/{key}".encode()).digest())
    count = math.ceil(ratio * len(ranked))
    if count >= len(ranked):
        raise ValueError(
            f"{len(ranked)} different conversations are too few to hold {ratio * 100:g} % out and train on the others"
        )
    held_out = set(ranked[:count])
    parts = tuple(
        [row for row, key in zip(rows, keys, strict=True) if (key in held_out) is held] for held in (False, True)
    )
    return parts[0], parts[1]
