"""The launched ranks and their process groups.

A process group is made on first use inside a test's body, never in a fixture's set-up: communication in set-up would
leave its exception cached in a session fixture. After a fault the group is thrown away, and the next use makes a new
one under fresh keys of the store.
"""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from pytest_gpucluster.agreement.release import Releaser
from pytest_gpucluster.agreement.release.gloo import SocketReleaser
from pytest_gpucluster.agreement.release.nccl import NcclReleaser
from pytest_gpucluster.errors import CommunicationError
from pytest_gpucluster.launch import RankFacts

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

BACKENDS = {"cuda": "nccl", "cpu": "gloo"}
_BEYOND_DEADLINE_SECONDS = 60.0
"""How much later than a test's deadline the group's own timeout fires: our own release comes first."""


class Cluster:
    """What a test sees of the cluster: rank facts, and communication between the ranks.

    Attributes:
        rank, local_rank, world_size, local_world_size, node_rank, nnodes, hostname: as torchrun names them.
        hosts: the host of each rank, a list of world_size names.
        device: the torch device of this rank, ``cuda:<index>`` or ``cpu``.
        backend: "nccl" for cuda, "gloo" for cpu.
    """

    def __init__(
        self,
        facts: RankFacts,
        *,
        hosts: list[str],
        device_type: str,
        device_index: int,
        store_for_group: Callable[[str], Any],
        after_abort: Callable[[], object] = lambda: None,
        guard: Callable[..., None],
        deadline_seconds: float,
    ) -> None:
        self.rank = facts.rank
        self.local_rank = facts.local_rank
        self.world_size = facts.world_size
        self.local_world_size = facts.local_world_size
        self.node_rank = facts.node_rank
        self.nnodes = facts.nnodes
        self.hostname = facts.hostname
        self.hosts = hosts
        self.backend = BACKENDS[device_type]
        self._device_type, self._device_index = device_type, device_index
        self._store_for_group = store_for_group
        self._after_abort = after_abort
        self._guard = guard
        self._deadline_seconds = deadline_seconds
        self._epoch = 0
        self._group: ProcessGroup | None = None
        self._subgroups: dict[int, ProcessGroup] = {}
        self._sockets = SocketReleaser()
        self._releaser: Releaser | None = None

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        import torch

        return torch.device("cpu") if self._device_type == "cpu" else torch.device("cuda", self._device_index)

    def take_device(self) -> None:
        """Make this rank's GPU the current one: what says "cuda" without a number must not mean GPU 0 on all ranks."""
        if self._device_type == "cuda":
            import torch

            torch.cuda.set_device(self._device_index)

    def allow(self, deadline_seconds: float) -> None:
        """Let groups that are made from now on outlast the longest deadline of any test."""
        self._deadline_seconds = max(self._deadline_seconds, deadline_seconds)

    @property
    def group(self) -> ProcessGroup:
        """The process group of all ranks. Collective on first use: every rank must reach it.

        Raises:
            CommunicationError: it could not be made; the message names backend, rank and host.
        """
        if self._group is None:
            self._group = self._make_group()
        return self._group

    @property
    def has_group(self) -> bool:
        """Tell whether a group has been made and not been thrown away."""
        return self._group is not None

    def barrier(self) -> None:
        """Wait for all ranks. Collective: every rank must call this."""
        import torch

        if self._device_type == "cuda":
            flag = torch.zeros(1, device=self.device)
            torch.distributed.all_reduce(flag, group=self.group)
            torch.cuda.synchronize(self.device)
        else:
            torch.distributed.barrier(group=self.group)

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return every rank's value, in the order of ranks. Collective: every rank must call this."""
        import torch.distributed as dist

        gathered: list[Any] = [None] * self.world_size
        dist.all_gather_object(gathered, value, group=self.group)
        return gathered

    def subgroups(self, size: int) -> ProcessGroup:
        """Return the group of ``size`` consecutive ranks that this rank is in.

        Collective on first use of a size: every rank must call this, because every rank takes part in making all of
        the groups. ``size=local_world_size`` gives one group a node.

        Raises:
            ValueError: the world cannot be divided into groups of this size.
        """
        import torch.distributed as dist

        if size < 1 or self.world_size % size:
            raise ValueError(f"{self.world_size} ranks cannot be divided into groups of {size}")
        whole = self.group
        if size == self.world_size:
            return whole
        if size not in self._subgroups:
            with self._sockets.taking():
                mine, _ = dist.new_subgroups_by_enumeration(  # type: ignore[no-untyped-call]  # torch
                    [list(range(start, start + size)) for start in range(0, self.world_size, size)],
                    timeout=self._timeout,
                )
            self._subgroups[size] = mine
        return self._subgroups[size]

    def discard(self, epoch: int) -> None:
        """Throw the groups away after a fault; the next use makes new ones. Every rank must call this.

        An NCCL group is aborted, never destroyed: destroy waits for kernels that will not end.

        Args:
            epoch: a number that is the same on all ranks and was never used before, to keep the groups' keys apart.
        """
        self._epoch = epoch
        if self._releaser is None:
            return
        import torch.distributed as dist

        self._releaser.release()
        self._group = None
        self._subgroups.clear()
        self._releaser = None
        _drop_references()
        if self.backend == "gloo" and dist.is_initialized():
            dist.destroy_process_group()
        elif self.backend == "nccl":
            self._after_abort()

    def close(self) -> None:
        """Destroy the groups at the orderly end of a run. Every rank must call this."""
        if self._group is None:
            return
        import torch.distributed as dist

        self._group = None
        self._subgroups.clear()
        _drop_references()
        if dist.is_initialized():
            dist.destroy_process_group()

    @property
    def _timeout(self) -> timedelta:
        return timedelta(seconds=self._deadline_seconds + _BEYOND_DEADLINE_SECONDS)

    def _make_group(self) -> ProcessGroup:
        import torch.distributed as dist

        if dist.is_initialized():
            raise CommunicationError(
                "torch.distributed is initialized already, but not by this plugin. Use cluster.group instead of "
                "init_process_group: only the plugin's group can be made anew after a fault"
            )
        # At DEBUG this logger writes usage statistics, which pytest would show under every failure.
        logging.getLogger("c10d-NullHandler-default").setLevel(logging.INFO)
        # torch numbers its groups, and a making that was cut short has moved the count on this rank alone.
        dist.distributed_c10d._world.group_count = 0
        options: dict[str, Any] = {}
        self.take_device()
        if self._device_type == "cuda":
            # With device_id the communicator is connected now, under the test's deadline. Made lazily, at the first
            # collective, it would be under no timeout at all.
            options["device_id"] = self.device
        self._sockets = SocketReleaser()
        self._releaser = self._sockets
        self._guard(self._sockets)
        try:
            with self._sockets.taking():
                store = self._store_for_group(f"group/{self._epoch}")
                store.set_timeout(self._timeout)
                dist.init_process_group(
                    self.backend,
                    store=store,
                    rank=self.rank,
                    world_size=self.world_size,
                    timeout=self._timeout,
                    **options,
                )
        except RuntimeError as error:
            raise CommunicationError(
                f"rank {self.rank} on {self.hostname}: no {self.backend} group of {self.world_size} ranks could be "
                f"made: {str(error).splitlines()[0]}"
            ) from error
        if self._device_type == "cuda":
            # From here on an abort frees the rank; of sockets only those of a sub-group in the making.
            self._sockets = SocketReleaser()
            self._releaser = NcclReleaser()
            self._guard(self._releaser, self._sockets)
        group = dist.group.WORLD
        assert group is not None
        return group


def _drop_references() -> None:
    """Let go of what may hold a group: an object that dies after its group aborts the process."""
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):  # pytest leaves failures there
        if hasattr(sys, name):
            delattr(sys, name)
    gc.collect()
