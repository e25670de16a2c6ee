"""The decoder sharded by FSDP2: which rank holds which part of each weight, and how much memory that takes.

Each rank of a mesh keeps an equal part of every weight. The layout can be checked, and the memory of a rank is measured
by the number of ranks that share the model.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from pytest_gpucluster.benchmarks.memory_budget import memory_returned, require_free
from pytest_gpucluster.benchmarks.training.data import PackedTokens
from pytest_gpucluster.benchmarks.training.model import Decoder, Geometry, fill, on_meta
from pytest_gpucluster.benchmarks.training.step import LARGEST_NORM, Clip, Training
from pytest_gpucluster.benchmarks.training.step_check import needed_bytes
from pytest_gpucluster.metrics.time_budget import MEASURING, counted

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


STEPS = 2
"""The first one makes the moments; so from the second on all is there that there ever is."""


@dataclass(frozen=True, kw_only=True)
class Held:
    """What a rank holds in training.

    Attributes:
        ranks: that share the model.
        state_bytes: weights, gradients and both moments between two steps.
        peak_bytes: the most that torch had allocated at a time, activations and gathered weights included; None where
            torch does not count, as on cpu.
    """

    ranks: int
    state_bytes: int
    peak_bytes: int | None


def held_memory(
    group: dist.ProcessGroup, device: torch.device, geometry: Geometry, *, batch: int, seed: int = 0
) -> Held:
    """Take a few steps in bf16 with the model sharded over a group, and tell what this rank held of memory.

    Collective: every rank of the group must call this, with the same sizes.

    Args:
        group: the ranks that share the model; one rank is enough.
        device: where this rank trains.
        geometry: of the decoder.
        batch: rows of each rank in a step.
        seed: of weights and data.

    Raises: EnvironmentBroken if too little memory is free.
    """
    require_free(
        device,
        # That is of two models with all they need; one is left, as if one rank held all of it.
        needed_bytes(geometry, batch),
        f"training {geometry.parameters / 1e6:.3g}M parameters",
        instead="choose a smaller one, such as --gpucluster-workload fsdp.width=256",
    )
    try:
        with counted(MEASURING), memory_returned(circles=True):
            return _held(group, device, geometry, batch, seed)
    finally:
        # A traceback that is kept keeps this frame, and a gloo group that outlives its end aborts the process.
        del group


def _held(group: dist.ProcessGroup, device: torch.device, geometry: Geometry, batch: int, seed: int) -> Held:
    before = _counted_from(device)
    rank = dist.get_rank(group)
    data = PackedTokens(
        rows=batch * dist.get_world_size(group), sequence=geometry.sequence, vocab=geometry.vocab, seed=seed
    )
    rows = torch.stack([data[row] for row in range(rank * batch, (rank + 1) * batch)]).to(device)
    training = Training(make_sharded(geometry, mesh_of(group, device), device, seed=seed), device, precision="own")
    for _ in range(STEPS):
        training.step([rows])
    weights = list(training.model.parameters())
    moments = [
        moment for weight in weights for name, moment in training.optimizer.state[weight].items() if name != "step"
    ]
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    peak = None if before is None else int(torch.cuda.max_memory_allocated(device)) - before
    return Held(
        ranks=dist.get_world_size(group), state_bytes=bytes_of([*weights, *moments, *gradients]), peak_bytes=peak
    )


def _counted_from(device: torch.device) -> int | None:
    """Let torch count the most memory from now on; return what is in use by now, or None where torch does not count."""
    if device.type != "cuda":
        return None
    torch.cuda.reset_peak_memory_stats(device)
    return int(torch.cuda.memory_allocated(device))
