"""One rank by itself; what many ranks tell each other is in tests/acceptance/test_acceptance_vision.py."""

from __future__ import annotations

import math
import weakref
from dataclasses import replace
from functools import partial
from unittest.mock import patch

import pytest
import torch
from device_parts import device_with
from each import of_each
from torch import nn

from pytest_gpucluster.benchmarks.training import loader
from pytest_gpucluster.benchmarks.vision import throughput as module
from pytest_gpucluster.benchmarks.vision.datasets import ImageBatches, StoredImages, SyntheticImages
from pytest_gpucluster.benchmarks.vision.throughput import Setup, as_input, class_mean, image_rate
from pytest_gpucluster.device.backends import Cpu
from pytest_gpucluster.device.clock import ManualClock
from pytest_gpucluster.errors import EnvironmentBroken, InconclusiveMeasurement, WrongResult
from pytest_gpucluster.metrics.sampling import Sampling

CPU = torch.device("cpu")
SETUP = Setup(network="resnet18", batch=4, workers=0, prefetch=1)
SAMPLING = Sampling(warmup_seconds=0, window_seconds=8, longest_seconds=8, tolerance_ratio=0.01)
IMAGES = partial(SyntheticImages, 100, 28)


def small(_name, device, *, classes, seed, narrow=1):
    """A network of a few weights: what is looked at here does not depend on it."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(12, classes)).to(device)


PARTS = {"make_resnet": small}


class TimedBatches(ImageBatches):
    """The wait for a batch takes 1 s on the clock, and the step after it 3 s."""

    def __init__(self, *given, clock, seconds=(1.0, 3.0), **more):
        super().__init__(*given, **more)
        self.clock, self.seconds = clock, seconds

    def __next__(self):
        self.clock.advance(self.seconds[0])
        return super().__next__()


def timed(clock, seconds=(1.0, 3.0)):
    def loss(logits, labels):
        clock.advance(seconds[1])
        return class_mean(logits, labels)

    return {**PARTS, "ImageBatches": partial(TimedBatches, clock=clock, seconds=seconds), "class_mean": loss}


def grey(side, colours=1, labels=(0, 1)):
    stored = torch.zeros(len(labels), side, side, colours).byte(), torch.tensor(labels)
    return lambda: StoredImages("grey", lambda: stored)


def run(setup=SETUP, images=IMAGES, clock=None, components=None, **more):
    clock = clock or ManualClock()
    with patch.multiple(module, **(components or timed(clock))), device_with(clock=lambda: clock):
        return image_rate(None, CPU, setup, images, node=0, sampling=SAMPLING, **more)


def test_images_of_a_step_are_counted_over_its_time_the_wait_included():
    found = run()
    assert found.images_per_second.samples == pytest.approx([1.0] * len(found.images_per_second.samples))
    assert found.images_per_second.inconclusive == ""
    assert set(found.data_wait) == {0.25}
    assert found.data_wait_ratio == 0.25
    assert found.data == "synthetic"
    assert len(found.losses) >= module.LEAST_STEPS
    assert found.loss_ratio < 1


def test_a_slow_loader_shows_as_data_wait_and_the_loss_ratio_is_of_the_last_losses_and_the_first():
    clock = ManualClock()
    found = run(clock=clock, components=timed(clock, seconds=(9.0, 1.0)))
    assert found.data_wait_ratio == pytest.approx(0.9)
    assert found.images_per_second.median == pytest.approx(0.4)
    assert replace(found, losses=(4.0, 9.0, 9.0, 9.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0)).loss_ratio == 0.25
    assert math.isnan(replace(found, losses=(0.0, 0.0)).loss_ratio)


def test_grey_images_are_trained_on_and_the_head_is_that_of_imagenet_unless_the_data_have_more_classes():
    classes, clock = [], ManualClock()

    def make(*given, **more):
        classes.append(more["classes"])
        return small(*given, **more)

    for images in (grey(28), grey(28, labels=list(range(1001)))):
        assert run(images=images, clock=clock, components=timed(clock) | {"make_resnet": make}).data == "grey"
    assert classes == [1000, 1001]


def test_a_loss_that_is_not_finite_names_the_step():
    count = iter(range(100))
    components = {**PARTS, "class_mean": lambda *given: class_mean(*given) * (math.nan if next(count) == 2 else 1.0)}
    with pytest.raises(WrongResult, match=r"^rank 0 .*loss of.* 3, .*be finite"):
        run(clock=Moving(), components=components)


class Moving(ManualClock):
    """Each region takes a second."""

    def read(self):
        return [1.0 for _ in super().read()]


def test_a_clock_that_stands_still_is_inconclusive():
    with pytest.raises(InconclusiveMeasurement, match=r"the clock of rank 0 did not advance"):
        run(components=PARTS)


@of_each(
    "refused",
    [
        (grey(27), "images of 27 x 27 pixels in 1 colours .*28 x 28 in 1 or 3"),
        (grey(28, colours=4), "images of 28 x 28 pixels in 4 colours"),
        (grey(28, labels=(0, 0)), "the 2 images have 1 class, and at least 2"),
    ],
)
def test_images_that_cannot_be_trained_on_are_refused(refused):
    with pytest.raises(EnvironmentBroken, match=f"^{refused[1]}"):
        run(images=refused[0])


def test_a_folder_that_cannot_be_looked_at_is_an_error():
    def images():
        raise PermissionError(13, "Permission denied", "/data/train")

    with pytest.raises(EnvironmentBroken, match=r"images cannot.*: \[Errno 13\] .*: '/data/train'$"):
        run(images=images)


def test_too_little_memory_is_reported_before_anything_is_made(monkeypatch):
    monkeypatch.setattr(Cpu, "free_bytes", lambda device: 10**6)
    made = []
    message = r"rank 0: .* 4 images of 28 x 28 needs 0\.18\d GB.*--gpucluster-workload vision\.batch=2"
    with pytest.raises(EnvironmentBroken, match=message):
        run(components={"make_resnet": lambda *given, **more: made.append(1)})
    assert made == []


def test_too_small_shared_memory_is_reported_before_a_worker_is_started(monkeypatch):
    started = []
    monkeypatch.setattr(loader, "inspect_shared_memory", lambda: (1, 2**26, 2**14))
    components = {"ImageBatches": lambda *given, **more: started.append(1)}
    with pytest.raises(EnvironmentBroken, match=r"^rank 0: /dev/shm has 1\.53e-05 GiB free of 0\.0625 GiB"):
        run(setup=replace(SETUP, workers=2, prefetch=2), components=components)
    assert started == []


def test_data_that_fail_in_the_middle_and_workers_that_cannot_be_started_are_errors():
    class Failing(ImageBatches):
        taken = 0

        def __next__(self):
            Failing.taken += 1
            if Failing.taken == 4:
                raise EnvironmentBroken("n0001/13.jpg: cannot be decoded")
            return super().__next__()

    def refuse(*given, **more):
        raise OSError(24, "Too many open files")

    with pytest.raises(EnvironmentBroken, match=r"^n0001/13\.jpg: cannot.*$"):
        run(clock=Moving(), components=PARTS | {"ImageBatches": Failing})
    with pytest.raises(EnvironmentBroken, match=r"DataLoader cannot.*: \[Errno 24\]"):
        run(components=PARTS | {"ImageBatches": refuse})


def test_nothing_of_the_training_is_left_when_it_ends_and_the_choice_of_convolutions_is_as_it_was():
    made, before = [], torch.backends.cudnn.benchmark

    def make(*given, **more):
        made.append(weakref.ref(model := small(*given, **more)))
        return model

    clock = ManualClock()
    run(clock=clock, components=timed(clock) | {"make_resnet": make})
    assert [one() for one in made] == [None]
    assert torch.backends.cudnn.benchmark == before


@of_each("colours", [1, 3])
def test_images_become_bf16_from_minus_1_to_1_in_the_channels_last_format(colours):
    images = torch.zeros(2, 28, 30, colours, dtype=torch.uint8)
    images[1, 3, 5] = 255
    given = as_input(images)
    assert (given.shape, given.dtype) == ((2, 3, 28, 30), torch.bfloat16)
    assert given.is_contiguous(memory_format=torch.channels_last)
    assert given[1, :, 3, 5].tolist() == [1.0, 1.0, 1.0]
    assert given[1, :, 3, 6].tolist() == [-1.0, -1.0, -1.0]
