"""Plain-text pieces for the terminal and for failure texts: aligned, readable without colour and at 80 columns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


def measurement_table(measurements: Iterable[Mapping[str, Any]]) -> str:
    """Return one line for each judged measurement of a journal: status, metric, deciding value, limit, worst rank."""
    rows = [("", "metric", "value", "limit", "worst rank")]
    for judged in measurements:
        labels = ",".join(f"{key}={value}" for key, value in judged["labels"].items())
        metric = f"{judged['metric']}[{labels}]" if labels else judged["metric"]
        value = _number(judged["value"], judged["unit"])
        rows.append((judged["status"], metric, value, _limit(judged), _rank(judged["worst_rank"])))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _number(value: object, unit: str) -> str:
    return f"{value:.4g} {unit}" if isinstance(value, (int, float)) else f"{value or 'none'}"


def _limit(body: Mapping[str, Any]) -> str:
    limit = body["limit"]
    if not isinstance(limit, dict):
        return "none"
    parts = [
        f"{sign} {limit[key]:.4g} {body['unit']}"
        for key, sign in (("min", ">="), ("max", "<="))
        if limit.get(key) is not None
    ]
    return " and ".join(parts) or "none"


def _rank(rank: object) -> str:
    return "" if rank is None else str(rank)
