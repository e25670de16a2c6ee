"""``gpucluster thresholds explain`` and ``judge``: which limit decides; values measured elsewhere judged by limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from pytest_gpucluster.cli.command import (
    DONE,
    NEGATIVE,
    USAGE,
    CommandError,
    complain,
    load_limits,
    print_paragraph,
)
from pytest_gpucluster.errors import MeasurementError
from pytest_gpucluster.judge import evidence
from pytest_gpucluster.judge.evidence import Support
from pytest_gpucluster.judge.judge import judge_value
from pytest_gpucluster.judge.judged import JudgedMetric
from pytest_gpucluster.judge.limits import Limit, Thresholds, demand, explain
from pytest_gpucluster.metrics import measurement, units
from pytest_gpucluster.metrics.units import did_you_mean
from pytest_gpucluster.text import one_line, printable


def explain_sku(sku: str, names: Sequence[str], files: Sequence[Path], known: Mapping[str, str]) -> int:
    """Print the limits of a SKU, and return the exit code.

    Args:
        sku: its name.
        names: of metrics; none means all that have an entry.
        files: that override the shipped limits.
        known: facts of the run and labels of the measurement.
    """
    limits = load_limits(files)
    if sku not in limits.skus:
        raise _unknown_sku(sku, limits)
    code = DONE
    conditions = ", ".join(f"{key} {value}" for key, value in known.items())
    _print(0, f"{sku}: {conditions or 'of any topology'}")
    for metric in _select_metrics(names, limits.metrics):
        decided = _explain_metric(limits, metric, sku=sku, known=known, with_others=bool(names))
        code = max(code, DONE if decided or not names else NEGATIVE)
    return code


def _explain_metric(limits: Thresholds, metric: str, *, sku: str, known: Mapping[str, str], with_others: bool) -> bool:
    """Print the entries for a metric; return whether one decides, at least for some conditions."""
    entries = explain(limits, metric, sku=sku, known=known)
    deciding = [entry for entry in entries if entry.effect.startswith("decides")]
    if not with_others and not deciding:
        return False
    _print(0, metric)
    if not entries:
        _print(2, "no entry: a measured value without one is an error, never a pass")
    for entry in entries if with_others else deciding:
        says = entry.effect if entry.why == "" else f"{entry.effect} {entry.why}"
        if entry.effect in ("does not apply", "is overruled"):
            says = f"{entry.effect}: {entry.why}"
        _print(2, f"{entry.limit.origin} {says}: {demand(entry.limit, entry.limit.unit)}")
        if with_others:
            _print(4, f"when {entry.limit.conditions()}")
        _print(4, f"source: {entry.limit.source}" if entry.limit.source else f"reason: {entry.limit.record_only}")
        support = evidence.support_of(entry.limit, limits)
        if support is not None and entry.limit.record_only is None:
            _print(4, f"published: {_published_text(entry.limit, support)}")
    if entries and not deciding:
        _print(2, "none of them applies: such a value is an error, never a pass")
    return bool(deciding)


def _published_text(limit: Limit, support: Support) -> str:
    """Return the published values for a limit, and the loss that would pass."""
    unit, parts = limit.unit, []
    if support.healthy and support.typical is not None:
        ends = f"{units.show(support.healthy[0], unit)} to {units.show(support.healthy[-1], unit)}"
        best = ", the best of shapes" if support.best_only else ""
        parts.append(f"{len(support.healthy)} healthy, {ends}, median {units.show(support.typical, unit)}{best}")
    if support.faulty:
        parts.append(f"{len(support.faulty)} faulty, up to {units.show(support.faulty[-1], unit)}")
    loss = support.uniform_loss(limit)
    if loss is not None:
        parts.append(f"a uniform loss of {100 * loss:.0f} % passes")
    return "; ".join(parts)


def _unknown_sku(sku: str, limits: Thresholds) -> CommandError:
    known = ", ".join(limits.skus)
    return CommandError(USAGE, f"--sku {sku}: no such SKU; known are {known}{did_you_mean(sku, limits.skus)}")


def _select_metrics(asked: Sequence[str], known_names: Sequence[str]) -> list[str]:
    """Return the selected metrics, in the order of the files.

    Raises:
        CommandError: an unknown one.
    """
    if not asked:
        return list(dict.fromkeys(known_names))
    found: list[str] = []
    for name in asked:
        begin = [each for each in known_names if each == name or (name.endswith(".") and each.startswith(name))]
        try:
            found += begin or [measurement.known(name).name]
        except MeasurementError as error:
            raise CommandError(USAGE, one_line(str(error), 300)) from error
    return list(dict.fromkeys(found))


def _print(indent: int, text: str) -> None:
    print_paragraph(text, first=" " * indent, rest=" " * (indent + 2))


MISSED, NOT_JUDGED = 1, 10
"""Exit codes; the first of them that any value has. A missed limit wins over a value that nothing judges."""


def judge_values(
    values: Sequence[tuple[str, str]],
    *,
    sku: str,
    world_size: int,
    nodes: int,
    labels: Mapping[str, str],
    files: Sequence[Path] = (),
) -> int:
    """Print a line for each value, with its limit, margin and evidence, and return the exit code.

    Args:
        values: metric and quantity, as "51.5 TFLOPS".
        sku: its name.
        world_size: GPUs that took part.
        nodes: of these GPUs.
        labels: as in the table of evidence.
        files: that override the shipped limits.

    Raises: ThresholdsError: a file of limits is wrong.
    """
    limits = load_limits(files)
    if sku not in limits.skus and sku not in {row.sku for row in evidence.published()}:
        raise _unknown_sku(sku, limits)
    if world_size < nodes:
        raise CommandError(USAGE, f"{world_size} GPUs on {nodes} nodes: fewer GPUs than nodes")
    read: list[tuple[str, float, str]] = []
    for name, text in values:
        try:
            metric = measurement.known(name)
            value = units.parse(text, like=metric.unit or None).to(metric.unit)
            if not value > 0:
                raise MeasurementError(f"{text} is not above zero")
        except MeasurementError as error:
            raise CommandError(USAGE, f"{name}={text}: {one_line(str(error), 300)}") from error
        read.append((name, value, metric.unit))
    codes = set()
    for name, value, unit in read:
        judged = judge_value(
            name,
            value,
            unit=unit,
            sku=sku,
            world_size=world_size,
            nnodes=nodes,
            labels=evidence.as_measured(name, labels),
            limits=limits,
        )
        code, line = _judged_line(judged, unit)
        codes.add(code)
        print(printable(line))
        for label in evidence.unused(name, labels, limits, sku):
            complain(f"note: no limit for {name} on {sku} uses the label {label}", DONE)
    return next((code for code in (MISSED, NOT_JUDGED) if code in codes), DONE)


def _judged_line(judged: JudgedMetric, unit: str) -> tuple[int, str]:
    begin = f"{judged.metric} {units.show(judged.value or 0.0, unit)}"
    limit = judged.limit
    if limit is None:
        return NOT_JUDGED, f"NOT JUDGED  {begin}: {one_line(judged.reason, 300)}"
    margin = "" if judged.margin is None else f", margin {100 * judged.margin:+.1f} %"
    why = f": {one_line(judged.reason, 300)}" if judged.status == "error" else ""
    published = judged.evidence or "nothing comparable is published"
    word = "PASSED" if judged.status == "passed" else "MISSED"
    return (
        DONE if judged.status == "passed" else MISSED,
        f"{word:<10}  {begin}: {demand(limit, unit)}{margin}; {published} [{limit.origin}]{why}",
    )
