"""What was measured and decided, as it stands in a journal.

A field that is missing has its default, so that a journal of an earlier version is read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pytest_gpucluster.journal_fields import Fields
from pytest_gpucluster.metrics.sampling import STOPPED_BY, Stopped


@dataclass(frozen=True, kw_only=True)
class JudgedLimit:
    """The limit that a value was held against."""

    min: float | None = None
    max: float | None = None
    source: str = ""
    origin: str = ""
    min_ratio_to_median: float | None = None
    expect_transport: tuple[str, ...] | None = None
    expected: float | None = None
    """Shown beside the limit, never judged; in the unit of the value."""


@dataclass(frozen=True, kw_only=True)
class JudgedMetric:
    """A metric of all ranks and what was decided about it. Values are in ``unit``; a margin is a ratio.

    ``interval`` is the worst rank's: it encloses the true value with 95 % confidence. ``inconclusive`` says why the
    samples are no basis for a verdict, ``stopped`` why the worst rank took no more of them. ``ratio_to_median`` is the
    lowest rank's value over the median of all ranks, ``peak_ratio`` the value over the data sheet peak. ``telemetry``
    is what each rank's GPU did meanwhile.
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
    """What share of the typical published value it is, in words; empty where nothing comparable is published."""
    baseline: Mapping[str, Any] = field(default_factory=dict)
    """What it is beside the baseline's value (docs/compare.md); empty without a baseline."""


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

    Without ``keep_samples`` only what reports show is kept: of a metric that keeps its limit, or has none, the
    telemetry of the worst rank alone. There may be thousands of ranks.
    """
    status = line.choice("status", ("passed", "failed", "error", "recorded"))
    worst_rank = line.optional_integer("worst_rank")
    intervals, telemetry = line.pair_by_rank("intervals"), line.mapping_by_rank("telemetry")
    if not keep_samples and status in ("passed", "recorded"):
        intervals = {}
        telemetry = {rank: told for rank, told in telemetry.items() if rank == worst_rank}
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
