"""How much memory a rank needs to train, by the number of ranks that share the model."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from pytest_gpucluster.benchmarks.footprint import memory_returned, require_free
from pytest_gpucluster.benchmarks.training.decoder import Geometry
from pytest_gpucluster.benchmarks.training.packed_tokens import PackedTokens
from pytest_gpucluster.benchmarks.training.shard_layout import bytes_of
from pytest_gpucluster.benchmarks.training.sharding import make_sharded, mesh_of
from pytest_gpucluster.benchmarks.training.step import Training
from pytest_gpucluster.benchmarks.training.step_check import needed_bytes
from pytest_gpucluster.metrics.time_budget import MEASURING, counted

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
