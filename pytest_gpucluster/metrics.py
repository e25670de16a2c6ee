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
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from pytest_gpucluster import units
from pytest_gpucluster.errors import MeasurementError, UnitError

Better = Literal["higher", "lower", "none"]
Scope = Literal["rank", "node", "world"]


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A quantity with a name that limits can be set on.

    ``scope`` says who must report it: every rank, one rank per node, or anyone. ``peak`` names the attribute
    of ``hardware.Peaks`` that the value is held beside. ``peak_is_bound``: a value above the peak is
    impossible; it is False where a formula, not bytes on a wire, makes the value, and better algorithms pass
    the peak legitimately.
    """

    name: str
    unit: str
    better: Better
    scope: Scope = "rank"
    peak: str | None = None
    peak_is_bound: bool = True
    doc: str


_REGISTRY: dict[str, Metric] = {}
METRICS: Mapping[str, Metric] = MappingProxyType(_REGISTRY)


def register(metric: Metric) -> Metric:
    """Make a metric known, and return it. Registering the same definition again changes nothing.

    Raises: MeasurementError if the name is taken by another definition; UnitError if the unit is unknown.
    """
    units.unit(metric.unit)
    existing = _REGISTRY.setdefault(metric.name, metric)
    if existing != metric:
        raise MeasurementError(
            f"metric {metric.name!r} is already defined otherwise: {existing} was first, {metric} came now"
        )
    return metric


def known(name: str) -> Metric:
    """Look a metric up by its name.

    Raises: MeasurementError naming the metric that was probably meant.
    """
    try:
        return _REGISTRY[name]
    except KeyError:
        hint = units.did_you_mean(name, _REGISTRY) or f"; known metrics: {', '.join(_REGISTRY)}"
        raise MeasurementError(f"unknown metric {name!r}{hint}") from None


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One value of a metric on one rank, in the metric's canonical unit, with the samples behind it."""

    metric: str
    value: float
    unit: str
    samples: tuple[float, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    record_only: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON types. NaN and infinities become text, because JSON has no such numbers."""
        return {
            "metric": self.metric,
            "value": number_to_json(self.value),
            "unit": self.unit,
            "samples": numbers_to_json(self.samples),
            "labels": dict(self.labels),
            "record_only": self.record_only,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Measurement:
        """Rebuild a measurement from ``to_json``'s form.

        Raises: MeasurementError if it is not of that form, names an unknown metric, or is in another unit.
        """
        try:
            metric, unit, labels, record_only = (
                data["metric"],
                data["unit"],
                data["labels"],
                data["record_only"],
            )
            value, samples = number_from_json(data["value"]), tuple(map(number_from_json, data["samples"]))
        except (KeyError, TypeError, ValueError) as error:
            raise MeasurementError(f"this is no measurement in transit: {error!r} in {data!r:.200}") from None
        if not isinstance(metric, str) or known(metric).unit != unit:
            raise MeasurementError(f"{metric!r} travels in {known(str(metric)).unit}, not in {unit!r}")
        if not isinstance(labels, Mapping) or not isinstance(record_only, bool):
            raise MeasurementError(f"labels {labels!r:.80} or record_only {record_only!r:.20} has a wrong type")
        texts = {str(key): str(label) for key, label in labels.items()}
        return cls(metric=metric, value=value, unit=unit, samples=samples, labels=texts, record_only=record_only)


def measurement(
    name: str,
    value: Any,
    *,
    unit: str,
    samples: Iterable[Any] = (),
    labels: Mapping[str, Any] | None = None,
    record_only: bool = False,
) -> Measurement:
    """Make a measurement, converting ``value`` and ``samples`` from ``unit`` to the metric's own unit.

    Numbers may be of any type that converts to float (int, numpy scalar, one-element tensor). NaN, infinite
    and negative values are kept for the judge.

    Raises: MeasurementError if the metric is unknown, the unit is missing, unknown or of another dimension,
    or a value is no number.
    """
    metric = known(name)
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
    except (UnitError, TypeError, ValueError, OverflowError, RuntimeError) as error:
        # RuntimeError is what a tensor of several elements, or on a lost device, raises.
        kind = UnitError if isinstance(error, UnitError) else MeasurementError
        raise kind(f"{name}: {error}") from error
    return Measurement(
        metric=name,
        value=converted,
        unit=metric.unit,
        samples=numbers,
        labels={str(key): str(label) for key, label in (labels or {}).items()},
        record_only=record_only,
    )


def problem(measured: Measurement) -> str | None:
    """Say why a measurement cannot be judged, or return None if it can."""
    value = _defect(measured.value)
    if value is not None:
        return f"the value is {value}"
    # A finite sum and a minimum of zero or more clear the usual case without looking at each sample.
    if not measured.samples or (math.isfinite(sum(measured.samples)) and min(measured.samples) >= 0):
        return None
    bad = [defect for defect in map(_defect, measured.samples) if defect is not None]
    return f"{len(bad)} of {len(measured.samples)} samples cannot be judged, the first is {bad[0]}" if bad else None


def number_to_json(value: float) -> float | str:
    """Return a finite number as it is, others as ``NaN``, ``Infinity`` or ``-Infinity``."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def numbers_to_json(values: tuple[float, ...]) -> list[float | str]:
    """Return many numbers as ``number_to_json`` does. Samples are nearly always all finite, which one sum
    shows."""
    return list(values) if math.isfinite(sum(values)) else [number_to_json(value) for value in values]


def number_from_json(value: Any) -> float:
    """Undo ``number_to_json``.

    Raises: ValueError for any other text; TypeError for anything that is neither number nor text.
    """
    if type(value) is float:
        return value
    if isinstance(value, str):
        if value not in ("NaN", "Infinity", "-Infinity"):
            raise ValueError(f"{value!r} is no number")
        return float(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{value!r} is no number")
    return float(value)


def _defect(value: float) -> str | None:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "infinite"
    return f"negative ({value:g})" if value < 0 else None


def _number(value: Any) -> float:
    # Text and truth values convert to float too, but whoever measured them measured something else.
    if isinstance(value, (str, bytes, bytearray)) or type(value).__name__ in ("bool", "bool_"):
        raise TypeError(f"{value!r} is no number")
    try:
        return float(value)
    except TypeError:
        raise TypeError(f"{value!r:.80} is no number") from None


for _kind, _doc in {
    "bf16": "bfloat16",
    "fp16": "half precision",
    "tf32": "fp32 with TF32 tensor cores allowed",
    "fp32": "true fp32, TF32 off",
    "fp8": "fp8 (e4m3) with bf16 output",
}.items():
    register(
        Metric(
            name=f"matmul.{_kind}.tflops",
            unit="TFLOPS",
            better="higher",
            peak=f"{_kind}_tflops",
            doc=f"Dense square product in {_doc}: 2 n^3 operations over the time of one product.",
        )
    )
for _kind, _doc in {
    "copy": "device to device copy, bytes read plus bytes written",
    "read": "reduction, bytes read",
    "write": "fill, bytes written",
}.items():
    register(
        Metric(
            name=f"hbm.{_kind}.bandwidth",
            unit="TB/s",
            better="higher",
            peak="hbm_tb_per_second",
            doc=f"Device memory: {_doc}, over the time of one pass.",
        )
    )
register(
    Metric(
        name="nccl.all_reduce.algbw",
        unit="GB/s",
        better="higher",
        peak="link_gb_per_second",
        doc="All-reduce payload bytes over time: no rank takes in its payload faster than its links.",
    )
)
register(
    Metric(
        name="nccl.all_reduce.busbw",
        unit="GB/s",
        better="higher",
        peak="link_gb_per_second",
        # The ring formula counts bytes that in-switch reduction and trees never send.
        peak_is_bound=False,
        doc="All-reduce algbw times 2 (n - 1) / n, as nccl-tests defines it. The slowest rank decides.",
    )
)
register(
    Metric(
        name="nccl.all_reduce.latency",
        unit="us",
        better="lower",
        doc="Time of one small all-reduce. The slowest rank decides.",
    )
)
register(
    Metric(
        name="inventory.ranks",
        unit="ranks",
        better="none",
        doc="Ranks that reported before the first test. Recorded; the inventory's checks decide.",
    )
)
