"""One training step: forward, mean loss of all tokens, backward, optimizer. Every training criterion takes this one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

PRECISIONS = ("fp32", "bf16", "own")
"""fp32: all of it. bf16: products and attention in bf16 by autocast; weights, gradients and optimizer in fp32.
own: as the model's weights are, or as its sharding casts them."""

LARGEST_NORM = 1.0
"""Gradients above this norm are scaled down to it. Source: Brown et al., "Language Models are Few-Shot Learners"
(arXiv:2005.14165), appendix B."""

BETAS = (0.9, 0.95)
"""Source: as LARGEST_NORM."""

LEARNING_RATE = 1e-3

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Return the mean loss of all tokens: logits of batch x positions x vocab, targets of batch x positions."""

Update = Callable[[nn.Module, torch.optim.Optimizer], None]
"""Change a model's weights by its gradients."""

Clip = Callable[[nn.Module], torch.Tensor]
"""Scale a model's gradients down to ``LARGEST_NORM`` where they are above it; return their norm before, fp32."""


def token_mean(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy of all tokens, in fp32 and in nats.

    Blocks are full, so every rank has equally many tokens, and the mean over the ranks is the mean over all tokens.
    """
    return functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def optimizer_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Let the optimizer change the weights."""
    optimizer.step()


def clip_gradients(model: nn.Module) -> torch.Tensor:
    """Clip the gradients of a model, sharded or not. Of a sharded one every rank must call this."""
    norm = nn.utils.clip_grad_norm_(model.parameters(), LARGEST_NORM)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What a step is made of. A test puts one that is broken in the place of another."""

    loss: Loss = token_mean
    update: Update = optimizer_step
    clip: Clip = clip_gradients


PARTS = Parts()


@dataclass(frozen=True, kw_only=True)
class Taken:
    """What a step has seen, left on the device so that nothing waits for it.

    Attributes:
        losses: fp32, the mean loss of each micro-batch, before the step.
        gradient_norm: fp32, of all gradients together, before they are clipped.
    """

    losses: torch.Tensor
    gradient_norm: torch.Tensor


class Training:
    """A model with its optimizer, AdamW.

    There is no weight decay: what moves has moved by its gradient.

    Args:
        model: what to train; wrapped for many ranks or not.
        device: where it is.
        precision: one of ``PRECISIONS``.
        learning_rate: the same at each step.
        parts: what each step is made of; by default ``PARTS`` of this module.

    Raises: ValueError if there is no such precision.
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
        if precision not in PRECISIONS:
            raise ValueError(f"precision is one of {', '.join(PRECISIONS)}, not {precision!r}")
        self.model = model
        self._device, self._precision, self._parts = device, precision, parts or PARTS
        trained = [weight for weight in model.parameters() if weight.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=learning_rate, betas=BETAS, weight_decay=0.0, fused=True)

    def loss(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of rows of tokens, int64, batch x (positions + 1)."""
        with torch.autocast(self._device.type, dtype=torch.bfloat16, enabled=self._precision == "bf16"):
            logits = self.model(rows[:, :-1])
        return self._parts.loss(logits, rows[:, 1:])

    def backward(self, batches: Sequence[torch.Tensor]) -> Taken:
        """Leave the gradients of the mean loss of some micro-batches of equal size with the weights, clipped.

        Args:
            batches: int64 on the device, each batch x (positions + 1). More than one does what one process needs to
                stand for many ranks.
        """
        losses = []
        self.optimizer.zero_grad(set_to_none=True)
        for number, rows in enumerate(batches, start=1):
            # The ranks share the gradients once, those of all micro-batches together.
            with nullcontext() if number == len(batches) else unshared(self.model):
                loss = self.loss(rows)
                (loss / len(batches)).backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            losses.append(loss.detach())
        return Taken(losses=torch.stack(losses), gradient_norm=self.clip())

    def clip(self) -> torch.Tensor:
        """Scale the gradients down to ``LARGEST_NORM``, and return their norm before. Collective, if sharded."""
        return self._parts.clip(self.model)

    def update(self) -> None:
        """Change the weights by their gradients."""
        self._parts.update(self.model, self.optimizer)

    def step(self, batches: Sequence[torch.Tensor]) -> Taken:
        """Take one step: :meth:`backward`, then :meth:`update`."""
        taken = self.backward(batches)
        self.update()
        return taken


@contextmanager
def unshared(model: nn.Module) -> Iterator[None]:
    """Let each rank keep to itself the gradients of what goes forward and backward inside."""
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
