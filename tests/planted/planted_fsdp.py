"""The faults that a sharded training can have."""

from dataclasses import replace

import torch
from parts import ON_LAST, RANKS, frozen, infinite, nan, other, plant_parity, read_of_rank_0

from pytest_gpucluster.benchmarks.training import sharding
from pytest_gpucluster.benchmarks.training.parity_check import read_rows
from pytest_gpucluster.benchmarks.training.step import PARTS, clip_gradients, token_mean

CASES = {
    "1x2": {
        "test_fsdp": (
            *("none", "nosync", "sum", "scaled", "moments"),
            *("block", "weight", "samedata", "nan", "inf", "frozen", "start"),
        ),
    },
    "2x2": {"test_fsdp": ("bit", "replay", "between")},
}


def flip(weight):
    weight.detach().to_local().view(torch.int32)[3, 5] ^= 1


def unsynchronized(model, mesh, **how):
    sharded = sharding.shard(model, mesh, **how)
    sharded.set_requires_gradient_sync(False)
    return sharded


def undivided(model):
    # As if what is summed over the ranks were not divided by their number.
    for weight in model.parameters():
        weight.grad.mul_(RANKS)
    return clip_gradients(model)


def block_left_out(model, mesh, **how):
    one, model.blocks = model.blocks[1], torch.nn.ModuleList([model.blocks[0]])
    sharding.shard(model, mesh, **how)
    model.blocks.append(one)
    return model


def weight_left_out(model, mesh, **how):
    from torch.distributed.fsdp import fully_shard

    for block in model.blocks:
        fully_shard(block, mesh=mesh, ignored_params={model.blocks[0].down.weight})
    return fully_shard(model, mesh=mesh, ignored_params={model.blocks[0].down.weight})


def flipped(model, optimizer):
    optimizer.step()
    if ON_LAST:
        flip(next(model.parameters()))


def three_moments(model, optimizer):
    optimizer.step()
    weight = next(model.parameters())
    optimizer.state[weight]["third"] = torch.zeros(weight.shape)


class Once:
    # Spoils a gradient once: neither the repeated step nor a limit can see one bit of that.
    def __init__(self):
        self.left = 1

    def __call__(self, model):
        norm = clip_gradients(model)
        if self.left and ON_LAST:
            self.left = 0
            flip(model.blocks[0].down.weight.grad)
        return norm


class Between:
    # Spoils a weight after the step is over: at the first reading of rows that follows.
    def __init__(self):
        self.model, self.calls = None, 0

    def shard(self, model, mesh, **how):
        made = sharding.shard(model, mesh, **how)
        self.model = self.model or made
        return made

    def read(self, data, rows):
        self.calls += 1
        if self.calls == 2 and ON_LAST:
            flip(next(self.model.parameters()))
        return read_rows(data, rows)


def with_step(**parts):
    return {"PARTS": replace(PARTS, **parts)}


BETWEEN = Between()
FAULTS = {
    "none": {},
    "nosync": {"shard": unsynchronized},
    "sum": with_step(clip=undivided),
    "block": {"shard": block_left_out},
    "weight": {"shard": weight_left_out},
    "bit": with_step(update=flipped),
    "replay": with_step(clip=Once()),
    "between": {"shard": BETWEEN.shard, "read_rows": BETWEEN.read},
    "moments": with_step(update=three_moments),
    "samedata": {"read_rows": read_of_rank_0},
    "scaled": with_step(loss=lambda *given: RANKS * token_mean(*given)),
    "nan": with_step(loss=nan),
    "inf": with_step(loss=infinite),
}
MADE = {"frozen": frozen, "start": other}


def plant(fault, request):
    plant_parity(request, FAULTS.get(fault, {}), MADE.get(fault))
