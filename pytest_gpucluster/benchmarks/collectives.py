"""Collectives: the rate at which a group of ranks adds up, gathers, scatters or passes on data, all of it verified.

result = measure_collective("all_gather", group, device, payload_bytes=10**9, dtype="bf16", sampling=sampling)
result.busbw.median          # bytes a second

>>> busbw_factor(2), busbw_factor(8), busbw_factor(16)
(1.0, 1.75, 1.875)
>>> busbw_factor(8, "all_gather"), busbw_factor(8, "broadcast")
(0.875, 1.0)

Each collective is one call through torch: ``call(sent, received, group)``. On a GPU it starts the
work on the current stream, or makes that stream wait for it, and does not block the host. Collective: every rank of the
group must call the same, with tensors of the same sizes and dtype.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist

from pytest_gpucluster.benchmarks.blocks import WindowPlan
from pytest_gpucluster.benchmarks.collective_payload import (
    COLLECTIVES,
    DTYPES,
    ROOT,
    Payload,
    needed_bytes,
    source_of,
)
from pytest_gpucluster.benchmarks.group import Ranks, Samples
from pytest_gpucluster.benchmarks.memory_budget import releases_memory, require_free_on_all
from pytest_gpucluster.device.backends import accelerator
from pytest_gpucluster.device.clock import RESOLUTION_SECONDS, Clock
from pytest_gpucluster.errors import InconclusiveMeasurement, WrongResult
from pytest_gpucluster.metrics.sampling import Sampling, Series, series
from pytest_gpucluster.metrics.time_budget import MEASURING, VERIFYING, WARM_UP, counted
from pytest_gpucluster.metrics.units import require_one_of, show

Call = Callable[[torch.Tensor, torch.Tensor, dist.ProcessGroup], object]
"""``call(sent, received, group)``: run one collective. For those in place both tensors are the same."""

# The names since torch 2.13, which warns of the older ones.
_gather_into: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def _send_recv(sent: torch.Tensor, received: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Send ``sent`` to the next rank, and receive from the previous one into ``received``, both at once."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, sent, group=group, group_peer=(rank + 1) % ranks),
            dist.P2POp(dist.irecv, received, group=group, group_peer=source_of(rank, ranks)),
        ]
    )
    for work in works:
        work.wait()


CALLS: dict[str, Call] = {
    "all_reduce": lambda sent, received, group: dist.all_reduce(received, group=group),
    "all_gather": lambda sent, received, group: _gather_into(received, sent, group=group),
    "reduce_scatter": lambda sent, received, group: _reduce_scatter(received, sent, group=group),
    "all_to_all": lambda sent, received, group: dist.all_to_all_single(received, sent, group=group),
    "broadcast": lambda sent, received, group: dist.broadcast(received, group=group, group_src=ROOT),
    "send_recv": _send_recv,
}
"""Name of each collective -> one call of it; sums are of all ranks. Looked up at each measurement: tests inject a fault
here."""

_LAUNCHES_OF_SEND_RECV = 4
"""The host's time for it, in launches of one kernel: torch creates an object for each operation."""

_RANKS_OF_A_LAUNCH = 8
"""In an all_to_all NCCL prepares a send and a receive for each rank: this number of ranks counts as one more launch."""


def launches(collective: str, ranks: int) -> int:
    """Return the number of kernel launches that one call counts as, for the clock to let the host get ahead.

    >>> launches("all_reduce", 8), launches("send_recv", 8), launches("all_to_all", 64)
    (1, 4, 9)
    """
    if collective == "send_recv":
        return _LAUNCHES_OF_SEND_RECV
    return 1 + ranks // _RANKS_OF_A_LAUNCH if collective == "all_to_all" else 1


# Each rank's traffic, in parts of the payload: (a, b) stands for a (n - 1) / n + b.
_FACTORS: Mapping[str, tuple[int, int]] = MappingProxyType(
    {
        "all_reduce": (2, 0),
        "all_gather": (1, 0),
        "reduce_scatter": (1, 0),
        "all_to_all": (1, 0),
        "broadcast": (0, 1),
        "send_recv": (0, 1),
    }
)


def busbw_factor(ranks: int, collective: str = "all_reduce") -> float:
    """Return the ratio of busbw to algbw for n ranks.

    2 (n - 1) / n for an all_reduce; (n - 1) / n for an all_gather, a reduce_scatter and an all_to_all; 1 for a
    broadcast and a send_recv.

    Raises:
        ValueError: there are fewer than two ranks, so nothing crosses a link; or the collective is unknown.

    Source: nccl-tests, doc/PERFORMANCE.md, "Summary"; for send_recv src/sendrecv.cu, SendRecvGetBw.
    """
    require_one_of("a collective", collective, _FACTORS)
    if ranks < 2:
        raise ValueError(f"busbw is defined for 2 ranks and more, not for {ranks}")
    shared, whole = _FACTORS[collective]
    return shared * (ranks - 1) / ranks + whole


@dataclass(frozen=True, kw_only=True)
class CollectiveResult:
    """The times of a collective on this rank, and on all ranks of the group.

    All series are inconclusive together: the slowest rank's series decides when to stop.

    Attributes:
        collective: its name, such as ``all_reduce``.
        payload_bytes: its size as nccl-tests counts it (``collective_payload``): of an all_reduce, a broadcast and a
            send_recv each rank's input; of the others all ranks' parts together.
        dtype: of the elements.
        ranks: size of the group.
        calls_per_window, windows_per_sample: number of calls between two readings of the clock, and of such windows in
            a sample.
        latency: seconds per call on this rank.
        slowest_latency: seconds per call on the rank that was slowest in each sample; equal on all ranks.
        mean_latency: seconds per call, the mean of all ranks in each sample; equal on all ranks.
        verified_elements: elements that were compared with the expected ones, before, between and after the windows.
        sampling: of the measurement.
    """

    collective: str
    payload_bytes: int
    dtype: str
    ranks: int
    calls_per_window: int
    windows_per_sample: int
    latency: Series
    slowest_latency: Series
    mean_latency: Series
    verified_elements: int
    sampling: Sampling

    @property
    def algbw(self) -> Series:
        """Payload over time on this rank, in bytes a second.

        Source: nccl-tests, doc/PERFORMANCE.md, "Algorithm bandwidth".
        """
        return self._bandwidth(self.latency)

    @property
    def busbw(self) -> Series | None:
        """The slowest link's traffic for this rank's ``algbw``, in bytes a second; None for one rank."""
        return self._on_bus(self.latency)

    @property
    def slowest_busbw(self) -> Series | None:
        """The same from the slowest rank's time in each sample. Equal on all ranks."""
        return self._on_bus(self.slowest_latency)

    @property
    def average_busbw(self) -> Series | None:
        """The same from the mean of all ranks' times, as nccl-tests prints it by default. Equal on all ranks.

        Source: nccl-tests, README.md, option ``-a``: "Report performance as an average across all ranks", default 1.
        """
        return self._on_bus(self.mean_latency)

    def _on_bus(self, latency: Series) -> Series | None:
        if self.ranks < 2:
            return None
        return self._bandwidth(latency).scaled(busbw_factor(self.ranks, self.collective))

    def _bandwidth(self, latency: Series) -> Series:
        rates = (self.payload_bytes / seconds for seconds in latency.samples)
        return series(rates, self.sampling, spent_seconds=0).decided_by(latency)


@releases_memory()
def measure_collective(
    collective: str,
    group: dist.ProcessGroup,
    device: torch.device,
    *,
    payload_bytes: int,
    dtype: str = "fp32",
    sampling: Sampling,
    during: AbstractContextManager[object] | None = None,
) -> CollectiveResult:
    """Measure one collective of all ranks of a group, in seconds a call.

    Collective: every rank of the group must call this, with the same collective, size, dtype and sampling.

    A window is a barrier and then a number of calls one after the other. A sample is the time of one or more windows
    over the number of their calls, on this rank. After each sample the ranks share theirs, and the first rank decides
    for all whether to continue: by the slowest rank's sample and the total time. Where sums replace their addends, the
    payload is written again outside of the windows, often enough to keep them finite.

    Every element is verified before the first window and after the last, each time with new data; and in between the
    results of the windows: of sums in place, in which an error stays, all calls where they are exact
    (``Payload.defect``), of others the last call. A rank that finds a defect raises after its last collective, so that
    the others do not wait for it.

    An all_reduce and a broadcast (from the group's first rank) are in place, the others not. In a send_recv each rank
    sends to the next one and receives from the previous one, all at once.

    Args:
        collective: "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast" or "send_recv".
        group: the ranks that take part.
        device: where this rank's payload is.
        payload_bytes: the size as nccl-tests counts it (``collective_payload``). The size that is then moved, rounded
            to equal parts, is in the result.
        dtype: "fp32", "bf16" or "fp16".
        sampling: how long to warm up and to measure, and the required confidence. A result that does not reach it in
            time is returned as inconclusive.
        during: entered for the time of the windows that count, without warm-up and verification.

    Raises:
        WrongResult: an element on this rank is wrong; names the rank, the count, the first element, and its source
            rank. Of a reduce_scatter on all ranks.
        InconclusiveMeasurement: a rank's clock did not advance; on all ranks.
        EnvironmentBroken: the ranks do not measure the same, or one has too little memory; on all ranks.
        ValueError: there is no such collective or dtype, or a send_recv has one rank.
    """
    require_one_of("a collective", collective, COLLECTIVES)
    require_one_of("dtype", dtype, DTYPES)
    ranks = Ranks(group, device)
    what = f"{collective} of {show(payload_bytes, 'B')} {dtype}"
    ranks.require_same(what, sampling)
    section = "all_reduce" if collective == "all_reduce" else "collectives"
    require_free_on_all(
        ranks,
        device,
        needed_bytes(payload_bytes, dtype, collective=collective, ranks=ranks.count),
        f"{what} with its verification",
        instead=f"leave this size out (--gpucluster-workload nccl.{section}.sizes=...)",
    )
    by = accelerator(device)
    payload = Payload(group, device, payload_bytes, dtype, collective, by=by)
    run = partial(CALLS[collective], payload.sent, payload.received, group)
    measurement = _Measurement(
        ranks,
        payload,
        by.clock(),
        lambda: by.communicate(run, collective, payload.payload_bytes, group, sent=payload.summed),
    )
    return measurement.measure(sampling, during or nullcontext(), by.now)


class _Measurement:
    """One collective, size and dtype on one group."""

    def __init__(self, ranks: Ranks, payload: Payload, clock: Clock, call: Callable[[], object]) -> None:
        self._ranks, self._payload, self._clock, self._call = ranks, payload, clock, call
        self._launches = launches(payload.shape.collective, ranks.count)
        self._own_defect: str | None = None
        """The first defect of a single call: this rank's own."""
        self._window_defect: str | None = None
        """The first defect after windows: of sums in place any rank may have caused it, for all."""

    def measure(
        self, sampling: Sampling, during: AbstractContextManager[object], now: Callable[[], float]
    ) -> CollectiveResult:
        self._verify()
        try:
            with counted(WARM_UP):
                plan = self._warm_up(sampling, now)
            with counted(MEASURING), during:
                samples, begin = Samples(self._ranks, sampling), now()
                while samples.wants_more(now() - begin):
                    samples.of_ranks.append(self._sample(plan))
        except InconclusiveMeasurement:
            self._raise_defect()  # it matters more, and may be the cause
            raise
        with counted(VERIFYING):
            self._window_defect = self._window_defect or self._payload.defect()
        self._verify()
        self._raise_defect()
        return CollectiveResult(
            collective=self._payload.shape.collective,
            payload_bytes=self._payload.payload_bytes,
            dtype=self._payload.dtype,
            ranks=self._ranks.count,
            calls_per_window=plan.calls,
            windows_per_sample=plan.windows,
            latency=samples.series(),
            slowest_latency=samples.worst,
            mean_latency=samples.series(statistics.fmean),
            verified_elements=self._payload.verified,
            sampling=sampling,
        )

    def _warm_up(self, sampling: Sampling, now: Callable[[], float]) -> WindowPlan:
        """Call until the time is up; return the plan of all ranks."""
        plan, begin, more = WindowPlan(), now(), 1.0
        while more:
            started = now()
            slowest = max(self._sample(plan))
            plan = plan.after(slowest, now() - started, sampling=sampling, finite_calls=self._payload.finite_calls)
            decision = [plan.calls, plan.windows, plan.call_seconds, now() - begin < sampling.warmup_seconds]
            calls, windows, call_seconds, more = self._ranks.of_first(decision)
            plan = WindowPlan(calls=int(calls), windows=int(windows), call_seconds=call_seconds)
        return plan

    def _sample(self, plan: WindowPlan) -> list[float]:
        """Return the seconds per call of each rank, over all windows of a sample."""
        windows = self._clock.real(plan.windows)
        with self._clock.scaled(plan.windows / windows):
            elapsed = sum(self._window(plan) for _ in range(windows))
        times = [seconds for [seconds] in self._ranks.gather([elapsed / (plan.calls * plan.windows)])]
        stopped = [index for index, seconds in enumerate(times) if not 0 < seconds < math.inf]
        if stopped:
            raise InconclusiveMeasurement(
                f"{self._payload}: the clock of {self._ranks.name(stopped[0])} did not advance: "
                f"a call took {times[stopped[0]]} s"
            )
        return times

    def _window(self, plan: WindowPlan) -> float:
        """Return the seconds of all calls of a window on this rank."""
        calls = self._clock.real(plan.calls)
        found = self._payload.ready(calls)
        self._window_defect = self._window_defect or found
        launched = self._ranks.window(self._clock, plan.calls * self._launches, seconds=plan.window_seconds)
        with self._clock.scaled(plan.calls / calls), launched:
            for _ in range(calls):
                self._call()
        [elapsed] = self._clock.read()
        # One GPU alone has nothing to do for a sum in place, which may be below its clock's resolution.
        return max(elapsed, RESOLUTION_SECONDS) if self._ranks.count == 1 else elapsed

    def _raise_defect(self) -> None:
        """Raise this rank's defect; where some rank has one of its own, only those raise.

        Any rank may have spoilt a part of a scattered sum, which one alone receives: then all raise what it found.
        """
        flags = self._ranks.gather([self._own_defect is not None, self._window_defect is not None])
        found = self._own_defect if any(own for own, _ in flags) else self._window_defect
        if self._payload.is_scattered and any(map(any, flags)):
            of_ranks = self._ranks.gather_objects(found)
            index, text = next((index, text) for index, text in enumerate(of_ranks) if text)
            found = f"{text}; {self._ranks.name(index)} received it"
        if found:
            raise WrongResult(found) from None

    def _verify(self) -> None:
        with counted(VERIFYING):
            self._payload.fill()
            self._call()
            found = self._payload.defect()
        self._own_defect = self._own_defect or found
