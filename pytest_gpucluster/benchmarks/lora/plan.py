"""How a LoRA training goes, and who takes which part of it: the same whatever the number of ranks. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

LARGEST_GROUP = 16
"""Ranks that train one model together, at most. More ranks train it several times at once, in groups that must agree.
Source: acceptance of 2 nodes x 8 H100 SXM 80GB, which trained with 16."""

_SEEDS_APART = 1_000_003


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How to train.

    Attributes:
        steps: of the optimizer, in all.
        warmup_steps: in which the learning rate rises.
        global_batch: blocks of a step, of all ranks of a group together.
        micro_batch: blocks that a rank takes at once, at most.
        learning_rate: the highest.
        precision: ``fp32`` or ``bf16``.
        dropout: whether the adapters have theirs.
        recompute: ``on``, ``off``, or ``auto``: only where the memory demands it.
        compiled: whether each block is compiled.
        seed: of weights, order and dropout.

    Raises: ValueError if a number is out of its range.
    """

    steps: int
    warmup_steps: int
    global_batch: int
    micro_batch: int
    learning_rate: float
    precision: str = "bf16"
    dropout: bool = True
    recompute: str = "auto"
    compiled: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.warmup_steps < self.steps or self.global_batch < 1 or self.micro_batch < 1:
            raise ValueError(f"steps must be more than warmup_steps, and each batch at least 1: {self}")
        for name, allowed in (("precision", ("fp32", "bf16")), ("recompute", ("auto", "on", "off"))):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} is one of {', '.join(allowed)}, not {getattr(self, name)!r}")

    def compared(self, *, steps: int, global_batch: int, precision: str) -> Recipe:
        """Return the recipe of a few steps that two trainings take to be compared: without dropout, which would differ
        between them, and with a rise and fall of the learning rate of its own, so that its scale shows."""
        return replace(
            self,
            steps=steps,
            warmup_steps=max(1, steps // 10) if steps > 1 else 0,
            global_batch=global_batch,
            precision=precision,
            dropout=False,
            compiled=False,
        )


def cosine(step: int, recipe: Recipe) -> float:
    """Return the learning rate of a step, from 1: it rises linearly, then falls as half a cosine towards 0.

    Source: Loshchilov and Hutter, "SGDR" (arXiv:1608.03983), equation 5, without restarts; Goyal et al., "Accurate,
    Large Minibatch SGD" (arXiv:1706.02677), section 2.2, for the rise.
    """
    if step <= recipe.warmup_steps:
        return recipe.learning_rate * step / recipe.warmup_steps
    done = (step - recipe.warmup_steps) / (recipe.steps - recipe.warmup_steps + 1)
    return recipe.learning_rate * 0.5 * (1 + math.cos(math.pi * done))


def group_size(world_size: int, global_batch: int) -> int:
    """Return how many ranks train together: as many as possible, up to ``LARGEST_GROUP``, in groups of one size, each
    rank with equally many blocks.

    >>> [group_size(ranks, 128) for ranks in (1, 2, 8, 16, 32, 24, 6)]
    [1, 2, 8, 16, 16, 8, 2]
    """
    fitting = (
        size
        for size in range(min(world_size, LARGEST_GROUP), 0, -1)
        if world_size % size == 0 and global_batch % size == 0
    )
    return next(fitting)


def micro_batch(recipe: Recipe, ranks: int) -> int:
    """Return how many blocks a rank takes at once: as the recipe says, or fewer, so that its share divides evenly.

    Raises: ValueError if the ranks cannot have equally many blocks.
    """
    if recipe.global_batch % ranks:
        raise ValueError(f"a global batch of {recipe.global_batch} blocks cannot be divided among {ranks} ranks")
    each = recipe.global_batch // ranks
    return next(size for size in range(min(recipe.micro_batch, each), 0, -1) if each % size == 0)


def seed_of_step(step: int, rank: int, seed: int) -> int:
    """Return the seed of a rank's dropout in a step."""
    return (seed * _SEEDS_APART + step) * LARGEST_GROUP + rank
