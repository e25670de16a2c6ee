"""The decoder sharded by FSDP2: each rank of a mesh keeps an equal part of every weight. The layout can be checked."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from pytest_gpucluster.benchmarks.training.model import Decoder, fill

Model = TypeVar("Model", bound=nn.Module)

# Inputs are not cast: the rotary angles stay fp32, and the tokens are no floats.
POLICIES = {
    "fp32": MixedPrecisionPolicy(cast_forward_inputs=False),
    "bf16": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False),
}
"""bf16: weights are gathered and multiplied in bf16, gradients are summed over the ranks in fp32; each rank's part of
the weights, and the optimizer's moments, are fp32. Source: pytorch/torchtitan, which shards Llama so."""


def mesh_of(group: dist.ProcessGroup, device: torch.device) -> DeviceMesh:
    """Return the mesh of one dimension with the ranks of a group, in their order. It makes no new group."""
    return DeviceMesh.from_group(group, device.type)


def shard(model: Model, mesh: DeviceMesh, *, precision: str = "bf16") -> Model:
    """Shard each block of a decoder, then the root: embedding, last norm and head. Done in place. A block's whole
    weights are freed after forward; the root's are needed again at once, and kept.

    Collective: every rank of the mesh must call this. FSDP2 broadcasts no weights: each rank keeps its part of its own
    weights, so all must have the same ones, or none yet (on the meta device).

    Recomputing and compiling of blocks, if wanted, come before this.

    Args:
        model: a decoder, or another with ``blocks``; on the meta device, or made the same on every rank.
        mesh: of one dimension; one rank is enough.
        precision: one of ``POLICIES``.

    Returns: the model itself, whose forward gathers the weights now.
    """
    for block in cast(Any, model).blocks:
        fully_shard(block, mesh=mesh, mp_policy=POLICIES[precision], reshard_after_forward=True)
    fully_shard(model, mesh=mesh, mp_policy=POLICIES[precision], reshard_after_forward=False)
    return model


def allocate(model: Decoder, device: torch.device, *, seed: int, rank: int) -> Decoder:
    """Allocate a sharded decoder from the meta device, and draw its weights on the device.

    No rank ever holds more than its part. The weights depend on seed and number of ranks: they differ from those of
    ``make_decoder``.
    """
    model.to_empty(device=device)
    # One stream of numbers for each rank, or all parts of a weight would be the same.
    fill(model, torch.Generator(device).manual_seed((seed << 20) + rank))
    return model


CLIP_EPSILON = 1e-6
"""torch.nn.utils.clip_grad_norm_ divides by the norm plus this."""


def part_of(whole: torch.Tensor, *, ranks: int, rank: int) -> torch.Tensor:
    """Return a rank's rows of a weight: as torch.chunk divides the first dimension, and none past its end.

    Source: pytorch, torch/distributed/fsdp/_fully_shard/_fsdp_param.py, which shards dimension 0 so; the padding that
    it allocates for its collectives is no part of the weight.

    >>> [len(part_of(torch.zeros(5), ranks=4, rank=rank)) for rank in range(4)]
    [2, 2, 1, 0]
    """
    rows = -(-whole.shape[0] // ranks)
    return whole[min(rank * rows, whole.shape[0]) : (rank + 1) * rows]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor: all of it, if it is not sharded."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of this rank's parts of some tensors."""
    return sum(local(tensor).nbytes for tensor in tensors)


def layout_defect(model: Decoder, whole: Decoder, *, ranks: int, rank: int) -> str:
    """Describe the defect in a decoder's sharding: "" if there is none.

    Args:
        model: sharded, or partly.
        whole: the same decoder, not sharded; on the meta device it needs no memory.
        ranks, rank: the ranks among which the weights are divided, and this one.
    """
    blocks = {f"blocks.{index}": block for index, block in enumerate(model.blocks)}
    not_sharded = [
        name for name, module in ({"the root": model} | blocks).items() if not isinstance(module, FSDPModule)
    ]
    if not_sharded:
        return (
            f"has {len(not_sharded)} of {len(blocks) + 1} modules that fully_shard was not called for: "
            f"{', '.join(not_sharded[:4])}. Their weights are gathered all at once, or stay whole"
        )
    for (name, weight), its in zip(model.named_parameters(), whole.parameters(), strict=True):
        due = part_of(its, ranks=ranks, rank=rank)
        part = local(weight)
        if not isinstance(weight, DTensor) or part.shape != due.shape:
            return (
                f"holds {tuple(part.shape)} of {name}, which is {tuple(its.shape)}, and its part of 1/{ranks} is "
                f"{tuple(due.shape)}. fully_shard has not divided it"
            )
    return ""


def watch_gradients(model: nn.Module, act: Callable[[str, torch.Tensor], object]) -> None:
    """Call ``act(name, gradient)`` with each gradient of this rank alone, whole, before the ranks exchange it.

    Collective, if the model is sharded: its weights are gathered once.
    """
    watched = set()

    def watch(weight: torch.Tensor, name: str) -> None:
        def hook(gradient: torch.Tensor) -> None:  # what it returned would replace the gradient
            act(name, gradient)

        weight.register_hook(hook)  # type: ignore[no-untyped-call]  # torch leaves it untyped

    for prefix, module in model.named_modules():
        if isinstance(module, FSDPModule):
            module.unshard()  # the whole weights stay the same objects when they are gathered again
        elif module is not model:
            continue
        for name, weight in module.named_parameters(prefix):
            if weight.requires_grad and not isinstance(weight, DTensor) and name not in watched:
                watched.add(name)
                watch(weight, name)
        if isinstance(module, FSDPModule):
            module.reshard()
