"""Accepted runs with chosen values, for tests of floors."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import example_runs

from pytest_gpucluster.analysis.calibration import Source
from pytest_gpucluster.journal.journal import JournalBuilder

Lines = list[dict[str, Any]]
BF16 = "matmul.bf16.tflops"
BUSBW = "nccl.all_reduce.busbw"
LIMIT = {"min": 700.0, "max": None, "min_ratio_to_median": 0.929, "source": "the order", "origin": "limits.yaml:7:9"}


@functools.cache
def _accepted() -> Lines:
    return example_runs.lines("accepted")


def lines(*measurements: Mapping[str, Any], number: int = 1) -> Lines:
    """Return the lines of an accepted run whose tests have measured just this, and no other rates."""
    found = copy.deepcopy(_accepted())
    tests = [line for line in found if line["type"] == "test"]
    no_rate = next(one for one in tests[0]["measurements"] if one["metric"] == "gpu.findings")
    for test in tests:
        test["measurements"] = [no_rate]
    tests[0]["measurements"] = [no_rate, *measurements]
    found[0]["run_id"] = f"run-{number}"
    return found


def source(*measurements: Mapping[str, Any], number: int = 1) -> Source:
    """Return a run that has measured this."""
    return of_lines(lines(*measurements, number=number), number=number)


def of_lines(found: Lines, *, number: int = 1) -> Source:
    builder = JournalBuilder()
    for line in found:
        builder.add(line)
    return Source(path=f"run-{number}/journal.jsonl", sha256=f"{number:064x}", journal=builder.journal())


def measured(
    values: Sequence[float],
    metric: str = BF16,
    *,
    unit: str = "TFLOPS",
    limit: Mapping[str, Any] | None = LIMIT,
    **more: Any,
) -> dict[str, Any]:
    """Return a measurement as a journal has it: the value of each rank."""
    return {
        "metric": metric,
        "unit": unit,
        "labels": {"n": "16384"},
        "status": "passed" if limit else "recorded",
        "value": values[0],
        "worst_rank": 0,
        "values": {str(rank): value for rank, value in enumerate(values)},
        "limit": limit,
        **more,
    }
