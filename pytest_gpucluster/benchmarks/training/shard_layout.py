"""Which part of each weight a rank of FSDP2 holds, and whether a sharded model is laid out so."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from pytest_gpucluster.benchmarks.training.decoder import Decoder
from pytest_gpucluster.benchmarks.training.step import LARGEST_NORM, Clip

_BESIDE_NORM = 1e-6
"""torch.nn.utils.clip_grad_norm_ divides by the norm and so much."""


def part_of(whole: torch.Tensor, *, ranks: int, rank: int) -> torch.Tensor:
    """Return the rows of a weight that a rank holds: as torch.chunk cuts the first dimension, and none past its end.

    Source: pytorch, torch/distributed/fsdp/_fully_shard/_fsdp_param.py, which shards dimension 0 so; what it allocates
    beyond that for its collectives is no part of the weight.

    >>> [len(part_of(torch.zeros(5), ranks=4, rank=rank)) for rank in range(4)]
    [2, 2, 1, 0]
    """
    rows = -(-whole.shape[0] // ranks)
    return whole[min(rank * rows, whole.shape[0]) : (rank + 1) * rows]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank holds of a tensor: all of it, if it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes that this rank holds of some tensors."""
    return sum(local(tensor).nbytes for tensor in tensors)


def layout_defect(model: Decoder, whole: Decoder, *, ranks: int, rank: int) -> str:
    """Say what is wrong with how a decoder is sharded: "" if nothing is.

    Args:
        model: sharded, or not quite.
        whole: the same decoder as one process has it; on the meta device it costs nothing.
        ranks, rank: among which the weights are to be divided, and this one.
    """
    blocks = {f"blocks.{index}": block for index, block in enumerate(model.blocks)}
    left_out = [name for name, module in ({"the root": model} | blocks).items() if not isinstance(module, FSDPModule)]
    if left_out:
        return (
            f"has {len(left_out)} of {len(blocks) + 1} modules that fully_shard was not called for: "
            f"{', '.join(left_out[:4])}. Their weights are gathered all at once, or stay whole"
        )
    for (name, weight), its in zip(model.named_parameters(), whole.parameters(), strict=True):
        due = part_of(its, ranks=ranks, rank=rank)
        held = local(weight)
        if not isinstance(weight, DTensor) or held.shape != due.shape:
            return (
                f"holds {tuple(held.shape)} of {name}, which is {tuple(its.shape)}, and its part of 1/{ranks} is "
                f"{tuple(due.shape)}. fully_shard has not divided it"
            )
    return ""


def clip_shards(group: dist.ProcessGroup, device: torch.device) -> Clip:
    """Make the clipping of gradients that are divided over a group, wherever the parts are.

    torch.nn.utils.clip_grad_norm_ would sum over the ranks where the parts are, and on the CPU NCCL cannot.

    Args:
        group: all ranks of which together hold each weight once.
        device: on which the group communicates.
    """

    def clip(model: nn.Module) -> torch.Tensor:
        parts = [local(weight.grad) for weight in model.parameters() if weight.grad is not None]
        squares = [part.double().square().sum().to(device) for part in parts]
        total = torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64, device=device)
        dist.all_reduce(total, group=group)
        norm = total.sqrt().float()
        factor = (LARGEST_NORM / (norm + _BESIDE_NORM)).clamp(max=1.0)
        for part in parts:
            part.mul_(factor.to(part.device))
        return norm

    return clip
