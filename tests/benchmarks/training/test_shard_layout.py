"""Which part a rank holds; and a layout that is not that one is named."""

from __future__ import annotations

import doctest
import gc

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from pytest_gpucluster.benchmarks.training import shard_layout
from pytest_gpucluster.benchmarks.training.decoder import Geometry, make_decoder, on_meta
from pytest_gpucluster.benchmarks.training.shard_layout import bytes_of, clip_shards, layout_defect, local, part_of
from pytest_gpucluster.benchmarks.training.sharding import mesh_of, shard
from pytest_gpucluster.benchmarks.training.step import clip_gradients

CPU = torch.device("cpu")
GEOMETRY = Geometry(layers=2, width=64, heads=2, vocab=64, sequence=16)


@pytest.fixture
def group():
    """A group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    gc.collect()
    dist.destroy_process_group()


def test_doctests_hold():
    assert doctest.testmod(shard_layout).failed == 0


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 7, 8, 64, 100])
def test_the_parts_of_all_ranks_are_the_weight(ranks):
    whole = torch.arange(3 * 61).reshape(61, 3)
    parts = [part_of(whole, ranks=ranks, rank=rank) for rank in range(ranks)]
    assert torch.equal(torch.cat(parts), whole)
    assert [part.shape for part in parts if len(part)] == [part.shape for part in torch.chunk(whole, ranks)]


def test_a_sharded_decoder_is_laid_out_so(group):
    model = shard(make_decoder(GEOMETRY, CPU, seed=0), mesh_of(group, CPU), precision="fp32")
    assert layout_defect(model, on_meta(GEOMETRY), ranks=1, rank=0) == ""
    assert bytes_of(model.parameters()) == 4 * GEOMETRY.parameters


def test_a_decoder_of_another_number_of_ranks_is_not(group):
    model = shard(make_decoder(GEOMETRY, CPU, seed=0), mesh_of(group, CPU), precision="fp32")
    wrong = layout_defect(model, on_meta(GEOMETRY), ranks=2, rank=0)
    assert wrong.startswith("holds (64, 64) of embedding.weight, which is (64, 64), and its part of 1/2 is (32, 64)")


def test_a_decoder_that_is_not_sharded_is_named_and_so_is_one_that_is_sharded_as_a_whole(group):
    model = make_decoder(GEOMETRY, CPU, seed=0)
    told = layout_defect(model, on_meta(GEOMETRY), ranks=1, rank=0)
    assert told.startswith("has 3 of 3 modules that fully_shard was not called for: the root, blocks.0, blocks.1.")
    fully_shard(model, mesh=mesh_of(group, CPU))
    assert layout_defect(model, on_meta(GEOMETRY), ranks=1, rank=0).startswith("has 2 of 3 modules")


@pytest.mark.parametrize("scale", [0.001, 1000.0], ids=["below", "above"])
def test_clipping_parts_gives_what_torch_gives(group, scale):
    def graded():
        model = nn.Linear(64, 64)
        random = torch.Generator().manual_seed(0)
        for weight in model.parameters():
            weight.grad = scale * torch.randn(weight.shape, generator=random)
        return model

    expected, found = graded(), graded()
    norm = clip_gradients(expected)
    assert float(clip_shards(group, CPU)(found)) == pytest.approx(float(norm), rel=1e-6)
    for one, other in zip(found.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_without_gradients_the_norm_is_0(group):
    assert float(clip_shards(group, CPU)(nn.Linear(2, 2))) == 0


def test_what_is_not_sharded_is_held_whole():
    tensor = torch.ones(3)
    assert local(tensor) is tensor
