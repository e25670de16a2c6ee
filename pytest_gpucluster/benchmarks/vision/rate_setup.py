"""What is trained on images and of which pieces, and what was found of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from pytest_gpucluster.benchmarks.training.data_parallel import Replicate, replicate
from pytest_gpucluster.benchmarks.training.step import Update, optimizer_step
from pytest_gpucluster.benchmarks.vision.batches import Batches
from pytest_gpucluster.benchmarks.vision.resnet import COLOURS, make_resnet
from pytest_gpucluster.benchmarks.vision.shared_memory import Look, look
from pytest_gpucluster.metrics import stats
from pytest_gpucluster.metrics.sampling import Series

LAST_STEPS = 6
"""Their mean is the loss at the end. Source: this suite's rule; the loss of one batch scatters."""

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Return the mean loss: logits of batch x classes, labels of batch."""


def class_mean(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy of a batch, in fp32 and in nats."""
    return functional.cross_entropy(logits.float(), labels)


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What is trained, and how images are read.

    Attributes:
        network: one of ``resnet.NETWORKS``.
        batch: images of each rank in a step.
        workers: processes of each rank that read ahead; 0: the rank reads for itself.
        prefetch: batches that each of them reads ahead.

    Raises: ValueError if a number is out of its range.
    """

    network: str
    batch: int
    workers: int
    prefetch: int

    def __post_init__(self) -> None:
        # One image alone has no spread to normalise by, where its sides have become 1.
        for name, least in (("batch", 2), ("workers", 0), ("prefetch", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, not {getattr(self, name)}")


@dataclass(frozen=True, kw_only=True)
class Pieces:
    """What such a training is made of. A test puts one that is broken in the place of another."""

    make: Callable[..., nn.Module] = make_resnet
    replicate: Replicate = replicate
    batches: Callable[..., Batches] = Batches
    loss: Loss = class_mean
    update: Update = optimizer_step
    look: Look = look


PIECES = Pieces()


@dataclass(frozen=True, kw_only=True)
class ImageRate:
    """What was found on this rank.

    Attributes:
        images_per_second: that this rank's GPU is trained on; a sample for each block of steps.
        data_wait: part of the time in which the next batch was waited for; a number for each block.
        losses: of this rank, step by step.
        data: name of the images.
        rows: images that there are.
        parameters: of the network.
    """

    images_per_second: Series
    data_wait: tuple[float, ...]
    losses: tuple[float, ...]
    data: str
    rows: int
    parameters: int

    @property
    def data_wait_ratio(self) -> float:
        """The median of ``data_wait``."""
        return stats.median(self.data_wait)

    @property
    def loss_ratio(self) -> float:
        """The mean of the last losses over the first one; NaN where that is 0, for then nothing can be learned."""
        last = self.losses[-LAST_STEPS:]
        return sum(last) / len(last) / self.losses[0] if self.losses[0] else math.nan


def as_input(images: torch.Tensor) -> torch.Tensor:
    """Return uint8 images, batch x height x width x colours, as a network takes them: bf16 from -1 to 1, batch x 3 x
    height x width, channels last. Grey ones are repeated for each colour."""
    images = images.permute(0, 3, 1, 2)
    if images.shape[1] != COLOURS:
        images = images.expand(-1, COLOURS, -1, -1).contiguous(memory_format=torch.channels_last)
    # Whole numbers up to 255 are exact in bf16.
    return images.to(torch.bfloat16).div_(127.5).sub_(1.0)
