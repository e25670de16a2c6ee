"""Which shape and layout of a product is the fastest, and how fast it is.

A search looks at each candidate for a moment, and then measures the winner anew. The largest of many looks is larger
than what it is a look at, for noise chooses it, too; so no look is ever a result. The rate of the winner is one of a
fresh measurement, with its own operands, warm-up and window, by the rules of every other rate, and with every product
verified.

It still flatters: it is the rate of the shape that suits this GPU and this library best. Vendors' figures are of that
kind, and so are those of mamf-finder (stas00/ml-engineering, compute/accelerator/benchmarks), whose figures this one
can be compared with. How fast a model's own products are it does not say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from pytest_gpucluster.benchmarks.blocks import NOTHING, Bursts
from pytest_gpucluster.benchmarks.clock import Clock, clock_for
from pytest_gpucluster.benchmarks.dtypes import arithmetic, numerics
from pytest_gpucluster.benchmarks.matmul import (
    Buffers,
    MatmulResult,
    Multiply,
    Products,
    Shape,
    layouts_of,
    measure_shape,
    multiplier,
    prepare_shape,
)
from pytest_gpucluster.benchmarks.memory_budget import memory_returned
from pytest_gpucluster.errors import EnvironmentBroken, PeerGaveUp, StoreError
from pytest_gpucluster.metrics.sampling import Sampling
from pytest_gpucluster.metrics.stats import median
from pytest_gpucluster.metrics.time_budget import MEASURING, WARM_UP, counted

BLOCKS = 5
"""A look is the median of so many blocks: one disturbance does not decide."""

_INSTEAD = "choose smaller shapes, such as --gpucluster-workload matmul.search.shapes=4096x4096x4096"
_NOTICE = "matmul search"


@dataclass(frozen=True, kw_only=True)
class Look:
    """What a candidate did for a moment, in TFLOPS: enough to choose by, and no measurement."""

    shape: Shape
    tflops: float

    def __str__(self) -> str:
        return f"{self.shape} {self.tflops:.4g}"


Choose = Callable[[Sequence[Look]], Shape]
"""Says which of the candidates is measured, from this rank's looks. With several ranks all must get the same answer."""


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """The looks at all candidates on this rank, in their order, and the fresh measurement of the chosen one."""

    looks: tuple[Look, ...]
    best: MatmulResult

    @property
    def looks_text(self) -> str:
        """All looks on one line, the fastest first."""
        ordered = sorted(self.looks, key=lambda look: -look.tflops)
        return f"{', '.join(map(str, ordered))} TFLOPS, each looked at for a moment to choose by, and not measured"


class Board(Protocol):
    """Where ranks leave notices for each other: ``agreement.store.Board``."""

    def post(self, name: str, value: Any) -> None:
        """Leave a notice."""

    def read(self, name: str, ranks: Sequence[int], *, within_seconds: float) -> dict[int, Any]:
        """Return the notices that came in time."""


def candidates(dtype: str, sizes: Iterable[tuple[int, int, int]], layouts: Iterable[str]) -> tuple[Shape, ...]:
    """Return every shape in every layout, as the workload lists them.

    Args:
        dtype: fp8 is multiplied in the layout nt only, which is taken whatever ``layouts`` says.
        sizes: (m, n, k) of each.
        layouts: of ``matmul_shape.LAYOUTS``.

    Raises: ValueError if there is none.
    """
    possible = layouts_of(arithmetic(dtype))
    chosen = tuple(layouts) if len(possible) > 1 else possible
    found = tuple(Shape(m=m, n=n, k=k, layout=layout) for m, n, k in sizes for layout in chosen)
    if not found:
        raise ValueError("there is nothing to search among: name at least one shape and one layout")
    return found


def fastest(looks: Sequence[Look]) -> Shape:
    """Return the shape that was the fastest; of equals the first one."""
    return max(looks, key=lambda look: look.tflops).shape


@contextmanager
def first_rank_chooses(board: Board, rank: int, *, within_seconds: float) -> Iterator[Choose]:
    """Let the first rank choose for all, by its own looks. Hold it open around the search.

    Every rank must do so in the same phase of a test. No process group is needed. A first rank that does not come to
    choose, because of a wrong product or another error, says so, and nobody waits for it.

    Args:
        board: where the first rank says what it has chosen.
        rank: of this process.
        within_seconds: the first rank may need so much longer for its looks than this one.

    Raises, from what it yields:
        PeerGaveUp: the first rank has not chosen: this rank suffers from what happened there.
        EnvironmentBroken: what it has chosen is no candidate of this rank.
    """
    has_told = rank != 0

    def choose(looks: Sequence[Look]) -> Shape:
        nonlocal has_told
        if not has_told:
            board.post(_NOTICE, str(fastest(looks)))
            has_told = True
        told = board.read(_NOTICE, [0], within_seconds=within_seconds)
        if told.get(0) is None:
            why = "gave up its search before it said" if 0 in told else f"has not said within {within_seconds:g} s"
            raise PeerGaveUp(f"rank 0 {why} which shape of a product all ranks are to measure")
        chosen = next((look.shape for look in looks if str(look.shape) == told[0]), None)
        if chosen is None:
            raise EnvironmentBroken(f"rank 0 has chosen {told[0]}, which is no candidate of the search on rank {rank}")
        return chosen

    try:
        yield choose
    finally:
        if not has_told:
            with suppress(StoreError):  # then no rank can read it either, and what went wrong here is told
                board.post(_NOTICE, None)


def search_matmul(
    device: torch.device,
    shapes: Sequence[Shape],
    *,
    dtype: str,
    look_seconds: float,
    sampling: Sampling,
    choose: Choose = fastest,
    seed: int = 0,
    during: AbstractContextManager[object] = NOTHING,
    clock: Clock | None = None,
    multiply: Multiply | None = None,
    cache: int | None = None,
) -> SearchResult:
    """Look at each candidate for a moment, let one be chosen, and measure it anew.

    The device is warmed up once, with the first candidate, as long as for a measurement: on a cold one the first would
    be the fastest. Of each candidate two products are held against the fp32 reference, element by element, and every
    further one is compared with them, in looks and in the measurement. Whatever is wrong ends the search.

    All candidates must fit into the device's memory, which is asked for before the first look. None is left out: a
    search among fewer would be another one, and ranks with less memory would search otherwise than others.

    Args:
        device: where to multiply.
        shapes: the candidates.
        dtype: "bf16", "fp16", "tf32", "fp32" or "fp8".
        look_seconds: about how long each is looked at, beside a warm-up of the same length.
        sampling: how the chosen one is measured. Its warm-up is also that before the first look.
        choose: says which one; with several ranks as ``first_rank_chooses`` yields it.
        seed: of the operands of the measurement. Those of the looks have the next one.
        during: held open while samples of the measurement are taken.
        clock, multiply, cache: as for ``matmul.measure_matmul``.

    Returns: looks and measurement; its series may be inconclusive, and says so.

    Raises:
        WrongResult: a product is wrong, NaN and infinities included; names shape, layout and the first element.
        InconclusiveMeasurement: the clock did not advance.
        EnvironmentBroken: a candidate does not fit into the free memory; the device has no fp8; the environment forbids
            to choose between fp32 and TF32; or from ``choose``.
        ValueError: an argument is out of its range, or there is no candidate.
    """
    if not shapes or not look_seconds > 0:
        raise ValueError(
            f"a search needs candidates and a positive time for each, not {len(shapes)} and {look_seconds} s"
        )
    kind = arithmetic(dtype)
    everything = [prepare_shape(device, shape, dtype=dtype, cache=cache, instead=_INSTEAD) for shape in shapes]
    by, timed_by = multiply or multiplier(device, kind), clock or clock_for(device)
    looks, warmup_seconds = [], sampling.warmup_seconds
    for buffers in everything:
        name = f"{device}: look at matmul {dtype} {buffers.shape}"
        with memory_returned(), numerics(kind.float32_precision):
            tflops = _look(device, buffers, name, seed + 1, by, timed_by, warmup_seconds, look_seconds)
        looks.append(Look(shape=buffers.shape, tflops=tflops))
        warmup_seconds = look_seconds
    best = measure_shape(
        device,
        choose(looks),
        dtype=dtype,
        sampling=sampling,
        instead=_INSTEAD,
        seed=seed,
        during=during,
        clock=clock,
        multiply=multiply,
        cache=cache,
    )
    return SearchResult(looks=tuple(looks), best=best)


def _look(
    device: torch.device,
    buffers: Buffers,
    name: str,
    seed: int,
    multiply: Multiply,
    clock: Clock,
    warmup_seconds: float,
    look_seconds: float,
) -> float:
    # A function of its own, for its frame holds all tensors: see memory_returned.
    bursts = Bursts(Products(device, buffers, name=name, seed=seed, multiply=multiply), clock)
    with counted(WARM_UP):
        bursts.warm_up(warmup_seconds)
        count = bursts.operations_in(look_seconds / BLOCKS)
    rates = []
    with counted(MEASURING):
        for _ in range(BLOCKS):  # no comprehension: its frame in a traceback would keep the operands alive
            rates.append(count * buffers.shape.flops / bursts.block(count) / 1e12)
    return median(rates)
