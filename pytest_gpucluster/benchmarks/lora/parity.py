"""A few steps of many ranks against the same steps of one rank with the same global batch, in the same job.

Without it a training that learns less than it should passes: AdamW hides a wrong scale of the gradients, and a loss
falls also where ranks do not share gradients or read the same data.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from pytest_gpucluster.benchmarks.footprint import memory_returned
from pytest_gpucluster.benchmarks.lora.loop import Loop, Pieces, Step
from pytest_gpucluster.benchmarks.lora.model import Base
from pytest_gpucluster.benchmarks.lora.packing import Packed
from pytest_gpucluster.benchmarks.lora.plan import Recipe
from pytest_gpucluster.benchmarks.training.trajectory import relative


@dataclass(frozen=True, kw_only=True)
class Parity:
    """How far the steps of all ranks are from those of one: the largest over the steps, as ratios. NaN: a step was not
    finite, so nothing was compared.

    Attributes:
        loss_error: of the losses.
        gradient_error: of the gradients' norms before clipping.
        finite: steps whose losses and norm are finite on this rank; ``taken`` if all are.
        taken: steps, together and alone.
        steps: that were taken together.
        all_finite: whether the steps together were finite on all ranks, and those alone on this one.
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
    pieces: Pieces | None = None,
) -> Parity:
    """Take the steps of a recipe on all ranks of a group, and then on each rank alone, and compare them.

    Collective: every rank of the group must call this, with the same arguments.

    Args:
        group: the ranks that train together.
        alone: the group of this rank only.
        device: where this rank trains.
        base: what is trained.
        recipe: without dropout, as ``Recipe.compared`` makes it.
        packed: the blocks to train on.
        pieces: of the training on all ranks; the one rank takes the product's own.

    Raises: as ``Loop``.
    """

    def follow(ranks: dist.ProcessGroup, made_of: Pieces | None) -> list[Step]:
        with memory_returned(circles=True):
            return steps_of(Loop(ranks, device, base, recipe, packed, pieces=made_of), recipe.steps)

    together = follow(group, pieces)
    alone_steps = follow(alone, Pieces()) if together[-1].all_finite else []
    taken = [*together, *alone_steps]
    compared = taken[-1].all_finite
    pairs = list(zip(together, alone_steps, strict=True)) if compared else []
    return Parity(
        loss_error=max((relative(one.loss, other.loss) for one, other in pairs), default=math.nan),
        gradient_error=max(
            (relative(one.gradient_norm, other.gradient_norm) for one, other in pairs), default=math.nan
        ),
        finite=sum(step.finite for step in taken),
        taken=len(taken),
        steps=len(together),
        all_finite=compared,
    )


def steps_of(loop: Loop, last: int, *, first: int = 1, seen: Callable[[Step], None] | None = None) -> list[Step]:
    """Take steps from ``first`` to ``last``, or to the one that is not finite on some rank: no step after it says
    anything.

    Args:
        loop: where the step before ``first`` was taken last.
        seen: is given each step that is finite.
    """
    steps = []
    for number in range(first, last + 1):
        steps.append(loop.step(number))
        if not steps[-1].all_finite:
            break
        if seen is not None:
            seen(steps[-1])
    return steps
