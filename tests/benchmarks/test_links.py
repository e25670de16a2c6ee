"""Pairs of gloo ranks: what is measured, verified, and told of them; faults are injected where data are exchanged."""

from __future__ import annotations

import re
from typing import Any

import forked_ranks
import pytest
import torch
import torch.distributed as dist

from pytest_gpucluster.benchmarks import links
from pytest_gpucluster.benchmarks.links import sweep

SCRIPT = """
import time
from pytest_gpucluster.benchmarks import links
from pytest_gpucluster.device.backends import Cpu
from pytest_gpucluster.device.clock import ManualClock
from pytest_gpucluster.benchmarks.group import Ranks
from pytest_gpucluster.errors import GpuClusterError
from pytest_gpucluster.isolation.round_robin import rounds

honest, ROUNDS = links._exchange, rounds(world_size)

class Timed:
    "Each exchange takes so many seconds of a manual clock; ``spoil`` changes what arrived."
    def __init__(self, seconds=lambda peer: 0.01, spoil=lambda incoming, peer: None):
        self.clock, self.seconds, self.spoil, self.calls = ManualClock(), seconds, spoil, []
    def __call__(self, group, outgoing, incoming, peer):
        honest(group, outgoing, incoming, peer)
        self.calls.append((peer, outgoing is not None, incoming is not None))
        self.clock.advance(self.seconds(peer))
        if incoming is not None and outgoing is None:
            self.spoil(incoming, peer)

def swept(timed, planned=ROUNDS, **more):
    links._exchange = timed
    given = {"payload_bytes": 65536, "round_seconds": 0.6, "now": lambda: timed.clock.now_seconds} | more
    try:
        found = links.sweep(group, device, planned, clock=timed.clock, **given)
    except GpuClusterError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        links._exchange = honest
    return found

def plain(found):
    if isinstance(found, str):
        return found
    rows = {f"{one.sender}>{one.receiver}": one for one in found.readings}
    return {name: [one.bytes_per_second, one.payload_bytes, one.wrong] for name, one in rows.items()}

timed = Timed()
say(plain(swept(timed)))
kinds = [(out, into) for _, out, into in timed.calls]
say([kinds.count(kind) for kind in ((True, True), (True, False), (False, True))])

slow = lambda peer: 1.0 if {rank, peer} == {0, 1} else 0.001
say(plain(swept(Timed(slow))))

def flip(incoming, peer):
    if (peer, rank) == (2, 0):
        incoming[3] ^= 1
def lose(incoming, peer):
    if rank == 1:
        incoming[100:] = 7
say(plain(swept(Timed(spoil=flip))))
say(plain(swept(Timed(spoil=lose))))

late = swept(Timed(lambda peer: 1.0), longest_seconds=5.0)
say([len(late.readings), [list(link) for link in late.left_out], late.seconds > 5])
say(plain(swept(Timed(lambda peer: 0.0 if rank == 2 else 0.01))))
say(plain(swept(Timed(), payload_bytes=65536 + 8 * rank)))
say(plain(swept(Timed(), planned=ROUNDS if rank else ROUNDS[:1])))
Cpu.free_bytes = lambda device: 10 if rank == 2 else 10**12
say(plain(swept(Timed())))
Cpu.free_bytes = lambda device: None

heard = []
swept(Timed(), progress=lambda step, of: heard.append([step, of]))
say(heard)

# By the real clock, and in a group in which the ranks have other numbers.
pair = dist.new_group([1, 2])
if rank:
    group = pair
    found = links.sweep(pair, device, (((1, 2),),), payload_bytes=4000, round_seconds=0.02)
    say(sorted(plain(found)))
    received = [one for one in found.readings if one.receiver == rank]
    everyones = links.gather_readings(Ranks(dist.group.WORLD, device), received)
    pair = group = found = None
else:
    say([])
    everyones = links.gather_readings(Ranks(dist.group.WORLD, device), [])
say([[one.sender, one.receiver, one.bytes_per_second > 0, one.wrong] for one in everyones])
say(links.gather_readings(Ranks(dist.group.WORLD, device), []))
"""


@pytest.fixture(scope="module")
def said() -> list[list[Any]]:
    """What three ranks said, by line and rank."""
    lines = forked_ranks.run_script(SCRIPT, ranks=3)
    return [list(line) for line in zip(*lines, strict=True)]


def same(line: list[Any]) -> Any:
    """What all ranks said alike."""
    assert all(one == line[0] for one in line)
    return line[0]


ALL = {"0>1", "1>0", "0>2", "2>0", "1>2", "2>1"}


def test_every_pair_has_a_rate_in_each_direction_and_all_ranks_know_all_of_them(said: list[list[Any]]) -> None:
    found = same(said[0])
    assert set(found) == ALL
    for rate, payload_bytes, wrong in found.values():
        assert (rate, payload_bytes, wrong) == (pytest.approx(65536 / 0.01), 65536, "")


def test_a_pair_looks_at_its_link_then_each_end_sends_to_the_other_and_warms_up_once(said: list[list[Any]]) -> None:
    # Two rounds of each rank; a look of 4 KiB in 0.01 s lets 65536 B seem to take 0.16 s: a call a window.
    assert same(said[1]) == [2 * 3, 2 * (1 + 5), 2 * (1 + 5)]


def test_a_pair_that_is_far_too_slow_sends_less_and_the_others_of_the_round_send_all(said: list[list[Any]]) -> None:
    found = same(said[2])
    assert found["0>1"][:2] == [4096.0, 4096]
    for direction in ALL - {"0>1", "1>0"}:
        assert found[direction][1] == 65536
        assert found[direction][0] == pytest.approx(65536 / 0.001)


def test_one_wrong_bit_is_on_record_with_its_pair_and_direction_and_ends_nothing(said: list[list[Any]]) -> None:
    found = same(said[3])
    assert re.search(r"1 of 8192 words from rank 2 to rank 0 are wrong.* 24: found 0x", found["2>0"][2])
    assert {direction for direction, one in found.items() if one[2]} == {"2>0"}


def test_data_that_do_not_arrive_as_sent_from_anybody_are_wrong_from_everybody(said: list[list[Any]]) -> None:
    found = same(said[4])
    assert {direction for direction, one in found.items() if one[2]} == {"0>1", "2>1"}
    assert re.search(r"8092 of 8192 words from rank 0 to rank 1 are wrong.* 800", found["0>1"][2])


def test_when_the_time_is_up_what_is_left_out_is_told(said: list[list[Any]]) -> None:
    # The first rank decides, and by its clock no time passes in the round that it sits out.
    assert same(said[5]) == [4, [[0, 2]], True]


def test_a_clock_that_stands_still_ends_it_on_all_ranks(said: list[list[Any]]) -> None:
    found = same(said[6])
    assert re.search(r"InconclusiveMeasurement: the clock.* 2 .*advance while.* ", found)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (7, "the ranks do not measure the same: rank 1 sends 65544 B in 3 rounds, rank 0 sends 65536 B in 3 rounds"),
        (8, "the ranks do not measure the same: rank 1 sends 65536 B in 3 rounds, rank 0 sends 65536 B in 1 rounds"),
        (9, "rank 2: sending and receiving 65536 B with its verification needs "),
    ],
    ids=["sizes", "rounds", "memory"],
)
def test_ranks_that_cannot_measure_together_are_told_so_on_all_of_them(
    said: list[list[Any]], line: int, told: str
) -> None:
    assert same(said[line]).startswith(f"EnvironmentBroken: {told}")


def test_progress_is_told_after_each_round(said: list[list[Any]]) -> None:
    assert same(said[10]) == [[1, 3], [2, 3], [3, 3]]


def test_a_part_of_the_ranks_measures_for_itself_and_tells_the_others(said: list[list[Any]]) -> None:
    assert said[11] == [[], ["1>2", "2>1"], ["1>2", "2>1"]]
    assert same(said[12]) == [[2, 1, True, ""], [1, 2, True, ""]]
    assert same(said[13]) == []


CPU = torch.device("cpu")


@pytest.mark.parametrize("size", [0, -8, 3, 12])
def test_a_size_that_is_no_number_of_words_is_refused(alone: Any, size: int) -> None:
    with pytest.raises(ValueError, match=f"positive multiple of 8, not {size}"):
        sweep(alone, CPU, (), payload_bytes=size, round_seconds=1.0)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("inf"), float("nan")])
def test_a_round_without_end_is_refused(alone: Any, seconds: float) -> None:
    with pytest.raises(ValueError, match="round_seconds must be positive"):
        sweep(alone, CPU, (), payload_bytes=8, round_seconds=seconds)


def test_the_peers_meet_through_the_given_group_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(links.dist, "P2POp", lambda *arguments: arguments)
    monkeypatch.setattr(links.dist, "batch_isend_irecv", lambda operations: seen.append(operations) or [])
    buffer = torch.zeros(1)
    links._exchange("the group", buffer, buffer, 5)  # type: ignore[arg-type]  # only handed on
    links._exchange("the group", None, buffer, 5)  # type: ignore[arg-type]
    assert seen == [
        [(dist.isend, buffer, 5, "the group"), (dist.irecv, buffer, 5, "the group")],
        [(dist.irecv, buffer, 5, "the group")],
    ]
