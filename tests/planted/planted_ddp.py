"""The faults that a data-parallel training can have."""

import math
import os
from dataclasses import replace

import torch
from torch.utils.data import DistributedSampler

from pytest_gpucluster.benchmarks.training import ddp, parity, step, step_check
from pytest_gpucluster.benchmarks.training.ddp import COMPONENTS
from pytest_gpucluster.benchmarks.training.step import PARTS, token_mean

OF_A_STEP = ("nan", "frozen", "none")
CASES = {
    "1x2": {
        "test_training_step": OF_A_STEP,
        "test_ddp": (
            *("none", "nosync", "samedata", "bit", "scaled", "scaledone"),
            *("nan", "sampler", "epoch", "frozen", "start"),
        ),
    }
}
ON_RANK_1 = os.environ["RANK"] == "1"
MAKE, NORMAL = step_check.make_decoder, step.replicate


def unsynchronized(model, device, group):
    replica = NORMAL(model, device, group)
    replica.require_backward_grad_sync = False
    return replica


def flipped(model, optimizer):
    optimizer.step()
    if ON_RANK_1:
        next(model.parameters()).detach().view(torch.int32)[3, 5] ^= 1


def frozen(*arguments, **more):
    model = MAKE(*arguments, **more)
    model.blocks[1].down.requires_grad_(False)
    return model


def read_of_rank_0(data, rows):
    others = list(DistributedSampler(data, num_replicas=2, rank=0, seed=0))
    at = list(DistributedSampler(data, num_replicas=2, rank=1, seed=0)).index(rows[0]) if ON_RANK_1 else None
    return parity.read_rows(data, others[at : at + len(rows)] if ON_RANK_1 else rows)


def overlapping(dataset, *, num_replicas, rank, **more):
    return DistributedSampler(dataset, num_replicas=num_replicas, rank=0, **more)


def unshuffled(dataset, **more):
    sampler = DistributedSampler(dataset, **more)
    sampler.set_epoch = lambda epoch: None
    return sampler


def nan(*given):
    return token_mean(*given) * (math.nan if ON_RANK_1 else 1.0)


def other(*arguments, seed, **more):
    return MAKE(*arguments, seed=seed + ON_RANK_1, **more)


def with_step(**parts):
    return replace(COMPONENTS, step=replace(PARTS, **parts))


DDP = {
    "none": COMPONENTS,
    "nosync": replace(COMPONENTS, replicate=unsynchronized),
    "samedata": replace(COMPONENTS, read=read_of_rank_0),
    "bit": with_step(update=flipped),
    "scaled": with_step(loss=lambda *given: 2 * token_mean(*given)),
    "scaledone": with_step(loss=lambda *given: (1 + 0.001 * ON_RANK_1) * token_mean(*given)),
    "nan": with_step(loss=nan),
    "sampler": replace(COMPONENTS, sampler=overlapping),
    "epoch": replace(COMPONENTS, sampler=unshuffled),
    "frozen": replace(COMPONENTS, make=frozen),
    "start": replace(COMPONENTS, make=other),
}
STEP = {"nan": replace(PARTS, loss=nan)}


def plant(fault, request):
    ddp.COMPONENTS = DDP[fault]
    step.PARTS = STEP.get(fault, PARTS) if request.node.originalname == "test_training_step" else PARTS
    step_check.make_decoder = frozen if fault == "frozen" else MAKE
