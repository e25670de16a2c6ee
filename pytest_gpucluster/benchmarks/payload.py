"""What the ranks of a group add up, and what the sums must be.

Each element has one rank that contributes a whole number, the others zero. So the first sum is exact in any order and
in any dtype, and a wrong one can be told from a rounded one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
import torch.distributed as dist

from pytest_gpucluster.benchmarks.collective_shape import Shape, shape_of
from pytest_gpucluster.metrics.units import show

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

LARGEST_ADDEND = 127
"""Whole numbers up to this one are exact in all dtypes: bf16 has 8 significant bits."""

NOTHING = -1
"""Stands where nothing has arrived yet. No element is ever expected to be this."""

CHUNK_ELEMENTS = 2**24
"""What is expected is made for so many elements at a time, to need little memory beside the payload."""

_BYTES_BESIDE_ELEMENT = 64
"""For each element of a chunk: its index, contributor and addend in 8 bytes each, and what is made on the way."""

_ALWAYS = 2**31


def finite_calls(ranks: int, dtype: str) -> int:
    """Return how often ``ranks`` ranks can add up a payload in place before a sum overflows.

    After the first call all ranks hold the addend, and each further call multiplies it by their number.

    >>> finite_calls(2, "fp32"), finite_calls(16, "fp32"), finite_calls(8, "fp16")
    (122, 31, 4)
    """
    if ranks < 2:
        return _ALWAYS
    return 1 + math.floor(math.log(torch.finfo(DTYPES[dtype]).max / LARGEST_ADDEND, ranks))


def needed_bytes(payload_bytes: int, dtype: str, *, collective: str = "all_reduce", ranks: int = 2) -> int:
    """Return how much memory a payload of this size takes on each rank, with what verifying it needs.

    >>> needed_bytes(8 * 2**30, "bf16") / 2**30
    9.0
    >>> needed_bytes(8 * 2**30, "bf16", collective="all_to_all") / 2**30
    17.0
    """
    shape = shape_of(collective, payload_bytes, itemsize=DTYPES[dtype].itemsize, ranks=ranks)
    return shape.tensor_bytes + _BYTES_BESIDE_ELEMENT * min(max(shape.sent, shape.received), CHUNK_ELEMENTS)


class Payload:
    """One rank's tensors, and what their elements must sum up to: of an all_reduce or a reduce_scatter.

    Attributes:
        sent, received: what this rank gives and gets: one-dimensional, of the dtype, on the device; of an all_reduce
            the same tensor.
        shape: their sizes.
        finite_calls: how many calls in a row keep the sums finite.
        verified: elements that were compared so far.
    """

    verified = 0

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        payload_bytes: int,
        dtype: str,
        collective: str = "all_reduce",
    ) -> None:
        self._group, self._device = group, device
        self._ranks, self._rank = dist.get_world_size(group), dist.get_rank(group)
        self.dtype = dtype
        self.shape = shape_of(collective, payload_bytes, itemsize=DTYPES[dtype].itemsize, ranks=self._ranks)
        self.sent, self.received = tensors_of(self.shape, dtype, device)
        # Only a sum that takes the place of its addends grows with each call.
        self.finite_calls = finite_calls(self._ranks, dtype) if self.shape.in_place else _ALWAYS
        self._first = 0 if self.shape.in_place else self._rank * self.shape.part
        self._calls = self._round = 0

    def fill(self) -> None:
        """Write this rank's addends, other ones than the last time, so that old sums are wrong sums."""
        self._round += 1
        self._calls = 0
        if not self.shape.in_place:
            self.received.fill_(NOTHING)
        for part, contributor, addend in self._chunks(self.sent, 0):
            part.copy_(addend.where(contributor == self._rank, 0))

    def ready(self, calls: int) -> str | None:
        """Let the payload be summed up ``calls`` more times, and fill it again if a sum could overflow.

        Returns: what was wrong with the sums that are replaced, as :meth:`defect`; None if nothing was.
        """
        found = None
        if self._calls == 0 or self._calls + calls > self.finite_calls:
            found = self.defect() if self._calls else None
            self.fill()
        self._calls += calls
        return found

    def defect(self) -> str | None:
        """Describe what is wrong with the sums after all calls since they were filled, or return None.

        In place, each call multiplies what the one before has left by the number of ranks: one wrong element makes all
        later sums of it wrong, so that one look is at all calls; but what one rank alone has wrong in the lowest
        log2(ranks) bits the next call rounds away. Where such sums cannot be exact in any order of the
        additions, as those of 8 ranks in bf16, only those of the first call are compared. Waits for the device.
        """
        again = max(0, self._calls - 1) if self.shape.in_place else 0
        odd = self._ranks // (self._ranks & -self._ranks)
        if again and LARGEST_ADDEND * self._ranks * odd**again > 2 / torch.finfo(DTYPES[self.dtype]).eps:
            return None
        grown = float(self._ranks**again)
        count, first = 0, ""
        start = 0
        for part, contributor, addend in self._chunks(self.received, self._first):
            due = addend.to(part.dtype).mul_(grown)
            wrong = part != due  # a NaN is unequal too
            here = int(wrong.sum())
            if here and not count:
                at = int(wrong.view(torch.uint8).argmax())
                source = dist.get_global_rank(self._group, int(contributor[at]))
                first = (
                    f"the first at offset {start + at}: found {float(part[at]):.9g}, "
                    f"expected {float(due[at]):.9g}, which rank {source} contributed"
                )
            count += here
            start += len(part)
        self.verified += start
        after = f" after {1 + again} calls in place" if again else ""
        return f"{self}: {count} of {start} sums are wrong{after}, {first}" if count else None

    def _chunks(self, tensor: torch.Tensor, first: int) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Yield part after part of a tensor that begins at element ``first`` of the whole, with the contributor and
        the addend of each element."""
        for start in range(0, len(tensor), CHUNK_ELEMENTS):
            part = tensor[start : start + CHUNK_ELEMENTS]
            begin = first + start + self._round
            index = torch.arange(begin, begin + len(part), device=self._device)
            # 127 is prime: data that arrive at a wrong offset differ, unless both periods divide the distance.
            yield part, index % self._ranks, (index * 3 + self._round) % LARGEST_ADDEND + 1

    def __str__(self) -> str:
        return described(self.shape, self.dtype)


def tensors_of(shape: Shape, dtype: str, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Make what a rank gives and what it gets."""
    sent = torch.empty(shape.sent, dtype=DTYPES[dtype], device=device)
    return sent, sent if shape.in_place else torch.empty(shape.received, dtype=DTYPES[dtype], device=device)


def described(shape: Shape, dtype: str) -> str:
    """Name this rank and what is measured, for messages."""
    size = show(shape.payload_bytes, "B")
    return f"rank {dist.get_rank()}: {shape.collective} of {size} {dtype} over {shape.ranks} ranks"
