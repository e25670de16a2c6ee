"""The bandwidth of each link: pairs of ranks send to each other in rounds, with every word verified.

:func:`survey` measures every link within or between nodes as a tournament of pairs, and those that are far behind once
more. The size and number of the messages follow from the time that a round may take.

The payload is a pattern that depends on sender, receiver and time, compared bit by bit.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from pytest_gpucluster.benchmarks.group import Ranks
from pytest_gpucluster.benchmarks.memory_budget import releases_memory, require_free_on_all
from pytest_gpucluster.benchmarks.memory_passes import KEPT_WORDS, WORD_BYTES
from pytest_gpucluster.benchmarks.verify import Pattern, PatternWriter
from pytest_gpucluster.device.backends import accelerator
from pytest_gpucluster.device.interface import Accelerator
from pytest_gpucluster.errors import InconclusiveMeasurement
from pytest_gpucluster.isolation.link_matrix import Matrix, Reading, Scope
from pytest_gpucluster.isolation.link_survey import Survey, matrix_of
from pytest_gpucluster.isolation.round_robin import (
    Pair,
    Places,
    Round,
    across_nodes,
    rail_by_rail,
    within_node,
)
from pytest_gpucluster.metrics import stats
from pytest_gpucluster.metrics.time_budget import MEASURING, VERIFYING, WARM_UP, counted
from pytest_gpucluster.metrics.units import show

_EMPTY = -1
"""The initial value of received words: then a missing payload is right only by chance."""


def needed_bytes(payload_bytes: int) -> int:
    """Return the memory for sending and receiving this payload, including the verification."""
    return 2 * payload_bytes + PatternWriter.needed_bytes(payload_bytes // WORD_BYTES)


def pattern_of(sender: int, receiver: int, when: int) -> Pattern:
    """Return the payload of a pair, a direction and a time: another one for each."""
    return Pattern(start=random.Random(f"{sender} {receiver} {when}").getrandbits(64))


WINDOWS = 5
"""In each direction. The median of five tolerates one or two disturbed ones."""

PROBE_SHARE = 64
"""The probe of a link sends this part of the payload, so that a link that is far too slow is found early."""

_LEAST_PROBE_BYTES = 4096
_MOST_CALLS = 500
"""In one window: a GPU's queue has room for about a thousand launches, and then the host waits for it."""

_PATIENCE = 4
"""A single call may take this number of windows. A slower link gets less to send."""


@dataclass(frozen=True, kw_only=True)
class Pace:
    """``calls`` of ``words`` words of 64 bits each between two readings of the clock."""

    calls: int
    words: int


def window_seconds(round_seconds: float) -> float:
    """Return how long a window should take: a round has that many in each direction, and one of each to warm up."""
    return round_seconds / (2 * (WINDOWS + 1))


def probe_bytes(payload_bytes: int) -> int:
    """Return the size of a link's probe.

    >>> probe_bytes(256 * 2**20) / 2**20, probe_bytes(65536), probe_bytes(400)
    (4.0, 4096, 400)
    """
    share = payload_bytes // PROBE_SHARE // WORD_BYTES * WORD_BYTES
    return min(payload_bytes, max(_LEAST_PROBE_BYTES, share))


def pace(probe_seconds: float, *, payload_bytes: int, round_seconds: float) -> Pace:
    """Return the pace from the time of the probe.

    >>> pace(100e-6, payload_bytes=256 * 2**20, round_seconds=0.6)
    Pace(calls=8, words=33554432)
    >>> pace(1.0, payload_bytes=256 * 2**20, round_seconds=0.6)
    Pace(calls=1, words=524288)
    """
    window, probe = window_seconds(round_seconds), probe_bytes(payload_bytes)
    whole = probe_seconds * payload_bytes / probe
    if whole <= _PATIENCE * window:
        return Pace(calls=max(1, min(_MOST_CALLS, round(window / max(whole, 1e-9)))), words=payload_bytes // WORD_BYTES)
    fitting = int(payload_bytes * _PATIENCE * window / whole)
    return Pace(calls=1, words=max(probe, fitting) // WORD_BYTES)


Progress = Callable[[int, int], object]
"""``progress(step, of)``: the number of rounds that have been measured."""


@releases_memory()
def sweep(
    group: dist.ProcessGroup,
    device: torch.device,
    rounds: Sequence[Round],
    *,
    payload_bytes: int,
    round_seconds: float,
    longest_seconds: float = math.inf,
    progress: Progress | None = None,
) -> tuple[tuple[Reading, ...], float]:
    """Measure the pairs of each round at the same time, round after round, in bytes a second for each direction.

    Collective: every rank of the group must call this, with the same rounds, size and times.

    A pair first sends a small part of the payload both ways, which also connects it. From the times that both ends
    took, which all ranks exchange, follows how much it sends and how often, so that a round takes about as long as
    planned: a link that is far too slow sends less, and delays the others only briefly. Then one end sends to the
    other, and the other way round: each direction by itself, all pairs in step. The receiving rank times some windows,
    each of which begins with a barrier of the group, and the median of their rates counts.

    The first payload and the last one are verified, word by word. A defect is recorded with the reading and stops
    nothing.

    All data go through the one group, by batched point-to-point operations. A group for each pair would take longer to
    create than to measure, and NCCL would keep the memory of each. Source: torch.distributed.batch_isend_irecv; after
    the first collective of a group some of its ranks may call it without the others.

    Args:
        group: whose ranks are paired.
        device: where this rank's payload is.
        rounds: pairs of ranks, by their number in the world; as of ``isolation.round_robin``.
        payload_bytes: of one message; a multiple of 8.
        round_seconds: how long a round should take, without the creation of connections.
        longest_seconds: after a round that ends later than this, the others are left out. The first rank decides.
        progress: called after each round.

    Returns: the readings of all ranks, two for each pair that was measured, one in each direction; and the total time
        on the first rank. Equal on all of them.

    Raises:
        InconclusiveMeasurement: a rank's clock did not advance; on all ranks.
        EnvironmentBroken: the ranks do not measure the same, or one has too little memory; on all ranks.
    """
    ranks = Ranks(group, device)
    ranks.require_same(f"sends {show(payload_bytes, 'B')} in {len(rounds)} rounds", tuple(rounds), round_seconds)
    what = f"sending and receiving {show(payload_bytes, 'B')} with its verification"
    instead = "send less (--gpucluster-workload links.size=64MiB)"
    require_free_on_all(ranks, device, needed_bytes(payload_bytes), what, instead=instead)
    by = accelerator(device)
    links, now = _Links(group, ranks, by, payload_bytes, round_seconds), by.now
    found: list[Reading] = []
    begin, done, more = now(), 0, float(bool(rounds))
    while more:
        with counted(MEASURING):
            found += links.round(rounds[done], done)
        done += 1
        if progress is not None:
            progress(done, len(rounds))
        [more] = ranks.of_first([done < len(rounds) and now() - begin < longest_seconds])
    [seconds] = ranks.of_first([now() - begin])
    return tuple(found), seconds


def gather_readings(ranks: Ranks, mine: Sequence[Reading]) -> tuple[Reading, ...]:
    """Return the readings of all ranks. Collective: every rank must call this, with those that it has received itself.

    It exchanges the nodes' readings.
    """
    return tuple(reading for readings in ranks.gather_objects(tuple(mine)) for reading in readings)


class _Links:
    """The links of one group, with this rank's two buffers."""

    def __init__(
        self, group: dist.ProcessGroup, ranks: Ranks, by: Accelerator, payload_bytes: int, round_seconds: float
    ) -> None:
        self.ranks = ranks
        self._group, self._clock, self._by = group, by.clock(), by
        self._payload_bytes, self._round_seconds = payload_bytes, round_seconds
        self._rank = dist.get_rank()
        words = by.kept(payload_bytes // WORD_BYTES, KEPT_WORDS)
        self._outgoing = torch.zeros(words, dtype=torch.int64, device=by.place)
        self._incoming = torch.zeros_like(self._outgoing)
        self._writer = PatternWriter(by.place, len(self._outgoing))

    def round(self, pairs: Round, number: int) -> list[Reading]:
        """Measure all pairs of a round; return the readings of all of them."""
        peer = next((one if self._rank == other else other for one, other in pairs if self._rank in (one, other)), None)
        with counted(WARM_UP):
            own = self._probe(peer)
        mine: Reading | None = None
        for direction in (0, 1):
            # The lower rank sends first; a rank in no pair only takes part in the barriers.
            sends = peer is not None and (self._rank < peer) == (direction == 0)
            mine = self._one_way(peer, own, sends=sends, when=2 * number + direction) or mine
        readings = [reading for reading in self.ranks.gather_objects(mine) if reading is not None]
        for reading in readings:
            if not 0 < reading.bytes_per_second < math.inf:
                raise InconclusiveMeasurement(
                    f"the clock of rank {reading.receiver} did not advance while it received from rank {reading.sender}"
                )
        return readings

    def _probe(self, peer: int | None) -> Pace:
        """Probe all links of a round; return the pace of this rank's, the same on both of its ends."""
        probed = probe_bytes(self._payload_bytes)
        words = self._by.kept(probed // WORD_BYTES, KEPT_WORDS)
        outgoing, incoming = self._outgoing[:words], self._incoming[:words]
        probes: list[float] = []
        for _ in range(3):  # the first one connects, and one of the others may have been disturbed
            self._clock.synchronize()
            self.ranks.barrier()
            with self._clock.region():
                if peer is not None:
                    self._exchange(outgoing, incoming, peer, probed)
            probes += self._clock.read()
        of_ranks = [seconds for [seconds] in self.ranks.gather([min(probes[1:])])]
        slower = of_ranks[self.ranks.index]
        if peer is not None:  # both ends of a link have the same numbers, and so the same pace
            slower = max(slower, of_ranks[dist.get_group_rank(self._group, peer)])
        return pace(slower, payload_bytes=self._payload_bytes, round_seconds=self._round_seconds)

    def _one_way(self, peer: int | None, own: Pace, *, sends: bool, when: int) -> Reading | None:
        """Send, receive, or only take part in the barriers; return the reading of what was received."""
        words, sent_bytes = self._by.kept(own.words, KEPT_WORDS), WORD_BYTES * own.words
        outgoing = self._outgoing[:words] if sends else None
        incoming = self._incoming[:words] if peer is not None and not sends else None
        ends = (self._rank, peer or 0) if sends else (peer or 0, self._rank)
        defects: list[tuple[int, int, int, int]] = []
        rates: list[float] = []
        for windows, calls in ((1, 1), (WINDOWS, own.calls)):  # the first one warms up
            pattern = pattern_of(*ends, 2 * when + (windows > 1))
            with counted(VERIFYING):
                if outgoing is not None:
                    self._writer.fill(outgoing, pattern)
                if incoming is not None:
                    incoming.fill_(_EMPTY)
            elapsed = [self._window(peer, outgoing, incoming, calls, sent_bytes) for _ in range(windows)]
            if incoming is not None:
                with counted(VERIFYING):
                    defects.append(self._defect(incoming, pattern))
                rates = [calls * sent_bytes / seconds if seconds > 0 else math.inf for seconds in elapsed]
        if incoming is None:
            return None
        return Reading(
            sender=ends[0],
            receiver=ends[1],
            bytes_per_second=stats.median(rates),
            low=min(rates),
            high=max(rates),
            payload_bytes=sent_bytes,
            defect=next((one for one in defects if one[0]), (0, 0, 0, 0)),
        )

    def _defect(self, incoming: torch.Tensor, pattern: Pattern) -> tuple[int, int, int, int]:
        """Return the defect of a received payload, as of ``Reading``. Waits for the device."""
        wrong = self._writer.compare(incoming, pattern)
        if wrong is None:
            return 0, 0, 0, 0
        found, expected = (word % 2**64 for word in (int(incoming[wrong.offset]), pattern.word(wrong.offset)))
        return wrong.count, WORD_BYTES * wrong.offset, found, expected

    def _window(
        self,
        peer: int | None,
        outgoing: torch.Tensor | None,
        incoming: torch.Tensor | None,
        calls: int,
        sent_bytes: int,
    ) -> float:
        """Return the seconds of all calls of a window on this rank."""
        real = self._clock.real(calls)
        launched = self.ranks.window(self._clock, calls, seconds=window_seconds(self._round_seconds))
        with self._clock.scaled(calls / real), launched:
            if peer is not None:
                for _ in range(real):
                    self._exchange(outgoing, incoming, peer, sent_bytes)
        [elapsed] = self._clock.read()
        return elapsed

    def _exchange(
        self, outgoing: torch.Tensor | None, incoming: torch.Tensor | None, peer: int, sent_bytes: int
    ) -> None:
        run = partial(_exchange, self._group, outgoing, incoming, peer)
        self._by.communicate(run, "message", sent_bytes, self._group, peer=peer)


def _exchange(
    group: dist.ProcessGroup, outgoing: torch.Tensor | None, incoming: torch.Tensor | None, peer: int
) -> None:
    """Send to a rank, receive from it, or both at once. On a GPU it is enqueued: the stream waits for it."""
    operations = []
    if outgoing is not None:
        operations.append(dist.P2POp(dist.isend, outgoing, peer, group))
    if incoming is not None:
        operations.append(dist.P2POp(dist.irecv, incoming, peer, group))
    for work in dist.batch_isend_irecv(operations):
        work.wait()


def rounds_of(scope: Scope, places: Places, rank: int) -> tuple[Round, ...]:
    """Return the rounds of the tournament that a rank takes part in: its node's, or those of all nodes.

    Raises:
        ValueError: there are no two to be paired.
    """
    return across_nodes(places) if scope == "world" else within_node(places, places.where()[rank][0])


def survey(
    world: dist.ProcessGroup,
    group: dist.ProcessGroup,
    device: torch.device,
    places: Places,
    scope: Scope,
    *,
    payload_bytes: int,
    round_seconds: float,
    repeats: int,
    below: float | None,
    longest_seconds: float,
    progress: Progress | None = None,
    during: AbstractContextManager[object] | None = None,
    sweeping: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> Survey:
    """Measure all links of a scope, and those that are far behind once more, without links that may have shared their
    path.

    Collective: every rank of the world must call this, with the same arguments but for the group. The result is the
    same on all of them.

    Args:
        world: all ranks.
        group: those that measure together: the ranks of this rank's node, or the world.
        device: where this rank's payload is.
        places: where the ranks are.
        scope: "node" for links within nodes, all nodes at once; "world" for links across nodes.
        payload_bytes: of one message; a multiple of 8.
        round_seconds: how long a round should take.
        repeats: maximum number of rounds for suspects.
        below: suspects are pairs with a smaller ratio to the median of the others. None: there are none.
        longest_seconds: after this time no other round of the tournament begins; the result lists the links left out.
        progress: called after each round of the tournament.
        during: entered for the time of the tournament.
        sweeping: returns a context that is entered while only ``group`` is used. Within nodes the world is used as
            well, to exchange the readings: its connections are none of the group's.

    Raises:
        InconclusiveMeasurement, EnvironmentBroken: as of :func:`sweep`.
    """
    ranks = Ranks(world, device)
    rank = ranks.index
    rounds = rounds_of(scope, places, rank)

    def measure(planned: Sequence[Round], show_progress: Progress | None = None) -> tuple[Matrix, float]:
        with sweeping():
            readings, seconds = sweep(
                group,
                device,
                planned,
                payload_bytes=payload_bytes,
                round_seconds=round_seconds,
                longest_seconds=longest_seconds,
                progress=show_progress,
            )
        if scope == "world":
            return matrix_of(readings, scope, places), seconds
        everyones = gather_readings(ranks, [one for one in readings if one.receiver == rank])
        return matrix_of(everyones, scope, places), max(its for [its] in ranks.gather([seconds]))

    with during or nullcontext():
        matrix, seconds = measure(rounds, progress)
    suspects = [] if below is None else matrix.slow(below)
    alone = Matrix(())
    if suspects and repeats:  # equal on all ranks, for all of them have the same readings
        alone, _ = measure(_again(scope, places, rank, suspects, repeats))
    return Survey(
        scope=scope,
        places=places,
        matrix=matrix,
        alone=alone,
        below=below,
        rounds=len(rounds),
        planned_seconds=len(rounds) * round_seconds,
        seconds=seconds,
        left_out=tuple(link for link in _all_pairs(scope, places) if link not in matrix.pairs),
    )


def _again(scope: Scope, places: Places, rank: int, suspects: Sequence[Pair], most: int) -> tuple[Round, ...]:
    """Return the rounds in which a rank, or its node's others, measure suspects once more."""
    if scope == "world":
        return rail_by_rail(places, suspects, max_rounds=most)
    own = set(places.ranks[places.where()[rank][0]])
    return tuple((link,) for link in suspects if own.issuperset(link))[:most]


def _all_pairs(scope: Scope, places: Places) -> list[Pair]:
    rounds = (
        across_nodes(places)
        if scope == "world"
        else [round_ for node in range(places.nodes) for round_ in within_node(places, node)]
    )
    return sorted(link for round_ in rounds for link in round_)
