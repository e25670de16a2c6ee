"""Which part a rank holds; and a layout that is not that one is named."""

from __future__ import annotations

import re

import pytest
import torch
from each import of_each
from torch import nn
from torch.distributed.fsdp import fully_shard

from pytest_gpucluster.benchmarks.training.model import Geometry, make_decoder, on_meta
from pytest_gpucluster.benchmarks.training.sharding import clip_shards, layout_defect, mesh_of, part_of
from pytest_gpucluster.benchmarks.training.step import clip_gradients

CPU = torch.device("cpu")
GEOMETRY = Geometry(layers=2, width=64, heads=2, vocab=64, sequence=16)


@of_each("ranks", [1, 2, 3, 5, 7, 8, 64, 100])
def test_the_parts_of_all_ranks_are_the_weight(ranks):
    whole = torch.arange(3 * 61).reshape(61, 3)
    parts = [part_of(whole, ranks=ranks, rank=rank) for rank in range(ranks)]
    assert torch.equal(torch.cat(parts), whole)
    assert [part.shape for part in parts if len(part)] == [part.shape for part in torch.chunk(whole, ranks)]


def test_a_decoder_that_is_not_sharded_is_named_and_so_is_one_that_is_sharded_as_a_whole(group):
    model = make_decoder(GEOMETRY, CPU, seed=0)
    message = layout_defect(model, on_meta(GEOMETRY), ranks=1, rank=0)
    assert re.search(r"has 3 of 3 modules that fully_shard .*root, blocks\.0, blocks\.1\.", message)
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
