"""Values, limits, ranks, telemetry and culprits as text: how sure a value is, and what explains it."""

import math
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from pytest_gpucluster.journal.journal import Journal
from pytest_gpucluster.journal.records import Cluster, RankPlace, Run, TestResult
from pytest_gpucluster.judge.judged import JudgedLimit, JudgedMetric
from pytest_gpucluster.metrics.sampling import Stopped
from pytest_gpucluster.node.health import telemetry
from pytest_gpucluster.reports import tables
from pytest_gpucluster.reports.failures import advice, failure_text
from pytest_gpucluster.reports.summary import row_of
from pytest_gpucluster.reports.tables import (
    clock_text,
    headline_text,
    limit_text,
    stopped_text,
    telemetry_of_test,
    telemetry_text,
    value_text,
)

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

QUANTITIES = {
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


def test_a_value_has_the_digits_that_distinguish_it_from_its_limit():
    assert {key: tables.quantity(key[0], "GB/s", compared_with=key[1]) for key in QUANTITIES} == QUANTITIES
    assert tables.quantity(math.nan, "GB/s") == "NaN GB/s"


INTERVAL = "442.1 GB/s, 95 % interval 440.2 to 443.9"
LIMITS = "limit >= 400 GB/s, margin +10.1 %, 98 % of peak, worst rank 3"
TEXTS = {
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


def test_a_measurement_has_its_interval():
    found = {name: tables.measurement_text(replace(BUSBW, **changes)) for name, (changes, _) in TEXTS.items()}
    assert found == {name: text for name, (_, text) in TEXTS.items()}


def test_a_limit_shows_all_that_it_demands():
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


STOPPED = {
    "sure": ({"by": "interval", "seconds": 3.012}, "precise after 12 samples in 3.01 s: interval 0.62 %, allowed 1 %"),
    "time up, in the extension": (
        {"by": "time", "seconds": 20.0, "width_ratio": 0.29, "extended": True},
        "time up after 12 samples in 20 s, extended: interval 29 %, allowed 1 %",
    ),
    "no more to take, and not sure": (
        {"by": "samples", "seconds": 0.0, "width_ratio": math.inf},
        "no more to take after 12 samples: interval Infinity %, allowed 1 %",
    ),
}


def test_why_sampling_stopped_is_shown():
    fields = {"samples": 12, "width_ratio": 0.0062, "allowed_ratio": 0.01}
    found = {
        name: stopped_text(JudgedMetric(metric="m", stopped=Stopped(**{**fields, **more})))
        for name, (more, _) in STOPPED.items()
    }
    assert found == {name: text for name, (_, text) in STOPPED.items()}
    assert stopped_text(JudgedMetric(metric="m")) == ""


# ---- the headline and the culprit

MEASURED = JudgedMetric(
    metric="nccl.all_reduce.busbw",
    unit="GB/s",
    status="passed",
    value=482.12,
    worst_rank=3,
    limit=JudgedLimit(min=440.0),
    margin=0.0957,
)
PLACE = RankPlace(rank=3, host="gpu-07", gpu={"index": "3", "uuid": "GPU-1f2e3d4c-0000", "name": "NVIDIA H100"})
JOURNAL = Journal(
    run=Run(run_id="1", started_at="", world_size=8), cluster=Cluster(ranks=(PLACE, RankPlace(rank=4, host="gpu-07")))
)

BEHIND = {"limit": JudgedLimit(min=440.0, min_ratio_to_median=0.929), "ratio_to_median": 0.9}
UNLIMITED = {"limit": None, "margin": None}
HEADLINES = {
    "482.1 >= 440 GB/s, +9.6 %": {},
    "439.9996 < 440 GB/s, -0.0 %": {"value": 439.9996, "status": "failed", "margin": -1e-6},
    "no value, >= 440 GB/s": {"value": None, "status": "error", "margin": None},
    "NaN GB/s, >= 440 GB/s": {"value": float("nan"), "status": "error", "margin": None},
    "482.1 GB/s, recorded only": {**UNLIMITED, "status": "recorded"},
    "482.1 in 1 to 500 GB/s, +9.6 %": {"limit": JudgedLimit(min=1.0, max=500.0)},
    "482.1 not in 1 to 400 GB/s, -20.5 %": {"limit": JudgedLimit(min=1.0, max=400.0), "margin": -0.205},
    "482.1 > 400 GB/s, -20.5 %": {"limit": JudgedLimit(max=400.0), "margin": -0.205},
    "482.1 >= 440 GB/s, 1813 x": {"margin": 1812.3},
    "482.1 >= 440 GB/s, inconclusive": {"inconclusive": "12 % wide"},
    # The end of the interval that is nearer to the limit decides, so the margin follows from it.
    "480 >= 440 GB/s, +9.1 %": {"interval": (480.0, 484.0), "margin": 40 / 440},
    "484 <= 500 GB/s, +3.2 %": {"interval": (480.0, 484.0), "margin": 0.032, "limit": JudgedLimit(max=500.0)},
    "482.1 GB/s, each rank >= 90 % of the others' median, +9.6 %": {"limit": JudgedLimit(min_ratio_to_median=0.9)},
    "90 % < 92.9 % of the others' median (482.1 GB/s), -3.1 %": {"status": "failed", **BEHIND},
    "482.1 >= 440 GB/s, -8.0 %": {"status": "failed", **BEHIND, "margin": -0.08},  # the limit comes first
    "482.1 GB/s, over NET/IB, +9.6 %": {"limit": JudgedLimit(expect_transport=("NET/IB",))},
}


def test_the_headline_is_the_number_that_decides_the_limit_and_the_margin_between_them():
    assert {headline_text(replace(MEASURED, **changes)): changes for changes in HEADLINES.values()} == HEADLINES
    assert value_text(replace(MEASURED, interval=(480.0, 484.0))) == "482.1 GB/s (at least 480)"
    behind = replace(MEASURED, status="failed", **BEHIND)
    assert (value_text(behind), limit_text(behind, first_only=True)) == ("90 % (482.1 GB/s)", ">= 92.9 % of the median")


def failed(reason, *, why="", culprits=(3,)):
    judged = replace(MEASURED, status="failed", value=301.0, margin=-0.31, reason=reason)
    return TestResult(
        nodeid="t.py::test_it", outcome="failed", message=why or reason, measurements=(judged,), culprits=culprits
    )


MISSED = "nccl.all_reduce.busbw 301 GB/s < 440 GB/s (size=1 GB)"
ON_3 = "on rank 3 (gpu-07, GPU 3 GPU-1f2e3d4c…)"
ALL = tuple(range(16))
FAILURES = {
    "gpu-07 GPU 3 (rank 3): 301 < 440 GB/s, -31.0 %": failed(f"{MISSED} {ON_3}"),
    "301 < 440 GB/s, -31.0 %": failed(MISSED, culprits=()),
    "all 8 ranks: 301 < 440 GB/s, -31.0 %": failed(f"{MISSED} {ON_3}, and 7 more ranks", culprits=ALL[:8]),
    "gpu-07, all 2 GPUs: 301 < 440 GB/s, -31.0 %": replace(
        failed(MISSED, why=f"isolated: gpu-07; {MISSED}"),
        isolation={"names": {"1": "gpu-07"}, "culprits": [{"units": [1], "failed": 3, "probes": 3}]},
    ),
    # Nothing was measured, or the measurement is not the cause.
    "gpu-07 GPU 3 (rank 3): rank 3 (gpu-07) is lost": TestResult(
        nodeid="a", outcome="error", message="rank 3 (gpu-07) is lost", culprits=(3,)
    ),
    "rank 1: boom": TestResult(nodeid="a", outcome="failed", message="rank 1: boom", measurements=(MEASURED,)),
    # Nothing is cut that the text has.
    "gpu-07 GPU 3 (rank 3): look at its NVLinks and at its PCIe link": TestResult(
        nodeid="a", outcome="failed", message="rank 3 (gpu-07): look at its NV…", culprits=(3,),
        text="rank 3 (gpu-07): failed\nlook at its NVLinks and at its PCIe link",
    ),
}  # fmt: skip


def test_a_failure_is_where_and_what_in_one_line():
    assert {failure_text(row_of(result), JOURNAL): result for result in FAILURES.values()} == FAILURES
    assert failure_text(row_of(failed(MISSED)), None) == MISSED  # nothing is known of the cluster


def test_a_carrier_that_the_limit_does_not_allow_is_named():
    limit = JudgedLimit(min=440.0, expect_transport=("NET/IB",))
    (judged,) = failed(MISSED).measurements
    slow = replace(judged, limit=limit, labels={"transport": "NET/Socket"})
    text = failure_text(row_of(replace(failed(MISSED), measurements=(slow,))), JOURNAL)
    assert text.endswith("-31.0 %, over NET/Socket and not NET/IB")
    own = replace(slow, limit=replace(limit, origin="mine.yaml:6:9"))
    text = failure_text(row_of(replace(failed(MISSED), measurements=(own,))), JOURNAL)
    assert text.endswith("(mine.yaml:6:9)")


def test_what_explains_a_failure_and_what_to_do_follow_it():
    hot = {"throttle": ["hw_thermal"], "throttle_share": {"hw_thermal": 0.62}}
    result = replace(failed(MISSED), text="a\nx; what to do: drain it\nwhat to do: drain it", telemetry={3: hot})
    assert advice(row_of(result)) == ["HW thermal slowdown 62 % of the time", "what to do: drain it"]
    longer = replace(result, text=f"{result.text}\nwhat to do: drain it. Then reboot")
    assert advice(row_of(longer))[1:] == ["what to do: drain it. Then reboot"]


# ---- telemetry

READINGS = {
    "sm_clock_mhz": (1740, 1755, 1980),
    "memory_clock_mhz": (2619, 2619, 2619),
    "power_watts": (698.2, 698.3, 698.4),
    "temperature_celsius": (61, 67, 70),
    "utilization_percent": (99, 99, 100),
    "throttle": (("sw_power_cap",), ("hw_thermal",)),
}
SEEN = telemetry.summary(READINGS, seconds=3.0, not_available={})
CLOCK = "sm clock 1755 MHz (1740 to 1980)"
HELD = {"hw_thermal": 0.62, "sw_power_cap": 1.0}
LINES = {
    f"{CLOCK}, memory clock 2619 MHz, 698 W, 67 degC (61 to 70), utilisation 99 % (99 to 100), "
    "throttle: sw_power_cap, hw_thermal": SEEN,
    "sm clock 1200 of 1980 MHz": {"sm_clock_mhz": [1200] * 3, "sm_clock_max_mhz": 1980, "samples": 3},
    "throttle: hw_thermal 62 %, sw_power_cap 100 %": {"throttle": [*HELD], "throttle_share": HELD},
    "counters: pcie.replays +3; ib.port_xmit_bytes +4000, counter notes: reset, "
    "counters not available: xid no permission": {
        "counters": {"pcie.replays": 3, "ib.port_xmit_bytes": 4000},
        "counter_notes": ["reset"],
        "counters_not_available": {"xid": "no permission"},
    },
    "": {},
    "no throttle": {"throttle": []},
    f"{CLOCK}, not available: sm_clock_mhz lost": {  # read, then lost
        "sm_clock_mhz": [1740, 1755, 1980],
        "not_available": {"sm_clock_mhz": "lost"},
    },
    "no throttle, notes: persistence off; VBIOS 96": {
        "throttle": [],
        "notes": ["persistence off", "VBIOS 96"],
        "adapters": [{"name": "mlx5_0", "guid": "a088"}],
    },
}


def test_what_was_seen_is_one_line():
    assert {telemetry_text(telemetry): telemetry for telemetry in LINES.values()} == LINES


def test_of_a_whole_test_a_culprit_is_shown_or_else_the_most_conspicuous_rank():
    by_rank = {rank: {"temperature_celsius": [50, 50, 50 + rank], "throttle": []} for rank in range(4)}
    assert telemetry_of_test(by_rank) == "rank 3: 50 degC (50 to 53), no throttle"
    assert telemetry_of_test(by_rank, culprits=[9, 1]) == "rank 1: 50 degC (50 to 51), no throttle"
    assert telemetry_of_test({}) == ""
    assert telemetry_of_test({2: {}}, culprits=[2]) == ""


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)

KEYS = [*telemetry.QUERIES, *telemetry.CARD_QUERIES, "not_available", "seconds", "notes", "throttle_share", "counters"]
KEYS += ["counter_notes", "counters_not_available"]


@given(st.dictionaries(st.sampled_from(KEYS) | st.text(), JSON))
def test_whatever_another_version_sends_is_shown_on_one_line(telemetry):
    text = telemetry_text(telemetry)
    assert len(text.splitlines()) <= 1
    assert len(clock_text(telemetry).splitlines()) <= 1
