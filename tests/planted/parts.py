"""Faults that several trainings can have; each is the last rank's, or of the whole group."""

import math
import os

from torch.utils.data import DistributedSampler

from pytest_gpucluster.benchmarks.training import parity_check
from pytest_gpucluster.benchmarks.training.model import make_decoder
from pytest_gpucluster.benchmarks.training.parity_check import read_rows
from pytest_gpucluster.benchmarks.training.step import replicate, token_mean

RANKS = int(os.environ["WORLD_SIZE"])
ON_LAST = int(os.environ["RANK"]) == RANKS - 1


def plant_parts(request, module, **parts):
    """Put these in the place of a module's own, for one test."""
    for name, part in parts.items():
        request.getfixturevalue("monkeypatch").setattr(module, name, part)


def plant_parity(request, parts, made=None):
    """Put these in the place of the parts of a training on many ranks, but not of the one that it is compared with."""
    plant_parts(request, parity_check, **parts)
    if made:
        one = {"_make": lambda check: made(check._geometry, check._device, seed=0)}
        plant_parts(request, parity_check._Comparison, **one)


def nan(*given):
    """A loss that is no number."""
    return token_mean(*given) * (math.nan if ON_LAST else 1.0)


def infinite(logits, targets):
    """A loss whose gradients are infinite."""
    logits.register_hook(lambda gradient: gradient * (math.inf if ON_LAST else 1.0))
    return token_mean(logits, targets)


def frozen(*arguments, **more):
    """A model of which a weight never changes."""
    model = make_decoder(*arguments, **more)
    model.blocks[1].down.requires_grad_(False)
    return model


def other(*arguments, seed, **more):
    """A model that begins with other weights."""
    return make_decoder(*arguments, seed=seed + ON_LAST, **more)


def read_of_rank_0(data, rows):
    """The rows of rank 0."""
    mine, its = (list(DistributedSampler(data, num_replicas=RANKS, rank=rank, seed=0)) for rank in (RANKS - 1, 0))
    if not ON_LAST:
        return read_rows(data, rows)
    at = mine.index(rows[0])
    return read_rows(data, its[at : at + len(rows)])


def unsynchronized(model, device, group):
    """A replica whose gradients stay its own."""
    replica = replicate(model, device, group)
    replica.require_backward_grad_sync = False
    return replica
