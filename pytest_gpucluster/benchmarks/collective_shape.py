"""How large the tensors of a collective are, by the conventions of nccl-tests. Pure.

The size of a collective is the larger one of what a rank gives and what it gets, as nccl-tests prints it: of an
all_gather all ranks' parts together, of a reduce_scatter the whole that is summed up, of an all_to_all what a rank
gives to all ranks together.

>>> shape_of("all_gather", 4096, itemsize=4, ranks=8)
Shape(collective='all_gather', itemsize=4, ranks=8, part=128, sent=128, received=1024, in_place=False)

Source: nccl-tests, doc/PERFORMANCE.md, and AllGatherGetCollByteCount and the like in src/.
"""

from __future__ import annotations

from dataclasses import dataclass

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send_recv")
SUMMED = ("all_reduce", "reduce_scatter")
"""Those that add up what the ranks give; the others move it as it is."""

_ALIGNED_BYTES = 16
"""Parts are whole multiples of this, as in nccl-tests: NCCL copies 16 bytes at a time, and takes longer where a part
begins in between. Source: AllGatherGetCollByteCount, ``(count/nranks) & -(16/eltSize)``."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The tensors of one rank. All numbers but ``itemsize`` (bytes) and ``ranks`` count elements.

    Attributes:
        part: what one rank has of the whole, where it is divided among the ranks; else all of it.
        sent, received: length of the tensor that a rank gives, and of that which it gets.
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
        """What the tensors take together on one rank."""
        return self.itemsize * (self.sent if self.in_place else self.sent + self.received)


def shape_of(collective: str, payload_bytes: int, *, itemsize: int, ranks: int) -> Shape:
    """Divide a payload among the ranks.

    What does not divide evenly is rounded down to parts of whole 16 bytes, and a part is one element at least. So a
    few bytes among many ranks become more than was asked for, where nccl-tests would move nothing.

    Args:
        collective: one of COLLECTIVES.
        payload_bytes: the size, a positive multiple of ``itemsize``.
        itemsize: bytes of an element.
        ranks: how many take part.

    Raises:
        ValueError: a send_recv has one rank only, which has nobody to send to.
    """
    whole = payload_bytes // itemsize
    if collective == "send_recv" and ranks < 2:
        raise ValueError("a send_recv needs 2 ranks and more: one alone has nobody to send to")
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
