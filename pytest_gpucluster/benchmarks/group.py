"""The exchange of a few numbers between the ranks of a group."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist


class Ranks:
    """The ranks of a group. Collective: every rank of the group must call each method, in the same order.

    Numbers are exchanged as fp64: whole ones are exact up to 2^53. Without a group it is this rank alone.

    Attributes:
        count: of the ranks.
        index: this rank's number in the group.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device) -> None:
        self.count, self.index = 1, 0
        if group is not None:
            self.count, self.index = dist.get_world_size(group), dist.get_rank(group)
        self._group, self._device = group, device
        self._flag = torch.zeros(1, device=device)

    def barrier(self) -> None:
        """Enqueue a wait for all ranks: on a GPU the work that is enqueued after it waits, and not the host."""
        if self._group is not None:
            dist.all_reduce(self._flag, group=self._group)

    def gather(self, numbers: Sequence[float]) -> list[list[float]]:
        """Return the numbers of each rank, in the order of the group's ranks. All must pass the same number of them."""
        if self._group is None:
            return [[float(number) for number in numbers]]
        mine = torch.tensor(numbers, dtype=torch.float64, device=self._device)
        everyone = list(torch.empty(self.count, len(numbers), dtype=torch.float64, device=self._device))
        dist.all_gather(everyone, mine, group=self._group)
        of_ranks: list[list[float]] = torch.stack(everyone).tolist()
        return of_ranks

    def of_first(self, numbers: Sequence[float]) -> list[float]:
        """Return the numbers of the first rank of the group, on every rank."""
        if self._group is None:
            return [float(number) for number in numbers]
        shared = torch.tensor(numbers, dtype=torch.float64, device=self._device)
        dist.broadcast(shared, group=self._group, group_src=0)
        of_first: list[float] = shared.tolist()
        return of_first

    def name(self, index: int) -> str:
        """Return the name of the rank with this number in the group: its number in the world."""
        if self._group is None:
            return f"rank {dist.get_rank() if dist.is_initialized() else 0}"
        return f"rank {dist.get_global_rank(self._group, index)}"
