"""A function call as the assistant writes it: ``<functioncall> {"name": "f", "arguments": '{"a": 1}'}``.

That is not JSON: the arguments are JSON inside single quotes, in which a double quote is not escaped. Source of the
format: glaiveai/glaive-function-calling-v2.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pytest_gpucluster.benchmarks.lora.dataset import END

CALL = "<functioncall>"

_SPACE = re.compile(r"[ \t\r\n]*")
_ESCAPED = re.compile(r"\\(.)", re.DOTALL)
_CLOSING = re.compile(r"'(?=[ \t\r\n]*[,}])")
_TRIES = 8
"""How many candidates for the closing quote are tried where JSON does not determine it."""


@dataclass(frozen=True, kw_only=True)
class FunctionCall:
    """A well-formed call: a function's name, and its arguments by name as JSON values."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class NoCall:
    """Why a text is no well-formed call."""

    reason: str


class _NotWellFormed(ValueError):
    pass


def has_call(text: str) -> bool:
    """Whether a text contains a function call, well-formed or not."""
    return CALL in text


def write(call: FunctionCall) -> str:
    """Write a call as glaive's rows do.

    >>> write(FunctionCall(name="send", arguments={"to": "O'Hara"}))
    '<functioncall> {"name": "send", "arguments": \\'{"to": "O\\'Hara"}\\'}'
    """
    return f'{CALL} {{"name": {json.dumps(call.name)}, "arguments": \'{json.dumps(dict(call.arguments))}\'}}'


def parse(text: str) -> FunctionCall | NoCall:
    """Read the call in a text of the assistant. Text may precede it; only ``<|endoftext|>`` may follow.

    Arguments are read as JSON in single quotes, where an apostrophe may be escaped (``\\'``) or not, and quotes and
    backslashes may be escaped once more; as a plain JSON object; and as JSON in a JSON string. What stands in quotes
    is taken as it is where that is JSON already. Not well-formed are a name that is no text or empty, arguments that
    are no object, and a key that is there twice or is none of the two.

    >>> parse('''<functioncall> {"name": "f", "arguments": '{"a": 1}'} <|endoftext|>''')
    FunctionCall(name='f', arguments={'a': 1})
    >>> parse("Sorry, I cannot do that.")
    NoCall(reason='no <functioncall>')
    """
    _, marker, after = text.partition(CALL)
    if not marker:
        return NoCall(reason=f"no {CALL}")
    try:
        fields, end = _fields(after, _skip(after, 0))
        rest = after[end:].strip().removesuffix(END).strip()
        if rest:
            raise _NotWellFormed(f"{rest[:40]!r} stands after the call")
        return _call(fields)
    except _NotWellFormed as error:
        return NoCall(reason=str(error))
    except RecursionError:
        return NoCall(reason="nested too deeply")


def same_json(one: object, other: object) -> bool:
    """Whether two JSON values are equal: numbers by value, objects in any order, and true is not 1.

    >>> same_json({"a": 1, "b": [2]}, {"b": [2.0], "a": 1}), same_json(True, 1), same_json([1, 2], [2, 1])
    (True, False, False)
    """
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, (int, float)) and isinstance(other, (int, float)):
        return one == other
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(same_json(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same_json, one, other))
    return type(one) is type(other) and one == other


def _call(fields: Mapping[str, Any]) -> FunctionCall:
    unknown = [key for key in fields if key not in ("name", "arguments")]
    if unknown:
        raise _NotWellFormed(f"key {unknown[0]!r} is neither name nor arguments")
    for key in ("name", "arguments"):
        if key not in fields:
            raise _NotWellFormed(f"no {key}")
    name, arguments = fields["name"], fields["arguments"]
    if not isinstance(name, str) or not name.strip():
        raise _NotWellFormed("the name is no text" if not isinstance(name, str) else "the name is empty")
    if isinstance(arguments, str):
        arguments = _quoted(arguments)
    if not isinstance(arguments, dict):
        raise _NotWellFormed("the arguments are no JSON object")
    return FunctionCall(name=name, arguments=arguments)


def _fields(text: str, at: int) -> tuple[dict[str, Any], int]:
    """Read the outer object, key by key, and return it with the place after it."""
    if text[at : at + 1] != "{":
        raise _NotWellFormed(f"no {{ after {CALL}")
    fields: dict[str, Any] = {}
    at = _skip(text, at + 1)
    while text[at : at + 1] != "}":
        if fields:
            at = _skip(text, _expect(text, at, ","))
        key, at = _value(text, at)
        if not isinstance(key, str):
            raise _NotWellFormed(f"a key is {key!r}, which is no text")
        if key in fields:
            raise _NotWellFormed(f"key {key!r} is there twice")
        at = _skip(text, _expect(text, _skip(text, at), ":"))
        fields[key], at = _single_quoted(text, at) if text[at : at + 1] == "'" else _value(text, at)
        at = _skip(text, at)
    return fields, at + 1


def _single_quoted(text: str, at: int) -> tuple[Any, int]:
    """Read JSON in single quotes.

    First as it stands: then JSON itself says where it ends, whatever apostrophes are in it. Else up to the last single
    quote before the end of the outer object, with its escapes taken off.
    """
    try:
        value, end = _value(text, _skip(text, at + 1))
        end = _skip(text, end)
        if text[end : end + 1] == "'":
            return value, end + 1
    except _NotWellFormed:
        pass
    for end in _closing_quotes(text, at):
        try:
            return _quoted(text[at + 1 : end]), end + 1
        except _NotWellFormed:
            continue
    raise _NotWellFormed("the arguments in single quotes are no JSON")


def _closing_quotes(text: str, at: int) -> list[int]:
    """Return where the quotes can end that begin at ``at``: before what may follow a value; the last ones first."""
    ends = [match.start() for match in _CLOSING.finditer(text, at + 1)]
    return ends[: -_TRIES - 1 : -1]


def _quoted(text: str) -> Any:
    """Read JSON that stood in quotes: as it is, else without escapes of apostrophes, else without any escape."""
    apostrophes = _ESCAPED.sub(lambda match: "'" if match[1] == "'" else match[0], text)
    bare = _ESCAPED.sub(lambda match: match[1] if match[1] in "\\'\"" else match[0], text)
    for candidate in (text, apostrophes, bare):
        try:
            value, end = _value(candidate, _skip(candidate, 0))
        except _NotWellFormed:
            continue
        if _skip(candidate, end) == len(candidate):
            return value
    raise _NotWellFormed("the arguments in quotes are no JSON")


def _value(text: str, at: int) -> tuple[Any, int]:
    try:
        return _DECODER.raw_decode(text, at)
    except _NotWellFormed:
        raise
    except ValueError as error:
        raise _NotWellFormed(f"no JSON: {error}") from None


def _expect(text: str, at: int, character: str) -> int:
    if text[at : at + 1] != character:
        found = repr(text[at : at + 20]) if text[at:] else "the end of the text"
        raise _NotWellFormed(f"{character!r} is missing before {found}")
    return at + 1


def _skip(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    return match.end() if match else at


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        twice = next(key for index, (key, _) in enumerate(pairs) if key in dict(pairs[:index]))
        raise _NotWellFormed(f"argument {twice!r} is there twice")
    return fields


def _constant(name: str) -> Any:
    raise _NotWellFormed(f"{name} is no JSON")


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_constant)
