"""One call of each collective but the all_reduce, through torch: ``call(sent, received, group)``.

On a GPU each of them starts the work on the current stream, or makes that stream wait for it, and does not hold the
host. Collective: every rank of the group must call the same, with tensors of the same sizes and dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist

from pytest_gpucluster.benchmarks.moved_payload import ROOT, source_of

Call = Callable[[torch.Tensor, torch.Tensor, dist.ProcessGroup], object]
"""``call(sent, received, group)``: carry out one collective. Of those in place both tensors are the same."""

# torch 2.13 calls them so, and warns of their names before.
_gather_into: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_gather(sent: torch.Tensor, received: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Put all ranks' ``sent`` behind each other into ``received``."""
    _gather_into(received, sent, group=group)


def reduce_scatter(sent: torch.Tensor, received: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Sum up all ranks' ``sent``, and put this rank's part of it into ``received``."""
    _reduce_scatter(received, sent, op=dist.ReduceOp.SUM, group=group)


def all_to_all(sent: torch.Tensor, received: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Give each rank its part of ``sent``, and put what each rank gives to this one into ``received``."""
    dist.all_to_all_single(received, sent, group=group)


def broadcast(sent: torch.Tensor, received: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Replace ``received`` by what the group's first rank has in it. ``sent`` is the same tensor."""
    dist.broadcast(received, group=group, group_src=ROOT)


def send_recv(sent: torch.Tensor, received: torch.Tensor, group: dist.ProcessGroup) -> None:
    """Send ``sent`` to the next rank, and put what the one before sends into ``received``, both at once."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, sent, group=group, group_peer=(rank + 1) % ranks),
            dist.P2POp(dist.irecv, received, group=group, group_peer=source_of(rank, ranks)),
        ]
    )
    for work in works:
        work.wait()


MOVES: Mapping[str, Call] = MappingProxyType(
    {
        "all_gather": all_gather,
        "reduce_scatter": reduce_scatter,
        "all_to_all": all_to_all,
        "broadcast": broadcast,
        "send_recv": send_recv,
    }
)
"""Name -> one call of it."""

_LAUNCHES_OF_SEND_RECV = 4
"""As many launches of one kernel as the host's time for it is reckoned: torch makes an object for each operation."""

_RANKS_OF_A_LAUNCH = 8
"""In an all_to_all NCCL prepares a send and a receive for each rank: so many ranks are reckoned as one more launch."""


def launches(collective: str, ranks: int) -> int:
    """Return how many launches of a kernel one call is reckoned as, for the clock to let the host get ahead.

    >>> launches("all_reduce", 8), launches("send_recv", 8), launches("all_to_all", 64)
    (1, 4, 9)
    """
    if collective == "send_recv":
        return _LAUNCHES_OF_SEND_RECV
    return 1 + ranks // _RANKS_OF_A_LAUNCH if collective == "all_to_all" else 1
