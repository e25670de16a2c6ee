"""One GPU's sampler: the summary of a window, and that a misbehaving NVML delays no caller."""

import json
import re
import threading
from contextlib import contextmanager

import pytest
from fake_nvml import FakeNvml

from pytest_gpucluster.node.health.gpu_sampler import IN_TURN, GpuSampler, Pace
from pytest_gpucluster.node.health.telemetry import QUERIES
from pytest_gpucluster.node.nvml import NotAvailable

GPU = "GPU-1f2e3d4c"
DEADLINE = 30.0
"""Seconds after which a test gives up. Nothing here depends on how long it takes."""
NEVER = 3600.0

VALUES = {
    "clock.sm": 1755,
    "clock.memory": 2619,
    "power.draw": 698.25,
    "temperature.gpu": 67,
    "utilization.gpu": 99,
    "throttle.reasons": ("gpu_idle", "sw_power_cap"),
}
LOST = NotAvailable("the GPU is lost", "lost")


def turns(*values, then):
    """Answer with each value once, then always with the last."""
    left = iter(values)
    return lambda: next(left, then)


class Passes:
    """Counts how often all queries were asked. The last query of a pass counts."""

    def __init__(self, value=()):
        self._value = value
        self._condition = threading.Condition()
        self.count = 0

    def __call__(self):
        with self._condition:
            self.count += 1
            self._condition.notify_all()
        return self._value

    def wait_for(self, count):
        with self._condition:
            assert self._condition.wait_for(lambda: self.count >= count, DEADLINE)


class Hang:
    """A query that does not answer until it is let go."""

    def __init__(self):
        self.asked = threading.Event()
        self.let_go = threading.Event()

    def __call__(self):
        self.asked.set()
        assert self.let_go.wait(DEADLINE)
        return 1000


@contextmanager
def watched_by(window):
    """Open a window and close it, as the process does for a rank."""
    window.open()
    try:
        yield window
    finally:
        window.close()


@pytest.fixture
def sampler():
    made = []

    def make(values, interval_seconds=0.001, close_seconds=DEADLINE):
        made.append(Pace(interval_seconds, close_seconds=close_seconds))
        return GpuSampler(FakeNvml({GPU: values}), GPU, made[-1])

    yield make
    for pace in made:
        pace.close_seconds = DEADLINE
        pace.close()
        assert pace.thread is None or not pace.thread.is_alive()


# ---- windows


def test_a_window_summarises_the_gpu(sampler):
    passes = Passes(VALUES["throttle.reasons"])
    clock = turns(1740, 1980, then=1755)
    with watched_by(sampler({**VALUES, "clock.sm": clock, "throttle.reasons": passes}).window()) as window:
        passes.wait_for(5)
    summary = window.summary()
    assert summary["samples"] >= 5
    assert summary["sm_clock_mhz"] == [1740, 1755, 1980]
    assert summary["power_watts"] == [698.2, 698.2, 698.2]
    assert summary["temperature_celsius"] == [67, 67, 67]
    assert summary["utilization_percent"] == [99, 99, 99]
    assert summary["throttle"] == ["sw_power_cap"]
    assert summary["not_available"] == {}
    assert "lost" not in summary
    assert summary["seconds"] > 0
    assert json.loads(json.dumps(summary)) == summary


def test_a_short_window_costs_one_pass_and_none_is_made_outside_of_it(sampler):
    passes = Passes()
    rare = sampler({**VALUES, "throttle.reasons": passes}, NEVER)
    for _ in range(50):
        with watched_by(rare.window()) as window:
            pass
        assert window.summary()["sm_clock_mhz"] == [1755, 1755, 1755]
    assert passes.count == 50
    watched = sampler({**VALUES, "throttle.reasons": passes})
    with watched_by(watched.window()):
        passes.wait_for(51)
    before = passes.count
    with watched._condition:
        watched._condition.wait_for(lambda: False, 0.05)  # time for many passes
    assert passes.count <= before + 1, "at most the pass that was under way"


# ---- NVML at its worst


def test_a_query_without_an_answer_is_named_and_not_asked_again(sampler):
    asked, passes = Passes(NotAvailable("no sensor")), Passes()
    watched = sampler({**VALUES, "power.draw": asked, "throttle.reasons": passes})
    for window in (watched.window(), watched.window()):
        with watched_by(window):
            passes.wait_for(passes.count + 3)
        summary = window.summary()
        assert summary["not_available"] == {"power_watts": "no sensor"}
        assert "power_watts" not in summary
        assert summary["samples"] >= 3
    assert asked.count == 1


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        pytest.param(NotAvailable("busy", "failed"), "busy", id="a failure of NVML"),
        pytest.param(RuntimeError("broken"), "RuntimeError: broken", id="any other error"),
        pytest.param("fast", "ValueError: NVML gave 'fast'", id="text for a number"),
    ],
)
def test_a_failure_costs_only_its_own_key_and_only_in_this_window(sampler, answer, why):
    watched = sampler({**VALUES, "clock.sm": turns(answer, then=1755)}, NEVER)
    with watched_by(watched.window()) as first:
        pass
    with watched_by(watched.window()) as second:
        pass
    assert first.summary()["not_available"] == {"sm_clock_mhz": why}
    assert first.summary()["power_watts"] == [698.2, 698.2, 698.2]
    assert second.summary()["sm_clock_mhz"] == [1755, 1755, 1755]
    assert second.summary()["not_available"] == {}


def test_a_lost_gpu_is_on_record_with_what_was_read_before(sampler):
    temperature = Passes(67)
    watched = sampler({**VALUES, "temperature.gpu": temperature, "power.draw": turns(700, 700, then=LOST)})
    with watched_by(watched.window()) as window, watched._condition:
        assert watched._condition.wait_for(lambda: window.lost, DEADLINE)
    summary = window.summary()
    assert summary["lost"] == "the GPU is lost"
    assert summary["not_available"] == dict.fromkeys(QUERIES, "the GPU is lost")
    assert summary["power_watts"] == [700, 700, 700]
    assert temperature.count == 2  # nothing more is asked of a lost GPU
    with watched_by(watched.window()) as after:
        pass
    assert after.summary()["lost"] == "the GPU is lost"


def test_nvml_that_hangs_does_not_keep_the_measurement(sampler):
    hang = Hang()
    watched = sampler({**VALUES, "power.draw": hang}, close_seconds=0.01)
    with watched_by(watched.window()) as window:
        assert hang.asked.wait(DEADLINE)
    summary = window.summary()
    assert summary["sm_clock_mhz"] == [1755, 1755, 1755]
    assert summary["not_available"]["power_watts"].startswith("NVML ")
    assert re.match("not read: .* power_watts$", summary["not_available"]["temperature_celsius"])
    # A window that opens while NVML still hangs neither waits nor starts a second thread to hang.
    with watched_by(watched.window()) as next_window:
        pass
    assert next_window.summary()["samples"] == 0
    assert "sm_clock_mhz" in next_window.summary()["not_available"]
    assert [thread.name for thread in threading.enumerate()].count("gpucluster-telemetry") == 1
    hang.let_go.set()
    with watched._condition:
        assert watched._condition.wait_for(lambda: watched._pace.current is None, DEADLINE)
    assert window.summary() == summary, "what came after it was left is not its own"


def test_a_hang_after_some_readings_is_named_too(sampler):
    hang = Hang()
    answers = turns(lambda: 700, lambda: 701, then=hang)
    watched = sampler({**VALUES, "power.draw": lambda: answers()()}, close_seconds=0.01)
    with watched_by(watched.window()) as window:
        assert hang.asked.wait(DEADLINE)
        with watched._condition:
            assert not watched._condition.wait_for(lambda: False, 0.02)
    summary = window.summary()
    assert summary["power_watts"] == [700, 700.5, 701]
    assert set(summary["not_available"]) == {"power_watts"}
    hang.let_go.set()


def test_without_a_thread_the_measurement_goes_on(sampler, monkeypatch):
    def refuse(self):
        raise RuntimeError("no threads left")

    watched = sampler(VALUES)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with watched_by(watched.window()) as window:
            pass
    [why] = set(window.summary()["not_available"].values())
    assert why.endswith(": no threads left")
    with watched_by(watched.window()) as again:
        pass
    assert again.summary()["samples"] >= 1


# ---- what is asked when, and what a reading stands for


def test_slow_figures_are_read_in_turn_and_all_of_them_first(sampler):
    counts = {query: Passes(value) for query, value in VALUES.items()}
    with watched_by(sampler(dict(counts)).window()):
        counts["throttle.reasons"].wait_for(1 + 4 * len(IN_TURN))
    clock, throttle = counts["clock.sm"].count, counts["throttle.reasons"].count
    assert abs(clock - throttle) <= 1
    for query in ("clock.memory", "power.draw", "temperature.gpu", "utilization.gpu"):
        assert 4 <= counts[query].count <= 2 + throttle / len(IN_TURN)


def test_a_reason_has_the_time_from_its_reading_to_the_next_one():
    window = GpuSampler(FakeNvml({GPU: VALUES}), GPU, Pace()).window()
    window._opened_at = 10.0
    for at, reasons in ((11.0, ("hw_thermal",)), (13.0, ("sw_power_cap",)), (14.0, ("hw_thermal", "sw_power_cap"))):
        window.take({"throttle": reasons}, at)
    window.finish(20.0)
    # The first one stands for the time before it, too.
    assert window._throttle_seconds == {"hw_thermal": 3.0 + 6.0, "sw_power_cap": 1.0 + 6.0}


def test_shares_are_of_the_time_in_which_the_window_was_open(sampler):
    window = sampler({**VALUES, "throttle.reasons": ("hw_thermal",)}, NEVER).window()
    window.open(at=100.0)
    window.close(at=104.0)
    window.open(at=200.0)
    window.close(at=206.0)
    summary = window.summary()
    assert (summary["seconds"], summary["samples"]) == (10.0, 2)
    assert summary["throttle_share"] == {"hw_thermal": 1.0}


def test_constants_of_the_card_are_read_once_and_are_optional(sampler):
    asked, passes = Passes(1980), Passes()
    watched = sampler({**VALUES, "clock.sm.max": asked, "throttle.reasons": passes})
    for _ in range(2):
        with watched_by(watched.window()) as window:
            passes.wait_for(passes.count + 3)
    assert (window.summary()["sm_clock_max_mhz"], asked.count) == (1980, 1)
    silent = {**VALUES, "temperature.slowdown": 0}
    with watched_by(sampler(silent, NEVER).window()) as window:
        pass
    summary = window.summary()
    assert summary["not_available"] == {}
    assert "sm_clock_max_mhz" not in summary
    assert "slowdown_celsius" not in summary


def test_a_card_that_hangs_over_its_own_data_costs_no_reading(sampler):
    hang = Hang()
    watched = sampler({**VALUES, "clock.sm.max": hang}, 0.001, close_seconds=0.01)
    with watched_by(watched.window()) as window:
        assert hang.asked.wait(DEADLINE)
    assert window.summary()["sm_clock_mhz"] == [1755, 1755, 1755]
    assert window.summary()["not_available"] == {}
    hang.let_go.set()


# ---- several GPUs at one pace


def test_gpus_at_one_pace_are_asked_only_in_their_own_windows_and_in_time():
    other = "GPU-5a6b7c8d"
    asked, passes = Passes(), Passes()
    nvml = FakeNvml({GPU: {**VALUES, "throttle.reasons": asked}, other: {**VALUES, "throttle.reasons": passes}})
    pace = Pace(0.05, close_seconds=DEADLINE)
    mine, its = GpuSampler(nvml, GPU, pace), GpuSampler(nvml, other, pace)
    with watched_by(its.window()):
        while passes.count < 3:  # far more often than a round is due
            with watched_by(mine.window()):
                pass
        before = asked.count
        passes.wait_for(passes.count + 3)
    assert asked.count == before
    pace.close()
