"""Products of these tests are so small that further threads only wait for each other."""

import gc

import pytest
import torch
import torch.distributed as dist

torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def frozen():
    """Keep the collections at the end of each test and benchmark from looking through torch: 0.15 CPU seconds each."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def group():
    """A group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    gc.collect()
    dist.destroy_process_group()


@pytest.fixture
def alone(group):
    return group
