"""The faults that a training on images can have. For speed the ResNet is a narrow one, and smaller beside a fault."""

import math
import os
import signal
from functools import partial

import torch
from parts import ON_LAST, plant_parts, unsynchronized
from planted_clock import CLOCK, plant_time
from torch import nn

from pytest_gpucluster.benchmarks.training import loader
from pytest_gpucluster.benchmarks.vision import throughput
from pytest_gpucluster.benchmarks.vision.datasets import ImageBatches
from pytest_gpucluster.benchmarks.vision.throughput import NETWORKS, Network, class_mean

CASES = {
    "1x2": {
        "test_vision_throughput[resnet18]": ("none", "nan", "nosync", "slow", "death", "shm"),
        "test_vision_data[resnet18]": ("small",),
    }
}
NETWORKS["resnet18"] = Network(
    layer="basic", depths=(1, 1, 1, 1), widths=(16, 32, 64, 128), parameters=453_576, outputs=10**6
)


def small(name, device, *, classes, seed, narrow=1):
    torch.manual_seed(seed)
    return nn.Sequential(nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(48, classes)).to(device)


class Images:
    def __init__(self, images):
        self.images, self.read = images, 0
        self.name, self.classes, self.shape = images.name, images.classes, images.shape

    def __len__(self):
        return len(self.images)

    def __getitem__(self, row):
        self.read += 1
        self.happens()
        return self.images[row]


class Dying(Images):
    def happens(self):
        if ON_LAST and self.read == 20:
            os.kill(os.getpid(), signal.SIGBUS)


class Slow(ImageBatches):
    """Comes late."""

    def __next__(self):
        CLOCK.advance(1.0)
        return super().__next__()


def of(kind, images, **more):
    return ImageBatches(kind(images), **more)


def nan(logits, labels, seen=[]):  # noqa: B006  # remembers
    seen.append(1)
    return class_mean(logits, labels) * (math.nan if ON_LAST and len(seen) == 5 else 1.0)


def little():
    return 1, 2**26, 2**20 if ON_LAST else 2**16


SMALL = {"make_resnet": small}
PARTS = {
    "none": {},
    "small": SMALL,
    "nan": SMALL | {"class_mean": nan},
    "nosync": SMALL | {"replicate": unsynchronized},
    "slow": SMALL | {"ImageBatches": Slow},
    "death": SMALL | {"ImageBatches": partial(of, Dying)},
    "shm": SMALL,
}


def plant(fault, request):
    plant_time(request)
    plant_parts(request, throughput, **PARTS[fault])
    if fault == "shm":
        plant_parts(request, loader, inspect_shared_memory=little)
