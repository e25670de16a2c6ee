"""The judged metrics in a journal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from pytest_gpucluster.metrics.codec import AnyText
from pytest_gpucluster.metrics.sampling import Stopped

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
