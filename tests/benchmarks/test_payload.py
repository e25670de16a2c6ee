import re

import pytest
import torch
from each import of_each

from pytest_gpucluster.benchmarks import collective_payload
from pytest_gpucluster.benchmarks.collective_payload import LARGEST_ADDEND, Payload, finite_calls, needed_bytes

CPU = torch.device("cpu")


@of_each("dtype", ["fp32", "bf16", "fp16"])
@of_each("ranks", [2, 3, 8, 1000])
def test_sums_stay_finite_as_long_as_promised(ranks, dtype):
    largest, total = torch.finfo(collective_payload.DTYPES[dtype]).max, float(LARGEST_ADDEND)
    for _ in range(finite_calls(ranks, dtype) - 1):
        total *= ranks
    assert total <= largest < total * ranks


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_every_addend_is_a_whole_number_that_the_dtype_holds_exactly(alone, dtype):
    made = Payload(alone, CPU, 4000, dtype)
    for _ in range(3):
        made.fill()
        values = made.sent.double()
        assert bool((values == values.round()).all())
        assert 1 <= float(values.min()) <= float(values.max()) <= LARGEST_ADDEND
        assert made.defect() is None


def test_a_payload_is_filled_with_other_data_each_time(alone):
    made = Payload(alone, CPU, 4000, "fp32")
    made.fill()
    before = made.sent.clone()
    made.fill()
    assert bool((made.sent != before).all())


@pytest.mark.parametrize("index", [0, 150, 299, 300, 999])
def test_each_single_wrong_bit_is_found_in_every_part(alone, monkeypatch, index):
    monkeypatch.setattr(collective_payload, "CHUNK_ELEMENTS", 300)
    for bit in range(32):
        made = Payload(alone, CPU, 4000, "fp32")
        made.fill()
        made.sent.view(torch.int32)[index] ^= -(2**31) if bit == 31 else 1 << bit
        assert re.search(rf"1 of 1000 .*are wrong.* {index}: found", made.defect() or "")


def test_what_ranks_contribute_and_send_are_these_numbers(alone):
    made = Payload(alone, CPU, 12, "fp32")
    for expected in ([5, 8, 11], [9, 12, 15]):
        made.fill()
        assert made.sent.tolist() == expected
    moved = Payload(alone, CPU, 12, "fp32", "all_gather")
    moved.fill()
    assert moved._values(0, 0, 3).tolist() == [2, 5, 8]
    assert moved._values(128, 0, 2).tolist() == [4, 11]


@pytest.mark.parametrize(("ranks", "calls", "is_exact"), [(3, 10, True), (3, 11, False), (8, 30, True), (6, 11, False)])
def test_sums_in_place_are_compared_where_they_are_exact(alone, monkeypatch, ranks, calls, is_exact):
    made = Payload(alone, CPU, 4000, "fp32")
    made.fill()
    made.sent.fill_(float("nan"))
    monkeypatch.setattr(made, "_ranks", ranks)
    monkeypatch.setattr(made, "_calls", calls)
    # 127 N odd(N)^(calls - 1) <= 2^24 for each number N of ranks and its odd part.
    assert (127 * ranks * (ranks // (ranks & -ranks)) ** (calls - 1) <= 2**24) is is_exact
    assert (made.defect() is not None) is is_exact


def test_a_payload_is_verified_and_filled_again_before_a_sum_overflows_and_not_sooner(alone, monkeypatch):
    made = Payload(alone, CPU, 4000, "fp32")
    monkeypatch.setattr(made, "finite_calls", 10)
    fills = []
    monkeypatch.setattr(made, "fill", lambda: (fills.append(made._calls), setattr(made, "_calls", 0)))
    monkeypatch.setattr(made, "defect", lambda: f"wrong after {made._calls} calls")
    found = [made.ready(4) for _ in range(5)]
    assert fills == [0, 8, 8]
    assert found == [None, None, "wrong after 8 calls", None, "wrong after 8 calls"]
    fills.clear()
    made._calls = 7
    made.ready(6)
    assert fills == [7]


def test_memory_is_counted_for_the_payload_and_for_one_part_of_what_verifies_it():
    part = needed_bytes(8 * 2**30, "fp32") - 8 * 2**30
    assert needed_bytes(64 * 2**30, "bf16") == 64 * 2**30 + part
    assert part == 2**30
    assert needed_bytes(4000, "fp32") < 100_000


def test_a_payload_of_more_elements_than_32_bits_can_count_is_made_and_checked_in_parts(alone):
    made = Payload(alone, torch.device("meta"), 8 * 2**30, "bf16")
    assert made.sent.numel() == 2**32
    parts = list(made._expected())
    assert sum(len(values) for _, _, values in parts) == 2**32
    assert {len(values) for _, _, values in parts} == {2**24}
    assert {values.dtype for _, _, values in parts} == {torch.int64}


def test_of_a_reduce_scatter_each_rank_has_its_own_part_of_the_sums(monkeypatch):
    ranks, made = 3, []
    monkeypatch.setattr(collective_payload.dist, "get_world_size", lambda group: ranks)
    monkeypatch.setattr(collective_payload.dist, "get_global_rank", lambda group, rank: rank + 10)
    for rank in range(ranks):
        monkeypatch.setattr(collective_payload.dist, "get_rank", lambda group=None, rank=rank: rank)
        made.append(Payload(None, CPU, 3600, "bf16", "reduce_scatter"))
    for _ in range(2):
        for one in made:
            one.fill()
        assert re.search(r"600 of 600 .*are wrong.* 0: found -1", made[1].defect())
        total = sum(one.sent.double() for one in made)
        for one, part in zip(made, total.chunk(ranks), strict=True):
            one.received.copy_(part)
            assert one.defect() is None
    made[2].received[5] += 1
    assert re.search(r"1 of 600 .*are wrong.* 5: found ", made[2].defect())
    # Element 5 of the third part is number 1205 of the whole, and the second filling begins one rank further.
    assert made[2].defect().endswith(f"the addend of rank {(1205 + 2) % ranks + 10}; any rank may have spoilt it")
    for one in made:
        one.ready(3)
    total = sum(one.sent.double() for one in made)
    for one, part in zip(made, total.chunk(ranks), strict=True):
        one.received.copy_(part)
        assert one.defect() is None  # beside their addends, three calls give the sums of one


@of_each("case", [(2, "fp32", True), (3, "fp32", True), (2, "bf16", True), (3, "bf16", False)])
def test_sums_in_place_are_those_of_all_calls_where_the_dtype_holds_them(monkeypatch, case):
    ranks, dtype, exact = case
    monkeypatch.setattr(collective_payload.dist, "get_world_size", lambda group: ranks)
    monkeypatch.setattr(collective_payload.dist, "get_global_rank", lambda group, rank: rank)
    made = []
    for rank in range(ranks):
        monkeypatch.setattr(collective_payload.dist, "get_rank", lambda group=None, rank=rank: rank)
        made.append(Payload(None, CPU, 3600, dtype))
        made[-1].ready(3)
    total = sum(one.sent.double() for one in made)
    for one in made:
        one.received.copy_(total * ranks**2)
        assert one.defect() is None
        one.received[7] *= 2
        assert bool(re.search(r": 1 of .*after 3 calls in place, .* 7: found", one.defect() or "")) == exact


def test_sums_beside_their_addends_never_grow(alone):
    made = Payload(alone, CPU, 4000, "fp16", "reduce_scatter")
    made.ready(10**6)
    before = made.sent.clone()
    made.ready(10**6)
    assert torch.equal(made.sent, before)


def test_memory_is_counted_for_what_a_rank_gives_and_what_it_gets():
    one = needed_bytes(2**30, "fp32", collective="broadcast", ranks=8)
    assert needed_bytes(2**30, "fp32", collective="all_to_all", ranks=8) == one + 2**30
    assert needed_bytes(2**30, "fp32", collective="all_gather", ranks=8) == one + 2**27
    assert needed_bytes(2**30, "fp32", collective="reduce_scatter", ranks=8) == one + 2**27
