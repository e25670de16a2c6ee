"""Telemetry as one line that explains a value."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_gpucluster import telemetry
from pytest_gpucluster.reports.telemetry_text import clock_text, telemetry_of_test, telemetry_text

READINGS = {
    "sm_clock_mhz": (1740, 1755, 1980),
    "memory_clock_mhz": (2619, 2619, 2619),
    "power_watts": (698.2, 698.3, 698.4),
    "temperature_celsius": (61, 67, 70),
    "utilization_percent": (99, 99, 100),
    "throttle": (("sw_power_cap",), ("hw_thermal",)),
}
SEEN = telemetry.summary(READINGS, seconds=3.0, not_available={})


def without(*keys: str, **reasons: str) -> dict[str, Any]:
    kept = {key: value for key, value in READINGS.items() if key not in (*keys, *reasons)}
    return telemetry.summary(kept, seconds=3.0, not_available=reasons)


@pytest.mark.parametrize(
    ("told", "text"),
    [
        pytest.param(
            SEEN,
            "sm clock 1755 MHz (1740 to 1980), memory clock 2619 MHz, 698 W, 67 degC (61 to 70), "
            "utilisation 99 % (99 to 100), throttle: sw_power_cap, hw_thermal",
            id="all",
        ),
        pytest.param(
            {"sm_clock_mhz": [1200, 1200, 1200], "sm_clock_max_mhz": 1980, "slowdown_celsius": 89, "samples": 3},
            "sm clock 1200 of 1980 MHz",
            id="of the highest clock",
        ),
        pytest.param(
            {"throttle": ["hw_thermal", "sw_power_cap"], "throttle_share": {"hw_thermal": 0.62, "sw_power_cap": 1.0}},
            "throttle: hw_thermal 62 %, sw_power_cap 100 %",
            id="for which part of the time",
        ),
        pytest.param(
            {
                "counters": {"infiniband.mlx5_0/1.port_xmit_bytes": 4000, "pcie.replays": 3},
                "counter_notes": ["pcie.replays went from 9 to 3: it was reset, or wrapped"],
                "counters_not_available": {"xid": "no permission"},
            },
            "counters: pcie.replays +3; infiniband.mlx5_0/1.port_xmit_bytes +4000, "
            "counters: pcie.replays went from 9 to 3: it was reset, or wrapped, not counted: xid (no permission)",
            id="counters",
        ),
        pytest.param({}, "", id="on cpu"),
        pytest.param({"throttle": []}, "no throttle", id="no throttle"),
        pytest.param(
            {"not_available": {"sm_clock_mhz": "lost", "power_watts": "lost", "throttle": "no permission"}},
            "not available: sm clock, power (lost), not available: throttle (no permission)",
            id="one reason for two",
        ),
        pytest.param(
            {"sm_clock_mhz": [1740, 1755, 1980], "not_available": {"sm_clock_mhz": "the GPU is lost"}},
            "sm clock 1755 MHz (1740 to 1980), not available: sm clock (the GPU is lost)",
            id="read, then lost",
        ),
        pytest.param(
            {
                "throttle": [],
                "notes": ["persistence mode is off", "VBIOS 96"],
                "empty": [],
                "seconds": 3.0,
                "adapters": [{"name": "mlx5_0", "guid": "a088"}],
            },
            "no throttle, notes: persistence mode is off; VBIOS 96",
            id="notes of a test",
        ),
    ],
)
def test_what_was_seen_is_one_line(told: dict[str, Any], text: str) -> None:
    assert telemetry_text(told) == text


def test_what_was_not_read_is_named_with_the_reason() -> None:
    text = telemetry_text(without("memory_clock_mhz", power_watts="no sensor\n" * 100))
    assert "not available: memory clock (no reading in this window)" in text
    assert "not available: power (no sensor no sensor" in text
    assert "\n" not in text
    assert len(text) < 400


def test_clock_and_throttle_alone_stand_beside_a_ranks_value() -> None:
    assert clock_text(SEEN) == "sm clock 1755 MHz (1740 to 1980), throttle: sw_power_cap, hw_thermal"
    assert clock_text(without("sm_clock_mhz", "throttle")) == ""


def test_of_a_whole_test_a_culprit_is_told_or_else_the_rank_that_tells_most() -> None:
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


KEYS = [*telemetry.QUERIES, *telemetry.OF_THE_CARD, "not_available", "seconds", "notes", "throttle_share", "counters"]
KEYS += ["counter_notes", "counters_not_available"]


@given(st.dictionaries(st.sampled_from(KEYS) | st.text(), JSON))
def test_whatever_another_version_sends_is_shown_on_one_line(told: dict[str, Any]) -> None:
    text = telemetry_text(told)
    assert len(text.splitlines()) <= 1
    assert len(clock_text(told).splitlines()) <= 1
