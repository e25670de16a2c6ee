"""How fast a group of ranks adds up its data, with the sums verified.

>>> busbw_factor(2), busbw_factor(8), busbw_factor(16)
(1.0, 1.75, 1.875)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from pytest_gpucluster import stats
from pytest_gpucluster.benchmarks.clock import Clock, clock_for
from pytest_gpucluster.benchmarks.footprint import memory_returned
from pytest_gpucluster.errors import InconclusiveMeasurement, WrongResult
from pytest_gpucluster.units import did_you_mean, show

Reduce = Callable[[torch.Tensor, dist.ProcessGroup], object]
"""Replace a tensor by the sum of all ranks' tensors."""

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

WINDOW_SECONDS = 0.1
"""About how long the calls of one window take together, at most."""

MIN_WINDOWS = 8
MAX_WINDOWS = 1000

LARGEST_ADDEND = 127
"""Whole numbers up to this one are exact in all dtypes: bf16 has 8 significant bits."""

_CHUNK_ELEMENTS = 2**24
"""The expected sums are made for so many elements at a time, to need little memory beside the payload."""


@dataclass(frozen=True, kw_only=True)
class CollectiveResult:
    """What this rank saw of a collective. Other ranks see other times; the slowest decides.

    Attributes:
        collective: its name, such as ``all_reduce``.
        payload_bytes, dtype: what each rank gave.
        ranks: size of the group.
        calls_per_window, windows: how often it was called between two looks at the clock, and how many such
        windows.
        seconds_per_call: median of the samples.
        samples_seconds_per_call: one for each window.
        verified_elements: sums that were compared with the expected ones, before the windows and after them.
    """

    collective: str
    payload_bytes: int
    dtype: str
    ranks: int
    calls_per_window: int
    windows: int
    seconds_per_call: float
    samples_seconds_per_call: tuple[float, ...]
    verified_elements: int

    @property
    def algbw_bytes_per_second(self) -> float:
        """Payload over time.

        Source: nccl-tests, doc/PERFORMANCE.md, "Algorithm bandwidth".
        """
        return self.payload_bytes / self.seconds_per_call

    @property
    def samples_algbw_bytes_per_second(self) -> tuple[float, ...]:
        """``algbw`` of each window."""
        return tuple(self.payload_bytes / seconds for seconds in self.samples_seconds_per_call)

    @property
    def busbw_bytes_per_second(self) -> float | None:
        """What the slowest link must carry for this ``algbw``; None for one rank, which uses no link."""
        return self.algbw_bytes_per_second * busbw_factor(self.ranks) if self.ranks > 1 else None

    @property
    def samples_busbw_bytes_per_second(self) -> tuple[float, ...]:
        """``busbw`` of each window; empty for one rank."""
        if self.ranks == 1:
            return ()
        factor = busbw_factor(self.ranks)
        return tuple(sample * factor for sample in self.samples_algbw_bytes_per_second)


def busbw_factor(ranks: int) -> float:
    """Return the ratio of busbw to algbw of an all-reduce: 2 (n - 1) / n.

    Raises:
        ValueError: there are fewer than two ranks, so nothing crosses a link.

    Source: nccl-tests, doc/PERFORMANCE.md, "AllReduce".
    """
    if ranks < 2:
        raise ValueError(f"busbw is defined for 2 ranks and more, not for {ranks}")
    return 2 * (ranks - 1) / ranks


def all_reduce(
    group: dist.ProcessGroup,
    device: torch.device,
    *,
    payload_bytes: int,
    dtype: str = "fp32",
    seconds: float,
    warmup_seconds: float,
    clock: Clock | None = None,
    reduce: Reduce | None = None,
) -> CollectiveResult:
    """Measure the in-place sum of one tensor over all ranks of a group, in seconds a call.

    Collective: every rank of the group must call this.

    A window is a barrier and then a number of calls one after the other; its sample is the time of all of
    them over their number, on this rank. The first rank of the group decides, from its own warm-up, how many
    calls and windows there are, for all ranks. The payload is made anew before each window, outside the time,
    and a window has no more calls than keep the growing sums finite.

    The sums are verified before the first window and after the last: each element has one rank that
    contributes a whole number, the others zero, so that the sum is exact in any order. A rank that finds a
    wrong sum says so after its last collective, in order not to leave the others waiting.

    Args:
        group: the ranks that take part.
        device: where this rank's payload is.
        payload_bytes: size of each rank's tensor.
        dtype: "fp32", "bf16" or "fp16".
        seconds: about how long to measure, in 8 to 1000 windows of 0.1 s at most.
        warmup_seconds: at least how long to call before.
        clock: takes the time; by default the device's own.
        reduce: ``reduce(tensor, group)``, by default ``torch.distributed.all_reduce``.

    Raises:
        WrongResult: a sum on this rank is wrong; names the rank, the count and the first element.
        InconclusiveMeasurement: the clock did not advance.
        ValueError: an argument is out of its range, or this rank is not in the group.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype is one of {', '.join(DTYPES)}, not {dtype!r}{did_you_mean(dtype, DTYPES)}")
    if payload_bytes < 1 or payload_bytes % DTYPES[dtype].itemsize:
        raise ValueError(
            f"payload_bytes must be a positive multiple of {DTYPES[dtype].itemsize} for {dtype}, not {payload_bytes}"
        )
    if not (0 < seconds < math.inf and 0 <= warmup_seconds < math.inf):
        raise ValueError(
            "seconds must be positive and warmup_seconds not negative, "
            f"not seconds={seconds}, warmup_seconds={warmup_seconds}"
        )
    if dist.get_rank(group) < 0:
        raise ValueError(f"rank {dist.get_rank()} is not in the group that it should measure")
    try:
        with memory_returned():
            return _measure(
                _Payload(group, device, payload_bytes, dtype),
                clock or clock_for(device),
                reduce or _sum,
                seconds=seconds,
                warmup_seconds=warmup_seconds,
            )
    finally:
        # A traceback that is kept keeps this frame, and a gloo group that outlives its end aborts the process.
        del group


def finite_calls(ranks: int, dtype: str) -> int:
    """Return how often ``ranks`` ranks can add up a payload in place before a sum overflows.

    After the first call all ranks hold the addend, and each further call multiplies it by their number.

    >>> finite_calls(2, "fp32"), finite_calls(16, "fp32"), finite_calls(8, "fp16")
    (122, 31, 4)
    """
    if ranks < 2:
        return 2**31
    return 1 + math.floor(math.log(torch.finfo(DTYPES[dtype]).max / LARGEST_ADDEND, ranks))


def _measure(
    payload: _Payload, clock: Clock, reduce: Reduce, *, seconds: float, warmup_seconds: float
) -> CollectiveResult:
    group = payload.group
    most_calls = finite_calls(payload.ranks, payload.dtype)

    def window(calls: int) -> float:
        """Return the seconds of ``calls`` calls on this rank."""
        payload.fill()
        payload.barrier()
        clock.synchronize()
        with clock.region():
            for _ in range(calls):
                reduce(payload.tensor, group)
        [elapsed] = clock.read()
        return elapsed

    def verify() -> str | None:
        payload.fill()
        reduce(payload.tensor, group)
        return payload.defect()

    findings = [verify()]
    plan = _Plan(calls=1)
    spent = 0.0
    while not plan.windows:
        elapsed = window(plan.calls)
        spent += elapsed
        plan = payload.of_first_rank(
            _Plan.after(
                elapsed,
                plan.calls,
                spent,
                seconds=seconds,
                warmup_seconds=warmup_seconds,
                most_calls=most_calls,
            )
        )
    samples = [window(plan.calls) / plan.calls for _ in range(plan.windows)]
    findings.append(verify())
    wrong = [finding for finding in findings if finding]
    if wrong:
        raise WrongResult(wrong[0])
    if not min(samples) > 0:
        raise InconclusiveMeasurement(f"{payload}: the clock did not advance: a window took {min(samples)} s")
    return CollectiveResult(
        collective="all_reduce",
        payload_bytes=payload.tensor.nbytes,
        dtype=payload.dtype,
        ranks=payload.ranks,
        calls_per_window=plan.calls,
        windows=plan.windows,
        seconds_per_call=stats.median(samples),
        samples_seconds_per_call=tuple(samples),
        verified_elements=len(findings) * payload.tensor.numel(),
    )


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """What is called next: one window of the warm-up, or, if ``windows`` is not 0, the windows that count."""

    calls: int
    windows: int = 0

    @classmethod
    def after(
        cls,
        elapsed: float,
        calls: int,
        spent: float,
        *,
        seconds: float,
        warmup_seconds: float,
        most_calls: int,
    ) -> _Plan:
        """Plan from the last window of the warm-up, ``calls`` calls in ``elapsed`` seconds."""
        # A clock that stands still is reported at the end, by the rank whose clock it is.
        call_seconds = elapsed / calls if elapsed > 0 else math.inf
        window_seconds = min(WINDOW_SECONDS, seconds / MIN_WINDOWS)
        wanted = max(1, min(most_calls, round(window_seconds / call_seconds)))
        if spent < warmup_seconds and elapsed > 0:
            # The first calls connect and take far longer, so the number may only grow step by step.
            return cls(calls=min(wanted, 10 * calls))
        windows = math.ceil(seconds / (wanted * call_seconds))
        return cls(calls=wanted, windows=min(MAX_WINDOWS, max(MIN_WINDOWS, windows)))


class _Payload:
    """One rank's tensor, and what its elements must sum up to."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, payload_bytes: int, dtype: str) -> None:
        self.group, self.device, self.dtype = group, device, dtype
        self.ranks = dist.get_world_size(group)
        self.tensor = torch.empty(payload_bytes // DTYPES[dtype].itemsize, dtype=DTYPES[dtype], device=device)
        self._rank = dist.get_rank(group)
        self._flag = torch.zeros(1, device=device)
        self._round = 0

    def barrier(self) -> None:
        """Start to wait for all ranks of the group."""
        dist.all_reduce(self._flag, group=self.group)

    def of_first_rank(self, plan: _Plan) -> _Plan:
        """Return the plan of the first rank of the group, on every rank."""
        shared = torch.tensor([plan.calls, plan.windows], device=self.device)
        dist.broadcast(shared, group=self.group, group_src=0)
        calls, windows = shared.tolist()
        return _Plan(calls=calls, windows=windows)

    def fill(self) -> None:
        """Write this rank's addends, other ones than the last time, so that old sums are wrong sums."""
        self._round += 1
        for part, contributor, addend in self._chunks():
            part.copy_(addend.where(contributor == self._rank, 0))

    def defect(self) -> str | None:
        """Describe what is wrong with the sums, or return None. Waits for the device."""
        count, first = 0, ""
        start = 0
        for part, contributor, addend in self._chunks():
            wrong = part != addend  # a NaN is unequal too
            here = int(wrong.sum())
            if here and not count:
                at = int(wrong.view(torch.uint8).argmax())
                source = dist.get_global_rank(self.group, int(contributor[at]))
                first = (
                    f"the first at offset {start + at}: found {float(part[at]):.9g}, "
                    f"expected {int(addend[at])}, which rank {source} contributed"
                )
            count += here
            start += len(part)
        return f"{self}: {count} of {start} sums are wrong, {first}" if count else None

    def _chunks(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Yield part after part of the tensor, with the contributor and the addend of each element."""
        for start in range(0, len(self.tensor), _CHUNK_ELEMENTS):
            part = self.tensor[start : start + _CHUNK_ELEMENTS]
            index = torch.arange(start + self._round, start + self._round + len(part), device=self.device)
            # 127 is prime: data that arrive at a wrong offset differ, unless both periods divide the
            # distance.
            yield part, index % self.ranks, (index * 3 + self._round) % LARGEST_ADDEND + 1

    def __str__(self) -> str:
        return (
            f"rank {dist.get_rank()}: all_reduce of {show(self.tensor.nbytes, 'B')} {self.dtype} "
            f"over {self.ranks} ranks"
        )


def _sum(tensor: torch.Tensor, group: dist.ProcessGroup) -> None:
    dist.all_reduce(tensor, op=dist.ReduceOp.SUM, group=group)
