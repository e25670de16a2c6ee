"""What the check of a data-parallel training finds on one rank; with two, tests/test_acceptance_ddp.py."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from pytest_gpucluster.benchmarks.training import data_parallel
from pytest_gpucluster.benchmarks.training.data_parallel import PIECES, check_data_parallel
from pytest_gpucluster.benchmarks.training.decoder import Geometry
from pytest_gpucluster.benchmarks.training.step import PARTS
from pytest_gpucluster.errors import EnvironmentBroken, WrongResult

CPU = torch.device("cpu")
GEOMETRY = Geometry(layers=1, width=64, heads=2, vocab=64, sequence=16)


@pytest.fixture
def check():
    """The check over a group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

    def run(**more):
        given = {"rank": 0, "world_size": 1, "batch": 2, "steps": 3} | more
        return check_data_parallel(dist.group.WORLD, CPU, GEOMETRY, **given)

    yield run
    gc.collect()
    dist.destroy_process_group()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_one_rank_agrees_with_itself(check, precision):
    found = check(precision=precision)
    assert (found.loss_error, found.gradient_error) == (0, 0)
    assert (len(found.losses), found.steps, found.global_batch) == (3, 3, 2)


@pytest.mark.parametrize("facts", [{"rank": 1}, {"world_size": 2}], ids=["rank", "world size"])
def test_a_group_of_other_ranks_than_the_launcher_s_is_wrong(check, facts):
    with pytest.raises(WrongResult, match=r"rank 0 is rank \d of \d to its launcher, and rank 0 of 1 in the group"):
        check(**facts)


def test_a_weight_that_changes_by_itself_is_seen(check):
    def update(model, optimizer):
        optimizer.step()
        model.module.head.weight.detach().view(torch.int32)[1, 1] ^= 1

    with pytest.raises(WrongResult, match="rank 0 has other weights after step 1 than when it repeats the optimizer's"):
        check(pieces=replace(PIECES, step=replace(PARTS, update=update)))


def test_rows_that_nobody_should_read_are_seen(check):
    def read(data, rows):
        return data_parallel.read_rows(data, rows) * 0

    with pytest.raises(WrongResult, match="rank 0 has read other rows in step 1 than its share: no rank's"):
        check(pieces=replace(PIECES, read=read))


def test_too_little_memory_is_the_environment_s_fault(check, monkeypatch):
    monkeypatch.setattr("pytest_gpucluster.benchmarks.footprint.free_bytes", lambda device: 1000)
    with pytest.raises(EnvironmentBroken, match=r"training\.width=256"):
        check()


@pytest.mark.parametrize("sizes", [{"batch": 0}, {"steps": 0}], ids=["batch", "steps"])
def test_no_rows_or_steps_are_refused(check, sizes):
    with pytest.raises(ValueError, match="batch and steps must be at least 1"):
        check(**sizes)


def test_in_bf16_other_losses_are_seen_than_in_fp32(check):
    assert check(precision="bf16").losses != check().losses


def test_an_unknown_precision_is_refused(check):
    with pytest.raises(ValueError, match="precision is one of fp32, bf16, own, not 'fp8'"):
        check(precision="fp8")


@pytest.mark.parametrize("fails", [False, True], ids=["passed", "failed"])
def test_nothing_of_the_training_stays_alive(check, fails):
    alive = []

    def replicate(model, device, group):
        replica = data_parallel.replicate(model, device, group)
        alive.append(weakref.ref(replica))
        return replica

    def update(model, optimizer):
        if fails:
            raise RuntimeError("lost")
        optimizer.step()

    kept = None
    try:
        check(pieces=replace(PIECES, replicate=replicate, step=replace(PARTS, update=update)))
    except RuntimeError as error:
        kept = error  # with its traceback, as a report keeps it
    assert (kept is not None) == fails
    assert [one() for one in alive] == [None]
