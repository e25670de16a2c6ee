"""The faults that a data-parallel training can have."""

from dataclasses import replace

import torch
from parts import ON_LAST, frozen, infinite, nan, other, plant_parity, read_of_rank_0, unsynchronized
from torch.utils.data import DistributedSampler

from pytest_gpucluster.benchmarks.training import step, step_check
from pytest_gpucluster.benchmarks.training.step import PARTS, token_mean

OF_A_STEP = ("nan", "frozen", "none")
CASES = {
    "1x2": {
        "test_training_step": OF_A_STEP,
        "test_ddp": (
            *("none", "nosync", "samedata", "bit", "scaled", "scaledone"),
            *("nan", "inf", "sampler", "epoch", "frozen", "start"),
        ),
    }
}
MAKE = step_check.make_decoder


def flipped(model, optimizer):
    optimizer.step()
    if ON_LAST:
        next(model.parameters()).detach().view(torch.int32)[3, 5] ^= 1


def overlapping(dataset, *, num_replicas, rank, **more):
    return DistributedSampler(dataset, num_replicas=num_replicas, rank=0, **more)


def unshuffled(dataset, **more):
    sampler = DistributedSampler(dataset, **more)
    sampler.set_epoch = lambda epoch: None
    return sampler


def with_step(**parts):
    return {"PARTS": replace(PARTS, **parts)}


DDP = {
    "none": {},
    "nosync": {"replicate": unsynchronized},
    "samedata": {"read_rows": read_of_rank_0},
    "bit": with_step(update=flipped),
    "scaled": with_step(loss=lambda *given: 2 * token_mean(*given)),
    "scaledone": with_step(loss=lambda *given: (1 + 0.001 * ON_LAST) * token_mean(*given)),
    "nan": with_step(loss=nan),
    "inf": with_step(loss=infinite),
    "sampler": {"DistributedSampler": overlapping},
    "epoch": {"DistributedSampler": unshuffled},
}
MADE = {"frozen": frozen, "start": other}
STEP = {"nan": replace(PARTS, loss=nan)}


def plant(fault, request):
    plant_parity(request, DDP.get(fault, {}), MADE.get(fault))
    step.PARTS = STEP.get(fault, PARTS) if request.node.originalname == "test_training_step" else PARTS
    step_check.make_decoder = frozen if fault == "frozen" else MAKE
