"""Telemetry: what a window's readings are summed up to."""

import pytest

from pytest_gpucluster.node import nvml_queries
from pytest_gpucluster.node.health.telemetry import CARD_QUERIES, QUERIES, THROTTLE, empty_summary, summary, validated


def test_each_series_is_summed_up_as_least_median_and_most():
    readings = {
        "sm_clock_mhz": (1980.0, 1740.0, 1755.0),
        "power_watts": (698.26, 650.06),
        "throttle": (("sw_power_cap",), (), ("gpu_idle", "hw_thermal", "sw_power_cap")),
    }
    missing = {"temperature_celsius": "not supported"}
    assert summary(readings, seconds=3.14159, not_available=missing) == {
        "seconds": 3.142,
        "samples": 3,
        "sm_clock_mhz": [1740.0, 1755.0, 1980.0],
        "power_watts": [650.1, 674.2, 698.3],
        "throttle": ["sw_power_cap", "hw_thermal"],
        "not_available": {
            "memory_clock_mhz": "no reading in this window",
            "temperature_celsius": "not supported",
            "utilization_percent": "no reading in this window",
        },
    }


def test_each_throttle_reason_has_its_part_of_the_time():
    readings = {THROTTLE: (("hw_thermal",), ("gpu_idle",), ("hw_thermal", "sw_power_cap"))}
    spent = {"hw_thermal": 6.2, "sw_power_cap": 2.0, "gpu_idle": 3.8}
    result = summary(readings, seconds=10.0, not_available={}, throttle_seconds=spent)
    assert result["throttle_share"] == {"hw_thermal": 0.62, "sw_power_cap": 0.2}
    for seconds in (0.0, 1.0):  # no more than all of it
        result = summary(
            {THROTTLE: (("hw_thermal",),)}, seconds=seconds, not_available={}, throttle_seconds={"hw_thermal": 1.1}
        )
        assert result["throttle_share"] == {"hw_thermal": 1.0}
    assert summary({THROTTLE: (("gpu_idle",),)}, seconds=1, not_available={})["throttle"] == []


def test_what_is_read_is_what_nvml_can_be_asked_for():
    asked = {key: nvml_queries.QUERIES[query].key for key, query in {**QUERIES, **CARD_QUERIES}.items()}
    assert [key for key, its in asked.items() if key != its] == []
    units = [key.rpartition("_")[2] for key in asked if key != THROTTLE]
    assert units == ["mhz", "mhz", "watts", "celsius", "percent", "mhz", "celsius"]
    result = summary({}, seconds=1, not_available={}, card={"sm_clock_max_mhz": 1980, "slowdown_celsius": 89.04})
    assert (result["sm_clock_max_mhz"], result["slowdown_celsius"]) == (1980, 89.0)
    nothing_read = {"seconds": 2.5, "samples": 0, "not_available": dict.fromkeys(QUERIES, "no sampler here")}
    assert empty_summary("no sampler here", seconds=2.5) == nothing_read


@pytest.mark.parametrize("value", ["fast", float("nan"), float("inf"), True, None, (1, 2)], ids=repr)
def test_what_is_no_number_is_no_reading(value):
    with pytest.raises(ValueError, match="NVML gave"):
        validated("sm_clock_mhz", value)


def test_what_are_no_names_are_no_throttle_reasons():
    assert validated(THROTTLE, ["hw_thermal"]) == ("hw_thermal",)
    for value in ("sw_power_cap", [1], 4):
        with pytest.raises(ValueError, match="NVML gave"):
            validated(THROTTLE, value)
