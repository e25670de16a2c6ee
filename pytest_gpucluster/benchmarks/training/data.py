"""The data of training: packed tokens, each rank's share of them, and loading by worker processes.

The tokens are synthetic, in blocks of one length: nothing is padded, and every position counts. Shares of the ranks are
disjoint and complete, in another order in each epoch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import torch
from torch.utils.data import Dataset, DistributedSampler, Sampler

from pytest_gpucluster.benchmarks.training.loader import Batches, in_batches
from pytest_gpucluster.benchmarks.training.model import Geometry
from pytest_gpucluster.text import some_of

STRIDES = 8
"""The difference between consecutive tokens is 1 up to this: the pattern to learn."""

NOISE_PARTS = 8
"""One token of this number is random instead. It also makes every row different."""

_SEEDS_APART = 10_000_019
"""Rows of one seed, at least, that no neighbouring seed has."""


class PackedTokens(Dataset[torch.Tensor]):
    """Rows that depend on the seed alone: the same on every rank, whichever reads them.

    A row is int64 of ``sequence + 1`` tokens: each is the target of the one before it.

    Args:
        rows: number of rows.
        sequence: positions of a row.
        vocab: number of tokens.
        seed: other seeds make other rows.
    """

    def __init__(self, *, rows: int, sequence: int, vocab: int, seed: int) -> None:
        self._rows, self._length, self._vocab, self._seed = rows, sequence + 1, vocab, seed

    def __len__(self) -> int:
        return self._rows

    def __getitem__(self, row: int) -> torch.Tensor:
        if not 0 <= row < self._rows:
            raise IndexError(f"row {row} of {self._rows}")
        # The generator uses 32 bits of its seed only.
        random = torch.Generator().manual_seed((self._seed * _SEEDS_APART + row) % 2**32)
        start, stride = (int(torch.randint(most, (), generator=random)) for most in (self._vocab, STRIDES))
        tokens = (start + (stride + 1) * torch.arange(self._length)) % self._vocab
        noise = torch.randint(self._vocab, (self._length,), generator=random)
        return torch.where(torch.randint(NOISE_PARTS, (self._length,), generator=random) == 0, noise, tokens)


ROWS = 2**31
"""This number of rows are different from each other; more than any run reads."""


def endless_batches(
    geometry: Geometry,
    device: torch.device,
    *,
    rank: int,
    count: int,
    batch: int,
    workers: int,
    prefetch: int,
) -> Iterator[torch.Tensor]:
    """Yield batch after batch of a rank's rows: int64 on the device, batch x (positions + 1).

    The rank has every count-th row, beginning with its own number, in their order: each is as random as any other. On
    a GPU the copy is started, not waited for.

    Args:
        geometry: for vocabulary and positions.
        device: where the rows are placed.
        rank: of ``count`` ranks that read.
        count: number of ranks.
        batch: rows of each rank in a step.
        workers: processes that read ahead; 0: the training process itself reads each batch.
        prefetch: batches that each of them reads ahead.

    Raises: EnvironmentBroken if a worker has died.
    """
    batches = Batches(
        PackedTokens(rows=ROWS, sequence=geometry.sequence, vocab=geometry.vocab, seed=0),
        in_batches(range(rank, ROWS, count), batch),
        workers=workers,
        prefetch=prefetch,
        # Only from pinned memory can a copy overlap with the host's work.
        pinned=device.type == "cuda",
    )
    try:
        while True:
            yield next(batches).to(device, non_blocking=True)
    finally:
        batches.close()


MakeSampler = Callable[..., Sampler[int]]
"""``make(dataset, num_replicas=, rank=, seed=, shuffle=)``, as torch's ``DistributedSampler``."""

EPOCHS = 2
"""Checked: two are needed to see that the order changes."""


def share(
    dataset: Dataset[object], *, rank: int, world_size: int, seed: int, make: MakeSampler = DistributedSampler
) -> list[list[int]]:
    """Return the rows that a rank reads in each of the first ``EPOCHS`` epochs, in its order."""
    sampler = make(dataset, num_replicas=world_size, rank=rank, seed=seed, shuffle=True)
    rows = []
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)  # type: ignore[attr-defined]  # DistributedSampler has it
        rows.append(list(sampler))
    return rows


def share_defects(
    shares: Sequence[Sequence[Sequence[int]]], expected: Sequence[Sequence[Sequence[int]]], *, rows: int
) -> dict[int, str]:
    """Describe the defects in the ranks' shares, by rank: {} if there are none.

    Args:
        shares: of each rank, the rows that it reads in each epoch.
        expected: the same from this process's own samplers, for all ranks.
        rows: number of rows.

    A rank whose rows are not the expected ones is at fault. Where all are as expected and still not disjoint, complete
    and shuffled, the sampler itself is wrong, on every rank.
    """
    defects: dict[int, str] = {}
    for rank, (mine, due) in enumerate(zip(shares, expected, strict=True)):
        wrong = next((epoch for epoch, (found, its) in enumerate(zip(mine, due, strict=True)) if found != its), None)
        if wrong is not None:
            defects[rank] = (
                f"reads the rows {some_of([*map(str, mine[wrong])])} of epoch {wrong}, and its share is "
                f"{some_of([*map(str, due[wrong])])}. Check its sampler: num_replicas, rank, seed and set_epoch"
            )
    if defects:
        return defects
    common, world_size = "", len(shares)
    for epoch in range(EPOCHS):
        lengths, read = {len(mine[epoch]) for mine in shares}, Counter(row for mine in shares for row in mine[epoch])
        missing, twice = len(set(range(rows)) - set(read)), read.total() - len(read)
        if not common and (len(lengths) > 1 or missing or twice >= world_size):
            common = (
                f"the ranks read {', '.join(map(str, sorted(lengths)))} rows each in epoch {epoch}, {missing} of "
                f"{rows} are read by no rank, and {twice} twice; fewer than the {world_size} ranks may be, as padding"
            )
    if not common and rows > 2 * world_size and all(mine[0] == mine[1] for mine in shares):
        common = "the order of the rows does not change with the epoch"
    return dict.fromkeys(range(world_size), common) if common else {}
