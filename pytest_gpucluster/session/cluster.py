"""The launched ranks and their process groups.

A process group is made on first use inside a test's body, never in a fixture's set-up: communication in set-up would
leave its exception cached in a session fixture. After a fault the group is thrown away, and the next use makes a new
one under fresh keys of the store.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, Any

from pytest_gpucluster.agreement.release import Releaser, SocketReleaser
from pytest_gpucluster.device.environment import switch_nvls_off
from pytest_gpucluster.device.process_group import GROUP_BACKENDS, NcclReleaser, changes_algorithms, init_group
from pytest_gpucluster.errors import CommunicationError, EnvironmentBroken, NvlsFailed, translate_nvls
from pytest_gpucluster.launch.launchers import RankFacts
from pytest_gpucluster.metrics.measurement import WITHOUT_NVLS
from pytest_gpucluster.node.fabric.nccl_log import GroupTransport, NcclLog, group_transport
from pytest_gpucluster.node.fabric.ports import network_cards
from pytest_gpucluster.text import first_line

if TYPE_CHECKING:
    import torch
    from torch.distributed import ProcessGroup

    from pytest_gpucluster.device.interface import Accelerator

_BEYOND_DEADLINE_SECONDS = 60.0
"""How much later than a test's deadline the group's own timeout fires: our own release comes first."""


class Cluster:
    """What a test sees of the cluster: rank facts, and communication between the ranks.

    Attributes:
        rank, local_rank, world_size, local_world_size, node_rank, nnodes, hostname: as torchrun names them.
        hosts: the host of each rank, a list of world_size names.
        has_gpus: each rank has a GPU, be it one of a simulated cluster; False in a rehearsal on cpu.
        device: the torch device of this rank, ``cuda:<index>``, or ``cpu`` where there is no real GPU.
        backend: "nccl" for cuda, "gloo" for cpu.
        nccl_log: NCCL's log of this rank.
        nvls_off: NVLS was switched off for the groups that are made from now on.
    """

    def __init__(
        self,
        facts: RankFacts,
        *,
        hosts: list[str],
        has_gpus: bool,
        device_type: str,
        device_index: int,
        store_for_group: Callable[[str], Any],
        after_abort: Callable[[], object] = lambda: None,
        guard: Callable[..., None],
        deadline_seconds: float,
        count_cards: Callable[[], int | None] = network_cards,
    ) -> None:
        self._facts = facts
        self._count_cards = cache(count_cards)  # what is plugged in stays as it is for the run
        self.rank = facts.rank
        self.local_rank = facts.local_rank
        self.world_size = facts.world_size
        self.local_world_size = facts.local_world_size
        self.node_rank = facts.node_rank
        self.nnodes = facts.nnodes
        self.hostname = facts.hostname
        self.hosts = hosts
        self.has_gpus = has_gpus
        self.backend = GROUP_BACKENDS[device_type]
        self._device_type, self._device_index = device_type, device_index
        self._store_for_group = store_for_group
        self._after_abort = after_abort
        self._guard = guard
        self._deadline_seconds = deadline_seconds
        self._epoch = 0
        self.nvls_off = False
        self._used = False
        self._group: ProcessGroup | None = None
        self.nccl_log = NcclLog(None, "NCCL is not used on cpu")
        if has_gpus:
            self.nccl_log = NcclLog.of(os.environ, pid=os.getpid())
        self._subgroups: dict[tuple[int, ...], ProcessGroup] = {}
        self._unused: dict[tuple[int, ...], ProcessGroup] = {}
        self._sockets = SocketReleaser()
        self._sockets_of_world = self._sockets
        self._releaser: Releaser | None = None

    @property
    def device(self) -> torch.device:
        """The device of this rank."""
        import torch

        return torch.device("cpu") if self._device_type == "cpu" else torch.device("cuda", self._device_index)

    @property
    def _by(self) -> Accelerator:
        from pytest_gpucluster.device.backends import accelerator

        return accelerator(self.device)

    def take_device(self) -> None:
        """Make this rank's GPU the current one: what says "cuda" without a number must not mean GPU 0 on all ranks."""
        if self._device_type == "cuda":
            self._by.make_current()

    def allow(self, deadline_seconds: float) -> None:
        """Let groups that are made from now on outlast the longest deadline of any test."""
        self._deadline_seconds = max(self._deadline_seconds, deadline_seconds)

    @property
    def group(self) -> ProcessGroup:
        """The process group of all ranks. Collective on first use: every rank must reach it.

        Raises:
            CommunicationError: it could not be made; the message names backend, rank and host.
        """
        self._used = True
        if self._group is None:
            self._group = self._make_group()
        return self._group

    @property
    def labels(self) -> Mapping[str, str]:
        """The labels of each value that this test measures: none, unless it has asked for a group, which does without
        NVLS."""
        return WITHOUT_NVLS if self.nvls_off and self._used else {}

    def switch_nvls_off(self) -> None:
        """Let later groups do without NVLS. Every rank must call this, after :meth:`discard`."""
        switch_nvls_off(os.environ)
        self.nvls_off = True

    def barrier(self) -> None:
        """Wait for all ranks. Collective: every rank must call this."""
        import torch

        if self._device_type == "cuda":
            flag = torch.zeros(1, device=self.device)
            torch.distributed.all_reduce(flag, group=self.group)
            self._by.synchronize()
        else:
            torch.distributed.barrier(group=self.group)

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return every rank's value, in the order of ranks. Collective: every rank must call this."""
        from pytest_gpucluster.benchmarks.group import Ranks

        return Ranks(self.group, self.device).gather_objects(value)

    def subgroups(self, size: int) -> ProcessGroup:
        """Return the group of ``size`` consecutive ranks that this rank is in; ``size=1`` is this rank alone.

        Collective on first use of a size in a test: every rank must call this, because with NCCL every rank takes part
        in making all of the groups. With NCCL it lasts until the test's end: see :meth:`close_subgroups`.

        Raises:
            ValueError: the world cannot be divided into groups of this size.
            CommunicationError: the group could not be made.
        """
        if size < 1 or self.world_size % size:
            raise ValueError(f"{self.world_size} ranks cannot be divided into groups of {size}")
        first = self.rank - self.rank % size
        return self._group_of(range(first, first + size))

    def node_group(self, nodes: Sequence[int]) -> ProcessGroup:
        """Return the group of all ranks on this rank's node. Collective on first use, as :meth:`subgroups`.

        Args:
            nodes: the node of each rank, the same on all ranks, as the inventory has it.

        Raises:
            CommunicationError: the nodes have different numbers of ranks, or the group could not be made.
        """
        ranks = Counter(nodes)
        if len(set(ranks.values())) > 1:
            found = ", ".join(f"node {node} has {count}" for node, count in sorted(ranks.items()))
            raise CommunicationError(
                f"the nodes have different numbers of ranks ({found}), so no limit is meant for all of them. Start "
                "equally many ranks on every node (--nproc-per-node), or run the suite on equal nodes only"
            )
        return self._group_of(rank for rank, node in enumerate(nodes) if node == nodes[self.rank])

    def using(self, group: ProcessGroup) -> AbstractContextManager[None]:
        """Take what NCCL logs inside as being about this group, which must be the only one that is used inside."""
        return self.nccl_log.reading(_ranks_of(group))

    def among(self, ranks: Sequence[int], *, name: str, deadline_seconds: float) -> Cluster:
        """Return a cluster of these ranks alone: a world of its own, whose group needs no rank outside of it.

        So a part can still be looked at where no group of all ranks can be made any more. torch has one world at a
        time: before, this cluster's groups must be thrown away, and before they are made anew, the returned one's.

        Only the given ranks may call this, each with the same arguments.

        Args:
            ranks: of this cluster, in ascending order; number i among them is rank i of the returned cluster.
            name: keeps its keys in the store apart; never used before.
            deadline_seconds: how long anything in the group may take.

        Raises:
            ValueError: this rank is none of them.
            EnvironmentBroken: a group that was thrown away is still there.
        """
        import torch.distributed as dist

        if self._group is not None:
            raise RuntimeError("throw the groups of all ranks away before making one among some of them")
        if dist.is_initialized():
            raise EnvironmentBroken(
                f"rank {self.rank} on {self.hostname}: its last process group was thrown away and is still there, so "
                "that no other one can be made: to abort it has failed, or takes too long"
            )
        nodes = sorted({self.hosts[rank] for rank in ranks})
        facts = replace(
            self._facts,
            rank=list(ranks).index(self.rank),
            world_size=len(ranks),
            nnodes=len(nodes),
            node_rank=nodes.index(self.hosts[self.rank]),
        )
        return Cluster(
            facts,
            hosts=[self.hosts[rank] for rank in ranks],
            has_gpus=self.has_gpus,
            device_type=self._device_type,
            device_index=self._device_index,
            store_for_group=lambda key: self._store_for_group(f"{name}/{key}"),
            after_abort=self._after_abort,
            guard=self._guard,
            deadline_seconds=deadline_seconds,
        )

    def carried_by(self, group: ProcessGroup) -> GroupTransport:
        """Return what carries the data of the groups that all ranks are in: this one, and others of its size.

        Read from what NCCL logged while the group was made and inside :meth:`using`, so ask after the group was used.

        Collective: every rank of the world must call this, each with its group.
        """
        ranks = _ranks_of(group)
        if not self.has_gpus:
            return GroupTransport(transport="gloo")
        mine = self.nccl_log.choice(ranks, rest=len(ranks) == self.world_size)
        mine = replace(mine, cards=self._count_cards())
        hosts = len({self.hosts[rank] for rank in ranks})
        return group_transport(self.all_gather_object(mine), ranks=len(ranks), hosts=hosts)

    def discard(self, epoch: int) -> None:
        """Throw the groups away after a fault; the next use makes new ones. Every rank must call this.

        An NCCL group is aborted, never destroyed: destroy waits for kernels that will not end.

        Args:
            epoch: a number that is the same on all ranks and was never used before, to keep the groups' keys apart.

        Raises:
            EnvironmentBroken: NCCL's groups could not be aborted in time, so that none can be made any more.
        """
        self._epoch, self._used = epoch, False
        releaser, self._releaser = self._releaser, None
        if releaser is None:
            return
        import torch.distributed as dist

        self._by.left([*self._subgroups.values(), *([self._group] if self._group is not None else [])])
        self._group = None
        self._subgroups.clear()
        self._unused.clear()
        self.nccl_log.begin_again()
        if isinstance(releaser, NcclReleaser):
            releaser.finish()
        else:
            releaser.release()
        _drop_references()
        if self.backend == "gloo" and dist.is_initialized():
            dist.destroy_process_group()
        elif self.backend == "nccl":
            self._after_abort()

    def close_subgroups(self) -> None:
        """Destroy the groups of some of the ranks at the end of a test. Every rank must call this, out of any of them.

        NCCL keeps memory of the GPU for each communicator: 1.06 GB, and 4.34 GB after the first all_to_all on 8 H100
        (https://github.com/NVIDIA/nccl/issues/1685). The order is that of their making, which is the same on all ranks:
        to destroy a communicator waits for its other ranks. With gloo they are kept for the next test: they hold no
        memory of a GPU, and a new group would get the name, and so the addresses in the store, of the one before.
        """
        import torch.distributed as dist

        self._used = False
        if not self._subgroups:
            return
        made, self._subgroups = self._subgroups, {}
        self._by.left(made.values())
        if self.backend == "gloo":
            self._unused |= made
            return
        _drop_references()
        with contextlib.ExitStack() as each:  # also where another one fails
            for ranks, group in reversed(made.items()):
                each.callback(self.nccl_log.closed, ranks)
                each.callback(dist.destroy_process_group, group)

    def close(self) -> None:
        """Destroy the groups at the orderly end of a run. Every rank must call this."""
        self.nccl_log.remove()
        if self._group is None:
            return
        import torch.distributed as dist

        self._group = None
        self._subgroups.clear()
        self._unused.clear()
        _drop_references()
        if dist.is_initialized():
            dist.destroy_process_group()

    @property
    def _timeout(self) -> timedelta:
        return timedelta(seconds=self._deadline_seconds + _BEYOND_DEADLINE_SECONDS)

    def _make_group(self) -> ProcessGroup:
        import torch.distributed as dist

        self._require_not_deterministic()
        if dist.is_initialized():
            raise CommunicationError(
                "torch.distributed is initialized already, but not by this plugin. Use cluster.group instead of "
                "init_process_group: only the plugin's group can be made anew after a fault"
            )
        # At DEBUG this logger writes usage statistics, which pytest would show under every failure.
        logging.getLogger("c10d-NullHandler-default").setLevel(logging.INFO)
        # torch numbers its groups, and a making that was cut short has moved the count on this rank alone.
        dist.distributed_c10d._world.group_count = 0
        self.take_device()
        if self.has_gpus:
            try:
                self.nccl_log.open()
            except OSError as error:  # a group works without it; what expects a transport says why it is unknown
                self.nccl_log = NcclLog(None, f"its folder cannot be made: {error}")
        self._sockets = self._sockets_of_world = SocketReleaser()
        self._releaser = self._sockets
        self._guard(self._sockets)
        try:
            with self.nccl_log.reading(tuple(range(self.world_size))), self._sockets.taking():
                store = self._store_for_group(f"group/{self._epoch}")
                store.set_timeout(self._timeout)
                group = init_group(
                    self.device, store=store, rank=self.rank, world_size=self.world_size, timeout=self._timeout
                )
                self._by.joined(group)
        except (RuntimeError, ValueError) as error:
            raise self._not_made(f"{self.world_size} ranks", error) from error
        if self._device_type == "cuda":
            # From here on an abort frees the rank; of sockets only those of a sub-group in the making.
            self._sockets = SocketReleaser()
            self._releaser = NcclReleaser()
            self._guard(self._releaser, self._sockets)
            if self.nvls_off:
                self._require_without_nvls()
        return group

    def _group_of(self, ranks: Iterable[int]) -> ProcessGroup:
        import torch.distributed as dist

        mine, whole = tuple(ranks), self.group
        if len(mine) == self.world_size:
            return whole
        if mine in self._subgroups:
            return self._subgroups[mine]
        self._require_not_deterministic()
        if self._device_type == "cuda":
            # While NCCL splits the communicator, torch holds the lock that an abort needs. What frees the split is the
            # end of the connections through which the whole group agrees on it.
            assert self._releaser is not None
            self._guard(self._releaser, self._sockets, self._sockets_of_world)
        try:
            with self.nccl_log.reading(mine), self._sockets.taking():
                # Each rank asks for its own group only: one split of the communicator makes all of them, where naming
                # every group to every rank would take as many splits as there are groups.
                if mine in self._unused:
                    made: ProcessGroup = self._unused.pop(mine)
                else:
                    made = dist.new_group(list(mine), timeout=self._timeout, use_local_synchronization=True)
                self._by.joined(made)
        except (RuntimeError, ValueError) as error:
            raise self._not_made(f"the ranks {mine[0]} to {mine[-1]}", error) from error
        finally:
            if self._device_type == "cuda":
                self._guard(self._releaser, self._sockets)
        self._subgroups[mine] = made
        return made

    def _not_made(self, ranks: str, error: Exception) -> CommunicationError:
        explained = translate_nvls(error)
        kind = NvlsFailed if isinstance(explained, NvlsFailed) else CommunicationError
        return kind(
            f"rank {self.rank} on {self.hostname}: no {self.backend} group of {ranks} could be made: "
            f"{str(explained) if kind is NvlsFailed else first_line(str(error)) or type(error).__name__}"
        )

    def _require_without_nvls(self) -> None:
        """Make sure that NCCL has obeyed: an older one knows no NCCL_NO_CACHE, and reads NCCL_NVLS_ENABLE only once."""
        found = self.nccl_log.choice(tuple(range(self.world_size)), rest=True)
        if found.ranks and found.nvls not in ("used", "available"):
            return
        raise NvlsFailed(
            f"rank {self.rank} on {self.hostname}: NVLS had failed and was switched off; that the new group does "
            f"without it cannot be seen: {f'NVLS is {found.nvls}' if found.nvls else found.unknown}. Repeat the run "
            "with NCCL_NVLS_ENABLE=0 set from the start"
        )

    def _require_not_deterministic(self) -> None:
        """Make sure that NCCL's choice of algorithms stays as it is."""
        if self.backend == "nccl" and changes_algorithms():
            raise CommunicationError(
                f"rank {self.rank} on {self.hostname}: a group of NCCL is to be made while torch uses deterministic "
                "algorithms: torch would set NCCL_ALGO=^NVLS for the rest of this process, and later rates would be of "
                "other algorithms. Use cluster.group, or cluster.subgroups(size), once before deterministic algorithms "
                "are switched on"
            )


def _ranks_of(group: ProcessGroup) -> tuple[int, ...]:
    import torch.distributed as dist

    return tuple(dist.get_process_group_ranks(group))


def _drop_references() -> None:
    """Let go of what may hold a group: an object that dies after its group aborts the process."""
    for name in ("last_type", "last_value", "last_traceback", "last_exc"):  # pytest leaves failures there
        if hasattr(sys, name):
            delattr(sys, name)
    gc.collect()
