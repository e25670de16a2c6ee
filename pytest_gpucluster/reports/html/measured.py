"""Measurements of a test: all values, and for the deciding ones the values of each rank."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import median

from markupsafe import Markup

from pytest_gpucluster.journal.fields import JudgedMetric
from pytest_gpucluster.journal.journal import Journal
from pytest_gpucluster.journal.records import TestResult
from pytest_gpucluster.reports.charts.plots import rank_dots, rank_dots_key
from pytest_gpucluster.reports.criterion_text import margin_text, value_text
from pytest_gpucluster.reports.findings import baseline_of
from pytest_gpucluster.reports.markup import Table, html_table, line, word
from pytest_gpucluster.reports.summary import headline, worst_first
from pytest_gpucluster.reports.tables import (
    clock_text,
    interval_text,
    is_number,
    limit_text,
    margin,
    metric_name,
    nearest_limit,
    percent,
    quantity,
    share,
    stopped_text,
    worst_ranks_first,
)

EMBEDDED_RANKS = 64
"""Up to this number of ranks the page has every value; above, the median and the worst."""
_WORST = 8
_DETAILED = 6
_MEASUREMENTS = 200


@dataclass(frozen=True, kw_only=True)
class ByRank:
    """The values of one measurement on all ranks."""

    name: str
    limit_from: str
    chart: Markup
    key: str
    """The legend of the chart."""
    values: Table | None


def measurements_table(result: TestResult) -> Table | None:
    """Return one row per measurement, failures first; None if there is none.

    Labels that all of them share are in the caption only.
    """
    judged = worst_first(result.measurements)
    shared = shared_labels(result)
    labels = ", ".join(f"{key}={value}" for key, value in shared.items())
    head = ("Measurement", "Status", "Value", "95 % interval", "Limit", "Margin", "Of peak", "Lowest rank of median")
    rest = ("Compared with the baseline", "Worst rank", "Sampling", "Remark")
    return html_table(
        f"The worst rank's value of each{word(f'; all with {labels}') if labels else ''}",
        (*head, *rest),
        [_row(each, shared, f"{result.message}\n{result.text}") for each in judged],
        numbers=(*head[2:4], *head[5:]),
        tones=[each.status if each.status in ("failed", "error") else "" for each in judged],
        most=_MEASUREMENTS,
    )


def shared_labels(result: TestResult) -> Mapping[str, str]:
    """Return the labels with the same value in all measurements of a test, if there are several."""
    judged = result.measurements
    first = judged[0].labels if len(judged) > 1 else {}
    return {key: value for key, value in first.items() if all(each.labels.get(key) == value for each in judged)}


def short_name(judged: JudgedMetric, shared: Mapping[str, str]) -> str:
    """Return a measurement's name without the shared labels."""
    own = {key: value for key, value in judged.labels.items() if key not in shared}
    return word(metric_name(replace(judged, labels=own)))


def _row(judged: JudgedMetric, shared: Mapping[str, str], failure_text: str) -> tuple[str, ...]:
    # The failure's own text is not repeated at each value.
    reason = "" if judged.status == "failed" and judged.reason in failure_text else judged.reason
    inconclusive = "" if judged.inconclusive in judged.reason else f"inconclusive: {judged.inconclusive}"
    remarks = (reason, judged.evidence, inconclusive)
    several = judged.ratio_to_median is not None and len(judged.values) > 1
    return (
        short_name(judged, shared),
        "recorded only" if judged.status == "recorded" else judged.status,
        value_text(judged, with_unit=True),
        interval_text(judged, judged.interval).removeprefix(", 95 % interval "),
        limit_text(judged),
        margin_text(judged),
        "" if judged.peak_ratio is None else share(judged.peak_ratio),
        quantity(100 * judged.ratio_to_median, "%") if several and judged.ratio_to_median is not None else "",
        baseline_text(judged),
        "" if judged.worst_rank is None else str(judged.worst_rank),
        stopped_text(judged),
        "; ".join(remark for remark in remarks if remark),
    )


def baseline_text(judged: JudgedMetric) -> str:
    """Return "regressed: 781 TFLOPS before (-5.2 %)" for the rank with the largest regression."""
    found = baseline_of(judged.baseline)
    if found is None:
        return ""
    before = found.old.value if found.old is not None else None
    parts = [f"{quantity(before, judged.unit)} before"] if is_number(before) else []
    parts += [f"({percent(found.change_ratio)})"] if is_number(found.change_ratio) else []
    parts += [f"on rank {found.rank}"] if found.rank not in (None, judged.worst_rank) else []
    kind = found.kind or "unknown"
    return line("; ".join(filter(None, (f"{kind}: {' '.join(parts)}" if parts else kind, found.why))))


def by_rank(result: TestResult, journal: Journal) -> tuple[ByRank, ...]:
    """Return the values of each rank for the failed measurements, else for the deciding one."""
    chosen = [each for each in result.measurements if each.status in ("failed", "error")]
    deciding = headline(result.measurements)
    chosen = chosen or ([deciding] if deciding is not None else [])
    return tuple(
        ByRank(
            name=word(metric_name(judged)),
            limit_from=_origin(judged),
            chart=rank_dots(judged, journal),
            key=rank_dots_key(judged),
            values=_values(judged, journal),
        )
        for judged in chosen[:_DETAILED]
        if len(judged.values) > 1
    )


def _origin(judged: JudgedMetric) -> str:
    if judged.limit is None:
        return ""
    source = f" ({judged.limit.source})" if judged.limit.source else ""
    return line(f"{limit_text(judged)}, from {judged.limit.origin or 'an unknown place'}{source}")


def _values(judged: JudgedMetric, journal: Journal) -> Table | None:
    worst = worst_ranks_first(judged)
    head = ("Rank", "Host", "GPU", "Value", "95 % interval", "Margin", "Clock and throttle")
    if len(worst) <= EMBEDDED_RANKS:
        rows = [_rank_row(judged, rank, journal) for rank in worst]
        caption, left_out = "Values, worst rank first", ""
    else:
        middle = median([value for value in judged.values.values() if math.isfinite(value)] or [math.nan])
        rows = [("median", "", "", quantity(middle, judged.unit), "", "", "")]
        rows += [_rank_row(judged, rank, journal) for rank in worst[:_WORST]]
        caption = f"Median of {len(worst)} ranks, and the {_WORST} worst"
        left_out = f"the journal has the values of all {len(worst)} ranks"
    return html_table(caption, head, rows, numbers=head[3:6], left_out=left_out)


def _rank_row(judged: JudgedMetric, rank: int, journal: Journal) -> tuple[str, ...]:
    value, interval = judged.values[rank], judged.intervals.get(rank)
    distance = margin(judged, value, interval)
    return (
        *place_cells(rank, journal),
        quantity(value, judged.unit, compared_with=nearest_limit(judged, value)),
        interval_text(judged, interval).removeprefix(", 95 % interval "),
        "" if distance is None else percent(distance),
        clock_text(judged.telemetry.get(rank, {})),
    )


def place_cells(rank: int, journal: Journal) -> tuple[str, str, str]:
    """Return rank, host and GPU, such as ("11", "gpu-02", "3 GPU-1f2e3d4c"), as far as they are known."""
    place = journal.place(rank)
    gpu = place.gpu if place is not None else None
    name = f"{gpu.get('index', '?')} {gpu.get('uuid', '')[:12]}".rstrip() if gpu else ""
    return str(rank), word(place.host) if place is not None else "", word(name)
