"""Synthetic tokens in blocks of one length, as packed text comes: nothing is padded, and every position counts."""

from __future__ import annotations

import torch
from torch.utils.data import Dataset

STRIDES = 8
"""From one token to the next it is a step of 1 to so many: what there is to learn."""

NOISE_PARTS = 8
"""One token of so many is random instead. It also makes every row another one."""

_SEEDS_APART = 10_000_019
"""Rows of one seed, at least, that no other seed beside it has."""


class PackedTokens(Dataset[torch.Tensor]):
    """Rows that follow from a seed: the same on every rank, whoever reads which.

    A row is int64 of ``sequence + 1`` tokens: each is the target of the one before it.

    Args:
        rows: how many there are.
        sequence: positions of a row.
        vocab: tokens that there are.
        seed: other seeds make other rows.

    Raises: ValueError if there is no row.
    """

    def __init__(self, *, rows: int, sequence: int, vocab: int, seed: int) -> None:
        if rows < 1:
            raise ValueError(f"rows must be at least 1, not {rows}")
        self._rows, self._length, self._vocab, self._seed = rows, sequence + 1, vocab, seed

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, row: int) -> torch.Tensor:
        if not 0 <= row < self._rows:
            raise IndexError(f"row {row} of {self._rows}")
        # The generator looks at 32 bits of its seed only.
        random = torch.Generator().manual_seed((self._seed * _SEEDS_APART + row) % 2**32)
        start, stride = (int(torch.randint(most, (), generator=random)) for most in (self._vocab, STRIDES))
        tokens = (start + (stride + 1) * torch.arange(self._length)) % self._vocab
        noise = torch.randint(self._vocab, (self._length,), generator=random)
        return torch.where(torch.randint(NOISE_PARTS, (self._length,), generator=random) == 0, noise, tokens)
