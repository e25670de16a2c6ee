"""The decoder, sharded over the ranks of a mesh by FSDP2: each rank keeps an equal part of every weight."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from pytest_gpucluster.benchmarks.training.decoder import Decoder, Geometry, fill, on_meta

# Inputs are not cast: the rotary angles stay fp32, and the tokens are no floats.
POLICIES = {
    "fp32": MixedPrecisionPolicy(cast_forward_inputs=False),
    "bf16": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False),
}
"""bf16: weights are gathered and multiplied in bf16, gradients are summed over the ranks in fp32; what each rank keeps
of the weights, and the optimizer's moments, are fp32. Source: pytorch/torchtitan, which shards Llama so."""


def mesh_of(group: dist.ProcessGroup, device: torch.device) -> DeviceMesh:
    """Return the mesh of one dimension that has the ranks of a group, in their order. It makes no new group."""
    return DeviceMesh.from_group(group, device.type)


def shard(
    model: Decoder,
    mesh: DeviceMesh,
    *,
    precision: str = "bf16",
    cpu_offload: bool = False,
    reshard_after_forward: bool = True,
) -> Decoder:
    """Shard each block of a decoder, then what is left of it: embedding, last norm and head. Done in place.

    Collective: every rank of the mesh must call this. FSDP2 sends no weights at first: each rank keeps its part of the
    weights that it has itself, so all must have the same ones, or none yet (on the meta device).

    Recomputing and compiling of blocks, if wanted, come before this.

    Args:
        model: fp32 weights; on the meta device, or made the same on every rank.
        mesh: of one dimension; one rank is enough.
        precision: one of ``POLICIES``.
        cpu_offload: keep weights, gradients and the optimizer's moments in the host's memory. Weights travel to the
            device for each block.
        reshard_after_forward: throw a block's whole weights away after forward, and gather them again for backward.
            What is outside of the blocks is needed again at once, and kept in any case.

    Returns: the model itself, whose forward gathers the weights now.

    Raises: ValueError if there is no such precision.
    """
    if precision not in POLICIES:
        raise ValueError(f"precision is one of {', '.join(POLICIES)}, not {precision!r}")
    # Pinned memory needs a GPU to pin it for.
    offload = CPUOffloadPolicy(pin_memory=mesh.device_type == "cuda") if cpu_offload else OffloadPolicy()
    for block in model.blocks:
        fully_shard(
            block,
            mesh=mesh,
            mp_policy=POLICIES[precision],
            offload_policy=offload,
            reshard_after_forward=reshard_after_forward,
        )
    fully_shard(model, mesh=mesh, mp_policy=POLICIES[precision], offload_policy=offload, reshard_after_forward=False)
    return model


def make_sharded(geometry: Geometry, mesh: DeviceMesh, device: torch.device, *, seed: int) -> Decoder:
    """Make a decoder of which no rank ever holds more than its part, in bf16 with fp32 sums.

    Collective: every rank of the mesh must call this. The weights follow from seed and number of ranks: other ones than
    those of ``make_decoder``.
    """
    return allocate(shard(on_meta(geometry), mesh), device, seed=seed, rank=mesh.get_local_rank())


def allocate(model: Decoder, device: torch.device, *, seed: int, rank: int) -> Decoder:
    """Give a sharded decoder on the meta device memory, and its weights values that this rank draws on the device."""
    model.to_empty(device=device)
    # One stream of numbers for each rank, or all parts of a weight would be the same.
    fill(model, torch.Generator(device).manual_seed((seed << 20) + rank))
    return model


def is_sharded(model: torch.nn.Module) -> bool:
    """Tell whether :func:`shard` has been called with this model."""
    return isinstance(model, FSDPModule)
