"""Floors proposed from accepted runs: their values by metric, labels and topology, the rule for a floor, and the file.

A floor is the median of the accepted values, less a number of spreads. The proposal is a file of limits for review,
with the basis of each floor as a comment.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import ROUND_FLOOR, Decimal

from pytest_gpucluster.analysis.certificate_blockers import blockers
from pytest_gpucluster.analysis.compare import FOUND_LABELS
from pytest_gpucluster.errors import ThresholdsError
from pytest_gpucluster.journal.journal import Journal
from pytest_gpucluster.judge.judged import JudgedLimit, JudgedMetric
from pytest_gpucluster.judge.limits import KNOWN_LABELS, TOPOLOGY, condition
from pytest_gpucluster.metrics import stats, units
from pytest_gpucluster.metrics.measurement import METRICS
from pytest_gpucluster.metrics.units import show
from pytest_gpucluster.text import one_line, plural, printable, some_of

RATES = ("compute rate", "data rate", "token rate", "image rate", "file rate")
"""Dimensions that a floor is proposed for. Limits of other metrics are rules, such as "no finding"."""

_OF_ONE_GPU = ("matmul.", "hbm.")
_OF_ONE_NODE = ("host_link.",)
"""Metrics whose values do not depend on how many GPUs there are, or only on how many share the node."""


@dataclass(frozen=True)
class Source:
    """A journal that floors are derived from."""

    path: str
    sha256: str
    journal: Journal


@dataclass(frozen=True, kw_only=True)
class RankValue:
    """One rank's value, as a floor is compared with: the low end of its interval, where it has one."""

    value: float
    place: str
    run: int
    """Which source, counted from 1."""


@dataclass(frozen=True, kw_only=True)
class Series:
    """All values of one measurement, of all ranks of all runs."""

    metric: str
    unit: str
    labels: Mapping[str, str]
    topology: Mapping[str, str]
    """What it depends on besides the labels: world_size, nnodes, local_world_size."""
    numbers: tuple[RankValue, ...]
    samples: tuple[tuple[float, ...], ...]
    """The samples of each value that has any."""
    limits: tuple[JudgedLimit, ...]
    """The limits that judged it."""


def source_problems(sources: Sequence[Source]) -> list[str]:
    """Return why no floor may be derived from these journals; empty where it may."""
    problems = [f"{source.path}: {why}" for source in sources for why in blockers(source.journal)]
    seen: dict[str, str] = {}
    for source in sources:
        run = source.journal.run
        # A merged journal holds the values of its source runs.
        keys = {source.sha256, f"run {run.run_id}"}
        keys |= {key for one in run.merged_from for key in (one.sha256, f"run {one.run_id}")}
        same = next((seen[key] for key in sorted(keys) if key in seen), None)
        if same is not None:
            problems.append(f"{source.path}: the same run as {same}, or merged of it; a run counts once")
        seen |= dict.fromkeys(keys, source.path)
    wanted = sources[0].journal.sku
    problems += [
        f"{source.path}: its SKU is {source.journal.sku or 'not known'}, and {sources[0].path} has {wanted}; "
        "calibrate each SKU alone"
        for source in sources
        if source.journal.sku != wanted
    ]
    first = sources[0].journal.workload
    for source in sources[1:]:
        other = source.journal.workload
        ours, theirs = (one.values if one is not None else {} for one in (first, other))
        differing = [key for key in sorted({*ours, *theirs}) if ours.get(key) != theirs.get(key)]
        if differing:
            texts = [f"{key} ({theirs.get(key, 'none')}, not {ours.get(key, 'none')})" for key in differing]
            problems.append(f"{source.path}: its workload differs from {sources[0].path}: {some_of(texts)}")
    return problems


def series(sources: Sequence[Source]) -> list[Series]:
    """Return the rates of which more is better, in the order in which they were measured.

    A metric unknown to this version has no floor: it is unknown whether more of it is better.
    """
    groups: dict[tuple[object, ...], list[tuple[int, Journal, JudgedMetric]]] = {}
    for run, source in enumerate(sources, start=1):
        for judged in _rates(source.journal):
            labels = tuple(sorted(_requested(judged).items()))
            topology = tuple(_topology(judged, source.journal).items())
            groups.setdefault((judged.metric, labels, topology), []).append((run, source.journal, judged))
    found = []
    for group in groups.values():
        _, journal, first = group[0]
        found.append(
            Series(
                metric=first.metric,
                unit=first.unit,
                labels=_requested(first),
                topology=_topology(first, journal),
                numbers=tuple(number for each in group for number in _numbers(*each)),
                samples=tuple(samples for *_, judged in group for samples in judged.samples.values() if samples),
                limits=tuple(judged.limit for *_, judged in group if judged.limit is not None),
            )
        )
    return found


def _numbers(run: int, journal: Journal, judged: JudgedMetric) -> Iterator[RankValue]:
    for rank, value in judged.values.items():
        low = judged.intervals[rank][0] if rank in judged.intervals else value
        place = journal.place(rank)
        where = f"rank {rank}" + (f" ({place.host})" if place is not None and place.host else "")
        yield RankValue(value=low if math.isnan(low) else min(value, low), place=where, run=run)


def _rates(journal: Journal) -> Iterator[JudgedMetric]:
    for result in journal.results:
        for judged in result.measurements if result.outcome == "passed" else ():
            metric = METRICS.get(judged.metric)
            if metric is None or metric.better != "higher" or metric.unit != judged.unit:
                continue
            if units.unit(metric.unit).dimension in RATES and judged.status in ("passed", "recorded"):
                yield judged


def _requested(judged: JudgedMetric) -> dict[str, str]:
    return {key: value for key, value in judged.labels.items() if key not in FOUND_LABELS}


def _topology(judged: JudgedMetric, journal: Journal) -> dict[str, str]:
    if judged.metric.startswith(_OF_ONE_GPU):
        return {}
    ranks, nodes = journal.run.world_size, journal.run.nnodes
    if judged.metric.startswith(_OF_ONE_NODE):
        return {"local_world_size": str(ranks // nodes)} if nodes and ranks % nodes == 0 else {"world_size": str(ranks)}
    known = {"world_size": str(ranks), "nnodes": str(nodes)}
    # A label of the same name takes precedence: it describes the ranks that measured.
    return {key: value for key, value in known.items() if key not in judged.labels}


SPREADS = 3.0
"""Spreads below the median: of normally distributed values one in 740 is lower."""

LEAST_NUMBERS = 6
"""Fewer do not enclose their median with 95 % confidence: ``stats.median_interval``."""

LEAST_SPREAD = 0.01
"""As a share of the median. One run does not show the variation between days, and ranks in lockstep have nearly equal
values: a floor just below them would reject the same cluster tomorrow. A rule of this project."""

DIGITS = 3
"""Significant digits of a floor, which is rounded down."""

# Hampel, "The Influence Curve and its Role in Robust Estimation" (1974): times this the median absolute deviation
# estimates the standard deviation of normally distributed values.
_NORMAL = 1.4826


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """A floor in the metric's unit, with its basis. ``below`` are accepted values that would miss it."""

    series: Series
    floor: float
    median: float
    spread: float
    spreads: float
    below: tuple[RankValue, ...] = ()
    peak: float | None = None
    """Data sheet peak, where the metric has one."""


def propose(series: Series, *, spreads: float = SPREADS, peak: float | None = None) -> Proposal:
    """Return the floor for a series: median - spreads * spread, rounded down, and never above the data sheet peak.

    The spread is the largest of: the deviation between ranks of all runs, the deviation between the samples of a value
    (the median over all values), both 1.4826 times their median absolute deviation; and 1 % of the median.

    Args:
        series: of accepted runs.
        spreads: how many spreads below the median, above 0.
        peak: of the data sheet, in the metric's unit, where the metric has one.

    Raises:
        ThresholdsError: there is no floor: it would be looser than the limit in force, there are too few values, or it
            would not be above zero.
    """
    numbers = [number.value for number in series.numbers]
    if len(numbers) < LEAST_NUMBERS:
        raise ThresholdsError(f"{plural(len(numbers), 'value')}, and at least {LEAST_NUMBERS} are needed")
    if not all(math.isfinite(value) and value >= 0 for value in numbers):
        raise ThresholdsError("a value is no finite number")
    median = stats.median(numbers)
    scatters = [_NORMAL * stats.mad(each) for each in series.samples if len(each) >= LEAST_NUMBERS]
    of_samples = stats.median(scatters) if scatters else 0.0
    if not math.isfinite(of_samples):
        raise ThresholdsError("a sample is no finite number")
    spread = max(_NORMAL * stats.mad(numbers), of_samples, LEAST_SPREAD * median)
    wanted = median - spreads * spread
    if not wanted > 0:
        raise ThresholdsError(f"{spreads:g} spreads of {spread:.3g} leave nothing of the median {median:.4g}")
    floor = rounded_down(wanted if peak is None else min(wanted, peak))
    in_force = max((limit.min for limit in series.limits if limit.min is not None), default=None)
    if in_force is not None and floor <= in_force:
        raise ThresholdsError(f"{floor:g} {series.unit} would not be more than the limit in force")
    most = min((limit.max for limit in series.limits if limit.max is not None), default=None)
    if most is not None and floor > most:
        raise ThresholdsError(f"{floor:g} {series.unit} would be more than the limit in force allows")
    return Proposal(
        series=series,
        floor=floor,
        median=median,
        spread=spread,
        spreads=spreads,
        below=tuple(sorted((n for n in series.numbers if n.value < floor), key=lambda number: number.value)),
        peak=peak,
    )


def rounded_down(value: float) -> float:
    """Return a positive value with three significant digits, never more than it is.

    >>> rounded_down(741.97), rounded_down(2.9999), rounded_down(0.0123456)
    (741.0, 2.99, 0.0123)
    """
    exact = Decimal(repr(value))
    step = Decimal(1).scaleb(exact.adjusted() - DIGITS + 1)
    return float((exact / step).to_integral_value(rounding=ROUND_FLOOR) * step)


_HEAD = """\
# Floors proposed by `gpucluster thresholds calibrate`, for review. Nothing is in force before this file is passed:
#     pytest acceptance/ --gpucluster-thresholds THIS_FILE
# Each entry replaces the one that was in force, and keeps its demands other than min. Where no entry here applies, the
# shipped limits do.
#
"""
_INDENT = " " * 8
_PATH = 200
_FAR_BELOW = 0.05
"""Below this share of the peak the loader takes a floor for a wrong unit, unless it has ``despite_peak``."""


def overlay(
    sku: str,
    proposals: Sequence[Proposal],
    without_floor: Sequence[tuple[Series, str]],
    sources: Sequence[Source],
    *,
    recorded: Sequence[Series] = (),
    at: str,
    version: str,
    shipped: str,
) -> str:
    """Return the text of a YAML file that ``judge.loader.load`` reads.

    Args:
        sku: for which the floors are.
        proposals: at least one, no two with the same conditions.
        without_floor: series without a floor, and why.
        sources: the journals in the order given.
        recorded: series that were recorded only, and stay so.
        at: time of creation, ISO 8601.
        version: of this package.
        shipped: the SHA-256 of the shipped limits: others that were in force are named, since a run takes one file.
    """
    lines, spreads = [_HEAD.rstrip("\n")], proposals[0].spreads
    lines.append(f"# Made {_comment(at)} by pytest-gpucluster {version} of accepted runs of {_comment(sku)}:")
    for run, source in enumerate(sources, start=1):
        about = source.journal.run
        nodes = f"{about.nnodes} nodes, {about.world_size} ranks"
        lines.append(f"#   run {run}: {_comment(about.run_id)} of {_comment(about.started_at)}, {nodes}")
        lines.append(f"#     journal {_comment(source.path)}")
        lines.append(f"#     sha256 {source.sha256}")
    lines += [
        "#",
        f"# The rule: median of all values less {spreads:g} spreads, rounded down to {DIGITS} digits, never above the",
        "# data sheet peak, and no looser than the limit in force. A value is the low end of a rank's interval. The",
        "# spread is the largest of: the deviation between ranks and runs, that between samples (both 1.4826 times",
        f"# their median absolute deviation), and {100 * LEAST_SPREAD:g} % of the median.",
    ]
    in_force = dict.fromkeys(file for source in sources for file in source.journal.limit_files)
    others = [file for file in in_force if file.sha256 != shipped]
    if others:
        lines += [
            "#",
            "# These runs were judged by other limits than those that this version ships. A run takes one file",
            "# next to the shipped one: copy into this one what is to stay in force of",
            *(f"#   {_comment(file.path)} (sha256 {file.sha256})" for file in others),
        ]
    lines += ["", "schema_version: 1", "skus:", f"  {json.dumps(printable(sku))}:", "    limits:"]
    by_metric: dict[str, list[Proposal]] = {}
    for proposal in proposals:
        by_metric.setdefault(proposal.series.metric, []).append(proposal)
    for metric, of_metric in by_metric.items():
        lines.append(f"      {metric}:")
        for proposal in of_metric:
            lines += _entry(proposal, sources)
        for other in (*(one for one, _ in without_floor), *recorded):
            if other.metric == metric and any(_applies_to(proposal, other) for proposal in of_metric):
                lines += _unchanged(other)
    if without_floor:
        lines += ["", "# No floor is proposed for:"]
        lines += [f"#   {name_of(one)}: {_comment(why)}" for one, why in without_floor]
    return "\n".join(lines) + "\n"


def conditions_of(series: Series) -> dict[str, str]:
    """Return the conditions of a floor: the topology and the labels of the measurement.

    Raises:
        ThresholdsError: a condition cannot express it, such as a label that reads as a range.
    """
    found = {**series.topology, **series.labels}
    for key, text in found.items():
        if not condition(key, text).holds(text) or text != printable(text).strip():
            raise ThresholdsError(f"no condition can express that {key} is {text!r}")
    return found


def _applies_to(proposal: Proposal, other: Series) -> bool:
    """Return whether a floor would also apply to another series: one with more labels than its own."""
    facts = {**other.topology, **other.labels}
    return all(condition(key, text).holds(facts.get(key)) for key, text in conditions_of(proposal.series).items())


def name_of(series: Series) -> str:
    """Return the metric with its labels and its topology, on one line."""
    parts = [f"{key}={value}" for key, value in {**series.topology, **series.labels}.items()]
    return _comment(series.metric + (f" ({', '.join(parts)})" if parts else ""))


def _entry(proposal: Proposal, sources: Sequence[Source]) -> Iterator[str]:
    series = proposal.series
    lowest = min(series.numbers, key=lambda number: number.value)
    runs = sorted({number.run for number in series.numbers})
    median, spread, low = (show(value, series.unit) for value in (proposal.median, proposal.spread, lowest.value))
    count = f"{plural(len(series.numbers), 'value')} of {plural(len(runs), 'run')}"
    replaced = dict.fromkeys(
        f"{show(limit.min, series.unit)} ({limit.origin})" for limit in series.limits if limit.min is not None
    )
    below = [f"{show(one.value, series.unit)} on {one.place} in run {one.run}" for one in proposal.below]
    comments = [
        f"{count}: median {median}, spread {spread}, lowest {low} on {lowest.place} in run {lowest.run}",
        f"replaces {', '.join(replaced)}" if replaced else "",
        f"BELOW IT, although accepted; check before use: {some_of(below, separator='; ')}" if below else "",
    ]
    about = [
        f"{source.journal.run.run_id} of {source.journal.run.started_at[:10]} (sha256 {source.sha256[:12]})"
        for source in (sources[run - 1] for run in runs)
    ]
    source = f"calibrated: median {median} less {proposal.spreads:g} spreads of {spread}, {count}: {some_of(about, 4)}"
    before = next((limit for limit in series.limits if limit.origin), None)
    if before is not None and _demands_besides_min(series):
        source += f"; besides min as {before.origin}: {before.source}"
    is_far_below = proposal.peak is not None and proposal.floor < _FAR_BELOW * proposal.peak
    peak = {"despite_peak": "measured, see the source"} if is_far_below else {}
    yield from _listed({**_demands(series, proposal.floor), "source": source, **peak}, *filter(None, comments))


def _unchanged(series: Series) -> Iterator[str]:
    """Yield an entry with the earlier demands: without it, a floor with fewer conditions would apply."""
    limits = [limit for limit in series.limits if limit.origin]
    if limits:
        least = max((limit.min for limit in limits if limit.min is not None), default=None)
        source = "; ".join(dict.fromkeys(f"as {limit.origin}: {limit.source}" for limit in limits))
        entry = {**_demands(series, least), "source": source}
    else:
        why = "as in the runs that the floors are derived from"
        entry = {"when": _when(series), "record_only": why}
    yield from _listed(entry, "unchanged: without this entry one of those above would apply")


def _listed(entry: Mapping[str, object], *comments: str) -> Iterator[str]:
    """Yield the lines of an entry in the list of its metric. JSON's scalars and objects are YAML's as well."""
    yield from (f"{_INDENT}# {_comment(comment)}" for comment in comments)
    for number, (key, value) in enumerate(entry.items()):
        text = json.dumps(printable(value) if isinstance(value, str) else value, ensure_ascii=False)
        yield f"{_INDENT}{'  ' if number else '- '}{key}: {text}"


def _demands(series: Series, least: float | None) -> dict[str, object]:
    when = _when(series)
    found: dict[str, object] = {"when": when} if when else {}
    found |= {} if least is None else {"min": _amount(least, series.unit)}
    found |= _demands_besides_min(series)
    expected = next((one.expected for one in series.limits if one.expected is not None), None)
    if expected is not None and (least is None or expected >= least):
        found["expected"] = _amount(expected, series.unit)
    return found


def _demands_besides_min(series: Series) -> dict[str, object]:
    found: dict[str, object] = {}
    most = min((limit.max for limit in series.limits if limit.max is not None), default=None)
    if most is not None:
        found["max"] = _amount(most, series.unit)
    ratio = max((one.min_ratio_to_median for one in series.limits if one.min_ratio_to_median is not None), default=None)
    if ratio is not None:
        found["min_ratio_to_median"] = f"{100 * ratio:.12g} %"
    transports = next((one.expect_transport for one in series.limits if one.expect_transport is not None), None)
    if transports is not None:
        found["expect_transport"] = list(transports)
    return found


def _amount(value: float, unit: str) -> str:
    return f"{value!r} {unit}".replace(".0 ", " ")


def _when(series: Series) -> dict[str, object]:
    when = conditions_of(series)
    direct: dict[str, object] = {key: text for key, text in when.items() if key in TOPOLOGY or key in KNOWN_LABELS}
    labels = {key: text for key, text in when.items() if key not in direct}
    return {**direct, "labels": labels} if labels else direct


def _comment(text: str) -> str:
    return printable(one_line(text, _PATH))
