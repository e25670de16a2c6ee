"""Images a second of each GPU in training, by all ranks together, and whether that training is right.

The networks are ResNet-18 and ResNet-50, which transformers creates with random weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from pytest_gpucluster.benchmarks.blocks import NO_CONTEXT
from pytest_gpucluster.benchmarks.group import Ranks
from pytest_gpucluster.benchmarks.memory_budget import releases_memory, require_free_on_all
from pytest_gpucluster.benchmarks.training.fingerprint import NOT_REDUCED, fingerprint, weight_defects
from pytest_gpucluster.benchmarks.training.loader import (
    Batches,
    needed_bytes,
    require_shared_memory,
)
from pytest_gpucluster.benchmarks.training.step import STATE_BYTES, optimizer_step, replicate
from pytest_gpucluster.benchmarks.training.throughput import SteadySteps
from pytest_gpucluster.benchmarks.vision.datasets import ImageBatches, Images
from pytest_gpucluster.device.backends import accelerator
from pytest_gpucluster.errors import EnvironmentBroken, WrongResult
from pytest_gpucluster.metrics import stats
from pytest_gpucluster.metrics.sampling import Sampling, Series
from pytest_gpucluster.metrics.time_budget import MEASURING, VERIFYING, WARM_UP, counted

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
        outputs: of all layers for one image of 224 x 224, as counted on the meta device.

    Source: He et al. (arXiv:1512.03385), table 1; the numbers of parameters are those of torchvision.models.resnet18
    and resnet50.
    """

    layer: str
    depths: tuple[int, ...]
    widths: tuple[int, ...]
    parameters: int
    outputs: int

    def outputs_with(self, side: int) -> int:
        """Estimate the outputs for one image, side x side: each side is halved five times, rounded up."""
        return math.ceil(self.outputs * (math.ceil(side / 32) * 32 / 224) ** 2)

    def parameters_with(self, classes: int) -> int:
        """Return the number with this number of classes: each class has a row of weights and a bias."""
        return self.parameters + (classes - CLASSES) * (self.widths[-1] + 1)


NETWORKS = {
    "resnet18": Network(
        layer="basic", depths=(2, 2, 2, 2), widths=(64, 128, 256, 512), parameters=11_689_512, outputs=7_478_248
    ),
    "resnet50": Network(
        layer="bottleneck",
        depths=(3, 4, 6, 3),
        widths=(256, 512, 1024, 2048),
        parameters=25_557_032,
        outputs=32_042_472,
    ),
}


_EMBEDDING = 64
"""Width of the first layer."""
_KEPT_EMBEDDING, _KEPT_BATCH = 16, 4
"""What a simulated device really has of it, and of a batch."""


class ResNet(nn.Module):
    """A ResNet of transformers that takes images and gives logits, both plain tensors.

    Args:
        name: one of ``NETWORKS``.
        classes: number of classes.
        narrow: on a simulated device, by which its widths are divided.

    Raises:
        ImportError: transformers is not installed.
        EnvironmentBroken: this version of transformers creates another network of the geometry.
    """

    def __init__(self, name: str, *, classes: int = CLASSES, narrow: int = 1) -> None:
        super().__init__()
        import transformers  # an extra, and slow to import

        network = NETWORKS[name]
        # Every field of the geometry: an omitted one would follow the defaults of the installed version.
        make_config: Any = transformers.ResNetConfig  # its type does not have num_labels
        config = make_config(
            num_channels=COLOURS,
            embedding_size=_EMBEDDING // narrow,
            hidden_sizes=[width // narrow for width in network.widths],
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
        if made != due and narrow == 1:
            raise EnvironmentBroken(
                f"transformers {transformers.__version__} creates a {name} of {made:,} parameters for {classes} "
                f"classes, expected {due:,}. Install the version of constraints.txt"
            )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return logits, batch x classes, for images of batch x 3 x height x width."""
        logits: torch.Tensor = self.network(pixel_values=images).logits
        return logits


def make_resnet(name: str, device: torch.device, *, classes: int, seed: int, narrow: int = 1) -> nn.Module:
    """Create a network in fp32 on a device, its weights in the channels-last format.

    The weights depend on the seed alone and are the same on every device: they are drawn on the CPU.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = ResNet(name, classes=classes, narrow=narrow)
    # torch's stubs do not have memory_format together with a device.
    return model.to(device=device, memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]


LAST_STEPS = 6
"""Their mean is the loss at the end. Source: this suite's rule; the loss of one batch scatters."""


def class_mean(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the mean cross entropy of a batch, in fp32 and in nats: logits of batch x classes, labels of batch."""
    return functional.cross_entropy(logits.float(), labels)


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A training to measure, and how images are read.

    Attributes:
        network: one of ``NETWORKS``.
        batch: images of each rank in a step, at least 2: one alone has no spread to normalise by, where its sides have
            become 1.
        workers: processes of each rank that read ahead; 0: the rank reads for itself.
        prefetch: batches that each of them reads ahead.
    """

    network: str
    batch: int
    workers: int
    prefetch: int


@dataclass(frozen=True, kw_only=True)
class ImageRate:
    """The result on this rank.

    Attributes:
        images_per_second: of this rank's GPU in training; a sample for each step.
        data_wait: part of the time spent waiting for the next batch; a number for each of these steps.
        losses: of this rank, step by step, those of the warm-up included.
        data: name of the images.
    """

    images_per_second: Series
    data_wait: tuple[float, ...]
    losses: tuple[float, ...]
    data: str

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


LEARNING_RATE = 1e-3

LEAST_STEPS = 16
"""A minimum, so that the loss has had time to fall. Source: this suite's rule."""

_OUTPUT_BYTES = 4
"""Kept for each output of a layer: bf16, and as much again for gradients and a convolution's workspace.
An estimate from above. Source: this suite's rule."""


@releases_memory(cycles=True)  # DistributedDataParallel and its hooks refer to each other
def image_rate(
    group: dist.ProcessGroup | None,
    device: torch.device,
    setup: Setup,
    images: Callable[[], Images],
    *,
    node: int,
    sampling: Sampling,
    during: AbstractContextManager[object] = NO_CONTEXT,
) -> ImageRate:
    """Train a ResNet with DistributedDataParallel, products in bf16 by autocast, channels last, and AdamW.

    Collective: every rank of the group must call this, with the same setup, images and sampling.

    A step takes the next batch from the loader, copies it to the device, and goes forward, backward and through the
    optimizer. Time is the device's own: it includes the device's wait for the next batch, and that part is returned.
    After some steps each the ranks exchange their results, and the first one decides for all whether more are needed,
    by the slowest rank. So all end together: the ranks at fault raise, and the others PeerGaveUp. At the end the ranks
    compare their weights.

    Args:
        group: the ranks that take part; None: this rank alone.
        device: where this rank trains.
        setup: of the training.
        images: opens the images; called on each rank, before anything else.
        node: number of this rank's node; its ranks share /dev/shm.
        sampling: how long to warm up and to measure, and the required confidence.
        during: entered for the time of the steps that count.

    Raises:
        WrongResult: on the rank at fault, or on every rank where none can be identified: a loss is not finite, or the
            ranks end with different weights.
        EnvironmentBroken: the images cannot be read, a worker died, or memory is too little, on the device or in
            /dev/shm; the ranks do not train the same.
        PeerGaveUp: another rank raises.
        InconclusiveMeasurement: a rank's clock did not advance; on all ranks.
        ImportError: transformers is missing.
    """
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True  # its convolutions for each shape, as in a training
    try:
        return _Training(group, device, setup).run(images, node, sampling, during)
    finally:
        torch.backends.cudnn.benchmark = before


FLOPS_PER_IMAGE = 3 * 2 * 3.8e9
"""Of a step with ResNet-50, forward and backward. Source: 3.8e9 multiply-adds forward, He et al. (arXiv:1512.03385)."""


@dataclass(eq=False)
class _Training:
    _group: dist.ProcessGroup | None
    _device: torch.device
    _setup: Setup

    def __post_init__(self) -> None:
        self._ranks, self._by = Ranks(self._group, self._device), accelerator(self._device)
        self._failure: EnvironmentBroken | None = None
        self._batches: Batches | None = None
        self._batch: Any = None
        self._clock = self._by.clock()
        self._losses: list[float] = []
        self._waits: list[float] = []

    def run(
        self, images: Callable[[], Images], node: int, sampling: Sampling, during: AbstractContextManager[object]
    ) -> ImageRate:
        opened, setup = self._opened(images, sampling), self._setup
        sizes = (setup.batch * math.prod(opened.shape), 8 * setup.batch)  # uint8 and int64
        needed = needed_bytes(sizes, workers=setup.workers, prefetch=setup.prefetch)
        require_shared_memory(self._ranks, node=node, needed=needed)
        self._make(opened)
        steady = SteadySteps(self._ranks, self._steps, sampling, now=self._by.now)
        try:
            self._start(opened)
            with counted(WARM_UP):
                planned = steady.warm_up()
            self._waits.clear()
            with counted(MEASURING), during:
                steady.sample(max(planned, LEAST_STEPS - len(self._losses)))
        finally:
            if self._batches is not None:
                self._batches.close()
        with counted(VERIFYING):
            weights = fingerprint(self._model.parameters())
            found = [value for [value] in self._ranks.gather_fingerprints(weights)]
            self._raise_defect(weight_defects(found, "at the end", NOT_REDUCED).get(self._ranks.index, ""))
        return ImageRate(
            images_per_second=steady.rate(setup.batch),
            data_wait=tuple(self._waits),
            losses=tuple(self._losses),
            data=opened.name,
        )

    # ---- before the first step

    def _opened(self, images: Callable[[], Images], sampling: Sampling) -> Images:
        """Open the images, and find on all ranks what would let some wait for others."""
        opened: Images | None = None
        failure: EnvironmentBroken | None = None
        try:
            opened = images()
            height, width, colours = opened.shape
            if min(height, width) < SMALLEST_SIDE or colours not in (1, COLOURS):
                raise EnvironmentBroken(
                    f"images of {height} x {width} pixels in {colours} colours cannot be trained on: at least "
                    f"{SMALLEST_SIDE} x {SMALLEST_SIDE} in 1 or {COLOURS} are needed"
                )
            if opened.classes < 2:
                raise EnvironmentBroken(
                    f"the {len(opened)} images have {opened.classes} class, and at least 2 are needed"
                )
        except EnvironmentBroken as error:
            failure = error
        except OSError as error:
            failure = EnvironmentBroken(f"the images cannot be read: {error}")
        self._ranks.raise_failure(failure)
        assert opened is not None  # or the failure has been raised
        data = f"trains on {len(opened)} images {opened.name} of {opened.classes} classes"
        self._ranks.require_same(data, opened.shape, self._setup, sampling)
        return opened

    def _make(self, images: Images) -> None:
        setup, side = self._setup, max(images.shape[:2])
        # ImageNet's head at least: the network is the same for all data, and the loss falls at once, when it learns
        # which classes occur.
        classes = max(CLASSES, images.classes)
        network = NETWORKS[setup.network]
        require_free_on_all(
            self._ranks,
            self._device,
            network.parameters_with(classes) * STATE_BYTES + setup.batch * network.outputs_with(side) * _OUTPUT_BYTES,
            f"training a {setup.network} with {setup.batch} images of {side} x {side}",
            instead=f"choose a smaller batch: --gpucluster-workload vision.batch={max(2, setup.batch // 2)}",
        )
        narrow = _EMBEDDING // self._by.kept(_EMBEDDING, _KEPT_EMBEDDING)
        self._model = make_resnet(setup.network, self._device, classes=classes, seed=0, narrow=narrow)
        self._replica = self._model
        if self._group is not None:
            self._replica = replicate(self._model, self._device, self._group)
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=LEARNING_RATE, weight_decay=0.0, fused=True)

    def _start(self, images: Images) -> None:
        """Start the workers, and wait for the first batch of every rank."""
        setup, batch = self._setup, self._by.kept(self._setup.batch, _KEPT_BATCH)
        try:
            self._batches = ImageBatches(
                images,
                batch=batch,
                workers=setup.workers if batch == setup.batch else 0,  # few images need none
                prefetch=setup.prefetch,
                rank=self._ranks.index,
                world_size=self._ranks.count,
                # Only from pinned memory can a copy overlap with the host's work.
                pinned=self._device.type == "cuda",
            )
            self._take()
        except OSError as error:
            self._failure = EnvironmentBroken(f"the workers of the DataLoader cannot be started: {error}")
        self._ranks.raise_failure(self._failure)

    # ---- steps

    def _take(self) -> Any:
        """Return the next batch. Where it fails, the last one again, until the ranks have exchanged the failure."""
        assert self._batches is not None  # they are made before the first step
        if self._failure is None:
            try:
                self._batch = next(self._batches)
            except EnvironmentBroken as error:
                self._failure = error
        return self._batch

    def _step(self, batch: Any) -> torch.Tensor:
        images, labels = (part.to(self._device, non_blocking=True) for part in batch)
        with torch.autocast(self._device.type, dtype=torch.bfloat16):
            logits = self._replica(as_input(images))
        loss = class_mean(logits, labels)
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        optimizer_step(self._model, self._optimizer)
        return loss.detach()

    def _steps(self, count: int) -> list[float]:
        """Take some steps; return the seconds of each. The ranks exchange whether they have failed.

        On a GPU the host runs ahead: a region around the wait for a batch is as long as the GPU is idle.
        """
        losses = []
        for _ in range(count):
            with self._clock.region():
                batch = self._take()
            with self._clock.region():
                losses.append(self._step(batch))
                self._by.trained(FLOPS_PER_IMAGE * self._setup.batch, self._ranks.group)
        regions = self._clock.read()
        values = torch.stack(losses).tolist()
        self._ranks.raise_failure(self._failure)
        first_bad = next((step for step, loss in enumerate(values) if not math.isfinite(loss)), count)
        # One rank's NaN is in all ranks' gradients, and so in all losses from the next step on.
        earliest = min(int(bad) for [bad] in self._ranks.gather([first_bad]))
        if earliest < count:
            self._raise_defect(
                f"has a loss of {values[earliest]} in step {len(self._losses) + earliest + 1}, and it must be finite. "
                "Repeat test_training_step and the matmul tests on its GPU"
                if first_bad == earliest
                else ""
            )
        self._losses += values
        seconds = [wait + step for wait, step in zip(regions[::2], regions[1::2], strict=True)]
        self._waits += [wait / each if each else math.nan for wait, each in zip(regions[::2], seconds, strict=True)]
        return seconds

    # ---- between the ranks

    def _raise_defect(self, defect: str) -> None:
        """Raise on the ranks with a defect of their training, and PeerGaveUp on the others."""
        name = self._ranks.name(self._ranks.index)
        self._ranks.raise_failure(WrongResult(f"{name} {defect}") if defect else None)
