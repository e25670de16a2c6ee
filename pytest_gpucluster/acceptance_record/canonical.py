"""The one way to write a JSON value as bytes, so that a digest over it is the same wherever it is computed.

Source: RFC 8785, JSON Canonicalization Scheme: no white space, keys in the order of their UTF-16 code units, numbers
as ECMAScript writes them (ECMA-262, Number::toString), texts in UTF-8 with the shortest escapes. Left out of it is
what the records never hold, and refused: NaN, infinities, whole numbers beyond 2^53 - 1, and lone surrogates.
:func:`plain` makes texts of these.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from decimal import Decimal

LARGEST = 2**53 - 1
"""Beyond it not every whole number is a double. Source: RFC 7493, section 2.2."""


def canonical(value: object) -> bytes:
    """Return the canonical form of a value of plain JSON types.

    >>> canonical({"b": 1e21, "a": [0.1, 1.0, -0.0, None, "€"]}).decode()
    '{"a":[0.1,1,0,null,"€"],"b":1e+21}'

    Raises:
        ValueError: it holds what has no canonical form here.
    """
    try:
        return _written(value).encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f"a text holds a lone surrogate: {error.object[error.start : error.end]!r}") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def plain(value: object) -> object:
    """Return a value with everything that has no canonical form as text; keys become texts.

    >>> plain({"a": float("nan"), 1: (2**60, "\\ud800")})
    {'a': 'NaN', '1': ['1152921504606846976', '\\\\ud800']}
    """
    if isinstance(value, Mapping):
        return {str(plain(str(key))): plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode("utf-8")
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > LARGEST:
        return str(value)
    return value


def _written(value: object) -> str:
    if value is None or isinstance(value, (bool, str)):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, int):
        if abs(value) > LARGEST:
            raise ValueError(f"{value} is beyond 2^53 - 1, up to which every JSON reader is exact")
        return str(value)
    if isinstance(value, float):
        return _number(value)
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise ValueError("a key is no text")
        # With surrogates passed on, a lone one is refused when the whole is encoded.
        keys = sorted(value, key=lambda key: key.encode("utf-16-be", "surrogatepass"))
        return "{" + ",".join(f"{_written(key)}:{_written(value[key])}" for key in keys) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(map(_written, value)) + "]"
    raise ValueError(f"{type(value).__name__} is no JSON type")


def _number(value: float) -> str:
    """Write a number as ECMAScript does. Python's repr has the same digits, the fewest that give it back."""
    if not math.isfinite(value):
        raise ValueError(f"{value} is no JSON number")
    if value == 0:
        return "0"
    told = Decimal(repr(value)).normalize().as_tuple()
    digits, sign = "".join(map(str, told.digits)), "-" if told.sign else ""
    # The point stands after so many of the digits.
    point = len(digits) + int(told.exponent)
    if len(digits) <= point <= 21:
        text = digits + "0" * (point - len(digits))
    elif 0 < point <= 21:
        text = f"{digits[:point]}.{digits[point:]}"
    elif -6 < point <= 0:
        text = f"0.{'0' * -point}{digits}"
    else:
        text = f"{digits[0]}{'.' + digits[1:] if len(digits) > 1 else ''}e{point - 1:+d}"
    return sign + text
