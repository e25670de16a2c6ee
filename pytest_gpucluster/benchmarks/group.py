"""What the ranks of a group exchange between the windows: a few numbers at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist


class Ranks:
    """The ranks of a group. Collective: every rank of the group must call each method, in the same order.

    Numbers travel as fp64: whole ones are exact up to 2^53. Without a group it is this rank alone, and nothing travels.

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
        """Start to wait for all ranks: on a GPU the work that is enqueued after it waits, and not the host."""
        if self._group is not None:
            dist.all_reduce(self._flag, group=self._group)

    def gather(self, numbers: Sequence[float]) -> list[list[float]]:
        """Return the numbers of each rank, in the order of the group's ranks. All must give equally many."""
        if self._group is None:
            return [[float(number) for number in numbers]]
        mine = torch.tensor(numbers, dtype=torch.float64, device=self._device)
        everyone = list(torch.empty(self.count, len(numbers), dtype=torch.float64, device=self._device))
        dist.all_gather(everyone, mine, group=self._group)
        told: list[list[float]] = torch.stack(everyone).tolist()
        return told

    def of_first(self, numbers: Sequence[float]) -> list[float]:
        """Return the numbers that the first rank of the group gives, on every rank."""
        if self._group is None:
            return [float(number) for number in numbers]
        shared = torch.tensor(numbers, dtype=torch.float64, device=self._device)
        dist.broadcast(shared, group=self._group, group_src=0)
        told: list[float] = shared.tolist()
        return told

    def name(self, index: int) -> str:
        """Name the rank with this number in the group by its number in the world."""
        if self._group is None:
            return f"rank {dist.get_rank() if dist.is_initialized() else 0}"
        return f"rank {dist.get_global_rank(self._group, index)}"
