"""The back ends: a GPU by CUDA, and the host's processors.

Which one a device has stands in ``BACKENDS``: there another one takes a place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from pytest_gpucluster.device.clock import Clock, EventClock, WallClock
from pytest_gpucluster.device.interface import Accelerator, Capability
from pytest_gpucluster.errors import EnvironmentBroken

_PORTABLE = 1
"""Pinned for every CUDA context. Source: CUDA Runtime API, cudaHostRegister, cudaHostRegisterPortable."""


class Cuda(Accelerator):
    """A GPU, as torch.cuda shows it."""

    asynchronous = True

    def clock(self) -> Clock:
        """Make one of pairs of events."""
        return EventClock(self.place)

    def synchronize(self) -> None:
        """Wait for all streams."""
        torch.cuda.synchronize(self.place)

    def side_stream(self) -> torch.Stream | None:
        """Make a stream of CUDA."""
        return torch.cuda.Stream(self.place)  # type: ignore[no-untyped-call]  # torch ships no types for it

    def on(self, stream: torch.Stream | None) -> AbstractContextManager[object]:
        """Enter it as torch does; None changes nothing."""
        return torch.cuda.stream(stream)  # type: ignore[arg-type]  # side_stream makes those of CUDA only

    def fork(self, side: torch.Stream | None) -> None:
        """Wait on the device; the host goes on."""
        if side is not None:
            side.wait_stream(torch.cuda.current_stream(self.place))

    def join(self, side: torch.Stream | None) -> None:
        """Wait on the device; the host goes on."""
        if side is not None:
            torch.cuda.current_stream(self.place).wait_stream(side)

    def free_bytes(self) -> int | None:
        """Ask the driver."""
        return_memory()  # the memory that torch's allocator keeps does not count as free
        return int(torch.cuda.mem_get_info(self.place)[0])

    def total_bytes(self) -> int | None:
        """Ask the driver."""
        return int(torch.cuda.mem_get_info(self.place)[1])

    def cache_bytes(self) -> int:
        """Return the L2 cache's size."""
        return int(torch.cuda.get_device_properties(self.place).L2_cache_size)

    def reserved_bytes(self) -> int:
        """Ask torch's allocator."""
        return torch.cuda.memory_reserved(self.place)

    def reset_peak(self) -> int:
        """Reset it in torch's allocator."""
        torch.cuda.reset_peak_memory_stats(self.place)
        return int(torch.cuda.memory_allocated(self.place))

    def peak_bytes(self) -> int | None:
        """Ask torch's allocator."""
        return int(torch.cuda.max_memory_allocated(self.place))

    @contextmanager
    def pinned(self, buffer: torch.Tensor) -> Iterator[None]:
        """Register the pages with CUDA."""
        with torch.cuda.device(self.place):
            runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch ships no types for it
            failed = int(runtime.cudaHostRegister(buffer.data_ptr(), buffer.nbytes, _PORTABLE))
        if failed:
            raise EnvironmentBroken(
                f"{self.place}: CUDA cannot pin {buffer.nbytes / 1e9:.3g} GB of host memory: error {failed}; is that "
                "much free, and within the limits of the job or container (host.limits)?"
            )
        try:
            yield
        finally:
            # Also after an error: pages that are still being written must not be released.
            self.synchronize()
            runtime.cudaHostUnregister(buffer.data_ptr())

    def make_current(self) -> None:
        """Set CUDA's current device."""
        torch.cuda.set_device(self.place)

    @property
    def capability(self) -> Capability | None:
        """As the driver reports it."""
        return torch.cuda.get_device_capability(self.place)

    @property
    def kind(self) -> str:
        """Model, multiprocessors, torch and CUDA."""
        properties = torch.cuda.get_device_properties(self.place)
        return (
            f"{properties.name} with {properties.multi_processor_count} multiprocessors, torch {torch.__version__},"
            f" CUDA {torch.version.cuda}"
        )


class Cpu(Accelerator):
    """The host's processors: a call has done its work when it returns."""

    def clock(self) -> Clock:
        """Make one of host time."""
        return WallClock()

    def rows(self, mine: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
        """Let the first rank gather them, and send all: gloo's all_gather is a ring of N x N messages."""
        everyone = mine.new_empty(dist.get_world_size(group), len(mine))
        dist.gather(mine, list(everyone) if dist.get_rank(group) == 0 else None, group=group, group_dst=0)
        dist.broadcast(everyone, group=group, group_src=0)
        return everyone

    def free_bytes(self) -> int | None:
        """Read what the kernel could give."""
        return _host_bytes("MemAvailable:")

    def total_bytes(self) -> int | None:
        """Read it from the kernel."""
        return _host_bytes("MemTotal:")

    @property
    def kind(self) -> str:
        """Instructions, threads and torch."""
        instructions, threads = torch.backends.cpu.get_cpu_capability(), torch.get_num_threads()
        return f"cpu ({instructions}) with {threads} threads, torch {torch.__version__}"


def _host_bytes(name: str) -> int | None:
    with suppress(OSError):
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith(name):
                return int(line.split()[1]) * 1024
    return None


BACKENDS: dict[str, Callable[[torch.device], Accelerator]] = {"cuda": Cuda, "cpu": Cpu}
"""Type of device -> what makes its back end."""


def accelerator(device: torch.device) -> Accelerator:
    """Return the back end of a device.

    Raises:
        ValueError: there is none for this type of device.
    """
    if device.type not in BACKENDS:
        raise ValueError(f"there is a back end for {' and '.join(BACKENDS)} devices, not for {str(device)!r}")
    return BACKENDS[device.type](device)


def return_memory() -> None:
    """Return what torch's allocator keeps to the devices. Does nothing where CUDA was never used."""
    torch.cuda.empty_cache()
