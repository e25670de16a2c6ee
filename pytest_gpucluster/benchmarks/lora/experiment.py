"""A LoRA experiment from the sizes of a workload: its recipe, its checks and its data."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from pytest_gpucluster.benchmarks.lora.convergence import Checks
from pytest_gpucluster.benchmarks.lora.dataset import Row, Rows, held_out_split, load_rows
from pytest_gpucluster.benchmarks.lora.model import Base, tiny_base
from pytest_gpucluster.benchmarks.lora.packed_file import Prepared, is_prepared, read, require_fit
from pytest_gpucluster.benchmarks.lora.packing import Packed, pack, tiny_tokenizer, tokenizer_for
from pytest_gpucluster.benchmarks.lora.synthetic import synthetic_rows
from pytest_gpucluster.benchmarks.lora.trainer import TrainingData, trainable_blocks
from pytest_gpucluster.benchmarks.lora.training_plan import Recipe
from pytest_gpucluster.errors import EnvironmentBroken
from pytest_gpucluster.metrics.sampling import Sampling

SEED = 0
TINY_VOCAB = 512


class Sizes(Protocol):
    """A section ``lora.*`` of a workload."""

    @property
    def steps(self) -> int: ...
    @property
    def warmup_steps(self) -> int: ...
    @property
    def global_batch(self) -> int: ...
    @property
    def micro_batch(self) -> int: ...
    @property
    def sequence(self) -> int: ...
    @property
    def rows(self) -> int: ...
    @property
    def held_out_ratio(self) -> float: ...
    @property
    def held_out_blocks(self) -> int: ...
    @property
    def precision(self) -> str: ...
    @property
    def recompute(self) -> str: ...
    @property
    def compiled(self) -> str: ...
    @property
    def parity_steps(self) -> int: ...
    @property
    def parity_batch(self) -> int: ...
    @property
    def parity_sequence(self) -> int: ...
    @property
    def parity_precisions(self) -> tuple[str, ...]: ...
    @property
    def checkpoint_every(self) -> int: ...
    @property
    def calls(self) -> int: ...
    @property
    def call_tokens(self) -> int: ...
    @property
    def tolerance_ratio(self) -> float: ...


def recipe_of(sizes: Sizes, base: Base) -> Recipe:
    """Return how to train a base.

    Raises: ValueError if two sizes contradict each other.
    """
    return Recipe(
        steps=sizes.steps,
        warmup_steps=sizes.warmup_steps,
        global_batch=sizes.global_batch,
        micro_batch=sizes.micro_batch,
        learning_rate=base.adapters.learning_rate,
        precision=sizes.precision,
        recompute=sizes.recompute,
        compiled=sizes.compiled == "on",
        seed=SEED,
    )


def checks_of(sizes: Sizes) -> Checks:
    """Return the checks beyond the training."""
    return Checks(
        parity_steps=sizes.parity_steps,
        parity_batch=sizes.parity_batch,
        parity_sequence=sizes.parity_sequence,
        parity_precisions=sizes.parity_precisions,
        checkpoint_every=sizes.checkpoint_every,
        calls=sizes.calls,
        call_tokens=sizes.call_tokens,
        # The number of steps is fixed: the measurement is never extended for more confidence.
        sampling=Sampling(
            warmup_seconds=0.0, window_seconds=1.0, longest_seconds=1.0, tolerance_ratio=sizes.tolerance_ratio
        ),
    )


def tiny_experiment(sizes: Sizes) -> tuple[Base, TrainingData]:
    """Return the base that needs no download, and synthetic conversations in the format of glaive-function-calling-v2.

    Its tokenizer is trained on them: the same on every rank.
    """
    rows = synthetic_rows(sizes.rows, SEED)
    tokenizer = tiny_tokenizer(held_out_split(rows, sizes.held_out_ratio, SEED)[0], TINY_VOCAB)
    origin = f"{sizes.rows} synthetic conversations from seed {SEED}"
    return tiny_base(len(tokenizer)), _training_data(rows, tokenizer, sizes, origin)


def given_data(source: str | Path, *, sha256: str | None = None, revision: str | None = None) -> Rows | Prepared:
    """Read the operator's conversations: rows as ``load_rows`` takes them, or a file of ``gpucluster lora prepare``.

    Raises: EnvironmentBroken, as ``load_rows`` and ``packed_file.read``; or the file has another sha256.
    """
    path = Path(source)
    try:
        packed = path.is_file() and is_prepared(path)
        found = hashlib.sha256(path.read_bytes()).hexdigest() if packed and sha256 is not None else sha256
    except OSError as error:
        raise EnvironmentBroken(
            f"{path}: {error.strerror or error}; give a file of rows, or of packed blocks"
        ) from None
    if not packed:
        return load_rows(source, sha256=sha256, revision=revision)
    if found != sha256:
        raise EnvironmentBroken(
            f"{path}: its sha256 is {found}, and {sha256} is expected: it is another file, or damaged"
        )
    return read(path)


def given_experiment(sizes: Sizes, base: Base, data: Rows | Prepared) -> TrainingData:
    """Return the operator's conversations, in the tokens of a given base.

    Raises: EnvironmentBroken if blocks were made for another tokenizer or another length.
    """
    assert base.folder is not None
    tokenizer = tokenizer_for(base.folder)
    if isinstance(data, Rows):
        return _training_data(
            data.rows[: sizes.rows], tokenizer, sizes, _origin(data.source, data.revision, data.sha256)
        )
    require_fit(data, tokenizer, sizes.sequence)
    made = data.context
    return TrainingData(
        train=trainable_blocks(_first(data.train, sizes.steps * sizes.global_batch), sizes.sequence),
        held_out=trainable_blocks(_first(data.held_out, sizes.held_out_blocks), sizes.sequence),
        held_out_rows=data.held_out_rows,
        tokenizer=tokenizer,
        origin=f"prepared blocks of {_origin(made.get('source'), made.get('revision'), made.get('sha256'))}",
    )


def _origin(source: str | None, revision: str | None, sha256: str | None) -> str:
    return f"{source}{f'@{revision}' if revision else ''}, sha256 {sha256}"


def _first(packed: Packed, blocks: int) -> Packed:
    return replace(packed, tokens=packed.tokens[:blocks], loss_mask=packed.loss_mask[:blocks])


def _training_data(rows: Sequence[Row], tokenizer: Any, sizes: Sizes, origin: str) -> TrainingData:
    train, held_out = held_out_split(rows, sizes.held_out_ratio, SEED)
    return TrainingData(
        train=trainable_blocks(
            pack(train, tokenizer, sizes.sequence, blocks=sizes.steps * sizes.global_batch), sizes.sequence
        ),
        held_out=trainable_blocks(
            pack(held_out, tokenizer, sizes.sequence, blocks=sizes.held_out_blocks), sizes.sequence
        ),
        held_out_rows=held_out,
        tokenizer=tokenizer,
        origin=origin,
    )
