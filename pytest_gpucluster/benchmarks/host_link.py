"""The rate of copies between the host and one GPU at a time, each direction alone or both, all copies verified.

The NUMA node of the host memory is chosen first, then the memory is pinned. torch's own pinned memory comes from a
cache, in which a buffer may lie on any NUMA node. So fresh pages are mapped here, touched by this thread while it runs
on the CPUs near the GPU, and registered with CUDA where they are.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from pytest_gpucluster.benchmarks.blocks import NO_CONTEXT, measure_rate
from pytest_gpucluster.benchmarks.host_link_copies import (
    D2H,
    DIRECTIONS,
    H2D,
    KEPT_WORDS,
    WORD_BYTES,
    HostCopies,
    Turn,
    bytes_on_device,
    words_on_host,
)
from pytest_gpucluster.benchmarks.memory_budget import releases_memory, require_free
from pytest_gpucluster.device.backends import accelerator
from pytest_gpucluster.device.interface import Accelerator
from pytest_gpucluster.errors import EnvironmentBroken
from pytest_gpucluster.metrics.sampling import Sampling, Series
from pytest_gpucluster.metrics.units import require_one_of, show_bytes


@dataclass(frozen=True, kw_only=True)
class HostMemory:
    """Pages of this process.

    Attributes:
        words: all of it, int64, of one dimension.
        nodes: NUMA node -> the part of the pages that lies there; empty where the kernel does not report it.
    """

    words: torch.Tensor
    nodes: Mapping[int, float]


@contextmanager
def host_memory(device: torch.device, words: int, *, cpus: frozenset[int] | None = None) -> Iterator[HostMemory]:
    """Provide 8-byte words of fresh memory, on the NUMA node of ``cpus`` and pinned for ``device``.

    Args:
        device: that will copy. On cpu nothing is pinned.
        words: how many.
        cpus: the CPUs on whose NUMA node it should lie; None leaves it to the kernel. Where this process may run on
            none of them, the kernel chooses too, and ``nodes`` shows where.

    Raises:
        EnvironmentBroken: there is too little memory, or CUDA cannot pin it.

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
    with accelerator(device).pinned(buffer):
        yield HostMemory(words=buffer, nodes=nodes_of(buffer.data_ptr(), accelerator(device).numa_maps))


def nodes_of(address: int, numa_maps: Path = Accelerator.numa_maps) -> dict[int, float]:
    """Return which part of the mapping at an address lies on which NUMA node; empty if the kernel does not report it.

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
    except OSError:  # none of them is allowed here: the pages will be elsewhere, and nodes_of reports where
        pass
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


COMPARED_GB_PER_SECOND = 5.0
"""The rate at which one core of a host compares, at least. Source: this suite's rule; it reads both sides from
memory."""

ALONE, BOTH, TOGETHER = "alone", "both", "together"
WAYS = (*DIRECTIONS, BOTH)


@dataclass(frozen=True, kw_only=True)
class HostLinkResult:
    """The rate of the link between this rank's host and its GPU.

    Attributes:
        bytes_per_second: of each direction, whatever was copied the other way.
        directions: of the copies.
        mode: "alone" (one direction of one GPU), "both" (both directions of one GPU) or "together" (one direction of
            all GPUs of the node).
        payload_bytes: of one copy.
        nodes: NUMA node -> the part of the host memory that lay there; empty if the kernel does not report it.
    """

    bytes_per_second: Series
    directions: tuple[str, ...]
    mode: str
    payload_bytes: int
    nodes: Mapping[int, float]

    @property
    def size(self) -> str:
        """The payload as a quantity: ``64 MiB``."""
        return show_bytes(self.payload_bytes)

    @property
    def memory(self) -> str:
        """The NUMA nodes of the host memory, as text: NUMA node 0: 75 %, NUMA node 1: 25 %."""
        parts = [f"NUMA node {node}: {100 * part:.3g} %" for node, part in sorted(self.nodes.items())]
        return ", ".join(parts) or "NUMA node unknown"


def longest_seconds(sampling: Sampling, *, ranks: int, gb_per_second: float) -> float:
    """Return how long all ranks of a node take at most, one after the other, with their comparing.

    Args:
        sampling: of each rank.
        ranks: those that take turns. While one compares, the next one copies, so comparing counts once.
        gb_per_second: the highest rate of a link: the faster it is, the more has to be compared.

    >>> times = Sampling(warmup_seconds=0.5, window_seconds=1, longest_seconds=5, tolerance_ratio=0.01)
    >>> longest_seconds(times, ranks=8, gb_per_second=50.0), longest_seconds(times, ranks=8, gb_per_second=450.0)
    (189.0, 1029.0)
    """
    copying = sampling.warmup_seconds + sampling.at_most_seconds
    return copying * (ranks + gb_per_second / COMPARED_GB_PER_SECOND)


@releases_memory()
def measure_host_link(
    device: torch.device,
    way: str,
    *,
    payload_bytes: int,
    copies: int,
    sampling: Sampling,
    cpus: frozenset[int] | None = None,
    during: AbstractContextManager[object] = NO_CONTEXT,
) -> HostLinkResult:
    """Measure copies from pinned host memory to the device, back, or both ways at once, in bytes a second.

    Counted are the bytes of one direction. With both at once it is those of each direction over the time until both
    have ended, so a slower direction is not hidden by a faster one. One process of a node copies at a time, by a lock
    that all of them know. While one compares, the next one copies.

    Args:
        device: which GPU. On cpu both sides are host memory, and the two directions take turns.
        way: "h2d", "d2h" or "both".
        payload_bytes: of one copy, a multiple of 8.
        copies: started one after the other, each with its own buffer, until all of them are verified.
        sampling: how long to warm up and to measure, and the required confidence. Verification takes longer than the
            copies, and does not count.
        cpus: near the device: host memory is placed on their NUMA node.
        during: entered while samples are taken.

    Returns: the result; its series may be inconclusive, and states it.

    Raises:
        WrongResult: a copy is wrong; names direction, how many words, the first one's offset and bits.
        InconclusiveMeasurement: the clock did not advance.
        EnvironmentBroken: too little memory is free, it cannot be pinned, or there was no turn.
        ValueError: there is no such way.

    Source: as nvbandwidth counts and measures, host_to_device_memcpy_ce and its like, with 64 MiB a copy,
    https://github.com/NVIDIA/nvbandwidth; its bidirectional tests time one direction, here both must end.
    """
    require_one_of("a way", way, WAYS)
    directions = (H2D, D2H) if way == BOTH else (way,)
    words = check_sizes(device, directions, payload_bytes, copies)
    name = f"{device}: host link {way}, {show_bytes(payload_bytes)}"
    by = accelerator(device)
    words = by.kept(words, KEPT_WORDS)
    host_words = words_on_host(words, copies, directions)
    with Turn() as turn, host_memory(device, host_words, cpus=cpus) as host:
        work = HostCopies(by, host.words, words, copies, directions, name=name, turn=turn)
        rate = measure_rate(work, work.timed(by.clock()), sampling=sampling, during=during)
    return HostLinkResult(
        bytes_per_second=rate.per_second.scaled(payload_bytes),
        directions=directions,
        mode=BOTH if way == BOTH else ALONE,
        payload_bytes=payload_bytes,
        nodes=host.nodes,
    )


def check_sizes(device: torch.device, directions: tuple[str, ...], payload_bytes: int, copies: int) -> int:
    """Return the 8-byte words of a copy, if there is memory for all of it.

    Raises: EnvironmentBroken if too little memory is free.
    """
    words = payload_bytes // WORD_BYTES
    what = f"host link {'and '.join(directions)}, {copies} copies of {show_bytes(payload_bytes)}"
    instead = "copy less: --gpucluster-workload host_link.copies=8"
    require_free(device, bytes_on_device(words, copies, directions), what, instead=instead)
    require_free(torch.device("cpu"), WORD_BYTES * words_on_host(words, copies, directions), what, instead=instead)
    return words
