"""What the ranks of a group move to each other, and what must arrive where: nothing is added up.

Each element is a whole number that says from which rank it comes and from which place there. So data of another rank,
of another place or of an earlier call are wrong data, in any dtype.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist

from pytest_gpucluster.benchmarks import payload
from pytest_gpucluster.benchmarks.collective_shape import shape_of
from pytest_gpucluster.benchmarks.payload import DTYPES, LARGEST_ADDEND, NOTHING, described, tensors_of

ROOT = 0
"""Whose data a broadcast carries, by its number in the group. Source: nccl-tests, README.md, option ``-r``: 0."""

_AS_OFTEN_AS_WANTED = 2**31


def source_of(rank: int, ranks: int) -> int:
    """Return from whom a rank gets its data in a send_recv: all send to the next one at once.

    Source: nccl-tests, src/sendrecv.cu, SendRecvRunColl.
    """
    return (rank - 1) % ranks


class MovedPayload:
    """One rank's tensors of an all_gather, all_to_all, broadcast or send_recv, and what must arrive in them.

    Attributes:
        sent, received: what this rank gives and gets: one-dimensional, of the dtype, on the device; of a broadcast the
            same tensor.
        shape: their sizes.
        finite_calls: how many calls in a row may follow one filling: any number, for nothing grows.
        verified: elements that were compared so far.
    """

    verified = 0

    finite_calls = _AS_OFTEN_AS_WANTED

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, payload_bytes: int, dtype: str, collective: str
    ) -> None:
        self._group, self._device = group, device
        self._ranks, self._rank = dist.get_world_size(group), dist.get_rank(group)
        self.dtype = dtype
        self.shape = shape_of(collective, payload_bytes, itemsize=DTYPES[dtype].itemsize, ranks=self._ranks)
        self.sent, self.received = tensors_of(self.shape, dtype, device)
        self._round = 0

    def fill(self) -> None:
        """Write what this rank gives, other data than the last time, and clear what it gets."""
        self._round += 1
        self.received.fill_(NOTHING)
        if self.shape.collective == "broadcast" and self._rank != ROOT:
            return
        for start in range(0, len(self.sent), payload.CHUNK_ELEMENTS):
            part = self.sent[start : start + payload.CHUNK_ELEMENTS]
            part.copy_(self._values(self._rank, start, len(part)))

    def ready(self, calls: int) -> None:
        """Let the payload be moved ``calls`` more times."""
        if not self._round:
            self.fill()

    def defect(self) -> str | None:
        """Describe what is wrong with what has arrived after a call, or return None. Waits for the device."""
        count, first = 0, ""
        for start, source, offset, length in self._pieces():
            part, expected = self.received[start : start + length], self._values(source, offset, length)
            wrong = part != expected  # a NaN is unequal too
            here = int(wrong.sum())
            if here and not count:
                at = int(wrong.view(torch.uint8).argmax())
                first = (
                    f"the first at offset {start + at}: found {float(part[at]):.9g}, expected {int(expected[at])}, "
                    f"which rank {dist.get_global_rank(self._group, source)} sent"
                )
            count += here
        self.verified += self.shape.received
        return f"{self}: {count} of {self.shape.received} elements are wrong, {first}" if count else None

    def _pieces(self) -> Iterator[tuple[int, int, int, int]]:
        """Yield what arrives piece after piece: where, from which rank, from which place there, and its length."""
        shape, rank = self.shape, self._rank
        sources = {
            "all_gather": [(source, 0) for source in range(self._ranks)],
            "all_to_all": [(source, rank * shape.part) for source in range(self._ranks)],
            "broadcast": [(ROOT, 0)],
            "send_recv": [(source_of(rank, self._ranks), 0)],
        }[shape.collective]
        for number, (source, first) in enumerate(sources):
            for start in range(0, shape.part, payload.CHUNK_ELEMENTS):
                length = min(payload.CHUNK_ELEMENTS, shape.part - start)
                yield number * shape.part + start, source, first + start, length

    def _values(self, source: int, offset: int, count: int) -> torch.Tensor:
        """Return what rank ``source`` of the group gives from ``offset`` on: ``count`` numbers from 1 to 127, int64."""
        index = torch.arange(offset, offset + count, device=self._device)
        # A polynomial of the place whose factors are the source's digits to the base 127, a prime: so two sources agree
        # in one of 126 places at most, and a place and its neighbours hardly ever.
        high, low = divmod(source, LARGEST_ADDEND)
        place = index % (LARGEST_ADDEND - 1) + 1
        return (3 * index + self._round + (low + high * place) * place) % LARGEST_ADDEND + 1

    def __str__(self) -> str:
        return described(self.shape, self.dtype)
