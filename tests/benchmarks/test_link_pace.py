from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pytest_gpucluster.benchmarks.links import WINDOWS, pace, probe_bytes, window_seconds

MIB = 2**20


@given(
    st.floats(0, 1e4),
    st.integers(1, 2**30).map(lambda words: 8 * words),
    st.floats(0.01, 600),
)
def test_something_is_always_sent_and_never_more_than_the_payload(
    probe_seconds: float, payload_bytes: int, round_seconds: float
) -> None:
    found = pace(probe_seconds, payload_bytes=payload_bytes, round_seconds=round_seconds)
    assert found.calls >= 1
    assert probe_bytes(payload_bytes) // 8 <= found.words <= payload_bytes // 8
    if found.words < payload_bytes // 8:
        assert found.calls == 1


@given(st.floats(1e-6, 1e4))
def test_a_round_takes_about_as_long_as_planned_but_for_a_link_that_hardly_moves(probe_seconds: float) -> None:
    payload, round_seconds = 256 * MIB, 0.5
    found = pace(probe_seconds, payload_bytes=payload, round_seconds=round_seconds)
    window = found.calls * probe_seconds * 8 * found.words / probe_bytes(payload)
    # The warm-up is one call.
    assert window <= max(4.01 * window_seconds(round_seconds), probe_seconds)


def test_all_windows_together_take_a_round() -> None:
    assert 2 * (WINDOWS + 1) * window_seconds(0.6) == pytest.approx(0.6)


@pytest.mark.parametrize(("payload", "probe"), [(256 * MIB, 4 * MIB), (8, 8), (4096, 4096), (260_000, 4096)])
def test_the_first_look_sends_little(payload: int, probe: int) -> None:
    assert probe_bytes(payload) == probe
