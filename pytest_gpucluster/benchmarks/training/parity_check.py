"""Whether all ranks together train as one process would: as replicas of one model, or each with a part of it.

Replicas are those of DistributedDataParallel; parts are those of FSDP2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

from pytest_gpucluster.benchmarks.group import Ranks
from pytest_gpucluster.benchmarks.memory_budget import releases_memory, require_free
from pytest_gpucluster.benchmarks.training import sharding
from pytest_gpucluster.benchmarks.training.data import PackedTokens, share, share_defects
from pytest_gpucluster.benchmarks.training.fingerprint import (
    NOT_MADE_ALIKE,
    NOT_REDUCED,
    TAKE_OUT,
    fingerprint,
    state_fingerprint,
    weight_defects,
)
from pytest_gpucluster.benchmarks.training.model import Decoder, Geometry, make_decoder, on_meta
from pytest_gpucluster.benchmarks.training.parity import Parity, Share, StepComparison
from pytest_gpucluster.benchmarks.training.sharding import bytes_of, layout_defect, local, mesh_of, part_of, shard
from pytest_gpucluster.benchmarks.training.step import (
    EPSILON,
    LEARNING_RATE,
    PARTS,
    Training,
    adamw,
    replicate,
)
from pytest_gpucluster.benchmarks.training.step_check import needed_bytes
from pytest_gpucluster.benchmarks.training.throughput_setup import Strategy
from pytest_gpucluster.device.products import deterministic, numerics
from pytest_gpucluster.errors import WrongResult
from pytest_gpucluster.metrics.time_budget import VERIFYING, counted

_COPIED_BYTES = 20
"""For each weight, besides two models in training: weights and gradients to compare with."""


def read_rows(data: PackedTokens, rows: Sequence[int]) -> torch.Tensor:
    """Read rows through torch's DataLoader, as a training does: int64, rows x (positions + 1)."""
    [batch] = DataLoader(data, batch_size=len(rows), sampler=rows)
    tensor: torch.Tensor = batch
    return tensor


@releases_memory(cycles=True)
def compare_ranks(
    group: dist.ProcessGroup,
    device: torch.device,
    geometry: Geometry,
    *,
    strategy: Strategy,
    precision: str,
    batch: int,
    steps: int,
    alone: dist.ProcessGroup | None = None,
) -> Parity:
    """Train a decoder on all ranks together, and on each rank also as one process would.

    Collective: every rank of the group must call this, with the same sizes.

    Each step is compared part by part (``parity``). After each step all ranks see whether there is a defect, and stop
    together; the ranks at fault raise. To decide which of two ranks has the wrong weights, each rank repeats its
    optimizer's step on a copy: that must give the same bits. Before the first step the ranks compare their initial
    weights, for FSDP2 broadcasts none, and DistributedDataParallel would hide a difference.

    With ddp the ranks exchange the fingerprints of their weights and moments after each step, and the rows of a rank
    must be its share of the epoch. With fsdp every weight must be divided into equal parts, block by block; and as
    there are no replicas to compare, that in fp32 is repeated, and must give the same bits on every rank after every
    step, with torch's deterministic algorithms.

    Args:
        group: the ranks that take part: all launched ones.
        device: where this rank trains.
        geometry: of the decoder.
        strategy: ddp: each rank has the whole model. fsdp: each rank has a part of it.
        precision: ``fp32`` or ``bf16``, of all ranks and of the reference process.
        batch: rows of each rank in a step.
        steps: of each training; they end with the first defect.
        alone: the group of this rank alone, for fsdp.

    Raises:
        WrongResult: on the rank at fault, or on every rank where none can be identified: rows are not this rank's,
            shared or missing; a loss is not finite; weights differ between ranks or in the repetition, are not sharded,
            do not change, or change by themselves.
        EnvironmentBroken: too little memory is free.
    """
    with counted(VERIFYING), numerics("highest"), deterministic():
        return _Comparison(group, device, geometry, strategy, precision, batch, steps, alone).run()


class _Comparison:
    """The trainings of one check. ``_defects`` are by rank; only this rank's own need its text."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        geometry: Geometry,
        strategy: Strategy,
        precision: str,
        batch: int,
        steps: int,
        alone: dist.ProcessGroup | None,
    ) -> None:
        self._group, self._device, self._geometry, self._alone = group, device, geometry, alone
        self._is_sharded, self._precision = strategy == "fsdp", precision
        self._ranks, self._batch, self._steps = Ranks(group, device), batch, steps
        self._count, self._rank = self._ranks.count, self._ranks.index
        # Replicas read a number of rows that is no multiple of the ranks, so that padding is needed.
        rows = self._count * batch * steps - (not self._is_sharded and self._count > 1)
        self._data = PackedTokens(rows=rows, sequence=geometry.sequence, vocab=geometry.vocab, seed=0)
        self._expected = [share(self._data, rank=rank, world_size=self._count, seed=0) for rank in range(self._count)]
        self._defects: dict[int, str] = {}

    def run(self) -> Parity:
        require_free(
            self._device,
            needed_bytes(self._geometry, self._batch) + _COPIED_BYTES * self._geometry.parameters,
            f"training {self._geometry.parameters / 1e6:.3g}M parameters and comparing them",
            instead="choose a smaller one, such as --gpucluster-workload "
            f"{'fsdp' if self._is_sharded else 'training'}.width=256",
        )
        if not self._is_sharded:
            mine = share(self._data, rank=self._rank, world_size=self._count, seed=0, make=DistributedSampler)
            # Pickled: a wrong sampler may return any number of rows.
            self._defects |= share_defects(self._ranks.gather_objects(mine), self._expected, rows=len(self._data))
        if not self._defects:
            found = self._ranks.gather_fingerprints(fingerprint(self._make().parameters()))
            self._defects |= weight_defects([its for [its] in found], "before the first step", NOT_MADE_ALIKE)
        parity = Parity()
        if not self._defects:
            self._train(parity)
        if not self._defects and self._is_sharded and self._precision == "fp32":
            self._repeat(parity)
        if self._rank in self._defects:
            raise WrongResult(f"{self._ranks.name(self._rank)} {self._defects[self._rank]}")
        return parity

    def _make(self) -> Decoder:
        return make_decoder(self._geometry, self._device, seed=0)

    def _together(self) -> Training:
        device = self._device
        if self._is_sharded:
            model = shard(self._make(), mesh_of(self._group, device), precision=self._precision)
            return Training(model, device, precision="own", parts=PARTS)
        replica = replicate(self._make(), device, self._group)
        return Training(replica, device, precision=self._precision, parts=PARTS)

    def _of_one(self) -> Training:
        """Make that of one process, with the same initial weights."""
        model = make_decoder(self._geometry, self._device, seed=0)
        if not self._is_sharded or self._precision == "fp32":
            return Training(model, self._device, precision=self._precision)
        assert self._alone is not None
        # The same precision for each value; autocast would choose others.
        model = sharding.shard(model, mesh_of(self._alone, self._device), precision=self._precision)
        return Training(model, self._device, precision="own")

    def _train(self, parity: Parity) -> None:
        training, reference = self._together(), self._of_one()
        self._share_defect(self._start_defect(training, reference))
        if self._defects:
            return
        comparison = StepComparison(
            self._ranks,
            training,
            reference,
            self._device,
            lambda weights: adamw(weights, LEARNING_RATE, epsilon=EPSILON),
        )
        for step in range(self._steps):
            self._step(training, reference, comparison, parity, step)
            if self._defects:
                return
        still = [name.removeprefix("module.") for name in comparison.unmoved()]  # of DDP's wrapper
        self._share_defect(
            f"has {len(still)} of {len(list(training.model.parameters()))} weight tensors that have not changed in "
            f"{self._steps} steps in {self._precision}: {', '.join(still[:8])}. The optimizer must change all of them"
            if still
            else ""
        )
        if self._is_sharded:
            parts = (self._part(weight) for weight in on_meta(self._geometry).parameters())
            part, held = bytes_of(parts), bytes_of([*training.model.parameters(), *training.moments()])
            parity.share = held / (3 * part) if part else 1.0  # AdamW keeps two moments of each weight

    def _part(self, whole: torch.Tensor) -> torch.Tensor:
        return part_of(whole, ranks=self._count, rank=self._rank)

    def _start_defect(self, training: Training, reference: Training) -> str:
        """Describe what is wrong in the sharding, and of which weights this rank has something else than its part."""
        if not self._is_sharded:
            return ""
        assert isinstance(training.model, Decoder)
        if wrong := layout_defect(training.model, on_meta(self._geometry), ranks=self._count, rank=self._rank):
            return wrong
        weights = zip(training.model.named_parameters(), reference.model.parameters(), strict=True)
        other = [
            name
            for (name, weight), whole in weights
            if not torch.equal(local(weight.detach()), self._part(local(whole.detach())))
        ]
        return (
            f"has other weights before the first step than its part of those that were made: {', '.join(other[:8])}. "
            f"Its memory or its arithmetic is wrong: {TAKE_OUT}"
            if other
            else ""
        )

    def _due_rows(self, rank: int, step: int) -> torch.Tensor:
        return torch.stack([self._data[row] for row in self._rows(rank, step)])

    def _rows(self, rank: int, step: int) -> list[int]:
        return self._expected[rank][0][step * self._batch : (step + 1) * self._batch]

    def _read(self, step: int) -> torch.Tensor:
        return read_rows(self._data, self._rows(self._rank, step)).to(self._device)

    def _step(
        self, training: Training, reference: Training, comparison: StepComparison, parity: Parity, step: int
    ) -> None:
        where, rows = f"in step {step + 1}", self._read(step)
        unchanged = not step or parity.states[-1] == comparison.state()
        finite = comparison.step(
            lambda: _share(training, rows),
            lambda rank: _share(reference, self._due_rows(rank, step).to(self._device)),
            parity,
        )
        parity.states.append(comparison.state())
        due = [fingerprint([self._due_rows(rank, step)]) for rank in range(self._count)]
        found = self._ranks.gather_fingerprints(
            fingerprint([rows]), int(unchanged), parity.states[-1], comparison.copy_state()
        )
        for rank, (read, *_) in enumerate(found):
            if read != due[rank]:
                whose = f"those of {self._ranks.name(due.index(read))}" if read in due else "no rank's"
                self._defects[rank] = (
                    f"has read other rows {where} than its share: {whose}. Check how it reads its data"
                )
            elif not finite[rank]:
                loss = parity.losses[-1]  # of this rank: only its own defect needs its text
                what = "gradients that are not finite" if math.isfinite(loss) else f"a loss of {loss}"
                self._defects[rank] = f"has {what} {where}, before any exchange, and all must be finite"
        if self._defects:
            return
        for rank, (_, kept, state, repeated) in enumerate(found):
            if not kept:
                self._defects[rank] = (
                    f"has other weights or moments {where} than it had after the step before. Its memory has changed "
                    f"by itself: {TAKE_OUT}"
                )
            elif state != repeated:
                self._defects[rank] = (
                    f"has other weights or moments {where} than when it repeats the optimizer's step: fingerprint "
                    f"{state:016x}, expected {repeated:016x}. Its memory or its arithmetic is wrong: {TAKE_OUT}"
                )
        if not self._defects and not self._is_sharded:
            self._defects |= weight_defects([state for _, _, state, _ in found], where, NOT_REDUCED)

    def _repeat(self, before: Parity) -> None:
        """Train again: each step must leave the same bits."""
        training = self._together()
        for step, state in enumerate(before.states):
            training.step([self._read(step)])
            same = state_fingerprint(training.model.parameters(), training.optimizer) == state
            of_ranks = [bool(its) for [its] in self._ranks.gather([same])]
            on_all = not any(of_ranks) and len(of_ranks) > 1
            for rank, its in enumerate(of_ranks):
                if not its:
                    self._defects[rank] = (
                        f"has other weights or moments after step {step + 1} than in the replay from the same seed. "
                    ) + (
                        "All ranks have: an algorithm that is not deterministic, or a wrong sum; repeat "
                        "test_training_step and -k nccl"
                        if on_all
                        else f"Its memory, its arithmetic or what it received is wrong: {TAKE_OUT}"
                    )
            if self._defects:
                return

    def _share_defect(self, defect: str) -> None:
        for rank, [has] in enumerate(self._ranks.gather([float(bool(defect))])):
            if has:
                self._defects[rank] = defect


def _share(training: Training, rows: torch.Tensor) -> Share:
    return float(training.accumulate([rows]).mean()), rows.shape[0] * (rows.shape[1] - 1)
