"""What the ranks of a group add up, and what the sums must be.

Each element has one rank that contributes a whole number, the others zero. So the first sum is exact in any order and
in any dtype, and a wrong one can be told from a rounded one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.distributed as dist

from pytest_gpucluster.units import show

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

LARGEST_ADDEND = 127
"""Whole numbers up to this one are exact in all dtypes: bf16 has 8 significant bits."""

_CHUNK_ELEMENTS = 2**24
"""The expected sums are made for so many elements at a time, to need little memory beside the payload."""

_BYTES_BESIDE_ELEMENT = 64
"""For each element of a chunk: its index, contributor and addend in 8 bytes each, and what is made on the way."""


def finite_calls(ranks: int, dtype: str) -> int:
    """Return how often ``ranks`` ranks can add up a payload in place before a sum overflows.

    After the first call all ranks hold the addend, and each further call multiplies it by their number.

    >>> finite_calls(2, "fp32"), finite_calls(16, "fp32"), finite_calls(8, "fp16")
    (122, 31, 4)
    """
    if ranks < 2:
        return 2**31
    return 1 + math.floor(math.log(torch.finfo(DTYPES[dtype]).max / LARGEST_ADDEND, ranks))


def needed_bytes(payload_bytes: int, dtype: str) -> int:
    """Return how much memory a payload of this size takes, with what verifying it needs.

    >>> needed_bytes(8 * 2**30, "bf16") / 2**30
    9.0
    """
    elements = payload_bytes // DTYPES[dtype].itemsize
    return payload_bytes + _BYTES_BESIDE_ELEMENT * min(elements, _CHUNK_ELEMENTS)


class Payload:
    """One rank's tensor, and what its elements must sum up to.

    Attributes:
        tensor: one-dimensional, of the dtype, on the device.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, payload_bytes: int, dtype: str) -> None:
        self.dtype = dtype
        self.tensor = torch.empty(payload_bytes // DTYPES[dtype].itemsize, dtype=DTYPES[dtype], device=device)
        self._group, self._device = group, device
        self._ranks, self._rank = dist.get_world_size(group), dist.get_rank(group)
        self._finite_calls = finite_calls(self._ranks, dtype)
        self._calls = self._round = 0

    def fill(self) -> None:
        """Write this rank's addends, other ones than the last time, so that old sums are wrong sums."""
        self._round += 1
        self._calls = 0
        for part, contributor, addend in self._chunks():
            part.copy_(addend.where(contributor == self._rank, 0))

    def ready(self, calls: int) -> None:
        """Let the payload be summed up in place ``calls`` more times, and fill it again if a sum could overflow."""
        if self._calls == 0 or self._calls + calls > self._finite_calls:
            self.fill()
        self._calls += calls

    def defect(self) -> str | None:
        """Describe what is wrong with the sums after one call, or return None. Waits for the device."""
        count, first = 0, ""
        start = 0
        for part, contributor, addend in self._chunks():
            wrong = part != addend  # a NaN is unequal too
            here = int(wrong.sum())
            if here and not count:
                at = int(wrong.view(torch.uint8).argmax())
                source = dist.get_global_rank(self._group, int(contributor[at]))
                first = (
                    f"the first at offset {start + at}: found {float(part[at]):.9g}, "
                    f"expected {int(addend[at])}, which rank {source} contributed"
                )
            count += here
            start += len(part)
        return f"{self}: {count} of {start} sums are wrong, {first}" if count else None

    def _chunks(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Yield part after part of the tensor, with the contributor and the addend of each element."""
        for start in range(0, len(self.tensor), _CHUNK_ELEMENTS):
            part = self.tensor[start : start + _CHUNK_ELEMENTS]
            index = torch.arange(start + self._round, start + self._round + len(part), device=self._device)
            # 127 is prime: data that arrive at a wrong offset differ, unless both periods divide the distance.
            yield part, index % self._ranks, (index * 3 + self._round) % LARGEST_ADDEND + 1

    def __str__(self) -> str:
        size = show(self.tensor.nbytes, "B")
        return f"rank {dist.get_rank()}: all_reduce of {size} {self.dtype} over {self._ranks} ranks"
