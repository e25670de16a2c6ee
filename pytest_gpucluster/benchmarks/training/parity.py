"""N ranks compared with one: each part of a training step of all ranks with what one process computes in its place.

A rank's share of the step, before the exchange, is compared with that of the same rows computed by itself and by two
neighbours; the exchanged gradients with the mean of the shares; clipping and the optimizer's step with those of a copy.
Each part begins with what the part before it has really left, and each step with the weights that all ranks have. So an
error shows where it arises, on the rank that makes it, and neither on the others nor in later steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, DistributedSampler

from pytest_gpucluster.benchmarks.group import Ranks
from pytest_gpucluster.benchmarks.memory_budget import require_free
from pytest_gpucluster.benchmarks.training.data import MakeSampler, PackedTokens, share
from pytest_gpucluster.benchmarks.training.fingerprint import (
    NOT_MADE_ALIKE,
    NOT_REDUCED,
    SKETCH,
    TAKE_OUT,
    fingerprint,
    relative,
    sketch,
    weight_defects,
)
from pytest_gpucluster.benchmarks.training.model import Decoder, Geometry, make_decoder
from pytest_gpucluster.benchmarks.training.sharding import CLIP_EPSILON, local, part_of, shard
from pytest_gpucluster.benchmarks.training.step import (
    EPSILON,
    LARGEST_NORM,
    LEARNING_RATE,
    PARTS,
    Parts,
    Replicate,
    Training,
    adamw,
    replicate,
)
from pytest_gpucluster.benchmarks.training.step_check import needed_bytes
from pytest_gpucluster.errors import WrongResult
from pytest_gpucluster.metrics.stats import largest

_COPIED_BYTES = 20
"""For each weight, besides two models in training: weights and gradients to compare with."""

NEIGHBOURS = 2
"""Ranks that compute a rank's share besides itself: of three results the middle one is right if one rank is wrong."""


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


Share = tuple[float, int]
"""What a rank contributes to a step: its mean loss in nats, and the number of targets that it is of."""


@dataclass(kw_only=True)
class Parity:
    """The steps of a training by all ranks, and their differences from one process's as ratios: an item per step.

    Attributes:
        losses: of this rank's share.
        states: fingerprints of this rank's weights and their moments.
        finite: whether this rank's loss and gradients were, before the exchange.
        loss_errors: of the loss and the number of targets of this rank's share.
        gradient_errors: the largest of the distance of this rank's share of the gradients, of the exchanged ones from
            the mean of the shares, of the clipped ones from what they are clipped from, and of the norm.
        weight_errors: distance of this rank's weights from those of the optimizer's step on a copy, over the step.
        global_batch: rows of a step, of all ranks together.
    """

    losses: list[float] = field(default_factory=list)
    states: list[int] = field(default_factory=list)
    finite: list[bool] = field(default_factory=list)
    loss_errors: list[float] = field(default_factory=list)
    gradient_errors: list[float] = field(default_factory=list)
    weight_errors: list[float] = field(default_factory=list)
    global_batch: int

    @property
    def loss(self) -> float:
        """The largest error of a loss. NaN without a comparison, which never decides: then another rank raises."""
        return largest(self.loss_errors)

    @property
    def gradient(self) -> float:
        """The largest error of the gradients."""
        return largest(self.gradient_errors)

    @property
    def weight(self) -> float:
        """The largest error of an optimizer's step."""
        return largest(self.weight_errors)


class StepComparison:
    """Takes the steps of a training on all ranks, and compares each part of them.

    Collective: every rank must create it, and call :meth:`step`.

    Args:
        ranks: that train together.
        training: of all ranks: has a model, its optimizer, ``clip`` and ``update``, as ``step.Training`` does.
        reference: of one process, with the same weights in the same order; it is whole on each rank.
        device: where the ranks compute.
        optimizer: makes that of the copy.

    Attributes:
        must_move: of each weight, whether this rank's part of it has had a gradient.
    """

    def __init__(
        self,
        ranks: Ranks,
        training: Any,
        reference: Any,
        device: torch.device,
        optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
    ) -> None:
        self._ranks, self._training, self._reference, self._device = ranks, training, reference, device
        self._starts = _starts(training.model)
        weights = dict(training.model.named_parameters())
        self._is_sharded = any(isinstance(weight, DTensor) for weight in weights.values())
        part = {"ranks": ranks.count, "rank": ranks.index} if self._is_sharded else {"ranks": 1, "rank": 0}
        self._part = part
        trained = {id(weight) for settings in training.optimizer.param_groups for weight in settings["params"]}
        self._trained = {name: weight for name, weight in weights.items() if id(weight) in trained}
        self._others = dict(zip(weights, reference.model.parameters(), strict=True))
        self._copies = [nn.Parameter(local(weight.detach()).clone()) for weight in self._trained.values()]
        self._optimizer = optimizer(self._copies)
        self._start = {name: local(weight.detach()).clone() for name, weight in self._trained.items()}
        self.must_move = dict.fromkeys(weights, False)

    def step(
        self, run: Callable[[], Share], recompute: Callable[[int], Share], parity: Parity, *, rate: float | None = None
    ) -> list[bool]:
        """Take a step, and add its differences; return of each rank whether what it contributes is finite.

        Args:
            run: accumulates the gradients of this rank's share, and exchanges them.
            recompute: accumulates those of a rank's share on the reference.
            parity: what the differences are added to.
            rate: the learning rate of the optimizer's step; by default as it was.
        """
        count, index = self._ranks.count, self._ranks.index
        self._follow()
        votes = [self._vote(recompute, (index - back) % count) for back in range(min(count, 1 + NEIGHBOURS))]
        mine = self._sketched(self._training, run)
        reduced = [part.clone() for part in self._gradients()]
        norm = float(self._training.clip())
        before = [copy.detach().clone() for copy in self._copies]
        for copy, gradient in zip(self._copies, self._gradients(), strict=True):
            copy.grad = gradient.clone()
        clipped = [copy.grad for copy in self._copies]
        self._training.update()
        for settings in self._optimizer.param_groups:
            settings["lr"] = settings["lr"] if rate is None else rate
        self._optimizer.step()

        numbers = [_squares(reduced), *mine, *self._sketch_of_parts(reduced), *(one for vote in votes for one in vote)]
        of_ranks = self._ranks.gather(numbers)
        width = 2 + SKETCH
        shares = [row[1 : 1 + width] for row in of_ranks]
        finite = [all(map(math.isfinite, its)) for its in shares]
        at = [1 + width + SKETCH + vote * width for vote in range(len(votes))]
        due = _middle([of_ranks[(index + vote) % count][at[vote] : at[vote] + width] for vote in range(len(votes))])
        parity.losses.append(mine[0])
        parity.finite.append(finite[index])
        parity.loss_errors.append(largest(relative(*pair) for pair in zip(mine[:2], due[:2], strict=True)))
        errors = [_distance(mine[2:], due[2:])]
        if all(finite):  # else the exchanged gradients are those ranks' fault
            parts = of_ranks if self._is_sharded else [of_ranks[index]]
            exchanged = [
                sum(column) for column in zip(*(row[1 + width : 1 + width + SKETCH] for row in parts), strict=True)
            ]
            mean = [sum(column) / count for column in zip(*(its[2:] for its in shares), strict=True)]
            exact = math.sqrt(sum(row[0] for row in parts))
            factor = min(1.0, LARGEST_NORM / (exact + CLIP_EPSILON))
            errors += [
                _distance(exchanged, mean),
                _ratio((norm - exact) ** 2, exact**2),
                _ratio(_squares(reduced, clipped, factor=factor), factor**2 * _squares(reduced)),
            ]
        parity.gradient_errors.append(largest(errors))
        now = [local(weight.detach()) for weight in self._trained.values()]
        parity.weight_errors.append(_ratio(_squares(self._copies, now), _squares(before, self._copies)))
        return finite

    def copy_state(self) -> int:
        """Return the fingerprint of the copy after its step, as :meth:`state` does of the training."""
        return _state_fingerprint(self._copies, self._optimizer)

    def state(self) -> int:
        """Return the fingerprint of this rank's part of the trained weights and of their moments.

        The moments show a gradient that was off by a bit; the weights would not: AdamW's first step depends on little
        more than the sign.
        """
        return _state_fingerprint(list(self._trained.values()), self._training.optimizer)

    def has_moved(self, name: str) -> bool:
        """Return whether this rank's part of a weight has changed since the beginning."""
        return name in self._start and not torch.equal(local(self._trained[name].detach()), self._start[name])

    def _follow(self) -> None:
        """Give reference and copy the weights that the ranks have."""
        with torch.no_grad():
            for copy, (name, weight) in zip(self._copies, self._trained.items(), strict=True):
                copy.copy_(local(weight))
                local(self._others[name]).copy_(weight.full_tensor() if isinstance(weight, DTensor) else weight)

    def _vote(self, recompute: Callable[[int], Share], rank: int) -> list[float]:
        vote = self._sketched(self._reference, lambda: recompute(rank))
        for name, weight in self._others.items():
            if weight.grad is not None:
                self.must_move[name] |= bool(part_of(local(weight.grad), **self._part).any())
                weight.grad = None
        return vote

    def _sketched(self, training: Any, run: Callable[[], Share]) -> list[float]:
        """Return the loss of a share, its targets, and the sketch of its gradients."""
        with sketched(training.model, self._device) as sums:
            loss, targets = run()
        return [loss, float(targets), *sums.tolist()]

    def _gradients(self) -> list[torch.Tensor]:
        """Return this rank's part of each trained weight's gradient; a missing one counts as 0."""
        return [
            local(torch.zeros_like(weight) if weight.grad is None else weight.grad) for weight in self._trained.values()
        ]

    def _sketch_of_parts(self, parts: Sequence[torch.Tensor]) -> list[float]:
        total = torch.zeros(SKETCH, dtype=torch.float64)
        for (name, weight), part in zip(self._trained.items(), parts, strict=True):
            rows = -(-weight.shape[0] // self._part["ranks"])
            first = min(self._part["rank"] * rows, weight.shape[0])
            total += sketch(part, self._starts[name] + first * (weight.numel() // weight.shape[0])).cpu()
        found: list[float] = total.tolist()
        return found


@contextmanager
def sketched(model: nn.Module, device: torch.device) -> Iterator[torch.Tensor]:
    """Add up the sketches of the gradients of this rank alone, before the ranks exchange them: fp64.

    Args:
        model: wrapped for many ranks or not. Its weights are watched where they are used: a sharded one's are whole
            only there.
        device: of the sums.
    """
    starts = _starts(model)
    total = torch.zeros(SKETCH, dtype=torch.float64, device=device)
    watched: dict[int, torch.Tensor] = {}
    handles: list[Any] = []

    def watch(prefix: str, module: nn.Module) -> None:
        for name, weight in module.named_parameters(prefix, recurse=False):
            if weight.requires_grad and id(weight) not in watched and name in starts:
                watched[id(weight)] = weight

                def add(gradient: torch.Tensor, start: int = starts[name]) -> None:
                    total.add_(sketch(gradient, start))

                handles.append(weight.register_hook(add))  # type: ignore[no-untyped-call]  # torch leaves it untyped

    for prefix, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(lambda module, given, prefix=prefix: watch(prefix, module)))
    try:
        yield total
    finally:
        for handle in handles:
            handle.remove()


def _starts(model: nn.Module) -> dict[str, int]:
    starts, at = {}, 0
    for name, weight in model.named_parameters():
        starts[name] = at
        at += weight.numel()
    return starts


def _middle(votes: Sequence[Sequence[float]]) -> list[float]:
    """Return the middle one of some numbers each; of two that is their mean."""
    return [
        median(math.inf if math.isnan(number) else number for number in column) for column in zip(*votes, strict=True)
    ]


def _distance(found: Sequence[float], due: Sequence[float]) -> float:
    off = sum((one - other) ** 2 for one, other in zip(found, due, strict=True))
    return _ratio(off, sum(one * one for one in due))


def _ratio(off: float, length: float) -> float:
    """Return the ratio of two lengths from their squares."""
    return math.sqrt(off / length) if length else math.inf if off else 0.0


def _squares(
    parts: Sequence[torch.Tensor], others: Sequence[torch.Tensor | None] | None = None, *, factor: float = 1.0
) -> float:
    """Return the sum of the squares of some tensors, or of the difference of ``factor`` times them from others."""
    total = 0.0
    for number, part in enumerate(parts):
        value = part.detach().double()
        other = None if others is None else others[number]
        total += float((value if other is None else value * factor - other.detach().double()).square().sum())
    return total


def _state_fingerprint(weights: Sequence[torch.Tensor], optimizer: torch.optim.Optimizer) -> int:
    state = optimizer.state
    moments = (state[weight][name] for weight in weights if weight in state for name in ("exp_avg", "exp_avg_sq"))
    return fingerprint(local(tensor.detach()) for tensor in (*weights, *moments))


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

    def require_memory(self, section: str) -> None:
        """Check that this rank has enough memory. Raises: EnvironmentBroken."""
        require_free(
            self.device,
            needed_bytes(self.geometry, self._batch) + _COPIED_BYTES * self.geometry.parameters,
            f"training {self.geometry.parameters / 1e6:.3g}M parameters and comparing them",
            instead=f"choose a smaller one, such as --gpucluster-workload {section}.width=256",
        )

    def compare_starts(self) -> None:
        """Compare the initial weights. FSDP2 broadcasts none, so the model would be a mix of different ones; and
        DistributedDataParallel would send rank 0's to all, and hide the difference."""
        mine = fingerprint(self.components.make(self.geometry, self.device, seed=0).parameters())
        found = [value for [value] in self.ranks.gather_fingerprints(mine)]
        self.defects |= weight_defects(found, "before the first step", NOT_MADE_ALIKE)

    def train(
        self,
        make: Callable[[Components], Training],
        reference: Training | None,
        where: str,
        *,
        before: Parity | None = None,
        defect_of: Callable[[Training], str] = lambda training: "",
        at_end: Callable[[Training], object] = lambda training: None,
    ) -> Parity:
        """Train, and compare each step. Does nothing after a defect.

        Args:
            make: a training of all ranks together.
            reference: that of one process, with the same initial weights; None in a replay.
            where: for messages.
            before: an earlier training, each step of which must have left the same bits.
            defect_of: describes the defect of the training before its first step.
            at_end: called after the last step.
        """
        parity = Parity(global_batch=self.count * self._batch)
        if self.defects:
            return parity
        training = make(self.components)
        self._share_defect(defect_of(training) or self._other_start(training, reference, where))
        if self.defects:
            return parity
        comparison = StepComparison(
            self.ranks,
            training,
            reference or training,
            self.device,
            lambda weights: adamw(weights, LEARNING_RATE, epsilon=EPSILON),
        )
        for step in range(self._steps):
            in_step = f"in step {step + 1}{where}"
            if before is None:
                assert reference is not None
                self._step(training, reference, comparison, parity, in_step)
            else:
                training.step([self._read(step)])
                parity.states.append(comparison.state())
                self._compare_replay(parity, before, f"after step {step + 1}")
            if self.defects:
                return parity
        # A rank may have nothing of a weight, or only rows of the embedding whose tokens did not occur.
        due = [name for name, must_move in comparison.must_move.items() if must_move]
        still = [name.removeprefix("module.") for name in due if not comparison.has_moved(name)]  # of DDP's wrapper
        self._share_defect(
            f"has {len(still)} of {len(comparison.must_move)} weight tensors that have not changed in {self._steps} "
            f"steps{where}: {', '.join(still[:8])}. The optimizer must change all of them"
            if still
            else ""
        )
        at_end(training)
        return parity

    def _other_start(self, training: Training, reference: Training | None, where: str) -> str:
        """Describe the sharded weights of which this rank has something else than its part of what was made."""
        if reference is None or not self._is_sharded:
            return ""
        weights = zip(training.model.named_parameters(), reference.model.parameters(), strict=True)
        parts = (
            (name, local(weight.detach()), part_of(local(whole.detach()), ranks=self.count, rank=self.rank))
            for (name, weight), whole in weights
        )
        other = [name for name, mine, due in parts if not torch.equal(mine.cpu(), due.cpu())]
        return (
            f"has other weights before the first step{where} than its part of those that were made: "
            f"{', '.join(other[:8])}. Its memory or its arithmetic is wrong: {TAKE_OUT}"
            if other
            else ""
        )

    def due_rows(self, rank: int, step: int) -> torch.Tensor:
        """Return a rank's rows of a step."""
        return torch.stack([self.data[row] for row in self._rows(rank, step)])

    def _rows(self, rank: int, step: int) -> list[int]:
        return self.expected[rank][0][step * self._batch : (step + 1) * self._batch]

    def _read(self, step: int) -> torch.Tensor:
        return self.components.read(self.data, self._rows(self.rank, step)).to(self.device)

    def _step(
        self, training: Training, reference: Training, comparison: StepComparison, parity: Parity, where: str
    ) -> None:
        step, rows = len(parity.losses), self._read(len(parity.losses))
        unchanged = not step or parity.states[-1] == comparison.state()
        finite = comparison.step(
            lambda: _share(training, rows),
            lambda rank: _share(reference, self.due_rows(rank, step).to(self.device)),
            parity,
        )
        parity.states.append(comparison.state())
        due = [fingerprint([self.due_rows(rank, step)]) for rank in range(self.count)]
        found = self.ranks.gather_fingerprints(
            fingerprint([rows]), int(unchanged), parity.states[-1], comparison.copy_state()
        )
        for rank, (read, *_) in enumerate(found):
            if read != due[rank]:
                whose = f"those of {self.ranks.name(due.index(read))}" if read in due else "no rank's"
                self.defects[rank] = f"has read other rows {where} than its share: {whose}. Check how it reads its data"
            elif not finite[rank]:
                loss = parity.losses[-1]  # of this rank: only its own defect needs its text
                what = "gradients that are not finite" if math.isfinite(loss) else f"a loss of {loss}"
                self.defects[rank] = f"has {what} {where}, before any exchange, and all must be finite"
        if self.defects:
            return
        for rank, (_, kept, state, repeated) in enumerate(found):
            if not kept:
                self.defects[rank] = (
                    f"has other weights or moments {where} than it had after the step before. Its memory has changed "
                    f"by itself: {TAKE_OUT}"
                )
            elif state != repeated:
                self.defects[rank] = (
                    f"has other weights or moments {where} than when it repeats the optimizer's step: fingerprint "
                    f"{state:016x}, expected {repeated:016x}. Its memory or its arithmetic is wrong: {TAKE_OUT}"
                )
        if not self.defects and not self._is_sharded:
            self.defects |= weight_defects([state for _, _, state, _ in found], where, NOT_REDUCED)

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


def _share(training: Training, rows: torch.Tensor) -> Share:
    return float(training.accumulate([rows]).mean()), rows.shape[0] * (rows.shape[1] - 1)
