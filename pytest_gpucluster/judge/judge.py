"""The judge: measurements of all ranks are compared with the limits once, into a verdict of plain values.

The journal, the reports and the test's outcome use that verdict. It also states whether the ranks that miss a limit are
single GPUs, all GPUs of a node, or all ranks.

Nothing passes by default. A value that is NaN, a rank that did not measure, a metric without a limit, a GPU
without limits and a value above the data sheet peak are errors; a value beyond its limit is a failure, and
wins over errors, because a slow GPU must be named even where another rank sent no value.

A pass needs certainty: where a measurement has an interval, the end that is nearer to the limit decides. A value that
keeps the limit while its interval reaches beyond, or whose samples scatter too much, is inconclusive: a failure too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from pytest_gpucluster.judge import evidence
from pytest_gpucluster.judge.judged import JudgedMetric, cause_order
from pytest_gpucluster.judge.limits import Limit, Thresholds, facts, peak_of
from pytest_gpucluster.judge.misses import NOTHING, Miss, interval_text, margin, misses, missing_limit, straggler_ratios
from pytest_gpucluster.metrics import datasheets, measurement, stats, units
from pytest_gpucluster.metrics.catalogue import Metric
from pytest_gpucluster.metrics.measurement import WITHOUT_NVLS, Measurement
from pytest_gpucluster.text import MESSAGE_CHARACTERS, printable

Outcome = Literal["passed", "failed", "error"]
Status = Literal["passed", "failed", "error", "recorded"]


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """The verdict on all measurements of one test.

    ``message`` is one line of at most 200 characters, empty when passed; ``text`` has everything, in several
    lines.
    """

    outcome: Outcome
    message: str
    text: str
    measurements: tuple[JudgedMetric, ...]


def describe_nodes(
    ranks: Collection[int], *, nodes: Mapping[int, Sequence[int]], host_of: Mapping[int, str], noun: str
) -> str:
    """Return which nodes are affected as a whole, and where to look; empty where it is single ranks, or every rank.

    >>> nodes = {0: [0, 1], 1: [2, 3], 2: [4, 5]}
    >>> describe_nodes([3, 2], nodes=nodes, host_of={2: "gpu-b", 3: "gpu-b"}, noun="GPUs")
    'all 2 GPUs of gpu-b (look at the node)'

    Args:
        ranks: those that miss the limit.
        nodes: node -> its ranks, of the whole run.
        host_of: rank -> its host; a node without one is called by its number.
        noun: what a rank stands for: "GPUs", or "ranks" in a rehearsal.
    """
    among = set(ranks)
    whole = [node for node, own in nodes.items() if len(own) > 1 and among.issuperset(own)]
    if len(nodes) < 2 or not whole or len(among) == sum(len(own) for own in nodes.values()):
        return ""  # no node stands out
    hosts = [host_of.get(nodes[node][0], f"node {node}") for node in whole]
    if len(hosts) == 1:
        text = f"all {len(nodes[whole[0]])} {noun} of {hosts[0]} (look at the node)"
    else:
        more = hosts[1] if len(hosts) == 2 else f"{len(hosts) - 1} more nodes"
        text = f"all {noun} of {hosts[0]} and {more} (look at the nodes)"
    others = len(among) - sum(len(nodes[node]) for node in whole)
    return text + (f" and {others} more {noun}" if others else "")


_SHORT_LABELS = 11
"""Characters of labels that a one-line message keeps when it is too long."""


@dataclass(frozen=True, kw_only=True)
class _Context:
    """What is the same for all groups of one judgement."""

    world: Mapping[int, str]
    node_of: Mapping[int, int]
    limits: Thresholds
    sku: str | None
    gpu_name: str | None
    telemetry: Mapping[int, Mapping[str, Any]]
    host_of: Mapping[int, str]

    @cached_property
    def nodes(self) -> Mapping[int, list[int]]:
        return stats.grouped((self.node_of[rank], rank) for rank in sorted(self.world))

    def name(self, rank: int) -> str:
        return printable(self.world.get(rank, f"rank {rank}"))


def judge(
    by_rank: Mapping[int, Sequence[Measurement]],
    *,
    world: Mapping[int, str],
    node_of: Mapping[int, int],
    limits: Thresholds,
    sku: str | None,
    gpu_name: str | None,
    telemetry: Mapping[int, Mapping[str, Any]] = NOTHING,
    host_of: Mapping[int, str] = NOTHING,
    known: Callable[[str], Metric] = measurement.known,
) -> Judgement:
    """Judge all measurements of one test.

    ``world`` maps every rank to how it is called in messages, ``node_of`` to its node. ``sku`` is None where
    the GPU is unknown. ``telemetry`` is that of each rank's GPU during the test, which may explain a missed value;
    it decides nothing. ``host_of`` maps ranks to what their node is called in messages. ``known`` looks metrics up: a
    journal may be judged again where the site's own metrics are not registered. That nothing at all was measured is for
    the caller to judge; it gives an empty, passed judgement here.

    Raises: KeyError if a rank of ``world`` is not in ``node_of``; MeasurementError if a metric is unknown.
    """
    context = _Context(
        world=world,
        node_of=node_of,
        limits=limits,
        sku=sku,
        gpu_name=gpu_name,
        telemetry=telemetry,
        host_of=host_of,
    )
    groups = stats.grouped(
        ((measured.metric, tuple(sorted(measured.labels.items()))), (rank, measured))
        for rank in sorted(by_rank)
        for measured in by_rank[rank]
    )
    judged = tuple(_judge_group(known(name), group, context) for (name, _), group in groups.items())
    statuses = {item.status for item in judged}
    outcome: Outcome = "failed" if "failed" in statuses else "error" if "error" in statuses else "passed"
    decisive = [item for item in judged if item.status == outcome] if outcome != "passed" else []
    # The cause of the others comes first; of several, the largest miss.
    decisive.sort(key=lambda item: (cause_order(item), 0.0 if item.margin is None else item.margin))
    reported = decisive + [item for item in judged if item.status == "error" and outcome == "failed"]
    return Judgement(
        outcome=outcome,
        message=_message(decisive),
        text=_text(reported),
        measurements=judged,
    )


def judge_value(
    metric: str,
    value: float,
    *,
    unit: str,
    sku: str,
    world_size: int,
    nnodes: int,
    labels: Mapping[str, str],
    limits: Thresholds,
) -> JudgedMetric:
    """Judge one value that was measured elsewhere, as if each rank of such a run had measured it.

    ``labels`` are those that this suite gives. Without a label ``transport``, it is what the limit expects.

    Raises: MeasurementError if the metric is unknown or the value cannot be one; UnitError if the unit does not fit.
    """
    limit = limits.limit(metric, sku=sku, world_size=world_size, nnodes=nnodes, labels=labels)
    if limit is not None and limit.expect_transport is not None and "transport" not in labels:
        labels = {**labels, "transport": limit.expect_transport[0]}
    measured = measurement.measurement(metric, value, unit=unit, labels=labels)
    world = {rank: f"rank {rank}" for rank in range(world_size)}
    return judge(
        {rank: [measured] for rank in world},
        world=world,
        node_of={rank: rank * nnodes // world_size for rank in world},
        limits=limits,
        sku=sku,
        gpu_name=None,
    ).measurements[0]


def _judge_group(metric: Metric, group: Sequence[tuple[int, Measurement]], context: _Context) -> JudgedMetric:
    labels = dict(group[0][1].labels)
    known = facts(world_size=len(context.world), nnodes=len(context.nodes), labels=labels)
    limit = None
    if context.sku is not None:
        limit = context.limits.limit(
            metric.name, sku=context.sku, world_size=len(context.world), nnodes=len(context.nodes), labels=labels
        )
    peak = _peak(metric, known, context)
    recorded = all(measured.record_only for _, measured in group) or (
        limit is not None and limit.record_only is not None
    )
    bounds = None if recorded else limit

    def badness(measured: Measurement) -> float:
        # The larger, the worse. What cannot be judged is worse than anything that can.
        if not math.isfinite(measured.value) or measured.value < 0:
            return math.inf
        distance = None if bounds is None else margin(measured, bounds)
        if distance is not None:
            return math.inf if math.isnan(distance) else -distance
        return measured.value if metric.better == "lower" else -measured.value

    of: dict[int, Measurement] = {}
    for rank, measured in group:
        if rank not in of or badness(measured) > badness(of[rank]):
            of[rank] = measured

    problems = list(_problems(metric, group, peak, context))
    ratios = {} if problems else _ratios(metric, of)
    advice = ""
    of_other_algorithms = not recorded and WITHOUT_NVLS.items() <= labels.items()
    if of_other_algorithms:
        problems.append(("NVLS had failed and was switched off, so that this is no verdict about the hardware", None))
    if bounds is not None:
        problems += ((problem, None) for problem in _undecided(bounds, labels, ratios, of))
    elif not recorded:
        problem, advice = missing_limit(
            metric, labels, known, limits=context.limits, sku=context.sku, gpu_name=context.gpu_name
        )
        problems.append((problem, None))

    # Misses are looked for among the values that can be judged, even where the worst value cannot.
    judgeable = {rank: measured for rank, measured in of.items() if badness(measured) < math.inf}
    missed: list[Miss] = []
    if bounds is not None and not of_other_algorithms:
        missed = list(
            misses(
                metric, bounds, judgeable, ratios=ratios, transport=labels.get("transport"), telemetry=context.telemetry
            )
        )

    is_unsettled = bool(missed) and not problems and all(miss.inconclusive for miss in missed)
    if metric.scope == "group":
        missed = _of_groups(missed, judgeable, known, context)
    elif metric.scope == "node":
        missed = [_of_nodes(miss, context) for miss in missed]
    worst = max(of, key=lambda rank: badness(of[rank]))
    status: Status = "passed"
    reason = ""
    if missed:
        status = "failed"
        worst = next((miss.worst for miss in missed if miss.worst is not None), worst)
        first = next((miss for miss in missed if miss.by_rank), None)

        def place(miss: Miss) -> str:
            if metric.scope == "node":
                return _on_nodes(miss.by_rank, context)
            return _on_all(missed, of, context) if miss is first else _on(list(miss.by_rank), context)

        reason = "; also: ".join(f"{_describe(miss, labels)}{place(miss)}" for miss in missed)
        reason += f"; also: {_first_few(problems)}" if problems else ""
    elif problems:
        status = "error"
        reason = f"{metric.name}{_labels(labels)}: {_first_few(problems)}"
        culprit = problems[0][1]
        worst = culprit if culprit in of else worst
    elif recorded:
        status = "recorded"
        reason = _why_recorded(limit, of, context)

    distance = margin(of[worst], bounds) if bounds is not None and worst in judgeable else None
    if distance is None and bounds is not None and bounds.min_ratio_to_median is not None and worst in ratios:
        distance = ratios[worst] / bounds.min_ratio_to_median - 1
    inconclusive = of[worst].inconclusive
    if not inconclusive and any(miss.inconclusive and worst in miss.by_rank for miss in missed):
        inconclusive = f"{interval_text(of[worst])}, on both sides of the limit"
    finite = [measured.value for measured in of.values() if math.isfinite(measured.value)]
    return JudgedMetric(
        metric=metric.name,
        unit=metric.unit,
        labels=labels,
        status=status,
        value=of[worst].value,
        worst_rank=worst,
        interval=of[worst].interval,
        limit=bounds,
        margin=distance,
        median=stats.median(finite) if finite else None,
        mean=stats.mean(finite) if finite else None,
        ratio_to_median=min(ratios.values(), default=None),
        values={rank: measured.value for rank, measured in of.items()},
        samples={rank: measured.samples for rank, measured in of.items()},
        intervals={rank: measured.interval for rank, measured in of.items() if measured.interval is not None},
        telemetry={rank: measured.telemetry for rank, measured in of.items() if measured.telemetry},
        inconclusive=printable(inconclusive),
        stopped=of[worst].stopped,
        peak_ratio=of[worst].value / peak if peak is not None and math.isfinite(of[worst].value) else None,
        reason=printable(reason),
        unsettled=is_unsettled,
        misses={rank: printable(text) for miss in missed for rank, text in miss.by_rank.items()},
        advice=advice,
        evidence=evidence.compare(of[worst].value, bounds, context.limits) if bounds and worst in judgeable else "",
    )


_ALIKE = 0.9
"""Ranks of a group work at one rate if theirs differ by less; this suite's rule."""


def _of_groups(
    missed: Iterable[Miss], of: Mapping[int, Measurement], known: Mapping[str, str], context: _Context
) -> list[Miss]:
    """Extend each miss to the ranks that work at this rate together, of the node or of all."""
    found, taken, world = [], set[int](), list(context.world)
    for miss in missed:
        texts: dict[int, str] = {}
        for rank, text in miss.by_rank.items():
            if len(texts) == len(of):
                break  # all have joined
            groups = (1, context.nodes.get(context.node_of.get(rank, -1), [])), (len(context.nodes), world)
            where = known["nnodes"], known["world_size"]
            group = next((each for nnodes, each in groups if where == (str(nnodes), str(len(each)))), [])
            alike = [member for member in group if member in of and _alike(of[rank].value, of[member].value)]
            for member in (rank, *alike):
                texts.setdefault(member, miss.by_rank.get(member, f"with {context.name(rank)}: {text}"))
        own = {rank: text for rank, text in texts.items() if rank not in taken}
        taken.update(own)
        if own and miss.worst is not None and miss.worst not in own:
            worst = next(iter(own))
            found.append(replace(miss, by_rank=own, text=own[worst], why="", worst=worst))
        elif own or not miss.by_rank:
            found.append(replace(miss, by_rank=own))
    return found


def _of_nodes(miss: Miss, context: _Context) -> Miss:
    """Extend a miss of what a rank has measured for its node to all ranks of it: none of its GPUs is the culprit."""
    texts: dict[int, str] = {}
    for rank, text in miss.by_rank.items():  # the worst first
        for member in context.nodes.get(context.node_of.get(rank, -1), ()):
            texts.setdefault(member, text)
    return replace(miss, by_rank=texts)


def _alike(one: float, other: float) -> bool:
    return min(one, other) >= _ALIKE * max(one, other)


def _ratios(metric: Metric, of: Mapping[int, Measurement]) -> dict[int, float]:
    """Compare every rank with the others, where there are others and one direction is better."""
    if metric.better == "none" or metric.scope == "world" or len(of) < 2:
        return {}
    return straggler_ratios({rank: measured.value for rank, measured in of.items()}, metric.better)


def _undecided(
    limit: Limit, labels: Mapping[str, str], ratios: Mapping[int, float], of: Mapping[int, Measurement]
) -> Iterable[str]:
    """Yield what a limit demands and the measurements do not show."""
    if limit.expect_transport is not None and "transport" not in labels:
        expected = " or ".join(limit.expect_transport)
        why = next((str(text) for one in of.values() if (text := one.telemetry.get("transport"))), "")
        yield (
            f"no label states which transport carries it, and the limit expects {expected} ({limit.origin})"
            + (f": {why}" if why else "")
        )
    if limit.min is None and limit.max is None and not ratios:
        yield (
            "the limit is only a ratio to the other ranks, and there is no other rank to compare with; add a min or max"
            f" at {limit.origin}"
        )


def _why_recorded(limit: Limit | None, of: Mapping[int, Measurement], context: _Context) -> str:
    reason = "recorded only, as the test asked"
    if limit is not None and limit.record_only is not None:
        reason = f"recorded only: {limit.record_only} ({limit.origin})"
    noisy = [rank for rank, measured in of.items() if measured.inconclusive]
    if noisy:
        reason += f"; inconclusive: {of[noisy[0]].inconclusive} on {_ranks(noisy, context.name)}"
    return reason


def _peak(metric: Metric, known: Mapping[str, str], context: _Context) -> float | None:
    # Across nodes the fabric carries the data, and one rank alone sends nothing: no link bounds either.
    if metric.peak in datasheets.LINK_PEAKS and (known["nnodes"] != "1" or known["world_size"] == "1"):
        return None
    return peak_of(metric, context.limits.skus.get(context.sku or ""))


def _problems(
    metric: Metric, group: Sequence[tuple[int, Measurement]], peak: float | None, context: _Context
) -> Iterable[tuple[str, int | None]]:
    """Yield what keeps a group from passing, with the culprit's rank where there is one."""
    counts: dict[int, int] = {}
    for rank, measured in group:
        counts[rank] = counts.get(rank, 0) + 1
        defect = measurement.problem(measured)
        if defect is not None:
            yield f"{defect} on {context.name(rank)}", rank
        elif peak is not None and metric.peak_is_bound and measured.value > peak:
            value, top = units.show_apart(measured.value, peak, metric.unit)
            yield (
                f"too fast to be true: {value} > {top}, the data sheet peak of {context.sku}, on {context.name(rank)}",
                rank,
            )
    missing = _missing(metric, counts, context)
    if missing:
        yield missing, None
    strangers = [rank for rank in counts if rank not in context.world]
    if strangers:
        yield f"measured by {_ranks(strangers)}, which is no part of this run", None
    repeated = [rank for rank, count in counts.items() if count > 1]
    if repeated:
        yield (
            f"measured {counts[repeated[0]]} times on {_ranks(repeated, context.name)}; a label must distinguish"
            " the values",
            None,
        )


def _missing(metric: Metric, counts: Mapping[int, int], context: _Context) -> str | None:
    if metric.scope in ("rank", "group"):
        ranks = [rank for rank in sorted(context.world) if rank not in counts]
        return f"no value from {_ranks(ranks, context.name)} (with these labels)" if ranks else None
    if metric.scope == "node":
        silent = [node for node, ranks in context.nodes.items() if not any(rank in counts for rank in ranks)]
        if silent:
            first = context.name(context.nodes[silent[0]][0])
            more = f" and {len(silent) - 1} more nodes" if len(silent) > 1 else ""
            return f"no value from node {silent[0]} ({first}){more}"
    return None


def _first_few(problems: Sequence[tuple[str, int | None]]) -> str:
    first = "; also: ".join(problem for problem, _ in problems[:3])
    return first + (f"; and {len(problems) - 3} more problems" if len(problems) > 3 else "")


def _message(decisive: Sequence[JudgedMetric]) -> str:
    if not decisive:
        return ""
    more = f"; {len(decisive) - 1} more" if len(decisive) > 1 else ""
    room = MESSAGE_CHARACTERS - len(more)
    reason = decisive[0].reason
    labels = _labels(decisive[0].labels)
    if len(reason) > room and len(labels) > _SHORT_LABELS:
        # The rank stands at the end, and matters more than a long label.
        reason = reason.replace(labels, labels[:_SHORT_LABELS] + "…)")
    if len(reason) > room:  # what explains it matters less than where it is
        text, on, place = reason.partition("; also: ")[0].rpartition(" on ")
        kept = room - len(on) - len(place) - 1
        reason = f"{text[:kept]}…{on}{place}" if on and 0 < kept < len(text) else reason
    return (reason if len(reason) <= room else reason[: room - 1] + "…") + more


def _text(reported: Sequence[JudgedMetric]) -> str:
    blocks = [
        item.reason
        + (f" [limit: {item.limit.origin}]" if item.limit else "")
        + (f" ({item.evidence})" if item.evidence else "")
        for item in reported
    ]
    advice = dict.fromkeys(item.advice for item in reported if item.advice)
    return "\n\n".join(["\n".join(blocks), *advice] if blocks else [])


def _describe(miss: Miss, labels: Mapping[str, str]) -> str:
    return f"{miss.text}{_labels(labels)}" + (f": {miss.why}" if miss.why else "")


def _labels(labels: Mapping[str, str]) -> str:
    return printable(f" ({', '.join(f'{name}={text}' for name, text in labels.items())})") if labels else ""


def _on_all(missed: Iterable[Miss], of: Mapping[int, Measurement], context: _Context) -> str:
    """Return the place of a first miss: with the ranks at its worst rate that miss in another way, for a few of a node
    would be accused where all of it misses; and the worst by its name where no other one is near."""
    first, *later = [list(miss.by_rank) for miss in missed if miss.by_rank]
    worst = of[first[0]].value
    ranks = first + [rank for more in later for rank in more if _alike(of[rank].value, worst)]
    place, alone = _on(ranks, context), _on(ranks[:1], context)
    if len(ranks) < 3 or place.startswith(alone) or any(_alike(of[rank].value, worst) for rank in ranks[1:]):
        return place
    return f"{alone}, and {len(ranks) - 1} more ranks"


def _on_nodes(ranks: Iterable[int], context: _Context) -> str:
    nodes = dict.fromkeys(context.node_of[rank] for rank in ranks)
    hosts = [printable(context.host_of.get(context.nodes[node][0], f"node {node}")) for node in nodes]
    if len(hosts) == len(context.nodes) > 2:
        return f" on all {len(hosts)} nodes: look at what they share"
    more = f", and {len(hosts) - 2} more nodes" if len(hosts) > 2 else ""
    return f" on {' and '.join(hosts[:2])}{more}" if hosts else ""


def _on(ranks: Sequence[int], context: _Context) -> str:
    if not ranks:
        return ""
    noun = "ranks" if context.gpu_name is None else "GPUs"

    def whole_nodes(some: Sequence[int]) -> str:
        return printable(describe_nodes(some, nodes=context.nodes, host_of=context.host_of, noun=noun))

    all_of = whole_nodes(ranks)
    if all_of and not {*ranks}.issuperset(context.nodes.get(context.node_of.get(ranks[0], -1), ())):
        return f" on {context.name(ranks[0])}, and {whole_nodes(ranks[1:])}"  # the worst is none of these nodes'
    if all_of:
        return f" on {all_of}"
    if len(ranks) == len(context.world) > 2:
        return f" on all {len(ranks)} ranks: look at what they share"
    others = f", and {context.name(ranks[1])}" if len(ranks) == 2 else ""
    others = f", and {len(ranks) - 1} more ranks" if len(ranks) > 2 else others
    return f" on {context.name(ranks[0])}{others}"


def _ranks(ranks: Sequence[int], name: Callable[[int], str] = "rank {}".format) -> str:
    more = f" and {len(ranks) - 1} more ranks" if len(ranks) > 1 else ""
    return name(ranks[0]) + more
