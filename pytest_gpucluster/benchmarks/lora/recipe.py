"""What defines a LoRA experiment, and its parity: steps of many ranks against the same steps of one.

Where the whole definition is the same, so is the loss of each step. Parity compares a few steps with the same global
batch, in the same job. Without it a training that learns less than it should passes: AdamW hides a wrong scale of the
gradients, and a loss falls also where ranks do not share gradients or read the same data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pytest_gpucluster.benchmarks.lora.model import Base
from pytest_gpucluster.benchmarks.lora.packing import Packed
from pytest_gpucluster.benchmarks.lora.trainer import Components, Step, Trainer, TrainingData
from pytest_gpucluster.benchmarks.lora.training_plan import Recipe
from pytest_gpucluster.benchmarks.memory_budget import releases_memory
from pytest_gpucluster.benchmarks.training.fingerprint import relative
from pytest_gpucluster.errors import EnvironmentBroken


def context_of(base: Base, recipe: Recipe, data: TrainingData, *, ranks: int, weights: int) -> dict[str, str]:
    """Return the context of a curve and of a checkpoint.

    The number of ranks belongs to it only with dropout, where each rank draws its own.

    Args:
        base, recipe, data: the model, how it is trained, and on what.
        ranks: that train one model together.
        weights: fingerprint of all weights before the first step. It distinguishes one revision of the hub from
            another, and the random weights of one kind of GPU from those of another.
    """
    dropout = base.adapters.dropout if recipe.dropout else 0.0
    context = {
        "model": base.label,
        "weights": f"{weights:016x}",
        "data_sha256": data.sha256,
        "seed": str(recipe.seed),
        "global_batch": str(recipe.global_batch),
        "sequence": str(data.train.loss_mask.shape[1]),
        "precision": recipe.precision,
        "steps": str(recipe.steps),
        "warmup_steps": str(recipe.warmup_steps),
        "learning_rate": repr(recipe.learning_rate),
        "rank": str(base.adapters.rank),
        "alpha": str(base.adapters.alpha),
        "dropout": repr(dropout),
    }
    return context | ({"group_ranks": str(ranks)} if dropout else {})


def require_same_context(checkpoint: Path, extra: Mapping[str, Any], context: Mapping[str, str]) -> None:
    """Check that a checkpoint is of this experiment.

    Args:
        checkpoint: for the message.
        extra: what was saved with it.
        context: of this training.

    Raises: EnvironmentBroken, naming what differs.
    """
    theirs = extra.get("context") or {}
    different = [
        f"{key} is {theirs.get(key, 'not given')} there and {context.get(key, 'not given')} here"
        for key in dict.fromkeys([*context, *theirs])
        if theirs.get(key) != context.get(key)
    ]
    if different:
        raise EnvironmentBroken(
            f"{checkpoint} is of another experiment: {'; '.join(different[:4])}. Resume with the same data, model, "
            "workload and, because of dropout, number of ranks, or choose another folder (--gpucluster-scratch)"
        )


@dataclass(frozen=True, kw_only=True)
class Parity:
    """The largest relative differences between steps of all ranks and the same steps of one rank. NaN: a step was not
    finite, so nothing was compared.

    Attributes:
        loss_error: of the losses.
        gradient_error: of the gradients' norms before clipping.
        finite: steps whose losses and norm are finite on this rank; ``taken`` if all are.
        taken: steps, of all ranks and of the single rank.
        steps: steps of all ranks.
        all_finite: whether the steps of all ranks were finite on all of them, and those of the single rank on this one.
    """

    loss_error: float
    gradient_error: float
    finite: int
    taken: int
    steps: int
    all_finite: bool


def check_parity(
    group: dist.ProcessGroup,
    alone: dist.ProcessGroup,
    device: torch.device,
    base: Base,
    recipe: Recipe,
    packed: Packed,
    *,
    components: Components | None = None,
) -> Parity:
    """Take the steps of a recipe on all ranks of a group, and then on each rank alone, and compare them.

    Collective: every rank of the group must call this, with the same arguments.

    Args:
        group: the ranks that train together.
        alone: the group of this rank only.
        device: where this rank trains.
        base: the model to train.
        recipe: without dropout, as ``Recipe.compared`` makes it.
        packed: the blocks to train on.
        components: of the training on all ranks; the single rank always takes the default ones.

    Raises: as ``Trainer``.
    """

    @releases_memory(cycles=True)
    def run(ranks: dist.ProcessGroup, components: Components | None) -> list[Step]:
        return steps_of(Trainer(ranks, device, base, recipe, packed, components=components), recipe.steps)

    group_steps = run(group, components)
    alone_steps = run(alone, Components()) if group_steps[-1].all_finite else []
    taken = [*group_steps, *alone_steps]
    compared = taken[-1].all_finite
    pairs = list(zip(group_steps, alone_steps, strict=True)) if compared else []
    return Parity(
        loss_error=max((relative(one.loss, other.loss) for one, other in pairs), default=math.nan),
        gradient_error=max(
            (relative(one.gradient_norm, other.gradient_norm) for one, other in pairs), default=math.nan
        ),
        finite=sum(step.finite for step in taken),
        taken=len(taken),
        steps=len(group_steps),
        all_finite=compared,
    )


def steps_of(
    trainer: Trainer, last: int, *, first: int = 1, on_step: Callable[[Step], None] | None = None
) -> list[Step]:
    """Take steps from ``first`` to ``last``, or to the first that is not finite on some rank: no later step has any
    meaning.

    Args:
        trainer: after the step before ``first``.
        on_step: called with each finite step.
    """
    steps = []
    for number in range(first, last + 1):
        steps.append(trainer.step(number))
        if not steps[-1].all_finite:
            break
        if on_step is not None:
            on_step(steps[-1])
    return steps
