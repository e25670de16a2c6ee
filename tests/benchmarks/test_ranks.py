from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist

from pytest_gpucluster.benchmarks.ranks import Ranks


@pytest.fixture
def ranks():
    """A group of this process alone. What several ranks tell each other is tested with the collectives."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield Ranks(dist.group.WORLD, torch.device("cpu"))
    dist.destroy_process_group()


@pytest.mark.parametrize("number", [0.1, 2.0**53, math.inf, 1e-300], ids=str)
def test_numbers_arrive_as_they_were_given(ranks, number):
    ranks.barrier()
    assert ranks.gather([number, 1.0]) == [[number, 1.0]]
    assert ranks.of_first([number]) == [number]


def test_a_nan_arrives_as_one(ranks):
    assert math.isnan(ranks.gather([math.nan])[0][0])


def test_a_rank_is_named_by_its_number_in_the_world(ranks):
    assert (ranks.count, ranks.name(0)) == (1, "rank 0")


def test_without_a_group_it_is_this_rank_alone():
    ranks = Ranks(None, torch.device("cpu"))
    ranks.barrier()
    assert (ranks.count, ranks.index, ranks.name(0)) == (1, 0, "rank 0")
    assert ranks.gather([1, 2.5]) == [[1.0, 2.5]]
    assert ranks.of_first([True]) == [1.0]
