"""What arrives is checked without sending anything: all ranks of a group stand side by side in this process."""

import math
import re

import pytest
import torch

from pytest_gpucluster.benchmarks import collective_payload
from pytest_gpucluster.benchmarks.collective_payload import LARGEST_ADDEND, Payload

CPU = torch.device("cpu")
MOVED = ("all_gather", "all_to_all", "broadcast", "send_recv")


@pytest.fixture
def ranks(monkeypatch):
    """Make the payloads of all ranks of a group; numbers in the world are those in the group plus 10."""
    dist = collective_payload.dist

    def make(collective, count=3, payload_bytes=3600, dtype="fp32"):
        monkeypatch.setattr(dist, "get_world_size", lambda group: count)
        monkeypatch.setattr(dist, "get_global_rank", lambda group, rank: rank + 10)
        made = []
        for rank in range(count):
            monkeypatch.setattr(dist, "get_rank", lambda group=None, rank=rank: rank)
            made.append(Payload(None, CPU, payload_bytes, dtype, collective))
        for one in made:
            one.fill()
        return made

    return make


def move(all_ranks):
    """Carry out the collective by copies."""
    sent = [one.sent.clone() for one in all_ranks]
    for rank, one in enumerate(all_ranks):
        if one.shape.collective == "all_to_all":
            arrived = torch.cat([of.split(one.shape.part)[rank] for of in sent])
        elif one.shape.collective == "all_gather":
            arrived = torch.cat(sent)
        else:
            arrived = sent[0 if one.shape.collective == "broadcast" else rank - 1]
        one.received.copy_(arrived)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("collective", MOVED)
def test_what_has_arrived_as_it_was_sent_is_right_and_exact_in_every_dtype(ranks, collective, dtype):
    everyone = ranks(collective, dtype=dtype)
    for _ in range(3):
        move(everyone)
        for one in everyone:
            values = one.received.double()
            assert one.defect() is None
            assert bool((values == values.round()).all())
            assert 1 <= float(values.min()) <= float(values.max()) <= LARGEST_ADDEND
        for one in everyone:
            one.fill()


@pytest.mark.parametrize("collective", MOVED)
def test_before_a_call_nothing_has_arrived(ranks, collective):
    for rank, one in enumerate(ranks(collective)):
        if collective == "broadcast" and rank == 0:
            continue  # it has what it sends
        total = one.shape.received
        assert re.search(rf"{total} of {total} elements are.* 0: found -1, expected ", one.defect())


@pytest.mark.parametrize("collective", MOVED)
def test_data_of_an_earlier_call_are_wrong_everywhere(ranks, collective):
    everyone = ranks(collective)
    move(everyone)
    old = everyone[1].received.clone()
    for one in everyone:
        one.fill()
    everyone[1].received.copy_(old)
    total = everyone[1].shape.received
    assert f"{total} of {total} elements are wrong" in everyone[1].defect()


@pytest.mark.parametrize("value", [math.nan, math.inf, 0.0, -1.0], ids=str)
@pytest.mark.parametrize("index", [0, 299, 300, 899])
def test_each_wrong_element_is_found_with_its_place_and_the_rank_that_sent_it(ranks, monkeypatch, index, value):
    monkeypatch.setattr(collective_payload, "CHUNK_ELEMENTS", 128)
    everyone = ranks("all_gather")
    move(everyone)
    everyone[2].received[index] = value
    assert re.search(rf"1 of 900 elements are.* {index}: found {value:g}, expected ", everyone[2].defect() or "")
    assert everyone[2].defect().endswith(f"which rank {index // 300 + 10} sent")
    assert everyone[0].defect() is None


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_each_single_wrong_bit_is_found(ranks, dtype):
    whole, bits = (torch.int32, 32) if dtype == "fp32" else (torch.int16, 16)
    for bit in range(bits):
        everyone = ranks("send_recv", dtype=dtype)
        move(everyone)
        everyone[0].received.view(whole)[7] ^= -(2 ** (bits - 1)) if bit == bits - 1 else 1 << bit
        assert "1 of " in (everyone[0].defect() or "")


def test_parts_of_two_ranks_that_change_places_are_both_wrong(ranks):
    everyone = ranks("all_to_all")
    move(everyone)
    received, part = everyone[1].received, everyone[1].shape.part
    received[: 2 * part] = torch.cat([received[part : 2 * part], received[:part]])
    found = everyone[1].defect()
    count = int(found.partition(": all_to_all of")[2].split(": ")[1].split(" of ")[0])
    assert count >= 0.9 * 2 * part
    assert found.endswith("which rank 10 sent")


@pytest.mark.parametrize("distance", [1, 2, 3, 126, 127, 128, 256])
def test_data_that_arrive_at_a_wrong_offset_are_wrong(ranks, distance):
    everyone = ranks("send_recv", payload_bytes=40_000)
    move(everyone)
    everyone[0].received.copy_(everyone[0].received.roll(distance))
    assert everyone[0].defect() is not None


@pytest.mark.parametrize("other", [1, 2, 126, 127, 128, 254, 1023])
def test_hardly_any_two_ranks_of_many_give_the_same_at_the_same_place(ranks, other):
    [one, *_] = ranks("send_recv", count=2)
    same = one._values(0, 0, 1260) == one._values(other, 0, 1260)
    assert int(same.sum()) <= 1260 / 100


def test_one_filling_serves_any_number_of_calls(ranks):
    [one, *_] = ranks("all_gather")
    one.ready(10**6)
    before = one.sent.clone()
    one.ready(10**6)
    assert torch.equal(one.sent, before)
    assert one.finite_calls > 10**6
