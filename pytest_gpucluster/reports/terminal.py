"""Plain-text pieces for the terminal and for failure texts: aligned, readable without colour and at 80 columns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pytest_gpucluster.units import show, show_apart


def measurement_table(measurements: Iterable[Mapping[str, Any]]) -> str:
    """Return one line for each judged measurement of a journal: status, metric, deciding value, limit, worst rank."""
    rows = [("", "metric", "value", "limit", "worst rank")]
    for judged in measurements:
        labels = ",".join(f"{key}={value}" for key, value in judged["labels"].items())
        metric = f"{judged['metric']}[{labels}]" if labels else judged["metric"]
        value, limit = _value_and_limit(judged)
        rows.append((judged["status"], metric, value, limit, _rank(judged["worst_rank"])))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _value_and_limit(judged: Mapping[str, Any]) -> tuple[str, str]:
    """Write both with as many digits as it takes to tell them apart: a limit missed by a hair is seen to be missed."""
    value, unit = judged["value"], judged["unit"]
    bounds = [(sign, (judged["limit"] or {}).get(key)) for key, sign in (("min", ">="), ("max", "<="))]
    if not isinstance(value, (int, float)):
        limits = [f"{sign} {show(bound, unit)}" for sign, bound in bounds if bound is not None]
        return str(value or "none"), " and ".join(limits) or "none"
    shown, limits = show(value, unit), []
    for sign, bound in bounds:
        if bound is not None:
            apart, limit = show_apart(value, bound, unit)
            shown = max(shown, apart, key=len)
            limits.append(f"{sign} {limit}")
    return shown, " and ".join(limits) or "none"


def _rank(rank: object) -> str:
    return "" if rank is None else str(rank)
