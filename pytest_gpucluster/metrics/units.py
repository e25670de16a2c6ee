"""Quantities with units, as operators write them: ``380 GB/s``, ``8 GiB``, ``90 %``, ``700 TFLOPS``.

Case matters, because Gb/s is an eighth of GB/s, and the prefix matters, because a GiB is 7 % more than a GB.
A unit is therefore never guessed: what is not in the table is an error that names the units it could have
been.

    >>> parse("400 Gb/s").to("GB/s")
    50.0
    >>> str(parse("2.5 TB/s"))
    '2.5 TB/s'
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from pytest_gpucluster.errors import UnitError


@dataclass(frozen=True, kw_only=True)
class Unit:
    """A unit of one dimension. ``factor`` is how many of the dimension's base units it holds."""

    symbol: str
    dimension: str
    factor: int  # an integer, so that converting between decimal units rounds once at most


def _table() -> dict[str, Unit]:
    decimal = {"k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "P": 10**15}
    binary = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50}
    counted = "ranks findings nodes dtypes ports words files CPUs tasks"
    factors: dict[str, dict[str, int]] = {
        # Base unit: the bit, so that bits and bytes are both whole multiples of it.
        "amount of data": {"B": 8} | {f"{p}B": 8 * f for p, f in (decimal | binary).items()},
        "data rate": {"B/s": 8, "b/s": 1}
        | {f"{p}B/s": 8 * f for p, f in (decimal | binary).items()}
        | {f"{p}b/s": f for p, f in decimal.items()},
        "compute rate": {"FLOPS": 1} | {f"{p}FLOPS": f for p, f in decimal.items() if p != "k"},
        "time": {"ns": 1, "us": 10**3, "ms": 10**6, "s": 10**9, "min": 60 * 10**9, "h": 3600 * 10**9},
        **{f"{what} rate": {f"{what}s/s": 1} for what in ("token", "image", "file")},
        **{f"number of {what}": {what: 1} for what in counted.split()},
        "loss": {"nats": 1},
        "power": {"mW": 1, "W": 1000},
        "frequency": {"Hz": 1, "kHz": 10**3, "MHz": 10**6, "GHz": 10**9},
        "temperature": {"degC": 1},
        "ratio": {"%": 1, "ratio": 100},
    }
    return {
        symbol: Unit(symbol=symbol, dimension=dimension, factor=factor)
        for dimension, symbols in factors.items()
        for symbol, factor in symbols.items()
    }


UNITS: Mapping[str, Unit] = MappingProxyType(_table())

# A decimal number, then a unit. Digits are ASCII: the operator and the reader must see the same figure.
_NUMBER = r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?"
_QUANTITY = re.compile(rf"(?P<number>{_NUMBER})[ \t]*(?P<unit>[^\s0-9.,+-][^\s]*)?")


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """A finite value with its unit."""

    value: float
    unit: str

    def to(self, other: str) -> float:
        """Return the value in the unit ``other``.

        Raises: UnitError if ``other`` is unknown or measures something else.
        """
        return convert(self.value, self.unit, other)

    def __str__(self) -> str:
        return show(self.value, self.unit)


def unit(symbol: str) -> Unit:
    """Look a unit up by its exact symbol.

    Raises: UnitError naming the closest units.
    """
    try:
        return UNITS[symbol]
    except KeyError:
        raise UnitError(f"unknown unit {symbol!r}{_unit_hint(symbol)}") from None


def parse(text: str, *, like: str | None = None) -> Quantity:
    """Read a quantity: a decimal number and a unit, with or without a space between.

    With ``like``, the quantity must be of that unit's dimension; its own unit is kept.

    Raises: UnitError if there is no number, no unit, an unknown unit, or another dimension.
    """
    example = f", such as '400 {like}'" if like else ", such as '380 GB/s'"
    match = _QUANTITY.fullmatch(text.strip(" \t"))
    if match is None:
        raise UnitError(f"{text!r} is no quantity: write a decimal number and a unit{example}")
    value = float(match["number"])
    if not math.isfinite(value):
        raise UnitError(f"{text!r} is too large")
    if match["unit"] is None:
        missing = f"write '{match['number']} {like}'" if like else f"write a number and a unit{example}"
        raise UnitError(f"{text!r} has no unit: {missing}")
    quantity = Quantity(value=value, unit=unit(match["unit"]).symbol)
    if like is not None:
        _same_dimension(quantity.unit, like)
    return quantity


def convert(value: float, source: str, target: str) -> float:
    """Convert ``value`` from the unit ``source`` to the unit ``target``. NaN and infinities stay what they
    are.

    Raises: UnitError if a unit is unknown or the two are of different dimensions.
    """
    _same_dimension(source, target)
    if source == target:
        return float(value)
    up, down = UNITS[source].factor, UNITS[target].factor
    shared = math.gcd(up, down)
    return value * (up // shared) / (down // shared)


def magnitude(text: str) -> tuple[str, float] | None:
    """Return a quantity's dimension and its amount in base units, to compare quantities written differently.

    A bare number has the dimension ``number``. What is neither gives None.
    """
    match = _QUANTITY.fullmatch(text.strip(" \t"))
    if match is None:
        return None
    if match["unit"] is None:
        return "number", float(match["number"])
    known = UNITS.get(match["unit"])
    return None if known is None else (known.dimension, float(match["number"]) * known.factor)


def show(value: float, symbol: str, *, digits: int = 4) -> str:
    """Write a value with its unit for people: ``digits`` significant digits, never fewer than its whole
    part."""
    return f"{_number(value, digits)} {symbol}"


def show_bytes(count: int) -> str:
    """Write a number of bytes exactly, in the unit that takes the fewest digits.

    >>> show_bytes(8 * 2**30), show_bytes(32 * 10**9), show_bytes(24)
    ('8 GiB', '32 GB', '24 B')
    """
    symbols = {symbol: unit.factor for symbol, unit in UNITS.items() if unit.dimension == UNITS["B"].dimension}
    return "{} {}".format(*min((8 * count // bits, name) for name, bits in symbols.items() if not 8 * count % bits))


def show_apart(value: float, other: float, symbol: str) -> tuple[str, str]:
    """Write two values with enough digits to differ: 399.9996 is not ``400`` next to 400."""
    texts = "", ""
    for digits in range(4, 18):  # 17 of them distinguish any two numbers
        texts = show(value, symbol, digits=digits), show(other, symbol, digits=digits)
        if texts[0] != texts[1] or value == other:
            break
    return texts


def did_you_mean(found: str, allowed: Iterable[str]) -> str:
    """Suggest the nearest allowed word as ``; did you mean 'x'?``, or return an empty text."""
    names = list(allowed)
    by_lower = {name.lower(): name for name in reversed(names)}
    close = difflib.get_close_matches(found.lower(), by_lower)
    return f"; did you mean {by_lower[close[0]]!r}?" if close else ""


def require_one_of(what: str, found: str, allowed: Iterable[str]) -> None:
    """Check a name.

    Raises: ValueError, with the nearest of the allowed ones, if it is none of them.
    """
    names = list(allowed)
    if found not in names:
        raise ValueError(f"{what} is one of {', '.join(names)}, not {found!r}{did_you_mean(found, names)}")


def _number(value: float, digits: int) -> str:
    if not math.isfinite(value) or value == 0:
        return f"{value:g}"
    exponent = math.floor(math.log10(abs(value)))
    if not -6 <= exponent < 15:
        return f"{value:.{digits}g}"
    text = f"{value:.{max(0, digits - 1 - exponent)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _same_dimension(source: str, target: str) -> None:
    ours, theirs = unit(source), unit(target)
    if ours.dimension != theirs.dimension:
        raise UnitError(
            f"{source} is a unit of {ours.dimension}; {target} or another unit of {theirs.dimension} is needed"
        )


# How other tools write the same units.
_SPELLINGS = (
    ("bytes", "B"),
    ("byte", "B"),
    ("bits", "b"),
    ("bit", "b"),
    ("sec", "s"),
    ("ps", "/s"),
    ("FLOP/s", "FLOPS"),
    ("\N{MICRO SIGN}", "u"),
    ("\N{GREEK SMALL LETTER MU}", "u"),
)


def _unit_hint(symbol: str) -> str:
    spelled = {symbol}
    for theirs, ours in _SPELLINGS:
        spelled |= {word.replace(theirs, ours) for word in spelled}
    exact = [name for name in UNITS if name in spelled]
    if exact:
        return f"; did you mean {exact[0]!r}?"
    folded = {word.lower().replace("flop/s", "flops") for word in spelled}
    near = [name for name in UNITS if name.lower() in folded]
    if not near:
        return did_you_mean(symbol, UNITS) or f"; known units: {', '.join(UNITS)}"
    hint = f"; did you mean {' or '.join(repr(name) for name in near)}? Case matters"
    return f"{hint}: B is bytes, b is bits" if len(near) > 1 else hint
