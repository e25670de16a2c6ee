"""What a benchmark asks of the device that it runs on.

Each rank has one back end. Tensors are always torch's, and lie on ``place``; what takes time on them goes through the
methods of :class:`Accelerator`, so that a back end may also time work that it only describes. Methods that are called
inside a timed region are a single call into torch. What a back end does not define is as on the host's processors,
where a call has done its work when it returns.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import ClassVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from pytest_gpucluster.device.clock import Clock
from pytest_gpucluster.device.products import Multiply, product, scaled_product

Capability = tuple[int, int]


class Accelerator(ABC):
    """One device of this process.

    Attributes:
        place: where its tensors lie.
        numa_maps: where the kernel shows on which NUMA node the pages of this process lie.
        asynchronous: work that is started runs by itself, in streams, and copies need pinned host memory.
    """

    asynchronous: ClassVar[bool] = False
    numa_maps = Path("/proc/self/numa_maps")

    def __init__(self, place: torch.device) -> None:
        self.place = place

    # ---- time and streams

    @abstractmethod
    def clock(self) -> Clock:
        """Make a stop watch for the work on this device."""

    def synchronize(self) -> None:  # noqa: B027
        """Wait until the device has done all work that was started so far."""

    def side_stream(self) -> torch.Stream | None:
        """Make a second stream; None where each call does its work before it returns."""
        return None

    def on(self, stream: torch.Stream | None) -> AbstractContextManager[object]:
        """Start work in a stream; None is the current one."""
        return nullcontext()

    def fork(self, side: torch.Stream | None) -> None:  # noqa: B027
        """Let a side stream wait for what the current stream has to do."""

    def join(self, side: torch.Stream | None) -> None:  # noqa: B027
        """Let the current stream wait for what a side stream has to do."""

    def now(self) -> float:
        """Return the time by which the host plans: seconds of a clock that only goes forward."""
        return time.monotonic()

    # ---- timed operations

    def kept(self, count: int, least: int) -> int:
        """Return how many of ``count`` elements of a row or a buffer a benchmark really keeps: all of them.

        A simulated device keeps ``least``, where these are fewer, and times its work as that of all.
        """
        return count

    def product(self, *, scaled: bool, of: tuple[int, int, int] | None = None) -> Multiply:
        """Return the function that multiplies matrices: ``torch.mm``, or for fp8 torch's scaled product.

        Args:
            scaled: the operands are fp8.
            of: rows, columns and inner size as planned, where fewer may be kept.
        """
        return scaled_product(self.place) if scaled else product

    def communicate(
        self,
        call: Callable[[], object],
        name: str,
        payload_bytes: int,
        group: ProcessGroup,
        *,
        sent: torch.Tensor | None = None,
        peer: int | None = None,
    ) -> None:
        """Start one collective of a group, or one message between two of its ranks.

        Args:
            call: starts it.
            name: "all_reduce" and so on, or "message".
            payload_bytes: as planned, where less may be kept.
            group: whose ranks take part.
            sent: what this rank contributes to a sum.
            peer: the other rank of a message, by its number in the world.
        """
        call()

    def trained(self, flops: float, group: ProcessGroup | None) -> None:  # noqa: B027
        """Note that this rank has taken its part of a training step, inside of its timed region.

        Args:
            flops: operations of this rank's part.
            group: the ranks that train together; None: this rank alone.
        """

    def computed_by_host(self) -> AbstractContextManager[object]:
        """Note that the host computes what is inside, to compare the device with."""
        return nullcontext()

    # ---- groups

    def barrier(self, group: ProcessGroup) -> None:
        """Enqueue a wait for all ranks: on a GPU the work that is enqueued after it waits, and not the host."""
        dist.all_reduce(torch.zeros(1, device=self.place), group=group)

    def rows(self, mine: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
        """Return the tensors of all ranks, of one dimension, length and dtype, as rows in the order of the ranks."""
        everyone = mine.new_empty(dist.get_world_size(group), len(mine))
        dist.all_gather(list(everyone), mine, group=group)
        return everyone

    def joined(self, group: ProcessGroup) -> None:  # noqa: B027  # most devices need not know
        """Note that a group of this rank was made. Collective: every rank of the group calls it."""

    def left(self, groups: Iterable[ProcessGroup]) -> None:  # noqa: B027
        """Note that groups of this rank are no longer used. Each call names only those that are."""

    def copy(self, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy all words. Between contiguous buffers of one dtype torch leaves it to the driver (cudaMemcpyAsync).

        How close that comes to the memory's speed depends on the driver: an older one copied at 3.3 TB/s on an H200.
        Source: https://github.com/NVIDIA/cccl/issues/1672.
        """
        target.copy_(source)

    def read(self, source: torch.Tensor, total: torch.Tensor) -> None:
        """Sum up all words, modulo 2**64, to ``total``, which has no dimension.

        int64, because its sum is the same in any order of additions whatever the bits; torch would first copy int32 to
        int64. torch's full reduction reads close to the memory's speed: 3.136 TB/s of an H100's 3.35 with 4 GiB of
        fp32. That int64 does so too is derived, not measured: it takes the same kernel, loads as wide or wider, and has
        half as many elements a byte to add. torch itself cuts what is beyond 32-bit indices into parts.
        Source: https://github.com/pytorch/pytorch/issues/132964.
        """
        torch.sum(source, dim=0, out=total)

    def write(self, target: torch.Tensor, value: int) -> None:
        """Set all words to one value."""
        target.fill_(value)

    def copy_over_link(self, direction: str, source: torch.Tensor, target: torch.Tensor) -> None:
        """Start to copy all words between host and device, "h2d" or "d2h".

        For pinned memory torch uses cudaMemcpyAsync, and does not wait.
        """
        target.copy_(source, non_blocking=True)

    # ---- memory

    @abstractmethod
    def free_bytes(self) -> int | None:
        """Return how much memory is free, what torch's allocator keeps given back first; None if that is unknown."""

    @abstractmethod
    def total_bytes(self) -> int | None:
        """Return how much memory there is, used or not; None if that is unknown."""

    def cache_bytes(self) -> int:
        """Return the size of the last cache; 0 where it does not matter, as in a rehearsal."""
        return 0

    def reserved_bytes(self) -> int:
        """Return the bytes that this process's allocator has reserved; 0 where there is none."""
        return 0

    def reset_peak(self) -> int:
        """Count the peak of memory anew; return the bytes in use now, 0 where they are not counted."""
        return 0

    def peak_bytes(self) -> int | None:
        """Return the most bytes in use since :meth:`reset_peak`; None where they are not counted."""
        return None

    def pinned(self, buffer: torch.Tensor) -> AbstractContextManager[None]:
        """Pin host memory where it is, for copies; at the end wait for the device, also after an error.

        Raises: EnvironmentBroken if it cannot be pinned.
        """
        return nullcontext()

    # ---- identity

    def make_current(self) -> None:  # noqa: B027
        """Let what names no number, as "cuda", mean this device on this rank."""

    @property
    def capability(self) -> Capability | None:
        """CUDA's compute capability; None for what has none."""
        return None

    @property
    @abstractmethod
    def kind(self) -> str:
        """What must be the same for two devices to compute the same bits: the model, and the software."""
