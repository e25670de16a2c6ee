"""What the check of a data-parallel training finds on one rank; with two, test_acceptance_training.py."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from each import of_each
from forked_ranks import on_ranks
from torch.nn.modules.module import register_module_forward_hook

from pytest_gpucluster.benchmarks.training.ddp import check_data_parallel
from pytest_gpucluster.benchmarks.training.fsdp import check_fully_sharded
from pytest_gpucluster.benchmarks.training.model import Geometry
from pytest_gpucluster.benchmarks.training.parity import Components
from pytest_gpucluster.benchmarks.training.step import PARTS, clip_gradients
from pytest_gpucluster.errors import EnvironmentBroken, WrongResult

CPU = torch.device("cpu")
GEOMETRY = Geometry(layers=1, width=64, heads=2, vocab=64, sequence=16)


@pytest.fixture
def check(group):
    """The check over a group of this process alone."""

    def run(**more):
        given = {"rank": 0, "world_size": 1, "batch": 2, "steps": 3} | more
        return check_data_parallel(group, CPU, GEOMETRY, **given)

    return run


@pytest.mark.parametrize("facts", [{"rank": 1}, {"world_size": 2}], ids=["rank", "world size"])
def test_a_group_of_other_ranks_than_the_launcher_s_is_wrong(check, facts):
    with pytest.raises(WrongResult, match=r"rank 0 is rank \d of \d .*its launcher.* 0 of 1 in the group"):
        check(**facts)


def test_too_little_memory_is_the_environment_s_fault(check, monkeypatch):
    monkeypatch.setattr("pytest_gpucluster.device.backends.Cpu.free_bytes", lambda device: 1000)
    with pytest.raises(EnvironmentBroken, match=r"training\.width=256"):
        check()


def test_in_bf16_other_losses_are_seen_than_in_fp32(check):
    assert check(precision="bf16").losses != check().losses


@pytest.mark.parametrize("bad", [1, 2, 3])
def test_a_gradient_that_is_no_number_is_in_no_step_an_agreement(check, bad):
    steps = []

    def clip(model):
        norm = clip_gradients(model)
        steps.append(norm)
        return norm * (math.nan if len(steps) == bad else 1.0)

    found = check(components=Components(step=replace(PARTS, clip=clip)))
    assert len(steps) == 3
    assert math.isnan(found.gradient)


def with_a_wrong_device(rank, bad):
    """The last rank's device is wrong in the same way each time, also when it computes another rank's share."""
    ranks, group = dist.get_world_size(), dist.group.WORLD

    def spoil(module, inputs, output):
        if isinstance(module, torch.nn.Embedding) and rank == bad:
            output.register_hook(lambda gradient: gradient * 1.1)

    register_module_forward_hook(spoil)
    groups = [dist.new_group([each]) for each in range(ranks)]
    sizes = {"batch": 2, "steps": 2}
    found = check_data_parallel(group, CPU, GEOMETRY, rank=rank, world_size=ranks, **sizes)
    sharded = check_fully_sharded(group, CPU, GEOMETRY, alone=groups[rank], **sizes)
    return [parity.gradient > 1e-3 for parity in (found, sharded.fp32, sharded.bf16)]


@of_each("case", [(3, 1, [1]), (2, 1, [0, 1])])
def test_a_device_that_is_always_wrong_is_found_by_what_its_neighbours_compute(case):
    """Of two ranks it stays open which is right: test_training_step compares each with its CPU."""
    ranks, bad, named = case
    found = on_ranks(ranks, with_a_wrong_device, bad)
    assert found == [[rank in named] * 3 for rank in range(ranks)]
