"""One training step (forward, mean loss of all tokens, backward, optimizer), and the time of each part.

The step is the same for every training criterion. Its parts, with waiting for data and for other ranks, are timed in
separate steps, so that the timing does not affect the measured ones.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from pytest_gpucluster.device.clock import Clock
from pytest_gpucluster.metrics.stats import median

T = TypeVar("T")

PRECISIONS = ("fp32", "bf16", "own")
"""fp32: all of it. bf16: products and attention in bf16 by autocast; weights, gradients and optimizer in fp32.
own: in the dtypes of the model's weights, or of its sharding."""

LARGEST_NORM = 1.0
"""Gradients above this norm are scaled down to it. Source: Brown et al., "Language Models are Few-Shot Learners"
(arXiv:2005.14165), appendix B."""

BETAS = (0.9, 0.95)
"""Source: as LARGEST_NORM."""

EPSILON = 1e-5
"""Source: Touvron et al., "Llama 2: Open Foundation and Fine-Tuned Chat Models" (arXiv:2307.09288), section 2.2.

With torch's 1e-8 AdamW moves a weight by the learning rate, in the direction of its gradient's sign, however small that
is. So the rounding of gradients near 0 grows from step to step: four steps in fp32 on an H100 were then 1.4e-4 from the
CPU's, and no limit would separate that from a fault."""

LEARNING_RATE = 1e-3

STATE_BYTES = 16
"""A weight, its gradient and both moments of AdamW, all fp32."""

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Return the mean loss of all tokens: logits of batch x positions x vocab, targets of batch x positions."""

Update = Callable[[nn.Module, torch.optim.Optimizer], None]
"""Update a model's weights from its gradients."""

Clip = Callable[[nn.Module], torch.Tensor]
"""Scale a model's gradients down to ``LARGEST_NORM`` where they are above it; return their norm before, fp32."""


def token_mean(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy of all tokens, in fp32 and in nats.

    Blocks are full, so every rank has the same number of tokens, and the mean over the ranks is that over all tokens.
    """
    return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def optimizer_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Update the weights."""
    optimizer.step()


def clip_gradients(model: nn.Module) -> torch.Tensor:
    """Clip the gradients of a model, sharded or not. Of a sharded one every rank must call this."""
    norm = nn.utils.clip_grad_norm_(model.parameters(), LARGEST_NORM)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The replaceable parts of a step: tests inject a faulty one."""

    loss: Loss = token_mean
    update: Update = optimizer_step
    clip: Clip = clip_gradients


PARTS = Parts()


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """The values of a step, left on the device so that nothing waits for it.

    Attributes:
        losses: fp32, the mean loss of each micro-batch, before the step.
        gradient_norm: fp32, of all gradients together, before they are clipped.
    """

    losses: torch.Tensor
    gradient_norm: torch.Tensor


def adamw(
    weights: Iterable[torch.Tensor], learning_rate: float, *, epsilon: float, weight_decay: float = 0.0
) -> torch.optim.AdamW:
    """Make the optimizer of every training. Without weight decay a weight changes by its gradient alone."""
    return torch.optim.AdamW(weights, lr=learning_rate, betas=BETAS, eps=epsilon, weight_decay=weight_decay, fused=True)


def accumulate(model: nn.Module, batches: Sequence[T], loss_of: Callable[[T], torch.Tensor]) -> None:
    """Add up the gradients of some micro-batches. The ranks share them once, those of all together.

    Args:
        model: wrapped for many ranks or not.
        batches: of this rank.
        loss_of: what to differentiate. Where nothing is trained, there is nothing to do.
    """
    for number, batch in enumerate(batches, start=1):
        with nullcontext() if number == len(batches) else without_gradient_sync(model):
            loss = loss_of(batch)
            if loss.requires_grad:
                loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped


class Training:
    """A model with its optimizer, AdamW.

    Args:
        model: what to train; wrapped for many ranks or not.
        device: the model's.
        precision: one of ``PRECISIONS``.
        learning_rate: constant.
        parts: of each step; by default ``PARTS`` of this module.

    """

    def __init__(
        self,
        model: nn.Module,
        device: torch.device,
        *,
        precision: str,
        learning_rate: float = LEARNING_RATE,
        parts: Parts | None = None,
    ) -> None:
        self.model = model
        self._device, self._precision, self._parts = device, precision, parts or PARTS
        trained = [weight for weight in model.parameters() if weight.requires_grad]
        self.optimizer = adamw(trained, learning_rate, epsilon=EPSILON)

    def moments(self) -> list[torch.Tensor]:
        """Return the optimizer's moments of all weights."""
        states = (self.optimizer.state[weight] for weight in self.model.parameters())
        return [moment for state in states for name, moment in state.items() if name != "step"]

    def loss(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of rows of tokens, int64, batch x (positions + 1)."""
        with torch.autocast(self._device.type, dtype=torch.bfloat16, enabled=self._precision == "bf16"):
            logits = self.model(rows[:, :-1])
        return self._parts.loss(logits, rows[:, 1:])

    def backward(self, batches: Sequence[torch.Tensor]) -> StepResult:
        """Accumulate the clipped gradients of the mean loss of some micro-batches of equal size.

        Args:
            batches: int64 on the device, each batch x (positions + 1). One process passes more than one to reproduce
                a step of many ranks.
        """
        return StepResult(losses=self.accumulate(batches), gradient_norm=self.clip())

    def accumulate(self, batches: Sequence[torch.Tensor]) -> torch.Tensor:
        """Do the same without clipping; return the mean loss of each micro-batch."""
        losses = []

        def loss_of(rows: torch.Tensor) -> torch.Tensor:
            loss = self.loss(rows)
            losses.append(loss.detach())
            return loss / len(batches)

        self.optimizer.zero_grad(set_to_none=True)
        accumulate(self.model, batches, loss_of)
        return torch.stack(losses)

    def clip(self) -> torch.Tensor:
        """Scale the gradients down to ``LARGEST_NORM``, and return their norm before. Collective, if sharded."""
        return self._parts.clip(self.model)

    def update(self) -> None:
        """Update the weights from their gradients."""
        self._parts.update(self.model, self.optimizer)

    def step(self, batches: Sequence[torch.Tensor]) -> StepResult:
        """Take one step: :meth:`backward`, then :meth:`update`."""
        result = self.backward(batches)
        self.update()
        return result


def replicate(model: nn.Module, device: torch.device, group: dist.ProcessGroup) -> nn.Module:
    """Wrap a model in DistributedDataParallel: its gradients are then the mean of all ranks'."""
    device_ids = None if device.index is None else [device.index]
    # The buffers depend on the geometry alone, so they need no exchange. torch 2.13 has another name for the option.
    known = inspect.signature(DistributedDataParallel).parameters
    buffers: dict[str, Any] = {
        next(name for name in ("forward_sync_buffers", "broadcast_buffers") if name in known): False
    }
    return DistributedDataParallel(model, device_ids=device_ids, process_group=group, **buffers)


@contextmanager
def without_gradient_sync(model: nn.Module) -> Iterator[None]:
    """Suspend the exchange of gradients between the ranks in forward and backward."""
    if isinstance(model, DistributedDataParallel):
        with model.no_sync():
            yield
    elif isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            model.set_requires_gradient_sync(True)
    else:
        yield


IN_ORDER = ("data_wait", "forward", "backward", "optimizer")
"""The consecutive parts of a step: the time in which the device is idle, or copies, until the batch is there; until the
loss; until all gradients are there, of all ranks together; clipping and AdamW. On a GPU they lie between events."""

COMMUNICATION = "exposed_communication"
"""A part of forward and backward: their difference with and without the exchange between the ranks. Waiting for a
slower rank is in it, communication that is hidden behind computing is not."""

PARTS_STEPS = 5
"""Steps in which the parts are timed, and as many without exchange."""

GATHERED_BYTES = 8
"""For each weight, where an FSDP2 model takes steps without exchange: whole in bf16, its gradient in bf16 and added up
in fp32."""


def time_parts(training: Training, batches: Iterator[torch.Tensor], clock: Clock) -> dict[str, float]:
    """Take some steps, and return the median seconds of each part in ``IN_ORDER``.

    Collective: every rank that trains must call this.
    """
    for _ in range(PARTS_STEPS):
        with clock.region():
            rows = next(batches)
        training.optimizer.zero_grad(set_to_none=True)
        with clock.region():
            loss = training.loss(rows)
        with clock.region():
            loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        with clock.region():
            training.clip()
            training.update()
    seconds = clock.read()
    return {part: median(seconds[place :: len(IN_ORDER)]) for place, part in enumerate(IN_ORDER)}


def time_without_exchange(training: Training, batches: Iterator[torch.Tensor], clock: Clock) -> float:
    """Return the median seconds of forward and backward without any exchange between the ranks.

    No rank waits for another here. The weights stay the same, and the model must not be trained any further.

    DistributedDataParallel: in ``no_sync``. FSDP2: whole weights and gradients stay on each rank, so that after the
    first of these steps there is nothing to gather; it takes ``GATHERED_BYTES`` for each weight.
    """
    if isinstance(training.model, FSDPModule):
        training.model.set_reshard_after_forward(False)
        training.model.set_reshard_after_backward(False)
    with without_gradient_sync(training.model):
        for _ in range(PARTS_STEPS + 1):
            rows = next(batches)
            training.optimizer.zero_grad(set_to_none=True)
            with clock.region():
                training.loss(rows).backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        # The first one may gather weights.
        return median(clock.read()[1:])
