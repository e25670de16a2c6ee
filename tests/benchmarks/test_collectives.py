import contextlib
import math
import re
import textwrap
import weakref
from unittest.mock import patch

import forked_ranks
import pytest
import torch
from device_parts import device_with, timed_by

from pytest_gpucluster.benchmarks.collectives import CALLS, measure_collective
from pytest_gpucluster.benchmarks.group import Ranks
from pytest_gpucluster.device.clock import RESOLUTION_SECONDS, ManualClock
from pytest_gpucluster.errors import InconclusiveMeasurement, WrongResult
from pytest_gpucluster.metrics.sampling import Sampling

CPU = torch.device("cpu")

PREAMBLE = """
from device_parts import timed_by
from pytest_gpucluster.device.clock import ManualClock
from pytest_gpucluster.benchmarks import collectives
from pytest_gpucluster.benchmarks.collectives import measure_collective
from pytest_gpucluster.metrics.sampling import Sampling

class Clocked:
    "An all-reduce whose calls take ``seconds`` of a manual clock; ``fault`` changes what call ``at`` leaves."
    def __init__(self, seconds, at=None, fault=None):
        self.clock, self.seconds, self.at, self.fault, self.calls = ManualClock(), seconds, at, fault, 0
    def __call__(self, tensor, group):
        dist.all_reduce(tensor, group=group)
        self.clock.advance(self.seconds)
        if self.calls == self.at:
            self.fault(tensor)
        self.calls += 1

def sampling(window=1.0, warmup=0.0, longest=None, tolerance=0.01):
    return Sampling(warmup_seconds=warmup, window_seconds=window, longest_seconds=longest or window,
                    tolerance_ratio=tolerance)

def measured(reduce, group=group, **arguments):
    "An all-reduce by a manual clock, which also tells how much time has passed."
    given = {"payload_bytes": 4000, "sampling": sampling()} | arguments
    collectives.CALLS["all_reduce"] = lambda sent, received, of: reduce(received, of)
    with timed_by(reduce.clock):
        return measure_collective("all_reduce", group, device, **given)
"""


def run_ranks(body, *, ranks=2):
    return forked_ranks.run_script(PREAMBLE + textwrap.dedent(body), ranks=ranks)


class Summing:
    """An all-reduce of one rank: nothing to do but to take time."""

    def __init__(self, seconds=0.01, at=None, fault=None):
        self.clock, self.calls, self.tensors = ManualClock(), 0, []
        self._seconds, self._at, self._fault = seconds, at, fault

    def __call__(self, tensor, group):
        self.clock.advance(self._seconds)
        if self.calls == self._at:
            self._fault(tensor)
        self.calls += 1
        self.tensors.append(weakref.ref(tensor))


SAMPLING = Sampling(warmup_seconds=1.0, window_seconds=4.0, longest_seconds=8.0, tolerance_ratio=0.01)


def measure(group, reduce, **arguments):
    """By a manual clock, which also tells how much time has passed."""
    given = {"payload_bytes": 4000, "sampling": SAMPLING} | arguments
    call = patch.dict(CALLS, all_reduce=lambda sent, received, of: reduce(received, of))
    with call, timed_by(reduce.clock):
        return measure_collective("all_reduce", group, CPU, **given)


def test_one_rank_reports_algbw_only(alone):
    result = measure(alone, Summing(0.01))
    assert result.algbw.median == pytest.approx(400_000)
    assert result.algbw.samples == pytest.approx([400_000] * len(result.latency.samples))
    assert result.busbw is result.slowest_busbw is result.average_busbw is None


def test_windows_and_calls_follow_the_warm_up(alone):
    reduce = Summing(2**-7)
    result = measure(alone, reduce)
    assert (result.calls_per_window, result.windows_per_sample) == (32, 1)  # samples of 0.25 s for 4 s
    assert result.latency.samples == (2**-7,) * 16
    assert result.latency.inconclusive == ""
    warm_up = reduce.calls - 32 * 16 - 2
    assert 128 <= warm_up <= 128 + 32
    assert result.verified_elements == 3 * 1000


def test_what_is_measured_meanwhile_sees_the_windows_and_neither_warm_up_nor_verification(alone):
    reduce, seen = Summing(0.01), []

    @contextlib.contextmanager
    def during():
        seen.append(reduce.calls)
        yield
        seen.append(reduce.calls)

    result = measure(alone, reduce, during=during())
    assert seen[1] - seen[0] == result.calls_per_window * len(result.latency.samples)
    assert seen[0] > 100
    assert reduce.calls == seen[1] + 1


def test_nothing_is_enqueued_between_the_barrier_and_the_calls(alone, monkeypatch):
    reduce, order = Summing(2**-7), []
    get_ahead, barrier, call = reduce.clock.get_ahead, Ranks.barrier, Summing.__call__

    def noted_get_ahead(launches, *, seconds):
        order.append(f"ahead of {launches}")
        get_ahead(launches, seconds=seconds)

    def noted_barrier(ranks):
        order.append("barrier")
        barrier(ranks)

    monkeypatch.setattr(reduce.clock, "get_ahead", noted_get_ahead)
    monkeypatch.setattr(Ranks, "barrier", noted_barrier)
    monkeypatch.setattr(Summing, "__call__", lambda *arguments: order.append("call") or call(*arguments))
    measure(alone, reduce)
    # The last call of all is the verification.
    assert order[-35:] == ["ahead of 33", "barrier", *["call"] * 32, "call"]


class Noisy(Summing):
    """Every other sample takes twice as long."""

    def __call__(self, tensor, group):
        super().__call__(tensor, group)
        if self.calls // 25 % 2:
            self.clock.advance(self._seconds)


def test_a_noisy_fabric_is_measured_longer_and_then_returned_as_inconclusive(alone):
    result = measure(alone, Noisy(0.01))
    calls = result.calls_per_window * result.windows_per_sample
    assert sum(result.latency.samples) * calls == pytest.approx(SAMPLING.at_most_seconds, rel=0.1)
    assert "1 % is allowed" in result.latency.inconclusive
    assert result.algbw.inconclusive == result.slowest_latency.inconclusive == result.latency.inconclusive
    assert result.latency.low < result.latency.high


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("value", [math.nan, math.inf, 0.0], ids=str)
def test_a_wrong_sum_names_rank_element_found_and_expected(alone, dtype, value):
    def fault(tensor):
        assert tensor[17] != value
        tensor[17] = value

    with pytest.raises(WrongResult) as caught:
        measure(alone, Summing(at=0, fault=fault), dtype=dtype)
    message = str(caught.value)
    assert message.startswith(f"all_reduce of 4000 B {dtype} over 1 ranks: 1 of ")
    assert re.search(rf"are wrong.* 17: found {value:g}, expected ", message)
    assert message.endswith("the addend of rank 0")


def test_a_sum_that_turns_wrong_under_load_is_found_after_the_windows(alone):
    reduce = Summing()
    calls = measure(alone, reduce) and reduce.calls

    def fault(tensor):
        tensor[1] += 1

    with pytest.raises(WrongResult, match=r"1 of 1000 .*are wrong.* 1: found"):
        measure(alone, Summing(at=calls - 1, fault=fault))


def test_one_wrong_bit_in_any_timed_call_of_exact_sums_in_place_is_found_by_all():
    said = run_ranks(
        """
        def flip(tensor):
            tensor.view(torch.int16)[7] ^= 1 << 9
        # Ten calls keep the sums finite: 15 is summed up and filled anew later, 33 is left by the last windows.
        for at in (15, 33):
            reduce = Clocked(0.1, at=at, fault=flip if rank == 1 else lambda tensor: None)
            say(outcome(lambda: len(measured(reduce, dtype="fp16", sampling=sampling(window=3.3)).latency.samples)))
            say(reduce.calls)
        """,
    )
    for early, calls, late, as_many in said:
        for found in (early, late):
            assert found.startswith("WrongResult: all_reduce of 4000 B fp16 over 2 ranks: 1 of 2000 sums")
            assert "at offset 7: found" in found
        assert calls == as_many > 34, "no rank waits for another, nor does one end sooner"


@pytest.mark.parametrize("seconds", [math.nan, math.inf], ids=str)
def test_a_clock_that_does_not_tell_the_time_is_inconclusive(alone, seconds):
    with pytest.raises(InconclusiveMeasurement, match=r"the clock.* 0 did not advance"):
        measure(alone, Summing(seconds=seconds))


def test_one_gpu_that_has_nothing_to_do_takes_what_its_clock_can_tell(alone, monkeypatch):
    idle, wall = Summing(seconds=0.0), iter(range(10_000))
    monkeypatch.setitem(CALLS, "all_reduce", lambda sent, received, group: idle(sent, group))
    with device_with(clock=lambda: idle.clock, now=lambda: next(wall) / 10):
        result = measure_collective("all_reduce", alone, CPU, payload_bytes=4000, sampling=SAMPLING)
    assert result.latency.median == pytest.approx(RESOLUTION_SECONDS / result.calls_per_window)


def test_a_wrong_sum_outweighs_a_clock_that_stands_still(alone):
    with pytest.raises(WrongResult, match="offset 3"):
        measure(alone, Summing(seconds=math.nan, at=0, fault=lambda tensor: tensor[3].fill_(-1)))


@pytest.mark.parametrize("at", [None, 0], ids=["measured", "wrong"])
def test_no_tensor_is_left_behind(alone, at):
    reduce = Summing(at=at, fault=lambda tensor: tensor.zero_())
    error = None
    try:
        measure(alone, reduce)
    except WrongResult as caught:
        error = caught  # kept, as a report keeps it
    assert (error is None) == (at is None)
    assert all(tensor() is None for tensor in reduce.tensors)


def test_an_unknown_dtype_is_refused(alone):
    with pytest.raises(ValueError, match="dtype is one of fp32, bf16, fp16, not 'float'"):
        measure(alone, Summing(), dtype="float")


def test_the_first_rank_decides_for_all_from_the_slowest_and_each_reports_its_own_time():
    said = run_ranks(
        """
        # Rank 1 alone is noisy: rank 0, which sees a steady series of its own, goes on for as long as rank 1 needs it.
        class Jumpy(Clocked):
            def __call__(self, tensor, group):
                super().__call__(tensor, group)
                if rank == 1 and self.calls // 25 % 2:
                    self.clock.advance(0.03)
        reduce = Jumpy(0.01 if rank == 0 else 0.02)
        result = measured(reduce, sampling=sampling(window=2.0, longest=4.0, warmup=0.5))
        say([result.calls_per_window, result.windows_per_sample, len(result.latency.samples), reduce.calls])
        say([result.latency.median, result.slowest_latency.median, result.mean_latency.median])
        say([result.slowest_busbw.median, result.average_busbw.median])
        say([result.latency.inconclusive, result.busbw.inconclusive])
        """,
    )
    assert said[0][0] == said[1][0]
    assert said[0][2] == said[1][2]
    assert said[0][3] == said[1][3]
    assert said[0][3][0] == said[0][3][1] != ""
    assert said[0][1][0] == pytest.approx(0.01)
    assert said[0][1][1] == said[1][1][1] == said[1][1][0] > 0.01
    assert said[0][1][2] == said[1][1][2]


def test_busbw_is_each_ranks_own_and_the_average_that_of_the_mean_time():
    said = run_ranks(
        """
        result = measured(Clocked(0.01 if rank == 0 else 0.03))
        say([result.algbw.median, result.busbw.median, result.slowest_busbw.median, result.average_busbw.median])
        """,
    )
    assert said[0][0] == pytest.approx([400_000, 400_000, 400_000 / 3, 200_000])
    assert said[1][0] == pytest.approx([400_000 / 3, 400_000 / 3, 400_000 / 3, 200_000])


def test_ranks_that_do_not_measure_the_same_are_told_so_on_all_ranks():
    said = run_ranks(
        """
        say(outcome(lambda: measured(Clocked(0.1), payload_bytes=4000 if rank == 0 else 8000)))
        say(outcome(lambda: measured(Clocked(0.1), dtype="fp32" if rank == 0 else "bf16")))
        say(outcome(lambda: measured(Clocked(0.1), sampling=sampling(window=1.0 + rank))))
        """,
    )
    assert said[0] == said[1]
    same = (
        "EnvironmentBroken: the ranks do not measure the same: rank 1 all_reduce of {}, rank 0 all_reduce of 4 kB "
        "fp32. Give all nodes the same"
    )
    for line, found in zip(said[0], ("8 kB fp32", "4 kB bf16", "4 kB fp32 with other settings or times"), strict=True):
        assert line.replace("4000 B", "4 kB").replace("8000 B", "8 kB").startswith(same.format(found))


def test_one_rank_without_memory_is_named_on_all_ranks():
    said = run_ranks(
        """
        from pytest_gpucluster.device.backends import Cpu
        Cpu.free_bytes = lambda device: 1000 if rank == 1 else 10**12
        say(outcome(lambda: measured(Clocked(0.1))))
        say(outcome(lambda: measure_collective("all_gather", group, device, payload_bytes=4000, sampling=sampling())))
        """,
    )
    assert said[0] == said[1]
    assert said[0][0].startswith("EnvironmentBroken: rank 1: all_reduce of 4000 B fp32 with its verification needs ")
    assert ["nccl.all_reduce.sizes=" in said[0][0], "nccl.collectives.sizes=" in said[0][1]] == [True, True]


def test_a_clock_that_stands_still_on_one_rank_is_inconclusive_on_all():
    said = run_ranks("say(outcome(lambda: measured(Clocked(0.1 if rank == 0 else 0.0))))")
    for rank in range(2):
        assert said[rank][0].startswith(f"InconclusiveMeasurement: rank {rank}: all_reduce of 4000 B fp32")
        assert re.search(r"the clock.* 1 did not advance", said[rank][0])


def test_a_rank_that_adds_old_data_or_nothing_is_found_by_all():
    said = run_ranks(
        """
        class Silent(Clocked):
            def __call__(self, tensor, group):
                if rank == 1:
                    tensor.zero_()
                super().__call__(tensor, group)
        class Stale(Clocked):
            def __call__(self, tensor, group):
                if rank == 1:
                    if self.calls == 0:
                        self.old = tensor.clone()
                    tensor.copy_(self.old)
                super().__call__(tensor, group)
        for kind in (Silent, Stale):
            say(outcome(lambda: len(measured(kind(0.1)).latency.samples)))
        """,
    )
    for silent, stale in said:
        assert stale.startswith("WrongResult: all_reduce of 4000 B fp32 over 2 ranks: ")
        assert "500 of 1000 sums are wrong" in silent
        assert silent.endswith("the addend of rank 1; any rank may have spoilt it")
