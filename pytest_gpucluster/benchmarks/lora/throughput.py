"""Tokens a second of LoRA training on a GPU, and its peak memory, whatever the weights are."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.distributed as dist

from pytest_gpucluster.benchmarks.blocks import NO_CONTEXT
from pytest_gpucluster.benchmarks.lora.model import Base
from pytest_gpucluster.benchmarks.lora.packing import Packed, Statistics
from pytest_gpucluster.benchmarks.lora.trainer import STARTING_STEPS, Step, Trainer
from pytest_gpucluster.benchmarks.lora.training_plan import Recipe
from pytest_gpucluster.benchmarks.memory_budget import releases_memory
from pytest_gpucluster.benchmarks.training.throughput import SteadySteps
from pytest_gpucluster.benchmarks.training.throughput_setup import fresh_compiler
from pytest_gpucluster.device.backends import accelerator
from pytest_gpucluster.errors import WrongResult
from pytest_gpucluster.metrics.sampling import Sampling, Series, series
from pytest_gpucluster.metrics.time_budget import MEASURING, WARM_UP, counted

_FEWEST_RATES = 6
"""Samples that the interval of a median needs."""
_KEPT_SEQUENCE = 32
"""Positions of a longer block on a simulated device."""


@dataclass(frozen=True, kw_only=True)
class LoraRate:
    """The rate of a training, on this rank.

    Attributes:
        tokens_per_second: input tokens of all positions, none of which is padding, over the time of a step: one sample
            for each steady step. It is this GPU's rate. None where there are too few steps.
        flops_per_token: by the formula, without what is recomputed.
        peak_bytes: of the GPU's memory, in training; None on cpu.
        recomputes: whether activations were recomputed.
        notes: for the report.
    """

    tokens_per_second: Series | None
    flops_per_token: int
    peak_bytes: int | None
    recomputes: bool
    notes: tuple[str, ...]

    def figures(self, peak_tflops: float | None, labels: Mapping[str, str]) -> Iterator[Figure]:
        """Yield tokens/s of a GPU, their part of its peak, and the peak memory.

        An unknown rate is NaN: a value that a limit asks for must not be left out.

        Args:
            peak_tflops: of the GPU's data sheet in bf16; None where it is unknown, as on cpu: then there is no MFU.
            labels: of all.
        """
        rate, labels = self.tokens_per_second, {**labels, "recompute": "on" if self.recomputes else "off"}
        yield "lora.tokens_per_second", math.nan if rate is None else rate, "tokens/s", labels
        if peak_tflops is not None:
            utilisation = math.nan if rate is None else rate.scaled(self.flops_per_token / (peak_tflops * 1e12))
            yield "lora.mfu", utilisation, "ratio", labels
        if self.peak_bytes is not None:
            yield "lora.peak_memory", float(self.peak_bytes), "B", labels


Figure: TypeAlias = tuple[str, float | Series, str, Mapping[str, str]]
"""One quantity: the name of its metric, its value, the unit, and labels."""


@releases_memory(cycles=True)
def lora_throughput(
    group: dist.ProcessGroup,
    device: torch.device,
    *,
    base: Base,
    recipe: Recipe,
    sequence: int,
    sampling: Sampling,
    during: AbstractContextManager[object] = NO_CONTEXT,
    progress: Callable[..., None] | None = None,
) -> LoraRate:
    """Train on random tokens until the rate is known.

    Collective: every rank of the group must call this, with the same arguments. The first rank decides for all when
    to stop, by the slowest rank's time of each step.

    Args:
        group: the ranks that train one model together.
        device: where this rank trains.
        base: the model to train.
        recipe: how; its steps determine only the learning rate.
        sequence: positions of a block.
        sampling: how long to warm up and to measure, and the required confidence.
        during: entered while steps are timed, not during the warm-up.
        progress: called after some steps each, with the step, the number of steps as far as it is known, the loss and
            the rate.

    Raises:
        WrongResult: a loss or norm is not finite.
        EnvironmentBroken: too little memory is free.
    """
    with fresh_compiler() if recipe.compiled else nullcontext():
        memory = accelerator(device)
        memory.reset_peak()
        kept = base.kept(memory)
        positions = sequence if kept is base else memory.kept(sequence, _KEPT_SEQUENCE)
        packed = random_blocks(4 * recipe.global_batch, positions, kept.geometry.vocab, recipe.seed)
        trainer = Trainer(group, device, base, recipe, packed, sequence=sequence)
        losses: list[float] = []

        def take(count: int) -> list[float]:
            seconds = []
            for _ in range(count):
                step = trainer.step(len(losses) + 1)
                if not step.all_finite:
                    raise WrongResult(
                        f"step {step.step}: the loss is {step.loss} and the gradients' norm {step.gradient_norm}, and "
                        "both must be finite. Check -k ddp and the GPU"
                    )
                losses.append(step.loss)
                seconds.append(step.seconds)
            return seconds

        def show(to_come: int, step_seconds: float) -> None:
            if progress is not None:
                rate = trainer.tokens_of_rank / step_seconds
                progress(len(losses), len(losses) + to_come, loss=losses[-1], tokens_per_second=rate)

        steady = SteadySteps(trainer.ranks, take, sampling, show, now=memory.now)
        with counted(WARM_UP):
            planned = steady.warm_up()
        with counted(MEASURING), during:
            steady.sample(planned)
        return LoraRate(
            tokens_per_second=steady.rate(trainer.tokens_of_rank),
            flops_per_token=base.flops_per_token(sequence),
            peak_bytes=memory.peak_bytes(),
            recomputes=trainer.recomputes,
            notes=tuple(trainer.notes),
        )


def steady_rate(trainings: Sequence[Sequence[Step]], tolerance_ratio: float) -> Series | None:
    """Return the rate of the steady steps of trainings; None where there are too few.

    Args:
        trainings: the steps of each, from its first one.
        tolerance_ratio: the required confidence.
    """
    # The number of steps is fixed: the measurement is never extended for more confidence.
    sampling = Sampling(warmup_seconds=0, window_seconds=1, longest_seconds=1, tolerance_ratio=tolerance_ratio)
    timed = [step for steps in trainings for step in steps[STARTING_STEPS:]]
    if len(timed) < _FEWEST_RATES:
        # The slow ones too: that never makes a rate look better.
        timed = [step for steps in trainings for step in steps]
    if len(timed) < _FEWEST_RATES:
        return None
    return series([step.tokens / step.seconds for step in timed], sampling, spent_seconds=0)


def random_blocks(count: int, sequence: int, vocab: int, seed: int) -> Packed:
    """Return blocks of random tokens, all of which count in the loss."""
    random = torch.Generator().manual_seed(seed)
    tokens = torch.randint(vocab, (count, sequence + 1), generator=random)
    loss_mask = torch.ones(count, sequence, dtype=torch.bool)
    return Packed(tokens=tokens, loss_mask=loss_mask, statistics=Statistics())
