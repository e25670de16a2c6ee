"""Reading of a journal's JSON fields with their types, and the judged metrics that are read with them.

A field of the wrong type is an error, never a guess. A field that is missing has its default, so that a journal of an
earlier version can be read.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pytest_gpucluster.errors import JournalError
from pytest_gpucluster.metrics.sampling import STOPPED_BY, Stopped


class Fields:
    """One line's fields, read with their types. ``where`` is the prefix of every error."""

    def __init__(self, value: object, where: str) -> None:
        if not isinstance(value, dict):
            raise JournalError(f"{where}: expected a JSON object, found {_quoted(value)}")
        self._value: dict[str, Any] = value
        self._where = where

    def _bad(self, name: str, expected: str) -> JournalError:
        return JournalError(f"{self._where}: {name!r} must be {expected}, found {_quoted(self._value.get(name))}")

    def has(self, name: str) -> bool:
        return self._value.get(name) is not None

    def text(self, name: str, default: str | None = None) -> str:
        value = self._value.get(name, default)
        if value is None and default is not None:
            return default
        if not isinstance(value, str):
            raise self._bad(name, "text")
        return value

    def any_text(self, name: str) -> str:
        return str(self._value.get(name, ""))

    def optional_text(self, name: str) -> str | None:
        return None if self._value.get(name) is None else self.text(name)

    def choice(self, name: str, allowed: Iterable[str], default: str | None = None) -> str:
        value = self.text(name, default)
        if value not in allowed:
            raise self._bad(name, "one of " + ", ".join(allowed))
        return value

    def flag(self, name: str, default: bool) -> bool:
        value = self._value.get(name, default)
        if not isinstance(value, bool):
            raise self._bad(name, "true or false")
        return value

    def integer(self, name: str, default: int) -> int:
        value = self.optional_integer(name)
        return default if value is None else value

    def optional_integer(self, name: str) -> int | None:
        value = self._value.get(name)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            raise self._bad(name, "an integer")
        return value

    def number(self, name: str, default: float) -> float:
        value = self.optional_number(name)
        return default if value is None else value

    def optional_number(self, name: str) -> float | None:
        value = self._value.get(name)
        try:
            return None if value is None else _number(value)
        except ValueError:
            raise self._bad(name, "a number") from None

    def items(self, name: str) -> list[Any]:
        value = self._value.get(name)
        if value is None:
            return []
        if not isinstance(value, list):
            raise self._bad(name, "a list")
        return value

    def integers(self, name: str) -> tuple[int, ...]:
        values = self.items(name)
        if not all(isinstance(value, int) for value in values):
            raise self._bad(name, "a list of integers")
        return tuple(values)

    def pairs(self, name: str) -> tuple[tuple[str, str], ...]:
        values = self.items(name)
        if not all(isinstance(value, list) and len(value) == 2 for value in values):
            raise self._bad(name, "a list of pairs")
        return tuple((str(key), str(value)) for key, value in values)

    def mapping(self, name: str) -> dict[str, Any]:
        value = self._value.get(name)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self._bad(name, "an object")
        return value

    def optional_texts(self, name: str) -> tuple[str, ...] | None:
        value = self._value.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
            raise self._bad(name, "a list of texts")
        return tuple(value)

    def optional_pair(self, name: str) -> tuple[float, float] | None:
        try:
            return None if self._value.get(name) is None else _pair(self._value[name])
        except ValueError:
            raise self._bad(name, "two numbers") from None

    def pair_by_rank(self, name: str) -> dict[int, tuple[float, float]]:
        try:
            return {int(rank): _pair(ends) for rank, ends in self.mapping(name).items() if ends is not None}
        except ValueError:
            raise self._bad(name, "two numbers by rank") from None

    def mapping_by_rank(self, name: str) -> dict[int, dict[str, Any]]:
        values = self.mapping(name)
        try:
            by_rank = {int(rank): value for rank, value in values.items()}
        except ValueError:
            raise self._bad(name, "objects by rank") from None
        if not all(isinstance(value, dict) for value in values.values()):
            raise self._bad(name, "objects by rank")
        return by_rank

    def texts(self, name: str) -> dict[str, str]:
        """Return texts by name, without those that are null (unknown)."""
        return {key: str(value) for key, value in self.mapping(name).items() if value is not None}

    def inner(self, name: str) -> Fields:
        return Fields(self.mapping(name), f"{self._where}: {name}")

    def each(self, name: str) -> list[Fields]:
        return [Fields(value, f"{self._where}: {name}[{i}]") for i, value in enumerate(self.items(name))]

    def number_by_rank(self, name: str) -> dict[int, float]:
        try:
            return {int(rank): _number(value) for rank, value in self.mapping(name).items() if value is not None}
        except ValueError:
            raise self._bad(name, "numbers by rank") from None

    def numbers_by_rank(self, name: str) -> dict[int, tuple[float, ...]]:
        try:
            return {int(rank): tuple(map(_number, values)) for rank, values in self.mapping(name).items()}
        except (TypeError, ValueError):
            raise self._bad(name, "lists of numbers by rank") from None


def _quoted(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _pair(value: Any) -> tuple[float, float]:
    if not isinstance(value, list) or len(value) != 2:
        raise ValueError
    return _number(value[0]), _number(value[1])


def _number(value: object) -> float:
    """Read a number, which may be the text NaN, Infinity or -Infinity: JSON itself has no such numbers."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ValueError
    return float(value)


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
    labels: Mapping[str, str] = field(default_factory=dict)
    status: str = "error"
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


def _limit(limit: Fields) -> JudgedLimit:
    return JudgedLimit(
        min=limit.optional_number("min"),
        max=limit.optional_number("max"),
        source=limit.text("source", ""),
        origin=limit.text("origin", ""),
        min_ratio_to_median=limit.optional_number("min_ratio_to_median"),
        expect_transport=limit.optional_texts("expect_transport"),
        expected=limit.optional_number("expected"),
    )


def _stopped(stopped: Fields) -> Stopped:
    by = stopped.choice("by", STOPPED_BY)
    return Stopped(
        by=next(each for each in STOPPED_BY if each == by),
        samples=stopped.integer("samples", 0),
        seconds=stopped.number("seconds", 0.0),
        width_ratio=stopped.number("width_ratio", math.nan),
        allowed_ratio=stopped.number("allowed_ratio", math.nan),
        extended=stopped.flag("extended", False),
    )


def read_judged(line: Fields, keep_samples: bool) -> JudgedMetric:
    """Read a metric.

    Without ``keep_samples`` only what reports show is kept: of a metric that passed or is recorded only, the telemetry
    of the worst rank alone. There may be thousands of ranks.
    """
    status = line.choice("status", ("passed", "failed", "error", "recorded"))
    worst_rank = line.optional_integer("worst_rank")
    intervals, telemetry = line.pair_by_rank("intervals"), line.mapping_by_rank("telemetry")
    if not keep_samples and status in ("passed", "recorded"):
        intervals = {}
        telemetry = {rank: values for rank, values in telemetry.items() if rank == worst_rank}
    return JudgedMetric(
        metric=line.text("metric"),
        unit=line.text("unit", ""),
        labels=line.texts("labels"),
        status=status,
        value=line.optional_number("value"),
        worst_rank=worst_rank,
        limit=_limit(line.inner("limit")) if line.mapping("limit") else None,
        shipped=_limit(line.inner("shipped")) if line.mapping("shipped") else None,
        margin=line.optional_number("margin"),
        median=line.optional_number("median"),
        values=line.number_by_rank("values"),
        samples=line.numbers_by_rank("samples") if keep_samples else {},
        reason=line.text("reason", ""),
        mean=line.optional_number("mean"),
        interval=line.optional_pair("interval"),
        intervals=intervals,
        inconclusive=line.text("inconclusive", ""),
        stopped=_stopped(line.inner("stopped")) if line.mapping("stopped") else None,
        ratio_to_median=line.optional_number("ratio_to_median"),
        peak_ratio=line.optional_number("peak_ratio"),
        telemetry=telemetry,
        evidence=line.text("evidence", ""),
        baseline=line.mapping("baseline"),
    )
