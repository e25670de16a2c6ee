"""Conversations that are kept from the training, to see what it has learned beyond them."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

from pytest_gpucluster.benchmarks.lora.rows import Row


def held_out_split(rows: Sequence[Row], ratio: float, seed: int) -> tuple[list[Row], list[Row]]:
    """Split rows into those to train on and those held out, each in their order.

    No conversation is in both, however often it is there. Which are held out follows from their texts and the seed, not
    from their order.

    Args:
        rows: conversations.
        ratio: the part of the different conversations to hold out, rounded up: above 0 and below 1.
        seed: another one holds others out.

    Raises: ValueError if the ratio is not between 0 and 1, or nothing would be left to train on.
    """
    if not 0 < ratio < 1:
        raise ValueError(f"the held-out part must be above 0 % and below 100 %, not {ratio * 100:g} %")
    keys = [row.key() for row in rows]
    ranked = sorted(set(keys), key=lambda key: hashlib.sha256(f"{seed}/{key}".encode()).digest())
    count = math.ceil(ratio * len(ranked))
    if count >= len(ranked):
        raise ValueError(
            f"{len(ranked)} different conversations are too few to hold {ratio * 100:g} % out and train on the others"
        )
    held_out = set(ranked[:count])
    return (
        [row for row, key in zip(rows, keys, strict=True) if key not in held_out],
        [row for row, key in zip(rows, keys, strict=True) if key in held_out],
    )
