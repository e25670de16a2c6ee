"""A LoRA experiment from the sizes of a workload: its recipe, its data, and the context that identifies it.

Where the whole context is the same, so is the loss of each step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

from pytest_gpucluster.benchmarks.lora.dataset import Row, Rows, held_out_split, load_rows, require_sha256
from pytest_gpucluster.benchmarks.lora.model import Base, tiny_base
from pytest_gpucluster.benchmarks.lora.packed_file import Prepared, is_prepared, read, require_fit
from pytest_gpucluster.benchmarks.lora.packing import Packed, pack, rendering_of, tiny_tokenizer, tokenizer_for
from pytest_gpucluster.benchmarks.lora.reference_curve import differences
from pytest_gpucluster.benchmarks.lora.synthetic import synthetic_rows
from pytest_gpucluster.benchmarks.lora.trainer import TrainingData, trainable_blocks
from pytest_gpucluster.benchmarks.lora.training_plan import Recipe, group_size
from pytest_gpucluster.errors import EnvironmentBroken

SEED = 0


Sizes: TypeAlias = Any
"""A section ``lora.*`` of a workload: ``criteria.training.Lora``."""


def recipe_of(sizes: Sizes, base: Base, kind: str = "packed") -> Recipe:
    """Return how to train a base, by the recipe ``packed`` or ``contract``.

    Raises: ValueError if two sizes contradict each other.
    """
    same = ("steps", "warmup_steps", "global_batch", "micro_batch", "precision", "recompute")
    recipe = Recipe(
        **{name: getattr(sizes, name) for name in same},
        learning_rate=base.adapters.learning_rate,
        compiled=sizes.compiled == "on",
        seed=SEED,
    )
    if kind == "packed":
        return recipe
    # Each block is one conversation: there are too many lengths to compile for. Source: acceptance of 2 nodes x 8 H100
    # SXM 80GB, which took 2 at once, 4 times a step on each of 16 GPUs.
    return replace(recipe, warmup_steps=3, weight_decay=0.01, micro_batch=2, compiled=False)


FLOOR = 2000.0
"""Tokens/s of a GPU that predict a training where none were measured. Source: acceptance of 2 nodes x 8 H100 SXM
80GB, "> 2,000"."""

CONVERSATION = 512
"""Tokens of one, at most on average. Source: that acceptance, some 60,000 tokens in steps of 128 conversations."""


def last_step(sizes: Sizes) -> int:
    """Return the step after which a training stops: of the schedule's steps it may take only the first."""
    return int(min(sizes.steps, sizes.stop_after or sizes.steps))


def training_deadline(sizes: Sizes, recipe: str, nodes: Sequence[int], rate: float | None = None) -> float:
    """Return the seconds that a training may take: 1.5 times those of its steps and of those that are taken again, as
    predicted, and the workload's deadline for all else.

    Args:
        sizes: of Qwen2-7B's training.
        recipe: ``packed`` or ``contract``.
        nodes: the node of each rank.
        rate: tokens/s of a GPU at these sizes, of the slowest one, as measured; None: ``FLOOR``.
    """
    of_block = min(sizes.sequence, CONVERSATION) if recipe == "contract" else sizes.sequence
    blocks = -(-sizes.global_batch // group_size(nodes, sizes.global_batch))
    seconds = (last_step(sizes) + sizes.checkpoint_every) * blocks * of_block / (rate or FLOOR)
    return float(sizes.deadline_seconds + 1.5 * seconds)


def tiny_experiment(sizes: Sizes, recipe: str = "packed") -> tuple[Base, TrainingData]:
    """Return the base that needs no download, and synthetic conversations in the format of glaive-function-calling-v2.

    Its tokenizer is trained on them: the same on every rank.
    """
    rows = synthetic_rows(sizes.rows, SEED)
    tokenizer = tiny_tokenizer(held_out_split(rows, sizes.held_out_ratio, SEED)[0])
    origin = f"{sizes.rows} synthetic conversations from seed {SEED}"
    return tiny_base(len(tokenizer)), _training_data(rows, tokenizer, sizes, origin, recipe)


def given_data(source: str | Path, *, sha256: str | None = None, revision: str | None = None) -> Rows | Prepared:
    """Read the operator's conversations: rows as ``load_rows`` takes them, or a file of ``gpucluster lora prepare``.

    Raises: EnvironmentBroken, as ``load_rows`` and ``packed_file.read``; or the file has another sha256.
    """
    path = Path(source)
    try:
        if not is_prepared(path):
            return load_rows(source, sha256=sha256, revision=revision)
        if sha256 is not None:
            require_sha256(path.read_bytes(), sha256, path)
    except OSError as error:
        raise EnvironmentBroken(
            f"{path}: {error.strerror or error}; give a file of rows, or of packed blocks"
        ) from None
    return read(path)


def given_experiment(
    sizes: Sizes, base: Base, data: Rows | Prepared, recipe: str = "packed", rendering: str = "glaive"
) -> TrainingData:
    """Return the operator's conversations, in the tokens of a given base, as the section ``lora`` has them.

    Raises: EnvironmentBroken if blocks were made for another tokenizer, length, recipe or rendering, or the tokenizer
        has no chat template.
    """
    assert base.folder is not None
    tokenizer = tokenizer_for(base.folder)
    if isinstance(data, Rows):
        origin = _origin(data.source, data.revision, data.sha256)
        return _training_data(data.rows[: sizes.rows], tokenizer, sizes, origin, recipe, rendering)
    if recipe == "contract":
        raise EnvironmentBroken(
            "lora.recipe=contract trains on conversations one by one, and the file has packed blocks: give the file of "
            "rows (--gpucluster-data function_calls=FILE)"
        )
    require_fit(data, tokenizer, sizes.sequence, rendering)
    made = data.context
    return TrainingData(
        train=trainable_blocks(_first(data.train, sizes.steps * sizes.global_batch), sizes.sequence),
        held_out=trainable_blocks(_first(data.held_out, sizes.held_out_blocks), sizes.sequence),
        held_out_rows=data.held_out_rows,
        tokenizer=tokenizer,
        origin=f"prepared blocks of {_origin(made.get('source'), made.get('revision'), made.get('sha256'))}",
        render=rendering_of(rendering, tokenizer),
    )


def _origin(source: str | None, revision: str | None, sha256: str | None) -> str:
    return f"{source}{f'@{revision}' if revision else ''}, sha256 {sha256}"


def _first(packed: Packed, blocks: int) -> Packed:
    return replace(packed, tokens=packed.tokens[:blocks], loss_mask=packed.loss_mask[:blocks])


def _training_data(
    rows: Sequence[Row], tokenizer: Any, sizes: Sizes, origin: str, recipe: str, rendering: str = "glaive"
) -> TrainingData:
    render = rendering_of(rendering, tokenizer)

    def blocks(of: Sequence[Row], most: int) -> Packed:
        made = pack(of, tokenizer, sizes.sequence, blocks=most, padded=recipe == "contract", render=render)
        return trainable_blocks(made, sizes.sequence)

    train, held_out = held_out_split(rows, sizes.held_out_ratio, SEED)
    packed = blocks(train, sizes.steps * sizes.global_batch)
    found = packed.statistics
    notes = {
        f"{found.truncated} of {found.rows} conversations are cut off; the longest has {found.longest} tokens": (
            found.truncated
        ),
        f"the chat template cannot write {found.left_out} conversations, which are left out": found.left_out,
    }
    return TrainingData(
        train=packed,
        held_out=blocks(held_out, sizes.held_out_blocks),
        held_out_rows=held_out,
        tokenizer=tokenizer,
        origin=origin,
        notes=tuple(note for note, count in notes.items() if count),
        render=render,
    )


_IDENTIFYING = ("seed", "global_batch", "precision", "steps", "warmup_steps", "learning_rate", "weight_decay")
"""Of a recipe."""


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
        "sequence": data.train.loss_mask.shape[1],
        **{name: getattr(recipe, name) for name in _IDENTIFYING},
        "rank": base.adapters.rank,
        "alpha": base.adapters.alpha,
        "dropout": dropout,
        **({"group_ranks": ranks} if dropout else {}),
    }
    return {name: str(value) for name, value in context.items()}


def require_same_context(checkpoint: Path, extra: Mapping[str, Any], context: Mapping[str, str]) -> None:
    """Check that a checkpoint is of this experiment.

    Args:
        checkpoint: for the message.
        extra: what was saved with it.
        context: of this training.

    Raises: EnvironmentBroken, naming what differs.
    """
    different = differences("the checkpoint", extra.get("context") or {}, "this run", context)
    if different:
        raise EnvironmentBroken(
            f"{checkpoint} is of another experiment: {'; '.join(different[:4])}. Resume with the same data, model, "
            "workload and, because of dropout, number of ranks, or choose another folder (--gpucluster-scratch)"
        )
