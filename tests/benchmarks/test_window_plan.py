import pytest
from each import of_each

from pytest_gpucluster.benchmarks.blocks import MOST_CALLS, MOST_WINDOWS, WindowPlan
from pytest_gpucluster.device.clock import SHORT_REGION_SECONDS
from pytest_gpucluster.metrics.sampling import MIN_SAMPLES, Sampling


def sampling(window=4.0):
    return Sampling(warmup_seconds=0, window_seconds=window, longest_seconds=window, tolerance_ratio=0.01)


def settled(call_seconds, beside_seconds=0.0, *, window=4.0, finite=10**6):
    """The plan when nothing changes any more, for calls and what is around a window taking so long."""
    plan = WindowPlan()
    for _ in range(20):
        took = plan.windows * (plan.calls * call_seconds + beside_seconds)
        plan = plan.after(call_seconds, took, sampling=sampling(window), finite_calls=finite)
    return plan.calls, plan.windows


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"call_seconds": 1.0}, (1, 1)),
        ({"call_seconds": 0.025}, (10, 1)),
        ({"call_seconds": 0.025, "window": 0.8}, (4, 1)),
        ({"call_seconds": 2**-10}, (256, 1)),
        ({"call_seconds": 2**-10, "finite": 32}, (32, 8)),
        ({"call_seconds": 2**-10, "finite": 32, "beside_seconds": 2**-5}, (32, 4)),
        ({"call_seconds": 1e-9, "window": 8.0}, (MOST_CALLS, MOST_WINDOWS)),
        ({"call_seconds": 2**-15}, (29, 282)),
    ],
    ids=[
        "slow call",
        "fast call",
        "short measurement",
        "many calls",
        "few finite calls",
        "costly windows",
        "instant",
        "quick",
    ],
)
def test_a_sample_lasts_a_quarter_of_a_second_or_its_share_of_the_measurement(arguments, expected):
    assert settled(**arguments) == expected


def test_the_first_call_which_connects_does_not_set_the_number_and_the_next_grow_step_by_step():
    plan, seen = WindowPlan(), []
    for call_seconds in (3.0, 1e-3, 1e-3, 1e-3):
        plan = plan.after(call_seconds, plan.calls * call_seconds, sampling=sampling(), finite_calls=10**6)
        seen.append(plan.calls)
    assert seen == [1, 10, 100, 250]


@of_each("call_seconds", [1e-7, 1e-5, 1e-3, 0.02, 0.2])
@of_each("window", [0.08, 3.0])
def test_enough_samples_fit_into_a_measurement_that_calls_are_short_enough_for(call_seconds, window):
    calls, windows = settled(call_seconds, window=window)
    sample_seconds = calls * windows * call_seconds
    assert sample_seconds <= max(window / MIN_SAMPLES * 1.5, call_seconds)


@of_each("call_seconds", [1e-6, 5e-6, 15e-6, 49e-6])
def test_windows_of_quick_calls_are_short_enough_for_the_host_to_get_ahead(call_seconds):
    plan = WindowPlan()
    assert plan.window_seconds > SHORT_REGION_SECONDS, "of the first window nothing is known"
    for _ in range(5):
        plan = plan.after(call_seconds, plan.calls * call_seconds, sampling=sampling(), finite_calls=10**6)
    assert plan.window_seconds < SHORT_REGION_SECONDS
    assert plan.call_seconds == call_seconds
