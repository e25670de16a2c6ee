"""Whether the steps that were timed were a training: what they have seen, and what they have left."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from pytest_gpucluster.benchmarks.ranks import Ranks
from pytest_gpucluster.benchmarks.training.fingerprint import fingerprint
from pytest_gpucluster.benchmarks.training.step import Taken, Training
from pytest_gpucluster.benchmarks.training.throughput_setup import Setup


class Evidence:
    """What is known of a training's steps, on this rank.

    Args:
        ranks: that train together.
        setup: what should be trained.
        training: that has not taken a step yet.

    Attributes:
        losses: of each step, in nats; the last step must have had the rows of the first one again.
        norms: of the gradients of each step, before they were clipped.
        tokens: that each step was trained on.
    """

    def __init__(self, ranks: Ranks, setup: Setup, training: Training) -> None:
        self._ranks, self._setup, self._training = ranks, setup, training
        self._start = _prints(training.model)
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.tokens: list[int] = []

    def add(self, taken: Sequence[Taken]) -> None:
        """Read what some steps have seen off the device."""
        self.losses += torch.cat([one.losses for one in taken]).tolist()
        self.norms += torch.stack([one.gradient_norm for one in taken]).tolist()

    def defect(self) -> str:
        """Say what is wrong with the training on this rank: "" if nothing is. Collective."""
        # In each step the loss comes before the gradients, in which all ranks have what one of them had in its loss.
        seen = [number for both in zip(self.losses, self.norms, strict=True) for number in both]
        bad = next((place for place, number in enumerate(seen) if not math.isfinite(number)), math.inf)
        first = min(place for [place] in self._ranks.gather([bad]))
        differing = self._differing()
        if first < math.inf:
            if bad > first:
                return ""
            step, of_gradients = divmod(int(first), 2)
            what = "a gradients' norm" if of_gradients else "a loss"
            return (
                f"has {what} of {seen[int(first)]:g} in step {step + 1}, and it must be finite. Repeat "
                "test_training_step there, and run the vendor's diagnostics (dcgmi diag -r 3)"
            )
        odd = {tokens for tokens in self.tokens if tokens != self._setup.tokens}
        if odd:
            return (
                f"has trained on {min(odd)} tokens in a step, and {self._setup.batch} x {self._setup.geometry.sequence}"
                " were asked for: its rate would count tokens that were not there. Look at how it reads its data"
            )
        if not self.losses[-1] < self.losses[0]:
            return (
                f"has a loss of {self.losses[-1]:.6g} after {len(self.losses)} steps on rows on which it was "
                f"{self.losses[0]:.6g} in the first step: it has learnt nothing"
            )
        counts = {int(state["step"]) for state in self._training.optimizer.state.values()}
        if counts != {len(self.losses)}:
            return (
                f"has taken {len(self.losses)} training steps, and its optimizer {min(counts, default=0)}: work was "
                "skipped, so its rate is that of something else"
            )
        weights = self._training.model.named_parameters()
        named = zip(weights, self._start, _prints(self._training.model), strict=True)
        still = [
            name.removeprefix("module.")  # that is how DistributedDataParallel calls what it wraps
            for (name, weight), old, new in named
            if old == new and _part(weight).numel()
        ]
        if still:
            return (
                f"has {len(still)} of {len(self._start)} weight tensors that have not moved in {len(self.losses)} "
                f"steps: {', '.join(still[:8])}. Each of them must"
            )
        return differing

    def _differing(self) -> str:
        """Say so where this rank's replica has other weights than most."""
        if self._setup.strategy != "ddp":
            return ""
        whole = fingerprint(self._training.model.parameters())
        told = [(high, low) for high, low in self._ranks.gather([whole >> 32, whole & (2**32 - 1)])]
        [(usual, most), *others] = Counter(told).most_common()
        if not others or (told[self._ranks.index] == usual and most > others[0][1]):
            return ""
        return (
            f"has other weights than other ranks after {len(self.losses)} steps: {len(others) + 1} kinds on "
            f"{len(told)} ranks. The gradients were not made the same on all of them: look at the all-reduce "
            "(nccl.all_reduce in this run), and at what skips it"
        )


def _part(weight: torch.Tensor) -> torch.Tensor:
    """Return what this rank has of a weight."""
    return weight.to_local() if isinstance(weight, DTensor) else weight


def _prints(model: nn.Module) -> list[int]:
    """Return the fingerprint of each weight tensor, of this rank's part if it is sharded."""
    return [fingerprint([_part(weight)]) for weight in model.parameters()]
