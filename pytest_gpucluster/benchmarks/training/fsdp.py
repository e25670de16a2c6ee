"""Whether the ranks that share one model by FSDP2 hold their parts of it, and train as one process would."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from pytest_gpucluster.benchmarks.memory_budget import releases_memory
from pytest_gpucluster.benchmarks.training.model import Decoder, Geometry, make_decoder, on_meta
from pytest_gpucluster.benchmarks.training.parity import (
    COMPONENTS,
    Components,
    Parity,
    RanksAgainstOne,
)
from pytest_gpucluster.benchmarks.training.sharding import (
    bytes_of,
    layout_defect,
    mesh_of,
    part_of,
    shard,
)
from pytest_gpucluster.benchmarks.training.step import Training
from pytest_gpucluster.device.products import deterministic, numerics
from pytest_gpucluster.metrics.stats import largest
from pytest_gpucluster.metrics.time_budget import VERIFYING, counted


@dataclass(frozen=True, kw_only=True)
class FullySharded:
    """The result.

    Attributes:
        fp32: steps in fp32, compared with one process's in fp32.
        bf16: steps in bf16, compared with one process's with the same precisions.
        share: bytes of weights and moments on this rank, over those of 1/N of each weight.
    """

    fp32: Parity
    bf16: Parity
    share: float


@releases_memory(cycles=True)
def check_fully_sharded(
    group: dist.ProcessGroup,
    device: torch.device,
    geometry: Geometry,
    *,
    alone: dist.ProcessGroup,
    batch: int,
    steps: int,
    components: Components | None = None,
) -> FullySharded:
    """Train a decoder that is sharded over all ranks of a group, and on each rank also as one process would.

    Collective: every rank of the group must call this, with the same sizes.

    FSDP2 broadcasts no weights, so before the first step the ranks compare their initial ones. Then every weight must
    be divided into equal parts, block by block. It is trained in fp32, twice, and in bf16. There are no replicas to
    compare. Instead each rank repeats its optimizer's step on a copy, and both trainings in fp32 must give the same
    bits on every rank after every step, with torch's deterministic algorithms. After each step all ranks see whether
    there is a defect, and stop together; the ranks at fault raise.

    Args:
        group: the ranks that share the model.
        device: where this rank trains.
        geometry: of the decoder.
        alone: the group of this rank alone.
        batch: rows of each rank in a step.
        steps: of each training; they end with the first defect.
        components: of the training; by default ``COMPONENTS`` of this module.

    Raises:
        WrongResult: on the rank at fault, or on every rank where none can be identified: weights differ before the
            first step, are not sharded, do not change, change by themselves or differ in the replay; rows are not this
            rank's; a loss is not finite.
        EnvironmentBroken: too little memory is free.
    """
    check = RanksAgainstOne(
        group, device, geometry, batch=batch, steps=steps, is_sharded=True, components=components or COMPONENTS
    )
    shares: list[float] = []

    def sharded(used: Components, precision: str) -> Training:
        model = used.shard(used.make(geometry, device, seed=0), mesh_of(group, device), precision=precision)
        return Training(model, device, precision="own", parts=used.step)

    def of_one(precision: str) -> Training:
        model = make_decoder(geometry, device, seed=0)
        if precision != "fp32":
            # The same precision for each value; autocast would choose others.
            model = shard(model, mesh_of(alone, device), precision=precision)
        return Training(model, device, precision="own")

    def wrong_layout(where: str, training: Training) -> str:
        assert isinstance(training.model, Decoder)
        wrong = layout_defect(training.model, on_meta(geometry), ranks=check.count, rank=check.rank)
        return f"{wrong} ({where})" if wrong else ""

    def measure_share(training: Training) -> None:
        """Compare this rank's bytes of weights and moments with its part."""
        parts = (part_of(weight, ranks=check.count, rank=check.rank) for weight in on_meta(geometry).parameters())
        part, held = bytes_of(parts), bytes_of([*training.model.parameters(), *training.moments()])
        shares.append(held / (3 * part) if part else 1.0)  # AdamW keeps two moments of each weight

    def train(where: str, *, precision: str = "fp32", before: Parity | None = None) -> Parity:
        return check.train(
            lambda used: sharded(used, precision),
            of_one(precision) if before is None and not check.defects else None,
            f" {where}",
            before=before,
            defect_of=partial(wrong_layout, where),
            at_end=measure_share,
        )

    with counted(VERIFYING), numerics("highest"), deterministic():
        check.require_memory("fsdp")
        check.compare_starts()
        fp32 = train("in fp32")
        train("in the replay", before=fp32)
        bf16 = train("in bf16", precision="bf16")
        check.raise_defect()
        return FullySharded(fp32=fp32, bf16=bf16, share=largest(shares))
