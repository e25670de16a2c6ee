"""Where the time of a training step goes: waiting for data, forward, backward, optimizer, waiting for other ranks.

Measured in steps of their own, so that nothing is measured in those that count.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from pytest_gpucluster.benchmarks.clock import Clock
from pytest_gpucluster.benchmarks.training.step import Training, unshared
from pytest_gpucluster.metrics.stats import median

IN_ORDER = ("data_wait", "forward", "backward", "optimizer")
"""The parts of a step that follow each other."""

COMMUNICATION = "exposed_communication"
"""Lies inside of forward and backward."""

DEFINITIONS = {
    "data_wait": "the time in which the device has nothing to do, or copies, until the batch is there",
    "forward": "until the loss",
    "backward": "until all gradients are there, of all ranks together",
    "optimizer": "clipping of the gradients and AdamW",
    COMMUNICATION: "what forward and backward take longer than without any exchange between the ranks; waiting for a "
    "slower rank is part of it, what is hidden behind computing is not",
}
"""What each part means, for reports. On a GPU all are times of its own, between events on its stream."""

GATHERED_BYTES = 8
"""For each weight, where an FSDP2 model takes steps without exchange: whole in bf16, its gradient in bf16 and added up
in fp32."""


def time_parts(training: Training, batches: Iterator[torch.Tensor], clock: Clock, *, steps: int) -> dict[str, float]:
    """Take some steps, and return the median seconds of each part in ``IN_ORDER``.

    Collective: every rank that trains must call this, with as many steps.
    """
    for _ in range(steps):
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


def time_alone(training: Training, batches: Iterator[torch.Tensor], clock: Clock, *, steps: int) -> float:
    """Return the median seconds of forward and backward without any exchange between the ranks.

    No rank waits for another here. The weights stay as they are, and the model must not be trained any further.

    DistributedDataParallel: in ``no_sync``. FSDP2: whole weights and gradients stay on each rank, so that after the
    first of these steps there is nothing to gather; it takes ``GATHERED_BYTES`` for each weight.
    """
    with _without_exchange(training.model):
        for _ in range(steps + 1):
            rows = next(batches)
            training.optimizer.zero_grad(set_to_none=True)
            with clock.region():
                training.loss(rows).backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        # The first one may gather weights.
        return median(clock.read()[1:])


def exposed(parts: Mapping[str, float], alone_seconds: float) -> float:
    """Return the seconds that forward and backward take longer with the exchange than without; not below 0, although
    two medians that differ by nothing but chance may."""
    return max(0.0, parts["forward"] + parts["backward"] - alone_seconds)


@contextmanager
def _without_exchange(model: nn.Module) -> Iterator[None]:
    if isinstance(model, FSDPModule):
        model.set_reshard_after_forward(False)
        model.set_reshard_after_backward(False)
    with unshared(model):
        yield
