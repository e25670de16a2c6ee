"""The rate at which one device copies, reads and writes its own memory, with every pass verified."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from pytest_gpucluster.benchmarks.blocks import NO_CONTEXT, measure_rate
from pytest_gpucluster.benchmarks.memory_budget import releases_memory, require_free, sets_beyond_cache
from pytest_gpucluster.benchmarks.memory_passes import KEPT_WORDS, KINDS, WORD_BYTES
from pytest_gpucluster.device.backends import accelerator
from pytest_gpucluster.metrics.sampling import Sampling, Series
from pytest_gpucluster.metrics.units import require_one_of, show_bytes


@dataclass(frozen=True, kw_only=True)
class HbmResult:
    """The result of one device.

    Attributes:
        bytes_per_second: a sample for each block of passes.
        kind: "copy", "read" or "write".
        payload_bytes: of one buffer.
        bytes_per_pass: a copy reads its payload and writes it.
    """

    bytes_per_second: Series
    kind: str
    payload_bytes: int
    bytes_per_pass: int

    @property
    def size(self) -> str:
        """The payload as a quantity: ``8 GiB``."""
        return show_bytes(self.payload_bytes)


@releases_memory()
def measure_hbm(
    device: torch.device,
    kind: str,
    *,
    payload_bytes: int,
    sampling: Sampling,
    during: AbstractContextManager[object] = NO_CONTEXT,
) -> HbmResult:
    """Measure passes over buffers of ``payload_bytes``, in bytes a second.

    Counted are the bytes that a pass moves: a ``copy`` from one buffer to another reads the payload and writes it, a
    ``read`` sums it up, a ``write`` fills it with one value. Only buffers larger than the device's cache measure its
    memory; smaller ones are used in turn with others.

    Every pass is verified, between the timed regions. A copy also moves the results of the copies before it, and in
    the end all bits must be the initial ones. A read's sum must be exactly right. A write's value must be there, of
    each but the last write only at its beginning, which the next one leaves out.

    Args:
        device: whose memory.
        kind: "copy", "read" or "write".
        payload_bytes: of one buffer, a multiple of 8. A copy needs two.
        sampling: how long to warm up and to measure, and the required confidence.
        during: entered while samples are taken.

    Returns: the result; its series may be inconclusive, and states it.

    Raises:
        WrongResult: data are wrong; names how many words, the first one's offset and its bits.
        InconclusiveMeasurement: the clock did not advance.
        EnvironmentBroken: too little memory is free.
        ValueError: there is no such kind.

    Source: bytes as STREAM counts them, which counts no read that a write may cause: McCalpin, "Memory Bandwidth and
    Machine Balance in Current High Performance Computers" (1995).
    """
    require_one_of("kind", kind, KINDS)
    make, words = KINDS[kind], payload_bytes // WORD_BYTES
    by, bytes_per_pass = accelerator(device), make.touched_bytes(words)
    sets = sets_beyond_cache(bytes_per_pass, by.cache_bytes())
    what = f"memory {kind} of {show_bytes(payload_bytes)}"
    require_free(
        device,
        make.needed_bytes(words, sets),
        what,
        instead="choose smaller buffers, such as --gpucluster-workload hbm.sizes=8GiB",
    )
    passes = make(device, by.kept(words, KEPT_WORDS), sets, by, name=f"{device}: {what}")
    rate = measure_rate(passes, by.clock(), sampling=sampling, during=during)
    return HbmResult(
        bytes_per_second=rate.per_second.scaled(bytes_per_pass),
        kind=kind,
        payload_bytes=payload_bytes,
        bytes_per_pass=bytes_per_pass,
    )
