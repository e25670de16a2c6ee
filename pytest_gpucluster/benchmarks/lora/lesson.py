"""What a LoRA training learns from."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pytest_gpucluster.benchmarks.lora.packing import Packed
from pytest_gpucluster.benchmarks.lora.rows import Row
from pytest_gpucluster.errors import EnvironmentBroken


@dataclass(frozen=True, kw_only=True)
class Lesson:
    """What is learned from.

    Attributes:
        train, held_out: blocks of tokens; what is held out is in no training block.
        held_out_rows: the conversations of ``held_out``, for function calls.
        tokenizer: that has made the blocks.
        origin: where the rows come from, for reports.
    """

    train: Packed
    held_out: Packed
    held_out_rows: Sequence[Row]
    tokenizer: Any
    origin: str

    @property
    def sha256(self) -> str:
        """Of the tokens to train on, and which of them are judged."""
        digest = hashlib.sha256(self.train.tokens.numpy().tobytes())
        digest.update(self.train.judged.numpy().tobytes())
        return digest.hexdigest()


def judged_blocks(packed: Packed, sequence: int) -> Packed:
    """Return the blocks in which something is judged, of each its first positions: nothing is learned of others.

    Raises: EnvironmentBroken if there is none.
    """
    some = packed.judged[:, :sequence].any(dim=1)
    if not some.any():
        raise EnvironmentBroken(
            f"in none of {len(packed)} blocks of {sequence} tokens the assistant says anything: give other data, or a "
            "longer sequence"
        )
    return Packed(
        tokens=packed.tokens[some, : sequence + 1].contiguous(),
        judged=packed.judged[some, :sequence].contiguous(),
        statistics=packed.statistics,
    )
