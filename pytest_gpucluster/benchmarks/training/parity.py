"""N ranks compared with one: each part of a training step of all ranks with what one process computes in its place.

A rank's share of the step, before the exchange, is compared with that of the same rows computed by itself and by two
neighbours; the exchanged gradients with the mean of the shares; clipping and the optimizer's step with those of a copy.
Each part begins with what the part before it has really left, and each step with the weights that all ranks have. So an
error shows where it arises, on the rank that makes it, and neither on the others nor in later steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from pytest_gpucluster.benchmarks.group import Ranks
from pytest_gpucluster.benchmarks.training.fingerprint import SKETCH, relative, sketch, state_fingerprint
from pytest_gpucluster.benchmarks.training.sharding import CLIP_EPSILON, local, part_of, watch_gradients
from pytest_gpucluster.benchmarks.training.step import LARGEST_NORM
from pytest_gpucluster.metrics.stats import largest

NEIGHBOURS = 2
"""Ranks that compute a rank's share besides itself: of three results the middle one is right if one rank is wrong."""


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
        share: bytes of weights and moments on this rank, over those of 1/N of each weight; NaN if each rank has all.
    """

    losses: list[float] = field(default_factory=list)
    states: list[int] = field(default_factory=list)
    finite: list[bool] = field(default_factory=list)
    loss_errors: list[float] = field(default_factory=list)
    gradient_errors: list[float] = field(default_factory=list)
    weight_errors: list[float] = field(default_factory=list)
    share: float = math.nan

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
        self._must_move = dict.fromkeys(weights, False)
        self._sums = torch.zeros(SKETCH, dtype=torch.float64, device=device)
        for model in (training.model, reference.model):
            watch_gradients(model, partial(self._add, _starts(model)))

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
        mine = self._sketched(run)
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
        return state_fingerprint(self._copies, self._optimizer)

    def state(self) -> int:
        """Return the fingerprint of this rank's part of the trained weights and of their moments.

        The moments show a gradient that was off by a bit; the weights would not: AdamW's first step depends on little
        more than the sign.
        """
        return state_fingerprint(self._trained.values(), self._training.optimizer)

    def unmoved(self) -> list[str]:
        """Name the weights whose part on this rank has had a gradient, and has not changed since the beginning: it may
        have nothing of a weight, or only rows of the embedding whose tokens did not occur."""
        return [
            name
            for name, must_move in self._must_move.items()
            if must_move
            and (name not in self._start or torch.equal(local(self._trained[name].detach()), self._start[name]))
        ]

    def _follow(self) -> None:
        """Give reference and copy the weights that the ranks have."""
        with torch.no_grad():
            for copy, (name, weight) in zip(self._copies, self._trained.items(), strict=True):
                copy.copy_(local(weight))
                local(self._others[name]).copy_(weight.full_tensor() if isinstance(weight, DTensor) else weight)

    def _vote(self, recompute: Callable[[int], Share], rank: int) -> list[float]:
        vote = self._sketched(lambda: recompute(rank))
        for name, weight in self._others.items():
            if weight.grad is not None:
                self._must_move[name] |= bool(part_of(local(weight.grad), **self._part).any())
                weight.grad = None
        return vote

    def _sketched(self, run: Callable[[], Share]) -> list[float]:
        """Return the loss of a share, its targets, and the sketch of its gradients, before the ranks exchange them."""
        self._sums.zero_()
        loss, targets = run()
        return [loss, float(targets), *self._sums.tolist()]

    def _add(self, starts: Mapping[str, int], name: str, gradient: torch.Tensor) -> None:
        self._sums.add_(sketch(gradient, starts[name]))

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
