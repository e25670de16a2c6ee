"""All links of a node at once: bytes of each rank in a common window, and what one rank finds holds nobody up."""

import textwrap

import forked_ranks
import pytest
import torch
from device_parts import device_of
from hypothesis import given
from hypothesis import strategies as st

from pytest_gpucluster.benchmarks.host_link_concurrent import Plan, measure_host_links_concurrently
from pytest_gpucluster.device.backends import Cpu
from pytest_gpucluster.device.clock import ManualClock
from pytest_gpucluster.errors import WrongResult
from pytest_gpucluster.metrics.sampling import Sampling

CPU = torch.device("cpu")
SAMPLING = Sampling(warmup_seconds=0, window_seconds=0.8, longest_seconds=2, tolerance_ratio=0.01)

PREAMBLE = """
from device_parts import device_of
from pytest_gpucluster.benchmarks import host_link_concurrent
from pytest_gpucluster.device.clock import ManualClock
from pytest_gpucluster.device.backends import Cpu
from pytest_gpucluster.benchmarks.host_link_concurrent import measure_host_links_concurrently
from pytest_gpucluster.errors import EnvironmentBroken, GpuClusterError
from pytest_gpucluster.metrics.sampling import Sampling

class Timed(Cpu):
    "torch's own, each taking ``seconds`` of a manual clock; copy ``at`` leaves a wrong bit."
    def __init__(self, seconds=0.01, at=None):
        super().__init__(device)
        self.timer, self.seconds, self.at, self.calls = ManualClock(), seconds, at, 0
    def clock(self):
        return self.timer

    def copy_over_link(self, direction, source, target):
        super().copy_over_link(direction, source, target)
        self.timer.advance(self.seconds)
        if self.calls == self.at:
            target[3] ^= 1
        self.calls += 1

def outcome(copier, **arguments):
    given = dict(payload_bytes=8000, copies=8, direction="h2d", sampling=Sampling(
        warmup_seconds=0, window_seconds=0.8, longest_seconds=2, tolerance_ratio=0.01)) | arguments
    try:
        with device_of(copier):
            return measure_host_links_concurrently(group, device, given.pop("direction"), **given)
    except (GpuClusterError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
"""

SCRIPT = """
told = {}
timed = Timed(seconds=1 / 64 if rank else 1 / 128)
result = outcome(timed)
told["slow"] = [result.bytes_per_second.median, result.bytes_per_second.inconclusive, timed.calls]

def refuse(*_, **__):
    raise EnvironmentBroken("no memory here")

takes = host_link_concurrent.host_memory
if rank == 1:
    host_link_concurrent.host_memory = refuse
told["no memory"] = outcome(Timed())
host_link_concurrent.host_memory = takes

told["different"] = outcome(Timed(), copies=8 if rank else 4)
wrong = outcome(Timed(at=9 if rank else None))
told["wrong"] = wrong if isinstance(wrong, str) else wrong.bytes_per_second.inconclusive
told["clock"] = outcome(Timed(0.0 if rank else 0.01))
say(told)
"""


@pytest.fixture(scope="module")
def told():
    """What each of two ranks came to, one after the other in the same processes: nobody may have waited in vain."""
    said = forked_ranks.run_script(PREAMBLE + textwrap.dedent(SCRIPT), ranks=2)
    return [of_rank for [of_rank] in said]


class Timed(Cpu):
    def __init__(self, seconds=0.01):
        super().__init__(CPU)
        self.timer, self._seconds = ManualClock(), seconds

    def clock(self):
        return self.timer

    def copy_over_link(self, direction, source, target):
        super().copy_over_link(direction, source, target)
        self.timer.advance(self._seconds)


def measure(group, copier, direction="h2d", **others):
    given = {"payload_bytes": 8000, "copies": 8, "sampling": SAMPLING} | others
    with device_of(copier):
        return measure_host_links_concurrently(group, CPU, direction, **given)


@pytest.mark.parametrize("direction", ["h2d", "d2h"])
def test_one_rank_alone_is_a_common_window_too(alone, direction):
    result = measure(alone, Timed(1 / 128), direction)
    assert result.bytes_per_second.median == pytest.approx(8000 * 128)
    assert (result.mode, result.directions, result.size) == ("together", (direction,), "8 kB")


def test_wrong_data_outweigh_a_clock_that_stands_still(alone):
    class Wrong(Timed):
        def copy_over_link(self, direction, source, target):
            super().copy_over_link(direction, source, target)
            target[0] += 1

    with pytest.raises(WrongResult, match=r"h2d copy 0: 1 of 1000 8-byte words"):
        measure(alone, Wrong(0.0))


def test_both_directions_are_refused(alone):
    with pytest.raises(ValueError, match="direction is one of h2d, d2h, not 'both'"):
        measure(alone, Timed(), "both")


@given(
    seconds=st.lists(st.floats(1e-4, 1e-2), min_size=1, max_size=9),
    most=st.integers(1, 64),
    before=st.integers(1, 64),
)
def test_in_a_plan_no_rank_does_more_than_is_kept_and_the_fastest_does_most(seconds, most, before):
    plan = Plan(copies=(min(before, most),) * len(seconds)).after(seconds, most=most, sampling=SAMPLING)
    assert all(1 <= count <= most for count in plan.copies)
    assert plan.copies[seconds.index(min(seconds))] == max(plan.copies)
    assert plan.windows >= 1


def test_a_slower_rank_copies_less_and_all_end_at_about_the_same_time():
    plan = Plan(copies=(32, 32, 32)).after([1e-3, 2e-3, 4e-3], most=32, sampling=SAMPLING)
    assert plan.copies == (32, 16, 8)
    assert Plan(copies=(1, 1)).after([1.0, 1.0], most=32, sampling=SAMPLING) == Plan(copies=(10, 10), windows=1)


def test_each_rank_has_its_own_rate_and_a_slow_one_is_seen(told):
    (fast, _, many), (slow, inconclusive, few) = (of_rank["slow"] for of_rank in told)
    assert fast == pytest.approx(8000 * 128)
    assert slow == pytest.approx(8000 * 64)
    assert inconclusive == ""
    assert many > few


def test_a_rank_without_what_it_needs_is_named_on_the_others(told):
    assert told[1]["no memory"] == "EnvironmentBroken: no memory here"
    assert told[0]["no memory"].startswith("PeerGaveUp: rank 1 has failed")


def test_ranks_that_measure_something_else_are_named_on_all(told):
    for of_rank in told:
        assert of_rank["different"] == (
            "EnvironmentBroken: the ranks do not measure the same: rank 1 copies h2d 8 x 8 kB, rank 0 copies h2d 4 x "
            "8 kB. Give all nodes the same suite, profile and workload"
        )


def test_wrong_data_are_told_by_the_rank_that_has_them_after_the_last_collective(told):
    expected = "WrongResult: cpu: host link h2d together, 8 kB: h2d copy 9: 1 of 1000 8-byte words are wrong"
    assert told[0]["wrong"] == ""
    assert told[1]["wrong"].startswith(expected)


def test_a_clock_that_stands_still_on_one_rank_is_told_on_all(told):
    for of_rank in told:
        expected = "InconclusiveMeasurement: host links together: the clock of rank 1 did not advance"
        assert of_rank["clock"].startswith(expected)
