"""Values, limits and ranks as text: how sure a value is, and what explains it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from pytest_gpucluster.journal.fields import JudgedLimit, JudgedMetric
from pytest_gpucluster.journal.journal import Journal
from pytest_gpucluster.journal.records import Run, TestResult
from pytest_gpucluster.metrics.sampling import Stopped
from pytest_gpucluster.reports import tables
from pytest_gpucluster.reports.tables import stopped_text

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


QUANTITIES: dict[tuple[float | None, float | None], str] = {
    (5e-05, None): "0.00005 GB/s",
    (1e-9, None): "1e-09 GB/s",
    (0.0, None): "0 GB/s",
    (442.123, None): "442.1 GB/s",
    (400.0, 400.0): "400 GB/s",
    (399.98, 400.0): "399.98 GB/s",
    (399.999999, 400.0): "399.999999 GB/s",
    (math.inf, None): "Infinity GB/s",
    (None, None): "no value",
}


def test_a_value_has_the_digits_that_distinguish_it_from_its_limit() -> None:
    assert {key: tables.quantity(key[0], "GB/s", compared_with=key[1]) for key in QUANTITIES} == QUANTITIES
    assert tables.quantity(math.nan, "GB/s") == "NaN GB/s"


INTERVAL = "442.1 GB/s, 95 % interval 440.2 to 443.9"
LIMITS = "limit >= 400 GB/s, margin +10.1 %, 98 % of peak, worst rank 3"
TEXTS: dict[str, tuple[dict[str, Any], str]] = {
    "a sure value": ({}, f"{INTERVAL} ({LIMITS})"),
    "without interval and peak": (
        {"interval": None, "peak_ratio": None},
        "442.1 GB/s (limit >= 400 GB/s, margin +10.1 %, worst rank 3)",
    ),
    "no value": (
        {
            **dict.fromkeys(("value", "limit", "margin", "worst_rank", "interval", "peak_ratio")),
            "status": "error",
            "reason": "rank 2: none",
        },
        "no value (ERROR, rank 2: none)",
    ),
    "an interval that ends a hair below the limit": (
        {"interval": (399.9996, 443.9), "margin": -0.000001, "status": "failed"},
        "442.1 GB/s, 95 % interval 399.9996 to 443.9 "
        "(FAILED, limit >= 400 GB/s, margin -0.0 %, 98 % of peak, worst rank 3)",
    ),
    "inconclusive": (
        {"inconclusive": "12 % wide", "status": "failed"},
        f"{INTERVAL} (FAILED, {LIMITS}, inconclusive: 12 % wide)",
    ),
    "what the reason has already is not repeated": (
        {"inconclusive": "12 % wide", "status": "error", "reason": "busbw is inconclusive: 12 % wide"},
        f"{INTERVAL} (ERROR, {LIMITS}, busbw is inconclusive: 12 % wide)",
    ),
    "a straggler by a hair": (
        {"ratio_to_median": 0.74996, "limit": replace(LIMIT, min_ratio_to_median=0.75), "interval": None},
        "442.1 GB/s (limit >= 400 GB/s, each rank >= 75 % of the others' median, margin +10.1 %, 98 % of peak, "
        "lowest rank 74.996 % of the others' median, worst rank 3)",
    ),
    "a limit of zero has no shares": (
        {"limit": JudgedLimit(max=0.0), "value": 3.0, "margin": -3.0, "interval": None, "peak_ratio": None},
        "3 GB/s (limit <= 0 GB/s, worst rank 3)",
    ),
}


def test_a_measurement_has_its_interval() -> None:
    found = {name: tables.measurement_text(replace(BUSBW, **changes)) for name, (changes, _) in TEXTS.items()}
    assert found == {name: text for name, (_, text) in TEXTS.items()}


def test_a_limit_shows_all_that_it_demands() -> None:
    limits = {
        ">= 400 GB/s, over NET/IB": JudgedLimit(min=400.0, expect_transport=("NET/IB",)),
        "<= 400 GB/s, over NET/IB or P2P": JudgedLimit(max=400.0, expect_transport=("NET/IB", "P2P")),
    }
    assert {tables.limit_text(replace(BUSBW, limit=limit)): limit for limit in limits.values()} == limits
    assert tables.limit_text(replace(BUSBW, limit=None)) == tables.limit_text(replace(BUSBW, limit=JudgedLimit()))


def rows_of(measured):
    result = TestResult(nodeid="t.py::test", outcome="failed", measurements=(measured,))
    return tables.rank_tables(result, Journal(run=Run(run_id="r", started_at=""))).splitlines()


def test_the_worst_rank_comes_first_by_its_interval_or_where_nothing_is_allowed_by_its_count():
    intervals = {0: (404.0, 406.0), 1: (390.0, 430.0)}
    rows = rows_of(replace(BUSBW, status="failed", values={0: 405.0, 1: 410.0}, intervals=intervals))
    assert rows[-2].startswith("  rank 1: 410 GB/s, 95 % interval 390 to 430, margin -2.5 %")
    assert rows[-1].startswith("  rank 0: 405 GB/s")
    none = {"limit": JudgedLimit(max=0.0), "values": {0: 0.0, 1: 3.0, 2: 1.0}, "intervals": {}, "telemetry": {}}
    rows = rows_of(replace(BUSBW, unit="findings", status="failed", value=3.0, worst_rank=1, **none))
    assert rows[-3:] == ["  rank 1: 3 findings", "  rank 2: 1 findings", "  rank 0: 0 findings"]


STOPPED: dict[str, tuple[dict[str, Any], str]] = {
    "sure": (
        {"by": "interval", "seconds": 3.012},
        "precise after 12 samples in 3.01 s: interval 0.62 %, allowed 1 %",
    ),
    "time up, in the extension": (
        {"by": "time", "seconds": 20.0, "width_ratio": 0.29, "extended": True},
        "time up after 12 samples in 20 s, extended: interval 29 %, allowed 1 %",
    ),
    "no more to take, and not sure": (
        {"by": "samples", "seconds": 0.0, "width_ratio": math.inf},
        "no more to take after 12 samples: interval Infinity %, allowed 1 %",
    ),
}


def test_why_sampling_stopped_is_shown() -> None:
    fields = {"samples": 12, "width_ratio": 0.0062, "allowed_ratio": 0.01}
    found = {
        name: stopped_text(JudgedMetric(metric="m", stopped=Stopped(**{**fields, **more})))
        for name, (more, _) in STOPPED.items()
    }
    assert found == {name: text for name, (_, text) in STOPPED.items()}
    assert stopped_text(JudgedMetric(metric="m")) == ""
