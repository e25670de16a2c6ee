"""Values, limits and ranks as text: how sure a value is, and what explains it."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from pytest_gpucluster.journal import Journal, JudgedLimit, JudgedMetric, Run, TestResult
from pytest_gpucluster.reports import tables
from pytest_gpucluster.reports.tables import stopped_text
from pytest_gpucluster.sampling import Stopped

LIMIT = JudgedLimit(min=400.0, source="vendor", origin="thresholds.yaml:14:7")
SLOW = {"sm_clock_mhz": [1200, 1200, 1980], "power_watts": [500, 500, 500], "throttle": ["hw_thermal"]}
FAST = {"sm_clock_mhz": [1980, 1980, 1980], "power_watts": [700, 700, 700], "throttle": []}
BUSBW = JudgedMetric(
    metric="nccl.all_reduce.busbw",
    unit="GB/s",
    labels={"size": "1 GB"},
    status="passed",
    value=442.123,
    worst_rank=3,
    limit=LIMIT,
    margin=0.1005,
    values={0: 450.0, 3: 442.123},
    interval=(440.21, 443.94),
    intervals={0: (449.0, 451.0), 3: (440.21, 443.94)},
    peak_ratio=0.9825,
    telemetry={0: FAST, 3: SLOW},
)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (5e-05, "0.00005 TFLOPS"),
        (1e6, "1000000 TFLOPS"),
        (1e-9, "1e-09 TFLOPS"),
        (0.0, "0 TFLOPS"),
        (12345.6, "12346 TFLOPS"),
    ],
)
def test_small_and_large_values_are_written_out(value: float, text: str) -> None:
    assert tables.quantity(value, "TFLOPS") == text


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        pytest.param(
            {},
            "442.1 GB/s, 95 % interval 440.2 to 443.9 (limit >= 400 GB/s, margin +10.1 %, 98 % of peak, worst rank 3)",
            id="a sure value",
        ),
        pytest.param(
            {"interval": None, "peak_ratio": None},
            "442.1 GB/s (limit >= 400 GB/s, margin +10.1 %, worst rank 3)",
            id="without interval and peak",
        ),
        pytest.param(
            {"interval": (399.9996, 443.9), "margin": -0.000001, "status": "failed"},
            "442.1 GB/s, 95 % interval 399.9996 to 443.9 "
            "(FAILED, limit >= 400 GB/s, margin -0.0 %, 98 % of peak, worst rank 3)",
            id="an interval that ends a hair below the limit",
        ),
        pytest.param(
            {"inconclusive": "the interval is 12 % wide", "status": "failed"},
            "442.1 GB/s, 95 % interval 440.2 to 443.9 (FAILED, limit >= 400 GB/s, margin +10.1 %, 98 % of peak, "
            "worst rank 3, inconclusive: the interval is 12 % wide)",
            id="inconclusive",
        ),
        pytest.param(
            {"inconclusive": "12 % wide", "status": "error", "reason": "busbw is inconclusive: 12 % wide"},
            "442.1 GB/s, 95 % interval 440.2 to 443.9 (ERROR, limit >= 400 GB/s, margin +10.1 %, 98 % of peak, "
            "worst rank 3, busbw is inconclusive: 12 % wide)",
            id="what the reason says already is not said twice",
        ),
        pytest.param(
            {"ratio_to_median": 0.74996, "limit": replace(LIMIT, min_ratio_to_median=0.75), "interval": None},
            "442.1 GB/s (limit >= 400 GB/s, each rank >= 75 % of the others' median, margin +10.1 %, 98 % of peak, "
            "lowest rank 74.996 % of the others' median, worst rank 3)",
            id="a straggler by a hair",
        ),
        pytest.param(
            {"ratio_to_median": 1.0, "values": {3: 442.123}, "interval": None, "peak_ratio": 0.0052},
            "442.1 GB/s (limit >= 400 GB/s, margin +10.1 %, 0.52 % of peak, worst rank 3)",
            id="one rank is no straggler",
        ),
        pytest.param(
            {"limit": JudgedLimit(max=0.0), "value": 3.0, "margin": -3.0, "interval": None, "peak_ratio": None},
            "3 GB/s (limit <= 0 GB/s, worst rank 3)",
            id="a limit of zero has no shares",
        ),
    ],
)
def test_a_measurement_tells_how_sure_it_is(changes, text):
    assert tables.measurement_text(replace(BUSBW, **changes)) == text


@pytest.mark.parametrize(
    ("limit", "text"),
    [
        (None, "no limit"),
        (JudgedLimit(), "no limit"),
        (JudgedLimit(min_ratio_to_median=0.75), "each rank >= 75 % of the others' median"),
        (JudgedLimit(min=400.0, expect_transport=("NET/IB",)), ">= 400 GB/s, over NET/IB"),
        (JudgedLimit(max=400.0, expect_transport=("NET/IB", "P2P")), "<= 400 GB/s, over NET/IB or P2P"),
    ],
    ids=["none", "empty", "median alone", "a transport", "two transports"],
)
def test_a_limit_shows_all_that_it_demands(limit, text):
    assert tables.limit_text(replace(BUSBW, limit=limit)) == text


def test_the_telemetry_is_that_of_the_worst_rank():
    assert tables.worst_telemetry(BUSBW) == "rank 3: sm clock 1200 MHz (1200 to 1980), 500 W, throttle: hw_thermal"
    assert tables.worst_telemetry(replace(BUSBW, worst_rank=1)) == ""
    assert tables.worst_telemetry(replace(BUSBW, worst_rank=None)) == ""
    assert tables.worst_telemetry(replace(BUSBW, telemetry={})) == ""


def test_values_of_one_window_show_its_telemetry_once():
    algbw = replace(BUSBW, metric="nccl.all_reduce.algbw")
    other_size = replace(BUSBW, labels={"size": "8 GB"})
    assert [name for name, _ in tables.measured_pairs([BUSBW, algbw, other_size])] == [
        "nccl.all_reduce.busbw{size=1 GB}",
        "nccl.all_reduce.busbw{size=1 GB}.telemetry",
        "nccl.all_reduce.algbw{size=1 GB}",
        "nccl.all_reduce.busbw{size=8 GB}",
        "nccl.all_reduce.busbw{size=8 GB}.telemetry",
    ]


def test_a_failure_shows_each_ranks_clock_because_that_may_explain_it():
    failed = replace(BUSBW, status="failed", value=380.0, margin=-0.0525, reason="380 GB/s < 400 GB/s on rank 3")
    failed = replace(
        failed, values={0: 450.0, 3: 380.0}, interval=(379.0, 381.0), intervals={3: (379.0, 381.0)}, peak_ratio=None
    )
    result = TestResult(nodeid="t.py::test", outcome="failed", measurements=(failed,))
    journal = Journal(run=Run(run_id="r", started_at="", world_size=4))
    assert tables.rank_tables(result, journal).splitlines() == [
        "nccl.all_reduce.busbw{size=1 GB}: 380 GB/s, 95 % interval 379 to 381 "
        "(FAILED, limit >= 400 GB/s, margin -5.2 %, worst rank 3):",
        "  380 GB/s < 400 GB/s on rank 3",
        "  limit from thresholds.yaml:14:7 (vendor)",
        "  telemetry of rank 3: sm clock 1200 MHz (1200 to 1980), 500 W, throttle: hw_thermal",
        "  rank 3: 380 GB/s, 95 % interval 379 to 381, margin -5.2 %, sm clock 1200 MHz (1200 to 1980), "
        "throttle: hw_thermal",
        "  rank 0: 450 GB/s, margin +12.5 %, sm clock 1980 MHz, no throttle",
    ]


def test_the_rank_whose_interval_reaches_lowest_comes_first():
    unsure = replace(
        BUSBW, status="failed", values={0: 405.0, 1: 410.0}, intervals={0: (404.0, 406.0), 1: (390.0, 430.0)}
    )
    result = TestResult(nodeid="t.py::test", outcome="failed", measurements=(unsure,))
    rows = tables.rank_tables(result, Journal(run=Run(run_id="r", started_at=""))).splitlines()
    assert rows[-2].startswith("  rank 1: 410 GB/s, 95 % interval 390 to 430, margin -2.5 %")
    assert rows[-1].startswith("  rank 0: 405 GB/s")


def test_where_nothing_is_allowed_the_rank_with_most_comes_first():
    findings = JudgedMetric(
        metric="gpu.findings",
        unit="findings",
        status="failed",
        value=3.0,
        worst_rank=1,
        limit=JudgedLimit(max=0.0),
        values={0: 0.0, 1: 3.0, 2: 1.0},
    )
    result = TestResult(nodeid="t.py::test", outcome="failed", measurements=(findings,))
    rows = tables.rank_tables(result, Journal(run=Run(run_id="r", started_at=""))).splitlines()
    assert rows[-3:] == ["  rank 1: 3 findings", "  rank 2: 1 findings", "  rank 0: 0 findings"]


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"by": "interval", "seconds": 3.012}, "sure after 12 samples in 3.01 s: 0.62 % wide, 1 % is allowed"),
        (
            {"by": "interval", "seconds": 12.0, "extended": True},
            "sure after 12 samples in 12 s, extended: 0.62 % wide, 1 % is allowed",
        ),
        (
            {"by": "time", "seconds": 20.0, "width_ratio": 0.29, "extended": True},
            "time up after 12 samples in 20 s, extended: 29 % wide, 1 % is allowed",
        ),
        ({"by": "samples", "seconds": 0.0}, "no more to take, sure after 12 samples: 0.62 % wide, 1 % is allowed"),
        (
            {"by": "samples", "seconds": 0.0, "width_ratio": math.inf},
            "no more to take after 12 samples: Infinity % wide, 1 % is allowed",
        ),
    ],
    ids=["sure", "in the extension", "time up", "no more to take", "and not sure"],
)
def test_why_sampling_stopped_is_told(more, text):
    told = {"samples": 12, "width_ratio": 0.0062, "allowed_ratio": 0.01, **more}
    assert stopped_text(JudgedMetric(metric="m", stopped=Stopped(**told))) == text


def test_nothing_is_told_of_what_was_not_sampled():
    assert stopped_text(JudgedMetric(metric="m")) == ""
