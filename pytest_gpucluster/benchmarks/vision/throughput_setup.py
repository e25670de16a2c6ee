"""The setup of an image rate: the ResNets, the parts of a training, and the result.

ResNet-18 and ResNet-50 are created by transformers with random weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from pytest_gpucluster.benchmarks.training.ddp import Replicate, replicate
from pytest_gpucluster.benchmarks.training.step import Update, optimizer_step
from pytest_gpucluster.benchmarks.vision.loader import Batches, Inspect, inspect_shared_memory
from pytest_gpucluster.errors import EnvironmentBroken
from pytest_gpucluster.metrics import stats
from pytest_gpucluster.metrics.sampling import Series
from pytest_gpucluster.metrics.units import did_you_mean

CLASSES = 1000
"""Of ImageNet's challenge, for which the geometries were made. Source: He et al., "Deep Residual Learning for Image
Recognition" (arXiv:1512.03385), table 1."""

COLOURS = 3
SMALLEST_SIDE = 28
"""Of an image, in pixels: FashionMNIST's. Each side is halved five times, rounded up."""


@dataclass(frozen=True, kw_only=True)
class Network:
    """The geometry of a ResNet.

    Attributes:
        layer: "basic", of two 3 x 3 convolutions, or "bottleneck", of 1 x 1, 3 x 3 and 1 x 1.
        depths: such layers in each of the four stages.
        widths: channels at the end of each stage.
        parameters: with 1000 classes; verified whenever one is made.

    Source: He et al. (arXiv:1512.03385), table 1; the numbers of parameters are those of torchvision.models.resnet18
    and resnet50.
    """

    layer: str
    depths: tuple[int, ...]
    widths: tuple[int, ...]
    parameters: int

    def parameters_with(self, classes: int) -> int:
        """Return the number with this number of classes: each class has a row of weights and a bias."""
        return self.parameters + (classes - CLASSES) * (self.widths[-1] + 1)


NETWORKS = {
    "resnet18": Network(layer="basic", depths=(2, 2, 2, 2), widths=(64, 128, 256, 512), parameters=11_689_512),
    "resnet50": Network(layer="bottleneck", depths=(3, 4, 6, 3), widths=(256, 512, 1024, 2048), parameters=25_557_032),
}


class ResNet(nn.Module):
    """A ResNet of transformers that takes images and gives logits, both plain tensors.

    Args:
        name: one of ``NETWORKS``.
        classes: number of classes.

    Raises:
        ValueError: there is no such network.
        ImportError: transformers is not installed.
        EnvironmentBroken: this version of transformers creates another network of the geometry.
    """

    def __init__(self, name: str, *, classes: int = CLASSES) -> None:
        super().__init__()
        if name not in NETWORKS:
            raise ValueError(f"a network is one of {', '.join(NETWORKS)}, not {name!r}{did_you_mean(name, NETWORKS)}")
        import transformers  # an extra, and slow to import

        network = NETWORKS[name]
        # Every field of the geometry: an omitted one would follow the defaults of the installed version.
        make_config: Any = transformers.ResNetConfig  # its type does not have num_labels
        config = make_config(
            num_channels=COLOURS,
            embedding_size=64,
            hidden_sizes=list(network.widths),
            depths=list(network.depths),
            layer_type=network.layer,
            hidden_act="relu",
            downsample_in_first_stage=False,
            # The 3 x 3 convolution of a bottleneck halves the image, as in torchvision ("ResNet v1.5"). It changes
            # the amount of computation, and not the number of parameters.
            downsample_in_bottleneck=False,
            num_labels=classes,
        )
        self.network = transformers.ResNetForImageClassification(config)  # type: ignore[no-untyped-call]  # as it is
        made, due = sum(weight.numel() for weight in self.parameters()), network.parameters_with(classes)
        if made != due:
            raise EnvironmentBroken(
                f"transformers {transformers.__version__} creates a {name} of {made:,} parameters for {classes} "
                f"classes, expected {due:,}. Install the version of constraints.txt"
            )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return logits, batch x classes, for images of batch x 3 x height x width."""
        logits: torch.Tensor = self.network(pixel_values=images).logits
        return logits


def make_resnet(name: str, device: torch.device, *, classes: int, seed: int) -> nn.Module:
    """Create a network in fp32 on a device, its weights in the channels-last format.

    The weights depend on the seed alone and are the same on every device: they are drawn on the CPU.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = ResNet(name, classes=classes)
    # torch's stubs do not have memory_format together with a device.
    return model.to(device=device, memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]


def outputs_of(name: str, side: int) -> int:
    """Return the number of outputs of all layers of a network for one image, side x side."""
    found = 0

    def count(_module: nn.Module, _inputs: object, output: torch.Tensor) -> None:
        nonlocal found
        found += output.numel()

    with torch.device("meta"):
        model = ResNet(name)
        for module in model.modules():
            if not list(module.children()) and not isinstance(module, nn.Identity):
                module.register_forward_hook(count)
        # Two, because one image alone has no spread to normalise by where its sides have become 1.
        model(torch.empty(2, COLOURS, side, side))
    return found // 2


LAST_STEPS = 6
"""Their mean is the loss at the end. Source: this suite's rule; the loss of one batch scatters."""

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Return the mean loss: logits of batch x classes, labels of batch."""


def class_mean(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy of a batch, in fp32 and in nats."""
    return functional.cross_entropy(logits.float(), labels)


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A training to measure, and how images are read.

    Attributes:
        network: one of ``NETWORKS``.
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
class Components:
    """The replaceable parts of such a training: tests inject a faulty one."""

    make: Callable[..., nn.Module] = make_resnet
    replicate: Replicate = replicate
    batches: Callable[..., Batches] = Batches
    loss: Loss = class_mean
    update: Update = optimizer_step
    inspect: Inspect = inspect_shared_memory


COMPONENTS = Components()


@dataclass(frozen=True, kw_only=True)
class ImageRate:
    """The result on this rank.

    Attributes:
        images_per_second: of this rank's GPU in training; a sample for each block of steps.
        data_wait: part of the time spent waiting for the next batch; a number for each block.
        losses: of this rank, step by step.
        data: name of the images.
        rows: number of images.
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
    """Return uint8 images, batch x height x width x colours, as a network's input: bf16 from -1 to 1, batch x 3 x
    height x width, channels last. Grey ones are repeated for each colour."""
    images = images.permute(0, 3, 1, 2)
    if images.shape[1] != COLOURS:
        images = images.expand(-1, COLOURS, -1, -1).contiguous(memory_format=torch.channels_last)
    # Whole numbers up to 255 are exact in bf16.
    return images.to(torch.bfloat16).div_(127.5).sub_(1.0)
