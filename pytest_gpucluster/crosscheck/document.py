"""A crosscheck as JSON, for programs. docs/crosscheck.md has what each key means."""

from __future__ import annotations

import json
import math
from typing import Any

from pytest_gpucluster.crosscheck.compared import Compared, Crosscheck
from pytest_gpucluster.crosscheck.nccl_output import Output

SCHEMA_VERSION = 1


def document(found: Crosscheck, *, journal: str, outputs: tuple[Output, ...], exit_code: int) -> str:
    """Return the JSON text. Of nccl-tests' own files nothing but the figures is in it: they hold the environment."""
    content = {
        "schema_version": SCHEMA_VERSION,
        "answer": found.answer,
        "exit": exit_code,
        "beyond_ratio": found.beyond,
        "partial": found.partial,
        "journal": journal,
        "outputs": [
            {
                "origin": output.origin,
                "collective": output.collective,
                "ranks": output.ranks,
                "processes": output.processes,
                "hosts": list(output.hosts),
                "nccl": output.nccl,
                "wrong": _number(output.wrong),
            }
            for output in outputs
        ],
        "wrong": list(found.wrong),
        "unmatched": list(found.unmatched),
        "notes": list(found.notes),
        "sizes": [_size(row) for row in found.rows],
    }
    return json.dumps(content, indent=1, allow_nan=False) + "\n"


def _size(row: Compared) -> dict[str, Any]:
    point = row.point
    return {
        "collective": point.collective,
        "dtype": point.dtype,
        "size": point.size,
        "size_bytes": point.size_bytes,
        "world_size": point.ranks,
        "nnodes": point.nnodes,
        "kind": row.kind,
        "ours_gb_per_second": _number(row.ours),
        "nccl_tests_gb_per_second": _number(row.theirs),
        "difference_ratio": _number(row.difference),
        "why": row.why,
    }


def _number(value: float | None) -> float | str | None:
    if value is None or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
