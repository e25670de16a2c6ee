"""Whether all ranks together train as one process would: the same data, gradients and weights."""

from __future__ import annotations

import torch
import torch.distributed as dist

from pytest_gpucluster.benchmarks.memory_budget import releases_memory
from pytest_gpucluster.benchmarks.training.data import share, share_defects
from pytest_gpucluster.benchmarks.training.model import Geometry, make_decoder
from pytest_gpucluster.benchmarks.training.parity import COMPONENTS, Components, Parity, RanksAgainstOne
from pytest_gpucluster.benchmarks.training.step import Training
from pytest_gpucluster.device.products import deterministic, numerics
from pytest_gpucluster.metrics.time_budget import VERIFYING, counted


@releases_memory(cycles=True)
def check_data_parallel(
    group: dist.ProcessGroup,
    device: torch.device,
    geometry: Geometry,
    *,
    rank: int,
    world_size: int,
    batch: int,
    steps: int,
    precision: str = "fp32",
    components: Components | None = None,
) -> Parity:
    """Train on all ranks with DistributedDataParallel, and on each rank also as one process would.

    Collective: every rank of the group must call this, with the same sizes.

    Each step is compared part by part (``parity``). After each step the ranks exchange the fingerprints of their
    weights, with the moments, and of the rows that they have read. So all ranks see a defect at the same time, and stop
    together; the ranks at fault raise. To decide which of two ranks has the wrong weights, each rank repeats its
    optimizer's step on a copy: that must give the same bits.

    Args:
        group: the ranks that take part: all launched ones.
        device: where this rank trains.
        geometry: of the decoder.
        rank, world_size: from the launcher.
        batch: rows of each rank in a step.
        steps: at most; they end with the first defect.
        precision: one of ``step.PRECISIONS``, of all ranks and of the reference process.
        components: of the training; by default ``COMPONENTS`` of this module.

    Raises:
        WrongResult: on the rank at fault, or on every rank where none can be identified: the group has other ranks than
            the launcher, rows are shared or missing, a loss is not finite, weights differ between ranks, or do not
            change.
        EnvironmentBroken: too little memory is free.
    """
    check = RanksAgainstOne(
        group, device, geometry, batch=batch, steps=steps, is_sharded=False, components=components or COMPONENTS
    )

    def together(used: Components) -> Training:
        replica = used.replicate(used.make(geometry, device, seed=0), device, group)
        return Training(replica, device, precision=precision, parts=used.step)

    with counted(VERIFYING), numerics("highest"), deterministic():
        _check_ranks(check, rank, world_size)
        if not check.defects:
            _check_shares(check)
        if not check.defects:
            check.require_memory("training")
            check.compare_starts()
        alone = Training(make_decoder(geometry, device, seed=0), device, precision=precision)
        parity = check.train(together, alone, "")
        check.raise_defect()
        return parity


def _check_ranks(check: RanksAgainstOne, rank: int, world_size: int) -> None:
    for place, [launched, count] in enumerate(check.ranks.gather([rank, world_size])):
        if [launched, count] != [place, check.count]:
            check.defects[place] = (
                f"is rank {launched:.0f} of {count:.0f} to its launcher, and rank {place} of {check.count} "
                "in the group. Check RANK and WORLD_SIZE of its launcher"
            )


def _check_shares(check: RanksAgainstOne) -> None:
    mine = share(check.data, rank=check.rank, world_size=check.count, seed=0, make=check.components.sampler)
    # Pickled: a wrong sampler may return any number of rows.
    check.defects |= share_defects(check.ranks.gather_objects(mine), check.expected, rows=len(check.data))
