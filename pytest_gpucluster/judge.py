"""Measurements of all ranks against limits: the verdict, made once.

Nothing passes by default. A value that is NaN, a rank that did not measure, a metric without a limit, a GPU
without limits and a value above the data sheet peak are errors; a value beyond its limit is a failure, and
wins over errors, because a slow GPU must be named even where another rank said nothing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pytest_gpucluster import hardware, metrics, stats, units
from pytest_gpucluster.limits import KNOWN_LABELS, TOPOLOGY, Limit, Thresholds, facts, peak_of
from pytest_gpucluster.metrics import Measurement, Metric
from pytest_gpucluster.wording import MESSAGE_CHARACTERS

Outcome = Literal["passed", "failed", "error"]
Status = Literal["passed", "failed", "error", "recorded"]


@dataclass(frozen=True, kw_only=True)
class Judged:
    """One metric with one set of labels, over all ranks.

    ``value`` is the worst rank's, which decides. ``margin`` is its distance from the limit as a share of the
    limit, negative when missed. ``peak_ratio`` is ``value`` over the data sheet peak, where one applies.
    ``advice`` is what to do in several lines, such as the YAML to add.
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
    values: Mapping[int, float]
    samples: Mapping[int, tuple[float, ...]]
    peak_ratio: float | None
    reason: str
    advice: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON types; numbers that JSON lacks become text."""
        return {
            "metric": self.metric,
            "unit": self.unit,
            "labels": dict(self.labels),
            "status": self.status,
            "value": _optional(self.value),
            "worst_rank": self.worst_rank,
            "limit": None if self.limit is None else self.limit.to_json(),
            "margin": _optional(self.margin),
            "median": _optional(self.median),
            "values": {str(rank): metrics.number_to_json(value) for rank, value in self.values.items()},
            "samples": {str(rank): metrics.numbers_to_json(values) for rank, values in self.samples.items()},
            "peak_ratio": _optional(self.peak_ratio),
            "reason": self.reason,
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


@dataclass(frozen=True, kw_only=True)
class _Court:
    """What is the same for all groups of one judgement."""

    world: Mapping[int, str]
    node_of: Mapping[int, int]
    limits: Thresholds
    sku: str | None
    gpu_name: str | None
    nodes: Mapping[int, list[int]] = field(init=False)

    def __post_init__(self) -> None:
        nodes: dict[int, list[int]] = {}
        for rank in sorted(self.world):
            nodes.setdefault(self.node_of[rank], []).append(rank)
        object.__setattr__(self, "nodes", nodes)

    def name(self, rank: int) -> str:
        return _one_line(self.world.get(rank, f"rank {rank}"))


def judge(
    by_rank: Mapping[int, Sequence[Measurement]],
    *,
    world: Mapping[int, str],
    node_of: Mapping[int, int],
    limits: Thresholds,
    sku: str | None,
    gpu_name: str | None,
) -> Judgement:
    """Judge all measurements of one test.

    ``world`` maps every rank to how it is called in messages, ``node_of`` to its node. ``sku`` is None where
    the GPU is unknown. That nothing at all was measured is for the caller to judge; it gives an empty, passed
    judgement here.

    Raises: KeyError if a rank of ``world`` is not in ``node_of``; MeasurementError if a metric is unknown.
    """
    court = _Court(world=world, node_of=node_of, limits=limits, sku=sku, gpu_name=gpu_name)
    groups: dict[tuple[str, tuple[tuple[str, str], ...]], list[tuple[int, Measurement]]] = {}
    for rank in sorted(by_rank):
        for measured in by_rank[rank]:
            key = measured.metric, tuple(sorted(measured.labels.items()))
            groups.setdefault(key, []).append((rank, measured))
    judged = tuple(_judge_group(metrics.known(name), group, court) for (name, _), group in groups.items())
    statuses = {item.status for item in judged}
    outcome: Outcome = "failed" if "failed" in statuses else "error" if "error" in statuses else "passed"
    decisive = [item for item in judged if item.status == outcome] if outcome != "passed" else []
    # The largest miss speaks for all of them.
    decisive.sort(key=lambda item: 0.0 if item.margin is None else item.margin)
    told = decisive + [item for item in judged if item.status == "error" and outcome == "failed"]
    return Judgement(
        outcome=outcome,
        message=_message(decisive),
        text=_text(told),
        measurements=judged,
    )


def _judge_group(metric: Metric, group: Sequence[tuple[int, Measurement]], court: _Court) -> Judged:
    labels = dict(group[0][1].labels)
    known = facts(world_size=len(court.world), nnodes=len(court.nodes), labels=labels)
    limit = _limit_for(metric, labels, court)
    peak = _peak(metric, known, court)
    recorded = all(measured.record_only for _, measured in group) or (
        limit is not None and limit.record_only is not None
    )
    bounds = None if recorded else limit

    def badness(value: float) -> float:
        # The larger, the worse. What cannot be judged is worse than anything that can.
        if not math.isfinite(value) or value < 0:
            return math.inf
        if bounds is not None:
            return -_margin(value, bounds)
        return value if metric.better == "lower" else -value

    values: dict[int, float] = {}
    samples: dict[int, tuple[float, ...]] = {}
    for rank, measured in group:
        if rank not in values or badness(measured.value) > badness(values[rank]):
            values[rank] = measured.value
            samples[rank] = measured.samples

    problems = list(_problems(metric, group, peak, court))
    advice = ""
    if not recorded and limit is None:
        problem, advice = _no_limit(metric, labels, known, court)
        problems.append((problem, None))

    worst = max(values, key=lambda rank: badness(values[rank]))
    value, reason = values[worst], ""
    margin: float | None = None
    status: Status = "passed"
    if bounds is not None and math.isfinite(badness(value)):
        margin = _margin(value, bounds)
    # A miss is found among the values that can be judged, also where the worst value cannot.
    missed = [rank for rank in values if bounds is not None and 0 < badness(values[rank]) < math.inf]
    if missed and bounds is not None:
        worst = max(missed, key=lambda rank: badness(values[rank]))
        value = values[worst]
        margin, status = _margin(value, bounds), "failed"
        others = f", and {len(missed) - 1} more ranks" if len(missed) > 2 else ""
        others = f", and {court.name(next(r for r in missed if r != worst))}" if len(missed) == 2 else others
        reason = f"{_miss(metric, value, bounds, labels)} on {court.name(worst)}{others}"
        reason += f"; also: {_first_few(problems)}" if problems else ""
    elif problems:
        status = "error"
        reason = f"{metric.name}{_labels(labels)}: {_first_few(problems)}"
        culprit = problems[0][1]
        if culprit is not None and culprit in values:
            worst, value = culprit, values[culprit]
            margin = _margin(value, bounds) if bounds is not None and math.isfinite(badness(value)) else None
    elif recorded:
        status = "recorded"
        if limit is not None and limit.record_only is not None:
            reason = f"recorded only: {limit.record_only} ({limit.origin})"
        else:
            reason = "recorded only, as the test asked"

    judgeable = [value for value in values.values() if math.isfinite(value)]
    return Judged(
        metric=metric.name,
        unit=metric.unit,
        labels=labels,
        status=status,
        value=value,
        worst_rank=worst,
        limit=bounds,
        margin=margin,
        median=stats.median(judgeable) if judgeable else None,
        values=values,
        samples=samples,
        peak_ratio=value / peak if peak is not None and math.isfinite(value) else None,
        reason=_one_line(reason),
        advice=advice,
    )


def _limit_for(metric: Metric, labels: Mapping[str, str], court: _Court) -> Limit | None:
    if court.sku is None:
        return None
    return court.limits.limit(
        metric.name, sku=court.sku, world_size=len(court.world), nnodes=len(court.nodes), labels=labels
    )


def _peak(metric: Metric, known: Mapping[str, str], court: _Court) -> float | None:
    # Across nodes the fabric carries the data, and one rank alone sends nothing: no link bounds either.
    if metric.peak in hardware.LINK_PEAKS and (known["nnodes"] != "1" or known["world_size"] == "1"):
        return None
    return peak_of(metric, court.limits.skus.get(court.sku or ""))


def _problems(
    metric: Metric, group: Sequence[tuple[int, Measurement]], peak: float | None, court: _Court
) -> Iterable[tuple[str, int | None]]:
    """Yield what keeps a group from passing, with the rank to blame where there is one."""
    counts: dict[int, int] = {}
    for rank, measured in group:
        counts[rank] = counts.get(rank, 0) + 1
        defect = metrics.problem(measured)
        if defect is not None:
            yield f"{defect} on {court.name(rank)}", rank
        elif peak is not None and metric.peak_is_bound and measured.value > peak:
            value, top = units.show_apart(measured.value, peak, metric.unit)
            yield (
                f"too fast to be true: {value} > {top}, the data sheet peak of {court.sku}, on {court.name(rank)}",
                rank,
            )
    missing = _missing(metric, counts, court)
    if missing:
        yield missing, None
    strangers = [rank for rank in counts if rank not in court.world]
    if strangers:
        yield f"measured by {_ranks(strangers)}, which is no part of this run", None
    repeated = [rank for rank, count in counts.items() if count > 1]
    if repeated:
        yield (
            f"measured {counts[repeated[0]]} times on {_ranks(repeated, court.name)}; a label must tell the"
            " values apart",
            None,
        )


def _missing(metric: Metric, counts: Mapping[int, int], court: _Court) -> str | None:
    if metric.scope == "rank":
        ranks = [rank for rank in sorted(court.world) if rank not in counts]
        return f"no value from {_ranks(ranks, court.name)} (with these labels)" if ranks else None
    if metric.scope == "node":
        silent = [node for node, ranks in court.nodes.items() if not any(rank in counts for rank in ranks)]
        if silent:
            first = court.name(court.nodes[silent[0]][0])
            more = f" and {len(silent) - 1} more nodes" if len(silent) > 1 else ""
            return f"no value from node {silent[0]} ({first}){more}"
    return None


def _no_limit(metric: Metric, labels: Mapping[str, str], known: Mapping[str, str], court: _Court) -> tuple[str, str]:
    """Say that nothing can be judged here, and show the YAML that would change it."""
    bound = "max" if metric.better == "lower" else "min"
    entry = [f"{bound}: <what you accept> {metric.unit}", "source: <where the figure comes from>"]
    entries = court.limits.entries(metric.name, sku=court.sku) if court.sku is not None else []
    when = _conditions_of(metric, labels, known, entries)
    if when:
        entry.insert(0, f"when: {{{', '.join(f'{name}: {text}' for name, text in when.items())}}}")
    gpu, name = _one_line(court.gpu_name or ""), court.sku or "my-gpu"
    pattern = []
    if court.sku in court.limits.skus:
        problem = f"no limit on {court.sku}" + (" for these conditions" if entries else "")
    else:
        pattern = [f"    nvml_name: {_single_quoted(_pattern(gpu or '<NVML name>'))}"]
        problem = f"unknown GPU {gpu!r}: no SKU matches it" if gpu else "the name of the GPU is not known"
        if court.sku is not None:
            problem = f"unknown SKU {court.sku!r}"
    lines = [
        f"{problem}. Add this to a file and pass it with --gpucluster-thresholds FILE:",
        "",
        "schema_version: 1",
        "skus:",
        f"  {_scalar(name)}:",
        *pattern,
        "    limits:",
        f"      {metric.name}:",
        *(f"        {'- ' if index == 0 else '  '}{line}" for index, line in enumerate(entry)),
    ]
    if entries:
        lines += ["", "Limits of this metric there apply to other conditions:"]
        lines += [f"  {limit.conditions()} ({limit.origin})" for limit in entries]
    return problem + "; the text below shows the YAML to add", "\n".join(lines)


def _conditions_of(
    metric: Metric, labels: Mapping[str, str], known: Mapping[str, str], entries: Sequence[Limit]
) -> dict[str, str]:
    """Choose the conditions that a new entry should have: what others depend on, and what tells values
    apart."""
    used = {condition.key for limit in entries for condition in limit.when}
    names = [name for name in ("world_size", "nnodes") if known[name].isdecimal()]
    if not (used.intersection(TOPOLOGY) or metric.peak in hardware.LINK_PEAKS):
        names = []
    when = {name: known[name] for name in names}
    for name in KNOWN_LABELS:
        # Only what the loader reads back as the same condition is worth showing.
        text = labels.get(name, "")
        amount = units.magnitude(text)
        size = amount is not None and amount[0] in ("amount of data", "number")
        if size if name == "size" else re.fullmatch(r"[A-Za-z][A-Za-z0-9_.-]*", text):
            when[name] = text
    return when


def _first_few(problems: Sequence[tuple[str, int | None]]) -> str:
    told = "; also: ".join(problem for problem, _ in problems[:3])
    return told + (f"; and {len(problems) - 3} more problems" if len(problems) > 3 else "")


def _margin(value: float, limit: Limit) -> float:
    """Return the distance to the nearer bound as a share of it; negative when missed.

    A bound of zero has no shares: there the distance itself counts.
    """
    margins = []
    if limit.min is not None:
        margins.append((value - limit.min) / (limit.min or 1.0))
    if limit.max is not None:
        margins.append((limit.max - value) / (limit.max or 1.0))
    return min(margins)


def _miss(metric: Metric, value: float, limit: Limit, labels: Mapping[str, str]) -> str:
    below = limit.min is not None and value < limit.min
    bound = limit.min if below else limit.max
    assert bound is not None  # a missed limit has the bound that was missed
    shown, needed = units.show_apart(value, bound, metric.unit)
    return f"{metric.name} {shown} {'<' if below else '>'} {needed}{_labels(labels)}"


def _message(decisive: Sequence[Judged]) -> str:
    if not decisive:
        return ""
    more = f"; {len(decisive) - 1} more" if len(decisive) > 1 else ""
    room = MESSAGE_CHARACTERS - len(more)
    reason = decisive[0].reason
    labels = _labels(decisive[0].labels)
    if len(reason) > room and len(labels) > 40:
        # The rank stands at the end, and matters more than a long label.
        reason = reason.replace(labels, labels[:38] + "…)", 1)
    return (reason if len(reason) <= room else reason[: room - 1] + "…") + more


def _text(told: Sequence[Judged]) -> str:
    blocks = [item.reason + (f" [limit: {item.limit.origin}]" if item.limit else "") for item in told]
    advice = dict.fromkeys(item.advice for item in told if item.advice)
    return "\n\n".join(["\n".join(blocks), *advice] if blocks else [])


def _labels(labels: Mapping[str, str]) -> str:
    return _one_line(f" ({', '.join(f'{name}={text}' for name, text in labels.items())})") if labels else ""


def _ranks(ranks: Sequence[int], name: Callable[[int], str] = "rank {}".format) -> str:
    more = f" and {len(ranks) - 1} more ranks" if len(ranks) > 1 else ""
    return name(ranks[0]) + more


def _one_line(text: str) -> str:
    # Labels and host names come from outside: they must not break a line or a terminal.
    return "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text)


def _scalar(text: str) -> str:
    return text if re.fullmatch(r"[A-Za-z0-9](?:[A-Za-z0-9_. -]*[A-Za-z0-9_.])?", text) else _single_quoted(text)


def _single_quoted(text: str) -> str:
    return "'" + _one_line(text).replace("'", "''") + "'"


def _pattern(nvml_name: str) -> str:
    return re.sub(r"([\\.^$*+?{}\[\]|()])", r"\\\1", nvml_name)


def _optional(value: float | None) -> float | str | None:
    return None if value is None else metrics.number_to_json(value)
