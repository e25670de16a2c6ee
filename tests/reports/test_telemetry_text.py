"""Telemetry as one line that explains a value."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from pytest_gpucluster.node.health import telemetry
from pytest_gpucluster.reports.tables import clock_text, telemetry_of_test, telemetry_text

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


CLOCK = "sm clock 1755 MHz (1740 to 1980)"
HELD = {"hw_thermal": 0.62, "sw_power_cap": 1.0}
LINES: dict[str, dict[str, Any]] = {
    f"{CLOCK}, memory clock 2619 MHz, 698 W, 67 degC (61 to 70), utilisation 99 % (99 to 100), "
    "throttle: sw_power_cap, hw_thermal": SEEN,
    "sm clock 1200 of 1980 MHz": {"sm_clock_mhz": [1200] * 3, "sm_clock_max_mhz": 1980, "samples": 3},
    "throttle: hw_thermal 62 %, sw_power_cap 100 %": {"throttle": [*HELD], "throttle_share": HELD},
    "counters: pcie.replays +3; ib.port_xmit_bytes +4000, counters: reset, not counted: xid (no permission)": {
        "counters": {"ib.port_xmit_bytes": 4000, "pcie.replays": 3},
        "counter_notes": ["reset"],
        "counters_not_available": {"xid": "no permission"},
    },
    "": {},
    "no throttle": {"throttle": []},
    "not available: sm clock, power (lost), not available: throttle (no permission)": {
        "not_available": {"sm_clock_mhz": "lost", "power_watts": "lost", "throttle": "no permission"}
    },
    f"{CLOCK}, not available: sm clock (lost)": {  # read, then lost
        "sm_clock_mhz": [1740, 1755, 1980],
        "not_available": {"sm_clock_mhz": "lost"},
    },
    "no throttle, notes: persistence off; VBIOS 96": {
        "throttle": [],
        "notes": ["persistence off", "VBIOS 96"],
        "adapters": [{"name": "mlx5_0", "guid": "a088"}],
    },
}


def test_what_was_seen_is_one_line() -> None:
    assert {telemetry_text(telemetry): telemetry for telemetry in LINES.values()} == LINES


def test_what_was_not_read_is_named_with_the_reason() -> None:
    text = telemetry_text(without("memory_clock_mhz", power_watts="no sensor\n" * 100))
    assert "memory clock (no reading" in text
    assert "power (no sensor" in text
    assert "\n" not in text
    assert len(text) < 400


def test_of_a_whole_test_a_culprit_is_shown_or_else_the_most_conspicuous_rank() -> None:
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
def test_whatever_another_version_sends_is_shown_on_one_line(telemetry: dict[str, Any]) -> None:
    text = telemetry_text(telemetry)
    assert len(text.splitlines()) <= 1
    assert len(clock_text(telemetry).splitlines()) <= 1
