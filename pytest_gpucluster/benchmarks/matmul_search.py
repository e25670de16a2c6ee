"""The fastest shape and layout of a product, and its rate.

A search runs a short trial of each candidate, and then measures the winner again. The largest of many trials is larger
than the rate of its candidate, for noise selects it, too; so no trial is ever a result. The winner's rate comes from a
fresh measurement, with its own operands, warm-up and window, by the rules of every other rate, and with every product
verified.

It is still optimistic: it is the rate of the shape that suits this GPU and this library best. Vendors' figures are of
that kind, and so are those of mamf-finder (stas00/ml-engineering, compute/accelerator/benchmarks), whose figures this
one can be compared with. It does not show the rate of a model's own products.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from pytest_gpucluster.benchmarks.blocks import NO_CONTEXT, Bursts
from pytest_gpucluster.benchmarks.dtypes import arithmetic
from pytest_gpucluster.benchmarks.matmul import (
    Buffers,
    MatmulResult,
    Products,
    Shape,
    layouts_of,
    measure_matmul,
    prepare_shape,
)
from pytest_gpucluster.benchmarks.memory_budget import releases_memory
from pytest_gpucluster.device.backends import accelerator
from pytest_gpucluster.device.products import numerics
from pytest_gpucluster.errors import EnvironmentBroken, PeerGaveUp, StoreError
from pytest_gpucluster.metrics.sampling import Sampling
from pytest_gpucluster.metrics.stats import median
from pytest_gpucluster.metrics.time_budget import MEASURING, WARM_UP, counted

BLOCKS = 5
"""A trial's rate is the median of this number of blocks: one disturbance does not decide."""

_INSTEAD = "choose smaller shapes, such as --gpucluster-workload matmul.search.shapes=4096x4096x4096"
_NOTICE = "matmul search"


@dataclass(frozen=True, kw_only=True)
class Trial:
    """The rate of a candidate in a short trial, in TFLOPS: enough to choose by, and no measurement."""

    shape: Shape
    tflops: float

    def __str__(self) -> str:
        return f"{self.shape} {self.tflops:.4g}"


Choose = Callable[[Sequence[Trial]], Shape]
"""Chooses the candidate to measure, from this rank's trials. With several ranks all must get the same answer."""


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """The trials of all candidates on this rank, in their order, and the fresh measurement of the chosen one."""

    trials: tuple[Trial, ...]
    best: MatmulResult

    @property
    def trials_text(self) -> str:
        """All trials on one line, the fastest first."""
        ordered = sorted(self.trials, key=lambda trial: -trial.tflops)
        return f"{', '.join(map(str, ordered))} TFLOPS, each of a short trial to choose by, and not measured"


class Broadcast(Protocol):
    """Values that ranks post for each other in the store of the run."""

    def post(self, name: str, value: Any) -> None:
        """Post a value."""

    def read(self, name: str, ranks: Sequence[int], *, within_seconds: float) -> dict[int, Any]:
        """Return the values that were posted in time."""


def candidates(dtype: str, sizes: Iterable[tuple[int, int, int]], layouts: Iterable[str]) -> tuple[Shape, ...]:
    """Return every shape in every layout, as the workload lists them.

    Args:
        dtype: fp8 is multiplied in the layout nt only, whatever ``layouts`` is.
        sizes: (m, n, k) of each.
        layouts: of ``LAYOUTS`` of ``matmul``.

    Raises: ValueError if there is none.
    """
    possible = layouts_of(arithmetic(dtype))
    chosen = tuple(layouts) if len(possible) > 1 else possible
    found = tuple(Shape(m=m, n=n, k=k, layout=layout) for m, n, k in sizes for layout in chosen)
    if not found:
        raise ValueError("there is no candidate for the search: give at least one shape and one layout")
    return found


def fastest(trials: Sequence[Trial]) -> Shape:
    """Return the shape that was the fastest; of equals the first one."""
    return max(trials, key=lambda trial: trial.tflops).shape


@contextmanager
def first_rank_chooses(broadcast: Broadcast, rank: int, *, within_seconds: float) -> Iterator[Choose]:
    """Let the first rank choose for all, by its own trials. To be entered around the search.

    Every rank must do so in the same phase of a test. No process group is needed. A first rank that does not reach the
    choice, because of a wrong product or another error, posts that, and no rank waits for it.

    Args:
        broadcast: where the first rank posts its choice.
        rank: of this process.
        within_seconds: how much longer than this rank the first one may need for its trials.

    Raises, from what it yields:
        PeerGaveUp: the first rank has not chosen: this rank only suffers from its error.
        EnvironmentBroken: its choice is no candidate of this rank.
    """
    has_posted = rank != 0

    def choose(trials: Sequence[Trial]) -> Shape:
        nonlocal has_posted
        if not has_posted:
            broadcast.post(_NOTICE, str(fastest(trials)))
            has_posted = True
        values = broadcast.read(_NOTICE, [0], within_seconds=within_seconds)
        if values.get(0) is None:
            why = "gave up its search before it chose" if 0 in values else f"has not chosen within {within_seconds:g} s"
            raise PeerGaveUp(f"rank 0 {why} which shape of a product all ranks are to measure")
        chosen = next((trial.shape for trial in trials if str(trial.shape) == values[0]), None)
        if chosen is None:
            raise EnvironmentBroken(
                f"rank 0 has chosen {values[0]}, which is no candidate of the search on rank {rank}"
            )
        return chosen

    try:
        yield choose
    finally:
        if not has_posted:
            with suppress(StoreError):  # then no rank can read it either, and this rank's own error is reported
                broadcast.post(_NOTICE, None)


def search_matmul(
    device: torch.device,
    shapes: Sequence[Shape],
    *,
    dtype: str,
    trial_seconds: float,
    sampling: Sampling,
    choose: Choose = fastest,
    during: AbstractContextManager[object] = NO_CONTEXT,
) -> SearchResult:
    """Run a short trial of each candidate, let one be chosen, and measure it again.

    The device is warmed up once, with the first candidate, as long as for a measurement: on a cold one the first would
    be the fastest. Of each candidate two products are compared with the fp32 reference, element by element, and every
    further one with them, in trials and in the measurement. A wrong product ends the search.

    All candidates must fit into the device's memory, which is checked before the first trial. None is left out: a
    search among fewer would be another one, and ranks with less memory would search otherwise than others.

    Args:
        device: where to multiply.
        shapes: the candidates.
        dtype: "bf16", "fp16", "tf32", "fp32" or "fp8".
        trial_seconds: about how long each trial is, besides a warm-up of the same length.
        sampling: of the chosen one's measurement. Its warm-up is also that before the first trial.
        choose: chooses; with several ranks as ``first_rank_chooses`` yields it.
        during: entered while samples of the measurement are taken.

    Returns: trials and measurement; its series may be inconclusive, and states it.

    Raises:
        WrongResult: a product is wrong, NaN and infinities included; names shape, layout and the first element.
        InconclusiveMeasurement: the clock did not advance.
        EnvironmentBroken: a candidate does not fit into the free memory; the device has no fp8; the environment
            overrides the choice between fp32 and TF32; or from ``choose``.
        ValueError: an argument is out of its range, or there is no candidate.
    """
    if not shapes or not trial_seconds > 0:
        raise ValueError(
            f"a search needs candidates and a positive time for each, not {len(shapes)} and {trial_seconds} s"
        )
    everything = [prepare_shape(device, shape, dtype=dtype, instead=_INSTEAD) for shape in shapes]
    trials, warmup_seconds = [], sampling.warmup_seconds
    for buffers in everything:
        name = f"{device}: trial of matmul {dtype} {buffers.shape}"
        with numerics(arithmetic(dtype).float32_precision):
            tflops = _trial(device, buffers, name, warmup_seconds, trial_seconds)
        trials.append(Trial(shape=buffers.shape, tflops=tflops))
        warmup_seconds = trial_seconds
    best = measure_matmul(device, choose(trials), dtype=dtype, sampling=sampling, instead=_INSTEAD, during=during)
    return SearchResult(trials=tuple(trials), best=best)


@releases_memory()
def _trial(device: torch.device, buffers: Buffers, name: str, warmup_seconds: float, trial_seconds: float) -> float:
    # Of another seed than the measurement, which has operands of its own.
    bursts = Bursts(Products(device, buffers, name=name, seed=1), accelerator(device).clock())
    with counted(WARM_UP):
        bursts.warm_up(warmup_seconds)
        count = bursts.operations_in(trial_seconds / BLOCKS)
    rates = []
    with counted(MEASURING):
        for _ in range(BLOCKS):  # no comprehension: its frame in a traceback would keep the operands alive
            rates.append(count * buffers.shape.flops / bursts.block(count) / 1e12)
    return median(rates)
