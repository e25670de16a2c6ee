"""How one value of a workload is written, and what is allowed: the same in a file and on the command line."""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

from pytest_gpucluster.metrics import units

_WHOLE = re.compile(r"0|[1-9][0-9]*")


@dataclass(frozen=True)
class Whole:
    """A whole number in a range. Value: int."""

    least: int
    most: int
    multiple_of: int = 1

    @property
    def allowed(self) -> str:
        """What is allowed, in a few words."""
        what = "whole number" if self.multiple_of == 1 else f"multiple of {self.multiple_of}"
        return f"a {what} from {self.least} to {self.most}"

    def read(self, text: str) -> int:
        """Return the number. Digits only: YAML would read 012 as ten and 1_000 as a thousand."""
        if not _WHOLE.fullmatch(text):
            raise ValueError(f"{text!r} is not {self.allowed}, in plain digits")
        value = int(text)
        if not self.least <= value <= self.most or value % self.multiple_of:
            raise ValueError(f"{text} is not {self.allowed}")
        return value


@dataclass(frozen=True)
class Sizes:
    """Some whole numbers in a range with x between them, such as 64x128x256. Value: a tuple of int."""

    names: tuple[str, ...]
    """What each of them is."""
    each: Whole

    @property
    def allowed(self) -> str:
        """What is allowed, in a few words."""
        return f"{'x'.join(self.names)}, each {self.each.allowed}"

    def read(self, text: str) -> tuple[int, ...]:
        """Return the numbers, each in plain digits."""
        parts = text.split("x")
        if len(parts) != len(self.names):
            raise ValueError(f"{text!r} is not {self.allowed}")
        try:
            return tuple(self.each.read(part) for part in parts)
        except ValueError as error:
            raise ValueError(f"{text!r} is not {'x'.join(self.names)}: {error}") from error


@dataclass(frozen=True)
class Amount:
    """An amount of data with its unit. Value: bytes as int, or with ``as_written`` the text, which is then a label."""

    least_bytes: int
    most_bytes: int
    multiple_of: int = 1
    as_written: bool = False

    @property
    def allowed(self) -> str:
        """What is allowed, in a few words."""
        low, high = units.show_bytes(self.least_bytes), units.show_bytes(self.most_bytes)
        return f"an amount of data in multiples of {self.multiple_of} B, from {low} to {high}, such as 1 GB or 8 GiB"

    def read(self, text: str) -> int | str:
        """Return the bytes, or the text itself."""
        quantity = units.parse(text, like="B")  # raises UnitError, which its caller takes as well
        amount = quantity.to("B")
        # 1.1 GB is 1100000000.0000001 in floating point.
        value = round(amount)
        if not math.isclose(amount, value, rel_tol=1e-12, abs_tol=1e-6) or value % self.multiple_of:
            shown = f"{value} B" if math.isclose(amount, value, rel_tol=1e-12) else f"{amount:.6g} B"
            raise ValueError(f"{text!r} is {shown}, which is no multiple of {self.multiple_of} B")
        if not self.least_bytes <= value <= self.most_bytes:
            raise ValueError(f"{text!r} is not {self.allowed}")
        return text if self.as_written else value


@dataclass(frozen=True)
class Duration:
    """A time with its unit. Value: seconds as float."""

    least_seconds: float
    most_seconds: float

    @property
    def allowed(self) -> str:
        """What is allowed, in a few words."""
        return f"a time from {_time(self.least_seconds)} to {_time(self.most_seconds)}"

    def read(self, text: str) -> float:
        """Return seconds."""
        value = units.parse(text, like="s").to("s")
        if not self.least_seconds <= value <= self.most_seconds:
            raise ValueError(f"{text!r} is not {self.allowed}")
        return value


@dataclass(frozen=True)
class Ratio:
    """A part of something, in percent. Value: a ratio as float."""

    least: float
    most: float

    @property
    def allowed(self) -> str:
        """What is allowed, in a few words."""
        return f"a ratio from {100 * self.least:g} % to {100 * self.most:g} %"

    def read(self, text: str) -> float:
        """Return the ratio: 0.01 for 1 %."""
        value = units.parse(text, like="%").to("ratio")
        if not self.least <= value <= self.most:
            raise ValueError(f"{text!r} is not {self.allowed}")
        return value


@dataclass(frozen=True)
class Choice:
    """One of some words. Value: the word."""

    words: tuple[str, ...]

    @property
    def allowed(self) -> str:
        """What is allowed, in a few words."""
        return " or ".join(self.words)

    def read(self, text: str) -> str:
        """Return the word."""
        if text not in self.words:
            raise ValueError(f"{text!r} is not {self.allowed}{units.did_you_mean(text, self.words)}")
        return text


Kind = Whole | Sizes | Amount | Duration | Ratio | Choice
"""Reads one written value, of a list's items one by one. A ValueError or UnitError of ``read`` says what was found and
what is allowed, without naming the key; ``allowed`` states the latter in a few words."""


def repeated(texts: Sequence[str], values: Sequence[Any]) -> tuple[int, str] | None:
    """Return the first value of a list that comes twice, also where it is written differently: 1 GB and 1000 MB."""
    seen: dict[Hashable, str] = {}
    for index, (text, value) in enumerate(zip(texts, values, strict=True)):
        # A word has no magnitude.
        same = (units.magnitude(value) or value) if isinstance(value, str) else value
        if same in seen:
            return index, f"{text} comes twice" if seen[same] == text else f"{text} is the same as {seen[same]}"
        seen[same] = text
    return None


def _time(seconds: float) -> str:
    symbol = next((s for s in ("h", "min") if seconds and seconds % units.convert(1, s, "s") == 0), "s")
    return units.show(units.convert(seconds, "s", symbol), symbol)
