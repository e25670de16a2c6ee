"""The few words that may explain a missed value."""

from hypothesis import given
from hypothesis import strategies as st

from pytest_gpucluster.judge.limits import Limit
from pytest_gpucluster.judge.misses import (
    BUSY_PERCENT,
    HOT_CELSIUS,
    LEAST_SHARE,
    LOW_CLOCK_RATIO,
    NOTED_SHARE,
    NOTES,
    SLOWDOWNS,
    explanation,
    misses,
    most_throttled,
)
from pytest_gpucluster.metrics.measurement import METRICS, measurement
from pytest_gpucluster.node.nvml_queries import THROTTLE_REASONS

HEALTHY = {
    "seconds": 3.0,
    "samples": 30,
    "sm_clock_mhz": [1740, 1755, 1980],
    "sm_clock_max_mhz": 1980,
    "temperature_celsius": [60, 65, 70],
    "slowdown_celsius": 89,
    "throttle": [],
    "throttle_share": {},
}


def seen(**changes):
    return {**HEALTHY, **changes}


SLOW_CLOCK = LOW_CLOCK_RATIO * 1980
SILENT = [
    HEALTHY,
    {},
    seen(throttle_share={"hw_thermal": 0.9 * LEAST_SHARE}),  # for a moment only
    seen(throttle_share={"sw_power_cap": 1.0, "board_limit": 0.9 * NOTED_SHARE}),
    seen(sm_clock_mhz=[300, SLOW_CLOCK, 1980]),  # just not low
    seen(sm_clock_mhz=[300, 345, 1980], utilization_percent=[0, 0.9 * BUSY_PERCENT, 100]),  # it waits
    seen(sm_clock_mhz=[300, 300, 300], sm_clock_max_mhz=None),  # of an unknown highest
]
EXPLAINED = {
    "HW thermal slowdown 62 % of the time, 91 degC": seen(
        throttle_share={"hw_thermal": 0.62}, temperature_celsius=[70, 88, 91]
    ),
    # The longest first, and how hot a GPU is that says it is.
    "SW thermal slowdown 70 % of the time, HW slowdown 30 % of the time, 70 degC": seen(
        throttle_share={"hw_slowdown": 0.3, "sw_thermal": 0.7}, slowdown_celsius=100
    ),
    # The least shares that say anything.
    "HW slowdown 1 % of the time, 70 degC": seen(throttle_share={"hw_slowdown": LEAST_SHARE}),
    "board limit 50 % of the time": seen(throttle_share={"board_limit": NOTED_SHARE}),
    "HW power brake 100 % of the time": seen(throttle_share={"hw_power_brake": 1.0}),
    "clocks held by their setting 100 % of the time (nvidia-smi -ac, -lgc)": seen(
        throttle_share={"applications_clocks": 1.0}
    ),
    "84 degC": seen(temperature_celsius=[70, 80, 84]),
    f"{HOT_CELSIUS:.0f} degC": {"temperature_celsius": [70, 80, HOT_CELSIUS]},  # of an unknown limit
    "SM clock 1176 of 1980 MHz": seen(
        sm_clock_mhz=[300, 0.99 * SLOW_CLOCK, 1980], utilization_percent=[0, BUSY_PERCENT, 100]
    ),
    "SM clock 345 of 1980 MHz": seen(sm_clock_mhz=[300, 345, 1980], utilization_percent=[None] * 3),  # it may be busy
    "pcie.replays +3": seen(counters={"pcie.replays": 3, "infiniband.mlx5_0/1.port_xmit_bytes": 10**9}),
    "nvlink.replay[0] +1, nvlink.replay[1] +1, nvlink.replay[2] +1, 2 more counters": seen(
        counters={f"nvlink.replay[{link}]": 1 for link in range(5)}
    ),
    "a +1, b -1, c +0.5": seen(counters={"a": 1, "b": -1, "c": 0.5, "d": 0}),
    "NET/IB without GPU Direct RDMA": seen(transport="NET/IB without GPU Direct RDMA"),
    "the GPU was lost": {"lost": "the GPU is lost"},
}


def test_what_the_gpu_did_explains():
    assert {explanation(telemetry): telemetry for telemetry in EXPLAINED.values()} == EXPLAINED
    assert [explanation(telemetry) for telemetry in SILENT] == [""] * len(SILENT)


def test_a_low_clock_explains_a_rate_and_no_error():
    idle = seen(sm_clock_mhz=[300, 345, 1980], throttle_share={"board_limit": 1.0})
    explained = {}
    for name, value, limit in (
        ("matmul.bf16.tflops", 500.0, {"min": 600.0}),
        ("ddp.gradient_error", 0.1, {"max": 0.01}),
    ):
        metric = METRICS[name]
        of = {0: measurement(name, value, unit=metric.unit)}
        demanded = Limit(metric=name, unit=metric.unit, sku="H100 SXM", source="a rule", **limit)
        [miss] = misses(metric, demanded, of, ratios={}, transport=None, telemetry={0: idle})
        explained[name] = miss.why
    assert explained == {
        "matmul.bf16.tflops": "SM clock 345 of 1980 MHz, board limit 100 % of the time",
        "ddp.gradient_error": "",
    }


def test_every_explained_reason_is_one_of_nvml():
    assert set(SLOWDOWNS) | set(NOTES) <= set(THROTTLE_REASONS.values())


def test_the_most_throttled_rank_is_chosen_or_else_the_hottest():
    held = {"throttle_share": {"hw_thermal": 0.2}, "temperature_celsius": [50, 50, 50]}
    hot = {"throttle_share": {"sw_power_cap": 1.0}, "temperature_celsius": [60, 70, 80]}
    assert most_throttled({0: HEALTHY, 1: hot, 2: held}) == 2
    assert most_throttled({0: HEALTHY, 1: hot}) == 1
    assert most_throttled({0: HEALTHY, 1: held, 2: {"lost": "gone"}}) == 2
    assert most_throttled({5: HEALTHY, 3: HEALTHY}) == 3
    assert most_throttled({}) is None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@given(st.dictionaries(st.sampled_from([*HEALTHY, "counters", "lost", "transport"]), JSON))
def test_whatever_another_version_sends_breaks_nothing(telemetry):
    assert isinstance(explanation(telemetry), str)
    assert most_throttled({0: telemetry, 1: HEALTHY}) in (0, 1)
