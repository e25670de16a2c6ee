"""Host memory that a GPU reads and writes by itself: where it lies is chosen first, then it is pinned.

torch's own pinned memory comes from a cache, in which a buffer may lie on any NUMA node. So fresh pages are mapped
here, touched by this thread while it runs beside the GPU, and registered with CUDA where they are.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from pytest_gpucluster.errors import EnvironmentBroken

NUMA_MAPS = Path("/proc/self/numa_maps")

_PORTABLE = 1
"""Pinned for every CUDA context. Source: CUDA Runtime API, cudaHostRegister, cudaHostRegisterPortable."""


@dataclass(frozen=True, kw_only=True)
class HostMemory:
    """Pages of this process.

    Attributes:
        words: all of it, int64, of one dimension.
        nodes: NUMA node -> the part of the pages that lies there; empty where the kernel does not tell.
    """

    words: torch.Tensor
    nodes: Mapping[int, float]


@contextmanager
def host_memory(device: torch.device, words: int, *, cpus: frozenset[int] | None = None) -> Iterator[HostMemory]:
    """Give so many 8-byte words of fresh memory, beside ``cpus`` and pinned for ``device``.

    Args:
        device: what will copy. On cpu nothing is pinned.
        words: how many.
        cpus: the CPUs on whose NUMA node it should lie; None leaves it to the kernel. Where this process may run on
            none of them, the kernel chooses too, and ``nodes`` shows where.

    Raises:
        EnvironmentBroken: there is not so much memory, or CUDA cannot pin it.

    Source: the kernel takes a page from the node of the CPU that touches it first: Linux kernel,
    Documentation/admin-guide/mm/numa_memory_policy.rst, system default policy.
    """
    nbytes = 8 * words
    try:
        mapped = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # A child would share the pages; and its own entry in numa_maps keeps them apart from their neighbours.
        mapped.madvise(mmap.MADV_DONTFORK)
    except (OSError, OverflowError) as error:
        raise EnvironmentBroken(
            f"{device}: no {nbytes / 1e9:.3g} GB of host memory: {error}; end what else uses it, raise the limit of "
            "the job or container, or copy less: --gpucluster-workload host_link.copies=8"
        ) from None
    buffer = torch.frombuffer(mapped, dtype=torch.int64)
    with _running_on(cpus):
        # One thread: torch's own, which fill tensors in parallel, run where they were before.
        ctypes.memset(buffer.data_ptr(), 0, nbytes)
    with _pinned(buffer, device):
        yield HostMemory(words=buffer, nodes=nodes_of(buffer.data_ptr()))


def nodes_of(address: int, numa_maps: Path = NUMA_MAPS) -> dict[int, float]:
    """Return which part of the mapping at an address lies on which NUMA node; empty if the kernel does not tell.

    Source: proc_pid_numa_maps(5): each line is a mapping by its first address; ``N0=12`` are pages on node 0.
    """
    try:
        lines = numa_maps.read_text(encoding="ascii", errors="replace").splitlines()
        entries = [line.split() for line in lines]
        found = [fields for fields in entries if fields and int(fields[0], 16) <= address]
        here = max(found, key=lambda fields: int(fields[0], 16), default=[])
        pages = {
            int(node[1:]): int(count)
            for node, equals, count in (field.partition("=") for field in here)
            if equals and node[:1] == "N" and node[1:].isdecimal()
        }
    except (OSError, ValueError):
        return {}
    return {node: count / sum(pages.values()) for node, count in pages.items() if count}


@contextmanager
def _running_on(cpus: frozenset[int] | None) -> Iterator[None]:
    before = os.sched_getaffinity(0)
    try:
        if cpus:
            os.sched_setaffinity(0, cpus)
    except OSError:  # none of them is allowed here: the pages will be elsewhere, and nodes_of says where
        pass
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@contextmanager
def _pinned(buffer: torch.Tensor, device: torch.device) -> Iterator[None]:
    if device.type != "cuda":
        yield
        return
    with torch.cuda.device(device):
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch ships no types for it
        failed = int(runtime.cudaHostRegister(buffer.data_ptr(), buffer.nbytes, _PORTABLE))
    if failed:
        raise EnvironmentBroken(
            f"{device}: CUDA cannot pin {buffer.nbytes / 1e9:.3g} GB of host memory: error {failed}; is so much of it "
            "free, and not held back by a limit of the job or container (host.limits)?"
        )
    try:
        yield
    finally:
        # Whatever the copies came to: pages that are still being written must not be let go.
        torch.cuda.synchronize(device)
        runtime.cudaHostUnregister(buffer.data_ptr())
