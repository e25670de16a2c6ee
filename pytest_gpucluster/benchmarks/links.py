"""How fast each rank of a group sends to each other one, pair after pair, with the data verified."""

from __future__ import annotations

import math
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from pytest_gpucluster.benchmarks import link_payload
from pytest_gpucluster.benchmarks.clock import Clock, clock_for
from pytest_gpucluster.benchmarks.footprint import free_bytes, memory_returned
from pytest_gpucluster.benchmarks.link_pace import WINDOWS, Pace, pace, probe_bytes, window_seconds
from pytest_gpucluster.benchmarks.link_payload import WORD_BYTES
from pytest_gpucluster.benchmarks.ranks import Ranks
from pytest_gpucluster.errors import EnvironmentBroken, InconclusiveMeasurement
from pytest_gpucluster.isolation.link_matrix import Reading
from pytest_gpucluster.isolation.round_robin import Pair, Round
from pytest_gpucluster.metrics import stats
from pytest_gpucluster.metrics.time_budget import MEASURING, VERIFYING, WARM_UP, counted
from pytest_gpucluster.metrics.units import show

Progress = Callable[[int, int], object]
"""``progress(step, of)``: so many rounds have been measured."""

_PLENTY_BYTES = 2**52
"""Stands for free memory that nobody can tell: then the allocation itself will tell."""

_COLUMNS = 10
"""Numbers by which a reading travels."""


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """What the ranks of a group have measured. Equal on all of them.

    Attributes:
        readings: two for each pair that was measured, one in each direction.
        left_out: pairs of the rounds for which there was no time.
        seconds: what all of it took, on the first rank.
    """

    readings: tuple[Reading, ...]
    left_out: tuple[Pair, ...]
    seconds: float


def sweep(
    group: dist.ProcessGroup,
    device: torch.device,
    rounds: Sequence[Round],
    *,
    payload_bytes: int,
    round_seconds: float,
    longest_seconds: float = math.inf,
    progress: Progress | None = None,
    clock: Clock | None = None,
    now: Callable[[], float] = time.monotonic,
) -> Sweep:
    """Measure the pairs of each round at the same time, round after round, in bytes a second for each direction.

    Collective: every rank of the group must call this, with the same rounds, size and times.

    A pair first sends a small part of the payload both ways, which also connects it. From the time that took, the first
    rank of the group decides for every pair how much it sends and how often, so that a round takes about as long as
    planned: a link that is far too slow sends less, and does not hold up the others for long. Then one end sends to the
    other, and the other way round: each direction by itself, all pairs in step. The receiving rank takes the time of
    some windows, each of which begins with a barrier of the group, and the median of their rates counts.

    The first payload and the last one are verified, word by word. What is wrong is on record with the reading and ends
    nothing.

    All data go through the one group, by batched point-to-point operations. A group for each pair would take longer to
    make than to measure, and NCCL would keep the memory of each. Source: torch.distributed.batch_isend_irecv; after the
    first collective of a group some of its ranks may call it without the others.

    Args:
        group: whose ranks are paired.
        device: where this rank's payload is.
        rounds: pairs of ranks, by their number in the world; as of ``links.plan``.
        payload_bytes: what is sent at a time; a multiple of 4.
        round_seconds: how long a round should take, the making of connections aside.
        longest_seconds: after a round that ends later than this, the others are left out. The first rank decides.
        progress: told after each round.
        clock: takes the time; by default the device's own.
        now: the time of day of the first rank, in seconds.

    Raises:
        InconclusiveMeasurement: a rank's clock did not advance; on all ranks.
        EnvironmentBroken: the ranks do not measure the same, or one has too little memory; on all ranks.
        ValueError: an argument is out of its range, or this rank is not in the group.
    """
    if payload_bytes < WORD_BYTES or payload_bytes % WORD_BYTES:
        raise ValueError(f"payload_bytes must be a positive multiple of {WORD_BYTES}, not {payload_bytes}")
    if not 0 < round_seconds < math.inf:
        raise ValueError(f"round_seconds must be positive, not {round_seconds}")
    if dist.get_rank(group) < 0:
        raise ValueError(f"rank {dist.get_rank()} is not in the group that it should measure")
    try:
        with memory_returned():
            return _all(
                _made(group, device, rounds, payload_bytes, round_seconds, clock),
                rounds,
                longest_seconds,
                progress,
                now,
            )
    finally:
        # A traceback that is kept keeps this frame, and a gloo group that outlives its end aborts the process.
        del group


def gathered(ranks: Ranks, mine: Sequence[Reading]) -> tuple[Reading, ...]:
    """Return the readings of all ranks. Collective: every rank must call this, with those that it has received itself.

    So the nodes tell each other what each has measured for itself.
    """
    most = int(max(count for [count] in ranks.gather([len(mine)])))
    numbers = [number for reading in mine for number in _numbers(reading)]
    numbers += [-1.0] * (most * _COLUMNS - len(numbers))
    found = []
    for told in ranks.gather(numbers) if most else []:
        rows = (told[start : start + _COLUMNS] for start in range(0, len(told), _COLUMNS))
        found += [_reading(row) for row in rows if row[0] >= 0]
    return tuple(found)


def _made(
    group: dist.ProcessGroup,
    device: torch.device,
    rounds: Sequence[Round],
    payload_bytes: int,
    round_seconds: float,
    clock: Clock | None,
) -> _Links:
    ranks = Ranks(group, device)
    _agree(ranks, rounds, payload_bytes, round_seconds, free=free_bytes(device))
    return _Links(group, ranks, device, payload_bytes, round_seconds, clock or clock_for(device))


def _agree(
    ranks: Ranks, rounds: Sequence[Round], payload_bytes: int, round_seconds: float, *, free: int | None
) -> None:
    """Find on all ranks what would let some wait for others that do something else, or that have failed."""
    plan = zlib.crc32(repr((tuple(rounds), round_seconds)).encode())
    told = ranks.gather([payload_bytes, plan, _PLENTY_BYTES if free is None else free])
    for index, (size, theirs, _) in enumerate(told):
        if [size, theirs] != told[0][:2]:
            raise EnvironmentBroken(
                f"the ranks do not measure the same links: {ranks.name(index)} sends {show(size, 'B')}, "
                f"{ranks.name(0)} {show(told[0][0], 'B')}, and their rounds are "
                f"{'the same' if theirs == told[0][1] else 'not the same'}. Give all nodes the same suite, profile and "
                "workload"
            )
    needed = link_payload.needed_bytes(payload_bytes)
    least = min(range(len(told)), key=lambda index: told[index][2])
    if told[least][2] < needed:
        raise EnvironmentBroken(
            f"{ranks.name(least)}: sending and receiving {show(payload_bytes, 'B')} needs "
            f"{show(needed / 2**30, 'GiB')} of memory with its verification, and {show(told[least][2] / 2**30, 'GiB')} "
            "are free. End what else uses the memory, or send less (--gpucluster-workload links.size=64MiB)"
        )


def _all(
    links: _Links, rounds: Sequence[Round], longest_seconds: float, progress: Progress | None, now: Callable[[], float]
) -> Sweep:
    found: list[Reading] = []
    begin, done, more = now(), 0, float(bool(rounds))
    while more:
        with counted(MEASURING):
            found += links.round(rounds[done], done)
        done += 1
        if progress is not None:
            progress(done, len(rounds))
        [more] = links.ranks.of_first([done < len(rounds) and now() - begin < longest_seconds])
    [seconds] = links.ranks.of_first([now() - begin])
    left_out = tuple(link for round_ in rounds[done:] for link in round_)
    return Sweep(readings=tuple(found), left_out=left_out, seconds=seconds)


class _Links:
    """The links of one group, with this rank's two buffers."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        ranks: Ranks,
        device: torch.device,
        payload_bytes: int,
        round_seconds: float,
        clock: Clock,
    ) -> None:
        self.ranks = ranks
        self._group, self._clock = group, clock
        self._payload_bytes, self._round_seconds = payload_bytes, round_seconds
        self._rank = dist.get_rank()
        self._outgoing = torch.zeros(payload_bytes // WORD_BYTES, dtype=torch.int32, device=device)
        self._incoming = torch.zeros_like(self._outgoing)

    def round(self, pairs: Round, number: int) -> list[Reading]:
        """Measure all pairs of a round; return the readings of all of them."""
        peer = next((one if self._rank == other else other for one, other in pairs if self._rank in (one, other)), None)
        with counted(WARM_UP):
            own = self._paces(peer)
        numbers = [-1.0] * _COLUMNS
        for direction in (0, 1):
            # Whoever has the lower rank sends first; who is in no pair only keeps step.
            sends = peer is not None and (self._rank < peer) == (direction == 0)
            told = self._one_way(peer, own, sends=sends, when=2 * number + direction)
            if peer is not None and not sends:
                numbers = told
        everyone = self.ranks.gather(numbers)
        stopped = [index for index, row in enumerate(everyone) if row[0] >= 0 and not 0 < row[2] < math.inf]
        if stopped:
            raise InconclusiveMeasurement(
                f"the clock of {self.ranks.name(stopped[0])} did not advance while it received from rank "
                f"{everyone[stopped[0]][0]:.0f}"
            )
        return [_reading(row) for row in everyone if row[0] >= 0]

    def _paces(self, peer: int | None) -> Pace:
        """Look at all links of a round for the first time, and let the first rank decide."""
        words = probe_bytes(self._payload_bytes) // WORD_BYTES
        outgoing, incoming = self._outgoing[:words], self._incoming[:words]
        looked: list[float] = []
        for _ in range(3):  # the first time connects, and of the others one may have been disturbed
            self._clock.synchronize()
            self.ranks.barrier()
            with self._clock.region():
                if peer is not None:
                    _exchange(self._group, outgoing, incoming, peer)
            looked += self._clock.read()
        looks = self.ranks.gather([-1.0 if peer is None else peer, min(looked[1:])])
        number_of = {dist.get_global_rank(self._group, index): index for index in range(self.ranks.count)}
        table: list[float] = []
        for met, seconds in looks:
            theirs = 0.0 if met < 0 else looks[number_of[int(met)]][1]
            of_pair = pace(max(seconds, theirs), payload_bytes=self._payload_bytes, round_seconds=self._round_seconds)
            table += [of_pair.calls, of_pair.words]
        decided = self.ranks.of_first(table)
        own_calls, own_words = decided[2 * self.ranks.index : 2 * self.ranks.index + 2]
        return Pace(calls=int(own_calls), words=int(own_words))

    def _one_way(self, peer: int | None, own: Pace, *, sends: bool, when: int) -> list[float]:
        """Send or receive, or only keep step; return the numbers of a reading, which mean something where received."""
        outgoing = self._outgoing[: own.words] if sends else None
        incoming = self._incoming[: own.words] if peer is not None and not sends else None
        ends = (self._rank, peer or 0) if sends else (peer or 0, self._rank)
        nothing = (0, 0, 0, 0)
        defects: list[tuple[int, int, int, int]] = []
        rates: list[float] = []
        for windows, calls in ((1, 1), (WINDOWS, own.calls)):  # the first one warms up
            seed = link_payload.salt(*ends, 2 * when + (windows > 1))
            with counted(VERIFYING):
                if outgoing is not None:
                    link_payload.fill(outgoing, seed)
                if incoming is not None:
                    link_payload.poison(incoming)
            elapsed = [self._window(peer, outgoing, incoming, calls) for _ in range(windows)]
            if incoming is not None:
                with counted(VERIFYING):
                    defects.append(link_payload.defect(incoming, seed) or nothing)
                rates = [calls * incoming.nbytes / seconds if seconds > 0 else math.inf for seconds in elapsed]
        if incoming is None:
            return [-1.0] * _COLUMNS
        wrong = next((one for one in defects if one != nothing), nothing)
        return [*ends, stats.median(rates), min(rates), max(rates), incoming.nbytes, *wrong]

    def _window(
        self, peer: int | None, outgoing: torch.Tensor | None, incoming: torch.Tensor | None, calls: int
    ) -> float:
        """Return the seconds of all calls of a window on this rank."""
        self._clock.synchronize()
        # Ahead of the barrier: a wait that each GPU counts in cycles of its own clock would pull them apart after it.
        self._clock.get_ahead(1 + calls, seconds=window_seconds(self._round_seconds))
        self.ranks.barrier()
        with self._clock.region():
            if peer is not None:
                for _ in range(calls):
                    _exchange(self._group, outgoing, incoming, peer)
        [elapsed] = self._clock.read()
        return elapsed


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


def _numbers(reading: Reading) -> list[float]:
    """Return a reading as it travels."""
    rates = (reading.bytes_per_second, reading.low, reading.high)
    return [reading.sender, reading.receiver, *rates, reading.payload_bytes, *reading.defect]


def _reading(row: Sequence[float]) -> Reading:
    """Undo :func:`_numbers`."""
    sender, receiver, payload_bytes = int(row[0]), int(row[1]), int(row[5])
    count, offset, found, expected = (int(number) for number in row[6:])
    return Reading(
        sender=sender,
        receiver=receiver,
        bytes_per_second=row[2],
        low=row[3],
        high=row[4],
        payload_bytes=payload_bytes,
        defect=(count, offset, found, expected),
    )
