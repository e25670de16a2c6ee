"""The tensors of a collective: their sizes, what ranks contribute or send, and the expected result.

Sizes follow nccl-tests: the larger one of a rank's input and output. Of an all_gather that is all ranks' parts
together, of a reduce_scatter the whole sum, of an all_to_all a rank's data for all ranks together.

>>> shape_of("all_gather", 4096, itemsize=4, ranks=8)
Shape(collective='all_gather', itemsize=4, ranks=8, part=128, sent=128, received=1024, in_place=False)

Source: nccl-tests, doc/PERFORMANCE.md, and AllGatherGetCollByteCount and the like in src/.

Sums: in each element one rank contributes a whole number and the others zero, so the first sum is exact in any order
and any dtype, and a wrong sum differs from a rounded one. Moved data: each element is a whole number that encodes its
rank and its place there, so data of another rank, another place or an earlier call are wrong data, in any dtype.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from pytest_gpucluster.device.interface import Accelerator
from pytest_gpucluster.metrics.units import show

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send_recv")
SUMMED = ("all_reduce", "reduce_scatter")
"""Those that add up the ranks' data; the others move it as it is."""

_ALIGNED_BYTES = 16
"""Parts are whole multiples of this, as in nccl-tests: NCCL copies 16 bytes at a time, and takes longer where a part
begins in between. Source: AllGatherGetCollByteCount, ``(count/nranks) & -(16/eltSize)``."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The tensors of one rank. All numbers but ``itemsize`` (bytes) and ``ranks`` count elements.

    Attributes:
        part: one rank's part of the whole, where it is divided among the ranks; else all of it.
        sent, received: length of a rank's input tensor, and of its output tensor.
        in_place: they are the same tensor.
    """

    collective: str
    itemsize: int
    ranks: int
    part: int
    sent: int
    received: int
    in_place: bool

    @property
    def payload_bytes(self) -> int:
        """The size S of nccl-tests: algbw is this over the time."""
        return self.itemsize * max(self.sent, self.received)

    @property
    def tensor_bytes(self) -> int:
        """Bytes of the tensors together on one rank."""
        return self.itemsize * (self.sent if self.in_place else self.sent + self.received)


def shape_of(collective: str, payload_bytes: int, *, itemsize: int, ranks: int) -> Shape:
    """Divide a payload among the ranks.

    A remainder is rounded down to parts of whole 16 bytes, and a part is one element at least. So a few bytes among
    many ranks become more than requested, where nccl-tests would move nothing.

    Args:
        collective: one of COLLECTIVES.
        payload_bytes: the size, a positive multiple of ``itemsize``.
        itemsize: bytes of an element.
        ranks: number of ranks.

    Raises:
        ValueError: a send_recv has one rank only, and so no peer.
    """
    whole = payload_bytes // itemsize
    if collective == "send_recv" and ranks < 2:
        raise ValueError("a send_recv needs 2 ranks and more: one alone has no peer")
    if collective in ("all_reduce", "broadcast", "send_recv"):
        in_place = collective != "send_recv"
        part = sent = received = whole
    else:
        in_place = False
        aligned = max(1, _ALIGNED_BYTES // itemsize)
        part = whole // ranks // aligned * aligned or max(1, whole // ranks)
        sent, received = {
            "all_gather": (part, part * ranks),
            "reduce_scatter": (part * ranks, part),
            "all_to_all": (part * ranks, part * ranks),
        }[collective]
    return Shape(
        collective=collective,
        itemsize=itemsize,
        ranks=ranks,
        part=part,
        sent=sent,
        received=received,
        in_place=in_place,
    )


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

LARGEST_ADDEND = 127
"""Whole numbers up to this one are exact in all dtypes: bf16 has 8 significant bits."""

EMPTY = -1
"""The initial value of received elements. No element is ever expected to be this."""

CHUNK_ELEMENTS = 2**24
"""Expected values are computed for this number of elements at a time, to need little memory besides the payload."""

_CHECK_BYTES_PER_ELEMENT = 64
"""For each element of a chunk: its index, contributor and addend in 8 bytes each, and temporary values."""

KEPT_BYTES = 128
"""For each rank of a larger payload on a simulated device."""

_UNLIMITED = 2**31


def finite_calls(ranks: int, dtype: str) -> int:
    """Return how often ``ranks`` ranks can add up a payload in place before a sum overflows.

    After the first call all ranks hold the addend, and each further call multiplies it by their number.

    >>> finite_calls(2, "fp32"), finite_calls(16, "fp32"), finite_calls(8, "fp16")
    (122, 31, 4)
    """
    if ranks < 2:
        return _UNLIMITED
    return 1 + math.floor(math.log(torch.finfo(DTYPES[dtype]).max / LARGEST_ADDEND, ranks))


def needed_bytes(payload_bytes: int, dtype: str, *, collective: str = "all_reduce", ranks: int = 2) -> int:
    """Return the memory for a payload of this size on each rank, including its verification.

    >>> needed_bytes(8 * 2**30, "bf16") / 2**30
    9.0
    >>> needed_bytes(8 * 2**30, "bf16", collective="all_to_all") / 2**30
    17.0
    """
    shape = shape_of(collective, payload_bytes, itemsize=DTYPES[dtype].itemsize, ranks=ranks)
    return shape.tensor_bytes + _CHECK_BYTES_PER_ELEMENT * min(max(shape.sent, shape.received), CHUNK_ELEMENTS)


ROOT = 0
"""The rank whose data a broadcast carries, by its number in the group. Source: nccl-tests, README.md, option ``-r``:
0."""


def source_of(rank: int, ranks: int) -> int:
    """Return the rank that sends to a rank in a send_recv: each sends to the next one at once.

    Source: nccl-tests, src/sendrecv.cu, SendRecvRunColl.
    """
    return (rank - 1) % ranks


class Payload:
    """One rank's tensors of a collective, and the data expected in them.

    Attributes:
        sent, received: this rank's input and output: one-dimensional, of the dtype, on the device; of an all_reduce and
            a broadcast the same tensor.
        shape: their sizes.
        payload_bytes: the size S of nccl-tests, of which a simulated device keeps only a part.
        finite_calls: number of consecutive calls that keep the sums finite.
        is_scattered: each rank receives another part of a sum.
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
        *,
        by: Accelerator | None = None,
    ) -> None:
        self._group, self._device = group, device
        self._ranks, self._rank = dist.get_world_size(group), dist.get_rank(group)
        self.dtype, itemsize = dtype, DTYPES[dtype].itemsize
        self.payload_bytes = shape_of(collective, payload_bytes, itemsize=itemsize, ranks=self._ranks).payload_bytes
        kept = payload_bytes if by is None else by.kept(payload_bytes, KEPT_BYTES * self._ranks)
        self.shape = shape_of(collective, kept, itemsize=itemsize, ranks=self._ranks)
        self.sent = torch.empty(self.shape.sent, dtype=DTYPES[dtype], device=device)
        self.received = self.sent if self.shape.in_place else self.sent.new_empty(self.shape.received)
        self._is_sum = collective in SUMMED
        # Only a sum that replaces its addends grows with each call.
        self._grows = self._is_sum and self.shape.in_place
        self.is_scattered = self._is_sum and not self.shape.in_place
        self.finite_calls = finite_calls(self._ranks, dtype) if self._grows else _UNLIMITED
        self._calls = self._round = 0

    @property
    def summed(self) -> torch.Tensor | None:
        """What this rank contributes to a sum; None where data are only moved."""
        return self.sent if self._is_sum else None

    def fill(self) -> None:
        """Write this rank's input, different from the last one, so that old results are wrong; clear its output."""
        self._round += 1
        self._calls = 0
        self.received.fill_(EMPTY)
        if self.shape.collective == "broadcast" and self._rank != ROOT:
            return
        for start in range(0, len(self.sent), CHUNK_ELEMENTS):
            part = self.sent[start : start + CHUNK_ELEMENTS]
            if self._is_sum:
                contributor, addend = self._addends(start, len(part))
                part.copy_(addend.where(contributor == self._rank, 0))
            else:
                part.copy_(self._values(self._rank, start, len(part)))

    def ready(self, calls: int) -> str | None:
        """Prepare the payload for ``calls`` more calls, and fill it again if a sum could overflow.

        Returns: the defect of the replaced sums, as :meth:`defect`; None if there is none.
        """
        found = None
        if self._calls == 0 or self._calls + calls > self.finite_calls:
            found = self.defect() if self._calls else None
            self.fill()
        self._calls += calls
        return found

    def defect(self) -> str | None:
        """Describe the defect of the received data after all calls since they were filled, or return None.

        Of sums in place, each call multiplies the previous sums by the number of ranks: one wrong element makes all
        later sums of it wrong, so that one check covers all calls; but an error of one rank alone in the lowest
        log2(ranks) bits is rounded away by the next call. Where such sums cannot be exact in any order of the
        additions, as those of 8 ranks in bf16, only those of the first call are compared. Waits for the device.
        """
        again = max(0, self._calls - 1) if self._grows else 0
        odd = self._ranks // (self._ranks & -self._ranks)
        if again and LARGEST_ADDEND * self._ranks * odd**again > 2 / torch.finfo(DTYPES[self.dtype]).eps:
            return None
        grown = float(self._ranks**again)
        are_wrong, origin = "elements are wrong", "which rank {} sent"
        if self._is_sum:
            are_wrong, origin = "sums are wrong", "the addend of rank {}"
            origin += "; any rank may have spoilt it" if self._ranks > 1 else ""
        count, first = 0, ""
        for start, sources, values in self._expected():
            part = self.received[start : start + len(values)]
            due = values.to(part.dtype).mul_(grown)
            wrong = part != due  # a NaN is unequal too
            here = int(wrong.sum())
            if here and not count:
                at = int(wrong.view(torch.uint8).argmax())
                source = dist.get_global_rank(self._group, sources if isinstance(sources, int) else int(sources[at]))
                first = (
                    f"the first at offset {start + at}: found {float(part[at]):.9g}, "
                    f"expected {float(due[at]):.9g}, {origin.format(source)}"
                )
            count += here
        self.verified += len(self.received)
        after = f" after {1 + again} calls in place" if again else ""
        # Any rank may have spoilt a sum: all that see the same say the same.
        what = self._name if self._is_sum else str(self)
        return f"{what}: {count} of {len(self.received)} {are_wrong}{after}, {first}" if count else None

    def _expected(self) -> Iterator[tuple[int, torch.Tensor | int, torch.Tensor]]:
        """Yield part after part of the received data: its start, the source rank of it or of each element, and its
        values after one call."""
        shape, rank = self.shape, self._rank
        sources = {
            "all_reduce": [(0, 0)],
            "reduce_scatter": [(0, rank * shape.part)],
            "all_gather": [(source, 0) for source in range(self._ranks)],
            "all_to_all": [(source, rank * shape.part) for source in range(self._ranks)],
            "broadcast": [(ROOT, 0)],
            "send_recv": [(source_of(rank, self._ranks), 0)],
        }[shape.collective]
        for number, (source, begin) in enumerate(sources):
            for start in range(0, shape.part, CHUNK_ELEMENTS):
                length = min(CHUNK_ELEMENTS, shape.part - start)
                if self._is_sum:
                    yield start, *self._addends(begin + start, length)
                else:
                    yield number * shape.part + start, source, self._values(source, begin + start, length)

    def _addends(self, offset: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return contributor and addend of each of ``count`` elements from ``offset`` of the whole on, int64."""
        index = torch.arange(offset + self._round, offset + self._round + count, device=self._device)
        # 127 is prime: data that arrive at a wrong offset differ, unless both periods divide the distance.
        return index % self._ranks, (index * 3 + self._round) % LARGEST_ADDEND + 1

    def _values(self, source: int, offset: int, count: int) -> torch.Tensor:
        """Return the input of the group's rank ``source`` from ``offset`` on: ``count`` numbers of 1 to 127, int64."""
        index = torch.arange(offset, offset + count, device=self._device)
        # A polynomial of the place whose factors are the source's digits to the base 127, a prime: so two sources agree
        # in one of 126 places at most, and a place and its neighbours hardly ever.
        high, low = divmod(source, LARGEST_ADDEND)
        place = index % (LARGEST_ADDEND - 1) + 1
        return (3 * index + self._round + (low + high * place) * place) % LARGEST_ADDEND + 1

    def __str__(self) -> str:
        return f"rank {dist.get_rank()}: {self._name}"

    @property
    def _name(self) -> str:
        size = show(self.payload_bytes, "B")
        return f"{self.shape.collective} of {size} {self.dtype} over {self.shape.ranks} ranks"
