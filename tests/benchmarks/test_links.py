"""Pairs of gloo ranks: what is measured, verified, and told of them; faults are injected where data are exchanged."""

import re

import forked_ranks
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from pytest_gpucluster.benchmarks import links
from pytest_gpucluster.benchmarks.links import WINDOWS, pace, pattern_of, probe_bytes, rounds_of, window_seconds
from pytest_gpucluster.benchmarks.verify import PatternWriter
from pytest_gpucluster.isolation.round_robin import Places

SCRIPT = """
import time
from pytest_gpucluster.benchmarks import links
from pytest_gpucluster.device.backends import Cpu
from device_parts import timed_by
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
    given = {"payload_bytes": 65536, "round_seconds": 0.6} | more
    try:
        with timed_by(timed.clock):
            found = links.sweep(group, device, planned, **given)
    except GpuClusterError as error:
        return f"{type(error).__name__}: {error}"
    finally:
        links._exchange = honest
    return found

def plain(found):
    if isinstance(found, str):
        return found
    rows = {f"{one.sender}>{one.receiver}": one for one in found[0]}
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
say([sorted({one.sender for one in late[0]}), late[1] > 5])
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
    received = [one for one in found[0] if one.receiver == rank]
    everyones = links.gather_readings(Ranks(dist.group.WORLD, device), received)
    pair = group = found = None
else:
    say([])
    everyones = links.gather_readings(Ranks(dist.group.WORLD, device), [])
say([[one.sender, one.receiver, one.bytes_per_second > 0, one.wrong] for one in everyones])
say(links.gather_readings(Ranks(dist.group.WORLD, device), []))
"""


@pytest.fixture(scope="module")
def said():
    """What three ranks said, by line and rank."""
    lines = forked_ranks.run_script(SCRIPT, ranks=3)
    return [list(line) for line in zip(*lines, strict=True)]


def same(line):
    """What all ranks said alike."""
    assert all(one == line[0] for one in line)
    return line[0]


ALL = {"0>1", "1>0", "0>2", "2>0", "1>2", "2>1"}


def test_every_pair_has_a_rate_in_each_direction_and_all_ranks_know_all_of_them(said):
    found = same(said[0])
    assert set(found) == ALL
    for rate, payload_bytes, wrong in found.values():
        assert (rate, payload_bytes, wrong) == (pytest.approx(65536 / 0.01), 65536, "")


def test_a_pair_looks_at_its_link_then_each_end_sends_to_the_other_and_warms_up_once(said):
    # Two rounds of each rank; a look of 4 KiB in 0.01 s lets 65536 B seem to take 0.16 s: a call a window.
    assert same(said[1]) == [2 * 3, 2 * (1 + 5), 2 * (1 + 5)]


def test_a_pair_that_is_far_too_slow_sends_less_and_the_others_of_the_round_send_all(said):
    found = same(said[2])
    assert found["0>1"][:2] == [4096.0, 4096]
    for direction in ALL - {"0>1", "1>0"}:
        assert found[direction][1] == 65536
        assert found[direction][0] == pytest.approx(65536 / 0.001)


def test_one_wrong_bit_is_on_record_with_its_pair_and_direction_and_ends_nothing(said):
    found = same(said[3])
    assert re.search(r"1 of 8192 words from rank 2 to rank 0 are wrong.* 24: found 0x", found["2>0"][2])
    assert {direction for direction, one in found.items() if one[2]} == {"2>0"}


def test_data_that_do_not_arrive_as_sent_from_anybody_are_wrong_from_everybody(said):
    found = same(said[4])
    assert {direction for direction, one in found.items() if one[2]} == {"0>1", "2>1"}
    assert re.search(r"8092 of 8192 words from rank 0 to rank 1 are wrong.* 800", found["0>1"][2])


def test_when_the_time_is_up_what_is_left_out_is_told(said):
    # The first rank decides, and by its clock no time passes in the round that it sits out.
    assert same(said[5]) == [[0, 1, 2], True]


def test_a_clock_that_stands_still_ends_it_on_all_ranks(said):
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
def test_ranks_that_cannot_measure_together_are_told_so_on_all_of_them(said, line, told):
    assert same(said[line]).startswith(f"EnvironmentBroken: {told}")


def test_progress_is_told_after_each_round(said):
    assert same(said[10]) == [[1, 3], [2, 3], [3, 3]]


def test_a_part_of_the_ranks_measures_for_itself_and_tells_the_others(said):
    assert said[11] == [[], ["1>2", "2>1"], ["1>2", "2>1"]]
    assert same(said[12]) == [[2, 1, True, ""], [1, 2, True, ""]]
    assert same(said[13]) == []


CPU = torch.device("cpu")


def test_the_peers_meet_through_the_given_group_and_no_other(monkeypatch):
    seen = []
    monkeypatch.setattr(links.dist, "P2POp", lambda *arguments: arguments)
    monkeypatch.setattr(links.dist, "batch_isend_irecv", lambda operations: seen.append(operations) or [])
    buffer = torch.zeros(1)
    links._exchange("the group", buffer, buffer, 5)
    links._exchange("the group", None, buffer, 5)
    assert seen == [
        [(dist.isend, buffer, 5, "the group"), (dist.irecv, buffer, 5, "the group")],
        [(dist.irecv, buffer, 5, "the group")],
    ]


SURVEY = """
from pytest_gpucluster.benchmarks import links
from pytest_gpucluster.device.backends import Cpu
from pytest_gpucluster.device.clock import ManualClock
from pytest_gpucluster.isolation.round_robin import Places

honest, clock, met = links._exchange, ManualClock(), []
Cpu.clock = lambda by: clock

def exchange(group, outgoing, incoming, peer):
    honest(group, outgoing, incoming, peer)
    met.append(peer)
    clock.advance(0.1 if {rank, peer} == {2, 3} else 0.001)
links._exchange = exchange

places = Places.of([{"rank": r, "host": "ab"[r // 2], "node_rank": r // 2, "local_rank": r % 2} for r in range(4)])

def surveyed(group, scope, **more):
    given = {"payload_bytes": 4096, "round_seconds": 0.1, "repeats": 4, "below": 0.5, "longest_seconds": 60.0}
    return links.survey(dist.group.WORLD, group, device, places, scope, **given | more)

def told(found):
    culprits = [[one.kind, list(one.ranks)] for one in found.culprits("slow")]
    alone = [[one.sender, one.receiver] for one in found.alone.readings.values()]
    return [len(found.matrix.pairs), alone, culprits, found.rounds, found.planned_seconds, len(found.left_out)]

# torch makes groups in an order that all ranks share.
nodes = [dist.new_group([0, 1]), dist.new_group([2, 3])]
mine = nodes[rank // 2]
say(told(surveyed(mine, "node")))
say(told(surveyed(mine, "node", repeats=0)))
say(told(surveyed(mine, "node", below=None)))
met.clear()
say(told(surveyed(dist.group.WORLD, "world")))
say(sorted(set(met)))

entered = []
class During:
    def __enter__(self):
        entered.append("in")
    def __exit__(self, *error):
        entered.append("out")
surveyed(mine, "node", during=During())
say(entered)

# What is entered while only the group is used: the tournament and once more, and not when all tell each other.
entered.clear()
whole = links.gather_readings
links.gather_readings = lambda *given: (entered.append("told"), whole(*given))[1]
surveyed(mine, "node", sweeping=During)
say(entered)
nodes = mine = None
"""


@pytest.fixture(scope="module")
def surveyed():
    """What four ranks surveyed, by line and rank."""
    lines = forked_ranks.run_script(SURVEY, ranks=4)
    return [list(line) for line in zip(*lines, strict=True)]


def test_the_nodes_tell_each_other_and_the_slow_link_is_measured_once_more(surveyed):
    assert same(surveyed[0]) == [2, [[2, 3], [3, 2]], [["link", [2, 3]]], 1, 0.1, 0]


def test_nothing_is_measured_once_more_where_nobody_asks_or_nothing_is_known_to_be_slow(surveyed):
    assert same(surveyed[1]) == [2, [], [["link", [2, 3]]], 1, 0.1, 0]
    assert same(surveyed[2]) == [2, [], [], 1, 0.1, 0]


def test_across_nodes_only_ranks_of_one_rail_meet(surveyed):
    assert same(surveyed[3]) == [2, [], [], 1, 0.1, 0]
    assert surveyed[4] == [[2], [3], [0], [1]]


def test_what_accompanies_the_tournament_is_left_again(surveyed):
    assert same(surveyed[5]) == ["in", "out"]


def test_what_the_nodes_tell_each_other_is_outside_of_what_is_taken_for_the_group_s(surveyed):
    assert same(surveyed[6]) == ["in", "out", "told", "in", "out", "told"]


def test_a_rank_takes_part_in_the_rounds_of_its_node_or_of_all():
    places = Places.of(
        [{"rank": r, "host": "ab"[r % 2], "node_rank": r % 2, "local_rank": r // 2} for r in range(4)],
    )
    assert rounds_of("node", places, 1) == (((1, 3),),)
    assert rounds_of("world", places, 1) == (((0, 1), (2, 3)),)


def test_with_one_rank_a_node_there_is_nobody_to_meet_inside():
    places = Places.of([{"rank": 0, "host": "a", "node_rank": 0, "local_rank": 0}])
    with pytest.raises(ValueError, match="takes two players"):
        rounds_of("node", places, 0)


MIB = 2**20


@given(
    st.floats(0, 1e4),
    st.integers(1, 2**30).map(lambda words: 8 * words),
    st.floats(0.01, 600),
)
def test_something_is_always_sent_and_never_more_than_the_payload(probe_seconds, payload_bytes, round_seconds):
    found = pace(probe_seconds, payload_bytes=payload_bytes, round_seconds=round_seconds)
    assert found.calls >= 1
    assert probe_bytes(payload_bytes) // 8 <= found.words <= payload_bytes // 8
    if found.words < payload_bytes // 8:
        assert found.calls == 1


@given(st.floats(1e-6, 1e4))
def test_a_round_takes_about_as_long_as_planned_but_for_a_link_that_hardly_moves(probe_seconds):
    payload, round_seconds = 256 * MIB, 0.5
    found = pace(probe_seconds, payload_bytes=payload, round_seconds=round_seconds)
    window = found.calls * probe_seconds * 8 * found.words / probe_bytes(payload)
    # The warm-up is one call.
    assert window <= max(4.01 * window_seconds(round_seconds), probe_seconds)


def test_all_windows_together_take_a_round():
    assert 2 * (WINDOWS + 1) * window_seconds(0.6) == pytest.approx(0.6)


@pytest.mark.parametrize(("payload", "probe"), [(256 * MIB, 4 * MIB), (8, 8), (4096, 4096), (260_000, 4096)])
def test_the_first_look_sends_little(payload, probe):
    assert probe_bytes(payload) == probe


WRITER = PatternWriter(torch.device("cpu"), 1000)


def words(*link):
    made = torch.empty(1000, dtype=torch.int64)
    WRITER.fill(made, pattern_of(*link))
    return made


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lambda received: received.fill_(-1), id="nothing came"),
        pytest.param(lambda received: received.zero_(), id="zeros"),
        pytest.param(lambda received: received.copy_(received.roll(1)), id="a word too late"),
        pytest.param(lambda received: received.copy_(words(0, 1, 4)), id="what was sent before"),
        pytest.param(lambda received: received.copy_(words(1, 0, 5)), id="the other direction's"),
        pytest.param(lambda received: received.copy_(words(2, 1, 5)), id="another sender's"),
        pytest.param(lambda received: received.copy_(words(0, 2, 5)), id="meant for another rank"),
    ],
)
def test_data_that_were_not_meant_are_wrong_in_nearly_all_words(spoil):
    received = words(0, 1, 5)
    assert WRITER.compare(received, pattern_of(0, 1, 5)) is None
    spoil(received)
    found = WRITER.compare(received, pattern_of(0, 1, 5))
    assert found.count >= 999


def test_every_pair_direction_and_time_has_a_payload_of_its_own():
    starts = {pattern_of(one, other, when).word(0) for one in range(16) for other in range(16) for when in range(16)}
    assert len(starts) == 16**3
