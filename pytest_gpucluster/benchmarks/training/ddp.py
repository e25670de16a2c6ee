"""Whether all ranks together train as one process would: the same data, gradients and weights."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from pytest_gpucluster.benchmarks.group import Ranks
from pytest_gpucluster.benchmarks.memory_budget import releases_memory, require_free
from pytest_gpucluster.benchmarks.training.data import MakeSampler, PackedTokens, share, share_defects
from pytest_gpucluster.benchmarks.training.fingerprint import (
    NOT_MADE_ALIKE,
    NOT_REDUCED,
    distance,
    fingerprint,
    gradients_of,
    relative,
    repeat_defect,
    unchanged_weights,
    weight_defects,
    weights_of,
)
from pytest_gpucluster.benchmarks.training.model import Decoder, Geometry, make_decoder
from pytest_gpucluster.benchmarks.training.step import PARTS, Parts, Training
from pytest_gpucluster.benchmarks.training.step_check import needed_bytes
from pytest_gpucluster.device.products import numerics
from pytest_gpucluster.errors import WrongResult
from pytest_gpucluster.metrics.time_budget import VERIFYING, counted

Read = Callable[[PackedTokens, Sequence[int]], torch.Tensor]
"""Return rows of a data set: int64, rows x (positions + 1)."""

Replicate = Callable[[nn.Module, torch.device, dist.ProcessGroup], nn.Module]
"""Make a model one of many replicas."""


def read_rows(data: PackedTokens, rows: Sequence[int]) -> torch.Tensor:
    """Read rows through torch's DataLoader, as a training does."""
    [batch] = DataLoader(data, batch_size=len(rows), sampler=rows)
    tensor: torch.Tensor = batch
    return tensor


def replicate(model: nn.Module, device: torch.device, group: dist.ProcessGroup) -> nn.Module:
    """Wrap a model in DistributedDataParallel: its gradients are then the mean of all ranks'."""
    device_ids = None if device.index is None else [device.index]
    # The buffers depend on the geometry alone, so they need no exchange. torch 2.13 has another name for the option.
    known = inspect.signature(DistributedDataParallel).parameters
    buffers: dict[str, Any] = {
        next(name for name in ("forward_sync_buffers", "broadcast_buffers") if name in known): False
    }
    return DistributedDataParallel(model, device_ids=device_ids, process_group=group, **buffers)


@dataclass(frozen=True, kw_only=True)
class Components:
    """The replaceable parts of a training on many ranks: tests inject a faulty one."""

    make: Callable[..., Decoder] = make_decoder
    sampler: MakeSampler = DistributedSampler
    read: Read = read_rows
    replicate: Replicate = replicate
    step: Parts = PARTS


COMPONENTS = Components()


@dataclass(frozen=True, kw_only=True)
class DataParallel:
    """The result: the largest differences over all steps, as ratios.

    Attributes:
        loss_error: of this rank's loss from that of one process with this rank's rows.
        gradient_error: of the gradients from those of one process with all ranks' rows: of their norm before clipping,
            or their distance, whichever is larger.
        losses: of this rank.
        steps: number of steps of all ranks.
        global_batch: rows of a step, of all ranks together.
    """

    loss_error: float
    gradient_error: float
    losses: tuple[float, ...]
    steps: int
    global_batch: int


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
) -> DataParallel:
    """Train on all ranks with DistributedDataParallel, and on each rank also as one process would.

    Collective: every rank of the group must call this, with the same sizes.

    The reference process takes the same steps with the rows of all ranks, one rank's after the other's. After each step
    the ranks exchange the fingerprints of their weights and of the rows that they have read, and their losses. So all
    ranks see a defect at the same time, and stop together; the ranks at fault raise. To decide which of two ranks has
    the wrong weights, each rank repeats its optimizer's step on the reference: that must give the same bits.

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
        ValueError: an argument is out of its range.
    """
    if batch < 1 or steps < 1:
        raise ValueError(f"batch and steps must be at least 1, not {batch} and {steps}")
    with counted(VERIFYING), numerics("highest"):
        check = _Check(group, device, geometry, batch, steps, precision, components or COMPONENTS)
        return check.run(rank, world_size)


@dataclass(eq=False)
class _Check:
    _group: dist.ProcessGroup
    _device: torch.device
    _geometry: Geometry
    _batch: int
    _steps: int
    _precision: str
    _components: Components

    def __post_init__(self) -> None:
        self._ranks, self._rank = Ranks(self._group, self._device), dist.get_rank(self._group)
        # Not a multiple of the ranks, so that padding is needed.
        rows = self._ranks.count * self._batch * self._steps - (self._ranks.count > 1)
        self._data = PackedTokens(rows=rows, sequence=self._geometry.sequence, vocab=self._geometry.vocab, seed=0)
        self._defects: dict[int, str] = {}
        self._losses: list[float] = []
        self._loss_errors: list[float] = []
        self._gradient_errors: list[float] = []

    def run(self, rank: int, world_size: int) -> DataParallel:
        self._check_ranks(rank, world_size)
        expected = self._check_shares() if not self._defects else []
        if not self._defects:
            self._train([of_rank[0] for of_rank in expected])
        if self._rank in self._defects:
            raise WrongResult(f"{self._ranks.name(self._rank)} {self._defects[self._rank]}")
        return DataParallel(
            # No comparison is no agreement. It never decides alone: then another rank raises.
            loss_error=max(self._loss_errors, default=math.nan),
            gradient_error=max(self._gradient_errors, default=math.nan),
            losses=tuple(self._losses),
            steps=len(self._losses),
            global_batch=self._ranks.count * self._batch,
        )

    def _check_ranks(self, rank: int, world_size: int) -> None:
        for place, [launched, count] in enumerate(self._ranks.gather([rank, world_size])):
            if [launched, count] != [place, self._ranks.count]:
                self._defects[place] = (
                    f"is rank {launched:.0f} of {count:.0f} to its launcher, and rank {place} of {self._ranks.count} "
                    "in the group. Check RANK and WORLD_SIZE of its launcher"
                )

    def _check_shares(self) -> list[list[list[int]]]:
        count = self._ranks.count
        expected = [share(self._data, rank=rank, world_size=count, seed=0) for rank in range(count)]
        mine = share(self._data, rank=self._rank, world_size=count, seed=0, make=self._components.sampler)
        # Padded: all must send the same number of values, and a wrong sampler may return any number of rows.
        longest = int(max(most for [most] in self._ranks.gather([max(map(len, mine))])))
        sent = self._ranks.gather([float(row) for rows in mine for row in rows + [-1] * (longest - len(rows))])
        shares = [
            [[int(row) for row in numbers[at : at + longest] if row >= 0] for at in range(0, len(numbers), longest)]
            for numbers in sent
        ]
        self._defects |= share_defects(shares, expected, rows=len(self._data))
        return expected

    def _train(self, shares: Sequence[Sequence[int]]) -> None:
        require_free(
            self._device,
            needed_bytes(self._geometry, self._batch),
            f"training {self._geometry.parameters / 1e6:.3g}M parameters and comparing them",
            instead="choose a smaller one, such as --gpucluster-workload training.width=256",
        )
        model = self._components.make(self._geometry, self._device, seed=0)
        start = weights_of(model)
        self._compare_weights([fingerprint(model.parameters())] * 2, "before the first step")
        if self._defects:
            return  # DistributedDataParallel would send rank 0's weights to all, and hide the difference
        replica = self._components.replicate(model, self._device, self._group)
        training = Training(replica, self._device, precision=self._precision, parts=self._components.step)
        reference = make_decoder(self._geometry, self._device, seed=0)
        alone = Training(reference, self._device, precision=self._precision)
        for step in range(self._steps):
            self._step(step, training, alone, shares)
            if self._defects:
                return
        still = unchanged_weights(model, start)
        if still:
            self._defects[self._rank] = (
                f"has {len(still)} of {len(list(model.parameters()))} weight tensors that have not changed in "
                f"{self._steps} steps: {', '.join(still[:8])}. The optimizer must change all of them"
            )

    def _step(self, step: int, training: Training, alone: Training, shares: Sequence[Sequence[int]]) -> None:
        at = slice(step * self._batch, (step + 1) * self._batch)
        due = [torch.stack([self._data[row] for row in rows[at]]) for rows in shares]
        rows = self._components.read(self._data, shares[self._rank][at]).to(self._device)

        reference = alone.backward([rows_of_rank.to(self._device) for rows_of_rank in due])
        wanted = gradients_of(alone.model)
        result = training.backward([rows])
        gradients = gradients_of(training.model)
        # It takes the step with the gradients of all ranks: the next one begins with the same weights, bit by bit.
        repeat(training, alone)
        training.update()

        loss = float(result.losses.mean())
        self._losses.append(loss)
        self._loss_errors.append(relative(loss, float(reference.losses[self._rank])))
        self._gradient_errors.append(
            max(
                relative(float(result.gradient_norm), float(reference.gradient_norm)),
                distance(gradients, wanted),
            )
        )
        losses = [its for [its] in self._ranks.gather([loss])]
        self._defects |= row_defects(self._ranks, rows, due, losses, f"in step {step + 1}")
        if not self._defects:
            weights = [fingerprint(one.model.parameters()) for one in (training, alone)]
            self._compare_weights(weights, f"after step {step + 1}")

    def _compare_weights(self, weights: list[int], when: str) -> None:
        """Find the ranks whose weights are not those of the others.

        Args:
            weights: the fingerprint of this rank's, and of the reference, on which the optimizer's step was repeated.
            when: for the message.
        """
        found, repeated = zip(*self._ranks.gather_fingerprints(*weights), strict=True)
        for rank, (mine, again) in enumerate(zip(found, repeated, strict=True)):
            if defect := repeat_defect(mine, again, f"weights {when}"):
                self._defects[rank] = defect
        if not self._defects:
            self._defects = weight_defects(found, when, NOT_REDUCED if self._losses else NOT_MADE_ALIKE)


def repeat(training: Training, copy: Training) -> None:
    """Take the optimizer's step that the training is about to take on a copy."""
    for weight, its in zip(training.model.parameters(), copy.model.parameters(), strict=True):
        its.grad = None if weight.grad is None else weight.grad.clone()
    copy.optimizer.step()


def row_defects(
    ranks: Ranks, rows: torch.Tensor, expected: Sequence[torch.Tensor], losses: Sequence[float], where: str
) -> dict[int, str]:
    """Describe, by rank, the defects of the rows that the ranks have read in a step, and of their losses.

    Collective: every rank of the group must call this.

    Args:
        ranks: of the group.
        rows: that this rank has read.
        expected: the rows of each rank.
        losses: of each rank.
        where: the step, for the message.
    """
    due, defects = [fingerprint([one]) for one in expected], {}
    for rank, [read] in enumerate(ranks.gather_fingerprints(fingerprint([rows]))):
        if read != due[rank]:
            whose = f"those of {ranks.name(due.index(read))}" if read in due else "no rank's"
            defects[rank] = f"has read other rows {where} than its share: {whose}. Check how it reads its data"
        elif not math.isfinite(losses[rank]):
            defects[rank] = f"has a loss of {losses[rank]} {where}, and it must be finite"
    return defects
