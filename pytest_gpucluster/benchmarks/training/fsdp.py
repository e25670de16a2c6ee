"""Whether the ranks that share one model by FSDP2 hold their parts of it, and train as one process would."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist

from pytest_gpucluster.benchmarks.group import Ranks
from pytest_gpucluster.benchmarks.memory_budget import releases_memory, require_free
from pytest_gpucluster.benchmarks.training.data import PackedTokens, share
from pytest_gpucluster.benchmarks.training.ddp import Read, read_rows, repeat, replicate, row_defects
from pytest_gpucluster.benchmarks.training.fingerprint import (
    NOT_MADE_ALIKE,
    TAKE_OUT,
    fingerprint,
    relative,
    repeat_defect,
    weight_defects,
)
from pytest_gpucluster.benchmarks.training.model import Decoder, Geometry, make_decoder, on_meta
from pytest_gpucluster.benchmarks.training.sharding import (
    bytes_of,
    clip_shards,
    layout_defect,
    local,
    mesh_of,
    part_of,
    shard,
)
from pytest_gpucluster.benchmarks.training.step import PARTS, Parts, Training
from pytest_gpucluster.benchmarks.training.step_check import needed_bytes
from pytest_gpucluster.device.products import deterministic, numerics
from pytest_gpucluster.errors import WrongResult
from pytest_gpucluster.metrics.time_budget import VERIFYING, counted

Shard = Callable[..., Decoder]
"""``shard(model, mesh, precision=, cpu_offload=)``, as :func:`~.sharding.shard`."""


@dataclass(frozen=True, kw_only=True)
class Components:
    """The replaceable parts of a sharded training: tests inject a faulty one."""

    make: Callable[..., Decoder] = make_decoder
    read: Read = read_rows
    shard: Shard = shard
    step: Parts = PARTS


COMPONENTS = Components()


@dataclass(frozen=True, kw_only=True)
class Parity:
    """The difference of sharded steps from one process's: the largest over all steps, as ratios.

    Attributes:
        loss: of this rank's loss from that of the one process with this rank's rows.
        gradient: of the gradients from those of the one process with all ranks' rows: of their norm before clipping,
            or their distance, whichever is larger.
    """

    loss: float
    gradient: float


@dataclass(frozen=True, kw_only=True)
class FullySharded:
    """The result.

    Attributes:
        fp32, offloaded: steps in fp32, with weights and optimizer on the device and in the host's memory, compared with
            one process's in fp32.
        bf16: steps in bf16, compared with one process's with the same precisions.
        ddp_loss_error: of this rank's losses in fp32 from those of DistributedDataParallel on the same ranks, a ratio.
        share: bytes of weights and moments on this rank, over those of 1/N of each weight.
        losses: of this rank in fp32.
        steps: number of steps of all ranks.
        global_batch: rows of a step, of all ranks together.
    """

    fp32: Parity
    offloaded: Parity
    bf16: Parity
    ddp_loss_error: float
    share: float
    losses: tuple[float, ...]
    steps: int
    global_batch: int


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
    be divided into equal parts, block by block. It is trained in fp32, twice; in fp32 with the weights in the host's
    memory; and in bf16. There are no replicas to compare. Instead each rank repeats its optimizer's step on a copy, and
    both trainings in fp32 must give the same bits on every rank after every step, with torch's deterministic
    algorithms. After each step all ranks see whether there is a defect, and stop together; the ranks at fault raise.

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
        ValueError: an argument is out of its range.
    """
    if batch < 1 or steps < 1:
        raise ValueError(f"batch and steps must be at least 1, not {batch} and {steps}")
    with counted(VERIFYING), numerics("highest"), deterministic():
        return _Check(group, alone, device, geometry, batch, steps, components or COMPONENTS).run()


@dataclass(frozen=True, kw_only=True)
class _ReferenceStep:
    """A step of the reference process.

    Attributes:
        losses: of each rank's rows.
        gradient_norm: of all rows, before clipping.
        gradients: clipped; this rank's part of each weight. On the device.
    """

    losses: list[float]
    gradient_norm: float
    gradients: list[torch.Tensor]


@dataclass(kw_only=True)
class _TrainingSeries:
    """The steps of one training on this rank: an item per step in each list."""

    losses: list[float] = field(default_factory=list)
    fingerprints: list[int] = field(default_factory=list)
    loss_errors: list[float] = field(default_factory=list)
    gradient_errors: list[float] = field(default_factory=list)

    @property
    def parity(self) -> Parity:
        # No comparison is no agreement. It never decides alone: then another rank raises.
        return Parity(
            loss=max(self.loss_errors, default=math.nan), gradient=max(self.gradient_errors, default=math.nan)
        )


@dataclass(eq=False)
class _Check:
    _group: dist.ProcessGroup
    _alone: dist.ProcessGroup
    _device: torch.device
    _geometry: Geometry
    _batch: int
    _steps: int
    _components: Components

    def __post_init__(self) -> None:
        self._ranks, self._rank = Ranks(self._group, self._device), dist.get_rank(self._group)
        count, sizes = self._ranks.count, self._geometry
        rows = count * self._batch * self._steps
        self._data = PackedTokens(rows=rows, sequence=sizes.sequence, vocab=sizes.vocab, seed=0)
        self._shares = [share(self._data, rank=rank, world_size=count, seed=0)[0] for rank in range(count)]
        self._defects: dict[int, str] = {}
        self._share, self._ddp_loss_error = math.nan, math.nan

    def run(self) -> FullySharded:
        require_free(
            self._device,
            needed_bytes(self._geometry, self._batch),
            f"training {self._geometry.parameters / 1e6:.3g}M parameters and comparing them",
            instead="choose a smaller one, such as --gpucluster-workload fsdp.width=256",
        )
        self._compare_starts()
        due = [] if self._defects else self._reference_steps("fp32")
        trainings = [_TrainingSeries() for _ in range(4)]
        first, again, offloaded, bf16 = trainings
        self._train(first, due, "in fp32", repeated=True)
        self._train(again, due, "in the replay", before=first)
        self._train(offloaded, due, "in fp32 with cpu_offload", cpu_offload=True)
        self._replicate(first)
        del due
        self._train(bf16, [] if self._defects else self._reference_steps("bf16"), "in bf16", precision="bf16")
        if self._rank in self._defects:
            raise WrongResult(f"{self._ranks.name(self._rank)} {self._defects[self._rank]}")
        return FullySharded(
            fp32=first.parity,
            offloaded=offloaded.parity,
            bf16=bf16.parity,
            ddp_loss_error=self._ddp_loss_error,
            share=self._share,
            losses=tuple(first.losses),
            steps=len(first.losses),
            global_batch=self._ranks.count * self._batch,
        )

    def _compare_starts(self) -> None:
        """FSDP2 broadcasts no weights, so the model would be a mix of different ones."""
        mine = fingerprint(self._components.make(self._geometry, self._device, seed=0).parameters())
        found = [value for [value] in self._ranks.gather_fingerprints(mine)]
        self._defects = weight_defects(found, "before the first step", NOT_MADE_ALIKE)

    def _rows(self, rank: int, step: int) -> list[int]:
        return self._shares[rank][step * self._batch : (step + 1) * self._batch]

    def _reference_steps(self, precision: str) -> list[_ReferenceStep]:
        """Take all steps as one process would, with the rows of all ranks, one rank's after the other's."""
        model = make_decoder(self._geometry, self._device, seed=0)
        if precision != "fp32":
            # The same precision for each value; autocast would choose others.
            model = shard(model, mesh_of(self._alone, self._device), precision=precision)
        training = Training(model, self._device, precision="own")
        count, reference_steps = self._ranks.count, []
        for step in range(self._steps):
            rows = [self._due_rows(rank, step).to(self._device) for rank in range(count)]
            result = training.backward(rows)
            gradients = [
                part_of(local(_gradient(weight)), ranks=count, rank=self._rank).clone()
                for weight in training.model.parameters()
            ]
            training.update()
            losses = result.losses.tolist()
            reference_steps.append(
                _ReferenceStep(losses=losses, gradient_norm=float(result.gradient_norm), gradients=gradients)
            )
        return reference_steps

    def _due_rows(self, rank: int, step: int) -> torch.Tensor:
        return torch.stack([self._data[row] for row in self._rows(rank, step)])

    def _sharded_training(
        self, *, precision: str = "fp32", cpu_offload: bool = False, components: Components | None = None
    ) -> Training:
        used = components or self._components
        model = used.shard(
            used.make(self._geometry, self._device, seed=0),
            mesh_of(self._group, self._device),
            precision=precision,
            cpu_offload=cpu_offload,
        )
        parts = used.step
        if cpu_offload and parts.clip is PARTS.clip:
            parts = replace(parts, clip=clip_shards(self._group, self._device))
        return Training(model, self._device, precision="own", parts=parts)

    def _train(
        self,
        series: _TrainingSeries,
        due: Sequence[_ReferenceStep],
        where: str,
        *,
        precision: str = "fp32",
        cpu_offload: bool = False,
        repeated: bool = False,
        before: _TrainingSeries | None = None,
    ) -> None:
        """Train sharded, and compare each step with the one process's; with ``repeated`` with the same step on a copy,
        and with ``before`` with an earlier training. Does nothing after a defect."""
        if self._defects:
            return
        training = self._sharded_training(precision=precision, cpu_offload=cpu_offload)
        self._share_defect(self._layout_defect(training, where))
        if self._defects:
            return
        copy = self._sharded_training(components=Components()) if repeated else None
        start = [local(weight.detach()).clone() for weight in training.model.parameters()]
        for step in range(self._steps):
            self._step(training, copy, series, due[step], f"in step {step + 1} {where}")
            if before is not None and not self._defects:
                self._compare_replay(series, before, f"after step {step + 1}")
            if self._defects:
                return
        names, weights = zip(*training.model.named_parameters(), strict=True)
        # A rank may have nothing of a weight, or only rows of the embedding whose tokens did not occur.
        due_to_move = [any(bool(one.gradients[index].any()) for one in due) for index in range(len(names))]
        still = [
            name
            for name, weight, old, due_here in zip(names, weights, start, due_to_move, strict=True)
            if due_here and torch.equal(local(weight.detach()), old)
        ]
        self._share_defect(
            f"has {len(still)} of {len(names)} weight tensors whose part has not changed in {self._steps} steps "
            f"{where}: {', '.join(still[:8])}. The optimizer must change all of them"
            if still
            else ""
        )
        if repeated:
            self._measure_share(training)

    def _layout_defect(self, training: Training, where: str) -> str:
        model = training.model
        assert isinstance(model, Decoder)
        wrong = layout_defect(model, on_meta(self._geometry), ranks=self._ranks.count, rank=self._rank)
        return f"{wrong} ({where})" if wrong else ""

    def _measure_share(self, training: Training) -> None:
        """Compare this rank's bytes of weights and moments with its part."""
        part = bytes_of(
            part_of(weight, ranks=self._ranks.count, rank=self._rank) for weight in on_meta(self._geometry).parameters()
        )
        held = bytes_of([*training.model.parameters(), *training.moments()])
        self._share = held / (3 * part) if part else 1.0  # AdamW keeps two moments of each weight

    def _step(
        self, training: Training, copy: Training | None, series: _TrainingSeries, due: _ReferenceStep, where: str
    ) -> None:
        step, count = len(series.losses), self._ranks.count
        rows = self._components.read(self._data, self._rows(self._rank, step)).to(self._device)
        fingerprint_before = series.fingerprints[-1] if series.fingerprints else None
        fingerprint_now = fingerprint_before if fingerprint_before is None else _state_fingerprint(training)
        result = training.backward([rows])
        gradients = [local(_gradient(weight)) for weight in training.model.parameters()]
        squares = torch.tensor([[0.0, 0.0]] * len(gradients), dtype=torch.float64)
        for index, (found, wanted) in enumerate(zip(gradients, due.gradients, strict=True)):
            squares[index, 0] = (found.to(wanted.device) - wanted).double().square().sum()
            squares[index, 1] = wanted.double().square().sum()
        if copy is not None:
            repeat(training, copy)
        training.update()

        loss = float(result.losses.mean())
        series.losses.append(loss)
        series.fingerprints.append(_state_fingerprint(training))
        expected = series.fingerprints[-1] if copy is None else _state_fingerprint(copy)
        of_ranks = self._ranks.gather([loss, float(fingerprint_now == fingerprint_before), *squares.sum(0).tolist()])
        losses, unchanged, differences, lengths = zip(*of_ranks, strict=True)
        series.loss_errors.append(relative(loss, due.losses[self._rank]))
        off, length = math.sqrt(sum(differences)), math.sqrt(sum(lengths))
        series.gradient_errors.append(
            max(relative(float(result.gradient_norm), due.gradient_norm), off / length if length else math.inf)
        )
        due_rows = [self._due_rows(rank, step) for rank in range(count)]
        self._defects |= row_defects(self._ranks, rows, due_rows, losses, where)
        states = self._ranks.gather_fingerprints(series.fingerprints[-1], expected)
        for rank, (state, repeated) in enumerate(states):
            if rank in self._defects:
                continue
            if not unchanged[rank]:
                self._defects[rank] = (
                    f"has other weights or moments {where} than it had after the step before. Its memory has changed "
                    f"by itself: {TAKE_OUT}"
                )
            elif defect := repeat_defect(state, repeated, f"weights or moments {where}"):
                self._defects[rank] = defect

    def _compare_replay(self, series: _TrainingSeries, before: _TrainingSeries, when: str) -> None:
        same = series.fingerprints[-1] == before.fingerprints[len(series.fingerprints) - 1]
        of_ranks = [bool(its) for [its] in self._ranks.gather([same])]
        on_all = not any(of_ranks) and len(of_ranks) > 1
        for rank, its in enumerate(of_ranks):
            if not its:
                self._defects[rank] = f"has other weights or moments {when} than in the replay from the same seed. " + (
                    "All ranks have: an algorithm that is not deterministic, or a wrong sum; repeat test_training_step "
                    "and -k nccl"
                    if on_all
                    else f"Its memory, its arithmetic or what it received is wrong: {TAKE_OUT}"
                )

    def _replicate(self, sharded: _TrainingSeries) -> None:
        """Train the same by DistributedDataParallel, and compare the losses."""
        if self._defects:
            return
        made = make_decoder(self._geometry, self._device, seed=0)
        training = Training(replicate(made, self._device, self._group), self._device, precision="fp32")
        losses = [
            float(training.step([self._due_rows(self._rank, step).to(self._device)]).losses.mean())
            for step in range(self._steps)
        ]
        pairs = zip(sharded.losses, losses, strict=True)
        self._ddp_loss_error = max(relative(loss, reference) for loss, reference in pairs)

    def _share_defect(self, defect: str) -> None:
        """Exchange which ranks have a defect of their own."""
        for rank, [has] in enumerate(self._ranks.gather([float(bool(defect))])):
            if has:
                self._defects[rank] = defect


def _state_fingerprint(training: Training) -> int:
    """Return the fingerprint of this rank's part of the weights and of their moments.

    The moments show a gradient that was off by a bit; the weights would not: AdamW's first step depends on little more
    than the sign.
    """

    state = training.optimizer.state
    weights = list(training.model.parameters())
    moments = (state[weight][name] for weight in weights if weight in state for name in ("exp_avg", "exp_avg_sq"))
    return fingerprint(local(tensor.detach()) for tensor in (*weights, *moments))


def _gradient(weight: torch.Tensor) -> torch.Tensor:
    """Return a weight's gradient; a missing one counts as 0."""
    return torch.zeros_like(weight) if weight.grad is None else weight.grad
