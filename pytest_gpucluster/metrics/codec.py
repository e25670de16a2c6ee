"""The codec of journal lines and of measurements: dataclasses to JSON objects, and back by their annotations.

A field of the wrong type is an error, never a guess. A field that is missing or null has its default, so that a journal
of an earlier version can be read; unknown fields, of a later version, are ignored.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from itertools import repeat
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from pytest_gpucluster.errors import JournalError

_Record = TypeVar("_Record")
Converter = Callable[[Any], Any]


class MismatchError(Exception):
    """Raised by converters: a value of the wrong type, and its path, which grows from the inside."""

    def __init__(self, expected: str, found: object) -> None:
        text = repr(found)
        self.problem = f"must be {expected}, found {text if len(text) <= 60 else text[:57] + '...'}"
        self.path = ""

    def inside(self, step: str) -> MismatchError:
        self.path = step + self.path
        return self


AnyText = Annotated[str, str]
"""Text, or another JSON value as text."""


def read(kind: type[_Record], value: object, where: str) -> _Record:
    """Read a dataclass from a JSON object.

    Annotations may be bool, int, float, str, Any, a Literal, dataclasses, and tuples, Mappings and unions with None of
    these; ``Annotated[str, CHOICES]``; and ``Annotated[TYPE, FUNCTION]``, whose function converts the value. JSON lacks
    NaN and infinities: a float may be the text of one. The keys of a Mapping are texts or ranks; entries that are null
    are left out. An optional object that is empty is None.

    Args:
        kind: the dataclass.
        value: parsed JSON.
        where: prefix of errors, such as file and line.

    Raises:
        JournalError: the value or one of its fields is of another type, or a field without a default is missing.
    """
    try:
        record: _Record = _convert_object(kind, value)
    except MismatchError as error:
        raise JournalError(f"{where}: {error.path.lstrip('.') + ' ' if error.path else ''}{error.problem}") from None
    return record


def _convert_object(kind: Any, value: object) -> Any:
    if not isinstance(value, dict):
        raise MismatchError("a JSON object", value)
    found = {}
    for name, convert, is_required in _layout(kind):
        entry = value.get(name)
        if entry is not None or is_required:
            try:
                found[name] = convert(entry)
            except MismatchError as error:
                raise error.inside(f".{name}") from None
    return kind(**found)


@cache
def _layout(kind: type[Any]) -> tuple[tuple[str, Converter, bool], ...]:
    """Return name, converter and whether it is required, of each field."""
    hints = get_type_hints(kind, include_extras=True)
    return tuple(
        (each.name, converter(hints[each.name]), each.default is MISSING and each.default_factory is MISSING)
        for each in fields(kind)
    )


def converter(hint: Any) -> Converter:
    """Return a function that converts parsed JSON to what an annotation states (:func:`read`)."""
    origin, arguments = get_origin(hint), get_args(hint)
    if hint in _SCALARS:
        return _SCALARS[hint]
    if is_dataclass(hint):
        return lambda value: _convert_object(hint, value)
    if origin is Annotated:
        choices = arguments[1]
        return choices if callable(choices) else lambda value: _convert_choice(value, choices)
    if origin is Literal:
        return lambda value: _convert_choice(value, arguments)
    if origin in (Union, types.UnionType):
        [some] = [each for each in arguments if each is not type(None)]
        convert_some = converter(some)
        is_object = is_dataclass(some) or get_origin(some) is Mapping
        return lambda value: None if is_object and value == {} else convert_some(value)
    if origin is tuple and arguments[1:] == (...,):
        converters: Iterable[Converter] = repeat(converter(arguments[0]))
        return lambda value: _convert_list(value, converters)
    if origin is tuple:
        converters = [converter(each) for each in arguments]
        return lambda value: _convert_list(value, converters, len(converters))
    if origin is Mapping:
        key, convert_entry = arguments[0], converter(arguments[1])
        return lambda value: _convert_mapping(value, key, convert_entry)
    raise TypeError(f"no field can be {hint}")


def _only(kind: type, expected: str) -> Converter:
    def convert(value: object) -> object:
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise MismatchError(expected, value)
        return value

    return convert


def _convert_number(value: object) -> float:
    if type(value) is float or (isinstance(value, str) and value in _NO_NUMBERS):
        return float(value)
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) < 10**300:
        return float(value)
    raise MismatchError("a number", value)


_NO_NUMBERS = ("NaN", "Infinity", "-Infinity")
"""What is written in place of floats that JSON lacks."""


def number_to_json(value: float) -> float | str:
    """Return a finite number as it is, others as ``NaN``, ``Infinity`` or ``-Infinity``."""
    if math.isfinite(value):
        return value
    return _NO_NUMBERS[0] if math.isnan(value) else _NO_NUMBERS[1] if value > 0 else _NO_NUMBERS[2]


def to_json(value: Any, depth: int = 0) -> Any:
    """Return plain JSON types: of a dataclass an object of its fields, if it has no ``to_json`` of its own.

    What JSON lacks (NaN, bytes, other objects, more than 32 levels) becomes text.

    >>> to_json({3: (1.0, float("nan"))})
    {'3': [1.0, 'NaN']}
    """
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return number_to_json(value)
    if depth < 32:
        if isinstance(value, Mapping):
            return {str(key): to_json(entry, depth + 1) for key, entry in value.items()}
        if isinstance(value, (tuple, list, set, frozenset)):
            # Samples are nearly always all finite, which one sum shows.
            finite = set(map(type, value)) == {float} and math.isfinite(sum(value))
            return list(value) if finite else [to_json(entry, depth + 1) for entry in value]
        if is_dataclass(value) and not isinstance(value, type):
            if hasattr(value, "to_json"):
                return value.to_json()
            return {each.name: to_json(getattr(value, each.name), depth + 1) for each in fields(value)}
    return value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else str(value)


_SCALARS: dict[Any, Converter] = {
    str: _only(str, "text"),
    bool: _only(bool, "true or false"),
    int: _only(int, "an integer"),
    float: _convert_number,
    Any: lambda value: value,
}


def _convert_choice(value: object, choices: Collection[str]) -> str:
    if not isinstance(value, str) or value not in choices:
        raise MismatchError("one of " + ", ".join(choices), value)
    return value


def _convert_list(value: object, converters: Iterable[Converter], count: int | None = None) -> tuple[Any, ...]:
    if not isinstance(value, list) or (count is not None and len(value) != count):
        raise MismatchError("a list" if count is None else f"a list of {count}", value)
    found: list[Any] = []
    try:
        for item, convert in zip(value, converters):  # noqa: B905  # one converter may repeat without end
            found.append(convert(item))
    except MismatchError as error:
        raise error.inside(f"[{len(found)}]") from None
    return tuple(found)


def _convert_mapping(value: object, key: type, convert: Converter) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise MismatchError("an object", value)
    found = {}
    name = ""
    try:
        for name, entry in value.items():
            if entry is not None:
                found[key(name)] = convert(entry)
    except MismatchError as error:
        raise error.inside(f".{name}") from None
    except ValueError:
        raise MismatchError("an object by rank", value) from None
    return found
