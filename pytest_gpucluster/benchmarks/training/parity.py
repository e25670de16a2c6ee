"""N ranks compared with one: the same training by all ranks of a group together and, on each rank, by one process."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

from pytest_gpucluster.benchmarks.group import Ranks
from pytest_gpucluster.benchmarks.memory_budget import require_free
from pytest_gpucluster.benchmarks.training.data import MakeSampler, PackedTokens, share
from pytest_gpucluster.benchmarks.training.fingerprint import (
    NOT_MADE_ALIKE,
    NOT_REDUCED,
    TAKE_OUT,
    fingerprint,
    relative,
    weight_defects,
)
from pytest_gpucluster.benchmarks.training.model import Decoder, Geometry, make_decoder
from pytest_gpucluster.benchmarks.training.sharding import local, part_of, shard
from pytest_gpucluster.benchmarks.training.step import PARTS, Parts, Replicate, Training, replicate
from pytest_gpucluster.errors import WrongResult
from pytest_gpucluster.metrics.stats import largest


def read_rows(data: PackedTokens, rows: Sequence[int]) -> torch.Tensor:
    """Read rows through torch's DataLoader, as a training does: int64, rows x (positions + 1)."""
    [batch] = DataLoader(data, batch_size=len(rows), sampler=rows)
    tensor: torch.Tensor = batch
    return tensor


@dataclass(frozen=True, kw_only=True)
class Components:
    """The replaceable parts of a training on many ranks: tests inject a faulty one."""

    make: Callable[..., Decoder] = make_decoder
    sampler: MakeSampler = DistributedSampler
    read: Callable[[PackedTokens, Sequence[int]], torch.Tensor] = read_rows
    replicate: Replicate = replicate
    shard: Callable[..., Decoder] = shard
    step: Parts = PARTS


COMPONENTS = Components()


@dataclass(kw_only=True)
class Parity:
    """The steps of a training by all ranks, and their differences from one process's as ratios: an item per step.

    Attributes:
        losses: of this rank.
        states: fingerprints of this rank's weights and their moments.
        loss_errors: of this rank's loss from that of one process with this rank's rows.
        gradient_errors: of the gradients from those of one process with all ranks' rows: of their norm before clipping,
            or their distance, whichever is larger.
        global_batch: rows of a step, of all ranks together.
    """

    losses: list[float] = field(default_factory=list)
    states: list[int] = field(default_factory=list)
    loss_errors: list[float] = field(default_factory=list)
    gradient_errors: list[float] = field(default_factory=list)
    global_batch: int

    @property
    def loss(self) -> float:
        """The largest error of a loss. NaN without a comparison, which never decides: then another rank raises."""
        return largest(self.loss_errors)

    @property
    def gradient(self) -> float:
        """The largest error of the gradients."""
        return largest(self.gradient_errors)


@dataclass(frozen=True, kw_only=True)
class ReferenceStep:
    """A step of the one process.

    Attributes:
        losses: of each rank's rows.
        gradient_norm: of all rows, before clipping.
        gradients: clipped; this rank's part of each weight, on the device.
    """

    losses: list[float]
    gradient_norm: float
    gradients: list[torch.Tensor]


class RanksAgainstOne:
    """Trains on all ranks, and finds which of them are at fault. After each step all ranks see whether there is a
    defect, and stop together.

    Collective: every rank of the group must call each method, in the same order.

    Args:
        group: the ranks that train together.
        device: where this rank trains.
        geometry: of the decoder.
        batch: rows of each rank in a step.
        steps: of each training; they end with the first defect.
        is_sharded: each rank has a part of each weight. Else each has all of them, and the ranks' are compared; and the
            number of rows is no multiple of the ranks, so that padding is needed.
        components: of the training.

    Attributes:
        defects: by rank; only this rank's own need its text.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        geometry: Geometry,
        *,
        batch: int,
        steps: int,
        is_sharded: bool,
        components: Components,
    ) -> None:
        self.group, self.device, self.geometry, self.components = group, device, geometry, components
        self.ranks, self.rank = Ranks(group, device), dist.get_rank(group)
        self._batch, self._steps, self._is_sharded, self.count = batch, steps, is_sharded, self.ranks.count
        rows = self.count * batch * steps - (not is_sharded and self.count > 1)
        self.data = PackedTokens(rows=rows, sequence=geometry.sequence, vocab=geometry.vocab, seed=0)
        self.expected = [share(self.data, rank=rank, world_size=self.count, seed=0) for rank in range(self.count)]
        self.defects: dict[int, str] = {}

    def raise_defect(self) -> None:
        """Raise on the ranks at fault. Raises: WrongResult."""
        if self.rank in self.defects:
            raise WrongResult(f"{self.ranks.name(self.rank)} {self.defects[self.rank]}")

    def require_memory(self, needed_bytes: int, section: str) -> None:
        """Check that this rank has enough memory. Raises: EnvironmentBroken."""
        require_free(
            self.device,
            needed_bytes,
            f"training {self.geometry.parameters / 1e6:.3g}M parameters and comparing them",
            instead=f"choose a smaller one, such as --gpucluster-workload {section}.width=256",
        )

    def compare_starts(self) -> None:
        """Compare the initial weights. FSDP2 broadcasts none, so the model would be a mix of different ones; and
        DistributedDataParallel would send rank 0's to all, and hide the difference."""
        mine = fingerprint(self.components.make(self.geometry, self.device, seed=0).parameters())
        found = [value for [value] in self.ranks.gather_fingerprints(mine)]
        self.defects |= weight_defects(found, "before the first step", NOT_MADE_ALIKE)

    def reference_steps(self, training: Training, *, updates: bool = True) -> Iterator[ReferenceStep]:
        """Take all steps as one process does, with the rows of all ranks, one rank's after the other's.

        Args:
            training: of the one process.
            updates: take the optimizer's steps. Else it is the copy on which those of all ranks are repeated.
        """
        part = {"ranks": self.count, "rank": self.rank} if self._is_sharded else {"ranks": 1, "rank": 0}
        for step in range(self._steps):
            result = training.backward([self.due_rows(rank, step).to(self.device) for rank in range(self.count)])
            yield ReferenceStep(
                losses=result.losses.tolist(),
                gradient_norm=float(result.gradient_norm),
                gradients=[part_of(_gradient(weight), **part).clone() for weight in training.model.parameters()],
            )
            if updates:
                training.update()

    def train(
        self,
        make: Callable[[Components], Training],
        due: Iterable[ReferenceStep],
        where: str,
        *,
        copy: Callable[[], Training] | None = None,
        before: Parity | None = None,
        defect_of: Callable[[Training], str] = lambda training: "",
        at_end: Callable[[Training], object] = lambda training: None,
    ) -> Parity:
        """Train, and compare each step with the one process's. Does nothing after a defect.

        Args:
            make: a training of all ranks together.
            due: the steps of the one process.
            where: for messages.
            copy: makes another training with the same weights, on which the optimizer's steps are repeated.
            before: an earlier training, each step of which must have left the same bits.
            defect_of: describes the defect of the training before its first step.
            at_end: called after the last step.
        """
        parity = Parity(global_batch=self.count * self._batch)
        if self.defects:
            return parity
        training = make(self.components)
        self._share_defect(defect_of(training))
        if self.defects:
            return parity
        repeated = copy() if copy is not None else None
        names, weights = zip(*training.model.named_parameters(), strict=True)
        start = [local(weight.detach()).clone() for weight in weights]
        # A rank may have nothing of a weight, or only rows of the embedding whose tokens did not occur.
        must_move = [False] * len(names)
        for step, reference in enumerate(due, start=1):
            must_move = [due or bool(one.any()) for due, one in zip(must_move, reference.gradients, strict=True)]
            self._step(training, repeated, parity, reference, f"in step {step}{where}")
            if before is not None and not self.defects:
                self._compare_replay(parity, before, f"after step {step}")
            if self.defects:
                return parity
        still = [
            name.removeprefix("module.")  # the name of the model inside DistributedDataParallel
            for name, weight, old, due_here in zip(names, weights, start, must_move, strict=True)
            if due_here and torch.equal(local(weight.detach()), old)
        ]
        self._share_defect(
            f"has {len(still)} of {len(names)} weight tensors that have not changed in {self._steps} steps{where}: "
            f"{', '.join(still[:8])}. The optimizer must change all of them"
            if still
            else ""
        )
        at_end(training)
        return parity

    def due_rows(self, rank: int, step: int) -> torch.Tensor:
        """Return a rank's rows of a step."""
        return torch.stack([self.data[row] for row in self._rows(rank, step)])

    def _rows(self, rank: int, step: int) -> list[int]:
        return self.expected[rank][0][step * self._batch : (step + 1) * self._batch]

    def _step(self, training: Training, copy: Training | None, parity: Parity, due: ReferenceStep, where: str) -> None:
        step = len(parity.losses)
        rows = self.components.read(self.data, self._rows(self.rank, step)).to(self.device)
        unchanged = not step or parity.states[-1] == _state_fingerprint(training)
        result = training.backward([rows])
        pairs = zip(map(_gradient, training.model.parameters()), due.gradients, strict=True)
        squares = [
            [float(one.double().square().sum()) for one in (found.to(wanted.device) - wanted, wanted)]
            for found, wanted in pairs
        ]
        if copy is not None:
            repeat(training, copy)
        training.update()

        loss, state = float(result.losses.mean()), _state_fingerprint(training)
        parity.losses.append(loss)
        parity.states.append(state)
        parity.loss_errors.append(relative(loss, due.losses[self.rank]))
        of_ranks = self.ranks.gather([loss, float(unchanged), *map(sum, zip(*squares, strict=True))])
        parts = [squares for _, _, *squares in (of_ranks if self._is_sharded else [of_ranks[self.rank]])]
        off, length = (math.sqrt(sum(column)) for column in zip(*parts, strict=True))
        norm_error = relative(float(result.gradient_norm), due.gradient_norm)
        parity.gradient_errors.append(largest((norm_error, off / length if length else math.inf)))
        self._find_wrong_rows(rows, step, [loss for loss, *_ in of_ranks], where)
        states = self.ranks.gather_fingerprints(state, state if copy is None else _state_fingerprint(copy))
        for rank, (found, repeated) in enumerate(states):
            if rank in self.defects:
                continue
            if not of_ranks[rank][1]:
                self.defects[rank] = (
                    f"has other weights or moments {where} than it had after the step before. Its memory has changed "
                    f"by itself: {TAKE_OUT}"
                )
            elif found != repeated:
                self.defects[rank] = (
                    f"has other weights or moments {where} than when it repeats the optimizer's step: fingerprint "
                    f"{found:016x}, expected {repeated:016x}. Its memory or its arithmetic is wrong: {TAKE_OUT}"
                )
        if not self.defects and not self._is_sharded:
            self.defects |= weight_defects([found for found, _ in states], where, NOT_REDUCED)

    def _find_wrong_rows(self, rows: torch.Tensor, step: int, losses: Sequence[float], where: str) -> None:
        due = [fingerprint([self.due_rows(rank, step)]) for rank in range(self.count)]
        for rank, [read] in enumerate(self.ranks.gather_fingerprints(fingerprint([rows]))):
            if read != due[rank]:
                whose = f"those of {self.ranks.name(due.index(read))}" if read in due else "no rank's"
                self.defects[rank] = f"has read other rows {where} than its share: {whose}. Check how it reads its data"
            elif not math.isfinite(losses[rank]):
                self.defects[rank] = f"has a loss of {losses[rank]} {where}, and it must be finite"

    def _compare_replay(self, parity: Parity, before: Parity, when: str) -> None:
        same = parity.states[-1] == before.states[len(parity.states) - 1]
        of_ranks = [bool(its) for [its] in self.ranks.gather([same])]
        on_all = not any(of_ranks) and len(of_ranks) > 1
        for rank, its in enumerate(of_ranks):
            if not its:
                self.defects[rank] = f"has other weights or moments {when} than in the replay from the same seed. " + (
                    "All ranks have: an algorithm that is not deterministic, or a wrong sum; repeat test_training_step "
                    "and -k nccl"
                    if on_all
                    else f"Its memory, its arithmetic or what it received is wrong: {TAKE_OUT}"
                )

    def _share_defect(self, defect: str) -> None:
        """Exchange which ranks have a defect of their own."""
        for rank, [has] in enumerate(self.ranks.gather([float(bool(defect))])):
            if has:
                self.defects[rank] = defect


def repeat(training: Training, copy: Training) -> None:
    """Take the optimizer's step that the training is about to take on a copy."""
    for weight, its in zip(training.model.parameters(), copy.model.parameters(), strict=True):
        its.grad = None if weight.grad is None else weight.grad.clone()
    copy.optimizer.step()


def _gradient(weight: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a weight's gradient; a missing one counts as 0."""
    return local(torch.zeros_like(weight) if weight.grad is None else weight.grad)


def _state_fingerprint(training: Training) -> int:
    """Return the fingerprint of this rank's part of the weights and of their moments.

    The moments show a gradient that was off by a bit; the weights would not: AdamW's first step depends on little more
    than the sign.
    """
    state = training.optimizer.state
    weights = list(training.model.parameters())
    moments = (state[weight][name] for weight in weights if weight in state for name in ("exp_avg", "exp_avg_sq"))
    return fingerprint(local(tensor.detach()) for tensor in (*weights, *moments))
