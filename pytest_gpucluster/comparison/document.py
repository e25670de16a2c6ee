"""A comparison as JSON, for programs."""

from __future__ import annotations

import json
import math
from typing import Any

from pytest_gpucluster.comparison.changes import Change, Pair
from pytest_gpucluster.comparison.compared import Comparison
from pytest_gpucluster.comparison.rule import Known

SCHEMA_VERSION = 1


def document(comparison: Comparison, *, old: dict[str, Any], new: dict[str, Any], exit_code: int) -> str:
    """Return the JSON text; ``old`` and ``new`` say which runs they are. docs/compare.md has what each key means."""
    content = {
        "schema_version": SCHEMA_VERSION,
        "answer": comparison.answer,
        "exit": exit_code,
        "allowed_ratio": comparison.allowed,
        "partial": comparison.partial,
        "old": old,
        "new": new,
        "obstacles": list(comparison.obstacles),
        "notes": list(comparison.notes),
        "counts": comparison.counts,
    }
    # A change a line, each made text by itself: of a thousand ranks all of them at once are large.
    changes = ",\n".join(f"  {json.dumps(_change(change), allow_nan=False)}" for change in comparison.changes)
    head = json.dumps(content, indent=1, allow_nan=False).removesuffix("\n}")
    return f'{head},\n "changes": [\n{changes}\n ]\n}}\n'


def _change(change: Change) -> dict[str, Any]:
    return {
        "test": change.nodeid,
        "criterion": change.criterion,
        "metric": change.metric or None,
        "labels": dict(change.labels),
        "unit": change.unit,
        "better": None if change.higher is None else "higher" if change.higher else "lower",
        "decides": change.decides,
        "kind": change.kind,
        "note": change.note,
        "values": [pair_to_json(pair) for pair in change.pairs],
    }


def pair_to_json(pair: Pair) -> dict[str, Any]:
    """Return one rank's change in plain JSON types; numbers that JSON lacks become text."""
    return {
        "kind": pair.kind,
        "rank": pair.rank,
        "old_rank": pair.old_rank,
        "matched_by": pair.by,
        "old": _known(pair.old),
        "new": _known(pair.new),
        "change_ratio": None if pair.change is None else _number(pair.change),
        "why": pair.why,
    }


def _known(known: Known | None) -> dict[str, Any] | None:
    if known is None:
        return None
    interval = [_number(known.low), _number(known.high)] if known.sampled else None
    return {"value": _number(known.value), "interval": interval}


def _number(value: float) -> float | str:
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
