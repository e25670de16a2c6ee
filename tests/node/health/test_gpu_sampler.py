"""The sampler: the summary of a window, and that a misbehaving NVML delays no caller."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from fake_nvml import FakeNvml

from pytest_gpucluster.node.health.sampler_process import IN_TURN, GpuWindow, Sampler
from pytest_gpucluster.node.health.telemetry import QUERIES
from pytest_gpucluster.node.nvml import NotAvailable

GPU, OTHER = "GPU-1f2e3d4c", "GPU-5a6b7c8d"
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


def turns(*values: Any, then: Any) -> Callable[[], Any]:
    """Answer with each value once, then always with the last."""
    left = iter(values)
    return lambda: next(left, then)


class Passes:
    """Counts how often all queries were asked. The last query of a pass counts."""

    def __init__(self, value: Any = ()) -> None:
        self._value = value
        self._condition = threading.Condition()
        self.count = 0

    def __call__(self) -> Any:
        with self._condition:
            self.count += 1
            self._condition.notify_all()
        return self._value

    def wait_for(self, count: int) -> None:
        with self._condition:
            assert self._condition.wait_for(lambda: self.count >= count, DEADLINE)


class Hang:
    """A query that does not answer until it is let go."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        self.let_go = threading.Event()

    def __call__(self) -> Any:
        self.asked.set()
        assert self.let_go.wait(DEADLINE)
        return 1000


class Watched:
    """A sampler of planted GPUs, and windows on one of them, opened and closed as the process does it for a rank."""

    def __init__(self, sampler: Sampler, uuid: str = GPU) -> None:
        self.sampler, self.uuid = sampler, uuid

    @contextmanager
    def window(self, window: GpuWindow | None = None) -> Iterator[GpuWindow]:
        window = window or GpuWindow()
        self.sampler.open(self.uuid, window, time.monotonic())
        try:
            yield window
        finally:
            self.sampler.close(self.uuid, window, time.monotonic())

    def summary(self, window: GpuWindow) -> dict[str, Any]:
        return self.sampler.summary(self.uuid, window)

    def closed(self) -> dict[str, Any]:
        """Return the summary of a window that is closed at once."""
        with self.window() as window:
            pass
        return self.summary(window)


Make = Callable[..., Watched]


@pytest.fixture
def sampler() -> Iterator[Make]:
    made: list[Sampler] = []

    def make(
        values: dict[str, Any] | None, interval_seconds: float = 0.001, close_seconds: float = DEADLINE, **other: Any
    ) -> Watched:
        nvml = None if values is None else FakeNvml({GPU: values, **other})
        made.append(Sampler(nvml, interval_seconds, close_seconds=close_seconds, why_not="no driver library"))
        return Watched(made[-1])

    yield make
    for each in made:
        each.stop()


# ---- windows


def test_a_window_summarises_the_gpu(sampler: Make) -> None:
    passes = Passes(VALUES["throttle.reasons"])
    watched = sampler({**VALUES, "clock.sm": turns(1740, 1980, then=1755), "throttle.reasons": passes})
    with watched.window() as window:
        passes.wait_for(5)
    summary = watched.summary(window)
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


def test_a_short_window_costs_one_pass_and_none_is_made_outside_of_it(sampler: Make) -> None:
    passes = Passes()
    rare = sampler({**VALUES, "throttle.reasons": passes}, NEVER)
    for _ in range(50):
        assert rare.closed()["sm_clock_mhz"] == [1755, 1755, 1755]
    assert passes.count == 50
    watched = sampler({**VALUES, "throttle.reasons": passes})
    with watched.window():
        passes.wait_for(51)
    before = passes.count
    time.sleep(0.05)  # for many passes
    assert passes.count <= before + 1, "at most the pass that was under way"


def test_windows_can_follow_overlap_and_be_entered_again(sampler: Make) -> None:
    watched = sampler(VALUES, NEVER)
    with watched.window() as outer:
        with watched.window() as first:
            pass
        with watched.window() as second:
            pass
    assert [watched.summary(window)["samples"] for window in (first, second, outer)] == [1, 1, 2]
    with watched.window(first):
        pass
    assert watched.summary(first)["samples"] == 2, "one that is entered again adds up"
    with watched.window() as window, pytest.raises(RuntimeError, match="open already"), watched.window(window):
        pass


def test_windows_of_many_threads_each_have_their_readings(sampler: Make) -> None:
    watched = sampler(VALUES)
    summaries: list[dict[str, Any]] = []
    threads = [threading.Thread(target=lambda: summaries.extend(watched.closed() for _ in range(20))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE)
    assert len(summaries) == 160
    assert all(each["samples"] >= 1 and each["not_available"] == {} for each in summaries)


# ---- NVML at its worst


def test_a_query_without_an_answer_is_named_and_not_asked_again(sampler: Make) -> None:
    asked, passes = Passes(NotAvailable("no sensor")), Passes()
    watched = sampler({**VALUES, "power.draw": asked, "throttle.reasons": passes})
    for _ in range(2):
        with watched.window() as window:
            passes.wait_for(passes.count + 3)
        summary = watched.summary(window)
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
        pytest.param(float("nan"), "ValueError: NVML gave nan", id="NaN"),
        pytest.param(True, "ValueError: NVML gave True", id="a truth value"),
        pytest.param(None, "ValueError: NVML gave None", id="nothing"),
    ],
)
def test_a_failure_costs_only_its_own_key_and_only_in_this_window(sampler: Make, answer: Any, why: str) -> None:
    watched = sampler({**VALUES, "clock.sm": turns(answer, then=1755)}, NEVER)
    first, second = watched.closed(), watched.closed()
    assert first["not_available"] == {"sm_clock_mhz": why}
    assert first["power_watts"] == [698.2, 698.2, 698.2]
    assert second["sm_clock_mhz"] == [1755, 1755, 1755]
    assert second["not_available"] == {}


def test_a_lost_gpu_is_reported_with_what_was_read_before(sampler: Make) -> None:
    temperature = Passes(67)
    watched = sampler({**VALUES, "temperature.gpu": temperature, "power.draw": turns(700, 700, then=LOST)})
    with watched.window() as window:
        until = time.monotonic() + DEADLINE
        while not window.lost:
            assert time.monotonic() < until
            time.sleep(0.001)
    summary = watched.summary(window)
    assert summary["lost"] == "the GPU is lost"
    assert summary["not_available"] == dict.fromkeys(QUERIES, "the GPU is lost")
    assert summary["power_watts"] == [700, 700, 700]
    assert temperature.count == 2  # nothing more is asked of a lost GPU
    assert watched.closed()["lost"] == "the GPU is lost"


def test_nvml_that_hangs_does_not_keep_the_measurement(sampler: Make) -> None:
    hang = Hang()
    watched = sampler({**VALUES, "power.draw": hang}, close_seconds=0.01)
    with watched.window() as window:
        assert hang.asked.wait(DEADLINE)
    summary = watched.summary(window)
    assert (summary["samples"], set(summary["not_available"])) == (0, set(QUERIES))
    assert re.match(f"NVML has not answered about {GPU} ", summary["not_available"]["power_watts"])
    # A window that opens while NVML still hangs neither waits nor starts a second thread to hang.
    assert watched.closed()["samples"] == 0
    hang.let_go.set()
    until = time.monotonic() + DEADLINE
    while watched.sampler._asked is not None:
        assert time.monotonic() < until
    assert watched.summary(window) == summary, "what came after it was closed is not its own"


def test_a_hang_after_some_readings_is_named_too(sampler: Make) -> None:
    hang = Hang()
    answers = turns(lambda: 700, lambda: 701, then=hang)
    watched = sampler({**VALUES, "power.draw": lambda: answers()()}, close_seconds=0.01)
    with watched.window() as window:
        assert hang.asked.wait(DEADLINE)
        time.sleep(0.02)
    summary = watched.summary(window)
    assert summary["power_watts"] == [700, 700.5, 701]
    assert summary["not_available"]["power_watts"].startswith("NVML has not answered about ")
    hang.let_go.set()


# ---- what is asked when, and what a reading stands for


def test_slow_figures_are_read_in_turn_and_all_of_them_first(sampler: Make) -> None:
    counts = {query: Passes(value) for query, value in VALUES.items()}
    with sampler(dict(counts)).window():
        counts["throttle.reasons"].wait_for(1 + 4 * len(IN_TURN))
    clock, throttle = counts["clock.sm"].count, counts["throttle.reasons"].count
    assert abs(clock - throttle) <= 1
    for query in ("clock.memory", "power.draw", "temperature.gpu", "utilization.gpu"):
        assert 4 <= counts[query].count <= 2 + throttle / len(IN_TURN)


def test_a_reason_has_the_time_from_its_reading_to_the_next_one() -> None:
    window = GpuWindow()
    window.begin(10.0)
    for at, reasons in ((11.0, ("hw_thermal",)), (13.0, ("sw_power_cap",)), (14.0, ("hw_thermal", "sw_power_cap"))):
        window.take({"throttle": reasons}, at)
    window.end(20.0)
    # The first one stands for the time before it, too.
    assert window.summary({})["throttle_share"] == {"hw_thermal": (3.0 + 6.0) / 10, "sw_power_cap": (1.0 + 6.0) / 10}


def test_shares_are_of_the_time_in_which_the_window_was_open(sampler: Make) -> None:
    watched, window = sampler({**VALUES, "throttle.reasons": ("hw_thermal",)}, NEVER), GpuWindow()
    for begin, end in ((100.0, 104.0), (200.0, 206.0)):
        watched.sampler.open(GPU, window, begin)
        watched.sampler.close(GPU, window, end)
    summary = watched.summary(window)
    assert (summary["seconds"], summary["samples"]) == (10.0, 2)
    assert summary["throttle_share"] == {"hw_thermal": 1.0}


def test_constants_of_the_card_are_read_once_and_are_optional(sampler: Make) -> None:
    asked, passes = Passes(1980), Passes()
    watched = sampler({**VALUES, "clock.sm.max": asked, "throttle.reasons": passes})
    for _ in range(2):
        with watched.window() as window:
            passes.wait_for(passes.count + 3)
    assert (watched.summary(window)["sm_clock_max_mhz"], asked.count) == (1980, 1)
    summary = sampler({**VALUES, "temperature.slowdown": 0}, NEVER).closed()
    assert summary["not_available"] == {}
    assert "sm_clock_max_mhz" not in summary
    assert "slowdown_celsius" not in summary


# ---- several GPUs


def test_gpus_are_asked_only_in_their_own_windows_and_in_time(sampler: Make) -> None:
    asked, passes = Passes(), Passes()
    mine = sampler({**VALUES, "throttle.reasons": asked}, 0.05, **{OTHER: {**VALUES, "throttle.reasons": passes}})
    with Watched(mine.sampler, OTHER).window():
        while passes.count < 3:  # far more often than a round is due
            mine.closed()
        before = asked.count
        passes.wait_for(passes.count + 3)
    assert asked.count == before
