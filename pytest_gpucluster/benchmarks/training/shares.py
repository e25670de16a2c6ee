"""Which rows each rank reads: disjoint, complete, another order in each epoch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch.utils.data import Dataset, DistributedSampler, Sampler

MakeSampler = Callable[..., Sampler[int]]
"""``make(dataset, num_replicas=, rank=, seed=, shuffle=)``, as torch's ``DistributedSampler``."""

EPOCHS = 2
"""Looked at: two are needed to see that the order changes."""


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


def defects(
    shares: Sequence[Sequence[Sequence[int]]], expected: Sequence[Sequence[Sequence[int]]], *, rows: int
) -> dict[int, str]:
    """Say what is wrong with which rank's rows: {} if nothing is.

    Args:
        shares: of each rank, the rows that it reads in each epoch.
        expected: likewise, as this process's own samplers give them for all ranks.
        rows: how many there are.

    A rank whose rows are not the expected ones is at fault. Where all are as expected and still not disjoint, complete
    and shuffled, the sampler itself is wrong, on every rank.
    """
    odd = {}
    for rank, (mine, due) in enumerate(zip(shares, expected, strict=True)):
        for epoch, (found, wanted) in enumerate(zip(mine, due, strict=True)):
            if list(found) != list(wanted) and rank not in odd:
                others = [other for other, its in enumerate(expected) if other != rank and set(its[epoch]) & set(found)]
                whose = f", {_overlap(found, expected, epoch, others)}" if others else ""
                odd[rank] = (
                    f"reads {_shown(found)} of epoch {epoch}, and its share is {_shown(wanted)}{whose}. "
                    "Look at its sampler: num_replicas, rank, seed and set_epoch"
                )
    if odd:
        return odd
    wrong = _wrong_as_a_whole(shares, rows)
    return dict.fromkeys(range(len(shares)), wrong) if wrong else {}


def _overlap(
    found: Sequence[int], expected: Sequence[Sequence[Sequence[int]]], epoch: int, others: Sequence[int]
) -> str:
    shared = sorted(set(found) & set(expected[others[0]][epoch]))
    return f"with row {shared[0]} and {len(shared) - 1} more from that of rank {others[0]}"


def _wrong_as_a_whole(shares: Sequence[Sequence[Sequence[int]]], rows: int) -> str:
    world_size = len(shares)
    for epoch in range(EPOCHS):
        lengths = {len(mine[epoch]) for mine in shares}
        read = [row for mine in shares for row in mine[epoch]]
        twice = len(read) - len(set(read))
        if len(lengths) > 1:
            return f"the ranks read different numbers of rows in epoch {epoch}: {sorted(lengths)}"
        if set(read) != set(range(rows)):
            return f"{len(set(range(rows)) - set(read))} of {rows} rows are read by no rank in epoch {epoch}"
        if twice >= world_size:
            return f"{twice} rows are read twice in epoch {epoch}; fewer than the {world_size} ranks may be, as padding"
    if rows > 2 * world_size and all(mine[0] == mine[1] for mine in shares):
        return "the order of the rows does not change with the epoch"
    return ""


def _shown(rows: Sequence[int]) -> str:
    return f"the rows {', '.join(map(str, rows[:4]))} ..." if len(rows) > 4 else f"the rows {list(rows)}"
