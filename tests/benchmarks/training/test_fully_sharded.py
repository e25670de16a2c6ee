"""What the check of a sharded training finds on one rank; with more, tests/acceptance/test_acceptance_training.py."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace

import pytest
import torch

from pytest_gpucluster.benchmarks.training import sharding
from pytest_gpucluster.benchmarks.training.fsdp import COMPONENTS, check_fully_sharded
from pytest_gpucluster.benchmarks.training.model import Geometry
from pytest_gpucluster.benchmarks.training.step import PARTS, token_mean
from pytest_gpucluster.errors import EnvironmentBroken, WrongResult

CPU = torch.device("cpu")
GEOMETRY = Geometry(layers=1, width=64, heads=2, vocab=64, sequence=16)


@pytest.fixture
def check(group):
    """The check over that group."""

    def run(**more):
        given = {"alone": group, "batch": 2, "steps": 2} | more
        return check_fully_sharded(group, CPU, GEOMETRY, **given)

    return run


def test_an_algorithm_that_gives_other_bits_each_time_is_seen_in_the_replay(check):
    calls = []

    def loss(logits, targets):
        calls.append(1)
        return token_mean(logits, targets) * (1 + 1e-6 * (len(calls) == 1))

    with pytest.raises(WrongResult, match=r"rank 0 .*other weights.* 1 .*replay from"):
        check(components=replace(COMPONENTS, step=replace(PARTS, loss=loss)))


def test_too_little_memory_is_the_environment_s_fault(check, monkeypatch):
    monkeypatch.setattr("pytest_gpucluster.device.backends.Cpu.free_bytes", lambda device: 1000)
    with pytest.raises(EnvironmentBroken, match=r"fsdp\.width=256"):
        check()


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
        check(components=replace(COMPONENTS, shard=shard, step=replace(PARTS, update=update)))
    except RuntimeError as error:
        kept = error  # with its traceback, as a report keeps it
    assert (kept is not None) == fails
    gc.collect()  # FSDP's own objects refer to each other
    assert {one() for one in alive} == {None}
