"""The codec of journal lines, and the judged metrics: dataclasses read from JSON objects by their annotations.

A field of the wrong type is an error, never a guess. A field that is missing or null has its default, so that a journal
of an earlier version can be read; unknown fields, of a later version, are ignored.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from functools import cache
from itertools import repeat
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from pytest_gpucluster.errors import JournalError
from pytest_gpucluster.metrics.sampling import Stopped

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
    raise TypeError(f"no journal field can be {hint}")


def _only(kind: type, expected: str) -> Converter:
    def convert(value: object) -> object:
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise MismatchError(expected, value)
        return value

    return convert


def _convert_number(value: object) -> float:
    if not isinstance(value, bool) and isinstance(value, (int, float, str)):
        try:
            return float(value)
        except (ValueError, OverflowError):
            pass  # reported below
    raise MismatchError("a number", value)


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


STATUSES = ("passed", "failed", "error", "recorded")


@dataclass(frozen=True, kw_only=True)
class JudgedLimit:
    """The limit that a value was compared with."""

    min: float | None = None
    max: float | None = None
    source: str = ""
    origin: str = ""
    min_ratio_to_median: float | None = None
    expect_transport: tuple[str, ...] | None = None
    expected: float | None = None
    """Shown next to the limit, never judged; in the unit of the value."""


@dataclass(frozen=True, kw_only=True)
class JudgedMetric:
    """A metric of all ranks with its judgement. Values are in ``unit``; a margin is a ratio.

    ``interval`` is the worst rank's: it encloses the true value with 95 % confidence. ``inconclusive`` states why the
    samples are no basis for a verdict, ``stopped`` why the worst rank took no more of them. ``ratio_to_median`` is the
    lowest rank's value over the median of all ranks, ``peak_ratio`` the value over the data sheet peak. ``telemetry``
    is each rank's GPU telemetry during the measurement.
    """

    metric: str
    unit: str = ""
    labels: Mapping[str, AnyText] = field(default_factory=dict)
    status: Annotated[str, STATUSES] = "error"
    value: float | None = None
    worst_rank: int | None = None
    limit: JudgedLimit | None = None
    margin: float | None = None
    median: float | None = None
    values: Mapping[int, float] = field(default_factory=dict)
    samples: Mapping[int, tuple[float, ...]] = field(default_factory=dict)
    reason: str = ""
    mean: float | None = None
    interval: tuple[float, float] | None = None
    intervals: Mapping[int, tuple[float, float]] = field(default_factory=dict)
    inconclusive: str = ""
    stopped: Stopped | None = None
    ratio_to_median: float | None = None
    peak_ratio: float | None = None
    telemetry: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    shipped: JudgedLimit | None = None
    """The shipped limit, where that of the site asks for less; None where it does not."""
    evidence: str = ""
    """Its share of the typical published value, as text; empty where nothing comparable is published."""
    baseline: Mapping[str, Any] = field(default_factory=dict)
    """Its comparison with the baseline's value (docs/compare.md); empty without a baseline."""
