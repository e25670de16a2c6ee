"""Plain-text pieces for the terminal and for failure texts: aligned, and readable without colour."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pytest_gpucluster.reports.tables import percent
from pytest_gpucluster.units import show, show_apart
from pytest_gpucluster.wording import one_line, printable

_HEADER = ("", "metric", "value", "limit", "margin", "of peak", "worst rank")
# One long label of a test must not push the values of all others out of sight.
_METRIC_CHARACTERS = 120
# Columns that are left out where no row has anything in them.
_OPTIONAL = {"margin", "of peak"}


def measurement_table(measurements: Iterable[Mapping[str, Any]]) -> str:
    """Return one line for each judged measurement of a journal: status, metric, deciding value, limit, margin, share
    of the data sheet peak, worst rank.

    Of values of one kind with the same labels, those whose metric no limit judges anywhere in the table are left out
    beside the one whose metric is judged (algbw beside busbw); a last line says how many were.
    """
    told = list(measurements)
    shown = _without_siblings(told)
    rows = [_HEADER]
    for judged in shown:
        labels = ",".join(f"{key}={value}" for key, value in judged["labels"].items())
        name = printable(f"{judged['metric']}[{labels}]" if labels else judged["metric"])
        metric = one_line(name, _METRIC_CHARACTERS)
        value, limit = _value_and_limit(judged)
        peak = judged.get("peak_ratio")
        share = f"{show(100 * peak, '%', digits=2)}" if isinstance(peak, (int, float)) else ""
        rows.append((judged["status"], metric, value, limit, _margin(judged), share, _rank(judged["worst_rank"])))
    columns = [
        column for column, name in enumerate(_HEADER) if name not in _OPTIONAL or any(row[column] for row in rows[1:])
    ]
    widths = [max(len(row[column]) for row in rows) for column in columns]
    lines = [
        "  ".join(row[column].ljust(width) for column, width in zip(columns, widths, strict=True)).rstrip()
        for row in rows
    ]
    hidden = len(told) - len(shown)
    if hidden:
        values = "1 recorded value" if hidden == 1 else f"{hidden} recorded values"
        lines.append(f"{values} left out here, beside others of the same measurement; the journal has them")
    return "\n".join(lines)


def _without_siblings(measurements: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Leave out what is only recorded beside a value of the same family and labels whose metric is the judged one."""
    deciding = {each["metric"] for each in measurements if each["status"] != "recorded"}
    told = {_sibling_key(each) for each in measurements if each["metric"] in deciding}
    return [
        each
        for each in measurements
        if each["status"] != "recorded" or each["metric"] in deciding or _sibling_key(each) not in told
    ]


def _sibling_key(judged: Mapping[str, Any]) -> tuple[str, frozenset[tuple[str, str]]]:
    family = str(judged["metric"]).rpartition(".")[0]
    return family, frozenset((str(key), str(value)) for key, value in judged["labels"].items())


def _margin(judged: Mapping[str, Any]) -> str:
    """Return the margin; of a value that is no basis for a verdict, that it is none."""
    if judged.get("inconclusive"):
        return "inconclusive"
    margin, limit = judged.get("margin"), judged["limit"] or {}
    if not isinstance(margin, (int, float)) or 0 in (limit.get("min"), limit.get("max")):
        return ""  # none, or a distance: a limit of zero has no shares
    return percent(margin)


def _value_and_limit(judged: Mapping[str, Any]) -> tuple[str, str]:
    """Write both with as many digits as it takes to tell them apart: a limit missed by a hair is seen to be missed."""
    value, unit, limit = judged["value"], judged["unit"], judged["limit"] or {}
    bounds = [(sign, limit.get(key)) for key, sign in (("min", ">="), ("max", "<="))]
    others = []
    if limit.get("min_ratio_to_median") is not None:
        others.append(f">= {show(100 * limit['min_ratio_to_median'], '%')} of median")
    if limit.get("expect_transport"):
        others.append(f"over {' or '.join(limit['expect_transport'])}")
    if not isinstance(value, (int, float)):
        limits = [f"{sign} {show(bound, unit)}" for sign, bound in bounds if bound is not None]
        return str(value or "none"), ", ".join([*_joined(limits), *others]) or "none"
    shown, limits = show(value, unit), []
    for sign, bound in bounds:
        if bound is not None:
            apart, needed = show_apart(value, bound, unit)
            shown = max(shown, apart, key=len)
            limits.append(f"{sign} {needed}")
    return shown, ", ".join([*_joined(limits), *others]) or "none"


def _joined(limits: Sequence[str]) -> list[str]:
    return [" and ".join(limits)] if limits else []


def _rank(rank: object) -> str:
    return "" if rank is None else str(rank)
