"""Accepted runs with chosen values, for tests of floors."""

import copy
import functools

import example_runs
from journal_lines import journal_of

from pytest_gpucluster.analysis.calibration import Source

BF16 = "matmul.bf16.tflops"
BUSBW = "nccl.all_reduce.busbw"
LIMIT = {"min": 700.0, "max": None, "min_ratio_to_median": 0.929, "source": "the order", "origin": "limits.yaml:7:9"}


@functools.cache
def _accepted():
    return example_runs.lines("accepted")


def lines(*measurements, number=1):
    """Return the lines of an accepted run whose tests have measured just this, and no other rates."""
    found = copy.deepcopy(_accepted())
    tests = [line for line in found if line["type"] == "test"]
    no_rate = next(one for one in tests[0]["measurements"] if one["metric"] == "gpu.findings")
    for test in tests:
        test["measurements"] = [no_rate]
    tests[0]["measurements"] = [no_rate, *measurements]
    found[0]["run_id"] = f"run-{number}"
    return found


def source(*measurements, number=1):
    """Return a run that has measured this."""
    return of_lines(lines(*measurements, number=number), number=number)


def of_lines(found, *, number=1):
    return Source(path=f"run-{number}/journal.jsonl", sha256=f"{number:064x}", journal=journal_of(found))


def measured(values, metric=BF16, *, unit="TFLOPS", limit=LIMIT, **more):
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
