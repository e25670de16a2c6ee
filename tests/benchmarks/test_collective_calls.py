"""Every collective, carried out by gloo between processes: times, sizes, and what each fault makes of them."""

import re

import forked_ranks
import pytest

from pytest_gpucluster.benchmarks.collective_payload import COLLECTIVES

SCRIPT = """
from pytest_gpucluster.benchmarks import collectives
from pytest_gpucluster.benchmarks.collectives import CALLS, measure_collective
from pytest_gpucluster.benchmarks.collective_payload import COLLECTIVES
from pytest_gpucluster.metrics.sampling import Sampling

SHORT = Sampling(warmup_seconds=0.0, window_seconds=0.01, longest_seconds=0.01, tolerance_ratio=3)

def measured(collective, of=group, **arguments):
    given = {"payload_bytes": 3600, "dtype": "fp32", "sampling": SHORT} | arguments
    return measure_collective(collective, of, device, **given)

def broken(collective, on, fault, **arguments):
    "What comes of a collective after whose calls one rank's data are changed."
    right = CALLS[collective]
    def call(sent, received, group):
        right(sent, received, group)
        fault(received)
    if rank == on:
        CALLS[collective] = call
    try:
        return outcome(lambda: measured(collective, **arguments) and "")
    finally:
        CALLS[collective] = right
"""

HEALTHY = """
for collective in COLLECTIVES:
    for dtype in ("fp32", "bf16", "fp16"):
        result = measured(collective, dtype=dtype)
        assert result.collective == collective and result.dtype == dtype and result.ranks == 3
        say([collective, result.payload_bytes, result.verified_elements,
             result.busbw.median / result.algbw.median, result.payload_bytes / result.latency.samples[0],
             result.algbw.samples[0]])
"""

FAULTY = """
def flip(received):
    received.view(torch.int32)[5] ^= 1
for collective in COLLECTIVES:
    say(broken(collective, 1, flip))
# A rank that gets nothing: what it had before stays.
say(broken("all_gather", 2, lambda received: received.fill_(-1)))
say([outcome(lambda: measured("broadcast" if rank == 1 else "all_gather")),
     outcome(lambda: measured("gather"))])
# A fault that is there only while calls are timed.
class Timed:
    now = False
    def __enter__(self): Timed.now = True
    def __exit__(self, *error): Timed.now = False
for collective in COLLECTIVES:
    say(broken(collective, 1, lambda received: flip(received) if Timed.now else None, during=Timed()))
pair = dist.new_group([1, 2])
if rank > 0:
    CALLS["send_recv"], right = (lambda sent, received, group: (right(sent, received, group), flip(received))
                                 if rank == 2 else right(sent, received, group)), CALLS["send_recv"]
    say(outcome(lambda: measured("send_recv", pair) and ""))
"""


@pytest.fixture(scope="module")
def healthy():
    return forked_ranks.run_script(SCRIPT + HEALTHY, ranks=3)


@pytest.fixture(scope="module")
def faulty():
    return forked_ranks.run_script(SCRIPT + FAULTY, ranks=3)


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_each_collective_is_right_in_every_dtype_and_has_the_bandwidths_of_nccl_tests(healthy, collective):
    factor = {"all_reduce": 4 / 3, "broadcast": 1, "send_recv": 1}.get(collective, 2 / 3)
    for rank in range(3):
        found = [numbers for name, *numbers in healthy[rank] if name == collective]
        assert len(found) == 3
        for itemsize, (payload_bytes, verified, ratio, algbw, told) in zip((4, 2, 2), found, strict=True):
            # 400 bytes for each are no whole multiple of 16 in three parts of 3600 bytes.
            divided = collective in ("all_gather", "reduce_scatter", "all_to_all")
            assert payload_bytes == (3 * (1200 // 16 * 16) if divided else 3600)
            received = payload_bytes // itemsize // (3 if collective == "reduce_scatter" else 1)
            # Between the windows sums in place are compared where they are exact, as often as they are filled anew.
            assert verified == 3 * received if collective != "all_reduce" else verified in range(2 * received, 10**6)
            assert ratio == pytest.approx(factor)
            assert told == pytest.approx(algbw, rel=1e-6)


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_a_rank_that_gets_wrong_data_names_itself_the_place_and_from_whom(faulty, collective):
    at = COLLECTIVES.index(collective)
    told = [faulty[rank][at] for rank in range(3)]
    is_sum = collective in ("all_reduce", "reduce_scatter")
    assert told[0] == told[2] == (told[1] if collective == "reduce_scatter" else "")  # one alone receives a part of it
    who = "" if is_sum else "rank 1: "  # who has spoilt a sum, is not known
    assert told[1].startswith(f"WrongResult: {who}{collective} of 3600 B fp32 over 3 ranks: 1 of ")
    assert re.search(
        r"offset 5: found .* rank [0-2]; any rank" if is_sum else "offset 5: found .* rank 0 sent$", told[1]
    )
    assert ("; rank 1 received it" in told[1]) is (collective == "reduce_scatter")


# An all-reduce adds what is wrong to the data of all: in test_collectives.
@pytest.mark.parametrize("collective", [one for one in COLLECTIVES if one != "all_reduce"])
def test_data_that_are_wrong_only_while_calls_are_timed_are_found(faulty, collective):
    told = [faulty[rank][len(COLLECTIVES) + 2 + COLLECTIVES.index(collective)] for rank in range(3)]
    is_sum = collective == "reduce_scatter"
    assert told[1].startswith(
        f"WrongResult: {'' if is_sum else 'rank 1: '}{collective} of 3600 B fp32 over 3 ranks: 1 of "
    )
    assert told[0] == told[2] == (told[1] if is_sum else "")


def test_a_rank_whose_data_never_arrive_is_found(faulty):
    told = [faulty[rank][len(COLLECTIVES)] for rank in range(3)]
    assert told[:2] == ["", ""]
    assert re.search(r"900 of 900 elements are.* 0: found -1, expected", told[2])


def test_ranks_that_measure_different_collectives_are_told_so_on_all_ranks(faulty):
    for rank in range(3):
        different, unknown = faulty[rank][len(COLLECTIVES) + 1]
        found = "rank 1 broadcast of 3600 B fp32, rank 0 all_gather of 3600 B fp32"
        assert re.search(rf"EnvironmentBroken: .*not measure.*: {found}\. Give all nodes", different)
        assert re.search(r"ValueError: .*collective is.* all_reduce, all_gather, ", unknown)
        assert unknown.endswith("not 'gather'; did you mean 'all_gather'?")


def test_a_subgroup_names_the_ranks_of_the_world(faulty):
    assert faulty[1][-1] == ""
    assert faulty[2][-1].startswith("WrongResult: rank 2: send_recv of 3600 B fp32 over 2 ranks: ")
    assert faulty[2][-1].endswith("which rank 1 sent")
