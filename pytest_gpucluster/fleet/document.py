"""A fleet as JSON, for programs."""

from __future__ import annotations

import json
import math
from typing import Any

from pytest_gpucluster.fleet.matrix import Cell, Matrix
from pytest_gpucluster.fleet.outliers import Outlier

SCHEMA_VERSION = 1


def document(found: Matrix, *, exit_code: int) -> str:
    """Return the JSON text. docs/compare.md has what each key means."""
    content = {
        "schema_version": SCHEMA_VERSION,
        "exit": exit_code,
        "notes": list(found.notes),
        "tests": [{"test": test, "name": found.names[test]} for test in found.tests],
        "nodes": [
            {
                "node": node.name,
                "journal": str(node.answer.path),
                "run_id": node.answer.journal.run.run_id,
                "started_at": node.answer.journal.run.started_at,
                "verdict": node.verdict,
                "exit": node.exit,
                "reason": node.answer.journal.reason,
                "earlier": [
                    {"journal": str(answer.path), "verdict": answer.journal.verdict} for answer in node.earlier
                ],
                "cells": {test: _cell(found.cell(node.name, test)) for test in found.tests},
            }
            for node in found.fleet.nodes
        ],
        "outliers": [_outlier(outlier) for outlier in found.outliers],
        "drain": [{"node": each.node, "why": each.why} for each in found.drained],
        "without_answer": [{"node": each.node, "why": each.why} for each in found.without_answer],
        "left_out": [str(answer.path) for answer in found.fleet.joint],
    }
    return json.dumps(content, indent=1, allow_nan=False, ensure_ascii=True) + "\n"


def _cell(cell: Cell) -> dict[str, Any]:
    headline = cell.row.headline if cell.row is not None else None
    body: dict[str, Any] = {"outcome": cell.outcome}
    if cell.row is not None and cell.row.why:
        body["why"] = cell.row.why
    if headline is not None:
        body |= {
            "metric": headline.metric,
            "labels": dict(headline.labels),
            "value": _number(headline.value),
            "unit": headline.unit,
            "margin_ratio": _number(headline.margin),
        }
    return body


def _outlier(outlier: Outlier) -> dict[str, Any]:
    return {
        "node": outlier.node,
        "rank": outlier.rank,
        "test": outlier.nodeid,
        "metric": outlier.judged.metric,
        "labels": dict(outlier.judged.labels),
        "unit": outlier.judged.unit,
        "value": _number(outlier.value),
        "median": _number(outlier.median),
        "behind_ratio": _number(outlier.behind),
        "why": outlier.why,
    }


def _number(value: float | None) -> float | str | None:
    if value is None or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
