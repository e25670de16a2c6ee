"""What can be measured, and one measurement of it.

A metric has one canonical unit. ``measurement`` converts to it, so that everything downstream (limits, judge,
journal, reports) compares plain numbers. A value that cannot be judged, such as NaN, is kept and judged an
error: dropping it would make a broken rank look like a rank that measured nothing.

    >>> measurement("hbm.copy.bandwidth", 3020, unit="GB/s").value
    3.02
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any, NamedTuple

from pytest_gpucluster.errors import JournalError, MeasurementError, UnitError
from pytest_gpucluster.metrics import units
from pytest_gpucluster.metrics.catalogue import Metric, declared
from pytest_gpucluster.metrics.codec import AnyText, read, to_json
from pytest_gpucluster.metrics.sampling import Series, Stopped

_REGISTRY: dict[str, Metric] = {
    metric.name: metric for metric in sorted(declared("METRICS"), key=lambda metric: metric.name)
}
METRICS: Mapping[str, Metric] = MappingProxyType(_REGISTRY)
WITHOUT_NVLS = {"nvls": "switched off"}
"""The label of every value that was measured through groups for which this suite has switched NVLS off."""


def register(metric: Metric) -> Metric:
    """Make a metric known, and return it. Registering the same definition again changes nothing.

    Raises: MeasurementError if the name is taken by another definition; UnitError if the unit is unknown.
    """
    units.unit(metric.unit)
    existing = _REGISTRY.setdefault(metric.name, metric)
    if existing != metric:
        raise MeasurementError(f"metric {metric.name!r} is already defined differently: {existing}, not {metric}")
    return metric


def known(name: str) -> Metric:
    """Look a metric up by its name.

    Raises: MeasurementError naming the closest metric, and how to declare one.
    """
    try:
        return _REGISTRY[name]
    except KeyError:
        raise MeasurementError(
            f"unknown metric {name!r}{units.did_you_mean(name, _REGISTRY) or ';'} docs/reference/reference.md lists "
            "them; the hook pytest_gpucluster_metrics of a conftest.py declares more"
        ) from None


class Value(NamedTuple):
    """A value to measure. ``record_only``: findings decide, not a limit."""

    metric: str
    value: float
    unit: str
    record_only: bool


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One value of a metric on one rank, in the metric's canonical unit, with the samples behind it.

    ``interval`` encloses the true value with 95 % confidence, where that is known. ``inconclusive``: why the
    samples scatter too much for a verdict. ``stopped``: why there are no more samples, where it is known.
    ``telemetry``: that of the GPU during the measurement, in plain JSON types.
    """

    metric: str
    value: float
    unit: str
    samples: tuple[float, ...] = ()
    interval: tuple[float, float] | None = None
    inconclusive: str = ""
    stopped: Stopped | None = None
    labels: Mapping[str, AnyText] = field(default_factory=dict)
    telemetry: Mapping[str, Any] = field(default_factory=dict)
    record_only: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON types. NaN and infinities become text, because JSON has no such numbers."""
        return {each.name: to_json(getattr(self, each.name)) for each in fields(self)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Measurement:
        """Rebuild a measurement from ``to_json``'s form.

        Raises: MeasurementError if it is not of that form, names an unknown metric, or is in another unit.
        """
        missing = {field.name for field in fields(cls)} - data.keys()
        if missing:  # a default in its place could change what is judged
            raise MeasurementError(f"a measurement in transit lacks {', '.join(sorted(missing))}")
        try:
            found = read(cls, data, "a measurement in transit")
        except JournalError as error:
            raise MeasurementError(str(error)) from None
        if known(found.metric).unit != found.unit:
            raise MeasurementError(f"{found.metric!r} travels in {known(found.metric).unit}, not in {found.unit!r}")
        return found


def measurement(
    name: str,
    value: Any,
    *,
    unit: str,
    samples: Iterable[Any] = (),
    labels: Mapping[str, Any] | None = None,
    telemetry: Mapping[str, Any] | None = None,
    record_only: bool = False,
) -> Measurement:
    """Make a measurement, converting ``value`` and ``samples`` from ``unit`` to the metric's own unit.

    The value is a number of any type that converts to float (int, numpy scalar, one-element tensor), or a ``Series``,
    which brings its samples and its interval. NaN, infinite and negative values are kept for the judge.

    Raises: MeasurementError if the metric is unknown, the unit is missing, unknown or of another dimension,
    or a value is no number.
    """
    metric = known(name)
    interval: tuple[float, float] | None = None
    inconclusive = ""
    stopped: Stopped | None = None
    if isinstance(value, Series):
        if samples:
            raise MeasurementError(f"{name}: a series brings its own samples; do not pass others")
        interval, inconclusive, stopped = (value.low, value.high), value.inconclusive, value.stopped
        samples, value = value.samples, value.median
    if not isinstance(unit, str):
        raise MeasurementError(f"{name}: the unit must be text such as {metric.unit!r}, not {unit!r}")
    if not isinstance(record_only, bool):
        raise MeasurementError(f"{name}: record_only must be True or False, not {record_only!r}")
    if isinstance(samples, (str, bytes)) or not isinstance(samples, Iterable):
        raise MeasurementError(f"{name}: samples must be a sequence of numbers, not {samples!r:.80}")
    try:
        converted = units.convert(_number(value), unit, metric.unit)
        numbers = tuple(map(_number, samples))
        if unit != metric.unit:
            numbers = tuple(units.convert(sample, unit, metric.unit) for sample in numbers)
        if interval is not None:
            interval = units.convert(interval[0], unit, metric.unit), units.convert(interval[1], unit, metric.unit)
    except (UnitError, TypeError, ValueError, OverflowError, RuntimeError) as error:
        # RuntimeError is what a tensor of several elements, or on a lost device, raises.
        kind = UnitError if isinstance(error, UnitError) else MeasurementError
        raise kind(f"{name}: {error}") from error
    return Measurement(
        metric=name,
        value=converted,
        unit=metric.unit,
        samples=numbers,
        interval=interval,
        inconclusive=inconclusive,
        stopped=stopped,
        labels={str(key): str(label) for key, label in (labels or {}).items()},
        telemetry=dict(telemetry or {}),
        record_only=record_only,
    )


def problem(measured: Measurement) -> str | None:
    """Return why a measurement cannot be judged, or None if it can."""
    value = _defect(measured.value)
    if value is not None:
        return f"the value is {value}"
    if measured.interval is not None and sound_interval(measured) is None:
        low, high = measured.interval
        return f"the value {measured.value:g} has an interval that makes no sense: {low:g} to {high:g}"
    # A finite sum and a minimum of zero or more clear the usual case without looking at each sample.
    if not measured.samples or (math.isfinite(sum(measured.samples)) and min(measured.samples) >= 0):
        return None
    bad = [defect for defect in map(_defect, measured.samples) if defect is not None]
    return f"{len(bad)} of {len(measured.samples)} samples cannot be judged, the first is {bad[0]}" if bad else None


def sound_interval(measured: Measurement) -> tuple[float, float] | None:
    """Return the interval if it encloses the value and both ends could be measured values, else None."""
    if measured.interval is None:
        return None
    low, high = measured.interval
    return (low, high) if 0 <= low <= measured.value <= high < math.inf else None


def _defect(value: float) -> str | None:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "infinite"
    return f"negative ({value:g})" if value < 0 else None


def _number(value: Any) -> float:
    # Text and truth values convert to float too, but they are no measured values.
    if isinstance(value, (str, bytes, bytearray)) or type(value).__name__ in ("bool", "bool_"):
        raise TypeError(f"{value!r} is no number")
    try:
        return float(value)
    except TypeError:
        raise TypeError(f"{value!r:.80} is no number") from None
