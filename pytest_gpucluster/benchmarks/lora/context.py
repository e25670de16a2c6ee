"""What defines a LoRA experiment: where all of it is the same, so is the loss of each step."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pytest_gpucluster.benchmarks.lora.lesson import Lesson
from pytest_gpucluster.benchmarks.lora.model import Base
from pytest_gpucluster.benchmarks.lora.plan import Recipe
from pytest_gpucluster.errors import EnvironmentBroken


def context_of(base: Base, recipe: Recipe, lesson: Lesson, *, ranks: int, weights: int) -> dict[str, str]:
    """Return the context of a curve and of a checkpoint.

    The number of ranks belongs to it only with dropout, of which each rank draws its own.

    Args:
        base, recipe, lesson: what is trained, how, and from what.
        ranks: that train one model together.
        weights: fingerprint of all weights before the first step. It tells a hub's revision from another one, and the
            random weights of one kind of GPU from those of another, wherever they come from.
    """
    dropout = base.adapters.dropout if recipe.dropout else 0.0
    context = {
        "model": base.label,
        "weights": f"{weights:016x}",
        "data_sha256": lesson.sha256,
        "seed": str(recipe.seed),
        "global_batch": str(recipe.global_batch),
        "sequence": str(lesson.train.judged.shape[1]),
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
    """Make sure that a checkpoint is of this experiment.

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
