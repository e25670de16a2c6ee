from __future__ import annotations

import re
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
        pytest.param(
            {"labels": {"name": "x" * 500}},
            1,
            "nccl.all_reduce.busbw[name=" + "x" * 92 + "…",
            id="a label that is too long for a table",
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


def columns(*bodies: dict[str, Any]) -> list[str]:
    """The header and the rows, the status left out, each column apart from the next."""
    return [" | ".join(re.split(r" {2,}", line.strip())) for line in measurement_table(bodies).splitlines()]


def test_margin_and_share_of_the_peak_are_columns_where_there_are_any() -> None:
    bf16 = judged(metric="matmul.bf16.tflops", unit="TFLOPS", labels={}, margin=0.163, peak_ratio=0.447, worst_rank=0)
    recorded = judged(status="recorded", limit=None, margin=None, peak_ratio=0.0061)
    assert columns(bf16, recorded) == [
        "metric | value | limit | margin | of peak | worst rank",
        "passed | matmul.bf16.tflops | 442.1 TFLOPS | >= 380 TFLOPS | +16.3 % | 45 % | 0",
        "recorded | nccl.all_reduce.busbw[size=1 GB] | 442.1 GB/s | none | 0.61 % | 3",
    ]


@pytest.mark.parametrize(
    ("changes", "cell"),
    [
        pytest.param({"margin": 0.163}, "+16.3 %", id="kept"),
        pytest.param({"margin": -0.00001}, "-0.0 %", id="missed by a hair"),
        pytest.param({"margin": 0.2, "inconclusive": "12 % wide"}, "inconclusive", id="no basis for a verdict"),
        pytest.param({"margin": -3.0, "limit": {"min": None, "max": 0.0}}, None, id="a limit of zero has no shares"),
        pytest.param({"margin": "-Infinity"}, None, id="no number"),
        pytest.param({}, None, id="a journal of an earlier version"),
    ],
)
def test_a_margin_is_a_share_of_the_limit(changes: dict[str, Any], cell: str | None) -> None:
    header, row = (line.split(" | ") for line in columns(judged(**changes)))
    assert ("margin" in header) == (cell is not None)
    assert cell is None or row[4] == cell


def test_what_else_a_limit_demands_stands_beside_its_bound() -> None:
    demands = {"min": 380.0, "max": None, "min_ratio_to_median": 0.75, "expect_transport": ["NET/IB", "P2P"]}
    assert columns(judged(limit=demands))[1].split(" | ")[3] == ">= 380 GB/s, >= 75 % of median, over NET/IB or P2P"
    alone = judged(value="NaN", limit={"min": None, "max": None, "min_ratio_to_median": 0.75})
    assert columns(alone)[1].split(" | ")[3] == ">= 75 % of median"


def test_what_is_recorded_beside_a_judged_value_is_folded_and_counted() -> None:
    def row(metric: str, status: str, size: str) -> dict[str, Any]:
        return judged(metric=metric, status=status, labels={"size": size})

    rows = [
        row("nccl.all_reduce.busbw", "passed", "1 GB"),
        row("nccl.all_reduce.algbw", "recorded", "1 GB"),
        row("nccl.all_reduce.average_busbw", "recorded", "1 GB"),
        row("nccl.all_reduce.busbw", "recorded", "1 MB"),
        row("nccl.all_reduce.algbw", "recorded", "1 MB"),
        row("hbm.copy.bandwidth", "recorded", "1 GB"),
    ]
    lines = columns(*rows)
    assert [line.split(" | ")[1] for line in lines[1:-1]] == [
        "nccl.all_reduce.busbw[size=1 GB]",
        "nccl.all_reduce.busbw[size=1 MB]",
        "hbm.copy.bandwidth[size=1 GB]",
    ]
    assert lines[-1] == "3 recorded values left out here, beside others of the same measurement; the journal has them"
    assert columns(*rows[:2])[-1].startswith("1 recorded value left out here")


def test_where_nothing_is_judged_nothing_is_left_out() -> None:
    names = [f"nccl.all_reduce.{kind}" for kind in ("busbw", "algbw")]
    lines = columns(*(judged(metric=name, status="recorded") for name in names))
    assert [line.split(" | ")[1] for line in lines[1:]] == [f"{name}[size=1 GB]" for name in names]


@pytest.mark.parametrize("status", ["failed", "error"])
def test_what_failed_is_never_folded(status: str) -> None:
    rows = [judged(), judged(metric="nccl.all_reduce.algbw", status=status)]
    assert [line.split(" | ")[0] for line in columns(*rows)[1:]] == ["passed", status]


def test_a_label_cannot_act_on_the_terminal() -> None:
    assert "\x1b" not in measurement_table([judged(labels={"size": "\x1b[2J"})])


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
    assert " ".join(row.split()).startswith("error matmul.bf16.tflops NaN >= 700 TFLOPS")
    assert row.split()[-1] == "1"
