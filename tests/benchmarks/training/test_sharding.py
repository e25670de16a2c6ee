"""A decoder shared by FSDP2, on one rank, and which part of it a rank holds."""

from __future__ import annotations

import re

import pytest
import torch
from each import of_each
from torch.distributed.fsdp import fully_shard

from pytest_gpucluster.benchmarks.training.data import PackedTokens
from pytest_gpucluster.benchmarks.training.model import INITIAL_DEVIATION, Geometry, make_decoder, on_meta
from pytest_gpucluster.benchmarks.training.sharding import allocate, layout_defect, mesh_of, part_of, shard
from pytest_gpucluster.benchmarks.training.step import Training, without_gradient_sync

CPU = torch.device("cpu")
GEOMETRY = Geometry(layers=2, width=64, heads=4, vocab=96, sequence=16, key_heads=2)


@pytest.fixture
def mesh(group):
    """A mesh of this process alone."""
    return mesh_of(group, CPU)


def rows(count=4):
    data = PackedTokens(rows=count, sequence=GEOMETRY.sequence, vocab=GEOMETRY.vocab, seed=0)
    return torch.stack([data[row] for row in range(count)])


def test_in_bf16_products_are_bf16_and_weights_gradients_and_moments_fp32(mesh):
    model = shard(make_decoder(GEOMETRY, CPU, seed=1), mesh)
    training = Training(model, CPU, precision="own")
    assert model(rows()[:, :-1]).dtype == torch.bfloat16
    training.step([rows()])
    weight = model.blocks[0].down.weight
    moments = training.optimizer.state[weight]
    kept = {weight.dtype, weight.grad.dtype, moments["exp_avg"].dtype, moments["exp_avg_sq"].dtype}
    assert kept == {torch.float32}
    assert model.cosine.dtype == torch.float32


def test_one_that_is_made_in_parts_has_the_usual_initial_values(mesh):
    model = allocate(shard(on_meta(GEOMETRY), mesh), CPU, seed=3, rank=0)
    whole = make_decoder(GEOMETRY, CPU, seed=3)
    deviation = float(model.embedding.weight.to_local().detach().std())
    assert deviation == pytest.approx(INITIAL_DEVIATION, rel=0.05)
    assert float(model.norm.weight.to_local().detach().min()) == 1.0
    assert torch.equal(model.sine, whole.sine)
    loss = Training(model, CPU, precision="own").step([rows()]).losses
    assert float(loss) == pytest.approx(float(torch.tensor(float(GEOMETRY.vocab)).log()), rel=0.02)


def test_gradients_of_micro_batches_are_shared_with_the_last_one_only(mesh):
    model = shard(make_decoder(GEOMETRY, CPU, seed=1), mesh, precision="fp32")
    training = Training(model, CPU, precision="own")
    with without_gradient_sync(model):
        training.loss(rows()).backward()
    assert model.head.weight.grad is None  # nothing has been made of the ranks' gradients yet
    training = Training(shard(make_decoder(GEOMETRY, CPU, seed=1), mesh, precision="fp32"), CPU, precision="own")
    whole = Training(make_decoder(GEOMETRY, CPU, seed=1), CPU, precision="fp32")
    together = training.step([rows()[:2], rows()[2:]])
    assert float(together.gradient_norm) == pytest.approx(float(whole.step([rows()]).gradient_norm), rel=1e-5)


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
