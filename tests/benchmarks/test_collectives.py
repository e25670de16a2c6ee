from __future__ import annotations

import doctest
import json
import math
import os
import statistics
import subprocess
import sys
import textwrap
import time
import weakref

import pytest
import torch
import torch.distributed as dist

from pytest_gpucluster.benchmarks import collectives
from pytest_gpucluster.benchmarks.clock import ManualClock
from pytest_gpucluster.benchmarks.collectives import all_reduce, busbw_factor, finite_calls
from pytest_gpucluster.errors import InconclusiveMeasurement, WrongResult

CPU = torch.device("cpu")
DEADLINE_SECONDS = 60

PREAMBLE = """
import json, os, sys
import torch
import torch.distributed as dist
from pytest_gpucluster.benchmarks.clock import ManualClock
from pytest_gpucluster.benchmarks.collectives import all_reduce
from pytest_gpucluster.errors import GpuClusterError

rank, world_size, store = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
group, device = dist.group.WORLD, torch.device("cpu")

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

def outcome(function):
    try:
        return function()
    except GpuClusterError as error:
        return f"{type(error).__name__}: {error}"

def say(value):
    print("SAID " + json.dumps(value), flush=True)
"""


# A process that still refers to a group when its interpreter ends may be aborted by gloo.
EPILOGUE = """
dist.barrier()
sys.stdout.flush()
os._exit(0)
"""


def run_ranks(tmp_path, body, *, ranks=2):
    """Run a script on ``ranks`` processes; return what each one said. Past the deadline all are killed."""
    script = tmp_path / "script.py"
    script.write_text(PREAMBLE + textwrap.dedent(body) + EPILOGUE, encoding="utf-8")
    outputs = [tmp_path / f"rank-{rank}.txt" for rank in range(ranks)]
    processes = []
    try:
        for rank, output in enumerate(outputs):
            with output.open("wb") as stream:
                processes.append(
                    subprocess.Popen(
                        [sys.executable, str(script), str(rank), str(ranks), str(tmp_path / "store")],
                        stdout=stream,
                        stderr=subprocess.STDOUT,
                        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
                    )
                )
        end = time.monotonic() + DEADLINE_SECONDS
        codes = [process.wait(timeout=max(0.1, end - time.monotonic())) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    texts = [output.read_text(encoding="utf-8", errors="replace") for output in outputs]
    assert codes == [0] * ranks, "\n".join(texts)
    return [
        [json.loads(line.removeprefix("SAID ")) for line in text.splitlines() if line.startswith("SAID ")]
        for text in texts
    ]


@pytest.fixture
def alone():
    """A group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


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


def measure(group, reduce, **arguments):
    given = {"payload_bytes": 4000, "seconds": 4.0, "warmup_seconds": 1.0} | arguments
    return all_reduce(group, CPU, clock=reduce.clock, reduce=reduce, **given)


def test_doctests_hold():
    assert doctest.testmod(collectives).failed == 0


def test_one_rank_has_no_busbw():
    with pytest.raises(ValueError, match="2 ranks and more, not for 1"):
        busbw_factor(1)


def test_one_rank_reports_algbw_only(alone):
    result = measure(alone, Summing(0.01))
    assert result.algbw_bytes_per_second == pytest.approx(400_000)
    assert result.samples_algbw_bytes_per_second == pytest.approx([400_000] * result.windows)
    assert result.busbw_bytes_per_second is None
    assert result.samples_busbw_bytes_per_second == ()


def test_windows_and_calls_follow_the_warm_up(alone):
    reduce = Summing(0.01)
    result = measure(alone, reduce)
    assert (result.calls_per_window, result.windows) == (10, 40)  # windows of 0.1 s for 4 s
    assert result.samples_seconds_per_call == pytest.approx([0.01] * 40)
    warm_up = reduce.calls - 10 * 40 - 2
    assert 100 <= warm_up <= 110
    assert result.verified_elements == 2 * 1000


def test_a_slow_fabric_has_a_low_bandwidth(alone):
    fast, slow = (measure(alone, Summing(seconds)) for seconds in (0.01, 0.03))
    assert slow.algbw_bytes_per_second == pytest.approx(fast.algbw_bytes_per_second / 3)


@pytest.mark.parametrize(
    ("call_seconds", "seconds", "calls", "windows"),
    [(1.0, 3.0, 1, 8), (1e-3, 0.08, 10, 8), (1e-3, 0.8, 100, 8), (10.0, 1e6, 1, 1000)],
    ids=["slow call", "short measurement", "measurement", "endless measurement"],
)
def test_the_number_of_windows_is_bounded(alone, call_seconds, seconds, calls, windows):
    result = measure(alone, Summing(call_seconds), seconds=seconds, warmup_seconds=0)
    assert (result.calls_per_window, result.windows) == (calls, windows)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("value", [math.nan, math.inf, 0.0], ids=str)
def test_a_wrong_sum_names_rank_element_found_and_expected(alone, dtype, value):
    def fault(tensor):
        assert tensor[17] != value
        tensor[17] = value

    with pytest.raises(WrongResult) as caught:
        measure(alone, Summing(at=0, fault=fault), dtype=dtype)
    message = str(caught.value)
    assert message.startswith(f"rank 0: all_reduce of 4000 B {dtype} over 1 ranks: 1 of ")
    assert f"sums are wrong, the first at offset 17: found {value:g}, expected " in message
    assert message.endswith("which rank 0 contributed")


def test_a_sum_that_turns_wrong_under_load_is_found_after_the_windows(alone):
    reduce = Summing()
    calls = measure(alone, reduce) and reduce.calls

    def fault(tensor):
        tensor[1] += 1

    with pytest.raises(WrongResult, match="1 of 1000 sums are wrong, the first at offset 1: found"):
        measure(alone, Summing(at=calls - 1, fault=fault))


def test_sums_are_verified_in_parts_and_the_offset_counts_through(alone, monkeypatch):
    monkeypatch.setattr(collectives, "_CHUNK_ELEMENTS", 300)
    assert measure(alone, Summing()).verified_elements == 2000

    def fault(tensor):
        tensor[[650, 999]] = -1

    with pytest.raises(WrongResult, match="2 of 1000 sums are wrong, the first at offset 650: found -1"):
        measure(alone, Summing(at=0, fault=fault))


def test_a_clock_that_stands_still_is_inconclusive(alone):
    with pytest.raises(InconclusiveMeasurement, match="the clock did not advance"):
        measure(alone, Summing(seconds=0.0))


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dtype": "float"}, "dtype is one of fp32, bf16, fp16, not 'float'"),
        ({"payload_bytes": 0}, "payload_bytes must be a positive multiple of 4 for fp32, not 0"),
        ({"payload_bytes": 1001}, "multiple of 4 for fp32, not 1001"),
        ({"seconds": 0}, "seconds must be positive"),
        ({"seconds": math.nan}, "seconds=nan"),
        ({"warmup_seconds": -1}, "warmup_seconds=-1"),
    ],
    ids=["dtype", "empty", "uneven", "no time", "nan", "negative"],
)
def test_an_argument_out_of_range_is_refused(alone, arguments, message):
    with pytest.raises(ValueError, match=message):
        measure(alone, Summing(), **arguments)


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@pytest.mark.parametrize("ranks", [2, 3, 8, 1000])
def test_sums_stay_finite_as_long_as_promised(ranks, dtype):
    largest, total = torch.finfo(collectives.DTYPES[dtype]).max, float(collectives.LARGEST_ADDEND)
    for _ in range(finite_calls(ranks, dtype) - 1):
        total *= ranks
    assert total <= largest < total * ranks


def test_ranks_agree_on_the_first_ranks_plan_and_each_reports_its_own_time(tmp_path):
    said = run_ranks(
        tmp_path,
        """
        # Rank 1 is so slow that, alone, it would plan other windows and another warm-up.
        reduce = Clocked(0.01 if rank == 0 else 0.5)
        result = all_reduce(group, device, payload_bytes=4000, seconds=2.0, warmup_seconds=0.5,
                            clock=reduce.clock, reduce=reduce)
        say([result.calls_per_window, result.windows, reduce.calls])
        say([result.algbw_bytes_per_second, result.busbw_bytes_per_second])
        """,
    )
    assert said[0][0] == said[1][0]
    assert said[0][0][:2] == [10, 20]
    assert said[0][1] == pytest.approx([400_000, 400_000])
    assert said[1][1] == pytest.approx([8_000, 8_000])


def test_three_ranks_measure_and_a_subgroup_names_the_global_rank(tmp_path):
    said = run_ranks(
        tmp_path,
        """
        for dtype in ("fp32", "bf16"):
            result = all_reduce(group, device, payload_bytes=4002 * 2, dtype=dtype, seconds=0.05, warmup_seconds=0.01)
            say([result.ranks, result.algbw_bytes_per_second, result.busbw_bytes_per_second,
                 result.seconds_per_call, result.samples_seconds_per_call])
        pair = dist.new_group([1, 2])
        if rank > 0:
            def fault(tensor):
                tensor[5] = -7
            reduce = Clocked(0.1, at=0 if rank == 2 else None, fault=fault)
            measured = lambda: all_reduce(pair, device, payload_bytes=400, seconds=1, warmup_seconds=0,
                                          clock=reduce.clock, reduce=reduce).windows
            say(outcome(measured))
        else:
            try:
                all_reduce(pair, device, payload_bytes=400, seconds=1, warmup_seconds=0)
            except (ValueError, TypeError) as error:
                say(str(error))
        """,
        ranks=3,
    )
    for rank in range(3):
        for ranks, algbw, busbw, seconds, samples in said[rank][:2]:
            assert ranks == 3
            assert algbw == pytest.approx(8004 / seconds)
            assert busbw == pytest.approx(algbw * 4 / 3)
            assert seconds == pytest.approx(statistics.median(samples))
    assert said[1][2] == 10
    assert said[2][2].startswith("WrongResult: rank 2: all_reduce of 400 B fp32 over 2 ranks: 1 of 100 sums are")
    assert "offset 5: found -7, expected" in said[2][2]
    assert said[2][2].endswith(("which rank 1 contributed", "which rank 2 contributed"))
    assert "rank 0 is not in the group" in said[0][2]


def test_a_rank_with_a_wrong_sum_keeps_no_other_rank_waiting(tmp_path):
    said = run_ranks(
        tmp_path,
        """
        def flip_bit(tensor):
            tensor.view(torch.int32)[123] ^= 1
        for at in (0, None):
            reduce = Clocked(0.1, at=at if rank == 1 else None, fault=flip_bit)
            say(outcome(lambda: all_reduce(group, device, payload_bytes=4000, seconds=1, warmup_seconds=0,
                                           clock=reduce.clock, reduce=reduce).windows))
        """,
    )
    assert said[0] == [10, 10]
    assert said[1][0].startswith("WrongResult: rank 1: ")
    assert "offset 123" in said[1][0]
    assert said[1][1] == 10


def test_a_rank_that_adds_old_data_is_found_by_all(tmp_path):
    said = run_ranks(
        tmp_path,
        """
        class Stale(Clocked):
            def __call__(self, tensor, group):
                if rank == 1:
                    if self.calls == 0:
                        self.old = tensor.clone()
                    tensor.copy_(self.old)
                super().__call__(tensor, group)
        reduce = Stale(0.1)
        say(outcome(lambda: all_reduce(group, device, payload_bytes=4000, seconds=1, warmup_seconds=0,
                                       clock=reduce.clock, reduce=reduce).windows))
        """,
    )
    for rank in range(2):
        assert said[rank][0].startswith(f"WrongResult: rank {rank}: all_reduce of 4000 B fp32 over 2 ranks: ")


def test_a_rank_that_adds_nothing_is_found_by_all(tmp_path):
    said = run_ranks(
        tmp_path,
        """
        class Silent(Clocked):
            def __call__(self, tensor, group):
                if rank == 1:
                    tensor.zero_()
                super().__call__(tensor, group)
        reduce = Silent(0.1)
        say(outcome(lambda: all_reduce(group, device, payload_bytes=4000, seconds=1, warmup_seconds=0,
                                       clock=reduce.clock, reduce=reduce).windows))
        """,
    )
    for rank in range(2):
        assert "500 of 1000 sums are wrong" in said[rank][0]
        assert said[rank][0].endswith("which rank 1 contributed")
