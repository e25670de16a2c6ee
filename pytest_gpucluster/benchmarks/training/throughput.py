"""Tokens a second of each rank in training, with the training itself verified."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from pytest_gpucluster.benchmarks.blocks import BATCH_SECONDS, NO_CONTEXT, Progress
from pytest_gpucluster.benchmarks.group import Ranks, Samples
from pytest_gpucluster.benchmarks.memory_budget import free_on_all, releases_memory, require_free_on_all
from pytest_gpucluster.benchmarks.training.data import endless_batches
from pytest_gpucluster.benchmarks.training.model import make_decoder, missing_flash_attention, on_meta
from pytest_gpucluster.benchmarks.training.sharding import allocate, mesh_of, shard
from pytest_gpucluster.benchmarks.training.step import (
    COMMUNICATION,
    GATHERED_BYTES,
    StepResult,
    Training,
    replicate,
    time_parts,
    time_without_exchange,
)
from pytest_gpucluster.benchmarks.training.throughput_setup import (
    Evidence,
    Setup,
    compile_blocks,
    compile_failed,
    fresh_compiler,
    lacking_compiler,
)
from pytest_gpucluster.device.backends import accelerator
from pytest_gpucluster.errors import EnvironmentBroken, InconclusiveMeasurement, WrongResult
from pytest_gpucluster.metrics.sampling import MIN_SAMPLES, Sampling, Series, series
from pytest_gpucluster.metrics.stats import median, percentile
from pytest_gpucluster.metrics.time_budget import MEASURING, VERIFYING, WARM_UP, counted

LEARNING_RATE = 1e-4
"""Source: this suite's rule: small enough for every size here without a warm-up of the rate, and large enough for the
loss to fall in a dozen steps."""

FIRST_STEPS = 3
"""Before anything is timed: the first compiles and connects, and the optimizer creates its moments."""

MOST_STEPS = 10_000
"""Maximum between two decisions. The values of each are kept on the device until then."""


@dataclass(frozen=True, kw_only=True)
class Throughput:
    """The result on this rank.

    Attributes:
        tokens_per_second: of this rank, one sample for each steady step. It is as inconclusive as the slowest rank's.
        step_seconds: of the same steps.
        p99_seconds: of the same steps; with fewer than 100 it is near the longest.
        parts: seconds of data_wait, forward, backward, optimizer and exposed_communication in other steps. An unknown
            one is missing, and a note states why.
        compiled: whether the blocks were.
        notes: remarks on the figures for the report.
    """

    tokens_per_second: Series
    step_seconds: Series
    p99_seconds: float
    parts: Mapping[str, float]
    compiled: bool
    notes: tuple[str, ...] = ()


@releases_memory(cycles=True)
def throughput(
    group: dist.ProcessGroup | None,
    device: torch.device,
    setup: Setup,
    *,
    sampling: Sampling,
    during: AbstractContextManager[object] = NO_CONTEXT,
    progress: Progress | None = None,
    in_parts: bool = True,
    ready: Callable[[], object] = lambda: None,
) -> Throughput:
    """Measure tokens a second of full training steps in bf16: all that a training does, data loading included.

    Collective: every rank of the group must call this, with the same setup and sampling.

    The first steps, in which blocks are compiled, do not count, nor does the warm-up. Then steps are taken one after
    the other as a training takes them, without any wait between them. The first rank decides for all how many: until
    the median of the slowest rank's steps is known. The times of a step's parts are measured afterwards in other
    steps. The rows of the very first step are trained on once more after the last one that counts.

    Args:
        group: the ranks that train together; None: this rank alone, with ddp only. A group of one exchanges nothing.
        device: where this rank trains.
        setup: the training.
        sampling: how long to warm up and to measure, and the required confidence. A result that does not reach it in
            time is returned as inconclusive.
        during: entered for the time of the steps that count.
        progress: called on every rank after some steps each, with the step, the number of steps as far as it is known,
            and the figures ``loss`` and ``tokens_per_second``.
        in_parts: also measure the times of a step's parts; without it ``parts`` is empty.
        ready: called once on every rank after the first step, which compiles, and before the warm-up. Groups that train
            at the same time can wait for each other in it.

    Raises:
        WrongResult: on the rank at fault: a loss or gradient is not finite, the loss of the first rows has not fallen,
            a weight tensor has not changed, the optimizer has skipped steps, the rows were fewer than expected, or the
            ranks' weights differ with ddp.
        InconclusiveMeasurement: a rank's clock did not advance; on all ranks.
        EnvironmentBroken: the ranks do not measure the same, or one has too little memory, on all ranks; or this rank
            gets no data, runs out of memory, or cannot compile the model although it has a compiler.
    """
    try:
        with fresh_compiler() if setup.kept(accelerator(device)).compiled else nullcontext():
            steps = _Steps(group, device, setup, sampling, in_parts)
            return steps.measure(during, progress or (lambda step, of, **figures: None), ready)
    except torch.OutOfMemoryError as error:
        needed = setup.needed_bytes(1 if group is None else dist.get_world_size(group))
        raise EnvironmentBroken(
            f"{device}: {error}. The estimate was {needed / 1e9:.3g} GB. Choose a smaller batch, or recompute blocks, "
            "by --gpucluster-workload"
        ) from None
    except RuntimeError as error:
        if not compile_failed(error):
            raise
        raise EnvironmentBroken(
            f"{device}: blocks cannot be compiled: {compile_failed(error)}. Check torch and triton, or run eager "
            "(compiled=off, by --gpucluster-workload)"
        ) from None


class SteadySteps:
    """Takes steps on all ranks until the time of a step is known, by the slowest rank: the first rank decides for all.

    Collective: every rank must call each method, with the same sampling.

    Args:
        ranks: that take the steps together.
        take: takes a number of steps, and returns the seconds of each on this rank.
        sampling: how long to warm up and to measure, and the required confidence.
        show: called after some steps each, with the number of the next ones and the seconds of one.
        now: the time by which the warm-up is planned, in seconds.
    """

    def __init__(
        self,
        ranks: Ranks,
        take: Callable[[int], list[float]],
        sampling: Sampling,
        show: Callable[[int, float], None] = lambda count, seconds: None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ranks, self._take, self._sampling, self._show, self._now = ranks, take, sampling, show, now
        self._samples, self._spent = Samples(ranks, sampling), 0.0

    def warm_up(self) -> int:
        """Take steps until the time is up; return how many to take next."""
        begin, count, more = self._now(), FIRST_STEPS, True
        while more:
            of_ranks = self._on_all(self._take(count))
            each = median([max(of_step) for of_step in zip(*of_ranks, strict=True)])
            left = self._sampling.warmup_seconds - (self._now() - begin)
            wanted = self._sampling.window_seconds if left <= 0 else min(left, BATCH_SECONDS)
            decision = self._ranks.of_first([left > 0, _steps_in(wanted, each)])
            more, count = bool(decision[0]), int(decision[1])
            self._show(count, each)
        return max(MIN_SAMPLES, count)

    def sample(self, count: int) -> None:
        """Take steps, at first ``count``, until there are enough."""
        more = True
        while more:
            mine = self._take(count)
            of_ranks = self._on_all(mine)
            self._samples.of_ranks += [list(of_step) for of_step in zip(*of_ranks, strict=True)]
            self._spent += sum(of_ranks[0])
            left = self._sampling.at_most_seconds - self._spent
            wanted = min(BATCH_SECONDS, max(self._sampling.window_seconds, left))
            more = self._samples.wants_more(self._spent)
            # The same on all ranks, for all have the times of all.
            count = _steps_in(wanted, median([max(of_step) for of_step in self._samples.of_ranks]))
            self._show(count if more else 0, median(mine))

    @property
    def seconds(self) -> Series:
        """The sampled steps of this rank. It is as inconclusive as the slowest rank's."""
        return self._samples.series()

    def rate(self, amount: int) -> Series:
        """The rate of this rank, where each step has this amount of something."""
        rates = (amount / seconds for seconds in self.seconds.samples)
        return series(rates, self._sampling, spent_seconds=self._spent).decided_by(self.seconds)

    def _on_all(self, seconds: list[float]) -> list[list[float]]:
        """Return the seconds of the same steps on each rank."""
        of_ranks = self._ranks.gather(seconds)
        stopped = [index for index, of_rank in enumerate(of_ranks) if not all(0 < one < math.inf for one in of_rank)]
        if stopped:
            raise InconclusiveMeasurement(f"the clock of {self._ranks.name(stopped[0])} did not advance in a step")
        return of_ranks


class _Steps:
    def __init__(
        self,
        group: dist.ProcessGroup | None,
        device: torch.device,
        setup: Setup,
        sampling: Sampling,
        in_parts: bool,
    ) -> None:
        self._ranks, self._device, self._setup = Ranks(group, device), device, setup
        self._sampling, self._in_parts, self._notes = sampling, in_parts, list[str]()
        ranks, self._by = self._ranks, accelerator(device)
        what = (
            f"training {setup.geometry.parameters / 1e6:.4g}M parameters by {setup.strategy} on {ranks.count} ranks "
            f"with {setup.tokens} tokens each"
        )
        # Otherwise some would wait for others that do something else, or that have failed.
        ranks.require_same(what, setup, sampling, in_parts)
        instead = "choose a smaller batch or model for this test by --gpucluster-workload"
        require_free_on_all(ranks, device, setup.needed_bytes(ranks.count), what, instead=instead)
        kept = setup.kept(self._by)
        why = lacking_compiler(ranks, device) if kept.compiled else ""
        if why:
            self._notes.append(f"no compiler, ran eager: {why}")
        self._compiled = setup.compiled and not why
        if slow_attention := missing_flash_attention(device, setup.geometry):
            self._notes.append(f"no flash attention: {slow_attention}")
        self._training = self._make(kept)
        self._batches = endless_batches(
            kept.geometry,
            device,
            rank=ranks.index,
            count=ranks.count,
            batch=kept.batch,
            workers=kept.workers,
            prefetch=kept.prefetch,
        )
        self._clock, self._evidence = self._by.clock(), Evidence(ranks, kept, self._training)

    def _make(self, kept: Setup) -> Training:
        """Create model and optimizer: blocks are recomputed, compiled, then shared, in this order."""
        device, group, replicated = self._device, self._ranks.group, kept.strategy == "ddp"
        whole = make_decoder(kept.geometry, device, seed=0, drawn_on=device) if replicated else on_meta(kept.geometry)
        if kept.recompute:
            whole.recompute()
        if kept.compiled and self._compiled:
            compile_blocks(whole)
        model: nn.Module = whole
        if not replicated:
            assert group is not None
            model = allocate(shard(whole, mesh_of(group, device)), device, seed=0, rank=self._ranks.index)
        elif group is not None and self._ranks.count > 1:
            model = replicate(whole, device, group)
        # A sharded model casts by itself.
        return Training(model, device, precision="bf16" if replicated else "own", learning_rate=LEARNING_RATE)

    def measure(
        self, during: AbstractContextManager[object], progress: Progress, ready: Callable[[], object]
    ) -> Throughput:
        def show(to_come: int, step_seconds: float) -> None:
            losses, rate = self._evidence.losses, self._setup.tokens / step_seconds
            progress(len(losses), len(losses) + to_come, loss=losses[-1], tokens_per_second=rate)

        take = partial(self._take, self._batches)
        steady = SteadySteps(self._ranks, take, self._sampling, show, now=self._by.now)
        with counted(WARM_UP):
            first_rows = next(self._batches)
            self._take(iter([first_rows]))
            ready()
            planned = steady.warm_up()
        with counted(MEASURING), during:
            steady.sample(planned)
        with counted(VERIFYING):
            self._take(iter([first_rows]))
            found = self._evidence.defect()
        parts: dict[str, float] = {}
        if self._in_parts and not any(wrong for [wrong] in self._ranks.gather([bool(found)])):
            with counted(MEASURING):
                parts = self._parts()
        if found:
            raise WrongResult(f"{self._ranks.name(self._ranks.index)} {found}")
        step_seconds = steady.seconds
        return Throughput(
            tokens_per_second=steady.rate(self._setup.tokens),
            step_seconds=step_seconds,
            p99_seconds=percentile(step_seconds.samples, 99),
            parts=parts,
            compiled=self._compiled,
            notes=tuple(self._notes),
        )

    def _take(self, batches: Iterator[torch.Tensor], count: int = 1) -> list[float]:
        """Take steps as a training does; return the seconds of each on this rank."""
        results: list[StepResult] = []
        flops = self._setup.tokens * self._setup.geometry.training_flops_per_token
        for _ in range(count):
            with self._clock.region():
                rows = next(batches)
                results.append(self._training.step([rows]))
                self._by.trained(flops, self._ranks.group)
            self._evidence.tokens.append(rows[:, 1:].numel())
        seconds = self._clock.read()
        self._evidence.add(results)
        return seconds

    def _parts(self) -> dict[str, float]:
        parts = time_parts(self._training, self._batches, self._clock)
        if self._ranks.count == 1:
            return parts | {COMMUNICATION: 0.0}
        needed = GATHERED_BYTES * self._setup.geometry.parameters if self._setup.strategy == "fsdp" else 0
        least = min(free_on_all(self._ranks, self._device))
        if least < needed:
            self._notes.append(
                f"{COMMUNICATION} is unknown: a step without exchange needs {needed / 1e9:.3g} GB more on each rank, "
                f"and {least / 1e9:.3g} GB are free"
            )
            return parts
        alone = time_without_exchange(self._training, self._batches, self._clock)
        # Two equal medians may differ by chance.
        return parts | {COMMUNICATION: max(0.0, parts["forward"] + parts["backward"] - alone)}


def _steps_in(seconds: float, each: float) -> int:
    return max(1, min(MOST_STEPS, math.ceil(seconds / each)))
