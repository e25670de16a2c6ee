"""What judging one test has found, as plain values: for the journal, the reports and the test's outcome."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pytest_gpucluster.limits import Limit
from pytest_gpucluster.metrics import measurement
from pytest_gpucluster.metrics.sampling import Stopped

Outcome = Literal["passed", "failed", "error"]
Status = Literal["passed", "failed", "error", "recorded"]


@dataclass(frozen=True, kw_only=True)
class Judged:
    """One metric with one set of labels, over all ranks.

    ``value`` and ``interval`` are the worst rank's, which decides. ``margin`` is the distance of the deciding number
    from the limit as a share of the limit, negative when missed; the deciding number is the end of the interval that
    is nearer to the limit, or the value where there is no interval. ``inconclusive`` says why the deciding rank's
    value could not be told from the limit. ``stopped`` says why the worst rank took no more samples.

    ``median`` and ``mean`` are those of all ranks' values. ``ratio_to_median`` is the lowest of all ranks' ratios as
    ``straggler_ratio`` defines them. ``peak_ratio`` is ``value`` over the data sheet peak, where one applies.
    ``misses`` names every rank that misses something itself, with what it misses. ``advice`` is what to do in several
    lines, such as the YAML to add.
    """

    metric: str
    unit: str
    labels: Mapping[str, str]
    status: Status
    value: float | None
    worst_rank: int | None
    limit: Limit | None
    margin: float | None
    median: float | None
    mean: float | None
    ratio_to_median: float | None
    values: Mapping[int, float]
    samples: Mapping[int, tuple[float, ...]]
    intervals: Mapping[int, tuple[float, float]]
    telemetry: Mapping[int, Mapping[str, Any]]
    inconclusive: str
    peak_ratio: float | None
    reason: str
    stopped: Stopped | None = None
    unsettled: bool = False
    """It has failed only because its values are inconclusive: with more certainty it might pass."""
    misses: Mapping[int, str] = field(default_factory=dict)
    advice: str = ""
    shipped: Limit | None = None
    """The shipped limit, where the site's asks for less."""
    evidence: str = ""
    """What share of the typical published value it is; empty where nothing comparable is published."""
    baseline: Mapping[str, Any] = field(default_factory=dict)
    """What it is beside the baseline's value, in plain JSON types; empty without a baseline."""

    @property
    def interval(self) -> tuple[float, float] | None:
        """The worst rank's interval, where its value has one."""
        return None if self.worst_rank is None else self.intervals.get(self.worst_rank)

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON types; numbers that JSON lacks become text."""
        interval = self.interval
        return {
            "metric": self.metric,
            "unit": self.unit,
            "labels": dict(self.labels),
            "status": self.status,
            "value": _optional(self.value),
            "worst_rank": self.worst_rank,
            "interval": None if interval is None else measurement.numbers_to_json(interval),
            "inconclusive": self.inconclusive,
            **({"stopped": measurement.stopped_to_json(self.stopped)} if self.stopped is not None else {}),
            "limit": None if self.limit is None else self.limit.to_json(),
            "margin": _optional(self.margin),
            "median": _optional(self.median),
            "mean": _optional(self.mean),
            "ratio_to_median": _optional(self.ratio_to_median),
            "values": {str(rank): measurement.number_to_json(value) for rank, value in self.values.items()},
            "intervals": {str(rank): measurement.numbers_to_json(ends) for rank, ends in self.intervals.items()},
            "samples": {str(rank): measurement.numbers_to_json(values) for rank, values in self.samples.items()},
            "telemetry": {str(rank): dict(seen) for rank, seen in self.telemetry.items()},
            "peak_ratio": _optional(self.peak_ratio),
            "reason": self.reason,
            **({"shipped": self.shipped.to_json()} if self.shipped is not None else {}),
            **({"evidence": self.evidence} if self.evidence else {}),
            **({"baseline": dict(self.baseline)} if self.baseline else {}),
        }


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """The verdict on all measurements of one test.

    ``message`` is one line of at most 200 characters, empty when passed; ``text`` says everything, in several
    lines.
    """

    outcome: Outcome
    message: str
    text: str
    measurements: tuple[Judged, ...]


def _optional(value: float | None) -> float | str | None:
    return None if value is None else measurement.number_to_json(value)
