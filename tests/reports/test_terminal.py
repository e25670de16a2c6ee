from __future__ import annotations

from typing import Any

import pytest

from pytest_gpucluster import metrics, thresholds
from pytest_gpucluster.judge import judge
from pytest_gpucluster.reports.terminal import measurement_table


def judged(**changes: Any) -> dict[str, Any]:
    body: dict[str, Any] = {
        "metric": "nccl.all_reduce.busbw",
        "unit": "GB/s",
        "labels": {"size": "1 GB"},
        "status": "passed",
        "value": 442.125,
        "worst_rank": 3,
        "limit": {"min": 380.0, "max": None, "source": "s", "origin": "thresholds.yaml:14:7"},
    }
    return {**body, **changes}


def cells(body: dict[str, Any]) -> list[str]:
    """The cells of the row of one measurement."""
    header, row = measurement_table([body]).splitlines()
    starts = [0, *(header.index(name) for name in ("metric", "value", "limit", "worst rank"))]
    return [row[start:end].strip() for start, end in zip(starts, [*starts[1:], None], strict=True)]


def test_the_columns_are_aligned_and_no_line_ends_in_blanks() -> None:
    bf16 = judged(metric="matmul.bf16.tflops", unit="TFLOPS", labels={}, status="failed", worst_rank=None)
    assert measurement_table([judged(), bf16]).splitlines() == [
        "        metric                            value         limit          worst rank",
        "passed  nccl.all_reduce.busbw[size=1 GB]  442.1 GB/s    >= 380 GB/s    3",
        "failed  matmul.bf16.tflops                442.1 TFLOPS  >= 380 TFLOPS",
    ]


@pytest.mark.parametrize(
    ("changes", "column", "text"),
    [
        pytest.param({"status": "recorded"}, 0, "recorded", id="the status"),
        pytest.param(
            {"labels": {"size": "1 GB", "dtype": "bf16"}},
            1,
            "nccl.all_reduce.busbw[size=1 GB,dtype=bf16]",
            id="two labels",
        ),
        pytest.param({"labels": {}}, 1, "nccl.all_reduce.busbw", id="no label"),
        pytest.param({"value": 0.0}, 2, "0 GB/s", id="zero is a value"),
        pytest.param({"value": None}, 2, "none", id="no value"),
        pytest.param({"value": "NaN"}, 2, "NaN", id="a value that is no number"),
        pytest.param({"limit": None}, 3, "none", id="no limit"),
        pytest.param({"limit": {"min": None, "max": 5.0}}, 3, "<= 5 GB/s", id="an upper limit"),
        pytest.param({"limit": {"min": 0.0, "max": None}}, 3, ">= 0 GB/s", id="a limit of zero"),
        pytest.param({"limit": {"min": 1.0, "max": 5.0}}, 3, ">= 1 GB/s and <= 5 GB/s", id="both limits"),
        pytest.param({"limit": {"min": None, "max": None}}, 3, "none", id="a limit without bounds"),
        pytest.param({"worst_rank": 0}, 4, "0", id="rank 0 is a rank"),
        pytest.param({"worst_rank": None}, 4, "", id="no rank"),
    ],
)
def test_each_column_says_what_was_found(changes: dict[str, Any], column: int, text: str) -> None:
    assert cells(judged(**changes))[column] == text


def test_without_measurements_only_the_header_is_left() -> None:
    assert measurement_table([]) == "  metric  value  limit  worst rank"


def test_what_the_judge_puts_on_record_can_be_shown() -> None:
    world = {0: "rank 0 (a)", 1: "rank 1 (a)"}
    found = judge(
        {
            0: [metrics.measurement("matmul.bf16.tflops", 731.0, unit="TFLOPS")],
            1: [metrics.measurement("matmul.bf16.tflops", float("nan"), unit="TFLOPS")],
        },
        world=world,
        node_of={0: 0, 1: 0},
        limits=thresholds.load(),
        sku="H100 SXM",
        gpu_name=None,
    )
    (row,) = measurement_table(m.to_json() for m in found.measurements).splitlines()[1:]
    assert row.split() == ["error", "matmul.bf16.tflops", "NaN", ">=", "700", "TFLOPS", "1"]
