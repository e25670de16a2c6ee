"""What the check of a training by all ranks finds on one rank; with more, test_acceptance_training.py."""

from __future__ import annotations

import gc
import math
import weakref
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from each import of_each
from forked_ranks import on_ranks
from torch.nn.modules.module import register_module_forward_hook

from pytest_gpucluster.benchmarks.training import parity_check, sharding
from pytest_gpucluster.benchmarks.training.model import Geometry
from pytest_gpucluster.benchmarks.training.parity_check import compare_ranks
from pytest_gpucluster.benchmarks.training.step import PARTS, clip_gradients, token_mean
from pytest_gpucluster.errors import EnvironmentBroken, WrongResult

CPU = torch.device("cpu")
GEOMETRY = Geometry(layers=1, width=64, heads=2, vocab=64, sequence=16)
SIZES = {"batch": 2, "steps": 3}


@pytest.fixture
def check(group):
    """The check over a group of this process alone."""

    def run(strategy, precision="fp32", **parts):
        with patch.multiple(parity_check, **{"PARTS": PARTS, **parts}):
            return compare_ranks(group, CPU, GEOMETRY, strategy=strategy, precision=precision, alone=group, **SIZES)

    return run


@of_each("case", [("ddp", r"training\.width=256"), ("fsdp", r"fsdp\.width=256")])
def test_too_little_memory_is_the_environment_s_fault(check, monkeypatch, case):
    strategy, remedy = case
    monkeypatch.setattr("pytest_gpucluster.device.backends.Cpu.free_bytes", lambda device: 1000)
    with pytest.raises(EnvironmentBroken, match=remedy):
        check(strategy)


@of_each("strategy", ["ddp", "fsdp"])
def test_in_bf16_other_losses_are_seen_than_in_fp32(check, strategy):
    assert check(strategy, "bf16").losses != check(strategy).losses


@pytest.mark.parametrize("bad", [1, 2, 3])
def test_a_gradient_that_is_no_number_is_in_no_step_an_agreement(check, bad):
    steps = []

    def clip(model):
        norm = clip_gradients(model)
        steps.append(norm)
        return norm * (math.nan if len(steps) == bad else 1.0)

    found = check("ddp", PARTS=replace(PARTS, clip=clip))
    assert len(steps) == 3
    assert math.isnan(found.gradient)


def test_an_algorithm_that_gives_other_bits_each_time_is_seen_in_the_replay(check):
    calls = []

    def loss(logits, targets):
        calls.append(1)
        return token_mean(logits, targets) * (1 + 1e-6 * (len(calls) == 1))

    with pytest.raises(WrongResult, match=r"rank 0 .*other weights.* 1 .*replay from"):
        check("fsdp", PARTS=replace(PARTS, loss=loss))


@pytest.mark.parametrize("fails", [False, True], ids=["passed", "failed"])
def test_nothing_of_the_training_stays_alive(check, fails):
    alive = []

    def shard(*given, **how):
        model = sharding.shard(*given, **how)
        alive.append(weakref.ref(model))
        return model

    def update(model, optimizer):
        if fails:
            raise RuntimeError("lost")
        optimizer.step()

    kept = None
    try:
        check("fsdp", shard=shard, PARTS=replace(PARTS, update=update))
    except RuntimeError as error:
        kept = error  # with its traceback, as a report keeps it
    assert (kept is not None) == fails
    gc.collect()  # FSDP's own objects refer to each other
    assert {one() for one in alive} == {None}


def with_a_wrong_device(rank, bad):
    """The last rank's device is wrong in the same way each time, also when it computes another rank's share."""
    ranks, group = dist.get_world_size(), dist.group.WORLD

    def spoil(module, inputs, output):
        if isinstance(module, torch.nn.Embedding) and rank == bad:
            output.register_hook(lambda gradient: gradient * 1.1)

    register_module_forward_hook(spoil)
    alone = [dist.new_group([each]) for each in range(ranks)][rank]
    return [
        compare_ranks(group, CPU, GEOMETRY, strategy=strategy, precision=precision, alone=alone, **SIZES).gradient
        > 1e-3
        for strategy, precision in (("ddp", "fp32"), ("fsdp", "fp32"), ("fsdp", "bf16"))
    ]


@of_each("case", [(3, 1, [1]), (2, 1, [0, 1])])
def test_a_device_that_is_always_wrong_is_found_by_what_its_neighbours_compute(case):
    """Of two ranks it stays open which is right: test_training_step compares each with its CPU."""
    ranks, bad, named = case
    found = on_ranks(ranks, with_a_wrong_device, bad)
    assert found == [[rank in named] * 3 for rank in range(ranks)]
