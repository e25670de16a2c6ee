"""A judged metric: what the judge makes, the journal keeps, and reports and comparisons read; and which one explains
the others."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Any

from pytest_gpucluster.metrics import units
from pytest_gpucluster.metrics.codec import AnyText, to_json
from pytest_gpucluster.metrics.sampling import Stopped

STATUSES = ("passed", "failed", "error", "recorded")


@dataclass(frozen=True, kw_only=True)
class JudgedLimit:
    """The limit that a value was compared with, in its unit.

    ``expected`` is shown next to the limit and never judged.
    """

    min: float | None = None
    max: float | None = None
    min_ratio_to_median: float | None = None
    expected: float | None = None
    expect_transport: tuple[str, ...] | None = None
    source: str = ""
    origin: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON types."""
        found = {each.name: to_json(getattr(self, each.name)) for each in fields(JudgedLimit)}
        return {name: value for name, value in found.items() if name != "expected" or value is not None}

    def demands(self, unit: str) -> list[str]:
        """Return [">= 400 GB/s", "over NET/IB"]: what it demands, with what is expected in brackets; empty without a
        bound, where a value is only recorded."""
        parts = []
        if self.min is not None and self.max is not None:
            parts.append(f"{units.show(self.min, '').rstrip()} to {units.show(self.max, unit)}".rstrip())
        elif self.min is not None:
            parts.append(f">= {units.show(self.min, unit)}".rstrip())
        elif self.max is not None:
            parts.append(f"<= {units.show(self.max, unit)}".rstrip())
        if self.min_ratio_to_median is not None:
            parts.append(f"each rank >= {units.show(100 * self.min_ratio_to_median, '%')} of the others' median")
        if self.expect_transport is not None:
            parts.append(f"over {' or '.join(self.expect_transport)}")
        if self.expected is not None and parts:
            parts[0] += f" (expected {units.show(self.expected, unit)})"
        return parts


@dataclass(frozen=True, kw_only=True)
class JudgedMetric:
    """One metric with one set of labels, over all ranks, with its judgement.

    ``value`` and ``interval`` are the worst rank's, which decides; the interval encloses the true value with 95 %
    confidence. ``margin`` is the distance of the deciding number from the limit as a share of the limit, negative when
    missed; the deciding number is the end of the interval that is nearer to the limit, or the value where there is no
    interval. ``inconclusive``: why the deciding rank's value could not be distinguished from the limit. ``stopped``:
    why the worst rank took no more samples.

    ``median`` and ``mean`` are those of all ranks' values. ``ratio_to_median`` is the lowest of all ranks' ratios as
    ``straggler_ratios`` defines them. ``peak_ratio`` is ``value`` over the data sheet peak, where one applies.
    ``telemetry`` is each rank's GPU telemetry during the measurement.
    """

    metric: str
    unit: str = ""
    labels: Mapping[str, AnyText] = field(default_factory=dict)
    status: Annotated[str, STATUSES] = "error"
    value: float | None = None
    worst_rank: int | None = None
    interval: tuple[float, float] | None = None
    inconclusive: str = ""
    stopped: Stopped | None = None
    limit: JudgedLimit | None = None
    margin: float | None = None
    median: float | None = None
    mean: float | None = None
    ratio_to_median: float | None = None
    values: Mapping[int, float] = field(default_factory=dict)
    intervals: Mapping[int, tuple[float, float]] = field(default_factory=dict)
    samples: Mapping[int, tuple[float, ...]] = field(default_factory=dict)
    telemetry: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    peak_ratio: float | None = None
    reason: str = ""
    shipped: JudgedLimit | None = None
    """The shipped limit, where that of the site asks for less; None where it does not."""
    evidence: str = ""
    """Its share of the typical published value, as text; empty where nothing comparable is published."""
    baseline: Mapping[str, Any] = field(default_factory=dict)
    """Its comparison with the baseline's value (docs/compare.md); empty without a baseline."""
    misses: Mapping[int, str] = field(default_factory=dict)
    """Every rank that misses something itself, with what it misses. Not in the journal, as the next two."""
    advice: str = ""
    """What to do, in several lines, such as the YAML to add."""
    unsettled: bool = False
    """It has failed only because its values are inconclusive: with more certainty it might pass."""

    def to_json(self) -> dict[str, Any]:
        """Return what stands in the journal, in plain JSON types; numbers that JSON lacks become text."""
        found = {each.name: getattr(self, each.name) for each in fields(self) if each.name not in _NOT_WRITTEN}
        return {name: to_json(value) for name, value in found.items() if value or name not in _WRITTEN_IF_ANY}


_NOT_WRITTEN = ("misses", "advice", "unsettled")
_WRITTEN_IF_ANY = ("stopped", "shipped", "evidence", "baseline")

_CAUSES = (
    ("finite_steps",),
    ("verified", "wrong_words", "repeated"),
    ("gradient_error", "loss_error", "weight_error"),
    ("bf16_gradient_error", "bf16_loss_error", "bf16_weight_error"),
    ("unchanged_base", "moved_adapters", "replayed_steps", "resume_error", "reshard_error", "reload_error"),
    ("group_error", "data_wait"),
)
"""Last words of metrics, in stages, each before those that it may explain: wrong computation before its consequences,
and these before rates. Ranks that do not share gradients also diverge after a checkpoint, not the other way round.
Margins do not show the order: a small error exceeds a limit of 0.001 a thousandfold."""


def cause_order(missed: JudgedMetric) -> tuple[int, int, int]:
    """Return the place of a missed metric among the causes of a failure: of several the lowest explains the others.

    Within a stage what fewer ranks miss comes first: a loss that is wrong on one rank makes the gradients of all ranks
    wrong. Metrics of no stage, as all rates, have one place: they are ordered by how much they miss.
    """
    last = missed.metric.rpartition(".")[2]
    stage = next((number for number, names in enumerate(_CAUSES) if last in names), None)
    if stage is None:
        return len(_CAUSES), 0, 0
    low = missed.limit.min if missed.limit is not None and missed.limit.min is not None else -math.inf
    high = missed.limit.max if missed.limit is not None and missed.limit.max is not None else math.inf
    ranks = sum(not low <= value <= high for value in missed.values.values())
    return stage, ranks, _CAUSES[stage].index(last)
