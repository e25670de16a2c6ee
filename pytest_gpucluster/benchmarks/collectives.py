"""How fast a group of ranks adds up its data, with the sums verified."""

from __future__ import annotations

import math
import statistics
import time
import zlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
import torch.distributed as dist

from pytest_gpucluster.benchmarks.clock import RESOLUTION_SECONDS, Clock, clock_for
from pytest_gpucluster.benchmarks.collective_result import CollectiveResult
from pytest_gpucluster.benchmarks.footprint import free_bytes, memory_returned
from pytest_gpucluster.benchmarks.payload import DTYPES, Payload, finite_calls, needed_bytes
from pytest_gpucluster.benchmarks.ranks import Ranks
from pytest_gpucluster.benchmarks.window_plan import WindowPlan
from pytest_gpucluster.errors import EnvironmentBroken, InconclusiveMeasurement, WrongResult
from pytest_gpucluster.sampling import Sampling, series, wants_more
from pytest_gpucluster.units import did_you_mean, show

Reduce = Callable[[torch.Tensor, dist.ProcessGroup], object]
"""Replace a tensor by the sum of all ranks' tensors."""

_PLENTY_BYTES = 2**52
"""Stands for free memory that nobody can tell: then the allocation itself will tell."""


def all_reduce(
    group: dist.ProcessGroup,
    device: torch.device,
    *,
    payload_bytes: int,
    dtype: str = "fp32",
    sampling: Sampling,
    during: AbstractContextManager[object] | None = None,
    clock: Clock | None = None,
    reduce: Reduce | None = None,
    now: Callable[[], float] = time.monotonic,
) -> CollectiveResult:
    """Measure the in-place sum of one tensor over all ranks of a group, in seconds a call.

    Collective: every rank of the group must call this, with the same size, dtype and sampling.

    A window is a barrier and then a number of calls one after the other. A sample is the time of one or more windows
    over the number of their calls, on this rank. After each sample the ranks share theirs, and the first rank decides
    for all whether more are wanted: it goes by the slowest rank's sample, and counts all time that passes. The payload
    is made anew outside of the windows, often enough to keep the growing sums finite.

    The sums are verified before the first window and after the last. A rank that finds a wrong sum says so after its
    last collective, in order not to leave the others waiting.

    Args:
        group: the ranks that take part.
        device: where this rank's payload is.
        payload_bytes: size of each rank's tensor.
        dtype: "fp32", "bf16" or "fp16".
        sampling: how long to warm up and to measure, and how sure to be. What is not sure in time is returned as
            inconclusive.
        during: entered for the time of the windows that count, without warm-up and verification.
        clock: takes the time; by default the device's own.
        reduce: ``reduce(tensor, group)``, by default ``torch.distributed.all_reduce``.
        now: the time of day of the first rank, in seconds.

    Raises:
        WrongResult: a sum on this rank is wrong; names the rank, the count and the first element.
        InconclusiveMeasurement: a rank's clock did not advance; on all ranks.
        EnvironmentBroken: the ranks do not measure the same, or one has too little memory; on all ranks.
        ValueError: an argument is out of its range, or this rank is not in the group.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype is one of {', '.join(DTYPES)}, not {dtype!r}{did_you_mean(dtype, DTYPES)}")
    if payload_bytes < 1 or payload_bytes % DTYPES[dtype].itemsize:
        raise ValueError(
            f"payload_bytes must be a positive multiple of {DTYPES[dtype].itemsize} for {dtype}, not {payload_bytes}"
        )
    if dist.get_rank(group) < 0:
        raise ValueError(f"rank {dist.get_rank()} is not in the group that it should measure")
    try:
        with memory_returned():
            return _made(group, device, payload_bytes, dtype, sampling, clock, reduce).measure(
                sampling, during or nullcontext(), now
            )
    finally:
        # A traceback that is kept keeps this frame, and a gloo group that outlives its end aborts the process.
        del group


def _made(
    group: dist.ProcessGroup,
    device: torch.device,
    payload_bytes: int,
    dtype: str,
    sampling: Sampling,
    clock: Clock | None,
    reduce: Reduce | None,
) -> _AllReduce:
    ranks = Ranks(group, device)
    _agree(ranks, payload_bytes, dtype, sampling, free=free_bytes(device))
    payload = Payload(group, device, payload_bytes, dtype)
    return _AllReduce(group, ranks, payload, clock or clock_for(device), reduce or _sum)


def _agree(ranks: Ranks, payload_bytes: int, dtype: str, sampling: Sampling, *, free: int | None) -> None:
    """Find on all ranks what would let some wait for others that do something else, or that have failed."""
    known = _PLENTY_BYTES if free is None else free
    mine = [payload_bytes, list(DTYPES).index(dtype), zlib.crc32(repr(sampling).encode()), known]
    told = [[int(number) for number in numbers] for numbers in ranks.gather(mine)]
    names = list(DTYPES)
    for index, (size, kind, sampled, _) in enumerate(told):
        if [size, kind, sampled] != told[0][:3]:
            first = f"{show(told[0][0], 'B')} {names[told[0][1]]}"
            found = f"{show(size, 'B')} {names[kind]}" + ("" if sampled == told[0][2] else " for other times")
            raise EnvironmentBroken(
                f"the ranks do not measure the same: {ranks.name(index)} {found}, {ranks.name(0)} {first}. "
                "Give all nodes the same suite, profile and workload"
            )
    needed = needed_bytes(payload_bytes, dtype)
    least = min(range(len(told)), key=lambda index: told[index][3])
    if told[least][3] < needed:
        raise EnvironmentBroken(
            f"{ranks.name(least)}: an all_reduce of {show(payload_bytes, 'B')} {dtype} needs "
            f"{show(needed / 2**30, 'GiB')} of memory with its verification, and "
            f"{show(told[least][3] / 2**30, 'GiB')} are free. End what else uses the memory, or leave this size out "
            "(--gpucluster-workload nccl.all_reduce.sizes=...)"
        )


class _AllReduce:
    """One size and dtype on one group."""

    def __init__(self, group: dist.ProcessGroup, ranks: Ranks, payload: Payload, clock: Clock, reduce: Reduce) -> None:
        self._group, self._ranks, self._payload, self._clock, self._reduce = group, ranks, payload, clock, reduce
        self._finite_calls = finite_calls(ranks.count, payload.dtype)

    def measure(
        self, sampling: Sampling, during: AbstractContextManager[object], now: Callable[[], float]
    ) -> CollectiveResult:
        findings = [self._verify()]
        try:
            plan = self._warm_up(sampling, now)
            with during:
                samples = self._samples(plan, sampling, now)
        except InconclusiveMeasurement:
            if findings[0]:  # it matters more, and may be why
                raise WrongResult(findings[0]) from None
            raise
        findings.append(self._verify())
        wrong = [finding for finding in findings if finding]
        if wrong:
            raise WrongResult(wrong[0])
        slowest = series((max(times) for times in samples), sampling)
        mine, mean = (
            replace(series(taken, sampling), inconclusive=slowest.inconclusive)
            for taken in ([times[dist.get_rank(self._group)] for times in samples], map(statistics.fmean, samples))
        )
        return CollectiveResult(
            collective="all_reduce",
            payload_bytes=self._payload.tensor.nbytes,
            dtype=self._payload.dtype,
            ranks=self._ranks.count,
            calls_per_window=plan.calls,
            windows_per_sample=plan.windows,
            latency=mine,
            slowest_latency=slowest,
            mean_latency=mean,
            verified_elements=len(findings) * self._payload.tensor.numel(),
            sampling=sampling,
        )

    def _warm_up(self, sampling: Sampling, now: Callable[[], float]) -> WindowPlan:
        """Call until the time is up; return the plan of all ranks."""
        plan, begin, more = WindowPlan(), now(), 1.0
        while more:
            started = now()
            slowest = max(self._sample(plan))
            plan = plan.after(slowest, now() - started, sampling=sampling, finite_calls=self._finite_calls)
            decision = [plan.calls, plan.windows, plan.call_seconds, now() - begin < sampling.warmup_seconds]
            calls, windows, call_seconds, more = self._ranks.of_first(decision)
            plan = WindowPlan(calls=int(calls), windows=int(windows), call_seconds=call_seconds)
        return plan

    def _samples(self, plan: WindowPlan, sampling: Sampling, now: Callable[[], float]) -> list[list[float]]:
        """Return sample after sample, of all ranks each, until the first rank has seen enough."""
        samples: list[list[float]] = []
        begin, more = now(), 1.0
        while more:
            samples.append(self._sample(plan))
            slowest = [max(times) for times in samples]
            [more] = self._ranks.of_first([wants_more(slowest, spent_seconds=now() - begin, sampling=sampling)])
        return samples

    def _sample(self, plan: WindowPlan) -> list[float]:
        """Return the seconds per call of each rank, over all windows of a sample."""
        elapsed = sum(self._window(plan) for _ in range(plan.windows))
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
        self._payload.ready(plan.calls)
        self._clock.synchronize()
        # Ahead of the barrier: a wait that each GPU counts in cycles of its own clock would pull them apart after it.
        self._clock.get_ahead(1 + plan.calls, seconds=plan.window_seconds)
        self._ranks.barrier()
        with self._clock.region():
            for _ in range(plan.calls):
                self._reduce(self._payload.tensor, self._group)
        [elapsed] = self._clock.read()
        # One GPU alone has nothing to do for a sum in place, and that may take less than its clock can tell.
        return max(elapsed, RESOLUTION_SECONDS) if self._ranks.count == 1 else elapsed

    def _verify(self) -> str | None:
        self._payload.fill()
        self._reduce(self._payload.tensor, self._group)
        return self._payload.defect()


def _sum(tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    dist.all_reduce(tensor, op=dist.ReduceOp.SUM, group=group)
