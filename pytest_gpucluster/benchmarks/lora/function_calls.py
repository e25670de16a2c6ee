"""A function call as the assistant writes it: ``<functioncall> {"name": "f", "arguments": '{"a": 1}'}``.

That is not JSON: the arguments are JSON inside single quotes, in which a double quote is not escaped. Source of the
format: glaiveai/glaive-function-calling-v2. The chat templates of Qwen2.5 and Qwen3 write JSON between ``<tool_call>``
and ``</tool_call>``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pytest_gpucluster.benchmarks.lora.dataset import END

CALL = "<functioncall>"
_OF_TEMPLATE, _TEMPLATE_END = "<tool_call>", "</tool_call>"
_MARKER = re.compile(f"{CALL}|{_OF_TEMPLATE}")

_ESCAPED = re.compile(r"\\(.)", re.DOTALL)
# Inside of JSON a double quote is escaped, so this name stands nowhere else. The last quote before what may follow a
# value is the closing one, whatever apostrophes are in between.
_QUOTED = re.compile(r"\"arguments\"[ \t\r\n]*:[ \t\r\n]*'(.*)'(?=[ \t\r\n]*[,}])", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class FunctionCall:
    """A well-formed call: a function's name, and its arguments by name as JSON values."""

    name: str
    arguments: Mapping[str, Any]


class _NotWellFormed(ValueError):
    pass


def has_call(text: str) -> bool:
    """Whether a text contains a function call, well-formed or not."""
    return _MARKER.search(text) is not None


def write(call: FunctionCall) -> str:
    """Write a call as glaive's rows do.

    >>> write(FunctionCall(name="send", arguments={"to": "O'Hara"}))
    '<functioncall> {"name": "send", "arguments": \\'{"to": "O\\'Hara"}\\'}'
    """
    return f'{CALL} {{"name": {json.dumps(call.name)}, "arguments": \'{json.dumps(dict(call.arguments))}\'}}'


def parse(text: str) -> FunctionCall | str:
    """Read the call in a text of the assistant; or return why there is no well-formed one.

    Text may precede it; only ``<|endoftext|>`` may follow.

    Arguments are read as JSON in single quotes, where an apostrophe may be escaped (``\\'``) or not, and quotes and
    backslashes may be escaped once more; as a plain JSON object; and as JSON in a JSON string. What stands in quotes
    is taken as it is where that is JSON already. Not well-formed are a name that is no text or empty, arguments that
    are no object, and a key that is there twice or is none of the two.

    >>> parse('''<functioncall> {"name": "f", "arguments": '{"a": 1}'} <|endoftext|>''')
    FunctionCall(name='f', arguments={'a': 1})
    >>> parse("Sorry, I cannot do that.")
    'no <functioncall>'
    """
    marker = _MARKER.search(text)
    if not marker:
        return f"no {CALL}"
    after = text[marker.end() :].rstrip().removesuffix(END).rstrip()
    try:
        return _call(_fields(after.removesuffix(_TEMPLATE_END).rstrip() if marker[0] == _OF_TEMPLATE else after))
    except _NotWellFormed as error:
        return str(error)
    except RecursionError:
        return "nested too deeply"


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


def _call(fields: Any) -> FunctionCall:
    if not isinstance(fields, dict):
        raise _NotWellFormed(f"no object after {CALL}")
    if unknown := [key for key in fields if key not in ("name", "arguments")]:
        raise _NotWellFormed(f"key {unknown[0]!r} is neither name nor arguments")
    if missing := {"name", "arguments"} - fields.keys():
        raise _NotWellFormed(f"no {' and no '.join(sorted(missing))}")
    name, arguments = fields["name"], fields["arguments"]
    if not isinstance(name, str) or not name.strip():
        raise _NotWellFormed("the name is no text, or empty")
    if isinstance(arguments, str):
        arguments = _quoted(arguments)
    if not isinstance(arguments, dict):
        raise _NotWellFormed("the arguments are no JSON object")
    return FunctionCall(name=name, arguments=arguments)


def _fields(text: str) -> Any:
    """Read the outer object. Arguments in single quotes are taken out first: the rest of it is JSON."""
    quoted = _QUOTED.search(text)
    if quoted is None:
        return _json(text)
    fields = _json(f"{text[: quoted.start(1) - 1]}null{text[quoted.end(1) + 1 :]}")
    if not isinstance(fields, dict) or fields.get("arguments", "") is not None:
        raise _NotWellFormed("the arguments in quotes are no JSON")
    return {**fields, "arguments": _quoted(quoted[1])}


def _quoted(text: str) -> Any:
    """Read JSON that stood in quotes: as it is, else without escapes of apostrophes, else without any escape."""
    apostrophes = _ESCAPED.sub(lambda match: "'" if match[1] == "'" else match[0], text)
    bare = _ESCAPED.sub(lambda match: match[1] if match[1] in "\\'\"" else match[0], text)
    for candidate in (text, apostrophes, bare):
        try:
            return _json(candidate)
        except _NotWellFormed:
            continue
    raise _NotWellFormed("the arguments in quotes are no JSON")


def _json(text: str) -> Any:
    try:
        return _DECODER.decode(text)
    except _NotWellFormed:
        raise
    except ValueError as error:
        raise _NotWellFormed(f"no JSON: {error}") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise _NotWellFormed(f"key {twice!r} is there twice")
    return fields


def _constant(name: str) -> Any:
    raise _NotWellFormed(f"{name} is no JSON")


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_constant)
